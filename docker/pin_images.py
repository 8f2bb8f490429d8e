"""Images by digest: says which are named by a tag alone, and pins them where their registries can be asked.

    python docker/pin_images.py            # which are pinned and which are not; always ends well
    python docker/pin_images.py --write    # ask the registries, and write name:tag@sha256:… wherever the image is named

A tag may mean another image tomorrow, a digest cannot. The container engine asks the registries (`docker buildx imagetools inspect`), with
the credentials and mirrors that it is set up with. Knows the files that name images. Does not know registries.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FILES = ("Dockerfile", "docker-compose.yml", ".env.example")
"""All files that name an image of somebody else."""

TIMEOUT_S = 60.0

_IMAGE = r"(?P<image>[a-z0-9][a-z0-9._/-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*)(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
_PLACES = (
    rf"(?m)^(?:ARG |#)BASE_IMAGE={_IMAGE}$",  # the Dockerfile, .env.example
    rf"\$\{{BASE_IMAGE:-{_IMAGE}\}}",
    rf"(?m)^ +image: {_IMAGE}$",  # not those that are built here, which have a variable for a tag
)

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Run = Callable[[Sequence[str]], tuple[int, str]]
"""A command → (exit status, what it wrote)."""


class NotResolved(Exception):
    """The engine is not there, could not ask the registry, or did not name a digest."""


def images(files: Mapping[str, str]) -> dict[str, set[str | None]]:
    """Image → its digests in these files (name → text); None where it is named by its tag alone."""
    found: dict[str, set[str | None]] = {}
    for text in files.values():
        for place in _PLACES:
            for match in re.finditer(place, text):
                found.setdefault(match["image"], set()).add(match["digest"])
    return found


def pinned(text: str, digests: Mapping[str, str]) -> str:
    """The text of a file with these digests (image → digest) wherever it names the images."""

    def pin(match: re.Match[str]) -> str:
        image = match["image"]
        if image not in digests:
            return match[0]
        start, end = match.start("image") - match.start(), match.end("digest" if match["digest"] else "image") - match.start()
        return f"{match[0][:start]}{image}@{digests[image]}{match[0][end:]}"

    for place in _PLACES:
        text = re.sub(place, pin, text)
    return text


def resolve(image: str, run: Run) -> str:
    """The digest that a tag means now, for all platforms. Raises NotResolved."""
    status, text = run(("docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", image))
    digest = text.strip()
    if status != 0 or not _DIGEST.fullmatch(digest):
        raise NotResolved(f"{image}: expected its digest from the container engine, got {digest[-200:]!r} (exit status {status})")
    return digest


def run_engine(command: Sequence[str]) -> tuple[int, str]:
    """Its output, or its errors where it fails. Raises NotResolved where it is not installed or does not end."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise NotResolved(f"{command[0]} is not installed; it asks the registries") from error
    except subprocess.TimeoutExpired as error:
        raise NotResolved(f"{' '.join(command)}: no answer within {TIMEOUT_S:g} s") from error
    return ended.returncode, ended.stdout if ended.returncode == 0 else ended.stderr


def write(root: Path, run: Run) -> list[str]:
    """Pin every image in the files below `root`; what could not be resolved, one line each."""
    files = {name: (root / name).read_text() for name in FILES}
    digests: dict[str, str] = {}
    failures = []
    for image in images(files):
        try:
            digests[image] = resolve(image, run)
        except NotResolved as error:
            failures.append(str(error))
    for name, text in files.items():
        (root / name).write_text(pinned(text, digests))
    return failures


def report(root: Path) -> list[str]:
    """One line for each image: by which digest it is named, or that it is not."""
    lines = []
    for image, digests in sorted(images({name: (root / name).read_text() for name in FILES}).items()):
        if digests == {None}:
            lines.append(f"{image}: by its tag alone")
        elif len(digests) > 1:
            lines.append(f"{image}: not the same everywhere: {', '.join(sorted(digest or 'by its tag alone' for digest in digests))}")
        else:
            lines.append(f"{image}: {digests.pop()}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Say which images are pinned by digest, or pin them.")
    parser.add_argument("--write", action="store_true", help="ask the registries and write the digests into the files")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="folder of the files")
    given = parser.parse_args()
    failures = write(given.root, run_engine) if given.write else []
    for line in report(given.root):
        print(f"image {line}")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
