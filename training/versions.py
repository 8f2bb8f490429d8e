"""The paths that a run writes: models/NAME/VERSION, and the work folder beside it for the run's files until the bundle is published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from espalier.bundle import is_model_name
from espalier.bundle_writer import make_folder
from espalier.errors import BundleExists, InvalidConfig
from espalier.file_lock import try_lock
from espalier.wording import option


def new_version(out: Path) -> str:
    """The model's name in `--out`. Raises InvalidConfig unless it is NAME/VERSION in a writable folder, BundleExists if it exists."""
    name, version = out.absolute().parent.name, out.name
    if not (version.isdecimal() and int(version) >= 1 and str(int(version)) == version):
        raise InvalidConfig(option("out"), str(out), "models/NAME/VERSION with a version number of at least 1")
    if not is_model_name(name):
        raise InvalidConfig(option("out"), name, "a model name of lower-case letters, digits, '.', '_' and '-', at most 64")
    if out.exists():
        raise BundleExists(f"{out}: a bundle is never overwritten; choose another version")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidConfig(option("out"), str(out), f"a folder that can be written to, which {folder} is not")
    return name


IDENTITY = "identity.json"
"""The file in a work folder that says of which run it is."""
FIRST_FILES = ("chosen.json", "tree.npz", "state.npz")
"""The first files in a work folder that depend on the identity: of a linear model, another model, an assignment."""


def work_folder(out: Path) -> Path:
    """The work folder of the run that writes a version or a file. `--resume` continues with its files, except for hidden ones.

    Hidden files and folders are unfinished: their writers rename or delete them.
    """
    return out.absolute().parent / f".{out.name}.work"


def clear(work: Path, resume: bool) -> None:
    """Delete files of earlier runs in a work folder: with `resume` the unfinished ones, else all.

    Call it only inside `only_run`: otherwise it could delete files that another run is writing.
    """
    if not resume and work.exists():
        shutil.rmtree(work)
    for unfinished in list(work.glob("**/.*")):
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)  # already deleted with its folder


def has_progress(work: Path) -> bool:
    """Whether a run has written its identity, or files that depend on it, into its work folder."""
    return any((work / name).is_file() for name in (IDENTITY, *FIRST_FILES))


@contextmanager
def run_folder(out: Path, resume: bool) -> Iterator[Path]:
    """The work folder of the only run that writes a version or a file, cleared at first and deleted at the end.

    After an error it stays, for `--resume`. Without an identity it holds no progress, and is deleted or cleared: what else is in it, as
    a journal's copy, may be of other inputs.
    """
    work = work_folder(out)
    with only_run(work):
        clear(work, resume and has_progress(work))
        is_new = not work.exists()
        work.mkdir(exist_ok=True)
        try:
            yield work
        except BaseException:
            if is_new and not (work / IDENTITY).is_file():
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)


@contextmanager
def only_run(work: Path) -> Iterator[None]:
    """Inside, no other run writes this version or file: two runs would share, and delete, each other's work folder.

    Makes the folder of both. If an error comes, new folders are deleted unless something is in them.
    """
    lock = work.with_suffix(".lock")
    new_folders = [folder for folder in (lock.parent, *lock.parent.parents) if not folder.exists()]
    try:
        make_folder(lock.parent)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:  # /proc says that everything can be written to
        raise InvalidConfig(option("out"), str(_out_of(lock)), f"a folder that can be written to ({error})") from error
    try:
        descriptor = _locked(lock)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            os.close(descriptor)
    except BaseException:
        with suppress(OSError):
            for folder in new_folders:
                folder.rmdir()
        raise


def _locked(lock: Path) -> int:
    """A descriptor with the lock of a file that its holder deletes. Raises InvalidConfig if another run holds it."""
    while True:
        try:
            descriptor = try_lock(lock)
        except FileNotFoundError:  # a run that failed has deleted the folder
            make_folder(lock.parent)
            continue
        if descriptor is None:
            raise InvalidConfig(option("out"), str(_out_of(lock)), "a version or a file that no other run is writing now")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        os.close(descriptor)  # between opening and locking, its holder ended and deleted the file


def _out_of(lock: Path) -> Path:
    """The version or file that a lock is for."""
    return lock.parent / lock.stem.removeprefix(".")
