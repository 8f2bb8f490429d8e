"""Ctrl-C while a command loads its libraries, some of which lose exceptions: the process ends with one line, without an exception.

Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def begin_loading() -> None:
    """From now on Ctrl-C ends the process. Changes nothing in a program that handles or ignores Ctrl-C itself, and in other threads."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end)


def end_loading() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(sys.stderr.fileno(), b"Interrupted.\n")
    os._exit(INTERRUPTED)
