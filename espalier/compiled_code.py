"""`@compiled()`: numba's `njit` with a cache on disk that knows which sources the code was made of, and for which arguments.

numba compiles called functions into their callers, but looks for changes in the caller's own file alone: after an update it would run code
of two releases. And it numbers the files of a function and keeps the numbers in an index: of two processes that compile the function for
other arguments at the same time, one may later run the other's code, which ends in a crash. Here the name of a file has a digest of the
function's file and of all files of the project that it imports, directly or not, and one of the arguments' types, the processor and the
version of numba; there is no index. Inside the files, numba numbers what it compiled, from 1 in every process; here each process begins
at a random number, see `number_anew`, and one that compiled something before this module was imported keeps nothing. So releases,
processors and processes that share a folder never take each other's code. Files lie where numba keeps them: beside the source, in
NUMBA_CACHE_DIR, or in the user's cache folder. What cannot be read or written there is compiled, and a warning says so.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import njit, types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

log = logging.getLogger(__name__)

KEPT = 4
"""States of a source file whose compiled code is kept."""
_NAME = re.compile(r"(?P<source>[^.]+)\..*-(?P<digest>[0-9a-f]{16})(\.[0-9a-f]+)?\.nb[ci]")
_OWN_PACKAGE = Path(__file__).parent


def number_anew() -> None:
    """Let the numbers in the names of what this process compiles begin at a random one below 2^63.

    numba tells apart functions that have one name and the same arguments but close over other things, such as the parts of its sort and
    of its argsort, by a number alone. Code on disk keeps the numbers of the process that compiled it, and of two functions with one
    name a process links the first that it loads, so equal numbers of two processes make a third one sort where it should order.
    """
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(63))


KEEPS = next(FunctionIdentity._unique_ids) == 1
"""Whether nothing was compiled before: numba shares its sort's parts, with their low numbers, among all that it compiles later."""
number_anew()
os.register_at_fork(after_in_child=number_anew)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit(nogil=True)` with a cache on disk; options as njit's."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, **options)(function)
        if not KEEPS:
            warn_once("compiled code is not kept: this process compiled something with numba before it imported espalier")
            return dispatcher
        try:
            dispatcher._cache = _Cache(function)  # what `cache=True` does, with numba's own class
        except RuntimeError as error:
            warn_once(f"compiled code is not kept, name a folder that may be written in NUMBA_CACHE_DIR: {error}")
        else:
            forget(Path(dispatcher._cache.cache_path))
        return dispatcher

    return decorate


@cache
def sources_digest(file: Path) -> str:
    """16 hex digits of a source file and of those that it imports from its own top package and from this one, directly or not."""
    top = _top_package(file)
    found, waiting = {file}, [file]
    while waiting:
        for imported in _imported(waiting.pop(), (top, _OWN_PACKAGE)):
            if imported not in found:
                found.add(imported)
                waiting.append(imported)
    contents = sorted((one.name, one.read_bytes()) for one in found)
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


@cache
def forget(folder: Path) -> None:
    """Delete the code of old states of sources from a folder of numba's cache, all but the newest KEPT of each source file.

    Processes that use them go on: numba compiles what it does not find.
    """
    states: dict[str, dict[str, list[Path]]] = {}
    for path in folder.iterdir():
        if name := _NAME.match(path.name):
            states.setdefault(name["source"], {}).setdefault(name["digest"], []).append(path)
    for of_source in states.values():
        for paths in sorted(of_source.values(), key=lambda paths: max(map(_modified, paths)))[:-KEPT]:
            for path in paths:
                with suppress(OSError):  # another process deletes it, or it is another user's
                    path.unlink()


class _CacheFiles(CompileResultCacheImpl):
    """Names of a function's files."""

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        base = super().get_filename_base(fullname, abiflags)  # type: ignore[no-untyped-call]
        return f"{base}-{sources_digest(Path(self.locator._py_file))}"


class _CodeFiles(IndexDataCacheFile):
    """The code of a function, a file for each key: the types of the arguments, the processor and the function's own bytes."""

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(_name_of(self._data_name_pattern, key))  # type: ignore[no-untyped-call]
        except FileNotFoundError:
            return None

    def save(self, key: Any, data: Any) -> None:
        self._save_data(_name_of(self._data_name_pattern, key), data)  # type: ignore[no-untyped-call]


def _name_of(pattern: str, key: Any) -> str:
    """key: the types of the arguments first."""
    content = numba.__version__, key, [*_named_tuples(key[0])]
    return pattern.replace("{number:d}", hashlib.sha256(repr(content).encode()).hexdigest()[:24])


def _named_tuples(arguments: Any) -> Iterator[str]:
    """What a type's text leaves out of the named tuples in it: two classes may have one name."""
    for one in arguments:
        if isinstance(one, types.BaseNamedTuple):
            yield f"{one.instance_class.__module__}.{one.instance_class.__qualname__}{one.instance_class._fields}"  # type: ignore[attr-defined]
        if isinstance(one, types.BaseTuple):
            yield from _named_tuples(one.types)  # type: ignore[attr-defined]


class _Cache(FunctionCache):
    """Numba's, for which a damaged file or a full disk would end the program."""

    _impl_class = _CacheFiles

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        kept = self._cache_file
        self._cache_file = _CodeFiles(kept._cache_path, self._impl.filename_base, kept._source_stamp)  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # of a file that a crash of the machine has torn, almost anything
            log.warning("%s is compiled anew: its code on disk cannot be read (%s: %s)", self._name, type(error).__name__, error)
            return None  # what is compiled takes the file's place

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            warn_once(f"compiled code is not kept: {error}")


@cache
def warn_once(message: str) -> None:
    log.warning("%s", message)


def _modified(path: Path) -> float:
    """Seconds; 0 where another process has deleted it meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _top_package(file: Path) -> Path:
    folder = file.parent
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder


@cache
def _imported(file: Path, packages: tuple[Path, ...]) -> frozenset[Path]:
    """The files of some top packages that a file imports, wherever in it."""
    found: list[Path] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found += [path for alias in node.names for path in _files_of(alias.name, packages)]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                module = [*_files_of(f"{node.module}.{alias.name}", packages)]
                found += module or _files_of(node.module, packages)
    return frozenset(found)


def _files_of(module: str, packages: tuple[Path, ...]) -> Iterator[Path]:
    for package in packages:
        top, *names = module.split(".")
        path = package.joinpath(*names)
        if top == package.name:
            yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())
