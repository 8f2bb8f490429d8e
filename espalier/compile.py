"""`espalier compile --check | --write`: compiles the installed packages' functions beforehand, and says whether that was done.

As many processes as there are cores share the signatures of a package. All code of a package goes into one file (`code_files.py`), under a
lock: a second process waits and finds the file. `make_ready` does this for a service before it serves. `--baseline` runs a process that
sets another processor for numba before it imports numba.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gc
import hashlib
import importlib.util
import itertools
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

from numba.core.bytecode import FunctionIdentity
from numba.core.serialize import dumps

from espalier.code_files import (
    CodeFile,
    DamagedFile,
    content_of,
    find,
    folders,
    imported_sources,
    name_beginnings,
    whole_name,
)
from espalier.compiled_code import Missing, ignore_file, open_file, when_missing
from espalier.durable import atomic_write, flush
from espalier.errors import MissingExtra
from espalier.file_lock import try_lock
from espalier.hardware import baseline, compile_for, cores
from espalier.siblings import sibling
from espalier.signatures import FILE, function_of, read_signatures, types_of

log = logging.getLogger("espalier.compile")

PACKAGES = ("espalier", sibling("training"))
KEPT_FILES = 4
"""Number of newest files of a package that stay in a folder. A process that has an older file open can still read it."""
PR_SET_PDEATHSIG = 1

PATIENCE_S = 600.0
"""Longest wait for another process that compiles into the same folder: that process may be stopped, or its host may be gone."""
POLL_S = 0.2


class CompilationFailed(Exception):
    """A process that compiles ended early."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m espalier.compile") -> int:
    """Returns the exit code: 0 if the compiled code of all packages is complete and sound."""
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="say what is missing")
    mode.add_argument("--write", action="store_true", help="compile what is missing")
    parser.add_argument("--baseline", action="store_true", help="for all usual processors of this kind of machine, as images are")
    parser.add_argument("packages", nargs="*", help=f"default: those of {' and '.join(PACKAGES)} that can be imported")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.baseline:
        processor = baseline()
        if processor is None:
            print("--baseline: there is none for this kind of machine", file=sys.stderr)
            return 1
        compile_for(processor)
        # numba reads this when it is imported, which this package has done already.
        command = [sys.executable, "-m", "espalier.compile", "--check" if options.check else "--write", *options.packages]
        return subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode
    folders = {name: _installed(name) for name in options.packages or PACKAGES}
    unknown = [name for name in options.packages if folders[name] is None]
    for name in unknown:
        print(f"{name}: no package with signatures that can be imported", file=sys.stderr)
    packages = [package for package in folders.values() if package is not None]
    without_code = [package for package in packages if not (_has_code(package) or (options.write and _write(package)))]
    for package in without_code:
        print(f"{package.name}: no complete and sound file of compiled code", file=sys.stderr)
    return 1 if without_code or unknown else 0


def make_ready(name: str = "espalier") -> None:
    """Open the compiled code of a package, or compile it, and refuse to compile from then on. For a process that will serve."""
    package = _installed(name)
    if package is None:
        raise ModuleNotFoundError(f"no package {name!r} with signatures")
    if open_file(package) is None:
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "espalier.compile", "--write", name], check=False, preexec_fn=end_with_parent)
        if open_file(package) is None:
            log.warning("no compiled code was kept, for the reasons above, so it compiles in memory; NUMBA_CACHE_DIR may name a folder")
            for function, types in read_signatures(package):
                function_of(function).compile(types_of(types))
        log.info("compiled %s in %.0f s", name, time.monotonic() - started)
    when_missing(Missing.REFUSE)


