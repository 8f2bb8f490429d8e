"""What the Dockerfile and the compose files promise, as far as it can be checked without an engine. tests/stack/test_stack.py runs them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import Settings
from tests import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]
ONCE = ("trainer", "sharder", "publisher")
SHARDS = ("shard-0", "shard-1")
SERVING = ("service", "service-gpu", "router", *SHARDS)
TARGETS = ("service-cpu", "service-gpu", "trainer", "loadtest")
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::?-([^}]*))?\}")

requirements: Callable[..., list[str]] = runpy.run_path(str(ROOT / "docker/requirements.py"))["requirements"]


# -- the Dockerfile ----------------------------------------------------------------------------------------------------------------------


def stages() -> dict[str, tuple[str, list[str]]]:
    """Stage → (what it is made from, its instructions, each on one line)."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
    found: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in filter(None, lines):
        start = re.fullmatch(r"FROM (\S+) AS (\S+)", line)
        if start:
            name = start[2]
            found[name] = (start[1], [])
        elif name:
            found[name][1].append(line)
    return found


STAGES = stages()


def instructions(stage: str) -> list[str]:
    """All instructions that make a stage, the first one first."""
    base, own = STAGES[stage]
    return (instructions(base) if base in STAGES else []) + own


def last(stage: str, instruction: str) -> str:
    return next(
        (line.removeprefix(instruction).strip() for line in reversed(instructions(stage)) if line.startswith(f"{instruction} ")), ""
    )


def copied(stage: str) -> Iterator[tuple[str | None, list[str]]]:
    """(stage that it comes from, or None for the repository; sources) of every COPY of a stage."""
    for line in instructions(stage):
        found = re.fullmatch(r"COPY (?:--from=(\S+) |--chown=\S+ )?(.*) \S+", line)
        if found:
            yield found[1], found[2].split()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    run = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_stages_share_a_base_and_the_builder_is_sent_what_they_copy() -> None:
    assert {base for base, _ in STAGES.values() if base not in STAGES} == {"${BASE_IMAGE}"}
    assert re.search(r"^ARG BASE_IMAGE=python:3\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?$", DOCKERFILE, re.MULTILINE)
    assert not DOCKERFILE.startswith("# syntax")  # which would be fetched, even where nothing can be
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert sent == {source for stage in STAGES for origin, sources in copied(stage) if origin is None for source in sources}
    assert {name for name in sent if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_installs_by_hash_before_the_source_code_comes_and_lists_what_is_in_it(target: str) -> None:
    """All but torch, whose index can be chosen."""
    from_repository = {source for stage, sources in copied(f"dependencies-{target}") if stage is None for source in sources}
    assert from_repository == {"requirements.lock", "docker/requirements.py", "docker/sbom.py", "docker/slim.sh"}
    installing = " && ".join(line for line in instructions(f"dependencies-{target}") if "pip install" in line)
    hashed = [f"--require-hashes -r {name}.txt -c requirements.lock" for name in (target, "of-torch")]
    torch = {"trainer": ['--no-deps "$@" -r torch.txt'], "service-gpu": ["--no-deps -r torch.txt"]}.get(target, [])
    expected = ["--require-hashes -r pip.txt", hashed[0], *torch, *hashed[1:][: len(torch)]]
    assert [line.strip() for line in re.findall(r"pip install ([^&;]*)", installing)] == expected
    made = last(f"dependencies-{target}", "RUN")
    at = made.index(f"/opt/espalier/bin/python sbom.py espalier-{target} > /opt/espalier/sbom.cdx.json")
    assert made.rindex("pip install") < at
    assert (f"dependencies-{target}", ["/opt/espalier"]) in copied(target)


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_a_numbered_user_get_their_signals_and_say_whether_they_are_ready(target: str) -> None:
    assert last(target, "USER") == "10001:10001"  # Kubernetes' runAsNonRoot can check a number only
    own = STAGES[target][1]
    assert not any(line.startswith(("RUN", "COPY")) for line in own[own.index("USER 10001:10001") :])
    started = last(target, "ENTRYPOINT") or last(target, "CMD")
    assert started.startswith("["), "a shell would stand between the signal and the service"
    if target.startswith("service"):
        assert "/readyz" in last(target, "HEALTHCHECK")
        assert last(target, "VOLUME") in ("/models", "/cache")
        made = instructions(target)
        sample = made.index("COPY --chown=10001:10001 models/debian-depends/1 /models/debian-depends/1")
        assert sample < made.index("VOLUME /models"), "a change of a volume's folder after this line is lost"


def test_an_image_installs_what_its_extras_require() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    written = {
        target: line.split()
        for line, target in re.findall(r"requirements\.py (?!--of)([\w -]+) > ([\w-]+)\.txt", DOCKERFILE.replace("\\\n", " "))
    }
    assert set(written) == set(TARGETS)
    for target, words in written.items():
        extras, _, without = " ".join(words).partition("--without")
        names = {re.split(r"\W", line.replace("-", "_"))[0] for line in requirements(pyproject, extras.split(), without.split())}
        assert "numpy" in names, target
        assert "torch" not in names, f"{target}: it has no hash in requirements.lock, and is installed by itself"
        assert ("onnxruntime" in names, "onnxruntime_gpu" in names) == (target in ("service-cpu", "trainer"), target == "service-gpu")
        assert ("fastapi" in names) == target.startswith("service"), target
        assert ("scipy" in names) == (target == "trainer"), target


def test_requirements_are_those_of_extras_and_of_the_extras_that_they_name() -> None:
    extras = 'dev = ["own[x, y]", "d"]\nx = ["b[c]==2"]\ny = ["own[z]"]\nz = ["e"]\n'
    pyproject = f'[project]\nname = "own"\ndependencies = ["a>=1"]\n[project.optional-dependencies]\n{extras}'
    assert requirements(pyproject, ["dev"]) == ["a>=1", "b[c]==2", "d", "e"]
    assert requirements(pyproject, ["x"], ["b"]) == ["a>=1"]
    with pytest.raises(KeyError, match="other"):
        requirements(pyproject, ["other"])
    with pytest.raises(KeyError, match="--without d: not required"):
        requirements(pyproject, ["x"], ["d"])
    lines = ["b>=1 ; python_version >= '3'", "c[extra]", "d ; extra == 'x'", 'e==2; sys_platform == "linux" and extra == "y"']
    assert runpy.run_path(str(ROOT / "docker/requirements.py"))["of_installed"](lines) == lines[:2]


# -- the compose file --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_limited_and_pinned(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == ("no" if name in ONCE else "unless-stopped")
    assert {"cpus", "mem_limit", "pids_limit"} <= service.keys()
    assert 0 <= float(VARIABLE.sub(r"\2", str(service["cpus"]))) <= 1, "Docker refuses a limit above the cores that there are; 0 is none"
    assert {"max-size", "max-file"} <= service["logging"]["options"].keys()
    assert not {"privileged", "network_mode", "pid", "ipc", "container_name"} & service.keys()
    assert "docker.sock" not in str(service.get("volumes"))
    if "build" in service:
        assert service["build"]["target"] in TARGETS
        assert service["image"] == f"espalier-{service['build']['target']}:${{TAG:-local}}"
    else:
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+(\.\d+)?(@sha256:[0-9a-f]{64})?", service["image"])


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in ONCE])
def test_every_service_that_stays_publishes_on_one_address_and_is_checked(name: str) -> None:
    service = SERVICES[name]
    assert bool(service.get("ports")) == (name not in SHARDS)  # the router alone asks those
    assert all(port.startswith("${BIND:-127.0.0.1}:${") for port in service.get("ports", []))
    assert "healthcheck" in service or last(service["build"]["target"], "HEALTHCHECK")


