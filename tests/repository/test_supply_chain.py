"""What comes from elsewhere: pinned versions with their hashes, their known vulnerabilities, images by digest, and the list of it all."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

IMAGES = runpy.run_path(str(ROOT / "docker/pin_images.py"))
AUDIT = runpy.run_path(str(ROOT / "docker/audit.py"))
SBOM = runpy.run_path(str(ROOT / "docker/sbom.py"))
DIGEST = "sha256:" + "0123456789abcdef" * 4


# -- versions and hashes --------------------------------------------------------------------------------------------------


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """Distribution → (its version, its hashes) in a lock."""
    entries = re.findall(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    return {SBOM["normal"](name): (version, re.findall(r"sha256:(\w+)", hashes)) for name, version, hashes in entries}


def test_every_pinned_version_but_torch_has_its_hashes_and_is_what_is_installed() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {SBOM["normal"](name): version for name, version in (line.split("==") for line in lines)}
    lock = (ROOT / "requirements.lock").read_text()
    assert pinned.pop("torch")
    assert lock.count("==") == len(pinned), "a line that this test cannot read"
    assert all(len(hashes) == len(set(hashes)) >= 1 for _, hashes in locked(lock).values())
    # Whatever of the environment is in the lock: not that all of it is installed.
    versions = {name: version for name, (version, _) in locked(lock).items()}
    assert versions == pinned
    installed = {SBOM["normal"](one.metadata["Name"]): one.version for one in metadata.distributions()}
    compared = sorted(versions.keys() & installed.keys() - {"pip"})  # an environment may be older than the pip that fills new ones
    assert len(compared) > 50
    assert {name: installed[name] for name in compared} == {name: versions[name] for name in compared}


# -- known vulnerabilities ------------------------------------------------------------------------------------------------

KNOWN = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "version": "2", "skip_reason": "not found"}
FOUND = {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}, {"id": "X-2", "fix_versions": []}]}


def printing(*dependencies: dict[str, Any]) -> str:
    return f"print({json.dumps(json.dumps({'dependencies': dependencies}))})"


NOT_DONE = "audit: not done, the database of vulnerabilities cannot be asked"


@pytest.mark.parametrize(
    ("module", "said", "code"),
    [
        ("import sys; sys.exit('no route to host')", f"{NOT_DONE}: no route to host", 0),
        ("print('<html>')", f"{NOT_DONE}: pip-audit said '<html>'", 0),
        (printing(SKIPPED), f"{NOT_DONE}: it knows none of our distributions", 0),
        (printing(KNOWN, SKIPPED), "audit: 2 distributions, 0 known vulnerabilities, 1 that", 0),
        (printing(FOUND), "audit: a 1: X-1, mended in 2\naudit: a 1: X-2, mended in no version yet\naudit: 2 distributions, 2 known", 1),
    ],
    ids=["no network", "a page", "nothing known", "nothing found", "found"],
)
def test_an_audit_fails_with_what_it_finds_and_not_without_a_network(tmp_path: Path, module: str, said: str, code: int) -> None:
    (tmp_path / "pip_audit.py").write_text(module)
    (tmp_path / "constraints.txt").write_text("# a comment==1\na==1\nb==2\n")
    words = [sys.executable, str(ROOT / "docker/audit.py"), "constraints.txt"]
    run = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (code, "")
    assert run.stdout.startswith(said)
    assert len(run.stdout.splitlines()) == (3 if code else 1)


def test_a_database_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip_audit.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(AUDIT["Unreachable"], match="no answer within 0 s"):
        AUDIT["run_pip_audit"](["a==1"], 0.3)
    assert AUDIT["REACH_S"] <= 20


# -- images by digest -----------------------------------------------------------------------------------------------------


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    for name in IMAGES["FILES"]:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def texts(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in IMAGES["FILES"]}


def test_digests_are_written_wherever_an_image_is_named(copies: Path) -> None:
    before, other = texts(copies), "sha256:" + "fedcba9876543210" * 4
    assert len(IMAGES["write"](copies, lambda command: (1, "unreachable"))) == 5, "images that somebody else makes"
    assert texts(copies) == before
    assert IMAGES["write"](copies, lambda command: (0, f"{DIGEST}\n")) == []
    assert {line.split(": ")[1] for line in IMAGES["report"](copies)} == {DIGEST}
    after = texts(copies)
    for name, text in after.items():
        assert re.sub("@sha256:[0-9a-f]{64}", "", text) == re.sub("@sha256:[0-9a-f]{64}", "", before[name])
    assert IMAGES["write"](copies, lambda command: (0, other)) == []
    assert texts(copies) == {name: text.replace(DIGEST, other) for name, text in after.items()}


def test_an_image_that_is_not_the_same_everywhere_is_told(copies: Path) -> None:
    path = copies / "Dockerfile"
    path.write_text(re.sub(r"(?m)^(ARG BASE_IMAGE=[^@\s]+).*$", rf"\1@{DIGEST}", path.read_text()))
    compose = copies / "docker-compose.yml"
    compose.write_text(re.sub("@sha256:[0-9a-f]{64}", "", compose.read_text()))
    (line,) = (line for line in IMAGES["report"](copies) if line.startswith("python:"))
    assert line.endswith(f"not the same everywhere: by its tag alone, {DIGEST}")


@pytest.mark.parametrize("answer", [(1, "no such manifest"), (0, ""), (0, "sha256:abc"), (1, DIGEST), (0, f"{DIGEST} {DIGEST}")])
def test_an_engine_that_names_no_digest_pins_nothing(answer: tuple[int, str]) -> None:
    with pytest.raises(IMAGES["NotResolved"], match="a/b:1: expected its digest"):
        IMAGES["resolve"]("a/b:1", lambda command: answer)


# -- the list of it all ---------------------------------------------------------------------------------------------------


class Distribution(metadata.Distribution):
    """One that is not installed."""

    def __init__(self, name: str, version: str, *headers: tuple[str, str]) -> None:
        self.message = Message()
        for header in (("Name", name), ("Version", version), *headers):
            self.message[header[0]] = header[1]

    def read_text(self, filename: str) -> str | None:
        return str(self.message) if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


def test_the_bill_says_what_is_there_in_the_form_of_cyclonedx() -> None:
    needs = [("Requires-Dist", line) for line in ("b_b[x]>=1", "absent", "c; extra == 'more'")]
    distributions = [
        Distribution("A.a", "1.0", ("License-Expression", "MIT OR Apache-2.0"), ("Summary", "It is a."), *needs),
        Distribution("B-b", "2.0", ("Classifier", "License :: OSI Approved :: BSD License"), ("License", "x" * 500)),
        Distribution("c", "3.0", ("License", "MIT"), ("License-Expression", ""), ("Summary", "")),
        Distribution("c", "9.9"),  # hidden by the one before it
    ]
    bill = SBOM["bill"]("ours", distributions)
    components = {one["bom-ref"]: one for one in bill["components"]}
    a, b, c, python = components
    assert (a, b, c) == ("pkg:pypi/a-a@1.0", "pkg:pypi/b-b@2.0", "pkg:pypi/c@3.0")
    assert python == f"pkg:generic/python@{sys.version.split()[0]}"
    assert components[a] | {"description": "It is a.", "name": "A.a", "version": "1.0", "purl": a} == components[a]
    licences = [components[reference].get("licenses") for reference in (a, b, c)]
    assert "description" not in components[c]
    assert licences == [[{"expression": "MIT OR Apache-2.0"}], [{"license": {"name": "BSD License"}}], [{"license": {"name": "MIT"}}]]
    assert {one["ref"]: one["dependsOn"] for one in bill["dependencies"]} == {"ours": [a, b, c, python], a: [b], b: [], c: [], python: []}
    assert SBOM["bill"]("ours", distributions[:2]) == SBOM["bill"]("ours", distributions[1::-1]), "the same environment, the same bill"
    run = subprocess.run([sys.executable, ROOT / "docker/sbom.py", "this"], capture_output=True, text=True, check=True)
    bill = json.loads(run.stdout)
    assert {one["name"].lower() for one in bill["components"]} >= {"numpy", "httpx", "pytest", "python"}
    schemas = Path(str(pytest.importorskip("cyclonedx", reason="comes with pip-audit").__file__)).parent / "schema" / "_res"
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="comes with schemathesis")
    names = [f"{name}.SNAPSHOT.schema.json" for name in ("bom-1.6", "spdx", "jsf-0.82")]
    loaded = [(f"http://cyclonedx.org/schema/{name}", json.loads((schemas / name).read_text())) for name in names]
    validator = jsonschema_rs.Draft7Validator(loaded[0][1], registry=jsonschema_rs.Registry(loaded))
    assert [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(bill)] == []
    bill["components"][0]["type"] = "nonsense"
    assert not validator.is_valid(bill)
