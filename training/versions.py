"""Where a run writes: models/NAME/VERSION, and the folder beside it that holds the run's files until the bundle is there."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from espalier.bundle import is_model_name
from espalier.bundle_writer import make_folder
from espalier.errors import BundleExists, InvalidConfig


def new_version(out: Path) -> str:
    """The model's name in `--out`. Raises InvalidConfig unless it is NAME/VERSION, BundleExists where that is there already."""
    name, version = out.absolute().parent.name, out.name
    if not (version.isdecimal() and int(version) >= 1 and str(int(version)) == version):
        raise InvalidConfig("--out", str(out), "models/NAME/VERSION with a version number of at least 1")
    if not is_model_name(name):
        raise InvalidConfig("--out", name, "a model name of lower-case letters, digits, '.', '_' and '-', at most 64")
    if out.exists():
        raise BundleExists(f"{out}: a bundle is never overwritten; choose another version")
    return name


def work_folder(out: Path) -> Path:
    """The folder of the run that trains a version; `--resume` goes on with what is there, but for hidden files and folders.

    These are unfinished: whoever writes one renames or deletes it.
    """
    return out.absolute().parent / f".{out.name}.work"


def clear(work: Path, resume: bool) -> None:
    """Delete what earlier runs left in a work folder: with `resume` what killed ones had not finished, else everything.

    For who holds `only_run` alone: it would delete what another run is writing.
    """
    if not resume and work.exists():
        shutil.rmtree(work)
    for left in list(work.glob("**/.*")):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)  # it lay in a folder that is deleted


@contextmanager
def only_run(work: Path) -> Iterator[None]:
    """Holds the right to write one version, or one file: two runs would share, and delete, each other's work folder."""
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
