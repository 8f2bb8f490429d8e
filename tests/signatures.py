"""`pytest --signatures refuse` fails where a compiled function is called with types that are not written down; `--signatures record` adds
them to their package's `signatures.txt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numba.core import event

from espalier.compiled_code import Missing, package_of, when_missing
from espalier.signatures import FILE, accepts, read_signatures, text_of

MODES = ("record", "refuse")


class Recorder(event.Listener):
    """Notes what is compiled because Python called it, not what is compiled into that."""

    def __init__(self) -> None:
        self._depth = 0
        self.called: dict[Path, set[tuple[str, str]]] = {}

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        package = package_of(function)
        if self._depth == 0 and package is not None:
            name = f"{function.__module__}:{function.__qualname__}"
            self.called.setdefault(package, set()).add((name, text_of(event.data["args"])))
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1

    def write(self) -> None:
        for package, called in self.called.items():
            lines = {*read_signatures(package), *called}
            covered = {
                (name, types) for name, types in lines for of, other in lines if of == name and types != other and accepts(other, types)
            }
            kept = lines - covered
            (package / FILE).write_text("".join(f"{name} {types}\n" for name, types in sorted(kept)))


def policy_of(config: pytest.Config) -> Missing:
    return Missing.REFUSE if config.getoption("--signatures") == "refuse" else Missing.COMPILE


def configure(config: pytest.Config) -> None:
    """Do what the option says."""
    when_missing(policy_of(config))
    if config.getoption("--signatures") == "record":
        recorder = Recorder()
        event.register("numba:compile", recorder)
        config.add_cleanup(recorder.write)
