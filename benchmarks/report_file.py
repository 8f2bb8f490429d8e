"""The JSON file of a benchmark: when and on what it ran, then what it measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from espalier.hardware import hardware


def write_report(file: Path | None, measured: Mapping[str, Any], threads: str | None = None) -> None:
    """Write a report with "date" and "hardware" in front, or nothing where there is no file.

    threads  what is said beside the hardware, such as "one thread used"
    """
    if file is None:
        return
    about = {"date": datetime.now(UTC).date().isoformat(), "hardware": ", ".join(filter(None, (hardware(), threads)))}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about | dict(measured), indent=1) + "\n")
