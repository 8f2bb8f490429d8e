"""The console's page and files: what a browser is told with them, and that nothing else of the disk is served."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.http.console import FOLDER, HEADERS, read_files
from service.http.console_modules import join_modules
from tests.service.running import Running, problem, run

MAX_BYTES = 62_000
"""Of all files together, compressed."""


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[Running]:
    with run(models, retrieve_keys=("retrieve-key-000001",), admin_keys=("admin-key-00000001",)) as started:
        yield started


def test_the_page_and_every_file_come_without_a_key_under_a_strict_policy_and_once(running: Running) -> None:
    answer = running.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == (FOLDER / "index.html").read_text()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    for path, file in read_files().items():
        assert gzip.decompress(file.gzipped) == file.content, path
        for encoding in ("identity", "gzip"):
            answer = running.client.get(path, headers={"Accept-Encoding": encoding})
            assert answer.status_code == 200, path
            assert answer.headers.get("content-encoding", "identity") == encoding, path
            assert answer.content == file.content, path
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
    first = running.client.get("/")
    for named in (first.headers["etag"], f'"other", {first.headers["etag"]}', "*"):
        again = running.client.get("/", headers={"If-None-Match": named})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert running.client.get("/", headers={"If-None-Match": 'W/"other"'}).status_code == 200


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        *((value, "gzip") for value in ("br, GZIP", "gzip;q=0.1", "gzip ; q=1.000,br;q=0", "deflate;q=0, gzip;q=0.001")),
        *((value, "identity") for value in ("", "br", "gzip;q=0", "br, gzip; q=0.000", "GZIP;Q=0.0 , br")),
    ],
)
def test_a_file_is_compressed_only_for_who_takes_gzip(running: Running, accepted: str, encoding: str) -> None:
    answer = running.client.get("/", headers={"Accept-Encoding": accepted})
    assert answer.headers.get("content-encoding", "identity") == encoding
    assert answer.text == (FOLDER / "index.html").read_text()


def test_comments_are_left_out_a_changed_file_has_another_tag_and_others_are_no_assets(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>/* text */</p>\n")
    (tmp_path / "style.css").write_text("/* The look,\n   all of it. */\n\na { b: c; } /* why */\n/* two */\nd { e: f; }\n")
    files = read_files(tmp_path)
    assert files["/"].content == b"<p>/* text */</p>\n"
    assert files["/console/style.css"].content == b"\na { b: c; } /* why */\nd { e: f; }\n"
    (tmp_path / "index.html").write_text("<p>one")
    one = read_files(tmp_path)["/"]
    (tmp_path / "index.html").write_text("<p>two")
    two = read_files(tmp_path)["/"]
    assert one.tag != two.tag
    assert read_files(tmp_path)["/"] == two


def test_the_files_are_small_whole_and_as_their_makers_published_them() -> None:
    folder = FOLDER / "vendor"
    sums = {name: digest for digest, name in (line.split() for line in (folder / "SHA256SUMS").read_text().splitlines())}
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.*") if path.suffix != ".txt"}
    sizes = {path: len(file.gzipped) for path, file in read_files().items()}
    assert sum(sizes.values()) <= MAX_BYTES, sizes
    script = read_files()["/console/app.js"].content.decode()
    for path in FOLDER.rglob("*.js"):
        name = path.relative_to(FOLDER).as_posix()
        assert f'["{name}"] = ' in script, name
    assert "\n//" not in script


def test_files_that_are_no_assets_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "views").mkdir()
    for name in ("index.html", "app.js", "views/lab.js", "style.css", "SHA256SUMS", "notes.md", ".hidden"):
        (tmp_path / name).write_text(name)
    assert set(read_files(tmp_path)) == {"/", "/console/app.js", "/console/style.css"}


def test_the_console_can_be_switched_off(models: Path) -> None:
    with run(models, console=False) as without:
        for path in read_files():
            assert problem(without.client.get(path))["status"] == 404, path
        assert without.client.get("/docs").status_code == 200


# -- the console's modules in one file: run by Node.js where it is installed; forms that it does not know are refused -----


MODULES = {
    "app.js": """// The start.
import { twice, Failure } from "./core/numbers.js";
import { plain as renamed } from "./vendor/library.js";
import { passed } from "./core/passing.js";

const later = () => import("./views/late.js");

console.log(twice(2), renamed, passed(), new Failure() instanceof Error);
const count = async () => {
  for await (const one of (await import("./core/numbers.js")).steps(2)) console.log(one);
};
count();
later().then((late) => console.log(late.default(), late.title));
""",
    "core/numbers.js": """
export const factor = 2; // why
export class Failure extends Error {}

  // indented
export function twice(value) {
  return factor * value + `
    text // that stays`.length;
}

export async function* steps(count) {
  for (let step = 0; step < count; step++) yield step;
}
""",
    "core/passing.js": """
export { plain } from "../vendor/library.js";
export * from "./other.js";
""",
    "core/other.js": """
let calls = 0;

export function passed() {
  return ++calls;
}
""",
    "views/late.js": """
import { passed } from "../core/passing.js";

console.log("late");

export const title = "Late";
export default function View() {
  return passed();
}
""",
}


@pytest.fixture
def node() -> str:
    """Runs JavaScript; where it is missing, the browser's tests still do."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node.js is not installed")
    return found


def test_they_do_what_they_do_apart(tmp_path: Path, node: str) -> None:
    said = []
    for folder, files in (
        (tmp_path / "apart", MODULES),
        (tmp_path / "one", {"app.js": join_modules(MODULES, ["vendor/library.js"], "app.js")}),
    ):
        for name, text in (files | {"vendor/library.js": "export const plain = 'plain';\n", "package.json": '{"type": "module"}'}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        said.append(
            subprocess.run([node, str(folder / "app.js")], capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        )
    assert sorted(said[0]) == sorted(said[1])
    assert said[0][0] == "27 plain 1 true"


def test_the_consoles_own_modules_are_one_script(node: str) -> None:
    script = read_files()["/console/app.js"].content
    checked = subprocess.run([node, "--input-type=module", "--check", "-"], input=script, capture_output=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stderr.decode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('import x from "./core/a.js";', "expected an import or export in a form of the console's"),
        ('import * as x from "./core/a.js";', "expected an import or export"),
        ('import "./core/a.js";', "expected an import or export"),
        ("export let x = 1;", "expected an import or export"),
        ("export default () => 1;", "expected an import or export"),
        ("export { x };", "expected an import or export"),
        ('import { x } from "./core/b.js";', "there is no module ./core/b.js"),
        ('import { x } from "https://example.org/a.js";', "there is no module https"),
        ('const x = () => import("./core/b.js");', "there is no module ./core/b.js"),
        ('import { x } from "../../etc/passwd";', "there is no module"),
    ],
)
def test_another_form_is_refused(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^app.js: {said}"):
        join_modules({"app.js": line, "core/a.js": ""}, [], "app.js")
