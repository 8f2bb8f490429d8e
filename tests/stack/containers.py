"""A container engine for tests/stack/test_stack.py: the one that runs here, or a private one that ends with the tests.

A private engine has two lives over one store of images. To build, it shares the machine's network and has none of its own; to run the
stack, it lives in a network namespace, where its bridges, rules and ports meet nothing of the machine's. Knows docker, dockerd, debootstrap
and pip's configuration. Does not know what is built or run.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from tests import ROOT
from tests.http_servers import listening

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "espalier-stack"
INSTALL = "on Debian, as root: apt-get install docker.io docker-compose debootstrap prometheus iproute2"


class Unavailable(Exception):
    """This machine cannot do it; the message says what is missing."""


def run(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
    timeout_s: float = 300,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """A command's outcome, from the root of the repository. With `check`, a failure is a CalledProcessError that shows what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done


@dataclass
class Engine:
    """A daemon and how to reach it; `inside` goes before a command that has to see the ports that its containers publish."""

    client: str
    description: str
    address: str | None = None
    inside: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment |= {"DOCKER_BUILDKIT": "1"} | ({"DOCKER_HOST": self.address} if self.address else {})

    def docker(self, *words: str | Path, timeout_s: float = 300, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run([self.client, *words], environment=self.environment, timeout_s=timeout_s, check=check)

    def has(self, image: str) -> bool:
        return self.docker("image", "inspect", image, check=False).returncode == 0

    def pull(self, image: str) -> bool:
        """Whether the image is there, pulled if need be; a registry that does not answer soon is not there."""
        try:
            return self.has(image) or self.docker("pull", "--quiet", image, timeout_s=120, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def find_client() -> str:
    """A docker that builds with BuildKit: one before 23, which has it, or one with the buildx plugin. Raises Unavailable."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    clients = [client for folder in folders if (client := shutil.which("docker", path=folder))]
    for client in clients:
        version = re.search(r"version (\d+)\.", run([client, "--version"], check=False).stdout)
        if version and (int(version[1]) < 23 or run([client, "buildx", "version"], check=False).returncode == 0):
            return client
    tried = f"none of {', '.join(clients)} can build with BuildKit" if clients else "there is no docker command"
    raise Unavailable(f"no container engine: {tried} ({INSTALL})")


@contextmanager
def engines() -> Iterator[tuple[Engine, Engines]]:
    """An engine to build with, and what leads from there to the one that runs the stack. Raises Unavailable."""
    client = find_client()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test at a time: it has one project name, and one store
        yield from _engines(client)


def _engines(client: str) -> Iterator[tuple[Engine, Engines]]:
    info = run([client, "info", "--format", "{{.ServerVersion}}"], check=False, timeout_s=30)
    if info.returncode == 0 and info.stdout.strip():
        engine = Engine(client, f"the running engine {info.stdout.strip()}")
        yield engine, Engines(engine)
        return
    missing = [name for name in ("dockerd", "containerd", "unshare", "nsenter", "setpriv", "ip") if shutil.which(name) is None]
    if os.geteuid() != 0:
        missing.append("root, to start one")
    if missing:
        raise Unavailable(f"no container engine: none runs, and for a private one these are missing: {', '.join(missing)} ({INSTALL})")
    with _private(client, CACHE / "engine") as daemon:
        yield daemon.engine, Engines(daemon.engine, daemon)


@dataclass
class Engines:
    """The engine that builds, and the private daemon behind it, if it is one."""

    builder: Engine
    daemon: _Daemon | None = None

    def tidy(self) -> None:
        """Keep a private store from growing with every change: what former builds have left goes, the last layers stay."""
        if self.daemon is not None:
            self.builder.docker("image", "prune", "--force")
            self.builder.docker("builder", "prune", "--force", "--keep-storage", "10GB")

    def runner(self) -> Engine:
        """The engine that can run the stack; the one that built can no longer be used."""
        if self.daemon is None:
            return self.builder
        self.daemon.stop()
        self.daemon.start(isolated=True)
        return self.daemon.engine


class _Daemon:
    def __init__(self, client: str, store: Path, folder: Path, log: IO[bytes]) -> None:
        self.client, self.store, self.folder, self.log = client, store, folder, log
        self.process: subprocess.Popen[bytes] | None = None
        self.engine = Engine(client, "no engine yet")

    def start(self, *, isolated: bool) -> None:
        command = f"exec dockerd --data-root {self.store} --exec-root {self.folder}/run --pidfile {self.folder}/pid"
        command += f" --host unix://{self.folder}/socket --containerd-namespace espalier-stack"
        command = f"ip link set lo up && {command}" if isolated else f"{command} --bridge=none --iptables=false --ip-forward=false"
        shutil.rmtree(self.store / "network", ignore_errors=True)  # or the bridges of a run that was killed would come up on this machine
        namespace = ["unshare", "--net"] if isolated else []
        # Also a killed test run takes its engine along.
        wrapped = ["setpriv", "--pdeathsig", "TERM", *namespace, "sh", "-c", command]
        self.process = subprocess.Popen(wrapped, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        inside = ("nsenter", f"--net=/proc/{self.process.pid}/ns/net") if isolated else ()
        where = "in a network namespace of its own" if isolated else "without a network of its own"
        self.engine = Engine(self.client, f"a private engine {where}", f"unix://{self.folder}/socket", inside)
        deadline = time.monotonic() + 60
        while self.engine.docker("info", check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"no container engine: dockerd does not start:\n{self.said()[-2000:]}")
            time.sleep(0.1)
        left = self.engine.docker("ps", "--all", "--quiet").stdout.split()  # of a run that was killed
        if left:
            self.engine.docker("rm", "--force", "--volumes", *left)

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@contextmanager
def _private(client: str, store: Path) -> Iterator[_Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="stack-"))
    with (folder / "log").open("wb") as log:
        daemon = _Daemon(client, store, folder, log)
        try:
            daemon.start(isolated=False)
            yield daemon
        finally:
            daemon.stop()
            shutil.rmtree(folder, ignore_errors=True)


# -- what a build needs ------------------------------------------------------------------------------------------------------------------


def base_image(engine: Engine) -> str:
    """The Dockerfile's base where it can be pulled, else this machine's Debian, made by debootstrap once. Raises Unavailable."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found
    if engine.pull(found[1]):
        return found[1]
    release = re.search(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.MULTILINE)
    missing = [name for name in ("debootstrap", "apt-get") if shutil.which(name) is None] + ["root"] * (os.geteuid() != 0)
    if missing or release is None:
        raise Unavailable(f"no base image: {found[1]} cannot be pulled, and to make one, {', '.join(missing)} is missing ({INSTALL})")
    name = f"espalier-base:{release[1]}"
    if not engine.has(name):
        archive = CACHE / f"base-{release[1]}.tar"
        if not archive.exists():
            _debootstrap(release[1], archive)
        engine.docker("import", archive, name)
    return name


def _debootstrap(release: str, archive: Path) -> None:
    """A Debian with Python and its venv module, from the mirror and the components that apt uses."""
    targets = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]).stdout
    mirrors: dict[str, list[str]] = {}
    for uri, of, component in (line.split() for line in targets.splitlines()):
        if of == release and component not in mirrors.setdefault(uri, []):
            mirrors[uri].append(component)
    if not mirrors:
        raise Unavailable(f"no base image: apt has no source of {release}")
    uri, components = next(iter(mirrors.items()))
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="base-", dir=CACHE) as folder:
        packages = "python3,python3-venv,ca-certificates"
        # In namespaces of its own: what it mounts is gone and what it has started ends, however it ends.
        confined = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        chosen = ["--variant=minbase", f"--include={packages}", f"--components={','.join(components)}"]
        try:
            made = run([*confined, "debootstrap", *chosen, release, folder, uri], timeout_s=900, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable("no base image: debootstrap took more than 15 minutes") from None
        if made.returncode != 0:
            raise Unavailable(f"no base image: debootstrap failed:\n{made.stdout[-2000:]}\n{made.stderr[-2000:]}")
        for waste in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(Path(folder) / waste)
            (Path(folder) / waste).mkdir()
        partial = archive.with_suffix(".partial")
        run(["tar", "--create", "--file", partial, "--numeric-owner", "--directory", folder, "."])
        partial.rename(archive)


@contextmanager
def pip_secrets(folder: Path) -> Iterator[list[str]]:
    """Options of `docker build` that let pip in there find what it finds here: its configuration, certificates, and wheels in folders."""
    settings: dict[str, str] = {}
    for line in run([sys.executable, "-m", "pip", "config", "list"]).stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2].replace("_", "-")] = str(ast.literal_eval(value))  # the environment's come last and win
    certificate = settings.pop("cert", None)
    with _served() as (address, folders):
        for name in ("find-links", "index-url", "extra-index-url"):
            words = settings.get(name, "").split()
            local = [(word, Path(unquote(urlsplit(word).path))) for word in words if word.startswith(("/", "file:"))]
            # An index refers to files beside it; a folder of wheels holds them.
            folders += [str(path if name == "find-links" else path.parent) for _, path in local]
            for word, path in local:
                words[words.index(word)] = f"{address}{path}/"
            settings[name] = " ".join(words)
        kept = ("find-links", "index-url", "extra-index-url", "trusted-host", "proxy", "no-index", "timeout", "default-timeout")
        lines = [f"{name} = {settings[name]}" for name in kept if settings.get(name)]
        lines += ["cert = /run/secrets/ca.pem"] * bool(certificate)
        configuration = folder / "pip.conf"
        configuration.write_text("\n".join(["[global]", *lines, ""]))
        options = ["--secret", f"id=pip.conf,src={configuration}"]
        if certificate:
            options += ["--secret", f"id=ca.pem,src={certificate}"]
        proxies = [name for name in ("http_proxy", "https_proxy", "no_proxy") for name in (name, name.upper()) if os.environ.get(name)]
        arguments = [
            *proxies,
            *(["TORCH_INDEX"] if os.environ.get("TORCH_INDEX") else []),
        ]  # docker takes their values from the environment
        yield options + [word for name in arguments for word in ("--build-arg", name)]


