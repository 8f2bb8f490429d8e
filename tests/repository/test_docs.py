"""The documentation says what the code does: keys, settings, routes, metrics, statuses, and every command a reader might copy."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from service.app import create_app
from service.errors import ServiceError
from service.http.routes import _PROBLEMS
from service.reference import as_markdown, main
from service.retrieval.schemas import RetrieveRequest
from service.settings import Settings
from service.watch.metrics import Metrics
from tests import ROOT
from tests.helps import help_of
from tests.service.running import every_metric
from training.specification.models import SPECIFICATION

DOCUMENTS = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md", "data/debian-bookworm/README.md"),
    *("deploy/helm/espalier/README.md", "deploy/ray/README.md"),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "benchmarks" / "papers").rglob("*.md"))),
]


def text(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(document), re.MULTILINE | re.DOTALL)


def table(document: str, first_cell: str) -> dict[str, tuple[str, ...]]:
    """The rows of a document's tables whose first cell is code that matches: the code → the other cells."""
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text(document), re.MULTILINE)
    found = [(name, tuple(cell.strip() for cell in rest.split(" | "))) for name, rest in rows if re.fullmatch(first_cell, name)]
    assert len(dict(found)) == len(found), f"{document} describes one of these twice: {[name for name, _ in found]}"
    return dict(found)


# -- what can be set, asked and watched -----------------------------------------------------------------------------------


def test_the_reference_is_its_commands_output(capsys: pytest.CaptureFixture[str]) -> None:
    page = text("docs/reference.md")
    assert page == as_markdown(), "python -m service.reference > docs/reference.md"
    main([])
    assert capsys.readouterr().out == page


def test_every_setting_route_metric_and_error_is_described(tmp_path: Path) -> None:
    rows = table("docs/reference.md", "ESPALIER_[A-Z_]+")
    assert all(meaning for _, meaning in rows.values())
    described = {name: default for name, (default, _) in rows.items()}
    assert described == {f"ESPALIER_{name.upper()}": env(field.default) for name, field in Settings.model_fields.items()}
    manifest = tmp_path / "any" / "1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()  # the folder is not read before the service starts
    routes = [route for route in create_app(Settings(models=tmp_path)).routes if isinstance(route, APIRoute | Route)]
    served = {f"{method} {route.path_format}" for route in routes for method in route.methods or ()}
    meant = {name for name in served if not name.startswith(("HEAD ", "GET /console/"))}
    assert set(table("docs/reference.md", "(GET|POST|PUT|DELETE) /.*")) == meant
    families = [family for family in text_string_to_metric_families(every_metric()) if family.samples]
    scraped = {family.name + "_total" * (family.type == "counter"): set(family.samples[0].labels) - {"le"} for family in families}
    described = {name: cells[0] for name, cells in table("docs/reference.md", "espalier_[a-z_]+").items()}
    assert {name: set(labels.split(", ")) - {"none"} for name, labels in described.items()} == scraped
    assert set(scraped) == set(re.findall(r"^# TYPE (\S+)", Metrics().render().decode(), re.MULTILINE))
    statuses = set(re.findall(r"^\| (\d{3}) \|", text("docs/serve.md"), re.MULTILINE))
    raised = {error.status for error in ServiceError.__subclasses__()} | set(_PROBLEMS) | {422, 405}
    assert statuses == {str(status) for status in raised}


def env(value: object) -> str:
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


# -- what a reader copies -------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    """(document, command) of every shell line, and of the indented `python -m` lines that introduce a page."""
    found = []
    for document in DOCUMENTS:
        lines = "\n".join(blocks(document, "sh")).replace("\\\n", " ")
        lines = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), lines)  # a JSON body over several lines
        indented = re.findall(r"^    ((?:python -m|espalier) .*)$", text(document), re.MULTILINE)
        inline = re.findall(r"`((?:python -m|make|espalier) [^`|]*)`", text(document))
        found += [(document, line) for line in [*lines.splitlines(), *indented, *inline] if line.strip()]
    return found


COMMANDS = commands()
MAKE = [(document, command) for document, command in COMMANDS if command.startswith("make")]
PYTHON = [(document, command) for document, command in COMMANDS if command.startswith("python -m")]
INSTALLED = [(document, command) for document, command in COMMANDS if command.startswith("espalier ")]


def test_the_readme_has_its_commands_and_shell_blocks_hold_known_ones_alone() -> None:
    readme = [command for document, command in COMMANDS if document == "README.md"]
    for start in (
        "make run",
        "make test",
        "curl ",
        *(f"espalier {name} " for name in ("compare", "new", "fit", "evaluate", "predict", "serve")),
    ):
        assert any(command.startswith(start) for command in readme), start
    known: tuple[str, ...] = (
        "make",
        "python -m",
        "python examples/",
        "espalier ",
        "pip install ",
        "curl ",
        "export ESPALIER_",
        ". .venv/bin/activate",
        "ruff format",
    )
    known += ("helm ", "kubectl ", "ray start ", "serve run ", "serve deploy ", "serve status", "export RAY_")
    known += ("locust ", "docker compose ", "docker build ", "docker run ", "DOCKER_BUILDKIT=1 docker build ", "debootstrap ", "tar ")
    assert [command for _, command in COMMANDS if not command.startswith(known)] == []


@pytest.mark.parametrize(("document", "command"), MAKE)
def test_make_commands_name_targets_and_variables_of_the_makefile(document: str, command: str) -> None:
    makefile = text("Makefile")
    for word in shlex.split(command, comments=True)[1:]:
        name, assigned, _ = word.partition("=")
        assert re.search(rf"^{name} [?:]= ?" if assigned else rf"^{name}:", makefile, re.MULTILINE), f"{document}: {command}"


