"""How messages name what the caller can change: options on the command line, arguments in Python.

    option("out")            --out         out
    option("time", "file")   --time file   time="file"

Code that a command and a function of the API share spells its messages so. Each thread has its own caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_python: ContextVar[bool] = ContextVar("is_python", default=False)


@contextmanager
def in_python() -> Iterator[None]:
    """Inside, messages are for somebody who called a function. Also a decorator of such functions."""
    token = _is_python.set(True)
    try:
        yield
    finally:
        _is_python.reset(token)


def either(command_line: str, python: str) -> str:
    """The words for the caller."""
    return python if _is_python.get() else command_line


def option(name: str, value: str | None = None) -> str:
    """An option, with a value of it."""
    return either(f"--{name}", name) if value is None else either(f"--{name} {value}", f'{name}="{value}"')
