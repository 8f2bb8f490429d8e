"""Tables 3–4 of OTM's protocol on real logs: every method on the same users, tree and metrics; recall over the serving beam.

    python -m benchmarks.otm_real --data DIR --set sasrec-amazon-games --methods otm-robust,tdm,item-cf --seeds 3 --json F [--plot F.png]
    python -m benchmarks.otm_real --log FILE --config FILE --methods otm-robust,tdm --json F

DIR/NAME holds a set as benchmarks/real_logs.py names it. A test user's first half is the query, the second half is relevant. A seed is one
of the split, the tree, the first weights and every draw. Nothing is chosen on test users: every method keeps the weights with the best
recall of validation users and trains until that has stopped rising, or for `--steps`; a row's `best_step` and `steps` say which.

`otm-robust` is the default recipe on the set's instances. The other tree methods have the papers' scorer (24 numbers a row, 128–64–24)
over the same tree, and, unlike in the papers, the same first rows, averaged weights and the learning rate that served TDM best. `jtm` and
the three `otm` methods go on from the trained `tdm`: the one on a re-learned tree, the others as a warm start, which OTM wants on real
logs. `tdm-same-scorer` is TDM with the scorer, rows and instances of `otm-robust`, at γ = 0: what the objective alone is worth.
The product-DNN starts from the same co-occurrence embeddings, averages its weights and is chosen by the same recall. `tdm-random-rows` and
`product-dnn-random-rows` (with a sampled softmax) start as published.

A tree method may be changed, for an ablation: `otm-robust+objective.gamma=0+scorer.kind="mlp"`.

A tree method has rows at γ = 0 (path products: 1) and at the γ that it trained with, by which its weights were chosen; TDM, chosen at 0,
also at γ = 0.5. Rows are written after every method, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import real_logs
from benchmarks.papers.otm_real_report import MS, Row, continued, markdown, measured, plot_curves, print_rows, recall_change, save
from espalier.errors import EspalierError, InvalidConfig
from espalier.hardware import hardware
from espalier.tree import Tree
from training.baselines.item_cf import tune_neighbours
from training.baselines.popularity import fit_popularity
from training.baselines.product_dnn import ProductDnnConfig, fit_product_dnn
from training.baselines.task import Metric
from training.data.splits import EvaluationPair, without_seen
from training.deep.earlier import as_earlier
from training.deep.export import export
from training.deep.fit import CURVE, fit, use_bfloat16
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.deep.validation import ranked_by, search_pairs
from training.specification.deep import DeepConfig, OptimiserConfig, ProductScorer, RobustObjective
from training.specification.models import deep_config

CPU = torch.device("cpu")
Sections = dict[str, dict[str, Any]]
RECIPE: Sections = {
    "scorer": ProductScorer().model_dump(),
    "objective": RobustObjective().model_dump(),
    "optimiser": OptimiserConfig().model_dump(include={"batch", "learning_rate", "average"}),
}
PUBLISHED: Sections = {
    "scorer": {"kind": "mlp", "node_dim": 24, "hidden": (128, 64, 24)},
    "instances": {"targets": 20},
    "optimiser": {"batch": 100, "learning_rate": 1e-2},
}
ON_TDM: Sections = {"tree": {"kind": "earlier"}, "scorer": {"init": "earlier"}, "optimiser": {"learning_rate": 2e-3}}


def _published(kind: str, *more: Sections) -> tuple[str, Sections]:
    sections: Sections = {name: dict(keys) for name, keys in PUBLISHED.items()}
    for part in more:
        for name, keys in part.items():
            sections[name] = sections.get(name, {}) | keys
    return kind, sections


OF_200: Sections = {"objective": {"beam_size": 200}}
TREES: dict[str, tuple[str, Sections]] = {
    "otm-robust": ("otm-robust", RECIPE),
    "tdm-same-scorer": ("tdm", RECIPE | {"objective": {}}),
    "tdm": _published("tdm"),
    "tdm-random-rows": _published("tdm", {"scorer": {"init": "random"}}),
    "plt": _published("plt"),
    "hsm": _published("hsm"),
    "jtm": _published("tdm", ON_TDM, {"tree": {"kind": "jtm"}}),
    "otm": _published("otm", OF_200, ON_TDM),
    "otm-no-bs": _published("otm-no-bs", OF_200, ON_TDM),
    "otm-no-optest": _published("otm-no-optest", OF_200, ON_TDM),
}
"""Method → its kind, and what it changes in a set's configuration."""
PRODUCT_DNN: dict[str, dict[str, Any]] = {
    "product-dnn": {"loss": "full"},
    "product-dnn-sampled": {"loss": "sampled"},
    "product-dnn-random-rows": {"loss": "sampled", "init": "random"},
}
METHODS = ("popularity", "item-cf", *PRODUCT_DNN, *TREES)
ALL_LEAVES = 1 << 62


