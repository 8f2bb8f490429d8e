"""The files by which a killed run goes on: written in one step, and only for a run of the same configuration and inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from espalier.bundle_files import sha256_of
from espalier.durable import atomic_write
from espalier.errors import InvalidConfig
from espalier.tree import Tree

from .versions import IDENTITY, has_progress

TREE_ARRAYS = ("level_offset", "first_child", "leaf_item")


def file_digests(section: BaseModel, name: str) -> dict[str, str]:
    """ "KEY PATH" → SHA-256 of each file that a section of a configuration names. Folders and files that are not there are left out."""
    digests: dict[str, str] = {}
    for key, value in section:
        if isinstance(value, BaseModel):
            digests |= file_digests(value, f"{name}.{key}")
        elif isinstance(value, Path) and value.is_file():
            digests[f"{name}.{key} {value}"] = sha256_of(value)
    return digests


def check_identity(work: Path, identity: Mapping[str, str], resume: bool) -> None:
    """Write the identity of a run into its work folder; with `resume`, compare it with the one that is there.

    identity  name of an input → digest
    Raises InvalidConfig, with the name of what has changed, if the files in the folder are of another run.
    """
    file = work / IDENTITY
    if not resume or not has_progress(work):
        with atomic_write(file) as part:
            part.write_text(json.dumps(identity))
        return
    try:
        earlier = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise InvalidConfig("--resume", str(file), "JSON; it is damaged. Leave out --resume to start anew") from error
    if earlier == identity:
        return
    if not isinstance(earlier, dict):
        earlier = {}
    changed_inputs = [name for name in identity if name in earlier and earlier[name] != identity[name]]
    removed_inputs = [name for name in earlier if name not in identity]
    changed = next(iter(changed_inputs + removed_inputs), "the program")  # an earlier state of it wrote no such identity
    expected = f"the folder of a run with the same configuration and inputs; changed: {changed}. Leave out --resume to start anew"
    raise InvalidConfig("--resume", str(work), expected)


def stored_tree(file: Path, build: Callable[[], Tree], resume: bool) -> Tree:
    """The tree of a resumed run, read from its file if there is one; otherwise a new tree, which is written there.

    A rebuilt tree could differ: another processor or number of threads rounds differently. Raises InvalidConfig if the file is damaged.
    """
    if resume and file.exists():
        try:
            with file.open("rb") as opened, np.load(opened) as arrays:
                return Tree(*(arrays[name] for name in TREE_ARRAYS))
        except Exception as error:  # a damaged file raises almost anything
            expected = f"a readable tree ({type(error).__name__}); leave out --resume to start anew"
            raise InvalidConfig("--resume", str(file), expected) from error
    tree = build()
    with atomic_write(file) as part, part.open("wb") as stream:
        np.savez(stream, **{name: getattr(tree, name) for name in TREE_ARRAYS})
    return tree
