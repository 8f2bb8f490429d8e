"""`espalier COMMAND`: imports the module of a command and runs it. If the module is missing, says what to install.

Knows names of commands and packages. Each command knows its own options. The library is imported inside `main`, since it takes a second, in
which Ctrl-C should end the command with one line, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, cast

from espalier_cli.loading import INTERRUPTED, begin_loading, end_loading, no_interrupt_lost

Main = Callable[[Sequence[str], str], int]
"""Arguments and the command's name in help → exit code."""


class Command(NamedTuple):
    """module: has `main`; named as in a checkout · extra: installs its packages · about: line in help"""

    module: str
    extra: str
    about: str


TRAINER = "training.__main__"
GROUPS: dict[str, dict[str, Command]] = {
    "Train": {
        "new": Command(TRAINER, "train", "look at a log and write a configuration with comments"),
        "compare": Command(TRAINER, "train", "does a tree pay on this log? train it and its rivals, measure all"),
        "fit": Command(TRAINER, "train", "train a model"),
        "evaluate": Command(TRAINER, "train", "recall and milliseconds of a model, by beam"),
        "fit-ranker": Command(TRAINER, "train", "train a second stage for a model's candidates"),
        "assign": Command(TRAINER, "train", "who should see each item?"),
        "options": Command(TRAINER, "train", "the keys of configurations"),
        "import-pecos": Command(TRAINER, "train", "turn a PECOS XR-Linear model into one of Espalier"),
    },
    "Use": {
        "predict": Command("espalier_cli.predict", "cpu", "the best items of many queries, from a Parquet file to another"),
        "embed": Command("espalier_cli.embed", "cpu", "a model's item rows, and the states of queries, as Parquet"),
        "inspect": Command(TRAINER, "train", "what is in a model"),
        "serve": Command("service.__main__", "serve", "answer over HTTP"),
        "route": Command("service.router.__main__", "serve", "answer over HTTP for a catalogue in shards"),
        "loadtest": Command("loadtest.sweep", "load", "recall against latency of a running service"),
    },
    "Operate": {
        "publish": Command(TRAINER, "train", "put a model into object storage"),
        "versions": Command(TRAINER, "train", "the versions of a stored model"),
        "set-default": Command(TRAINER, "train", "which version of a stored model serves: pin, roll back"),
        "trial": Command(TRAINER, "train", "what users did with the answers of two versions, with intervals"),
        "fold": Command(TRAINER, "train", "the next version: a model with its live items in it"),
        "shard": Command(TRAINER, "train", "cut a model into shards"),
        "journal": Command("service.journal", "serve", "back up, restore, compact, take over a live catalogue"),
        "compile": Command("espalier.compile", "cpu", "compile for this processor beforehand"),
        "completion": Command("espalier_cli.completion", "cpu", "a script that completes commands in bash, zsh or fish"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    name, *options = words
    command = COMMANDS.get(name)
    if command is None and name != "--version":
        print(f"error: command: got {name!r}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    begin_loading()
    try:
        from espalier import __version__
        from espalier.errors import MissingExtra
        from espalier.siblings import sibling

        if command is None:
            print(f"espalier {__version__}")
            return 0
        try:
            run = cast(Main, import_module(sibling(command.module)).main)
        except ModuleNotFoundError as missing:
            print(f"error: espalier {name} needs {missing.name}: pip install 'espalier[{command.extra}]'", file=sys.stderr)
            return 1
        except MissingExtra as missing:
            print(f"error: {missing}", file=sys.stderr)
            return 1
    finally:
        end_loading()
    try:
        with no_interrupt_lost():
            if command.module == TRAINER:  # one program, whose first argument is the command
                return run([name, *options], "espalier")
            return run(options, f"espalier {name}")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def usage() -> str:
    """The help page, a line for each command."""
    lines = ["usage: espalier COMMAND [options]; espalier COMMAND --help says more"]
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<13}{command.about}" for name, command in commands.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