@dataclass
class Run:
    """One seed of one log: what its methods share. `trained` keeps what later ones start from."""

    config: DeepConfig
    prepared: Prepared
    folder: Path
    trained: dict[str, tuple[Tree, NodeScorer]] = field(default_factory=dict)

    @property
    def test(self) -> list[EvaluationPair]:
        return list(self.prepared.split.test)


def method_config(config: DeepConfig, method: str) -> DeepConfig:
    """The set's configuration with what the method changes. Raises InvalidConfig where a change names no key or gives a wrong value."""
    name, *changes = method.split("+")
    kind, own = TREES[name]
    sections: Sections = {"scorer": {}} | {section: dict(keys) for section, keys in own.items()}
    changed: Sections = {}
    for change in changes:
        place, _, text = change.partition("=")
        section, _, key = place.partition(".")
        if not key:
            raise InvalidConfig("--methods", change, "section.key=value of a configuration, such as objective.gamma=0")
        if section == "scorer" and sections["scorer"].get("init") == "earlier":
            raise InvalidConfig("--methods", change, f"no other scorer, since {name} goes on from tdm's weights")
        try:
            changed.setdefault(section, {})[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise InvalidConfig("--methods", change, "a value as in TOML, strings in quotation marks") from error
    raw = config.model_dump(mode="json") | {"kind": kind, "scorer": {}, "objective": {}}  # the set's own do not count
    if changed.get("scorer", {}).get("kind", sections["scorer"].get("kind")) != sections["scorer"].get("kind"):
        sections["scorer"] = {}  # another kind has other defaults
    for part in (sections, changed):
        for section, keys in part.items():
            raw[section] = raw.get(section, {}) | keys
    if raw["scorer"].get("init") == "earlier":
        raw["earlier_model"] = "tdm"  # the one in memory: see train_tree
    return deep_config(raw)


def train_tree(run: Run, method: str) -> tuple[Tree, NodeScorer, Row]:
    """The trained method, and how it was trained: seconds and steps, without those of the model that it goes on from."""
    config, prepared = method_config(run.config, method), run.prepared
    if config.scorer.init == "earlier":
        if "tdm" not in run.trained:
            train_tree(run, "tdm")
        prepared = replace(prepared, earlier=as_earlier(method_config(run.config, "tdm"), *run.trained["tdm"]))
    begin = time.perf_counter()
    tree = build_tree(config, prepared)
    work = run.folder / re.sub(r"[^a-z0-9.-]", "_", method)
    work.mkdir(exist_ok=True)
    model = fit(config, prepared, tree, CPU, work, resume=False).eval()
    curve = json.loads((work / CURVE).read_text())
    if method == "tdm":
        run.trained[method] = tree, model
    seconds = round(time.perf_counter() - begin, 1)
    return tree, model, {"train_seconds": seconds, "best_step": curve["best_step"], "steps": curve["steps"]}


def tree_rows(run: Run, method: str, beams: Sequence[int], bundles: Path | None) -> list[Row]:
    tree, model, training = train_tree(run, method)
    config = method_config(run.config, method)
    own, gamma = ranked_by(config)
    gammas = [gamma] if own == "log_activation" else sorted({0.0, gamma} | ({0.5} if config.kind == "tdm" else set()))
    topology, rows = Topology(tree, CPU), []
    for gamma in gammas:
        best_B = None
        for beam in beams:
            beam = min(beam, tree.leaf_count)
            for exclude_seen in (False, True):
                searched = config.model_copy(update={"search": config.search.model_copy(update={"exclude_seen": exclude_seen})})
                pairs = without_seen(run.test) if exclude_seen else run.test
                with torch.autocast("cpu", torch.bfloat16, enabled=use_bfloat16(config, CPU)):
                    found_BM, _ = search_pairs(searched, topology, model, pairs, gamma, own, beam, max(MS))
                about = {"gamma": gamma, "beam_size": beam, "exclude_seen": exclude_seen} | training
                new, recall_B = measured(found_BM, pairs, about)
                if not exclude_seen:
                    if best_B is not None:
                        new[-1] |= recall_change(recall_B - best_B)
                    if best_B is None or recall_B.mean() > best_B.mean():
                        best_B = recall_B
                rows += new
    if bundles is not None and method in TREES:
        path = bundles / f"{run.config.name}-{method}" / str(run.config.seed)
        if not path.exists():
            export(config.model_copy(update={"name": path.parent.name}), run.prepared, tree, model, path)
    return rows


def baseline_rows(run: Run, method: str) -> list[Row]:
    interactions, split = run.prepared.interactions, run.prepared.split
    validation: list[EvaluationPair] = list(split.validation)
    rows: list[Row] = []
    begin = time.perf_counter()
    dnn = None
    if method in PRODUCT_DNN:
        settings = ProductDnnConfig(
            instances=run.config.instances.model_copy(update={"targets": 1}),
            **PRODUCT_DNN[method],
            max_steps=run.config.optimiser.steps,
            round_steps=min(run.config.optimiser.validate_every, run.config.optimiser.steps),
            patience=run.config.optimiser.patience,
            metric=Metric("recall", run.config.search.m),
            exclude_seen=run.config.search.exclude_seen,
            bfloat16=use_bfloat16(run.config, CPU),
        )
        dnn = fit_product_dnn(split, settings, seed=run.config.seed)
    for exclude_seen in (False, True):
        pairs = without_seen(run.test) if exclude_seen else run.test
        if dnn is not None:
            rank = dnn.rank
        elif method == "popularity":
            rank = fit_popularity(interactions, split.train).rank
        else:
            tune_on = without_seen(validation) if exclude_seen else validation
            rank = tune_neighbours(interactions, split.train, tune_on, m=max(MS), exclude_seen=exclude_seen)[0].rank
        found_BM = rank([pair.history for pair in pairs], max(MS), exclude_seen)
        about = {"gamma": None, "beam_size": None, "exclude_seen": exclude_seen, "train_seconds": round(time.perf_counter() - begin, 1)}
        rows += measured(found_BM, pairs, about)[0]
    return rows


def _beams(text: str) -> list[int]:
    try:
        return [ALL_LEAVES if beam == "all" else int(beam) for beam in text.split(",")]
    except ValueError as error:
        raise InvalidConfig("--beams", text, "whole numbers and `all`, comma-separated") from error


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real_logs.add_arguments(parser)
    parser.add_argument("--methods", default="otm-robust,tdm,item-cf", help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1 … N")
    parser.add_argument("--beams", default="50,200,800", help="serving beams, comma-separated, ascending; `all` for all leaves")
    parser.add_argument("--steps", type=int, help="at most so many steps, for a quick look")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the tree methods' bundles to DIR/SET-METHOD/SEED")
    parser.add_argument("--json", type=Path, help="rows are written after every method; methods already there are not run again")
    parser.add_argument("--plot", type=Path, help="recall over the serving beam (PNG or SVG)")
    parser.add_argument(
        "--markdown", type=Path, help="a table, means over seeds; `change` is that of recall@200 against the best smaller beam"
    )
    return parser.parse_args()


def checked_methods(text: str, config: DeepConfig) -> list[str]:
    """The methods of `--methods`. Raises InvalidConfig on an unknown one, or on a change that gives no valid configuration."""
    methods = re.split(r",(?![^\[]*\])", text)  # commas inside [ ] belong to a value
    for method in methods:
        if method not in METHODS and not is_tree(method):
            raise InvalidConfig("--methods", method, f"some of {', '.join(METHODS)}")
        if is_tree(method) and method_config(config, method).rounds > 1:
            raise InvalidConfig("--methods", method, "tree.rounds of 1")
    return methods


def is_tree(method: str) -> bool:
    return method.split("+")[0] in TREES


def seed_rows(config: DeepConfig, log: Path, methods: Sequence[str], beams: Sequence[int], bundles: Path | None) -> Iterator[list[Row]]:
    """The rows of each method for the configuration's seed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, prepare(config, log, Path(folder)), Path(folder))
        for method in methods:
            found = tree_rows(run, method, beams, bundles) if is_tree(method) else baseline_rows(run, method)
            yield [{"method": method, "seed": config.seed} | row for row in found]


def benchmark(args: argparse.Namespace) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("training").setLevel(logging.INFO)
    beams, real = _beams(args.beams), real_logs.load(args)
    methods = checked_methods(args.methods, real.config)
    for file in (args.json, args.plot, args.markdown):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "set": real.name,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "threads": args.threads,
        "steps": args.steps,
        "beams": args.beams,
        "config": real.config.model_dump(mode="json"),
        "rows": [],
    }
    if args.json:
        report = continued(report, args.json)
    done = {(row["method"], row["seed"]) for row in report["rows"]}
    for seed in range(1, args.seeds + 1):
        config = real.config.model_copy(update={"seed": seed, "name": real.name})
        if args.steps:
            config = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"steps": args.steps})})
        missing = [method for method in methods if (method, seed) not in done]
        for rows in seed_rows(config, real.log, missing, beams, args.export) if missing else ():
            print_rows(rows)
            report["rows"] += rows
            if args.json:
                save(report, args.json)
    if args.plot:
        plot_curves(report["rows"], real.name, args.plot)
    if args.markdown:
        args.markdown.write_text(markdown(report["rows"]))


def main() -> None:
    args = parsed()
    try:
        benchmark(args)
    except (EspalierError, FloatingPointError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
