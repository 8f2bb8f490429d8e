"""The Helm chart as the tests see it: its values, and what Helm makes of them.

`python -m tests.deploy.chart` renders the cases below into tests/deploy/rendered, so that tests of the manifests need no Helm. Each file
names the digest of the chart it was made of, which tells when it is out of date. Rules and dashboard of the template copied.yaml are left
out: they are files of docker/, copied whole.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

CHART = ROOT / "deploy" / "helm" / "espalier"
RENDERED = Path(__file__).parent / "rendered"
INSTALL = "install Helm 3.14 or later"

KEY = "a-key-of-sixteen-characters"
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "single": {
        "models": {"store": "s3://bucket/espalier", "storageClass": "fast"},
        "keys": {"retrieve": KEY, "admin": f"ops:{KEY}"},
        "single": {"workers": 2, "autoscaling": {"enabled": True, "queueDepth": "8", "engineBusy": "600m"}},
        "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"ingress": "yes"}}}], "prometheusNamespace": "watch"},
        "ingress": {"enabled": True, "host": "shop.example", "className": "nginx", "tlsSecret": "shop-tls"},
        "monitoring": {
            "podMonitor": True,
            "prometheusRule": True,
            "objectives": {"errorRatio": 0.01, "latencySeconds": 0.2, "versionAgeDays": 9},
            "runbook": "https://docs.example/alerts.html",
        },
    },
    "live": {
        "models": {"existingClaim": "models"},
        "keys": {"existingSecret": "keys-of-search"},
        "single": {"replicas": 1},
        "live": {"enabled": True},
    },
    "store": {
        "model": "books",
        "models": {"store": "s3://bucket/espalier", "storeSecret": "bucket", "storeEnvironment": {"AWS_REGION": "eu-central-1"}},
        "keys": {"retrieve": f"app:{KEY}", "write": f"catalogue:{KEY}", "admin": f"ops:{KEY}", "internal": f"{KEY}-i", "follow": KEY},
        "live": {"enabled": True},
        "tls": {"secret": "search-tls"},
        "settings": {"ESPALIER_TIMEOUT_MS": "500"},
        "shards": {
            "count": 3,
            "settings": {"ESPALIER_MAX_BATCH": "32"},
            "autoscaling": {"enabled": True},
            "tolerations": [{"key": "search", "operator": "Exists"}],
        },
        "router": {"autoscaling": {"enabled": True}},
        "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"shop": "yes"}}}]},
        "monitoring": {"podMonitor": True, "labels": {"release": "prometheus"}},
    },
    "existing": {
        "fullnameOverride": "search",
        "models": {"existingClaim": "espalier-models"},
        "shards": {"count": 2},
        "keys": {"existingSecret": "keys-of-search"},
        "image": {"repository": "registry.example/espalier", "digest": f"sha256:{'0' * 64}"},
        "serviceAccount": {"create": False},
        "networkPolicy": {"enabled": False},
    },
}
"""Values by case; the release is named `r`, its namespace `shop`."""


def helm() -> str:
    """The program, or a skip that says what is not tested."""
    found = shutil.which("helm")
    if found is None:
        pytest.skip(f"helm is missing: the chart is NOT linted and NOT rendered anew ({INSTALL})")
    return found


def run_helm(*words: str | Path, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """What Helm says, with values from standard input."""
    command = [helm(), *map(str, words), "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True, timeout=120)


def render(values: dict[str, Any], *words: str) -> str:
    """The manifests. Raises AssertionError with what Helm says."""
    ran = run_helm("template", "r", CHART, "--namespace", "shop", *words, values=values)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def without_copies(rendered: str) -> str:
    """The manifests without those of the template copied.yaml."""
    return "---\n".join(part for part in rendered.split("---\n") if "# Source: espalier/templates/copied.yaml" not in part)


def digest() -> str:
    """SHA-256 of the chart's own files and of the cases above."""
    made = hashlib.sha256(yaml.safe_dump(CASES).encode())
    for path in sorted(path for path in CHART.rglob("*") if path.is_file() and "monitoring" not in path.relative_to(CHART).parts[:1]):
        if path.name != "README.md":
            made.update(f"{path.relative_to(CHART)}\0".encode() + path.read_bytes())
    return made.hexdigest()


@cache
def manifests(case: str) -> tuple[dict[str, Any], ...]:
    """The objects of a case, as they were rendered."""
    return tuple(manifest for manifest in yaml.safe_load_all((RENDERED / f"{case}.yaml").read_text()) if manifest)


def named(case: str, kind: str) -> dict[str, dict[str, Any]]:
    """Name → object, of one kind."""
    return {manifest["metadata"]["name"]: manifest for manifest in manifests(case) if manifest["kind"] == kind}


if __name__ == "__main__":
    for name, given in CASES.items():
        (RENDERED / f"{name}.yaml").write_text(f"# {digest()}\n{without_copies(render(given))}")
