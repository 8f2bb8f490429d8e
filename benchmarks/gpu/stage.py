"""One stage, in this process: python -m benchmarks.gpu.stage FILE STAGE MODULE FUNCTION ARGUMENTS SECONDS CARD

Calls MODULE.FUNCTION(**ARGUMENTS), which yields rows, and appends each to FILE as it comes. After SECONDS no further case is begun, and
a row says so. STATUS lists the exit statuses.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.lines import Row, append, reason
from benchmarks.report_file import print_row

STATUS = {0: "done", 1: "crashed", 10: "cut", 11: "out of memory"}
CRASHED, CUT, OUT_OF_MEMORY = 1, 10, 11


def main(arguments: list[str]) -> int:
    path, stage, module, function, function_arguments, seconds, card = arguments
    common_fields = {"stage": stage} | ({"card": card} if card else {})
    end = time.monotonic() + float(seconds)
    try:
        rows: Iterator[Row] = getattr(importlib.import_module(module), function)(**json.loads(function_arguments))
        for row in rows:
            append(Path(path), row | common_fields)
            print_row(row)
            if time.monotonic() > end:
                note = f"{float(seconds):.0f} s were over: later rows, if any, are left out"
                append(Path(path), {"case": "the rest", "note": note} | common_fields)
                return CUT
    except Exception as error:
        traceback.print_exc()
        no_memory = is_out_of_memory(error)
        append(Path(path), {"case": "out of memory" if no_memory else "crashed", "ok": False, "note": reason(error)} | common_fields)
        return OUT_OF_MEMORY if no_memory else CRASHED
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the GPU (as torch reports it) is out of memory."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)


def end_with_parent() -> None:
    """Kill this stage's session soon after its parent process is gone, if the stage leads a session."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    if os.getpgid(0) == os.getpid():
        threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
