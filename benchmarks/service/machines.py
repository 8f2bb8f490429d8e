"""From items, dimensions and queries a second to shards, replicas and machines: the arithmetic of docs/scale.md.

    python -m benchmarks.machines --items 20000000 --dims 128 --queries-per-s 2000 --beam 200 --search-ms 1.2 --measured-items 1000000

Nothing is measured here. `--search-ms` is a measurement of yours, milliseconds of one worker for one query at this beam on a bundle of
`--measured-items`: `espalier_query_seconds` has it, and `python -m training evaluate` prints it. `--model DIR` takes bytes an item from a
bundle's files instead of the formulas; text models have no formula.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

WORKER_BYTES = 230e6
"""What a worker takes beside the files of models, as measured with the sample."""
FULL = 0.7
"""Share of its capacity at which a machine is planned: docs/tuning.md says why."""
VERSIONS = 3
"""Of a shard in memory while one is brought out: the two highest serve, and an earlier one until no router asks for it."""
HTTP_MS = 0.15
"""Processor time of a request beside its search: `benchmarks.service_overhead` finds 7,000 requests a second on a core."""
RESULT_BYTES = 28
"""Of one item in a shard's answer: row, node, rank, key and score."""

DIVIDED = ("nodes", "tree", "memory", "chunks", "tail", "items")
"""Files of which a shard has its share, by the beginnings of their names; the others are small."""


@dataclass(frozen=True)
class Catalogue:
    """What is divided among shards. `item_bytes`: of an item in all files together; `row_bytes`: those of them in node rows and the table
    of items, which the router reads; `index_bytes`: of an item of the whole catalogue that every shard keeps, the places of its memory."""

    items: int
    item_bytes: float
    row_bytes: float
    index_bytes: float
    branching: int = 2


@dataclass(frozen=True)
class Traffic:
    """`search_ms`: one worker, one query, one bundle of `measured_items` at this beam. `router_ms`: of one of the router's workers."""

    queries_per_s: float
    beam: int
    m: int
    state_bytes: int
    search_ms: float
    measured_items: int
    router_ms: float


@dataclass(frozen=True)
class Machine:
    cores: int
    memory_bytes: float


@dataclass(frozen=True)
class Plan:
    """Machines, what is in them, and what is sent. With one shard they are copies of the ordinary service, without routers."""

    shards: int
    replicas: int
    routers: int
    machines: int
    shard_bytes: float
    router_bytes: float
    shard_ms: float
    search_cores: float
    bytes_per_query: float


def candidates(items: float, branching: int, beam: int) -> float:
    """Nodes that a search scores at most: on each level all of them, or the children of a full beam."""
    levels = max(1, math.ceil(math.log(max(items, 2), branching)))
    return math.fsum(min(items / branching ** (levels - level), branching * beam) for level in range(1, levels + 1))


def search_ms(catalogue: Catalogue, traffic: Traffic, shards: int) -> float:
    """Of one query on one of so many shards, in proportion to the nodes that are scored."""
    measured = candidates(traffic.measured_items, catalogue.branching, traffic.beam)
    return traffic.search_ms * candidates(catalogue.items / shards, catalogue.branching, traffic.beam) / measured


def shard_bytes(catalogue: Catalogue, shards: int) -> float:
    return catalogue.items * (catalogue.item_bytes / shards + catalogue.index_bytes)


def needed(load_cores: float, cores: int) -> int:
    """Machines for a load, and one that may fail."""
    return math.ceil(load_cores / (FULL * cores)) + 1


def plan(catalogue: Catalogue, traffic: Traffic, machine: Machine, shards: int | None = None) -> Plan:
    """The fewest shards that fit into the machines' memory while a version is brought out, or so many. Raises ValueError if none fit."""
    room = machine.memory_bytes - machine.cores * WORKER_BYTES
    if room <= VERSIONS * catalogue.items * catalogue.index_bytes:
        raise ValueError(f"memory {machine.memory_bytes:.3g} bytes: expected more than what every shard keeps of the whole catalogue")
    if shards is None:
        shards = math.ceil(catalogue.item_bytes / (room / VERSIONS / catalogue.items - catalogue.index_bytes))
    per_query_ms = HTTP_MS + search_ms(catalogue, traffic, shards)
    load = traffic.queries_per_s * per_query_ms / 1000
    routing = traffic.queries_per_s * traffic.router_ms / 1000
    replicas = needed(load if shards > 1 else load + routing, machine.cores)
    routers = needed(routing, machine.cores) if shards > 1 else 0
    return Plan(
        shards=shards,
        replicas=replicas,
        routers=routers,
        machines=shards * replicas + routers,
        shard_bytes=shard_bytes(catalogue, shards),
        router_bytes=catalogue.items * catalogue.row_bytes,
        shard_ms=per_query_ms,
        search_cores=shards * load,
        bytes_per_query=(shards if shards > 1 else 0) * (traffic.state_bytes + traffic.m * RESULT_BYTES),
    )


