"""`make stack-test`: the images, and the compose file brought up with them. What cannot be had on a machine is skipped with the reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.stack.containers import Engine, Engines, Unavailable, ask, base_image, compose_command, engines, pip_secrets, run

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(1800)]

TAG = "stack-test"
SERVICE, TRAINER, LOAD = (f"espalier-{name}:{TAG}" for name in ("service-cpu", "trainer", "loadtest"))
QUERY = {"model": "debian-depends", "queries": [{"history": ["libsdl2-2.0-0", "libgl1"]}], "m": 5}
Say = Callable[[str], None]


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Say:
    """Writes a figure to the terminal while the tests run."""
    capture = request.config.pluginmanager.get_plugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            print(f"\n  {line}", end="", flush=True)

    return say


# -- the images --------------------------------------------------------------------------------------------------------------------------


@dataclass
class Images:
    """What was built, with which engine, over which base."""

    engine: Engine
    engines: Engines
    base: str

    def python(self, image: str, program: str) -> Any:
        """What a program prints as JSON in a container that is as confined as the compose file's."""
        confined = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none"]
        return json.loads(self.engine.docker("run", "--rm", *confined, "--entrypoint", "python", image, "-c", program).stdout)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, say: Say) -> Iterator[Images]:
    try:
        with engines() as (engine, both):
            base = base_image(engine)
            say(f"{engine.description}, base image {base} of {size_mb(engine, base):.0f} MB")
            with pip_secrets(tmp_path_factory.mktemp("pip")) as options:
                for image in (SERVICE, TRAINER, LOAD):
                    begin = time.monotonic()
                    target = image.removeprefix("espalier-").removesuffix(f":{TAG}")
                    words = ["--network=host", "--build-arg", f"BASE_IMAGE={base}", "--target", target, "--tag", image, *options]
                    engine.docker("build", *words, ROOT, timeout_s=1500)
                    say(f"{target}: {size_mb(engine, image):.0f} MB, built in {time.monotonic() - begin:.0f} s")
            both.tidy()
            try:
                yield Images(engine, both, base)
            finally:
                if both.daemon is None:  # the engine is somebody's: its build cache keeps the layers, the names go
                    engine.docker("image", "rm", SERVICE, TRAINER, LOAD, check=False)
    except Unavailable as missing:
        pytest.skip(str(missing))


def size_mb(engine: Engine, image: str) -> float:
    return int(engine.docker("image", "inspect", "--format", "{{.Size}}", image).stdout) / 1e6


def test_the_service_image_holds_what_serves_and_nothing_that_trains(images: Images) -> None:
    names = ["torch", "triton", "nvidia", "training", "sklearn", "polars", "pip", "pytest", "onnxruntime", "service", "opentelemetry"]
    program = f"import importlib.util, json; print(json.dumps([n for n in {names} if importlib.util.find_spec(n)]))"
    assert images.python(SERVICE, program) == ["onnxruntime", "service", "opentelemetry"]


ON_A_GPU = ("espalier.engines.triton",)
"""What needs torch and triton: `open_engine` imports it where there is a GPU."""


@pytest.mark.parametrize(
    ("image", "packages", "without"),
    [
        (SERVICE, ["espalier", "service"], ON_A_GPU),
        (TRAINER, ["espalier", "training"], ON_A_GPU),
        (LOAD, ["espalier_client", "loadtest"], ()),
    ],
)
def test_every_module_of_an_image_can_be_imported(images: Images, image: str, packages: list[str], without: tuple[str, ...]) -> None:
    program = (
        "import importlib, json, pathlib\n"
        f"files = [path for package in {packages} for path in sorted(pathlib.Path(package).rglob('*.py')) if path.name != '__main__.py']\n"
        "names = ['.'.join(path.with_suffix('').parts).removesuffix('.__init__') for path in files]\n"
        f"names = [name for name in names if not name.startswith({without})]\n"
        "print(json.dumps([importlib.import_module(name).__name__ for name in names]))"
    )
    assert set(packages) < set(images.python(image, program))


