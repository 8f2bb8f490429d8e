"""`python -m training fit | relearn | place | import-pecos | fit-ranker | evaluate | inspect | options`: the offline commands."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from espalier.bundle import Bundle, is_model_name
from espalier.bundle_writer import make_folder
from espalier.errors import BundleExists, EspalierError, InvalidConfig

if TYPE_CHECKING:  # torch takes seconds to import, and `inspect` needs none
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from espalier.queries import QueryBatch
    from training.evaluate import Rerank
    from training.specification.deep import DeepConfig
    from training.specification.linear import LinearConfig

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Train, measure and look at tree models.", pretty_exceptions_enable=False
)
log = logging.getLogger("training")


@app.command()
def fit(
    config: Annotated[Path, typer.Option(help="TOML file; `options` lists the keys")],
    out: Annotated[Path, typer.Option(help="models/NAME/VERSION, which must not exist yet")],
    data: Annotated[Path | None, typer.Option("--data", "--train", help="a log or a file of points to read instead")] = None,
    test: Annotated[Path | None, typer.Option(help="xr-linear: a file to measure on instead of the configured one")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to train")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint of a killed run")] = False,
) -> None:
    """Train a model and export it as a bundle."""
    from training.specification.linear import LinearConfig
    from training.specification.models import read_config

    settings = read_config(config, train=data, test=test)
    if isinstance(settings, LinearConfig):
        _fit_linear(out, settings, device, resume)
        return
    if test is not None:
        raise InvalidConfig("--test", str(test), "no such option: the test users of a log are a share of it, data.test_share")
    from training.deep.fit import pick_device

    _fit_to(out, settings, data, pick_device(device), resume)


def _fit_linear(out: Path, settings: LinearConfig, device: str, resume: bool) -> None:
    from training.linear.run import fit_and_export

    if device == "cuda":
        raise InvalidConfig("--device", device, "auto or cpu: linear scorers are trained on a CPU")
    name, version = _new_version(out)
    settings = settings.model_copy(update={"name": name})
    begin, work = time.perf_counter(), out.absolute().parent / f".{version}.work"
    with _only_run(work):
        if work.exists() and not resume:
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        bundle = fit_and_export(settings, out, work)
        shutil.rmtree(work)
    log.info("wrote %s in %.0f s", out, time.perf_counter() - begin)
    _tell_metrics(bundle)


@app.command()
def relearn(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, the model whose tree is learned anew")],
    out: Annotated[Path, typer.Option(help="models/NAME/VERSION, which must not exist yet")],
    data: Annotated[Path | None, typer.Option(help="a log to read instead of the configured one")] = None,
    rounds: Annotated[int, typer.Option(help="how often learning the tree and training on it alternate")] = 1,
    steps: Annotated[int | None, typer.Option(help="training steps of a round; the default is the model's own number")] = None,
    gap: Annotated[int, typer.Option(help="levels that are matched at once")] = 7,
    samples: Annotated[int | None, typer.Option(help="most events of training users that the tree is learned from")] = None,
    gamma: Annotated[
        float | None, typer.Option(help="γ of the ranks that the tree is learned for; 0 is JTM as published, the default the model's own")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to learn and train")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint of a killed run")] = False,
) -> None:
    """Learn the tree of a trained model anew (JTM), train on from its weights, and export a bundle."""
    from training.deep.earlier import relearn_config
    from training.deep.fit import pick_device

    settings = relearn_config(model, {"rounds": rounds, "gap": gap, "samples": samples, "gamma": gamma}, steps)
    _fit_to(out, settings, data, pick_device(device), resume)


@app.command()
def import_pecos(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="an XR-Linear model as PECOS saves it")],
    out: Annotated[Path, typer.Option(help="models/NAME/VERSION, which must not exist yet")],
    items: Annotated[Path | None, typer.Option(help="Parquet with a column id, one row per label in their order")] = None,
) -> None:
    """Turn a PECOS XR-Linear model into a bundle that finds the same labels."""
    from training.linear.import_pecos import import_pecos as write_imported

    _new_version(out)
    bundle = write_imported(folder, out, items)
    log.info("wrote %s: %d items, %d levels", out, bundle.manifest.tree.items, bundle.manifest.tree.levels)


@app.command()
def fit_ranker(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, whose candidates are to be re-ranked")],
    out: Annotated[Path, typer.Option(help="models/NAME/VERSION, which must not exist yet: the model with the ranker")],
    loss: Annotated[Literal["elimination", "plackett-luce"] | None, typer.Option(help="the model of choice that is fitted")] = None,
    function: Annotated[Literal["highway", "linear"] | None, typer.Option(help="the rank function")] = None,
    depth: Annotated[int, typer.Option(help="candidates of a query that are re-ranked")] = 200,
    features: Annotated[str, typer.Option(help="what it is told of them, comma-separated; the default is all that there is")] = "",
    data: Annotated[Path | None, typer.Option(help="the log, where it is no longer at the configured place")] = None,
    judgements: Annotated[Path | None, typer.Option(help="Parquet with judged items, to learn from instead of the log")] = None,
    users: Annotated[Literal["training", "validation"], typer.Option(help="whose lists of the log it learns from")] = "training",
    exclude_seen: Annotated[bool, typer.Option("--exclude-seen", help="the items of the history do not come back")] = False,
    queries: Annotated[int, typer.Option(min=1, help="most queries that it learns from")] = 20_000,
    config: Annotated[Path | None, typer.Option(help="TOML file with other options; `options highway` lists them")] = None,
    seed: Annotated[int | None, typer.Option(help="reproduces the training")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where the model searches")] = "auto",
) -> None:
    """Train a ranker on what a model retrieves, and add it to a new version of the model."""
    from espalier.engines import open_engine
    from training.rankers.judgements import from_judgements
    from training.rankers.log_queries import from_log
    from training.rankers.second_stage import StageConfig, add_ranker
    from training.specification.ranker import ranker_config

    _new_version(out)
    bundle = Bundle.open(model)
    ranker = ranker_config(config, loss=loss, kind=function, seed=seed)
    if judgements is not None:
        for option, given, default in (("--data", data, None), ("--users", users, "training"), ("--exclude-seen", exclude_seen, False)):
            if given != default:
                raise InvalidConfig(option, given, "no such option with --judgements")
        parts = from_judgements(bundle, judgements, ranker.seed)
    else:
        parts = from_log(bundle, data, users, exclude_seen)
    wanted = tuple(filter(None, (name.strip() for name in features.split(","))))
    notes = {"users": users, "exclude_seen": exclude_seen} if judgements is None else {"judgements": judgements.name}
    engine = open_engine(bundle, device)
    add_ranker(bundle, engine, parts, StageConfig(depth, wanted, queries, ranker), out, notes)
    log.info("wrote %s", out)


@app.command()
def place(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, a model of linear scorers")],
    items: Annotated[Path, typer.Option(help="Parquet of the new items, with the columns of the model's item table")],
    out: Annotated[Path, typer.Option(help="models/NAME/VERSION, which must not exist yet")],
    text: Annotated[str, typer.Option(help="the columns that are an item's text, comma-separated; none for a model of features")] = "",
) -> None:
    """Put new items that nobody has searched for into a trained model of texts or features, without training."""
    from training.linear.placing import place as place_items

    _new_version(out)
    begin = time.perf_counter()
    bundle = place_items(model, items, tuple(filter(None, text.split(","))), out)
    log.info("wrote %s in %.0f s", out, time.perf_counter() - begin)
    _tell_metrics(bundle)


@app.command()
def options(
    kind: Annotated[str | None, typer.Argument(help="a kind of model or ranker; all are listed without one")] = None,
    form: Annotated[Literal["text", "toml"], typer.Option("--format", help="toml: a file to begin with")] = "text",
    markdown: Annotated[bool, typer.Option("--markdown", help="all kinds, as docs/options.md has them")] = False,
) -> None:
    """List the kinds of models and rankers, or the keys of one with type, default and meaning."""
    from training.specification import options as keys

    if markdown:
        print(keys.as_markdown(), end="")
    elif kind is None:
        print(keys.summary())
    else:
        print(keys.as_toml(kind) if form == "toml" else keys.as_text(kind))


def _new_version(out: Path) -> tuple[str, str]:
    """The name and the version that --out gives, after checking that they are such and not there yet."""
    name, version = out.absolute().parent.name, out.name
    if not (version.isdecimal() and int(version) >= 1 and str(int(version)) == version):
        raise InvalidConfig("--out", str(out), "models/NAME/VERSION with a version number of at least 1")
    if not is_model_name(name):
        raise InvalidConfig("--out", name, "a model name of lower-case letters, digits, '.', '_' and '-', at most 64")
    if out.exists():
        raise BundleExists(f"{out}: a bundle is never overwritten; choose another version")
    return name, version


def _fit_to(out: Path, settings: DeepConfig, data: Path | None, where: torch.device, resume: bool) -> None:
    name, version = _new_version(out)
    from training.deep.parallel import joined, process

    settings = settings.model_copy(update={"name": name})
    work = out.absolute().parent / f".{version}.work"
    with joined(where), _only_run(work) if process() == 0 else _in_silence():
        _fit_and_export(settings, data, out, where, work, resume)


def _fit_and_export(settings: DeepConfig, data: Path | None, out: Path, where: torch.device, work: Path, resume: bool) -> None:
    from training.deep.earlier import as_earlier
    from training.deep.export import export
    from training.deep.fit import fit as fit_model
    from training.deep.parallel import process, shared_tree, wait_for_all
    from training.deep.prepare import build_tree, prepare

    begin = time.perf_counter()
    if process() == 0 and work.exists() and not resume:
        shutil.rmtree(work)
    wait_for_all()
    prepared = prepare(settings, data, work / f"process-{process()}" if process() else work)  # it writes files there
    log.info(
        "%d users, %d items, %d events",
        prepared.interactions.user_count,
        prepared.interactions.item_count,
        prepared.interactions.event_count,
    )
    for number in range(1, settings.rounds + 1):
        folder = work if number == 1 else work / f"round-{number}"
        folder.mkdir(exist_ok=True)
        tree = shared_tree(partial(build_tree, settings, prepared, where), where)
        model = fit_model(settings, prepared, tree, where, folder, resume)
        prepared = replace(prepared, earlier=as_earlier(settings, tree, model))
    if process() > 0:
        return
    bundle = export(settings, prepared, tree, model, out)
    shutil.rmtree(work)
    log.info("wrote %s in %.0f s", out, time.perf_counter() - begin)
    _tell_metrics(bundle)


def _tell_metrics(bundle: Bundle) -> None:
    tested = "test users" if bundle.manifest.query.kind == "history" else "test queries"
    for key, rows in bundle.manifest.metrics.get("test", {}).items():
        figures = ", ".join(f"recall@{row['m']} {row['recall']:.4f}" for row in rows)
        log.info("%s, beam %d, %s: %s", tested, bundle.manifest.search.beam_size, key.replace("_", " "), figures)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION")],
    data: Annotated[Path | None, typer.Option(help="the log: all its test users instead of the bundle's held-out queries")] = None,
    beam: Annotated[str, typer.Option(help="beam sizes, comma-separated")] = "50,100,200",
    m: Annotated[str, typer.Option(help="numbers of results, comma-separated")] = "10,50",
    engine: Annotated[str | None, typer.Option(help="an engine by name; the default fits the device")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to search")] = "auto",
    precision: Annotated[Literal["float32", "float16", "bfloat16"], typer.Option(help="of node rows and products in triton")] = "float32",
    exclude_seen: Annotated[bool, typer.Option("--exclude-seen", help="leave out the items of the history")] = False,
    rerank: Annotated[bool, typer.Option("--rerank", help="with the model's ranker")] = False,
    depth: Annotated[int | None, typer.Option(min=1, help="candidates that it re-ranks; the default is the model's")] = None,
    batch: Annotated[int, typer.Option(min=1, help="queries in one engine call")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a recall–latency plot here (PNG or SVG)")] = None,
) -> None:
    """Measure a bundle with a serving engine."""
    from espalier.engines import open_engine
    from training import evaluate as measure

    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InvalidConfig("--plot", str(plot), "a file name that ends in .png or .svg")
    for file in (json_file, plot):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    bundle = Bundle.open(model)
    beams, ms = _numbers("--beam", beam), _numbers("--m", m)
    opened = open_engine(bundle, device, engine, precision=precision)
    stage = _stage(bundle, rerank, depth)
    if bundle.manifest.query.kind == "history":
        pairs = _test_pairs(bundle, data) if data else measure.held_out_pairs(bundle)
        count, rows = len(pairs), measure.evaluate(bundle, opened, pairs, beams, ms, exclude_seen, batch, stage)
    else:
        if exclude_seen:
            raise InvalidConfig("--exclude-seen", True, f"a model of histories, not of {bundle.manifest.query.kind} queries")
        queries, relevant = _test_queries(bundle, data)
        count, rows = len(queries), measure.measure(bundle, opened, measure.LabelledQueries(queries, relevant), beams, ms, batch, stage)
    name = f"{bundle.manifest.name} version {bundle.manifest.version}"
    notes = [", seen items excluded"] * exclude_seen + ([] if stage is None else [f", best {stage.depth} re-ranked"])
    print(f"{name} on {opened.name}, {count} queries{''.join(notes)}")
    measure.print_table(rows)
    warnings = [] if rerank else measure.falls(rows, count)  # a ranker has an order of its own
    for warning in warnings:
        log.warning("WARNING: %s. Its ranks mislead the search there: try another γ (docs/training.md, docs/text-search.md)", warning)
    if json_file:
        report = {
            "model": bundle.manifest.name,
            "version": bundle.manifest.version,
            "engine": opened.name,
            "arithmetic": precision,
            "queries": count,
            "rows": rows,
            "warnings": warnings,
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if plot:
        measure.plot_frontier(rows, f"{name}, {opened.name}", plot)


def _stage(bundle: Bundle, rerank: bool, depth: int | None) -> Rerank | None:
    """The second stage that `evaluate` asks for."""
    if not rerank:
        if depth is not None:
            raise InvalidConfig("--depth", depth, "--rerank with it")
        return None
    info = bundle.manifest.ranker
    if info is None:
        raise InvalidConfig(
            "--rerank", True, f"a model with a ranker, which {bundle.manifest.name} version {bundle.manifest.version} lacks"
        )
    if depth is not None and depth > info.max_depth:
        raise InvalidConfig("--depth", depth, f"at most {info.max_depth}")
    from espalier.rerank.ranker import Reranker
    from training.evaluate import Rerank

    return Rerank(Reranker(bundle), depth or info.depth)


@app.command()
def inspect(model: Annotated[Path, typer.Option(help="models/NAME/VERSION")]) -> None:
    """Show a bundle: levels, branching, balance, sample paths."""
    from training.inspect import inspect as report

    print(report(Bundle.open(model)))


def _test_pairs(bundle: Bundle, data: Path) -> list:  # type: ignore[type-arg]
    import tempfile

    import numpy as np

    from training.data.interactions import read_interactions
    from training.data.splits import EvaluationPair, halves, split_users
    from training.specification.deep import DeepConfig
    from training.specification.models import config_of

    config = config_of(bundle.manifest, DeepConfig)
    with tempfile.TemporaryDirectory() as work:
        interactions = read_interactions(data, config.data.format, Path(work))
        split = split_users(interactions, config.data.test_share, config.data.validation_share, seed=config.seed)
        row_of = bundle.items.rows_of(interactions.item_ids.to_pylist())  # the log may have grown since
        pairs = [EvaluationPair(p.user, row_of[p.history], row_of[p.relevant]) for p in halves(interactions, split.test, seed=config.seed)]
    if interactions.fingerprint != bundle.manifest.data.get("sha256"):
        log.warning("%s is not the log that the model was trained on; its test users may have been training users", data)
    known = [EvaluationPair(p.user, p.history[p.history >= 0], p.relevant[p.relevant >= 0]) for p in pairs]
    return [pair for pair in known if len(pair.relevant) and np.size(pair.history)]


def _test_queries(bundle: Bundle, data: Path | None) -> tuple[QueryBatch, list[NDArray[np.int64]]]:
    """Queries with what is relevant to them: of a file in the format of the bundle's training data, or the bundle's own held-out ones."""
    if data is None:
        from espalier.checks.heldout import read_heldout

        held = read_heldout(bundle)
        return held.queries, held.relevant
    from training.linear.prepare import read_queries

    return read_queries(bundle, data)


@contextmanager
def _only_run(work: Path) -> Iterator[None]:
    """Holds the right to train one version: two runs would share, and delete, each other's work folder."""
    lock = work.with_suffix(".lock")
    make_folder(lock.parent)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidConfig(
                "--out", str(work.parent / work.name.split(".")[1]), "a version that no other run is training now"
            ) from error
        yield
        lock.unlink()


@contextmanager
def _in_silence() -> Iterator[None]:
    """What a process does beside the one that tells."""
    log.setLevel(logging.WARNING)
    yield


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidConfig(option, text, "whole numbers, comma-separated, for example 50,100") from error


def main() -> None:
    logging.basicConfig(format="%(message)s")
    for name in ("training", "espalier"):  # others (torch.onnx, onnxscript) narrate every step of an export at INFO
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        app()
    except (EspalierError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