def _installed(name: str) -> Path | None:
    """The folder of a package; None if it has no signatures, or their modules cannot be imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / FILE).is_file():
        return None
    package = Path(spec.origin).resolve().parent
    imported_sources(package)  # as they are before they are imported
    try:
        for module in sorted({function.partition(":")[0] for function, _ in read_signatures(package)}):
            importlib.import_module(module)
    except (ModuleNotFoundError, MissingExtra) as error:
        log.debug("%s is not installed: %s", name, error)
        return None
    return package


def _has_code(package: Path) -> bool:
    """Whether there is a complete and sound file that this process can use."""
    code_file, faults = find(package)
    for reason in faults:
        log.info("%s", reason)
    if code_file is not None:
        log.info("%s: %s", package.name, code_file.path)
    return code_file is not None


def needed_sources(package: Path) -> dict[str, str]:
    """SHA-256 of the files on which the functions of a package's signatures depend, by `package/path`: their modules, and all modules of
    the package and of espalier from which these import.
    """
    folders = {folder.name: folder for folder in (Path(__file__).resolve().parent, package)}  # resolved: a checkout may have links
    sources = {f"{package.name}/{FILE}": (package / FILE).read_bytes()}
    waiting = [function.partition(":")[0] for function, _ in read_signatures(package)]
    while waiting:
        top, *names = waiting.pop().split(".")
        if top not in folders:
            continue
        path = folders[top].joinpath(*names)
        file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
        if file is None or (name := str(file.relative_to(folders[top].parent))) in sources:
            continue
        sources[name] = file.read_bytes()
        own_package = [top, *(names if file.name == "__init__.py" else names[:-1])]
        for node in ast.walk(ast.parse(sources[name])):
            if isinstance(node, ast.ImportFrom):
                base = own_package[: len(own_package) + 1 - node.level] if node.level else []
                module = ".".join([*base, *filter(None, [node.module])])
                waiting += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return {name: hashlib.sha256(content).hexdigest() for name, content in sources.items()}


def _write(package: Path) -> bool:
    """Compile a package and write its code to the first folder that can be written to. False if there is none."""
    sources = needed_sources(package)
    name, content = whole_name(name_beginnings(package)[0], sources), b""
    for folder in folders(package):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / "lock"):
                with suppress(DamagedFile, OSError):
                    CodeFile(folder / name)
                    return True  # another process has written it meanwhile
                if not content:
                    log.info("%s: compiling for this processor, which takes a minute or more, once", package.name)
                    started = time.monotonic()
                    content = content_of(name, sources, _compile(package))
                    if not sources.items() <= imported_sources(package).items() or needed_sources(package) != sources:
                        log.error("%s: the sources changed while they were compiled; nothing is kept", package.name)
                        return False
                    log.info("%s: compiled in %.0f s, %.1f MB", package.name, time.monotonic() - started, len(content) / 1e6)
                _write_file(folder, name, content)
                log.info("%s: %s", package.name, folder / name)
                return True
        except OSError as error:
            log.warning("%s: compiled code cannot be kept: %s", package.name, error)
        except CompilationFailed as error:
            log.error("%s", error)
            return False
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock. Raises OSError if it cannot be made, or another process holds it for too long."""
    deadline, is_logged = time.monotonic() + PATIENCE_S, False
    while (descriptor := try_lock(path, 0o666)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: another process has had the lock for {PATIENCE_S:.0f} s")
        if not is_logged:
            log.info("another process compiles, it is waited for")
        is_logged = True
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _write_file(folder: Path, name: str, content: bytes) -> None:
    """Write a file, and delete the package's oldest files. The caller holds the lock."""
    with atomic_write(folder / name) as part_file:
        part_file.write_bytes(content)
    flush(folder)
    package = name.partition("-")[0]
    older = sorted((path for path in folder.glob(f"{package}-*") if path.name != name), key=lambda path: path.stat().st_mtime)
    for path in older[: 1 - KEPT_FILES]:  # never the new file, whatever its time
        path.unlink()


def _compile(package: Path) -> Mapping[str, bytes]:
    """The code of all signatures of a package, compiled by several processes, each of which takes the next module when it is done."""
    ignore_file(package)
    by_module: dict[str, list[tuple[str, str]]] = {}
    for function, types in read_signatures(package):
        function_of(function)  # imported here, once for all processes
        by_module.setdefault(function.partition(":")[0], []).append((function, types))
    modules = sorted(by_module.values(), key=lambda module: -sum(len(types) for _, types in module))  # roughly the slowest first
    gc.freeze()
    processes, code = min(cores(), len(modules)), dict[str, bytes]()
    try:
        with ProcessPoolExecutor(processes, get_context("fork"), _begin_process) as pool:
            for code_of_module in pool.map(_code_of_module, modules):
                code |= code_of_module
    except Exception as error:  # an error of numba, or a killed process
        traceback.print_exception(error)
        raise CompilationFailed(f"{package.name}: a process that compiles ended early") from error
    return code


def _begin_process() -> None:
    end_with_parent()
    begin_numbers()


def _code_of_module(signatures: Sequence[tuple[str, str]]) -> dict[str, bytes]:
    return {f"{function} {types}": _code_of(function, types) for function, types in signatures}


def begin_numbers() -> None:
    """Let numba number what this process compiles from a random number between 2^62 and 2^63 on.

    Some functions have the same name and argument types but different closures, such as the helpers of numba's sort and argsort. numba
    distinguishes them by a number that it counts from 1 in every process. Of weak symbols with the same name, a process links the first one
    that it loads. So no two processes that compile may use the same numbers, and neither may a process that loads code and compiles more.
    """
    gc.disable()
    FunctionIdentity._unique_ids = itertools.count(2**62 + secrets.randbits(61))


def _code_of(function: str, types: str) -> bytes:
    dispatcher, arguments = function_of(function), types_of(types)
    dispatcher.compile(arguments)
    result = dispatcher.overloads[arguments]
    parts = result._asdict()
    if parts["lifted"] or parts["library"].has_dynamic_globals:
        raise ValueError(f"{function}: it has addresses of this process in it, and cannot be kept")
    content: bytes = dumps(result._reduce())
    return content


def end_with_parent() -> None:
    """Let the system end this process when its parent ends. Only on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
