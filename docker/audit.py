"""Known vulnerabilities of what constraints.txt pins, where the database can be reached.

    python docker/audit.py constraints.txt

pip-audit asks the database of PyPI about every pinned version, whether it is in this environment or in an image. A machine that cannot
reach it gets one line that says so, after 20 seconds at most, and no failure: a build must not depend on it. Findings end it with 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REACH_S = 20.0
"""For the first look-up, which tells whether the database answers at all."""

AUDIT_S = 120.0
"""For all of them, once one has been answered."""


class Unreachable(Exception):
    """The audit did not take place; the message says why."""


def run_pip_audit(lines: list[str], limit_s: float) -> str:
    """What pip-audit prints about these pinned requirements, as JSON. Raises Unreachable."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "--requirement", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        command += ["--progress-spinner", "off", "--timeout", "10"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer within {limit_s:.0f} s") from None
    if not done.stdout.strip():
        raise Unreachable((done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1][:200])
    return done.stdout


def audit(lines: list[str]) -> tuple[list[str], int]:
    """(what was found, one line each; how many distributions the database does not know). Raises Unreachable."""
    if not lines:
        raise ValueError("constraints: got no line of the form name==version")
    checked(run_pip_audit(lines[:1], REACH_S))
    documents = checked(run_pip_audit(lines, AUDIT_S))
    known = [one for one in documents if "skip_reason" not in one]
    findings = [_finding(one, each) for one in known for each in one["vulns"]]
    return findings, len(documents) - len(known)


def checked(printed: str) -> list[dict[str, Any]]:
    """pip-audit's list of distributions. Raises Unreachable where it could look none of them up."""
    try:
        documents: list[dict[str, Any]] = json.loads(printed)["dependencies"]
    except ValueError:
        raise Unreachable(f"pip-audit said {printed.strip()[:100]!r}") from None
    if all("skip_reason" in one for one in documents):
        raise Unreachable("it knows none of our distributions")
    return documents


def _finding(one: dict[str, Any], vulnerability: dict[str, Any]) -> str:
    mended = ", ".join(vulnerability["fix_versions"]) or "no version yet"
    return f"{one['name']} {one['version']}: {vulnerability['id']}, mended in {mended}"


def pinned(text: str) -> list[str]:
    """The lines `name==version` of constraints.txt."""
    return [line.strip() for line in text.splitlines() if "==" in line and not line.startswith("#")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask whether pinned versions have known vulnerabilities.")
    parser.add_argument("constraints", type=Path, help="the file with name==version on each line")
    lines = pinned(parser.parse_args().constraints.read_text())
    try:
        findings, unknown = audit(lines)
    except Unreachable as error:
        print(f"audit: not done, the database of vulnerabilities cannot be asked: {error}")
        return
    for finding in findings:
        print(f"audit: {finding}")
    print(f"audit: {len(lines)} distributions, {len(findings)} known vulnerabilities, {unknown} that the database does not know")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
