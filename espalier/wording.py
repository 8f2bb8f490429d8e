"""How messages name what the caller can change: options on the command line, arguments in Python.

    option("out")            --out         out
    option("time", "file")   --time file   time="file"

Code that a command and a function of the API share spells its messages so. Each thread has its own caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_caller: ContextVar[Literal["trainer", "command", "python"]] = ContextVar("caller", default="trainer")


@contextmanager
def in_python() -> Iterator[None]:
    """Inside, messages are for somebody who called a function. Also a decorator of such functions."""
    token = _caller.set("python")
    try:
        yield
    finally:
        _caller.reset(token)


@contextmanager
def without_configuration() -> Iterator[None]:
    """Inside, messages name no keys of a configuration. Also a decorator."""
    token = _caller.set("python" if _caller.get() == "python" else "command")
    try:
        yield
    finally:
        _caller.reset(token)


def either(command_line: str, python: str) -> str:
    """The words for the caller."""
    return python if _caller.get() == "python" else command_line


def configured(keys: str, others: str = "") -> str:
    """Words about keys of the configuration, or others if the caller has none."""
    return keys if _caller.get() == "trainer" else others


def option(name: str, value: str | None = None) -> str:
    """An option, with a value of it."""
    return either(f"--{name}", name) if value is None else either(f"--{name} {value}", f'{name}="{value}"')