def test_the_router_asks_for_every_shard_by_its_name() -> None:
    router, shards = SERVICES["router"], {name: SERVICES[name] for name in SHARDS}
    assert router["command"] == ["--shards", ",".join(f"dns+http://{name}:8000" for name in SHARDS)]
    assert [shard["environment"]["ESPALIER_SHARD"] for shard in shards.values()] == [0, 1]
    assert all(shard["deploy"] == {"replicas": 2} for shard in shards.values())
    assert "--shards 2" in SERVICES["sharder"]["command"][-1]
    keys = {name: {variable for variable in SERVICES[name]["environment"] if "KEYS" in variable} for name in (*SHARDS, "router")}
    assert keys["router"] == {f"ESPALIER_{role}_KEYS" for role in ("ADMIN", "INTERNAL", "RETRIEVE", "WRITE")} | {"ESPALIER_KEYS_FILE"}
    assert keys["shard-0"] == keys["shard-1"] == {"ESPALIER_INTERNAL_KEYS"}


TRAIN, SHARD, PUBLISH = (f"-m training {name}" for name in ("fit --config training/configs/debian-depends.toml", "shard", "publish"))


@pytest.mark.parametrize(
    ("name", "there", "expected"),
    [
        ("trainer", [], [f"{TRAIN} --out MODEL/1 --resume"]),
        ("trainer", ["MODEL/1"], [f"{TRAIN} --out MODEL/2 --resume"]),
        ("trainer", ["MODEL/2", "MODEL/10", "MODEL/.11.work", "MODEL/01"], [f"{TRAIN} --out MODEL/11 --resume"]),
        ("sharder", ["MODEL/1", "MODEL/2", "MODEL/.3.work"], [f"{SHARD} --model MODEL/2 --shards 2 --out MODEL-shards"]),
        ("sharder", ["MODEL/2", "MODEL-shards/1/2"], []),
        ("publisher", ["MODEL/4"], [f"{PUBLISH} --model MODEL/4 --store s3://espalier"]),
        (
            "publisher",
            ["MODEL/4", "MODEL-shards/1/4"],
            [
                f"{PUBLISH} --model MODEL-shards --version 4 --store s3://espalier/debian-depends-shards",
                f"{PUBLISH} --model MODEL/4 --store s3://espalier",
            ],
        ),
    ],
)
def test_what_runs_once_takes_the_next_or_the_highest_version(tmp_path: Path, name: str, there: list[str], expected: list[str]) -> None:
    """Shards are published before what they are of, and cut once."""
    model = f"{tmp_path}/models/debian-depends"
    for folder in there:
        version = Path(folder.replace("MODEL", model))
        version.mkdir(parents=True)
        (version / "manifest.json").touch()
    assert said(SERVICES[name], tmp_path) == [command.replace("MODEL", model) for command in expected]


