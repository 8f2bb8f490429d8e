"""For each beam size: recall through HTTP, latency with one client and under load, and which beam a latency budget buys.

    espalier loadtest --url http://localhost:8000 --model NAME --beam 10,50,200 --m 10,50 --seconds 10 --out DIR --budget-ms 5

Writes sweep.csv, sweep.md, frontier.png, frontier.svg and sweep.json, which --resume goes on from. Knows the command line and the order
of things; cells are measured in cell.py.
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
except ModuleNotFoundError as missing:  # after `make run`, which installs only what serves
    sys.exit(f"error: {missing.name} is not installed, which the sweep needs: `make install`, or `pip install 'espalier[load]'`")

from espalier.errors import EspalierError, InvalidConfig
from espalier.hardware import hardware

from .cell import Load, measure
from .queries import digest, queries_of, without_seen
from .report import write_report
from .target import Json, Target, describe, parse_url

PHASES = 4
"""Steps of measuring a cell, one more with writes; the progress bar counts them."""


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
    options.add_argument("--resume", action="store_true", help="keep what is finished in DIR/sweep.json and measure the rest")
    return options


def numbers(text: str) -> tuple[int, ...]:
    """ "10,50" as integers of at least 1, ascending, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers of at least 1, comma-separated, for example 10,50,200")
    return tuple(found)


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
    return tuple(sorted({positive(part) for part in text.split(",")}))


def sweep(options: argparse.Namespace, command: str) -> int:
    """Measure what is not measured yet and write everything; the exit code. Raises EspalierError and OSError."""
    target = parse_url(options.url, options.key)
    if options.writes and not options.write_key:
        raise InvalidConfig("--write-key", None, "a key of the role write, for --writes")
    model = described(target, options)
    check_limits(model, options.beam, options.m)
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
    )
    document = new_document(load, model, options, command)
    options.out.mkdir(parents=True, exist_ok=True)
    if not os.access(options.out, os.W_OK):
        raise InvalidConfig("--out", str(options.out), "a folder that this user may write to")
    file = options.out / "sweep.json"
    if options.resume and file.exists():
        document["cells"] = finished(file, document)
    if not document["queries"]["with_relevant"]:
        log("no query has relevant items: no recall will be measured, and the plot shows the beam size against p99")
    code = measure_all(load, options.beam, options.m, document, file)
    if not document["cells"]:
        return code  # what an earlier run has left stays as it is
    for line in write_report(document, options.out, options.budget_ms):
        print(line)
    print(f"{len(document['cells'])} cells in {options.out}: sweep.csv, sweep.md, frontier.png, frontier.svg")
    return code


def new_document(load: Load, model: Json, options: argparse.Namespace, command: str) -> Json:
    """What sweep.json holds of a sweep before its first cell."""
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


def described(target: Target, options: argparse.Namespace) -> Json:
    """What the service says of the model, with the version and the engine that will be asked. Raises InvalidConfig.

    The service describes the version that it answers with; of another one it says no more than that it is loaded.
    """
    model = describe(target, options.model)
    wanted = model["version"] if options.version is None else options.version
    ready = {version["version"]: version for version in model["versions"] if version["state"] == "ready"}
    if wanted not in ready:
        raise InvalidConfig("--version", wanted, f"a version of {model['name']} that is loaded: {', '.join(map(str, ready))}")
    unknown = {} if wanted == model["version"] else dict.fromkeys(("tree", "algorithm", "metrics", "search"))
    items = model["tree"]["items"] if not unknown else None
    return {**model, **unknown, "items": items, "version": wanted, "engine": ready[wanted]["engine"]}


def check_limits(model: Json, beams: Sequence[int], ms: Sequence[int]) -> None:
    """Raise InvalidConfig before anything is measured that the model would refuse in the end."""
    if model["search"] is None:
        return
    for option, values, limit in (("--beam", beams, model["search"]["max_beam_size"]), ("--m", ms, model["search"]["max_m"])):
        for value in values:
            if value > limit:
                raise InvalidConfig(option, value, f"1 to {limit}, the limit of model {model['name']}")


def finished(file: Path, document: Json) -> list[Json]:
    """The cells of an earlier run of the same sweep. Raises InvalidConfig where it was of another model or other settings."""
    try:
        earlier = json.loads(file.read_text())
        cells: list[Json] = earlier["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig("--resume", str(file), "a sweep.json of this command; it cannot be read") from error
    for part in ("model", "identity", "settings", "queries", "hardware"):
        if earlier.get(part) != document[part]:
            was, now = _difference(earlier.get(part), document[part])
            raise InvalidConfig("--resume", f"{file} with {part} {was}", f"{now}, as this run; choose another --out, or leave --resume out")
    return cells


def _difference(was: Any, now: Any) -> tuple[str, str]:
    """The first thing in which two parts of a document differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        name = next(name for name in {**now, **was} if was.get(name) != now.get(name))
        if name not in ("tree", "metrics", "digest"):
            return f"{name} {was.get(name)}", f"{name} {now.get(name)}"
        return f"another {name}", f"the same {name}"
    return str(was), str(now)


def measure_all(load: Load, beams: Sequence[int], ms: Sequence[int], document: Json, file: Path) -> int:
    """Measure the cells that are missing, keeping each in `file` once it is finished; the exit code: 130 after Ctrl-C, 1 after an error."""
    done = {(cell["beam_size"], cell["m"]) for cell in document["cells"]}
    missing = [(beam, m) for beam in beams for m in ms if (beam, m) not in done]
    if len(missing) < len(beams) * len(ms):
        log(f"{len(beams) * len(ms) - len(missing)} cells are finished already")
    phases = PHASES + (load.writes_per_s > 0)
    with tqdm(total=len(missing) * phases, unit="loop", file=sys.stderr, disable=None) as bar:
        for number, (beam, m) in enumerate(missing):

            def begins(phase: str, at: str = f"beam {beam}, m {m}") -> None:
                bar.set_description(f"{at}: {phase}")
                bar.update(0 if phase == "recall" else 1)

            try:
                cell = measure(load, beam, m, begins)
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
    parts = [f"beam {cell['beam_size']:4d}  m {cell['m']:4d}  recall {recall}"]
    for loop, measured in cell["loops"].items():
        p99 = "none" if measured["p99_ms"] is None else f"{measured['p99_ms']:.2f} ms"
        failed = f", {measured['failed']} failed" if measured["failed"] else ""
        parts.append(f"{loop} p99 {p99} at {measured['requests_per_s']:.0f}/s{failed}")
    if "writes" in cell:
        p99 = "none" if cell["writes"]["p99_ms"] is None else f"{cell['writes']['p99_ms']:.2f} ms"
        parts.append(f"writes p99 {p99}, statuses {cell['writes']['statuses']}")
    return "  ".join(parts)


def save(document: Json, file: Path) -> None:
    """In one step, so that a killed run leaves the former document."""
    temporary = file.with_suffix(".json.new")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.rename(file)


def _without_key(word: str, before: str) -> str:
    """A word of the command line, without the key that it is or holds."""
    option, _, value = word.partition("=")
    return "…" if before in KEYS else f"{option}=…" if option in KEYS and value else word


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m loadtest.sweep") -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser(prog).parse_args(given)
    hidden = [_without_key(word, given[i - 1] if i else "") for i, word in enumerate(given)]
    try:
        return sweep(options, f"{prog} {shlex.join(hidden)}")
    except (EspalierError, OSError) as error:
        log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
