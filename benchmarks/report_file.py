"""The command line of a benchmark and its JSON file: date, hardware and figures."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from espalier.hardware import hardware

SAMPLE = Path(__file__).parents[1] / "models" / "debian-depends" / "1"
SYNTHETIC = Path(tempfile.gettempdir()) / "espalier-benchmarks"
"""Where synthetic models are kept."""


def command_line(document: str | None) -> argparse.ArgumentParser:
    """A parser with the option --json. document: of the benchmark's module."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", help="write the report here")
    return parser


def print_row(row: Mapping[str, Any]) -> None:
    """Print names and values on one line, fractions with six digits."""
    print("  ".join(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()), flush=True)


def write_report(file: Path | None, measured: Mapping[str, Any], threads: str | None = None) -> None:
    """Write a report that begins with "date" and "hardware"; without a file, write nothing.

    threads  text after the hardware, such as "one thread used"
    """
    if file is None:
        return
    header = {"date": datetime.now(UTC).date().isoformat(), "hardware": ", ".join(filter(None, (hardware(), threads)))}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(header | dict(measured), indent=1) + "\n")