@pytest.mark.parametrize("image", [SERVICE, TRAINER, LOAD])
def test_images_run_as_a_fixed_user_who_owns_the_models_and_nothing_else(images: Images, image: str) -> None:
    program = (
        "import json, os, pathlib\n"
        "writable = [f for f in ('/', '/app', '/opt/espalier', '/etc', '/tmp') if os.access(f, os.W_OK)]\n"
        "print(json.dumps([os.getuid(), os.getgid(), os.stat('/models').st_uid, writable]))"
    )
    assert images.python(image, program) == [10001, 10001, 10001, ["/tmp"]]


# -- the stack ---------------------------------------------------------------------------------------------------------------------------


@dataclass
class Stack:
    """The compose file, with images that are there in place of those that are not."""

    engine: Engine
    images: Images
    files: list[Path]
    env_file: Path
    environment: dict[str, str]
    services: list[str]
    missing: dict[str, str] = field(default_factory=dict)

    def compose(self, *words: str, timeout_s: float = 600, check: bool = True) -> subprocess.CompletedProcess[str]:
        files = [word for path in self.files for word in ("-f", str(path))]
        # Neither a .env beside the compose file nor the environment may lead the test to somebody's models, keys or limits.
        own = ["--env-file", str(self.env_file), "--project-directory", str(ROOT)]
        unset = {name: "" for path in self.files for name in re.findall(r"\$\{(\w+)", path.read_text()) if name in os.environ}
        environment = unset | self.engine.environment | self.environment
        return run([*compose_command(self.engine.client), *own, *files, *words], environment=environment, timeout_s=timeout_s, check=check)

    def up(self) -> float:
        """Seconds until the stack was up and the service ready."""
        begin = time.monotonic()
        self.compose("up", "-d", "--no-build", *self.services)
        while ask(self.engine, self.url("SERVICE_PORT", "/readyz"))[0] != 200:
            assert time.monotonic() - begin < 300, self.compose("logs", "--tail", "50").stdout
            time.sleep(0.1)
        return time.monotonic() - begin

    def url(self, port: str, path: str) -> str:
        return f"http://127.0.0.1:{self.environment[port]}{path}"

    def container(self, service: str) -> str:
        return self.compose("ps", "-a", "-q", service).stdout.split()[0]

    def state(self, service: str) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.engine.docker("inspect", "--format", "{{json .State}}", self.container(service)).stdout)
        return state

    def wait_for(self, what: Callable[[], bool], within_s: float = 120) -> None:
        deadline = time.monotonic() + within_s
        while not what():
            assert time.monotonic() < deadline, self.compose("logs", "--tail", "50").stdout
            time.sleep(0.2)


@pytest.fixture(scope="module")
def stack(images: Images, tmp_path_factory: pytest.TempPathFactory, say: Say) -> Iterator[Stack]:
    """The stack, up from empty volumes."""
    try:
        compose_command(images.engine.client)
        pulled = {name: images.engine.pull(image_of(name)) for name in ("prometheus", "grafana")}
        stack = offline_stack(images, pulled, tmp_path_factory.mktemp("stack"))
        stack.engine = images.engines.runner()
    except Unavailable as missing:
        pytest.skip(str(missing))
    stack.compose("down", "-v")
    try:
        say(f"{stack.engine.description}; {' '.join(stack.services)}")
        say(f"from `up` with an empty volume to ready: {stack.up():.1f} s")
        yield stack
    finally:
        stack.compose("--profile", "load", "--profile", "shards", "--profile", "train", "down", "-v", "--timeout", "5", check=False)


def image_of(service: str) -> str:
    return str(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][service]["image"])


