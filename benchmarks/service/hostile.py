"""A service under attack: how much memory and time hostile clients can cost it, and whether it stays alive.

    python -m benchmarks.hostile --json FILE [--attacks NAME,NAME] [--models DIR]

Each attack (tests/hostile/attacks) runs against a new service of the embedded sample, with default settings but shorter time-outs, and with
1,024 descriptors. Another process asks /livez fifty times a second. tests/hostile/measuring.py says when a row is `ok`. The exit code is 1
if a row is not.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report_file import SAMPLE, command_line, write_report
from espalier.bundle import Bundle
from tests.hostile.attacked import attacked
from tests.hostile.attacks import ATTACKS, Attack, Limits, Target
from tests.hostile.attacks.connections import DESCRIPTORS
from tests.hostile.measuring import Row, line, measure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--attacks", help=f"some of them, separated by commas: {', '.join(ATTACKS)}")
    parser.add_argument("--models", type=Path, default=SAMPLE.parents[1], help="folder with debian-depends")
    options = parser.parse_args(arguments)
    names = options.attacks.split(",") if options.attacks else list(ATTACKS)
    if unknown := [name for name in names if name not in ATTACKS]:
        parser.error(f"--attacks: got {', '.join(unknown)}, expected some of {', '.join(ATTACKS)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        print(f"{'attack':<26}{'livez max ms':>13}{'before MB':>11}{'peak MB':>9}{'after MB':>10}{'s':>6}  ok")
        for name in names:
            rows.append(attack_sample(ATTACKS[name], options.models, Path(temporary) / f"{name}.log"))
            print(line(rows[-1]), flush=True)
            write_report(options.json, {"settings": vars(Limits()), "rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


def attack_sample(attack: Attack, models: Path, log: Path) -> Row:
    limits = Limits()
    with tempfile.TemporaryDirectory() as temporary:
        if attack.writes:
            shutil.copytree(
                models / "debian-depends", Path(temporary) / "debian-depends", ignore=shutil.ignore_patterns("live.db*", ".live*")
            )
            models = Path(temporary)
        with attacked(models, log, limits.environment(attack.writes), descriptors=DESCRIPTORS) as service:
            return measure(attack, service, sample_target(service.port, models, limits))


def sample_target(port: int, models: Path, limits: Limits) -> Target:
    """The sample as a target: packages, four columns."""
    items = Bundle.open(max((models / "debian-depends").glob("[0-9]*")), verify=False).items
    ids = items.column("id").slice(0, 1000).to_pylist()
    return Target(port, ids, [name for name in items.fields if name != "id"][:4], "section", limits)


if __name__ == "__main__":
    sys.exit(main())
