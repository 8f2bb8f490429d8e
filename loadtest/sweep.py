"""Measures, for each beam size, recall through HTTP and latency with one client and under load; proposes beams for latency budgets.

    espalier loadtest --url http://localhost:8000 --model NAME --beam 10,50,200 --m 10,50 --seconds 10 --out DIR --budget-ms 5

Writes sweep.csv, sweep.md, frontier.png, frontier.svg and sweep.json, which --resume continues. Knows the command line and the order of
steps; cell.py measures the cells.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from tqdm import tqdm
except ModuleNotFoundError as missing:  # after `make run`, which installs only the service
    sys.exit(f"error: {missing.name} is not installed, which the sweep needs: `make install`, or `pip install 'espalier[load]'`")

from espalier.durable import atomic_write
from espalier.errors import MISSING, EspalierError, InvalidConfig
from espalier.hardware import hardware

from .cell import Load, measure
from .queries import digest, queries_of, without_seen
from .report import write_report
from .target import Json, Target, check_limit, describe, parse_url

PHASES = 4
"""Steps of a cell for the progress bar; writes add one."""


KEYS = ("--key", "--write-key")


def parser(prog: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog=prog,
        description="Measure a served model over beam sizes: recall through HTTP, latency with one client (closed loop) and under load "
        "(open loop); write a CSV, Markdown tables and a recall-versus-latency plot; propose the beam for a latency budget.",
    )
    options.add_argument("--url", required=True, help="the service, http://HOST:PORT")
    options.add_argument("--model", help="name of the model; may be left out where one is served")
    options.add_argument("--version", type=int, help="version of it, which must be loaded (default: the one that the service answers with)")
    options.add_argument("--beam", type=numbers, default="10,25,50,100,200,400,800", help="beam sizes (default %(default)s)")
    options.add_argument("--m", type=numbers, default="10,50,200", help="numbers of results (default %(default)s)")
    options.add_argument("--seconds", type=positive, default=10.0, help="length of each loop (default %(default)g)")
    options.add_argument("--rounds", type=count, default=1, help="how often each loop runs; medians are reported (default %(default)s)")
    options.add_argument("--out", type=Path, required=True, help="folder for what is written")
    options.add_argument("--rate", type=positive, help="requests/s of the open loop (default: 70 %% of each cell's capacity)")
    options.add_argument(
        "--budget-ms",
        type=budgets,
        default=(),
        help="p99 budgets, comma-separated: propose the beam of the largest recall within each",
    )
    options.add_argument(
        "--models", type=Path, default=Path("models"), help="folder of the bundles, for their held-out queries (default %(default)s)"
    )
    options.add_argument(
        "--queries",
        type=Path,
        help="Parquet or JSON lines instead: history, vector, features or text; and optionally relevant, a list of ids",
    )
    options.add_argument("--exclude-seen", action="store_true", help="items of the history are neither returned nor relevant")
    options.add_argument("--timeout-ms", type=positive, help="deadline of each request (default: the service's)")
    options.add_argument("--key", help="an API key, where the service wants one; other users of this machine can read a command line")
    options.add_argument(
        "--writes", type=positive, help="items put per second in a third loop, beside the rate of the open one; needs --write-key"
    )
    options.add_argument("--write-key", help="an API key of the role write, for --writes")
    options.add_argument("--seed", type=int, default=0, help="of the order of the queries and the arrival times (default %(default)s)")
    options.add_argument("--resume", action="store_true", help="keep the finished measurements in OUT/sweep.json and make the others")
    return options


def numbers(text: str) -> tuple[int, ...]:
    """ "10,50" as integers of at least 1, ascending, without duplicates."""
    try:
        values = sorted({int(number) for number in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers of at least 1, comma-separated, for example 10,50,200")
    return tuple(values)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def budgets(text: str) -> tuple[float, ...]:
    return tuple(sorted({positive(number) for number in text.split(",")}))


def sweep(options: argparse.Namespace, command: str) -> int:
    """Measure the missing cells and write the report. Returns the exit code. Raises EspalierError and OSError."""
    target = parse_url(options.url, options.key)
    if options.writes and not options.write_key:
        raise InvalidConfig("--write-key", MISSING, "a key of the role write, for --writes")
    model = describe_version(target, options)
    check_limit(model, "--beam", options.beam, "max_beam_size")
    check_limit(model, "--m", options.m, "max_m")
    queries = queries_of(model, options.models, options.queries)
    if options.exclude_seen:
        queries = without_seen(queries)
    load = Load(
        target=target,
        model=model["name"],
        version=model["version"],
        queries=queries,
        seconds=options.seconds,
        rounds=options.rounds,
        rate_per_s=options.rate,
        exclude_seen=options.exclude_seen,
        timeout_ms=options.timeout_ms,
        seed=options.seed,
        writes_per_s=options.writes or 0.0,
        writer=parse_url(options.url, options.write_key) if options.writes else None,
        longest_history=model["query"].get("length"),
    )
    document = new_document(load, model, options, command)
    options.out.mkdir(parents=True, exist_ok=True)
    if not os.access(options.out, os.W_OK):
        raise InvalidConfig("--out", str(options.out), "a folder that this user may write to")
    file = options.out / "sweep.json"
    if options.resume and file.exists():
        document["cells"] = finished_cells(file, document)
    if not document["queries"]["with_relevant"]:
        log("no query has relevant items: no recall will be measured, and the plot shows the beam size against p99")
    code = measure_all(load, options.beam, options.m, document, file)
    if not document["cells"]:
        return code  # the report of an earlier run stays
    for line in write_report(document, options.out, options.budget_ms):
        print(line)
    print(f"{len(document['cells'])} cells in {options.out}: sweep.csv, sweep.md, frontier.png, frontier.svg")
    return code


def new_document(load: Load, model: Json, options: argparse.Namespace, command: str) -> Json:
    """The content of sweep.json before the first cell."""
    return {
        "command": command,
        "hardware": hardware(),
        "model": {"name": model["name"], "version": model["version"], "engine": model["engine"], "items": model["items"]},
        "identity": {name: model[name] for name in ("tree", "algorithm", "metrics")},
        "queries": {
            "source": "the bundle's held-out queries" if options.queries is None else options.queries.name,
            "count": len(load.queries),
            "with_relevant": sum(bool(query.relevant) for query in load.queries),
            "digest": digest(load.queries),
        },
        "settings": {
            "url": str(load.target),
            "seconds": options.seconds,
            "rounds": options.rounds,
            "rate_per_s": options.rate,
            "exclude_seen": options.exclude_seen,
            "timeout_ms": options.timeout_ms,
            "seed": options.seed,
            **({"writes_per_s": options.writes} if options.writes else {}),
        },
        "cells": [],
    }


def describe_version(target: Target, options: argparse.Namespace) -> Json:
    """The service's description of the model, with the version to measure and its engine. Raises InvalidConfig.

    The service describes only its default version. For another one, the fields of the bundle become None.
    """
    model = describe(target, options.model)
    version = model["version"] if options.version is None else options.version
    ready = {entry["version"]: entry for entry in model["versions"] if entry["state"] == "ready"}
    if version not in ready:
        raise InvalidConfig("--version", version, f"a version of {model['name']} that is loaded: {', '.join(map(str, ready))}")
    unknown = {} if version == model["version"] else dict.fromkeys(("tree", "algorithm", "metrics", "search"))
    items = model["tree"]["items"] if not unknown else None
    return {**model, **unknown, "items": items, "version": version, "engine": ready[version]["engine"]}


def finished_cells(file: Path, document: Json) -> list[Json]:
    """The cells of an earlier run of the same sweep. Raises InvalidConfig if the model or a setting differs."""
    try:
        earlier = json.loads(file.read_text())
        cells: list[Json] = earlier["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig("--resume", str(file), "a sweep.json of this command; it cannot be read") from error
    for section in ("model", "identity", "settings", "queries", "hardware"):
        if earlier.get(section) != document[section]:
            before, now = _difference(earlier.get(section), document[section])
            advice = "as this run; choose another --out, or leave --resume out"
            raise InvalidConfig("--resume", f"{file} with {section} {before}", f"{now}, {advice}")
    return cells


def _difference(before: Any, now: Any) -> tuple[str, str]:
    """The first difference of a section of two documents, as texts."""
    if isinstance(before, dict) and isinstance(now, dict):
        name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
        if name not in ("tree", "metrics", "digest"):
            return f"{name} {before.get(name)}", f"{name} {now.get(name)}"
        return f"another {name}", f"the same {name}"
    return str(before), str(now)


def measure_all(load: Load, beams: Sequence[int], ms: Sequence[int], document: Json, file: Path) -> int:
    """Measure the missing cells and save each to `file` once it is finished. Returns the exit code: 130 after Ctrl-C, 1 after an error."""
    finished = {(cell["beam_size"], cell["m"]) for cell in document["cells"]}
    missing = [(beam, m) for beam in beams for m in ms if (beam, m) not in finished]
    if len(missing) < len(beams) * len(ms):
        log(f"{len(beams) * len(ms) - len(missing)} cells are finished already")
    phases = PHASES + (load.writes_per_s > 0)
    with tqdm(total=len(missing) * phases, unit="loop", file=sys.stderr, disable=None) as bar:
        for number, (beam, m) in enumerate(missing):

            def show_phase(phase: str, cell_name: str = f"beam {beam}, m {m}") -> None:
                bar.set_description(f"{cell_name}: {phase}")
                bar.update(0 if phase == "recall" else 1)

            try:
                cell = measure(load, beam, m, show_phase)
            except KeyboardInterrupt:
                log("interrupted; what is finished is written, and --resume goes on from there")
                return 130
            except EspalierError as error:
                if number == 0 and not document["cells"]:
                    raise
                log(f"error: {error}")
                return 1
            bar.update(1)
            document["cells"].append(cell)
            save(document, file)
            with bar.external_write_mode(file=sys.stderr):
                log(line(cell))
    return 0


def line(cell: Json) -> str:
    recall = "none" if cell["recall"] is None else f"{cell['recall']:.4f}"
    texts = [f"beam {cell['beam_size']:4d}  m {cell['m']:4d}  recall {recall}"]
    for loop, figures in cell["loops"].items():
        p99 = "none" if figures["p99_ms"] is None else f"{figures['p99_ms']:.2f} ms"
        failed = f", {figures['failed']} failed" if figures["failed"] else ""
        texts.append(f"{loop} p99 {p99} at {figures['requests_per_s']:.0f}/s{failed}")
    if "writes" in cell:
        p99 = "none" if cell["writes"]["p99_ms"] is None else f"{cell['writes']['p99_ms']:.2f} ms"
        texts.append(f"writes p99 {p99}, statuses {cell['writes']['statuses']}")
    return "  ".join(texts)


def save(document: Json, file: Path) -> None:
    """Replace the file in one step, so that a killed run leaves the former document."""
    with atomic_write(file) as part:
        part.write_text(json.dumps(document, indent=1) + "\n")


def _without_key(word: str, previous_word: str) -> str:
    """A word of the command line. If it is a key or holds one, the key is replaced."""
    option, _, value = word.partition("=")
    return "…" if previous_word in KEYS else f"{option}=…" if option in KEYS and value else word


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m loadtest.sweep") -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser(prog).parse_args(words)
    words_without_keys = [_without_key(word, words[i - 1] if i else "") for i, word in enumerate(words)]
    try:
        return sweep(options, f"{prog} {shlex.join(words_without_keys)}")
    except (EspalierError, OSError) as error:
        log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
