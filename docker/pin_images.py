"""Images by digest: says which are named by a tag alone, and pins them where a registry can be asked.

    python docker/pin_images.py            # which are pinned and which are not; always ends well
    python docker/pin_images.py --write    # ask the registries, and write name:tag@sha256:… wherever the image is named

A tag may mean another image tomorrow, a digest cannot. The digest is computed from the manifest that the registry sends, not taken from its
word. Knows the files that name images, and the registry protocol of OCI as far as reading a public manifest takes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

FILES = ("Dockerfile", "docker-compose.yml", ".env.example")
"""All files that name an image of somebody else."""

MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MANIFEST_BYTES = 4 << 20
TIMEOUT_S = 20.0

_IMAGE = r"(?P<image>[a-z0-9][a-z0-9._/-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*)(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
_PLACES = (
    rf"(?m)^(?:ARG |#)BASE_IMAGE={_IMAGE}$",  # the Dockerfile, .env.example
    rf"\$\{{BASE_IMAGE:-{_IMAGE}\}}",
    rf"(?m)^ +image: {_IMAGE}$",  # not those that are built here, which have a variable for a tag
)

Fetch = Callable[[str, Mapping[str, str]], tuple[int, Mapping[str, str], bytes]]
"""(address, headers) → (status, headers in lower case, body)."""


class NotResolved(Exception):
    """The registry could not be asked, or did not answer as one."""


@dataclass(frozen=True)
class Reference:
    """Where an image is: the registry, the repository in it, the tag."""

    registry: str
    repository: str
    tag: str

    @classmethod
    def parse(cls, image: str) -> Reference:
        """As docker reads it: no registry is Docker Hub, no folder there is `library`."""
        name, _, tag = image.rpartition(":")
        first, _, rest = name.partition("/")
        if rest and ("." in first or ":" in first or first == "localhost"):
            return cls(first, rest, tag)
        return cls("registry-1.docker.io", name if rest else f"library/{name}", tag)


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


def resolve(image: str, fetch: Fetch) -> str:
    """The digest that a tag means now. Raises NotResolved."""
    reference = Reference.parse(image)
    address = f"https://{reference.registry}/v2/{reference.repository}/manifests/{reference.tag}"
    headers = {"Accept": ", ".join(MANIFEST_TYPES)}
    status, answered, body = fetch(address, headers)
    if status == 401:
        token = _token(answered.get("www-authenticate", ""), reference, fetch)
        status, answered, body = fetch(address, headers | {"Authorization": f"Bearer {token}"})
    if status != 200:
        raise NotResolved(f"{reference.registry} answered {status} for {image}")
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    told = answered.get("docker-content-digest", digest)
    if told != digest:
        raise NotResolved(f"{reference.registry} says that {image} is {told}, but sent {digest}")
    return digest


def _token(challenge: str, reference: Reference, fetch: Fetch) -> str:
    """What an anonymous reader is given for a repository."""
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = asked.get("realm", "")
    if not challenge.lower().startswith("bearer ") or not realm.startswith("https://"):
        raise NotResolved(f"{reference.registry} asks for another proof than a token: {challenge[:100]!r}")
    query = {"service": asked.get("service", ""), "scope": f"repository:{reference.repository}:pull"}
    status, _, body = fetch(f"{realm}?{urlencode(query)}", {})
    try:
        document = json.loads(body) if status == 200 else {}
        return str(document.get("token") or document["access_token"])
    except (ValueError, LookupError, AttributeError):
        raise NotResolved(f"{realm} gave no token ({status})") from None


def fetch_over_https(address: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
    """An answer of at most MANIFEST_BYTES. Raises NotResolved where none comes."""
    try:
        try:
            response = urllib.request.urlopen(urllib.request.Request(address, headers=dict(headers)), timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            body = response.read(MANIFEST_BYTES + 1)
            if len(body) > MANIFEST_BYTES:
                raise NotResolved(f"{address} answered with more than {MANIFEST_BYTES} bytes")
            return response.status, {name.lower(): value for name, value in response.headers.items()}, body
    except OSError as error:
        raise NotResolved(f"{address} cannot be reached: {error}") from error


def write(root: Path, fetch: Fetch) -> list[str]:
    """Pin every image in the files below `root`; what could not be resolved, one line each."""
    files = {name: (root / name).read_text() for name in FILES}
    digests: dict[str, str] = {}
    failures = []
    for image in images(files):
        try:
            digests[image] = resolve(image, fetch)
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
    failures = write(given.root, fetch_over_https) if given.write else []
    for line in report(given.root):
        print(f"image {line}")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