def offline_stack(images: Images, pulled: dict[str, bool], folder: Path) -> Stack:
    config = folder / "short.toml"
    text = (ROOT / "training/configs/debian-depends.toml").read_text()
    for pattern, few in (
        ("steps = 2000", "steps = 5"),
        ("[data]", "[data]\nsplit = { test_share = 0.01, validation_share = 0.01 }"),
        ("[search]", "[memory]\nweight = 0\n\n[search]\ngamma = 0.3"),
    ):
        assert text.count(f"\n{pattern}\n") == 1
        text = text.replace(f"\n{pattern}\n", f"\n{few}\n")
    config.write_text(text)
    ports = {name: str(port) for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)}
    environment = ports | {"COMPOSE_PROJECT_NAME": "espalier-stack-test", "TAG": TAG, "BIND": "127.0.0.1", "STACK_CONFIG": str(config)}
    environment["ESPALIER_POLL_S"] = "1"
    empty = folder / "empty.env"
    empty.touch()
    files = [ROOT / "docker-compose.yml", ROOT / "docker/offline/training.yml"]
    stack = Stack(images.engine, images, files, empty, environment, ["service"])
    prometheus = shutil.which("prometheus")
    if not (ROOT / "docker/prometheus/prometheus.yml").exists():
        stack.missing["prometheus"] = "docker/prometheus/prometheus.yml is not there"
    elif not pulled["prometheus"] and prometheus is None:
        stack.missing["prometheus"] = f"{image_of('prometheus')} cannot be pulled, and no prometheus is installed here"
    else:
        stack.services.append("prometheus")
        if not pulled["prometheus"]:
            stack.files.append(ROOT / "docker/offline/prometheus.yml")
            stack.environment |= {"STACK_BASE_IMAGE": images.base, "STACK_PROMETHEUS": str(Path(str(prometheus)).resolve())}
    if pulled["grafana"] and "prometheus" in stack.services:
        stack.services.append("grafana")
    else:
        stack.missing["grafana"] = f"{image_of('grafana')} cannot be pulled: start it once by hand where it can"
    return stack


PORTS = ("SERVICE_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "LOCUST_PORT", "ROUTER_PORT")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listening.getsockname()[1]) for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def retrieved(stack: Stack, port: str = "SERVICE_PORT") -> Any:
    status, text = ask(stack.engine, stack.url(port, "/retrieve"), QUERY)
    assert status == 200, text
    return json.loads(text)


def test_the_sample_is_served_through_the_published_port(stack: Stack) -> None:
    answer = retrieved(stack)
    assert (answer["model"], answer["version"], answer["engine"]) == ("debian-depends", 1, "compiled-cpu")
    assert len(answer["results"][0]["items"]) == 5


def test_the_health_check_of_the_image_finds_the_service_healthy(stack: Stack) -> None:
    stack.wait_for(lambda: stack.state("service")["Health"]["Status"] == "healthy")


def test_metrics_count_the_requests_that_came_in(stack: Stack) -> None:
    ask(stack.engine, stack.url("SERVICE_PORT", "/retrieve"), QUERY)
    status, text = ask(stack.engine, stack.url("SERVICE_PORT", "/metrics"))
    assert status == 200
    (count,) = re.findall(r'^espalier_requests_total{model="debian-depends",status="200"} (\S+)$', text, re.MULTILINE)
    assert float(count) >= 1


def test_logs_are_json_without_a_line_that_is_not(stack: Stack) -> None:
    lines = stack.engine.docker("logs", stack.container("service")).stderr.splitlines()
    assert lines
    assert all({"time", "level", "message"} <= json.loads(line).keys() for line in lines)


def test_containers_are_as_confined_as_the_compose_file_says(stack: Stack) -> None:
    for service in stack.services:
        host = json.loads(stack.engine.docker("inspect", "--format", "{{json .HostConfig}}", stack.container(service)).stdout)
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["Memory"] > 0, service
        cpus = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][service]["cpus"]
        assert host["NanoCpus"] == 1e9 * float(re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(cpus))), service  # 0: no limit
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        assert {binding["HostIp"] for bindings in host["PortBindings"].values() for binding in bindings} == {"127.0.0.1"}, service


