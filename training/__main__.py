"""`python -m training COMMAND`: new, fit, fold, shard, assign, import-pecos, fit-ranker, evaluate, compare, inspect, options; and
for models on object storage publish, versions, set-default.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

try:
    import typer
except ModuleNotFoundError as missing:  # `make run` installs only the packages of the service
    sys.exit(f"error: {missing.name} is not installed, which these commands need: `make install`, or `pip install 'espalier[train]'`")

from espalier.bundle import Bundle
from espalier.errors import EspalierError, InvalidConfig
from espalier.serving import MAX_VERSION, Candidate
from espalier_cli.loading import INTERRUPTED, end_loading, no_interrupt_lost

from .run_log import RunLog
from .stopped import Interrupted, free_space, is_full, resumable, writes
from .versions import new_version

if TYPE_CHECKING:  # torch takes seconds to import, and `inspect` needs none
    from espalier.checks.heldout import Unknown

    from .evaluate import LabelledQueries, Rerank

Model = Annotated[Path, typer.Option(help="models/NAME/VERSION")]
LogTo = Annotated[str | None, typer.Option(help="note figures in tensorboard:FOLDER, mlflow or mlflow:URI, too")]
NewVersion = Annotated[Path, typer.Option(help="models/NAME/VERSION, which must not exist yet")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train, measure and inspect models.", pretty_exceptions_enable=False)
log = logging.getLogger(str(__package__))


@app.command()
def new(
    log: Annotated[
        Path | None, typer.Argument(metavar="LOG", help="events of users, or query texts with the items that they led to")
    ] = None,
    items: Annotated[Path | None, typer.Option(help="table of the items; without a log, they are searched by their texts")] = None,
    out: Annotated[Path | None, typer.Option(help="the file to write; by default it is named after the log")] = None,
    user: Annotated[str | None, typer.Option(help="column of the users: a name, or a position from 0 where no line names them")] = None,
    item: Annotated[str | None, typer.Option(help="column of the items")] = None,
    at: Annotated[
        str | None, typer.Option("--time", help="column of the times; `file`: the file is in order; `none`: there is no order")
    ] = None,
    query: Annotated[str | None, typer.Option(help="column of the query texts")] = None,
    kind: Annotated[str | None, typer.Option(help="what is trained, instead of what suits the log; `options` lists the kinds")] = None,
    force: Annotated[bool, typer.Option("--force", help="write over a file that is there")] = False,
) -> None:
    """Look at a log, or at a table of items, and write a first configuration, which `fit` trains as it is."""
    from .new_configuration import write_configuration

    columns = {"user": user, "item": item, "time": at, "query": query}
    print(write_configuration(log, out, force, kind, columns, items).read_text(), end="")


@app.command()
def fit(
    config: Annotated[Path, typer.Option(help="TOML file; `options` lists the keys")],
    out: NewVersion,
    kind: Annotated[
        str | None, typer.Option(help="what is trained on the same data with its own defaults, instead of the kind in the file")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", "--train", help="a log or a file of points to read instead")] = None,
    test: Annotated[Path | None, typer.Option(help="xr-linear: a file to measure on instead of the configured one")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to train")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint of a killed run")] = False,
    earlier: Annotated[
        Path | None, typer.Option(help="models/NAME/VERSION: take its live items along; instead of `earlier_model`, where there is one")
    ] = None,
    log_to: LogTo = None,
) -> None:
    """Train a model and export it as a bundle."""
    from .specification.linear import LinearConfig
    from .specification.models import read_config

    settings = read_config(config, earlier, kind, train=data, test=test)
    begin = time.perf_counter()
    if isinstance(settings, LinearConfig):
        settings = settings.model_copy(update={"name": new_version(out)})
        with resumable(out), RunLog.opened("--log-to", log_to, settings.name) as run_log:
            from .linear.run import fit_version

            _report(fit_version(settings, out, resume, earlier, device), begin, run_log)
        return
    if test is not None:
        expected = (
            f"no such option for kind {settings.kind!r}, only for xr-linear and xreg: data.split says what is held out of a log of users"
        )
        raise InvalidConfig("--test", str(test), expected)
    settings = settings.model_copy(update={"name": new_version(out)})
    with resumable(out), RunLog.opened("--log-to", log_to, settings.name) as run_log:
        from .deep.fit import pick_device
        from .deep.run import fit_and_export

        bundle = fit_and_export(settings, data, out, pick_device(device), resume, earlier)
        if bundle is not None:
            _report(bundle, begin, run_log)


@app.command()
def import_pecos(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="an XR-Linear model as PECOS saves it")],
    out: NewVersion,
    items: Annotated[Path | None, typer.Option(help="Parquet with a column id, one row per label in their order")] = None,
) -> None:
    """Turn a PECOS XR-Linear model into a bundle that finds the same labels."""
    from .linear.import_pecos import import_pecos as write_imported

    new_version(out)
    bundle = write_imported(folder, out, items)
    log.info("wrote %s: %d items, %d levels", out, bundle.manifest.tree.items, bundle.manifest.tree.levels)


@app.command()
def fit_ranker(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, whose candidates are to be re-ranked")],
    out: Annotated[Path, typer.Option(help="models/NAME/VERSION, which must not exist yet: the model with the ranker")],
    loss: Annotated[Literal["elimination", "plackett-luce"] | None, typer.Option(help="the model of choice that is fitted")] = None,
    function: Annotated[Literal["highway", "linear"] | None, typer.Option(help="the rank function")] = None,
    depth: Annotated[int, typer.Option(help="candidates of a query that are re-ranked")] = 200,
    features: Annotated[str, typer.Option(help="the features that it uses, comma-separated; the default is all that there are")] = "",
    data: Annotated[Path | None, typer.Option(help="the log, where it is no longer at the configured place")] = None,
    judgements: Annotated[Path | None, typer.Option(help="Parquet with judged items, to learn from instead of the log")] = None,
    users: Annotated[
        Literal["training", "validation"] | None,
        typer.Option(
            help="whose lists of the log it learns from; by default validation users, whom the model does not know, if it has users"
        ),
    ] = None,
    exclude_seen: Annotated[bool, typer.Option("--exclude-seen", help="the items of the history do not come back")] = False,
    queries: Annotated[int, typer.Option(min=1, help="most queries that it learns from")] = 20_000,
    config: Annotated[Path | None, typer.Option(help="TOML file with other options; `options highway` lists them")] = None,
    seed: Annotated[int | None, typer.Option(help="reproduces the training")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where the model searches")] = "auto",
) -> None:
    """Train a ranker on what a model retrieves, and add it to a new version of the model."""
    from espalier.engines import open_engine

    from .rankers.judgements import from_judgements
    from .rankers.log_queries import default_users, from_log, query_source
    from .rankers.second_stage import StageConfig, add_ranker
    from .specification.ranker import ranker_config

    new_version(out)
    bundle = Bundle.open(model)
    bundle.check_whole()
    ranker = ranker_config(config, loss=loss, kind=function, seed=seed)
    if judgements is not None:
        for option, value in (("--data", data), ("--users", users), ("--exclude-seen", exclude_seen or None)):
            if value is not None:
                raise InvalidConfig(option, value, "no such option with --judgements")
        split = from_judgements(bundle, judgements, ranker.seed)
    else:
        users = users or default_users(bundle)
        split = from_log(bundle, data, users, exclude_seen)
        log.info("the ranker learns from %d %s, %d choose when it ends", len(split.train), query_source(bundle, users), len(split.valid))
    feature_names = tuple(filter(None, (name.strip() for name in features.split(","))))
    notes = {"users": users, "exclude_seen": exclude_seen} if judgements is None else {"judgements": judgements.name}
    engine = open_engine(bundle, device)
    add_ranker(bundle, engine, split, StageConfig(depth, feature_names, queries, ranker), out, notes)
    log.info("wrote %s", out)


@app.command()
def fold(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, a model with live items")],
    out: Annotated[Path, typer.Option(help="models/NAME/VERSION, another version of it, which must not exist yet")],
    data: Annotated[
        Path | None,
        typer.Option("--log", help="today's log of histories, from which its memory and the rows of its live items learn"),
    ] = None,
) -> None:
    """Write a model with its live items in it as its next version, without training."""
    from .live.publish_fold import fold as fold_model

    begin = time.perf_counter()
    with writes(out):
        _report(fold_model(model, out, data), begin)


@app.command()
def shard(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, or a folder of shards of such a version")],
    shards: Annotated[int, typer.Option(min=1, help="how many to cut it into")],
    out: Annotated[Path, typer.Option(help="a folder for shards alone; they are written to OUT/INDEX/VERSION")],
    version: Annotated[int | None, typer.Option(min=1, help="of a folder of shards; the highest that is complete, if not said")] = None,
) -> None:
    """Cut a trained model into shards, for machines that could not hold all of it, or shards into another number of them."""
    from .shard.command import shard as write_shards

    begin = time.perf_counter()
    with writes(out):
        written = write_shards(model, shards, out, version)
    log.info("wrote %d shards to %s in %.0f s", len(written), out, time.perf_counter() - begin)


@app.command()
def assign(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, a model of linear scorers")],
    data: Annotated[Path, typer.Option(help="points: XMC text, a SciPy matrix (.npz), or a table of texts (.csv, .tsv, .parquet)")],
    out: Annotated[Path, typer.Option(help="Parquet file to write: item, place, point (its row in the file), score")],
    per_item: Annotated[int, typer.Option(help="most points of an item")],
    per_point: Annotated[
        int | None, typer.Option(help="most items of a point: its best ones; of a forest one that no tree ranks high may be missing")
    ] = None,
    filter_json: Annotated[str, typer.Option("--filter", help="the items that are wanted, as in a request, JSON")] = "{}",
    rule: Annotated[
        Literal["paper", "released"], typer.Option(help="how many points go down to a node: by its share of training points, or by depth")
    ] = "paper",
    factor: Annotated[
        float | None, typer.Option(help="paper: of that share (4); released: points an item that reach its leaf cluster (10)")
    ] = None,
    block: Annotated[int, typer.Option(help="points that are predicted together")] = 1 << 14,
    column: Annotated[str, typer.Option(help="of a table: the texts")] = "query",
    resume: Annotated[bool, typer.Option("--resume", help="go on where a killed run of the same command was")] = False,
) -> None:
    """For every item, the points of a file that it is most relevant to (XReg's labelwise prediction)."""
    from .assign.command import Assignment
    from .assign.command import assign as write_pairs

    begin = time.perf_counter()
    assignment = Assignment(per_item, per_point, rule, factor, block, filter_json, column)
    pairs = write_pairs(Bundle.open(model), data, assignment, out, resume)
    log.info("wrote %s: %d pairs of items and points, %.0f s", out, pairs, time.perf_counter() - begin)


@app.command()
def options(
    kind: Annotated[str | None, typer.Argument(help="a kind of model or ranker; all are listed without one")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="all kinds, as docs/options.md has them")] = False,
) -> None:
    """List the kinds of models and rankers, or the keys of one with type, default and meaning."""
    from .specification import options as keys

    if markdown:
        print(keys.as_markdown(), end="")
    elif kind is None:
        print(keys.summary())
    else:
        print(keys.as_text(kind))


