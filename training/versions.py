"""The paths that a run writes: models/NAME/VERSION, and the work folder beside it for the run's files until the bundle is published."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from espalier.bundle import is_model_name
from espalier.bundle_writer import make_folder
from espalier.errors import BundleExists, InvalidConfig


def new_version(out: Path) -> str:
    """The model's name in `--out`. Raises InvalidConfig unless it is NAME/VERSION in a writable folder, BundleExists if it exists."""
    name, version = out.absolute().parent.name, out.name
    if not (version.isdecimal() and int(version) >= 1 and str(int(version)) == version):
        raise InvalidConfig("--out", str(out), "models/NAME/VERSION with a version number of at least 1")
    if not is_model_name(name):
        raise InvalidConfig("--out", name, "a model name of lower-case letters, digits, '.', '_' and '-', at most 64")
    if out.exists():
        raise BundleExists(f"{out}: a bundle is never overwritten; choose another version")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidConfig("--out", str(out), f"a folder that can be written to, which {folder} is not")
    return name


def work_folder(out: Path) -> Path:
    """The work folder of the run that trains a version. `--resume` continues with its files, except for hidden ones.

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


@contextmanager
def first_files(work: Path) -> Iterator[None]:
    """Make a work folder for the files that a run begins with. If it is new and an error comes, it is deleted: it holds no progress."""
    is_new = not work.exists()
    work.mkdir(exist_ok=True)
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def only_run(work: Path) -> Iterator[None]:
    """Inside, no other run writes this version or file: two runs would share, and delete, each other's work folder."""
    lock = work.with_suffix(".lock")
    make_folder(lock.parent)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidConfig(
                "--out", str(work.parent / work.stem.removeprefix(".")), "a version or a file that no other run is writing now"
            ) from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
