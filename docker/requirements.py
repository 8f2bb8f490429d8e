"""What an image has to install: requirements of pyproject.toml, one a line, so that layers depend on them and not on the source code.

    python3 docker/requirements.py service otel cpu --without torch

Knows the tables of pyproject.toml. Does not know versions that are resolved: those are in constraints.txt.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: str, extras: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """The dependencies and those of the extras, sorted, but for the distributions in `without`. Raises KeyError on an unknown name."""
    project = tomllib.loads(pyproject)["project"]
    wanted = {*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])}
    names = {line: re.split(r"[\s\[<>=!~;@]", line, maxsplit=1)[0].lower() for line in wanted}
    missing = set(without) - set(names.values())
    if missing:
        raise KeyError(f"--without {', '.join(sorted(missing))}: not required")
    return sorted(line for line, name in names.items() if name not in without)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the requirements of some extras.")
    parser.add_argument("extras", nargs="+", help="extras of pyproject.toml")
    parser.add_argument("--without", nargs="*", default=[], help="distributions to leave out")
    given = parser.parse_args()
    print("\n".join(requirements(Path("pyproject.toml").read_text(), given.extras, given.without)))


if __name__ == "__main__":
    main()
