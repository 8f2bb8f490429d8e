"""Ctrl-C in a command whose libraries lose or change exceptions.

While they are loaded, the process ends with one line, without an exception. Later, KeyboardInterrupt is raised in any case. Imports nothing
but the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def no_interrupt_lost() -> Iterator[None]:
    """Inside, Ctrl-C has an effect even if it comes in a callback from C, out of which Python cannot raise it: it is sent again.

    LLVM calls back at the end of a compilation, of seconds, so most of those that come during one end there. And where numba loads compiled
    code it turns KeyboardInterrupt into SystemError.
    """
    former = sys.unraisablehook

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            former(unraisable)
            return
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = former