@contextmanager
def _served() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server on this machine alone, and the list of the folders that it shows."""
    folders: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            asked = os.path.normpath(unquote(urlsplit(path).path))
            inside = any(asked == folder or asked.startswith(folder.rstrip("/") + "/") for folder in folders)
            return (asked + "/" * path.endswith("/")) if inside else os.devnull + "/none"

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with listening(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address, folders


# -- compose and requests ----------------------------------------------------------------------------------------------------------------


@functools.cache
def compose_command(client: str) -> tuple[str, ...]:
    """Compose v2 where docker has it, else docker-compose. Raises Unavailable."""
    if run([client, "compose", "version"], check=False).returncode == 0:
        return client, "compose"
    if shutil.which("docker-compose") is None:
        raise Unavailable(f"no docker compose and no docker-compose ({INSTALL})")
    return ("docker-compose",)


_ASK = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.stdin.buffer.read() or None
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    answer = opener.open(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=30)
except urllib.error.HTTPError as error:
    answer = error
except OSError as error:
    print(json.dumps([0, str(error)])); sys.exit()
print(json.dumps([answer.status, answer.read().decode()]))
"""


def ask(engine: Engine, url: str, body: object = None) -> tuple[int, str]:
    """Status and text of a request to a published port; status 0 where nobody listens."""
    words = [*engine.inside, sys.executable, "-c", _ASK, url]
    status, text = json.loads(run(words, text="" if body is None else json.dumps(body)).stdout)
    return int(status), str(text)
