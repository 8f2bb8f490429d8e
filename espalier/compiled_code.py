"""`@compiled()`: numba's `njit`, with code that was compiled beforehand and is only read here.

`espalier compile --write` compiles the signatures that a package has written down (`signatures.py`) into one file
(`code_files.py`). The first call of a function with types of such a signature loads its code from there. Other types, and packages without
a file, are compiled in memory, or refused, as `when_missing` says. Nothing is written here. A package's file is the one for the sources as
they were when its first compiled function was imported.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult

from espalier.code_files import CodeFile, DamagedFile, find, names_of
from espalier.errors import NotCompiled
from espalier.signatures import FILE, accepts, text_of

log = logging.getLogger(__name__)


Accepting = Callable[[str, str], bool]
"""`accepts`, or a stricter one."""


class Missing(Enum):
    """What happens to a call for which there is no code."""

    COMPILE = "it is compiled in memory, which takes seconds"
    REFUSE = "it raises NotCompiled"


_policy = Missing.COMPILE
_files: dict[Path, CodeFile | None] = {}
"""The open file of each package that was asked for one."""
_compiling: set[Path] = set()
"""Packages that this process compiles, to write them down."""


def when_missing(policy: Missing) -> None:
    """What calls without code do from now on, in this process."""
    global _policy
    _policy = policy


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit(nogil=True)`, whose code is loaded if it was compiled beforehand; options as njit's."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, **options)(function)
        package = package_of(function)
        if package is not None:
            names_of(package)
            dispatcher._cache = _Reader(dispatcher, package)  # numba looks there before it compiles
        return dispatcher

    return decorate


def package_of(function: Callable[..., Any]) -> Path | None:
    """The folder of a function's top package; None where that has no signatures."""
    return _with_signatures(function.__module__.split(".")[0])


def open_file(package: Path) -> CodeFile | None:
    """Look for the file of a package's code, again. Functions that are loaded already stay."""
    found, wrong = find(package, names_of(package))
    for reason in wrong:
        log.warning("compiled code is not used: %s", reason)
    _files[package] = found
    return found


def ignore_file(package: Path) -> None:
    """Load nothing of a package, which this process compiles."""
    _compiling.add(package)
    _files[package] = None


class _Reader(NullCache):
    """numba's cache of one function, which is never written to."""

    def __init__(self, dispatcher: Any, package: Path) -> None:
        self._dispatcher, self._package = dispatcher, package
        self._name = f"{dispatcher.py_func.__module__}:{dispatcher.py_func.__qualname__}"
        self._listed: tuple[CodeFile, list[str]] | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for a tuple of types; None: numba compiles it. Raises NotCompiled."""
        called = str(sig)
        with suppress(ValueError):  # one that has no text of ours, and no code
            called = text_of(sig)
        accepting = _is if self._dispatcher.typingctx.callstack else accepts  # compiled code can only call what has its very types
        result = self._compiled_already(called, accepting)
        if result is None and (content := self._read(called, accepting)) is not None:
            target_context.refresh()
            result = CompileResult._rebuild(target_context, *pickle.loads(content))
        if result is not None and called != text_of(result.signature.args):
            result = result._replace(
                signature=result.signature.replace(args=sig), metadata=None
            )  # which numba finds for the next such call
        if result is not None:
            return result
        if _policy is Missing.REFUSE:
            raise NotCompiled(f"no compiled code for {self._name} {called}: it belongs into {self._package / FILE}")
        if self._package not in _compiling and _files[self._package] is None:
            _say_once(
                f"{self._package.name} is compiled in memory, function by function, which takes seconds each: "
                "`espalier compile --write` would keep the code"
            )
        return None

    def _compiled_already(self, called: str, accepting: Accepting) -> Any:
        """What is loaded or compiled for types that accept others."""
        for types, result in self._dispatcher.overloads.items():
            with suppress(ValueError):
                if accepting(text_of(types), called):
                    return result
        return None

    def _read(self, called: str, accepting: Accepting) -> bytes | None:
        """The content of a section for types that accept others."""
        if self._package not in _files:
            open_file(self._package)
        file = _files[self._package]
        if file is None:
            return None
        if self._listed is None or self._listed[0] is not file:
            self._listed = file, [types for function, _, types in (key.partition(" ") for key in file.keys) if function == self._name]
        for types in self._listed[1]:
            if accepting(types, called):
                try:
                    return file.read(f"{self._name} {types}")
                except (DamagedFile, OSError) as error:  # since it was opened
                    log.error("compiled code is not used: %s", error)
        return None


def _is(listed: str, called: str) -> bool:
    return listed == called


@cache
def _say_once(message: str) -> None:
    log.warning("%s", message)


@cache
def _with_signatures(top: str) -> Path | None:
    file = getattr(sys.modules.get(top), "__file__", None)
    folder = None if file is None else Path(file).resolve().parent
    return folder if folder is not None and (folder / FILE).is_file() else None