def by_formula(items: int, dims: int, value_bytes: int, memory_entries: float, fields_bytes: float, branching: int) -> Catalogue:
    """Inner products and small networks: a tree has b ÷ (b − 1) nodes an item, a node a row and its first child, a leaf its item."""
    nodes = branching / (branching - 1)
    row = nodes * dims * value_bytes + fields_bytes
    index = 8.0 if memory_entries else 0.0
    return Catalogue(items, row + nodes * 8 + 8 + memory_entries * 8, row, index, branching)


def of_bundle(folder: Path, items: int) -> Catalogue:
    """Bytes an item as in a bundle that is there. Raises OSError, KeyError or ValueError if it is none."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files: Mapping[str, int] = {name: (folder / name).stat().st_size for name in manifest["files"]}
    trained = manifest["tree"]["items"]
    divided = sum(size for name, size in files.items() if name.startswith(DIVIDED))
    rows = sum(size for name, size in files.items() if name.startswith(("nodes", "items")))
    children = manifest["tree"]["max_children"]
    branching = max(2, round(math.prod(children) ** (1 / len(children)))) if children else 2
    return Catalogue(items, divided / trained, rows / trained, 8.0 if "memory.safetensors" in files else 0.0, branching)


def report(found: Plan) -> str:
    """What a plan says, in lines."""
    lines = [
        f"{found.shards} shards × {found.replicas} replicas + {found.routers} routers = {found.machines} machines",
        f"a shard: {found.shard_bytes / 1e9:.1f} GB, {found.shard_ms:.2f} ms a query; all shards keep {found.search_cores:.1f} cores busy",
        f"a router: reads at most {found.router_bytes / 1e9:.1f} GB of mapped files; {found.bytes_per_query / 1e3:.1f} kB a query",
    ]
    if found.shards == 1:
        lines[0] = f"one machine holds the model: {found.machines} copies of the service behind a load balancer, no router"
        lines.pop()
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, required=True, help="items of the catalogue")
    parser.add_argument("--model", type=Path, help="a bundle whose bytes an item are taken, models/NAME/VERSION")
    parser.add_argument("--dims", type=int, default=128, help="dimensions of a node row")
    parser.add_argument("--value-bytes", type=int, default=2, choices=(2, 4), help="of a value in a row: float16 or float32")
    parser.add_argument("--memory-entries", type=float, default=0, help="entries of the memory per item; 0: no memory")
    parser.add_argument("--fields-bytes", type=float, default=100, help="id and fields of an item")
    parser.add_argument("--branching", type=int, default=2)
    parser.add_argument("--queries-per-s", type=float, required=True, help="at the peak")
    parser.add_argument("--beam", type=int, default=200)
    parser.add_argument("--m", type=int, default=100)
    parser.add_argument("--search-ms", type=float, required=True, help="measured: one worker, one query, at this beam")
    parser.add_argument("--measured-items", type=int, help="items of the bundle that it was measured on; default: --items")
    parser.add_argument("--router-ms", type=float, default=1.0, help="processor time of the router for a query")
    parser.add_argument("--cores", type=int, default=16, help="of a machine")
    parser.add_argument("--memory-gb", type=float, default=64, help="of a machine")
    parser.add_argument("--shards", type=int, help="default: as few as the memory allows")
    parser.add_argument("--json", type=Path, metavar="F")
    given = parser.parse_args()
    if given.model:
        catalogue = of_bundle(given.model, given.items)
    else:
        catalogue = by_formula(given.items, given.dims, given.value_bytes, given.memory_entries, given.fields_bytes, given.branching)
    measured = given.measured_items or given.items
    traffic = Traffic(given.queries_per_s, given.beam, given.m, given.dims * 4, given.search_ms, measured, given.router_ms)
    found = plan(catalogue, traffic, Machine(given.cores, given.memory_gb * 1e9), given.shards)
    print(report(found))
    if given.json:
        given.json.write_text(
            json.dumps({"catalogue": asdict(catalogue), "traffic": asdict(traffic), "plan": asdict(found)}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