def _report(bundle: Bundle, begin: float, run_log: RunLog | None = None) -> None:
    """Log the bundle's path, the time, and the recall on test users or queries, and note the recall in `run_log`."""
    log.info("wrote %s in %.0f s", bundle.path, time.perf_counter() - begin)
    tested = "test users" if bundle.manifest.query.kind == "history" else f"test queries{_tested(bundle)}"
    of_history = {"raw": ", items of the history may come back", "seen_excluded": ", without items of the history"}
    for key, rows in bundle.manifest.metrics.get("test", {}).items():
        figures = ", ".join(f"recall@{row['m']} {row['recall']:.4f}" for row in rows)
        if run_log is not None:
            run_log.figures(f"test-{key}", {f"recall@{row['m']}": row["recall"] for row in rows})
        note = of_history[key] if bundle.manifest.query.kind == "history" else ""
        log.info("%s, beam %d%s: %s", tested, bundle.manifest.search.beam_size, note, figures)


def _tested(bundle: Bundle) -> str:
    """The origin of a bundle's held-out queries, in brackets; "" if the manifest has none."""
    tested = bundle.manifest.data.get("tested")
    return f" ({tested})" if tested else ""


@app.command()
def evaluate(
    model: Model,
    data: Annotated[Path | None, typer.Option(help="the log: all its test users instead of the bundle's held-out queries")] = None,
    beam: Annotated[str, typer.Option(help="beam sizes, comma-separated")] = "50,100,200",
    m: Annotated[str, typer.Option(help="numbers of results, comma-separated")] = "10,50",
    engine: Annotated[str | None, typer.Option(help="an engine by name; the default fits the device")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to search")] = "auto",
    precision: Annotated[Literal["float32", "float16", "bfloat16"], typer.Option(help="of node rows and products in triton")] = "float32",
    exclude_seen: Annotated[bool, typer.Option("--exclude-seen", help="leave out the items of the history")] = False,
    unseen: Annotated[
        bool, typer.Option("--unseen", help="only items that no training user touched are relevant; the log is read (--data)")
    ] = False,
    rerank: Annotated[bool, typer.Option("--rerank", help="with the model's ranker")] = False,
    depth: Annotated[int | None, typer.Option(min=1, help="candidates that it re-ranks; the default is the model's")] = None,
    batch: Annotated[int, typer.Option(min=1, help="queries in one engine call")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a recall–latency plot here (PNG or SVG)")] = None,
) -> None:
    """Measure a bundle with a serving engine."""
    from espalier.engines import open_engine

    from . import evaluate as measure

    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InvalidConfig("--plot", str(plot), "a file name that ends in .png or .svg")
    for file in (json_file, plot):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    bundle = Bundle.open(model)
    bundle.check_whole()
    beams, ms = _numbers("--beam", beam), _numbers("--m", m)
    opened = open_engine(bundle, device, engine, precision=precision)
    stage = measure.second_stage(bundle, rerank, depth)
    queries = _queries(bundle, data, unseen, exclude_seen)
    count, rows = len(queries[0][1]), []
    for among, labelled in queries:
        measured = measure.measure(bundle, opened, labelled, beams, ms, batch, stage)
        rows += [among | row for row in measured]
    name = f"{bundle.manifest.name} version {bundle.manifest.version}"
    notes = (
        [", unseen items alone relevant"] * unseen
        + [", seen items excluded"] * exclude_seen
        + ([] if stage is None else [f", best {stage.depth} re-ranked"])
    )
    print(f"{name} on {opened.name}, {count} queries{_tested(bundle) if data is None else ''}{''.join(notes)}")
    measure.print_table(rows)
    unknown = queries[0][1].unknown
    warnings = _warnings([] if rerank or unseen else measure.falls(rows, count), stage, unknown)  # a ranker has an order of its own
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
        report |= {} if unknown is None else {"unknown": asdict(unknown) | {"share": unknown.share}}
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if plot:
        from .compare.plot import plot_frontier

        plot_frontier(rows, f"{name}, {opened.name}", plot)


def _warnings(falls: list[str], stage: Rerank | None, unknown: Unknown | None) -> list[str]:
    """What speaks against the figures, which is logged, too. falls: where a wider beam finds less · unknown: what was left out."""
    for fall in falls:
        log.warning("WARNING: %s. Its ranks mislead the search there: try another γ (docs/train.md, docs/text-search.md)", fall)
    others = [] if unknown is None or not (unknown.relevant or unknown.queries) else [str(unknown)]
    if stage is not None and stage.caller_features:
        names = ", ".join(stage.caller_features)
        others.append(f"re-ranked without {names}: held-out queries have no features that callers send")
    for other in others:
        log.warning("WARNING: %s", other)
    return falls + others


def _queries(bundle: Bundle, data: Path | None, unseen: bool, exclude_seen: bool) -> list[tuple[dict[str, str], LabelledQueries]]:
    """(first columns of their rows, queries) pairs, of a file or of the bundle's held-out queries.

    unseen  only items that no training user touched count as relevant, ranked among all items and among each other
    """
    from espalier.masks.eligibility import node_mask

    from .evaluate import held_out_pairs, labelled
    from .held_out import held_out_log, labelled_queries

    kind = bundle.manifest.query
    for option, is_given in (("--unseen", unseen), ("--exclude-seen", exclude_seen)):
        if is_given and kind.kind != "history":
            raise InvalidConfig(option, True, f"a model of histories, not of {kind.kind} queries")
    if unseen:
        log = held_out_log(bundle, data)
        masks = {"all": None, "unseen": node_mask(bundle.tree, log.unseen_I)}
        queries = [({"among": among}, labelled(kind, log.of_unseen(), exclude_seen, mask)) for among, mask in masks.items()]
        return [(among, replace(measured, unknown=log.unknown)) for among, measured in queries]
    if kind.kind == "history":
        if data is None:
            return [({}, labelled(kind, held_out_pairs(bundle), exclude_seen))]
        log = held_out_log(bundle, data)
        return [({}, replace(labelled(kind, log.pairs, exclude_seen), unknown=log.unknown))]
    return [({}, labelled_queries(bundle, data))]


@app.command()
def compare(
    file: Annotated[Path | None, typer.Argument(metavar="LOG", help="a log, which is looked at as `new` does it; or --config")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; `data.split`, of texts `data.test`, says how test queries are held out")
    ] = None,
    user: Annotated[str | None, typer.Option(help="of LOG: column of the users, as for `new`")] = None,
    item: Annotated[str | None, typer.Option(help="of LOG: column of the items")] = None,
    at: Annotated[str | None, typer.Option("--time", help="of LOG: column of the times, `file` or `none`")] = None,
    query: Annotated[str | None, typer.Option(help="of LOG: column of the query texts")] = None,
    data: Annotated[Path | None, typer.Option(help="a log to read instead of the configured one")] = None,
    methods: Annotated[
        str | None, typer.Option(help="comma-separated; docs/judge.md lists them, and fusion:FIRST:SECOND is any two")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="time of everything; a method that would see less than half of its data or steps is not judged")
    ] = 5,
    beam: Annotated[str | None, typer.Option(help="serving beams of the tree, comma-separated; 50,200,800, of texts 10,50,200")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="report, written after every method. A later run keeps the methods that it has; of texts it runs all again"
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw recall against ms per query (PNG or SVG)")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where the tree is trained")] = "auto",
    own: Annotated[
        list[str] | None,
        typer.Option(
            help="a method of yours: module:name with `fit` and `recommend`, or a file of user, item, rank (docs/judge.md); may be repeated"
        ),
    ] = None,
    queries_to: Annotated[
        Path | None, typer.Option(help="write to this folder what a method learns from and what it is asked, and compare nothing")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="of the table: recall@M, ndcg@M, hr@M (anything found) and mrr@M, comma-separated")
    ] = None,
    segments: Annotated[
        bool, typer.Option("--segments", help="print what is found by length of the history and by popularity, and what is shown")
    ] = False,
    log_to: LogTo = None,
) -> None:
    """Would a tree pay on this log? Train it and what it competes with, and measure all on the same queries."""
    from .compare import command

    beams = None if beam is None else _numbers("--beam", beam)
    columns = {"user": user, "item": item, "time": at, "query": query}
    command.check_options(minutes, beams, metrics, plot, json_file)
    with _configuration(file, config, columns) as configuration:
        if queries_to is not None:
            measured = {"--own": own, "--methods": methods, "--beam": beam, "--metrics": metrics, "--segments": segments}
            for option, value in (measured | {"--json": json_file, "--plot": plot, "--log-to": log_to}).items():
                if value:
                    raise InvalidConfig(option, value, "nothing beside --queries-to, which compares nothing")
            command.export_queries(configuration, data, queries_to)
            return
        report = command.run(configuration, data, methods, minutes, beams, json_file, plot, device, own or (), metrics, segments, log_to)
        if report["interrupted"]:
            raise typer.Exit(INTERRUPTED)


