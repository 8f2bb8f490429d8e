"""Compiles launches of Triton kernels for a GPU that need not be there: python tests/espalier/compile_kernels.py LAUNCHES.json

LAUNCHES.json: [{"module", "kernel", "types": {argument: type}, "constants": {argument: value}, "options"}], as `Recorder` writes them.
Run it without TRITON_INTERPRET. What it prints is one JSON line a launch: the kernel, its registers a thread and its spilt bytes.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import ROOT

HOPPER = ("cuda", 90, 32)


class Recorder:
    """In a kernel's place: notes how it is launched, and launches it."""

    def __init__(self, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, num_warps: int = 4, maxnreg: int | None = None, num_stages: int = 3, **named: Any) -> None:
            function = self._kernel.fn
            types, constants = {}, dict(named)
            for name, argument in zip(function.__code__.co_varnames, arguments, strict=False):
                if "constexpr" in str(function.__annotations__.get(name)):
                    constants[name] = argument
                else:
                    types[name] = _type(argument)
            entry = {"module": function.__module__, "kernel": function.__name__, "types": types, "constants": constants}
            entry |= {"options": {"num_warps": num_warps, "maxnreg": maxnreg, "num_stages": num_stages}}
            if entry not in self._launches:
                self._launches.append(entry)
            self._kernel[grid](*arguments, **named)

        return launch


def _type(argument: Any) -> str:
    if hasattr(argument, "data_ptr"):
        names = {"int32": "i32", "int64": "i64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "u8"}
        return "*" + names[str(argument.dtype).removeprefix("torch.")]
    return "fp32" if isinstance(argument, float) else "i32"


def compiled(launch: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    names = kernel.arg_names
    signature = {name: "constexpr" if name in launch["constants"] else launch["types"][name] for name in names}
    constants = {(names.index(name),): value for name, value in launch["constants"].items()}
    source = ASTSource(kernel, signature, constants)
    binary = triton.compile(source, target=GPUTarget(*HOPPER), options=launch["options"]).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    return {"kernel": launch["kernel"], "constants": launch["constants"], "registers": registers, "stack_bytes": stack}


def compiled_elsewhere(launches: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What `compiled` says of each launch, in a process without the interpreter."""
    path = folder / "launches.json"
    path.write_text(json.dumps(launches))
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "tests.espalier.compile_kernels", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(entries) == len(launches)
    return entries


if __name__ == "__main__":
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(compiled(entry)), flush=True)
