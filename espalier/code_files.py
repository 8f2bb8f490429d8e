"""Files of compiled code: their names, folders and contents.

A package has one file. Its name has a digest of everything that the code depends on: Python, numba, llvmlite, NumPy, the processor and
numba's switches, and then one of the sources. It is written once, completely, synced, and renamed. A process that has opened it can read it
to the end, even if the file is replaced or deleted.

Layout: bytes of the header (uint64, little-endian), the header's SHA-256, the header, the sections. The header is JSON: the file's name,
the SHA-256 of every source file that the code depends on (`compile.py`), and for every section its offset, its bytes and its SHA-256.
Knows nothing of the content of sections.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core.codegen import get_host_cpu_features
from numba.misc.appdirs import AppDirs

from espalier.hardware import Processor, baseline
from espalier.signatures import FILE

FOLDER = "__compiled__"
SWITCHES = ("BOUNDSCHECK", "DEBUGINFO_DEFAULT", "DISABLE_INTEL_SVML", "EXTEND_VARIABLE_LIFETIMES", "LOOP_VECTORIZE", "OPT", "SLP_VECTORIZE")
"""The settings of numba.config, besides the processor, that change numba's code."""
_START = 8 + 32
CONFIG: Any = numba.config
"""numba's switches and folders, as the environment has them."""


class DamagedFile(ValueError):
    """A file whose bytes are not those that were written."""


class OtherSources(ValueError):
    """A file whose code is of other sources than those of this process."""


class CodeFile:
    """An open file of compiled code, completely checked.

    sources: SHA-256 of the sources of this process by name; None: the code may be of any sources. Raises OSError, DamagedFile if a checksum
    does not match, and OtherSources.
    """

    def __init__(self, path: Path, sources: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        size, start = os.fstat(self._descriptor).st_size, self._bytes(0, _START)
        length = int.from_bytes(start[:8], "little")
        header = self._bytes(_START, min(length, size))
        if hashlib.sha256(header).digest() != start[8:]:
            raise DamagedFile(f"{path}: the header is damaged")
        header_fields, self._begin = json.loads(header), _START + length
        self._sections: dict[str, tuple[int, int, str]] = header_fields["sections"]
        if header_fields["name"] != path.name:
            raise DamagedFile(f"{path}: it was written as {header_fields['name']}")
        if sources is not None and not header_fields["sources"].items() <= sources.items():
            raise OtherSources(str(path))
        for key in self._sections:
            self.read(key)

    @property
    def keys(self) -> Set[str]:
        return self._sections.keys()

    def read(self, key: str) -> bytes | None:
        """A section; None if there is none. Raises DamagedFile, OSError."""
        if key not in self._sections:
            return None
        begin, size, digest = self._sections[key]
        content = self._bytes(self._begin + begin, size)
        if hashlib.sha256(content).hexdigest() != digest:
            raise DamagedFile(f"{self.path}: the section {key!r} is damaged")
        return content

    def _bytes(self, begin: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, begin)


def content_of(name: str, sources: Mapping[str, str], sections: Mapping[str, bytes]) -> bytes:
    """The bytes of a file with this name, these SHA-256 of sources and these sections."""
    section_table, begin = {}, 0
    for key, content in sections.items():
        section_table[key] = begin, len(content), hashlib.sha256(content).hexdigest()
        begin += len(content)
    header = json.dumps({"name": name, "sources": dict(sources), "sections": section_table}).encode()
    return len(header).to_bytes(8, "little") + hashlib.sha256(header).digest() + header + b"".join(sections.values())


def find(package: Path) -> tuple[CodeFile | None, list[str]]:
    """The best file of a package's folders that this process can use, and the faults of damaged files before it."""
    sources, faults = imported_sources(package), list[str]()
    for beginning in name_beginnings(package):
        for folder in folders(package):
            for path in sorted(folder.glob(f"{beginning}-*")):
                try:
                    return CodeFile(path, sources), faults
                except (FileNotFoundError, OtherSources):
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
def name_beginnings(package: Path) -> tuple[str, ...]:
    """How the names of files begin that this process can use, best first: for its processor, then for the baseline if the processor
    supports it. A digest of the sources follows.
    """
    features = llvm.get_host_cpu_features()
    name, cpu_features = CONFIG.CPU_NAME, CONFIG.CPU_FEATURES
    if cpu_features is None:
        cpu_features = get_host_cpu_features()
    this_processor = Processor(name or llvm.get_host_cpu_name(), cpu_features)
    processors, baseline_processor = [this_processor], baseline()
    if baseline_processor is not None and all(features.get(feature[1:], False) for feature in baseline_processor.features.split(",")):
        processors.append(baseline_processor)
    return tuple(_name_beginning(package, processor) for processor in processors)


def _name_beginning(package: Path, processor: Processor) -> str:
    switches = [str(getattr(CONFIG, switch, None)) for switch in SWITCHES]
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, np.__version__, llvm.get_process_triple()
    hashed = hashlib.sha256(repr((versions, tuple(processor), switches)).encode()).hexdigest()
    return f"{package.name}-{sys.implementation.cache_tag}-{processor.name}-{hashed[:16]}"


def whole_name(beginning: str, sources: Mapping[str, str]) -> str:
    """The name of the file of these sources, by name with their SHA-256."""
    return f"{beginning}-{hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:16]}"


@cache
def imported_sources(package: Path) -> Mapping[str, str]:
    """SHA-256 of all sources of espalier and a package at the first call, when the package's first compiled function is imported; by
    `package/path`.
    """
    digests: dict[str, str] = {}
    for root in {Path(__file__).resolve().parent, package}:  # resolved like the packages: a checkout may have links
        for file in (*root.rglob("*.py"), root / FILE):
            with suppress(OSError):  # an editor's lock, or a file that is being replaced
                digests[str(file.relative_to(root.parent))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests
