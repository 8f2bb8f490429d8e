"""Small faults put into the product, one at a time, and whether the fast tests notice them: what a smaller suite must still catch.

    pip install pytest-cov
    python -m pytest --cov espalier --cov espalier_client --cov service --cov training --cov loadtest --cov-context test --cov-report=
    python -m tests.mutants draw --coverage .coverage --out LIST
    python -m tests.mutants run --list LIST --coverage .coverage --checkout COPY --json FILE

`draw` takes lines that tests reach, as many from each package, at most one from a function. `run` puts each mutant into COPY, a clean
checkout of the commit that was covered, and runs the tests that reach its line there. It goes on where an earlier run with the same FILE
ended. A mutant is found again by its function and the text of its line, so the list outlives changes around it. Knows Python's syntax and
coverage's data.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

PACKAGES = ("espalier", "espalier_client", "loadtest", "service", "training")
SWAPS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in", "is": "is not", "is not": "is"},
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "//", "and": "or", "or": "and"},
}
OPERATOR = re.compile(r"not\s+in|is\s+not|<=|>=|==|!=|//|[<>+\-*/%]|\b(?:in|is|and|or)\b")
FIRST_TESTS, MOST_TESTS = 15, 250
LIMIT_S = 300.0
"""A pytest process that takes longer was caught in an endless loop: the mutant is dead."""


@dataclass(frozen=True)
class Mutant:
    """function: its qualified name. line: its text, stripped. before, after: of that text, from `column` on."""

    package: str
    file: str
    function: str
    line: str
    column: int
    before: str
    after: str


# -- where a fault may be ----------------------------------------------------------------------------------------------------


def mutants_of(package: str, file: str, source: str) -> Iterator[tuple[int, Mutant]]:
    """All faults of one file, and the numbers of their lines."""
    lines = source.splitlines()
    for function, node in _nodes(ast.parse(source), ""):
        for line, column, before, after in _faults(node, lines):
            text = lines[line - 1]
            indent = len(text) - len(text.lstrip())
            yield line, Mutant(package, file, function, text.strip(), column - indent, before, after)


def _nodes(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """The nodes inside functions, with the function's name; no annotations, decorators or messages of errors."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
            for statement in child.body:
                if isinstance(child, ast.ClassDef):
                    yield from _nodes(ast.Module([statement], []), inner)
                else:
                    yield inner, statement
                    yield from _nodes(statement, inner)
        elif isinstance(child, ast.AnnAssign):
            yield from _nodes(ast.Tuple([child.value] if child.value else [], ast.Load()), name)
        elif not isinstance(child, ast.Raise | ast.JoinedStr | ast.arg):
            if name:
                yield name, child
            yield from _nodes(child, name)


def _faults(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, int, str, str]]:
    """(line, column, text, other text), each within one line. Columns are right where the line is ASCII."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Compare):
        pairs = list(zip([node.left, *node.comparators], node.comparators, strict=False))
    elif isinstance(node, ast.BinOp):
        pairs = [(node.left, node.right)]
    elif isinstance(node, ast.BoolOp):
        pairs = list(zip(node.values, node.values[1:], strict=False))
    for left, right in pairs:
        if left.end_lineno == right.lineno:
            between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            found = OPERATOR.search(between)
            if found and (operator := " ".join(found.group().split())) in SWAPS:
                yield right.lineno, (left.end_col_offset or 0) + found.start(), found.group(), SWAPS[operator]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
        yield node.lineno, node.col_offset, lines[node.lineno - 1][node.col_offset : node.operand.col_offset], ""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node.lineno, node.col_offset, str(node.value), str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        text = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
        yield node.lineno, node.col_offset, text, str(node.value + 1)
    if isinstance(node, ast.If | ast.While) and node.test.lineno == node.test.end_lineno:
        text = lines[node.test.lineno - 1][node.test.col_offset : node.test.end_col_offset]
        yield node.test.lineno, node.test.col_offset, text, f"not ({text})"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
        text = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
        if not text.startswith(("log.", "print(", "super(")):
            yield node.lineno, node.col_offset, text, "pass"


def mutated(mutant: Mutant, source: str) -> tuple[str, int] | None:
    """A file's text with the fault, and the line's number; None where the line is not there any more."""
    for number, other in mutants_of(mutant.package, mutant.file, source):
        if other == mutant:
            lines = source.splitlines(keepends=True)
            text = lines[number - 1]
            at = len(text) - len(text.lstrip()) + mutant.column
            lines[number - 1] = text[:at] + mutant.after + text[at + len(mutant.before) :]
            return "".join(lines), number
    return None


# -- draw ----------------------------------------------------------------------------------------------------------------------


def draw(coverage_file: Path, root: Path, count: int, seed: int) -> list[Mutant]:
    """As many mutants of each package, in lines that tests reach, at most one of a function."""
    rng, drawn = random.Random(seed), list[Mutant]()
    reached = Reached(coverage_file, root)
    for package in PACKAGES:
        by_function: dict[tuple[str, str], list[Mutant]] = {}
        for path in sorted((root / package).rglob("*.py")):
            file, source = path.relative_to(root).as_posix(), path.read_text()
            for line, mutant in mutants_of(package, file, source):
                if reached.tests(file, line) and mutant.line.isascii() and _is_valid(mutant, source):
                    by_function.setdefault((file, mutant.function), []).append(mutant)
        functions = rng.sample(sorted(by_function), min(count // len(PACKAGES), len(by_function)))
        drawn += [rng.choice(by_function[function]) for function in functions]
    return drawn


def _is_valid(mutant: Mutant, source: str) -> bool:
    found = mutated(mutant, source)
    try:
        return found is not None and bool(compile(found[0], mutant.file, "exec"))
    except SyntaxError:
        return False


class Reached:
    """Which tests reach a line."""

    def __init__(self, coverage_file: Path, root: Path) -> None:
        from coverage import CoverageData

        self._data, self._root, self._known = CoverageData(str(coverage_file)), root, dict[str, dict[int, list[str]]]()
        self._data.read()

    def tests(self, file: str, line: int) -> list[str]:
        if file not in self._known:
            found = self._data.contexts_by_lineno(str(self._root / file))
            self._known[file] = {number: sorted({name.rsplit("|", 1)[0] for name in names if name}) for number, names in found.items()}
        return self._known[file].get(line, [])


# -- run -----------------------------------------------------------------------------------------------------------------------


def run(mutants: Iterable[Mutant], reached: Reached, checkout: Path, file: Path) -> list[dict[str, Any]]:
    """Try mutants, one after the other; what an earlier run has tried is kept."""
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    tried = {json.dumps(row["mutant"], sort_keys=True) for row in rows}
    for mutant in mutants:
        if json.dumps(asdict(mutant), sort_keys=True) not in tried:
            began = time.monotonic()
            row = {"mutant": asdict(mutant), **_try(mutant, reached, checkout)}
            rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
            file.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{len(rows)}: {row['outcome']} {mutant.file} {mutant.function}: {mutant.before!r} → {mutant.after!r}", flush=True)
    return rows


def _try(mutant: Mutant, reached: Reached, checkout: Path) -> dict[str, Any]:
    path = checkout / mutant.file
    source = path.read_text() if path.exists() else ""
    found = mutated(mutant, source)
    if found is None:
        return {"outcome": "gone", "tests": 0}
    tests = _mixed(reached.tests(mutant.file, found[1]))[:MOST_TESTS]
    path.write_text(found[0])
    try:
        for part in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
            if part and (killer := _killer(part, checkout)):
                return {"outcome": "killed", "tests": len(tests), "by": killer}
        return {"outcome": "survived", "tests": len(tests)}
    finally:
        path.write_text(source)


def _mixed(tests: Sequence[str]) -> list[str]:
    """Tests in an order that begins with one of each file: of two in a file, the second seldom finds what the first did not."""
    by_file: dict[str, list[str]] = {}
    for test in random.Random(0).sample(tests, len(tests)):
        by_file.setdefault(test.split("::")[0], []).append(test)
    return [test for test in chain.from_iterable(zip_longest(*by_file.values())) if test is not None]


def _killer(tests: Sequence[str], checkout: Path) -> str:
    """The first of some tests that fails; empty where all pass."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(tests))
        names.flush()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"@{names.name}"]
        try:
            ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"no end after {LIMIT_S:g} s"
    if ended.returncode in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"exit {ended.returncode}: {(ended.stdout + ended.stderr)[-200:]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("draw", "run"):
        command = commands.add_parser(name)
        command.add_argument("--coverage", type=Path, required=True, help="coverage's data, with a context for each test")
        command.add_argument("--root", type=Path, default=Path.cwd(), help="where the covered files lie (default: here)")
    commands.choices["draw"].add_argument("--seed", type=int, default=0)
    commands.choices["draw"].add_argument("--count", type=int, default=150)
    commands.choices["draw"].add_argument("--out", type=Path, required=True, help="the list")
    commands.choices["run"].add_argument("--list", type=Path, required=True, help="what `draw` wrote")
    commands.choices["run"].add_argument("--checkout", type=Path, required=True, help="a copy that may be written to")
    commands.choices["run"].add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.command == "draw":
        drawn = draw(options.coverage, options.root, options.count, options.seed)
        options.out.write_text(json.dumps({"seed": options.seed, "mutants": [asdict(mutant) for mutant in drawn]}, indent=1) + "\n")
    else:
        listed = [Mutant(**mutant) for mutant in json.loads(options.list.read_text())["mutants"]]
        rows = run(listed, Reached(options.coverage, options.root), options.checkout, options.json)
        outcomes = [row["outcome"] for row in rows]
        print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})


if __name__ == "__main__":
    main()
