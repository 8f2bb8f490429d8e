"""How soon the recall probe and the alerts see a model that is wrong, although its checksums and its golden queries are right.

A damaged copy of a bundle is loaded beside the good version, which stays the default: its golden queries were answered anew by the damaged
model, as they would be by a wrong export, so that loading cannot refuse it. Prometheus runs the rules that the stack ships, at their own
intervals. Timed from the answer to the load request: the first scrapeable loss of recall, and the first alert that fires.

    python -m benchmarks.probe_damage --bundle models/debian-depends/1 --json probe_damage.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.service.serving import get, serving
from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.checks.golden import encode_table
from espalier.engines import open_engine
from espalier.hardware import hardware
from espalier.manifest import ManifestDraft
from espalier.tree import Tree
from training.evaluate import with_recall
from training.golden import golden_of_histories

ROOT = Path(__file__).parents[2]
KEY = "an-admin-key-for-benchmarks"
NOTABLE = 0.02
"""Loss of recall@m at which a scrape counts as showing it."""


def content_of(bundle: Bundle) -> GraphContent:
    """All parts of a bundle."""
    scorer = bundle.graph_scorer
    return GraphContent(
        tree=bundle.tree,
        node_rows_ND=np.array(bundle.node_rows_ND),
        state_levels=scorer.state_levels,
        state_dim=scorer.state_dim,
        query_onnx=bundle.graph("query.onnx"),
        scorer_onnx=bundle.graph("scorer.onnx"),
        items=bundle.items,
        golden=bundle.golden(),
        heldout=bundle.heldout(),
        form=scorer.form,
        memory=bundle.memory,
        encoder=scorer.encoder,
    )


def draft_of(bundle: Bundle, version: int) -> ManifestDraft:
    """What a manifest says before files are counted, for another version."""
    return ManifestDraft(**{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields} | {"version": version})


def swap_leaves(content: GraphContent, rng: np.random.Generator) -> GraphContent:
    """A quarter of the items in each other's leaves, as an export with a stale item table would have them."""
    leaf_item = np.array(content.tree.leaf_item)
    swapped = rng.choice(np.flatnonzero(leaf_item >= 0), len(leaf_item) // 4, replace=False)
    leaf_item[swapped] = leaf_item[np.roll(swapped, 1)]
    return replace(content, tree=Tree(content.tree.level_offset, content.tree.first_child, leaf_item))


def shuffle_level(content: GraphContent, rng: np.random.Generator) -> GraphContent:
    """The node rows of one inner level among each other."""
    level = content.tree.height - 2
    begin, end = content.tree.level_offset[level : level + 2]
    rows_ND = np.array(content.node_rows_ND)
    rows_ND[begin:end] = rng.permutation(rows_ND[begin:end])
    return replace(content, node_rows_ND=rows_ND)


def noise(content: GraphContent, rng: np.random.Generator) -> GraphContent:
    """Noise of their own size on all node rows, as a failed conversion to fewer bits would leave."""
    rows_ND = np.array(content.node_rows_ND)
    return replace(content, node_rows_ND=(rows_ND + rng.normal(0, rows_ND.std(), rows_ND.shape)).astype(rows_ND.dtype))


DAMAGES: dict[str, Callable[[GraphContent, np.random.Generator], GraphContent]] = {
    "a quarter of the items swapped": swap_leaves,
    "one level's rows shuffled": shuffle_level,
    "noise on all rows": noise,
}


def damaged(bundle: Bundle, models: Path, version: int, damage: str, seed: int = 0) -> Bundle:
    """A version under `models` that is wrong and passes every check at load: what held-out queries should find is as it was."""
    content = DAMAGES[damage](content_of(bundle), np.random.default_rng(seed))
    draft = draft_of(bundle, version)
    golden = bundle.golden()
    histories = [row[row >= 0] for row in encode_table(bundle, golden).array.astype(np.int64)]
    with tempfile.TemporaryDirectory() as folder:
        bare = write_bundle(Path(folder) / draft.name / str(version), draft, content)
        golden = golden_of_histories(bare, histories, golden.column("beam_size").to_pylist(), golden.column("m").to_pylist())
    return write_bundle(models / draft.name / str(version), draft, replace(content, golden=golden))


def saying_its_recall(bundle: Bundle, models: Path) -> Bundle:
    """Version 1 under `models`: the bundle; if it was exported before held-out queries said their recall, with that added."""
    heldout = bundle.heldout()
    if any(name.startswith("recall@") for name in heldout.column_names):
        shutil.copytree(bundle.path, models / bundle.manifest.name / "1")
        return Bundle.open(models / bundle.manifest.name / "1")
    heldout = with_recall(bundle, open_engine(bundle, "cpu"), [10, 50, 200])
    return write_bundle(models / bundle.manifest.name / "1", draft_of(bundle, 1), replace(content_of(bundle), heldout=heldout))


@contextmanager
def prometheus(command: str, service_port: int, folder: Path) -> Iterator[int]:
    """Prometheus with the stack's configuration and rules, but for the address that it scrapes; gives its port."""
    config = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        for group in job["static_configs"]:
            group["targets"] = [f"127.0.0.1:{service_port}" if target.startswith("service:") else target for target in group["targets"]]
    config["rule_files"] = [str(ROOT / "docker/prometheus/rules/*.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    options = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = subprocess.Popen([command, *options, "--log.level=error"])
    try:
        until = time.monotonic() + 60
        while get(port, "/-/ready")[0] != 200:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("prometheus did not become ready")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def alerts(port: int) -> list[dict[str, Any]]:
    """What is pending or firing."""
    found: list[dict[str, Any]] = json.loads(get(port, "/api/v1/alerts")[1])["data"]["alerts"]
    return found


def losses(port: int, version: int) -> dict[str, float]:
    """m → loss of recall, as the service says it now."""
    text = get(port, "/metrics")[1].decode()
    found: dict[str, dict[str, float]] = {}
    for name, m, v, value in re.findall(
        r'^espalier_probe_(recall|expected_recall)\{m="(\d+)",model="[^"]*",version="(\d+)"\} (\S+)$', text, re.MULTILINE
    ):
        if int(v) == version:
            found.setdefault(m, {})[name] = float(value)
    return {m: pair["expected_recall"] - pair["recall"] for m, pair in found.items() if len(pair) == 2}


def admin(port: int, path: str, body: dict[str, Any]) -> None:
    """POST to an admin route. Raises RuntimeError with its answer where that is no success."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {text}")


def wait_for(condition: Callable[[], object], seconds: float) -> float | None:
    """Seconds until the condition held, None where it did not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.1)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="a trained bundle, models/<name>/<version>")
    parser.add_argument("--per-s", type=float, default=5.0, help="ESPALIER_PROBE_PER_S (the stack's)")
    parser.add_argument("--healthy-s", type=float, default=90.0, help="seconds in which the good version must raise no alert")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = saying_its_recall(Bundle.open(args.bundle), folder / "models")
        name = bundle.manifest.name
        for version, damage in enumerate(DAMAGES, 2):
            damaged(bundle, folder / "later", version, damage)
        environment = {
            "ESPALIER_MODELS": str(folder / "models"),
            "ESPALIER_PROBE_PER_S": str(args.per_s),
            "ESPALIER_ADMIN_KEYS": KEY,
            "ESPALIER_DEVICE": "cpu",
        }
        with serving(["service"], environment) as port, prometheus(args.prometheus, port, folder) as watch:
            early = wait_for(partial(_firing, watch), args.healthy_s)
            print(f"healthy for {args.healthy_s:g} s: {_firing(watch) or 'no alert fires'}", flush=True)
            for version, damage in enumerate(DAMAGES, 2):
                shutil.move(folder / "later" / name / str(version), folder / "models" / name / str(version))
                admin(port, f"/models/{name}/load", {"version": version, "default": False})
                began = time.monotonic()
                wait_for(partial(_is_seen, port, version), 120)
                seen_s = time.monotonic() - began
                wait_for(partial(_firing, watch, version), 180 - seen_s)
                fired_s = time.monotonic() - began
                wait_for(lambda: False, max(70 - fired_s, 0))  # a whole round
                names = sorted({alert["labels"]["alertname"] for alert in _firing(watch, version)})
                row = {"damage": damage, "seen_s": seen_s, "alert_s": fired_s, "alerts": names, "loss": losses(port, version)}
                rows.append(row | {"alerts_of_the_good_version": len(_firing(watch, 1))})
                print(row, flush=True)
                admin(port, f"/models/{name}/unload", {"version": version})
    if args.json is not None:
        measured = {
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": hardware(),
            "probe_per_s": args.per_s,
            "healthy_s": args.healthy_s,
        }
        args.json.write_text(json.dumps(measured | {"alert_while_healthy": early is not None, "rows": rows}, indent=1) + "\n")


def _is_seen(port: int, version: int) -> bool:
    return max(losses(port, version).values(), default=0) > NOTABLE


def _firing(port: int, version: int | None = None) -> list[dict[str, Any]]:
    """The alerts that fire, of one version where it is given."""
    found = [alert for alert in alerts(port) if alert["state"] == "firing"]
    return [alert for alert in found if version is None or alert["labels"].get("version") == str(version)]


if __name__ == "__main__":
    main()
