"""`@compiled()`: numba's `njit`, which loads code that was compiled beforehand.

`espalier compile --write` compiles the signatures in a package's list (`signatures.py`) into one file (`code_files.py`). The first call of
a function with a listed signature loads its code from the file. Other signatures, and packages without a file, are compiled in memory or
refused: see `when_missing`. This module writes nothing. A package's file is the one for its sources as they were when its first compiled
function was imported.
"""

from __future__ import annotations

import logging
import operator
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

from espalier.code_files import CodeFile, DamagedFile, find, imported_sources
from espalier.errors import NotCompiled
from espalier.signatures import FILE, accepts, text_of

log = logging.getLogger(__name__)


Accepting = Callable[[str, str], bool]
"""(listed types, called types) → whether the listed code can be used: `accepts`, or stricter."""


class Missing(Enum):
    """What a call does if there is no code for it."""

    COMPILE = "it is compiled in memory, which takes seconds"
    REFUSE = "it raises NotCompiled"


_policy = Missing.COMPILE
_files: dict[Path, CodeFile | None] = {}
"""The open file of each package that looked for one; None: there is none."""
_compiling: set[Path] = set()
"""Packages that this process compiles into a file."""


def when_missing(policy: Missing) -> None:
    """Set what calls without code do from now on, in this process."""
    global _policy
    _policy = policy


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit(nogil=True)`, which loads code that was compiled beforehand; options as in njit."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, **options)(function)
        package = package_of(function)
        if package is not None:
            imported_sources(package)
            dispatcher._cache = _Reader(dispatcher, package)  # numba looks there before it compiles
        return dispatcher

    return decorate


def package_of(function: Callable[..., Any]) -> Path | None:
    """The folder of a function's top package; None if the package has no signatures."""
    return _with_signatures(function.__module__.split(".")[0])


def open_file(package: Path) -> CodeFile | None:
    """Look for the file of a package's code, even after an earlier look. Loaded functions stay loaded."""
    code_file, faults = find(package)
    for reason in faults if code_file is None else ():
        log.warning("compiled code is not used: %s", reason)
    _files[package] = code_file
    return code_file


def ignore_file(package: Path) -> None:
    """Load no code of a package that this process compiles."""
    _compiling.add(package)
    _files[package] = None


class _Reader(NullCache):
    """numba's cache of one function. Read only."""

    def __init__(self, dispatcher: Any, package: Path) -> None:
        self._dispatcher, self._package = dispatcher, package
        self._name = f"{dispatcher.py_func.__module__}:{dispatcher.py_func.__qualname__}"
        self._listed_file: CodeFile | None = None
        self._listed_types: list[str] = []  # the types of this function's sections in that file

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for a tuple of argument types; None: numba compiles it. Raises NotCompiled."""
        called = str(sig)
        with suppress(ValueError):  # types without a text of ours have no code
            called = text_of(sig)
        # Compiled code can only call code for exactly its types.
        accepting = operator.eq if self._dispatcher.typingctx.callstack else accepts
        result = self._compiled_already(called, accepting)
        if result is None and (content := self._read(called, accepting)) is not None:
            target_context.refresh()
            result = CompileResult._rebuild(target_context, *pickle.loads(content))
        if result is not None and called != text_of(result.signature.args):
            result = result._replace(
                signature=result.signature.replace(args=sig), metadata=None
            )  # so that numba finds it for the next such call
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
        """Loaded or compiled code whose types accept the called types; None if there is none."""
        for types, result in self._dispatcher.overloads.items():
            with suppress(ValueError):
                if accepting(text_of(types), called):
                    return result
        return None

    def _read(self, called: str, accepting: Accepting) -> bytes | None:
        """The file's section whose types accept the called types; None if there is none."""
        if self._package not in _files:
            open_file(self._package)
        file = _files[self._package]
        if file is None:
            return None
        if self._listed_file is not file:
            keys = (key.partition(" ") for key in file.keys)
            self._listed_types = [types for function, _, types in keys if function == self._name]
            self._listed_file = file  # last: who sees it reads its types
        for types in self._listed_types:
            if accepting(types, called):
                try:
                    return file.read(f"{self._name} {types}")
                except (DamagedFile, OSError) as error:  # damaged since it was opened
                    log.error("compiled code is not used: %s", error)
        return None


@cache
def _say_once(message: str) -> None:
    log.warning("%s", message)


@cache
def _with_signatures(top: str) -> Path | None:
    file = getattr(sys.modules.get(top), "__file__", None)
    folder = None if file is None else Path(file).resolve().parent
    return folder if folder is not None and (folder / FILE).is_file() else None
