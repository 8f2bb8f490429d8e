"""The wheel: what lies in it, and that it works from an empty folder, without the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from zipfile import ZipFile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from espalier import __version__
from tests import ROOT
from tests.http_servers import reserved_port
from tests.waiting import until

pytestmark = pytest.mark.slow

PACKAGES = {"espalier", "espalier_cli", "espalier_client", "espalier_loadtest", "espalier_service", "espalier_training"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel, as an installation has them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # so that nothing is built inside the checkout
    for name in ("espalier", "espalier_cli", "espalier_client", "loadtest", "service", "training"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "__compiled__"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copyfile(ROOT / name, source / name)
    return unpacked(source, folder)


def unpacked(source: Path, folder: Path) -> Path:
    """A folder with the contents of the wheel of a source."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as content:
        content.extractall(folder / "site")
    return folder / "site"


def environment(site: Path) -> dict[str, str]:
    """As after an installation: the wheel's packages come first, and nothing of the checkout can be imported."""
    kept = os.environ.get("NUMBA_CACHE_DIR", str(ROOT / "espalier"))  # compiled code is named by the sources that it was made of
    return {"PATH": os.environ["PATH"], "HOME": str(site.parent), "PYTHONPATH": str(site), "NUMBA_CACHE_DIR": kept}


def espalier(site: Path, *arguments: object) -> None:
    command = [sys.executable, "-m", "espalier_cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=site.parent, env=environment(site), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_in_it_that_is_not_called_espalier(installed: Path) -> None:
    folders = {path.name for path in installed.iterdir()}
    assert folders == PACKAGES | {f"espalier-{__version__}.dist-info"}
    assert all((installed / package / "py.typed").is_file() for package in PACKAGES)
    assert (installed / "espalier_service/console/index.html").is_file()
    assert not [*installed.rglob("__compiled__"), *installed.rglob("*.pyc")]
    size = sum(file.stat().st_size for file in installed.rglob("*") if file.is_file())
    assert size < 8 << 20


def test_the_client_is_a_wheel_of_its_own(tmp_path: Path) -> None:
    """Of the same version and with the needs of the extra, and it can be imported where nothing else of this project is."""
    for name in ("deploy/client/pyproject.toml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "espalier_client", tmp_path / "espalier_client", ignore=shutil.ignore_patterns("__pycache__"))
    site = unpacked(tmp_path / "deploy/client", tmp_path)
    assert {path.name for path in site.iterdir()} == {"espalier_client", f"espalier_client-{__version__}.dist-info"}
    files = {path.name for path in (ROOT / "espalier_client").iterdir() if path.is_file()}
    assert {path.name for path in (site / "espalier_client").iterdir()} == files
    whole, alone = (tomllib.loads((tmp_path / name).read_text())["project"] for name in ("pyproject.toml", "deploy/client/pyproject.toml"))
    assert alone["dependencies"] == whole["optional-dependencies"]["client"]
    assert [alone[name] for name in ("version", "requires-python")] == [whole[name] for name in ("version", "requires-python")]
    command = [sys.executable, "-c", "import espalier_client; print(espalier_client.__file__)"]
    done = subprocess.run(command, cwd=site, env=environment(site), capture_output=True, text=True)
    assert done.stdout.strip() == str(site / "espalier_client/__init__.py")


def test_a_log_becomes_a_model_that_is_asked_and_served(installed: Path) -> None:
    folder = installed.parent
    lines = [f"u{user},i{user % 6}-{item},{item}" for user in range(90) for item in range(12)]
    (folder / "log.csv").write_text("\n".join(["user,item,time", *lines]) + "\n")
    espalier(installed, "new", "log.csv", "--out", "shop.toml", "--kind", "otm-robust")
    with (folder / "shop.toml").open("a") as config:  # what has the least of this package's compiled code, which is compiled anew
        config.write('\n[tree]\nkind = "random"\n\n[optimiser]\nsteps = 60\n')
    espalier(installed, "fit", "--config", "shop.toml", "--out", "models/shop/1")
    pq.write_table(pa.table({"history": [["i1-1", "i1-2"]]}), folder / "users.parquet")
    espalier(installed, "predict", "--model", "models/shop", "--queries", "users.parquet", "--out", "top.parquet", "--m", 3, "--workers", 1)
    found = pq.read_table(folder / "top.parquet").to_pylist()[0]["items"]
    assert all(item.startswith("i1-") for item in found)
    serve = [sys.executable, "-m", "espalier_cli", "serve", "--host", "127.0.0.1", "--workers", "2", "--port"]
    with (
        reserved_port() as port,
        subprocess.Popen([*serve, str(port)], cwd=folder, env=environment(installed), stderr=subprocess.PIPE, text=True) as service,
    ):
        try:

            def is_ready() -> bool:
                assert service.poll() is None, service.stderr and service.stderr.read()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                        return bool(answer.status == 200)
                except OSError:
                    return False

            until(is_ready, "a service that is ready", 240)
            body = json.dumps({"model": "shop", "queries": [{"history": ["i1-1", "i1-2"]}], "m": 3}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{port}/retrieve", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                items = json.load(answer)["results"][0]["items"]
            assert [item["id"] for item in items] == found
        finally:
            service.terminate()
            service.communicate(timeout=60)
