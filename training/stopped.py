"""How commands end that Ctrl-C or a full disk stops: with one line, which for a fit says what `--resume` would go on from."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from espalier.errors import EspalierError
from espalier_cli.loading import no_interrupt_lost

from .versions import work_folder


class Interrupted(Exception):
    """Ctrl-C. The message says what `--resume` would go on from."""


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Says after Ctrl-C and on a full disk what `--resume` would go on from."""
    try:
        with no_interrupt_lost():
            yield
    except KeyboardInterrupt:
        raise Interrupted(_resume_point(work_folder(out))) from None
    except OSError as error:
        if not is_full(error):
            raise
        work = work_folder(out)
        raise EspalierError(
            f"{work}: no space is left ({error}){free_space(work.parent)}. When there is more, {_resume_point(work)}"
        ) from error


@contextmanager
def writes(out: Path) -> Iterator[None]:
    """Says on a full disk how much is free where a command without `--resume` writes."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise EspalierError(f"{error}{free_space(out.absolute().parent)}") from error


def _resume_point(work: Path) -> str:
    """In words, what `--resume` would go on from."""
    if checkpoints := sorted(work.glob("**/checkpoint.pt"), key=lambda file: file.stat().st_mtime_ns):
        from .deep.checkpoint import step_of

        return f"--resume goes on from step {step_of(checkpoints[-1])}"
    if next(work.glob("**/level-*.safetensors"), None) is not None:
        return "--resume goes on after the last trained level"
    if next(work.glob("**/tree.npz"), None) is not None:
        return "--resume goes on with the tree, since there is no checkpoint yet"
    return "--resume starts anew, since there is no checkpoint yet"


def is_full(error: Exception) -> bool:
    """Whether an error may mean a full disk. NumPy's errors have no errno, and mostly no file name."""
    return isinstance(error, OSError) and (error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "requested and" in str(error))


def free_space(folder: Path | None = None) -> str:
    """The free space of a folder (None: the current one) and of the folder for temporary files, which get most of the data.

    A folder that was not made, or was deleted after the error, has the space of its first parent that is there.
    """
    folder = folder and next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    temporary, free = (shutil.disk_usage(path).free >> 20 for path in (tempfile.gettempdir(), folder or "."))
    here = "here" if folder is None else f"in {folder}"
    return f"; {free:,} MiB are free {here}, {temporary:,} MiB in {tempfile.gettempdir()} (another folder: TMPDIR), where logs are read"