def test_prometheus_scrapes_the_service_and_has_loaded_the_rules(stack: Stack) -> None:
    skip_without(stack, "prometheus")

    def prometheus(path: str) -> Any:
        status, text = ask(stack.engine, stack.url("PROMETHEUS_PORT", path))
        return json.loads(text)["data"] if status == 200 else None

    def up() -> bool:
        targets = prometheus("/api/v1/targets")
        return targets is not None and ("http://service:8000/metrics", "up") in {
            (target["scrapeUrl"], target["health"]) for target in targets["activeTargets"]
        }

    stack.wait_for(up)
    groups = prometheus("/api/v1/rules")["groups"]
    written = [group["name"] for path in sorted((ROOT / "docker/prometheus/rules").glob("*.yml")) for group in rules(path)]
    assert sorted(group["name"] for group in groups) == sorted(written) != []

    def evaluated() -> bool:
        return all(rule["health"] == "ok" for group in prometheus("/api/v1/rules")["groups"] for rule in group["rules"])

    stack.wait_for(evaluated)


def rules(path: Path) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(path.read_text())["groups"]
    return groups


def test_grafana_has_the_dashboards(stack: Stack) -> None:
    skip_without(stack, "grafana")
    stack.wait_for(lambda: ask(stack.engine, stack.url("GRAFANA_PORT", "/api/health"))[0] == 200)
    status, text = ask(stack.engine, stack.url("GRAFANA_PORT", "/api/search?type=dash-db"))
    written = [json.loads(path.read_text())["uid"] for path in (ROOT / "docker/grafana/dashboards").glob("*.json")]
    assert status == 200
    assert sorted(found["uid"] for found in json.loads(text)) == sorted(written) != []


