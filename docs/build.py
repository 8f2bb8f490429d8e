"""`python docs/build.py --out DIR`: build the documentation as a site with search, by MkDocs. A broken link is an error.

The site has README.md and all files that links lead to from there, at their paths in the repository, so that the same links work in both.
Knows links. Does not know what the pages say.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = "README.md"
NAV: dict[str, dict[str, str]] = {
    "Use": {
        "Train": "docs/train.md",
        "Text search": "docs/text-search.md",
        "From Python": "docs/python.md",
        "Recipes": "docs/recipes.md",
        "Serve": "docs/serve.md",
        "Live items": "docs/live.md",
        "Operate": "docs/operate.md",
        "Alerts": "docs/alerts.md",
        "Judge": "docs/judge.md",
    },
    "Look up": {"Options": "docs/options.md", "Reference": "docs/reference.md", "Glossary": "docs/README.md"},
    "Change": {
        "Architecture": "ARCHITECTURE.md",
        "Decisions": "docs/decisions/README.md",
        "Contributing": "CONTRIBUTING.md",
        "Changelog": "CHANGELOG.md",
    },
}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns MkDocs' exit code."""
    parser = argparse.ArgumentParser(prog="python docs/build.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the site; its content is replaced")
    out = parser.parse_args(arguments).out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        for file in sorted(site_files()):
            (pages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, pages / file)
        configuration = Path(folder) / "mkdocs.yml"
        configuration.write_text(json.dumps(settings(pages, out)))  # JSON is YAML, too
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(configuration)]
        return subprocess.run(command, check=False).returncode


def settings(pages: Path, out: Path) -> dict[str, object]:
    """MkDocs' configuration. The site loads no font, script or icon from other hosts."""
    return {
        "site_name": "Espalier",
        "docs_dir": str(pages),
        "site_dir": str(out),
        "use_directory_urls": False,  # so that it can be read from a folder, too
        "theme": {"name": "material", "font": False, "features": ["navigation.sections", "content.code.copy", "search.highlight"]},
        "plugins": ["search"],
        "markdown_extensions": ["tables", "toc", "pymdownx.highlight", "pymdownx.superfences"],
        "validation": {"omitted_files": "ignore", "absolute_links": "warn", "unrecognized_links": "warn", "anchors": "warn"},
        "nav": [{"Espalier": FIRST}, *({group: [{name: file} for name, file in files.items()]} for group, files in NAV.items())],
    }


def site_files() -> set[str]:
    """Repository paths of the site's files: the first page, the menu's pages, and every file that links lead to from these."""
    open_files = [FIRST, *(file for files in NAV.values() for file in files.values())]
    reached_files: set[str] = set()
    while open_files:
        file = open_files.pop()
        if file not in reached_files and (ROOT / file).is_file():
            reached_files.add(file)
            if file.endswith(".md"):
                open_files += links_of(file)
    return reached_files


def links_of(file: str) -> Iterator[str]:
    """Repository paths that a page links to."""
    for target in LINK.findall((ROOT / file).read_text()):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:"):
            resolved = (ROOT / file).parent.joinpath(path).resolve()
            if resolved.is_relative_to(ROOT):
                yield str(resolved.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