@contextmanager
def _configuration(file: Path | None, config: Path | None, columns: Mapping[str, str | None]) -> Iterator[Path]:
    """The path of a given configuration, or of one that is written for a log. Raises InvalidConfig unless exactly one is given."""
    if (file is None) == (config is None):
        raise InvalidConfig("LOG", None if file is None else str(file), "either a log or a configuration of one (--config)")
    if config is not None:
        if named := {f"--{name}": value for name, value in columns.items() if value is not None}:
            raise InvalidConfig(", ".join(named), next(iter(named.values())), "nothing beside --config, which names the columns")
        yield config
    elif file is not None:
        from .new_configuration import write_configuration

        with tempfile.TemporaryDirectory(prefix="espalier-") as folder:
            yield write_configuration(file.absolute(), Path(folder) / "compare.toml", False, None, columns)


@app.command()
def publish(
    model: Annotated[Path, typer.Option(help="models/NAME/VERSION, or models/NAME-shards: all shards of a version")],
    store: Annotated[str, typer.Option(help="s3://BUCKET/PATH, gs://…, az://… or file:///FOLDER; keys come from the environment")],
    version: Annotated[int | None, typer.Option(min=1, help="of shards; the default is the highest")] = None,
    default: Annotated[bool, typer.Option("--default", help="have it serve; otherwise set-default says, or the highest does")] = False,
    again: Annotated[bool, typer.Option("--again", help="send files that the store has too, in case one of them is damaged")] = False,
) -> None:
    """Put a model on object storage, from where services with ESPALIER_STORE take it."""
    from .stored import publish as publish_stored

    publish_stored(model, version, store, default, again)


