"""A test fails where it calls a compiled function with types that are not written down, as a service does: `pytest --record-signatures`
adds them to their package's `signatures.txt`. Where code was not compiled beforehand, all of it is compiled in memory.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from numba.core import event

from espalier.code_files import find
from espalier.compiled_code import Missing, package_of
from espalier.signatures import FILE, accepts, read_signatures, text_of
from tests import ROOT

PARTS = "parts"


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
            own = re.compile(rf"(?<![\w.]){re.escape(package.name)}\.(?=[\w.]+:)")
            (package / FILE).write_text("".join(sorted(own.sub(".", f"{name} {types}\n") for name, types in kept)))


def policy_of(item: pytest.Item) -> Missing:
    may_compile = item.config.getoption("--record-signatures") or item.get_closest_marker(PARTS) is not None
    return Missing.COMPILE if may_compile or not _is_compiled() else Missing.REFUSE


@cache
def _is_compiled() -> bool:
    return all(find(ROOT / name)[0] is not None for name in ("espalier", "training"))


def configure(config: pytest.Config) -> None:
    """Do what the option says."""
    config.addinivalue_line("markers", f"{PARTS}: calls parts of compiled functions from Python, which nothing else does")
    if config.getoption("--record-signatures"):
        recorder = Recorder()
        event.register("numba:compile", recorder)
        config.add_cleanup(recorder.write)
