"""Files of compiled code: their names, folders and contents.

A package has one file. Its name has a digest of everything that the code depends on: the sources, Python, numba, llvmlite, NumPy, the
processor and numba's switches. It is written once, completely, synced, and renamed. A process that has opened it can read it to the end,
even if the file is replaced or deleted.

Layout: bytes of the header (uint64, little-endian), the header's SHA-256, the header, the sections. The header is JSON: the file's name,
and for every section its offset, its bytes and its SHA-256. Knows nothing of the content of sections.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core.codegen import get_host_cpu_features
from numba.misc.appdirs import AppDirs

from espalier.hardware import Processor, baseline
from espalier.signatures import FILE, read_signatures

FOLDER = "__compiled__"
SWITCHES = ("BOUNDSCHECK", "DEBUGINFO_DEFAULT", "DISABLE_INTEL_SVML", "EXTEND_VARIABLE_LIFETIMES", "LOOP_VECTORIZE", "OPT", "SLP_VECTORIZE")
"""The settings of numba.config, besides the processor, that change numba's code."""
_START = 8 + 32
CONFIG: Any = numba.config
"""numba's switches and folders, as the environment has them."""


class DamagedFile(ValueError):
    """A file whose bytes are not those that were written."""


class Section(NamedTuple):
    """Where a section's bytes lie behind the header, and their SHA-256 in hex."""

    begin: int
    size: int
    digest: str


class CodeFile:
    """An open file of compiled code, completely checked.

    Raises OSError, and DamagedFile if a checksum does not match.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        size, start = os.fstat(self._descriptor).st_size, self._bytes(0, _START)
        length = int.from_bytes(start[:8], "little")
        header = self._bytes(_START, min(length, size))
        if hashlib.sha256(header).digest() != start[8:]:
            raise DamagedFile(f"{path}: the header is damaged")
        header_fields, self._begin = json.loads(header), _START + length
        self._sections = {key: Section(*section) for key, section in header_fields["sections"].items()}
        if header_fields["name"] != path.name:
            raise DamagedFile(f"{path}: it was written as {header_fields['name']}")
        for key in self._sections:
            self.read(key)

    @property
    def keys(self) -> Set[str]:
        return self._sections.keys()

    def read(self, key: str) -> bytes | None:
        """A section; None if there is none. Raises DamagedFile, OSError."""
        if key not in self._sections:
            return None
        section = self._sections[key]
        content = self._bytes(self._begin + section.begin, section.size)
        if hashlib.sha256(content).hexdigest() != section.digest:
            raise DamagedFile(f"{self.path}: the section {key!r} is damaged")
        return content

    def _bytes(self, begin: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, begin)


def content_of(name: str, sections: Mapping[str, bytes]) -> bytes:
    """The bytes of a file with this name and these sections."""
    section_table, begin = {}, 0
    for key, content in sections.items():
        section_table[key] = Section(begin, len(content), hashlib.sha256(content).hexdigest())
        begin += len(content)
    header = json.dumps({"name": name, "sections": section_table}).encode()
    return len(header).to_bytes(8, "little") + hashlib.sha256(header).digest() + header + b"".join(sections.values())


def find(package: Path, names: Sequence[str]) -> tuple[CodeFile | None, list[str]]:
    """The first sound file of these names in a package's folders, and the faults of damaged files before it."""
    faults: list[str] = []
    for name in names:
        for folder in folders(package):
            try:
                return CodeFile(folder / name), faults
            except FileNotFoundError:
                continue
            except (DamagedFile, OSError) as error:
                faults.append(str(error))
    return None, faults


def folders(package: Path) -> Iterator[Path]:
    """Folders for a package's file, best first: only NUMBA_CACHE_DIR if it is set; else beside the package, in the user's cache folder, or
    in a folder for temporary files that nobody else can write to.
    """
    if CONFIG.CACHE_DIR:
        yield Path(CONFIG.CACHE_DIR) / FOLDER
        return
    yield package / FOLDER
    users = AppDirs(appname="espalier", appauthor=False)
    yield Path(users.user_cache_dir) / FOLDER
    private = Path(tempfile.gettempdir()) / f"espalier-{os.getuid()}"
    with suppress(OSError):
        private.mkdir(mode=0o700, exist_ok=True)
        status = private.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:  # loading code runs it
            yield private