@app.command()
def versions(
    store: Annotated[str, typer.Option(help="the store's URL")],
    model: Annotated[str | None, typer.Option(help="NAME; the default is all models")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """List the models of a store, their versions, and which of them serves."""
    from .stored import print_versions
    from .stored import versions as stored_versions

    print_versions(stored_versions(store, model), as_json)


@app.command()
def set_default(
    store: Annotated[str, typer.Option(help="the store's URL")],
    model: Annotated[str | None, typer.Option(help="NAME; the default is all models, as the shards of one bundle")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="the version that serves; without one the highest does")] = None,
    beside: Annotated[str, typer.Option(help="versions that are loaded beside it, comma-separated")] = "",
    candidate: Annotated[int | None, typer.Option(min=1, max=MAX_VERSION, help="a version that is tried on some of the requests")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="share of the users whose requests the candidate answers")] = 0.0,
    shadow: Annotated[float, typer.Option(min=0, max=1, help="share of the others that it answers, too, unseen")] = 0.0,
) -> None:
    """Say which version of a stored model serves: pin one, roll back, try another, or go on with the highest."""
    from .stored import change_default

    if candidate is None and (share or shadow):
        raise InvalidConfig("--share" if share else "--shadow", share or shadow, "no such option without --candidate")
    trial_candidate = None if candidate is None else Candidate(version=candidate, share=share, shadow=shadow)
    change_default(store, model, version, _numbers("--beside", beside) if beside else [], trial_candidate)