def test_locust_loads_the_service_from_its_own_image(stack: Stack, say: Say) -> None:
    if not (ROOT / "loadtest/locustfile.py").exists():
        pytest.skip("loadtest/locustfile.py is not there")
    words = ["locust", "-f", "loadtest/locustfile.py", "--host", "http://service:8000", "--models", "/models"]
    words += ["--headless", "--only-summary", "--rate", "20", "--seconds", "5"]
    ran = stack.compose("--profile", "load", "run", "--rm", "--no-deps", "-T", "load", *words, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.findall(r"Aggregated\s+(\d+)\s+0\(0\.00%\)", ran.stdout + ran.stderr)
    assert found, ran.stdout + ran.stderr
    assert int(found[0]) > 0
    say(f"locust: {found[0]} requests in 5 s, none failed")


def test_locust_shows_its_web_page(stack: Stack) -> None:
    stack.compose("--profile", "load", "up", "-d", "--no-build", "load")
    try:
        stack.wait_for(lambda: ask(stack.engine, stack.url("LOCUST_PORT", "/"))[0] == 200)
        assert "Locust" in ask(stack.engine, stack.url("LOCUST_PORT", "/"))[1]
    finally:
        stack.compose("--profile", "load", "rm", "--stop", "--force", "load")


@pytest.fixture(scope="module")
def sharded(stack: Stack, say: Say) -> Iterator[Stack]:
    """The profile `shards`, up beside the rest: two shards in two replicas, and the router."""
    begin = time.monotonic()
    services = ["router", "sharder", "shard-0", "shard-1"]
    stack.compose("--profile", "shards", "up", "-d", "--no-build", *services)
    try:
        stack.wait_for(lambda: ask(stack.engine, stack.url("ROUTER_PORT", "/readyz"))[0] == 200, within_s=400)
        say(f"from `--profile shards up` to a router that is ready, cutting included: {time.monotonic() - begin:.1f} s")
        yield stack
    finally:
        stack.compose("--profile", "shards", "rm", "--stop", "--force", *services)


def test_the_router_answers_from_all_shards_what_the_service_answers(sharded: Stack) -> None:
    answer, alone = retrieved(sharded, "ROUTER_PORT"), retrieved(sharded)
    assert answer["coverage"] == {"items": 1.0, "shards": 2, "answered": 2, "missing": []}
    assert (answer["model"], answer["version"], answer["engine"]) == ("debian-depends", 1, "sharded")
    # Two shards search with two whole beams, so the one may find more; the first results are those of both.
    assert [item["id"] for item in answer["results"][0]["items"][:3]] == [item["id"] for item in alone["results"][0]["items"][:3]]


def test_prometheus_finds_every_replica_and_the_router(sharded: Stack) -> None:
    skip_without(sharded, "prometheus")

    def up() -> bool:
        status, text = ask(sharded.engine, sharded.url("PROMETHEUS_PORT", "/api/v1/targets"))
        targets = json.loads(text)["data"]["activeTargets"] if status == 200 else []
        jobs = [target["labels"]["job"] for target in targets if target["health"] == "up"]
        return (jobs.count("espalier"), jobs.count("espalier-shards")) == (2, 4)

    sharded.wait_for(up)


def test_a_replica_may_end_unnoticed_and_a_shard_costs_coverage_alone(sharded: Stack) -> None:
    first, second = sharded.compose("ps", "-q", "shard-0").stdout.split()
    sharded.engine.docker("kill", first)
    for _ in range(50):
        assert retrieved(sharded, "ROUTER_PORT")["coverage"]["items"] == 1.0
    sharded.engine.docker("kill", second)
    sharded.wait_for(lambda: retrieved(sharded, "ROUTER_PORT")["coverage"]["missing"] == [0])
    assert 0.3 < retrieved(sharded, "ROUTER_PORT")["coverage"]["items"] < 0.7
    sharded.engine.docker("start", first, second)
    sharded.wait_for(lambda: retrieved(sharded, "ROUTER_PORT")["coverage"]["items"] == 1.0)


def test_the_trainer_trains_the_next_version_and_the_running_service_takes_it(stack: Stack) -> None:
    stack.compose("--profile", "train", "run", "--rm", "--no-deps", "-T", "trainer")
    stack.wait_for(lambda: retrieved(stack)["version"] == 2)


def test_the_next_up_serves_what_the_volume_holds(stack: Stack, say: Say) -> None:
    stack.compose("down")
    took = stack.up()
    assert retrieved(stack)["version"] == 2
    say(f"from `up` with a filled volume to ready: {took:.1f} s")
    stack.compose("exec", "-T", "service", "python", "-m", "espalier.compile", "--check")
    assert "compiling espalier" not in stack.compose("logs", "service").stdout, "the image brings compiled code"


# A request whose body is half there when the service is told to stop; the rest follows once nobody can connect any more.
_UNDER_WAY = """
import socket, sys
port, body = int(sys.argv[1]), sys.argv[2].encode()
def listens():
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionError:
        return False
    return True
connection = socket.create_connection(("127.0.0.1", port), timeout=60)
head = ["POST /retrieve HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", "Expect: 100-continue"]
connection.sendall("\\r\\n".join([*head, "", ""]).encode())
assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
connection.sendall(body[:10])
print("accepted", flush=True)
sys.stdin.readline()
connection.sendall(body[10:])
answer = b""
while received := connection.recv(65536):
    answer += received
print(answer.split(b"\\r\\n")[0].decode())
"""


def test_a_stop_answers_what_is_under_way_and_ends_with_success(stack: Stack) -> None:
    container = stack.container("service")
    words = [
        *stack.engine.inside,
        sys.executable,
        "-c",
        _UNDER_WAY,
        stack.environment["SERVICE_PORT"],
        json.dumps(QUERY | {"timeout_ms": 60_000}),
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin
        assert client.stdout
        assert client.stdout.readline() == "accepted\n"
        begin = time.monotonic()
        stack.engine.docker("kill", "--signal", "TERM", container)
        stack.wait_for(lambda: ask(stack.engine, stack.url("SERVICE_PORT", "/readyz"))[0] == 0, within_s=20)
        assert stack.state("service")["Running"]
        client.stdin.write("go on\n")
        client.stdin.flush()
        assert client.stdout.readline() == "HTTP/1.1 200 OK\n"
        stack.engine.docker("stop", container)
        assert time.monotonic() - begin < 60
    assert stack.state("service")["ExitCode"] == 0


def skip_without(stack: Stack, service: str) -> None:
    if service in stack.missing:
        pytest.skip(f"{service}: {stack.missing[service]}")