def said(service: dict[str, Any], folder: Path) -> list[str]:
    """The commands of Python that a service's shell would run, with `folder` in place of the root."""
    (folder / "python").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "python").chmod(0o755)
    command = [word.replace("$$", "$").replace("/models/", f"{folder}/models/") for word in service["command"]]
    run = subprocess.run(command, env={"PATH": f"{folder}:{os.defpath}"}, capture_output=True, text=True)
    assert run.stderr == ""
    return run.stdout.splitlines()


@pytest.mark.parametrize("name", ["service", "service-gpu", "router"])
def test_a_service_gets_keys_limits_and_whom_it_follows(name: str) -> None:
    limits = {f"ESPALIER_{field.upper()}" for field in Settings.model_fields if field.startswith("max_")}
    assert len(limits) > 15
    passed = limits | {"ESPALIER_WRITE_KEYS", "ESPALIER_KEYS_FILE", "ESPALIER_FOLLOW", "ESPALIER_FOLLOW_KEY"}
    environment = SERVICES[name]["environment"]
    assert {variable: environment.get(variable) for variable in passed} == {variable: f"${{{variable}:-}}" for variable in passed}
    assert "${KEYS:-./docker/keys}:/keys:ro" in SERVICES[name]["volumes"]


def defaults() -> dict[str, set[str]]:
    """Variable → the defaults that the compose file gives it."""
    found: dict[str, set[str]] = {}
    for name, default in VARIABLE.findall(COMPOSE):
        found.setdefault(name, set()).add(default)
    return found


def test_the_example_lists_every_variable_mounts_are_there_and_no_file_holds_a_secret() -> None:
    lines = re.findall(r"^#([A-Z]\w*)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert len(dict(lines)) == len(lines)
    assert {name: {default} for name, default in lines} == defaults()
    assert [line for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")] == []
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"KEY|PASSWORD|SECRET|TOKEN", variable):
                own = {"AWS_ACCESS_KEY_ID": "STORE_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY": "STORE_SECRET_KEY"}.get(variable, variable)
                assert value == f"${{{own}:-}}", f"{name}: {variable}"
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    volumes = [VARIABLE.sub(r"\2", volume).split(":") for service in SERVICES.values() for volume in service["volumes"]]
    mounts = [volume for volume in volumes if volume[0].startswith("./")]
    assert mounts
    for source, _, *mode in mounts:
        assert (ROOT / source).exists(), source
        assert mode == ["ro"], source
    assert {source for source, *_ in volumes if not source.startswith(".")} == set(yaml.safe_load(COMPOSE)["volumes"])


@pytest.mark.parametrize("name", SERVING)
def test_the_service_starts_with_the_settings_of_the_compose_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("ESPALIER_")]:
        monkeypatch.delenv(variable)
    environment = {variable: VARIABLE.sub(r"\2", str(value)) for variable, value in SERVICES[name]["environment"].items()}
    target = SERVICES[name]["build"]["target"]
    image = dict(re.findall(r"(ESPALIER_\w+)=(\S+)", " ".join(line for line in instructions(target) if line.startswith("ENV"))))
    known = {f"ESPALIER_{field.upper()}" for field in Settings.model_fields}
    assert {variable for variable in environment.keys() | image.keys() if not variable.startswith(("AWS_", "XDG_"))} <= known
    for variable, value in (image | environment).items():
        monkeypatch.setenv(variable, value)
    settings = Settings()
    folder = "/models/debian-depends-shards" if name in SHARDS else "/models"
    assert (settings.host, str(settings.models), settings.log_format) == ("0.0.0.0", folder, "json")
    assert all(port.endswith(f":{settings.port}") for port in SERVICES[name].get("ports", []))
    grace_s = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.drain_delay_s + settings.drain_s + 10
    assert (settings.retrieve_keys, settings.write_keys, settings.admin_keys) == ((), (), ())
    assert SERVICES[name]["ulimits"] == {"nofile": {"soft": 16384, "hard": 16384}}, "many connections"