@app.command()
def trial(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="CSV, TSV or Parquet with a row an answer")],
    user: Annotated[str, typer.Option(help="column of the users")],
    version: Annotated[str, typer.Option(help="column of the versions that answered")],
    value: Annotated[str, typer.Option(help="column of what came of an answer: numbers, or true and false")],
    against: Annotated[str | None, typer.Option(help="the version that others are compared with; by default that of most users")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """What did users do with the answers of two versions? Means over users, and the difference with its interval."""
    from .trial import judge, print_judged

    print_judged(judge(log, user, version, value, against), as_json)


@app.command()
def inspect(model: Model) -> None:
    """Show a bundle: levels, branching, balance, sample paths."""
    from .inspect import inspect as inspect_bundle

    print(inspect_bundle(Bundle.open(model)))


def _numbers(option: str, text: str) -> list[int]:
    """The numbers of a comma-separated list, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise InvalidConfig(option, text, "whole numbers, comma-separated, for example 50,100") from error


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command. Returns the exit code."""
    end_loading()
    logging.basicConfig(format="%(message)s")
    for name in (str(__package__), "espalier"):  # torch.onnx and onnxscript log every step of an export at INFO
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        with no_interrupt_lost():
            app(arguments, prog_name=prog)
    except (EspalierError, FloatingPointError, OSError) as error:
        print(f"error: {error}{free_space() if is_full(error) else ''}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as missing:  # typer is installed, the other dependencies of training are not
        print(f"error: {missing.name} is not installed, which this command needs: pip install 'espalier[train]'", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"error: out of memory {error}".rstrip(), file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"Interrupted. {interrupted}.", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as ended:  # typer ends every command so
        if ended.code == INTERRUPTED:
            print("Interrupted.", file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
