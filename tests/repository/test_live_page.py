"""The commands of docs/live.md on the sample, as a reader would copy them: an item comes, is found and filtered, changes, and goes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import ROOT
from tests.http_servers import reserved_port

pytestmark = pytest.mark.release

PAGE = (ROOT / "docs" / "live.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CURLS = [block for block in BLOCKS if block.startswith("curl ")]
README_PUT = re.findall(r"^```sh\n(curl -s -X PUT .*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with two workers, started by the page's own command on a copy of the sample's model."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("espalier", "espalier_cli", "service"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "models/debian-depends/1", folder / "models/debian-depends/1")
    setting, start = next(block for block in BLOCKS if "espalier serve" in block).splitlines()
    settings = dict([shlex.split(setting)[1].split("=", 1)])
    command = [sys.executable, "-m", "espalier_cli", *shlex.split(start)[1:], "--workers", "2"]
    others = {name: value for name, value in os.environ.items() if not name.startswith("ESPALIER_")}
    with reserved_port() as port:
        command[command.index("--port") + 1] = str(port)
        server = subprocess.Popen(command, cwd=folder, env=others | settings, stderr=subprocess.DEVNULL)
        address = f"localhost:{port}"
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=60) as client:
                while client.get(f"http://{address}/readyz").status_code == 503:
                    assert server.poll() is None
            yield address
        finally:
            server.terminate()
            server.wait(timeout=30)


def curl(block: str, address: str, **changed: Any) -> httpx.Response:
    """The answer to a curl command of the page, with other values at the top of its body."""
    words = iter(shlex.split(block))
    assert next(words) == "curl"
    method, url, headers, data = "GET", "", {}, None
    for word in words:
        if word == "-X":
            method = next(words)
        elif word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            data = next(words)
            method = "POST" if method == "GET" else method
        elif word not in ("-s", "-i"):
            url = word
    if changed and data is not None:
        data = json.dumps(json.loads(data) | changed)
    with httpx.Client(timeout=60) as client:  # a connection of its own: any of the workers may take it
        return client.request(method, f"http://{url.replace('localhost:8000', address)}", headers=headers, content=data)


def ids(answer: httpx.Response) -> list[str]:
    return [item["id"] for item in answer.raise_for_status().json()["results"][0]["items"]]


def test_the_pages_item_is_found_by_the_next_request_and_gone_by_the_next(served: str) -> None:
    put, retrieve, delete = CURLS[:3]
    assert "libsdl3-0" not in ids(curl(retrieve, served))
    answer = curl(put, served)
    assert answer.status_code == 201
    said = json.loads(re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0])
    assert answer.json() == said
    assert answer.headers["etag"] == '"1"'
    for _ in range(8):
        found = curl(retrieve, served)
        assert "libsdl3-0" in ids(found)
        [item] = [item for item in found.json()["results"][0]["items"] if item["id"] == "libsdl3-0"]
        assert item["fields"] == {"title": "Simple DirectMedia Layer 3"}
    assert curl(put, served).json() == said | {"outcome": "unchanged"}
    assert curl(delete, served).json()["outcome"] == "deleted"
    for _ in range(8):
        assert "libsdl3-0" not in ids(curl(retrieve, served))
    assert curl(put, served).status_code == 201  # and again
    assert "libsdl3-0" in ids(curl(retrieve, served))
    assert curl(delete, served).status_code == 200


def test_the_readmes_item_is_found_too(served: str) -> None:
    [put] = README_PUT
    _, retrieve, delete = CURLS[:3]
    assert curl(put, served).status_code == 201
    assert "libsdl3-0" in ids(curl(retrieve, served))
    assert curl(delete, served).status_code == 200