@pytest.mark.release
@pytest.mark.parametrize(("document", "command"), PYTHON)
def test_python_commands_name_modules_and_options_that_exist(document: str, command: str) -> None:
    module, *rest = shlex.split(command.replace("[", " ").replace("]", " "), comments=True)[2:]
    subcommand = rest[0] if module in ("training", "service.journal") and rest and not rest[0].startswith("-") else None
    options = [word for word in rest if re.match(r"--?[a-z]", word)]
    described = help_of(module, subcommand)
    assert [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", described)] == [], f"{document}: {command}"


@pytest.mark.release
@pytest.mark.parametrize(("document", "command"), INSTALLED)
def test_commands_of_an_installation_and_their_options_exist(document: str, command: str) -> None:
    name, *rest = shlex.split(re.sub(r"[][|]", " ", command), comments=True)[1:]
    described = help_of("service.journal", rest[0]) if name == "journal" and rest else help_of("espalier_cli", name)
    options = [word for word in rest if re.match(r"--?[a-z]", word)]
    assert [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", described)] == [], f"{document}: {command}"


def test_requests_in_the_documents_are_valid_and_about_packages_of_the_sample() -> None:
    bodies = [
        shlex.split(command)[shlex.split(command).index("-d") + 1]
        for _, command in COMMANDS
        if command.startswith("curl") and "/retrieve" in command
    ]
    bodies += [block for block in blocks("docs/serve.md", "json") if '"queries"' in block]
    assert len(bodies) >= 2
    known = set(pq.read_table(ROOT / "data/debian-bookworm/depends.parquet").column("dependency").to_pylist())
    for body in bodies:
        request = RetrieveRequest.model_validate_json(body)
        if request.model in ("debian-search", "debian-kinds"):
            assert all(query.text for query in request.queries)
            continue
        if all(query.vector for query in request.queries):
            continue  # of a model that the page says how to train
        assert request.model == "debian-depends"
        for query in request.queries:
            assert query.history
            assert set(query.history) | set(query.exclude) <= known


@pytest.mark.parametrize("document", ["docs/train.md", "docs/text-search.md"])
def test_configurations_in_the_documents_are_valid(document: str) -> None:
    assert blocks(document, "toml")
    for block in blocks(document, "toml"):
        raw = tomllib.loads(block)
        assert SPECIFICATION.checked(raw)


def test_every_log_format_in_the_documents_is_valid() -> None:
    formats = re.findall(r"^\| [^|]* \| `(\{ .* \})`", text("docs/train.md"), re.MULTILINE)
    assert len(formats) >= 5
    for written in formats:
        parsed: dict[str, Any] = tomllib.loads(f"format = {written}")
        SPECIFICATION.checked({"kind": "otm-robust", "name": "any", "data": {"log": "log", **parsed}})


@cache
def python_files() -> set[str]:
    """The names of all of the project's."""
    return {path.name for path in ROOT.glob("*.py")} | {path.name for path in ROOT.glob("[!.]*/**/*.py")}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text(document), re.MULTILINE))
    links = [*re.findall(r"\[[^\]]*\]\(([^)]+)\)", text(document)), *defined.values()]
    assert [link for link in links if "://" not in link and not leads_somewhere(document, link)] == []
    outside_of_blocks = re.sub(r"^```.*?^```$|`[^`]*`", "", text(document), flags=re.MULTILINE | re.DOTALL)
    used = {label or shown for shown, label in re.findall(r"\[([^\[\]]+)\]\[([^\]]*)\]", outside_of_blocks)}
    assert used == set(defined)
    written = set(re.findall(r"[a-z_]+\.py\b", text(document))) - {"utils.py"}  # named as what is not wanted
    assert written <= python_files()


def test_the_indices_list_every_page_and_every_decision_once() -> None:
    listed = re.findall(r"^\| \[[^\]]+\]\(([^)#]+\.md)\) \|", text("docs/README.md"), re.MULTILINE)
    assert sorted(listed) == sorted([*(page.name for page in (ROOT / "docs").glob("[!R]*.md")), "decisions/README.md"])
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"^- \[\d+\]\(([^)]+)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in folder.glob("[0-9]*.md"))


def leads_somewhere(document: str, link: str) -> bool:
    """Whether a relative link's file exists and has the heading that the link's anchor names."""
    path, _, anchor = link.partition("#")
    target = (ROOT / document).parent / path if path else ROOT / document
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings: lower case, blanks as hyphens, other punctuation dropped."""
    outside_of_blocks = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", outside_of_blocks, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_are_a_site_without_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    build = [sys.executable, str(ROOT / "docs/build.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(build, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    for page in ("index", "docs/train", "docs/python", "docs/recipes", "docs/decisions/index", "CHANGELOG"):
        assert (tmp_path / f"site/{page}.html").is_file()
    assert "beam search" in (tmp_path / "site/search/search_index.json").read_text()


def test_a_release_is_tested_on_every_python_that_is_promised() -> None:
    jobs = yaml.safe_load(text(".github/workflows/release.yml"))["jobs"]
    promised = re.findall(r"Programming Language :: Python :: (3\.\d+)", text("pyproject.toml"))
    assert jobs["test"]["strategy"]["matrix"]["python"] == promised
    needs = {name: job.get("needs", []) for name, job in jobs.items()}
    assert needs == {"test": [], "wheel": "test", "images": "wheel", "publish": ["wheel", "images"]}
    targets = re.findall(r"^FROM \S+ AS (\S+)", text("Dockerfile"), re.MULTILINE)
    assert set(jobs["images"]["strategy"]["matrix"]["target"]) <= set(targets)