@cache
def names_of(package: Path) -> tuple[str, ...]:
    """Names of the files that this process can use, best first: for its processor, then for the baseline if the processor supports it.

    They have the digest of the sources at the first call, when the package's first compiled function is imported.
    """
    features = llvm.get_host_cpu_features()
    name, cpu_features = CONFIG.CPU_NAME, CONFIG.CPU_FEATURES
    if cpu_features is None:
        cpu_features = get_host_cpu_features()
    this_processor = Processor(name or llvm.get_host_cpu_name(), cpu_features)
    processors, baseline_processor = [this_processor], baseline()
    if baseline_processor is not None and all(features.get(feature[1:], False) for feature in baseline_processor.features.split(",")):
        processors.append(baseline_processor)
    digest = sources_digest(package)
    return tuple(_name_of(package, processor, digest) for processor in processors)


def _name_of(package: Path, processor: Processor, digest: str) -> str:
    switches = [str(getattr(CONFIG, switch, None)) for switch in SWITCHES]
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, np.__version__, llvm.get_process_triple()
    hashed = hashlib.sha256(repr((versions, tuple(processor), switches, digest)).encode()).hexdigest()
    return f"{package.name}-{sys.implementation.cache_tag}-{processor.name}-{hashed[:16]}"


def sources_digest(package: Path) -> str:
    """The digest of a package's sources as they are now."""
    contents = [(file, hashlib.sha256(content).hexdigest()) for file, content in sorted(sources(package).items())]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def sources(package: Path) -> dict[str, bytes]:
    """The files that the functions of a package's signatures depend on, by `package/path`. Follows names from definition to definition,
    through imports from this package and from espalier.
    """
    this_file = Path(__file__).resolve()  # resolved like the packages: a checkout may have links
    packages = {folder.name: folder for folder in (this_file.parent, package)}
    modules: dict[Path, _Module] = {}
    waiting = [tuple(function.split(":")) for function, _ in read_signatures(package)]
    seen = set(waiting)
    while waiting:
        module, name = waiting.pop()
        file = _file_of(module, packages)
        if file is None:
            continue
        if file not in modules:
            modules[file] = _Module(module, file)
        for definition in modules[file].needs(name):
            if definition not in seen:
                seen.add(definition)
                waiting.append(definition)
    contents = {file: module.content for file, module in modules.items()}
    contents |= {file: file.read_bytes() for file in (package / FILE, this_file.with_name("compiled_code.py"))}
    roots = sorted(packages.values(), key=lambda folder: -len(folder.parts))
    root_of = {file: next(folder.parent for folder in roots if file.is_relative_to(folder)) for file in contents}
    return {str(file.relative_to(root_of[file])): content for file, content in contents.items()}


class _Module:
    """The (module, name) pairs that each definition of a source file needs."""

    def __init__(self, module: str, file: Path) -> None:
        self.content, self._module = file.read_bytes(), module
        self._package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        self._imports: dict[str, list[tuple[str, str]]] = {}
        self._definitions: dict[str, list[set[str]]] = {}
        tree = ast.parse(self.content)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self._note_import(node)
            elif isinstance(node, ast.FunctionDef):
                node.returns = None
            if isinstance(node, ast.arg | ast.AnnAssign):
                node.annotation = ast.Constant(None)
        for statement in tree.body:
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            for name in _bound(statement):
                self._definitions.setdefault(name, []).append(used)

    def needs(self, name: str) -> Iterator[tuple[str, str]]:
        yield from self._imports.get(name, ())
        for used in self._definitions.get(name, ()):
            for needed_name in used:
                if needed_name in self._definitions or needed_name in self._imports:
                    yield self._module, needed_name

    def _note_import(self, node: ast.ImportFrom) -> None:
        base = self._package.split(".")[: len(self._package.split(".")) - max(node.level - 1, 0)] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            self._imports.setdefault(alias.asname or alias.name, []).extend([(module, alias.name), (f"{module}.{alias.name}", "*")])


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines, or adds to as `@overload(name)` does; `*` is every name."""
    yield "*"
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        for decorator in statement.decorator_list:
            for argument in decorator.args if isinstance(decorator, ast.Call) else ():
                yield from (node.id for node in ast.walk(argument) if isinstance(node, ast.Name))


def _file_of(module: str, packages: Mapping[str, Path]) -> Path | None:
    """The source file of a module in some packages; None if there is none."""
    top, *names = module.split(".")
    if top not in packages:
        return None
    path = packages[top].joinpath(*names)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
