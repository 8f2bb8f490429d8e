"""The console's modules in one file: run by Node.js where it is installed; forms that it does not know are refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from service.http.console import FOLDER, read_files
from service.http.console_modules import joined

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
        (tmp_path / "one", {"app.js": joined(MODULES, ["vendor/library.js"], "app.js")}),
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


def test_every_module_is_in_the_file_and_comments_are_not() -> None:
    script = read_files()["/console/app.js"].content.decode()
    for path in FOLDER.rglob("*.js"):
        name = path.relative_to(FOLDER).as_posix()
        assert f'["{name}"] = ' in script, name
    assert "\n//" not in script


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
        joined({"app.js": line, "core/a.js": ""}, [], "app.js")


@pytest.mark.parametrize("form", ['import { x } from "./PLACE.js";', 'export { x } from "./PLACE.js";', 'export * from "./PLACE.js";'])
def test_modules_that_need_each_other_in_a_circle_are_refused(form: str) -> None:
    modules = {name: form.replace("PLACE", other) for name, other in (("app.js", "a"), ("a.js", "b"), ("b.js", "a"))}
    with pytest.raises(ValueError, match=r"in a circle: app.js → a.js → b.js → a.js"):
        joined(modules, [], "app.js")
