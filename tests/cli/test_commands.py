"""The command `espalier`: its help, what it says of wrong words, and what it does itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import espalier
from espalier.errors import InvalidQuery
from espalier.file_lock import file_lock
from espalier.queries import HistoryKind
from espalier_cli import predict as module
from espalier_cli.__main__ import COMMANDS, main
from espalier_cli.completion import main as complete
from espalier_cli.embed import main as embed
from espalier_cli.predict import main as predict
from tests import ROOT

SAMPLE = ROOT / "models/debian-depends/1"
HISTORIES = [["nginx", "postgresql"], ["libsdl2-2.0-0", "libgl1"], [], ["perl"], ["libc6"]]


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    filters = [None, json.dumps({"section": ["libs"]}), None, json.dumps({"section": ["perl"]}), None]
    table = pa.table({"user": list("abcde"), "history": HISTORIES, "most": [1, 2, 3, 4, 5], "only": filters})
    pq.write_table(table, tmp_path / "users.parquet")
    return tmp_path / "users.parquet"


def run(*arguments: object) -> int:
    return predict([str(argument) for argument in arguments], "espalier predict")


def test_commands_run_in_any_thread(tmp_path: Path, queries: Path) -> None:
    asked = ["predict", "--model", str(SAMPLE), "--queries", str(queries), "--out", str(tmp_path / "top.parquet"), "--workers", "1"]
    with ThreadPoolExecutor() as pool:
        assert pool.submit(main, asked).result() == 0
    assert pq.read_table(tmp_path / "top.parquet").num_rows == len(HISTORIES)


INTERRUPTED_IMPORT = """
import contextlib, os, runpy, signal, sys

class Interruption:
    def find_spec(self, name, path, target=None, interrupted=sys.argv[1]):
        if name == interrupted:
            with contextlib.suppress(KeyboardInterrupt):  # as callbacks from C do
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interruption())
_, _, package = sys.argv
sys.argv[:] = ["-m", "fit", "--help"]  # so Python says while it loads `python -m`
runpy.run_module(package, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("package", ["espalier_cli", "training"])
@pytest.mark.parametrize("module_name", ["numpy", "typer"])
def test_ctrl_c_while_a_command_loads_ends_it_with_a_line(package: str, module_name: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, module_name, package], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_ctrl_c_ends_a_command_with_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("espalier_cli.embed.open_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["embed", "--model", "any", "--items", "rows.parquet"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


ONE_BY_ONE = """
import sys
from espalier_cli import predict
from espalier_cli.__main__ import main
predict.BLOCK, predict.REPORT_S = 1, 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_that_answer_without_a_word_of_theirs(tmp_path: Path) -> None:
    pq.write_table(pa.table({"history": [["perl"]] * 100_000}), tmp_path / "users.parquet")
    asked = ["predict", "--model", SAMPLE, "--queries", tmp_path / "users.parquet", "--out", tmp_path / "top.parquet", "--workers", "2"]
    script = [sys.executable, "-c", ONE_BY_ONE, *map(str, asked)]
    with subprocess.Popen(script, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as running:
        assert running.stderr is not None
        assert " of 100,000 queries" in running.stderr.readline()
        os.killpg(running.pid, signal.SIGINT)
        last_lines = [line for line in running.stderr if " of 100,000 queries" not in line]
    assert (running.returncode, last_lines) == (130, ["Interrupted.\n"])


def test_the_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 + len(COMMANDS) <= 30
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"espalier {espalier.__version__}"


def test_an_unknown_command_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert capsys.readouterr().err == f"error: command: got 'serv', expected one of {', '.join(COMMANDS)}\n"


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(COMMANDS, "serve", COMMANDS["serve"]._replace(module="no_such_package"))
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "error: espalier serve needs no_such_package: pip install 'espalier[serve]'\n"


def test_what_a_module_misses_is_named_by_the_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "espalier.engines.runtime", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(COMMANDS, "serve", COMMANDS["serve"]._replace(module="espalier.engines.runtime"))
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "error: a model needs onnxruntime: pip install 'espalier[cpu]', or 'espalier[gpu]'\n"


OF_EXTRAS = [
    *("fastapi", "httpx", "matplotlib", "obstore", "onnxruntime", "onnxscript", "polars", "prometheus_client", "pydantic_settings"),
    *("scipy", "sklearn", "torch", "tqdm", "uvicorn"),
]
WITHOUT = """
import contextlib, io, json, sys
from espalier_cli.__main__ import main
missing, asked = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
said = {}
for name, arguments in asked.items():
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main([name, *map(str, arguments)])
        except SystemExit as ended:  # whose words Python prints
            code, _ = 1, err.write(f"{ended.code}\\n")
    said[name] = [code, err.getvalue()]
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_typer", [False, True])  # which other packages bring too
def test_without_extras_every_command_says_on_one_line_what_to_install(queries: Path, has_typer: bool) -> None:
    folder = queries.parent
    (folder / "log.toml").write_text(f'kind = "tdm"\nname = "x"\n[data]\nlog = "{queries}"\n')
    model, out = ["--model", SAMPLE], ["--out", folder / "x" / "1"]
    asked: dict[str, list[object]] = {name: [] for name in COMMANDS if name not in ("compile", "completion")} | {
        "predict": [*model, "--queries", queries, "--out", folder / "top.parquet", "--workers", 1],
        "embed": [*model, "--queries", queries, "--states", folder / "states.parquet"],
        "fit": ["--config", folder / "log.toml", *out],
        "evaluate": model,
        "compare": [queries, "--user", "user", "--item", "history", "--time", "none"],
        "fit-ranker": [*model, *out],
        "assign": [*model, "--data", "x.npz", "--out", folder / "x.parquet", "--per-item", 3],
        "import-pecos": [folder, *out],
        "publish": [*model, "--store", "file:///nowhere"],
        "versions": ["--store", "file:///nowhere"],
        "set-default": ["--store", "file:///nowhere"],
        "trial": [queries, "--user", "user", "--version", "version", "--value", "value"],
        "fold": [*model, *out],
        "shard": [*model, "--shards", 2, "--out", folder / "shards"],
    }
    if has_typer:
        asked = {name: arguments for name, arguments in asked.items() if name not in ("new", "inspect", "options")}
    given = json.dumps([OF_EXTRAS + ["typer"] * (not has_typer), asked], default=str)
    done = subprocess.run([sys.executable, "-c", WITHOUT, given], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for name, (code, said) in json.loads(done.stdout).items():
        assert code == 1, name
        assert re.fullmatch(r"error: .*pip install 'espalier\[\w+\]'.*\n", said), (name, said)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_names_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete([shell], "espalier completion") == 0
    script = capsys.readouterr().out
    assert "predict" in script
    assert "exclude-seen" in script
    if shell == "fish":
        assert not [line for line in script.splitlines() if line.replace("\\'", "").count("'") % 2], "a quote that does not end"
    if shell == "bash":
        asked = "COMP_WORDS=(espalier predict --fil); COMP_CWORD=2; _espalier; echo ${COMPREPLY[*]}"
        done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["--filter", "--filter-column"]


def test_a_file_is_answered_as_a_model_answers(queries: Path, tmp_path: Path) -> None:
    out = tmp_path / "top.parquet"
    assert run("--model", SAMPLE, "--queries", queries, "--out", out, "--m", 4, "--exclude-seen", "--fields", "title") == 0
    found = pq.read_table(out)
    assert found.column_names == ["user", "most", "only", "items", "scores", "title"]
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    asked = model.search(HISTORIES, m=4, exclude_seen=True, fields=["title"]).to_pylist()
    for b, row in enumerate(found.to_pylist()):
        own = [one for one in asked if one["query"] == b]
        assert row["items"] == [one["item"] for one in own]
        assert row["scores"] == [one["score"] for one in own]
        assert row["title"] == [one["title"] for one in own]
    assert {file.name for file in tmp_path.iterdir()} == {"users.parquet", "top.parquet"}


def test_a_log_is_answered_for_each_of_its_users(tmp_path: Path) -> None:
    log = "who,what,when\nu,nginx,2\nv,perl,1\nu,postgresql,1\n"
    (tmp_path / "log.csv").write_text(log)
    out = tmp_path / "top.parquet"
    more = ["--user", "who", "--item", "what", "--time", "when", "--m", 3]
    assert run("--model", SAMPLE, "--queries", tmp_path / "log.csv", "--out", out, "--workers", 1, *more) == 0
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    asked = {"u": ["postgresql", "nginx"], "v": ["perl"]}
    for row in pq.read_table(out).to_pylist():
        assert row["items"] == model.search([asked[row["who"]]], m=3).column("item").to_pylist()


@pytest.mark.parametrize("name", ["log.csv", "log.tsv"])
def test_a_line_of_names_is_no_event_where_columns_are_positions(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = 'User_ID,"item",price\nu,nginx,2\n'
    (tmp_path / name).write_text(log if name == "log.csv" else log.replace(",", "\t"))
    asked = ["--model", SAMPLE, "--queries", tmp_path / name, "--out", tmp_path / "top.parquet", "--workers", 1]
    assert run(*asked, "--user", 0, "--item", 1) == 1
    assert (
        "error: --user: got '0', expected one of the columns User_ID, item, price; positions are for text without"
        in capsys.readouterr().err
    )
    assert run(*asked, "--user", "User_ID", "--item", "item") == 0


def test_times_in_several_units_are_refused_unless_the_file_is_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("user,item,at\nu,nginx,1700000000000\nu,perl,1700000001\nv,libc6,1700000002\n")
    asked = ["--model", SAMPLE, "--queries", tmp_path / "log.csv", "--out", tmp_path / "top.parquet", "--workers", 1, "--user", "user"]
    assert run(*asked, "--time", "at") == 1
    examples = "'1700000001 (seconds), 1700000000000 (milliseconds)'"
    expected = f"column 'at': got {examples}, expected times in one unit: convert the others, or say --time file if the rows are in order"
    assert f"error: {expected}\n" in capsys.readouterr().err
    assert run(*asked, "--time", "file") == 0


def test_every_block_gets_its_own_numbers_and_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the file and of the engine begin at other rows."""
    monkeypatch.setattr(module, "BLOCK", 300)
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    ids = model.bundle.items.ids_of(np.arange(700))
    sections = [("libs", "perl", "python")[i % 3] for i in range(700)]
    only = [json.dumps({"section": [section]}) for section in sections]
    queries = pa.table({"history": [[one] for one in ids], "most": [1 + i % 7 for i in range(700)], "only": only})
    pq.write_table(queries, tmp_path / "many.parquet")
    asked = ["--queries", tmp_path / "many.parquet", "--out", tmp_path / "top.parquet", "--m-column", "most", "--filter-column", "only"]
    assert run("--model", SAMPLE, "--workers", 1, "--fields", "section", "--exclude-filter", '{"section": ["perl"]}', *asked) == 0
    found = pq.read_table(tmp_path / "top.parquet")
    assert found.column_names == ["items", "scores", "section"]
    for i, row in enumerate(found.to_pylist()):
        assert row["section"] == ([] if sections[i] == "perl" else [sections[i]] * (1 + i % 7)), i


def test_a_filter_of_all_queries_and_one_of_its_own_both_count(tmp_path: Path) -> None:
    only = [json.dumps({"debtags": ["role::program"]}), None]
    pq.write_table(pa.table({"history": [["perl"], ["perl"]], "only": only}), tmp_path / "two.parquet")
    asked = ["--queries", tmp_path / "two.parquet", "--out", tmp_path / "top.parquet", "--m", 10, "--filter-column", "only", "--workers", 1]
    assert run("--model", SAMPLE, *asked, "--filter", '{"section": ["perl", "utils"]}', "--fields", "section", "debtags") == 0
    own, other = pq.read_table(tmp_path / "top.parquet").to_pylist()
    assert {*own["section"], *other["section"]} <= {"perl", "utils"}
    assert own["items"]
    assert all("role::program" in tags for tags in own["debtags"])
    assert not all("role::program" in tags for tags in other["debtags"])


def test_ids_of_a_text_file_are_those_that_stand_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    (tmp_path / "log.csv").write_text("who,what\n007,perl\n7,nginx\n007,libc6\nNA,perl\n")
    asked = ["--model", SAMPLE, "--out", tmp_path / "top.parquet", "--user", "who", "--item", "what", "--m", 3, "--workers", 1]
    assert run(*asked, "--queries", tmp_path / "log.csv") == 0
    rows = pq.read_table(tmp_path / "top.parquet").to_pylist()
    assert [row["who"] for row in rows] == ["007", "7", "NA"]
    assert rows[0]["items"] == model.search([["perl", "libc6"]], m=3).column("item").to_pylist()
    (tmp_path / "log.tsv").write_text("007\tperl\t20\n7\tnginx\t1\n007\tlibc6\t10\nNA\tperl\t5\n")
    positions = ["--user", 0, "--item", 1, "--time", 2]
    assert run(*asked, "--queries", tmp_path / "log.tsv", *positions) == 0
    by_user = {row["0"]: row["items"] for row in pq.read_table(tmp_path / "top.parquet").to_pylist()}
    assert by_user["007"] == model.search([["libc6", "perl"]], m=3).column("item").to_pylist()
    assert by_user.keys() == {"007", "7", "NA"}
    (tmp_path / "unknown.csv").write_text("who,what\na,1\nb,2\n")
    assert run(*asked, "--queries", tmp_path / "unknown.csv") == 1
    assert "--item: got 'what', expected ids that the model knows" in capsys.readouterr().err


def test_a_history_that_is_longer_than_the_model_reads_is_left_out_as_a_whole(tmp_path: Path) -> None:
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    kind = model.bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    found = model.search([["perl"]], m=20).column("item").to_pylist()
    long = [*found, *(["perl"] * (kind.length + 3))]
    answer = model.search([long], m=20, exclude_seen=True).column("item").to_pylist()
    assert len(answer) == 20
    assert not {*found, "perl"} & {*answer}
    pq.write_table(pa.table({"history": [long]}), tmp_path / "one.parquet")
    asked = ["--queries", tmp_path / "one.parquet", "--out", tmp_path / "top.parquet", "--exclude-seen", "--m", 20, "--workers", 1]
    assert run("--model", SAMPLE, *asked) == 0
    assert pq.read_table(tmp_path / "top.parquet").to_pylist()[0]["items"] == answer


def test_no_query_gives_a_file_with_the_same_columns(queries: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "top.parquet", tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(queries).slice(0, 0), empty)
    for file in (queries, empty):
        assert run("--model", SAMPLE, "--queries", file, "--out", out, "--fields", "title", "--workers", 1) == 0
        table = pq.read_table(out)
        assert table.column_names == ["user", "most", "only", "items", "scores", "title"]
    assert len(table) == 0


def test_parts_of_another_input_or_of_other_options_are_not_taken(queries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--model", SAMPLE, "--queries", queries, "--out", tmp_path / "top.parquet", "--workers", 1]

    def interrupted(*arguments: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_join_blocks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run(*arguments)

    interrupted(*asked, "--m", 2)
    assert run(*asked, "--m", 3) == 0
    assert [len(row["items"]) for row in pq.read_table(tmp_path / "top.parquet").to_pylist()] == [3] * 5
    interrupted(*asked, "--m", 2)
    pq.write_table(pq.read_table(queries).slice(1), queries)
    assert run(*asked, "--m", 2) == 0
    assert pq.read_table(tmp_path / "top.parquet").column("user").to_pylist() == list("bcde")


def test_a_killed_run_goes_on_with_its_parts(queries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2)
    arguments = ["--model", SAMPLE, "--queries", queries, "--out", tmp_path / "top.parquet", "--m", 3, "--workers", 1]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_join_blocks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(*arguments)
    parts = tmp_path / ".top.parquet.parts"
    assert len([*parts.glob("*.parquet")]) == 3
    answers = {"items": [["a"], ["b"]], "scores": pa.array([[1.0], [1.0]], pa.list_(pa.float32()))}
    marked = pa.table({"user": ["kept", "kept"], "most": [1, 2], "only": [None, "x"]} | answers)
    pq.write_table(marked, parts / "00000000.parquet")
    (parts / "00000001.parquet").unlink()
    assert run(*arguments) == 0
    found = pq.read_table(tmp_path / "top.parquet")
    assert found.column("user").to_pylist() == ["kept", "kept", "c", "d", "e"]  # the first part was not asked again, the second was
    assert not parts.exists()


def test_two_runs_do_not_write_one_file(queries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", SAMPLE, "--queries", queries, "--out", tmp_path / "top.parquet", "--workers", 1]
    (tmp_path / ".top.parquet.parts").mkdir()
    with file_lock(tmp_path / ".top.parquet.parts"):
        assert run(*asked) == 1
    assert "expected a file that no other run is writing now" in capsys.readouterr().err
    assert not (tmp_path / "top.parquet").exists()
    assert run(*asked) == 0


def test_few_blocks_wait_at_a_time(queries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, most = 0, 0

    class Pool(module._ThisProcess):
        """Answers when it is asked for the result."""

        def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Any:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)

            class Later:
                def result(self) -> Any:
                    nonlocal waiting
                    waiting -= 1
                    return function(*arguments)

            return Later()

    def executor(workers: int, job: module.Job, model: Any) -> Any:
        monkeypatch.setattr(module, "_model", model)
        return nullcontext(Pool())

    monkeypatch.setattr(module, "_executor", executor)
    monkeypatch.setattr(module, "BLOCK", 1)
    for workers, waiting_at_most in ((1, 1), (2, 2 * module.AHEAD + 1)):
        most = 0
        assert run("--model", SAMPLE, "--queries", queries, "--out", tmp_path / "top.parquet", "--workers", workers) == 0
        assert most == waiting_at_most


def test_several_processes_answer_as_one_does(queries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And they say what is wrong with a query."""
    assert len(HISTORIES) * 1000 > module.BLOCK
    pq.write_table(pa.table({"history": HISTORIES * 1000, "most": [1, 2, 3, 4, 5] * 1000}), queries)
    asked = ["--model", SAMPLE, "--queries", queries, "--fields", "title", "--out"]
    for workers in (1, 2):
        assert run(*asked, tmp_path / f"by-{workers}.parquet", "--workers", workers) == 0
    assert pq.read_table(tmp_path / "by-1.parquet") == pq.read_table(tmp_path / "by-2.parquet")
    pq.write_table(pa.table({"history": [*HISTORIES * 1000, None]}), queries)
    assert run(*asked, tmp_path / "none.parquet", "--workers", 2) == 1
    assert "error: history[5000]: got null, expected a history" in capsys.readouterr().err
    assert not (tmp_path / "none.parquet").exists()


def test_what_is_wrong_is_said_with_its_row_in_the_file(
    queries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a column of categories Arrow reads smaller blocks at the end of a row group."""
    monkeypatch.setattr(module, "BLOCK", 4)
    kinds = pa.array(["a", "b"] * 5).dictionary_encode()
    asked = ["--model", SAMPLE, "--queries", queries, "--out", tmp_path / "top.parquet", "--workers", 1, "--filter-column", "only"]
    table = pa.table({"kind": kinds, "history": [["perl"]] * 10, "only": pa.array([None] * 10, pa.string())})
    for column, value, said in (
        ("history", None, "error: history[7]: got null, expected a history"),
        ("only", '{"nope": ["x"]}', "error: only[7]: filter.nope: got 'nope', expected"),
    ):
        wrong = pa.array([*table[column].to_pylist()[:7], value, *table[column].to_pylist()[8:]], table[column].type)
        pq.write_table(table.set_column(table.schema.get_field_index(column), column, wrong), queries, row_group_size=3)
        assert run(*asked) == 1
        assert said in capsys.readouterr().err
    rng = np.random.default_rng(0)
    espalier.XRLinear().fit(rng.random((40, 5)), rng.random((40, 3)) < 0.5).save(tmp_path / "labels/1")
    features = [{"indices": [0], "values": [1.0]}] * 9 + [{"indices": [99], "values": [1.0]}]
    pq.write_table(pa.table({"features": features}), queries)
    assert run("--model", tmp_path / "labels", *asked[2:-2]) == 1
    assert "error: features[9].indices: got 99" in capsys.readouterr().err


CHANGED_INTERRUPT = """
import sys
from espalier_cli import predict
from espalier_cli.__main__ import main

def interrupted(*_):
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise SystemError("returned a result with an exception set") from error
    except SystemError as error:
        raise SystemError("returned a result with an exception set") from error

predict._with_items = interrupted
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_that_a_library_changes_ends_a_command_with_a_line(queries: Path, tmp_path: Path) -> None:
    """As numba does while it loads compiled code."""
    asked = ["predict", "--model", SAMPLE, "--queries", queries, "--out", tmp_path / "top.parquet", "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", CHANGED_INTERRUPT, *map(str, asked)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--column", "nothing"], "error: --column: got 'nothing', expected one of the columns user, history, most, only"),
        (["--filter", "{"], "error: --filter: got '{', expected JSON"),
        (["--filter", '{"colour": ["red"]}'], "error: filter.colour: got"),
        (["--m", "1000000"], "error: m: got 1000000, expected 1 to 1000"),
        (["--beam", "0"], "error: beam_size: got 0, expected 1 to"),
        (["--m-column", "user"], "error: --m-column: got 'string', expected a column of whole numbers"),
        (["--filter-column", "history"], "error: --filter-column: got 'list<element: string>'"),
        (
            ["--filter-column", "only", "--filter", '{"section": ["games"]}'],
            "error: only[1]: got 'section', expected columns that --filter",
        ),
        (["--user", "user", "--column", "user"], "error: --column: got 'user', expected another name"),
        (["--user", "user", "--m-column", "most"], "error: --m-column: got 'most', expected no such option with --user"),
        (["--time", "at"], "error: --time: got 'at', expected no such option without --user"),
        (["--column", "most"], "error: --column: got 'most: int64', expected a column of lists of ids"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    queries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    out = tmp_path / "top.parquet"
    assert run("--model", SAMPLE, "--queries", queries, "--out", out, "--workers", 1, *arguments) == 1
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_what_is_wrong_with_a_query_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"history": [["nginx"], None], "most": [1, 0], "only": [None, "{"]})
    pq.write_table(table, tmp_path / "users.parquet")
    asked = ["--model", SAMPLE, "--queries", tmp_path / "users.parquet", "--out", tmp_path / "top.parquet", "--workers", 1]
    assert run(*asked) == 1
    pq.write_table(table.set_column(0, "history", pa.array([["nginx"], ["perl"]])), tmp_path / "users.parquet")
    assert run(*asked, "--m-column", "most") == 1
    assert run(*asked, "--filter-column", "only") == 1
    said = capsys.readouterr().err
    for wrong in ("history[1]: got null, expected a history", "most[1]: got 0, expected 1 to 1000", "only[1]: got '{', expected JSON"):
        assert f"error: {wrong}" in said
    large = pa.table({"history": [["nginx"], ["perl"]], "most": pa.array([1, 2**64 - 1], pa.uint64())})
    pq.write_table(large, tmp_path / "users.parquet")
    assert run(*asked, "--m-column", "most") == 1
    assert "error: most[1]: got 18446744073709551615, expected 1 to 1000" in capsys.readouterr().err
    repeated = pa.Table.from_arrays([large["history"], large["most"], large["most"]], ["history", "user", "user"])
    pq.write_table(repeated, tmp_path / "users.parquet")
    assert run(*asked) == 1
    assert "error: --queries: got 'user', expected each column once" in capsys.readouterr().err


def test_a_filter_may_be_any_kind_of_text(tmp_path: Path) -> None:
    only = pa.array(['{"section": ["perl"]}'], pa.string_view())
    pq.write_table(pa.table({"history": [["perl"]], "only": only}), tmp_path / "one.parquet")
    asked = ["--queries", tmp_path / "one.parquet", "--out", tmp_path / "top.parquet", "--workers", 1, "--fields", "section"]
    assert run("--model", SAMPLE, *asked, "--filter-column", "only") == 0
    assert {*pq.read_table(tmp_path / "top.parquet")["section"][0].as_py()} == {"perl"}


def test_a_null_among_the_items_of_a_history_is_no_item() -> None:
    log = pa.table({"user": [f"u{k % 20}" for k in range(60)], "item": [("None", "a", "b")[k % 3] for k in range(60)]})
    model = espalier.fit(log, user="user", item="item", kind="neighbours")
    assert set(model.search([[None]], m=3, exclude_seen=True)["item"].to_pylist()) == {"None", "a", "b"}


@pytest.mark.parametrize(
    ("queries", "said"),
    [
        (["a", "b"], "--column: got 'features: string', expected a column of structs of indices"),
        ([{"indices": [0.5], "values": [1.0]}], "--column: got 'features: struct<indices: list<element: double>"),
        (
            [{"indices": [0], "values": [1.0]}, {"indices": None, "values": None}],
            "features[1]: got (None, None), expected a features query",
        ),
        ([{"indices": [0, None], "values": [1.0, 2.0]}], "features[0]: got ([0, None], [1.0, 2.0]), expected a features query"),
    ],
)
def test_queries_of_features_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], queries: list[Any], said: str) -> None:
    rng = np.random.default_rng(0)
    espalier.XRLinear().fit(rng.random((40, 5)), rng.random((40, 3)) < 0.5).save(tmp_path / "labels/1")
    pq.write_table(pa.table({"features": queries}), tmp_path / "queries.parquet")
    asked = ["--model", tmp_path / "labels", "--queries", tmp_path / "queries.parquet", "--out", tmp_path / "top.parquet"]
    assert run(*asked, "--workers", 1) == 1
    assert f"error: {said}" in capsys.readouterr().err


def test_fields_called_as_the_answers_are_refused(tmp_path: Path, queries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = pa.table({"user": [f"u{k % 20}" for k in range(80)], "item": [f"i{k // 10}" for k in range(80)]})
    items = pa.table({"id": [f"i{k}" for k in range(8)], "score": range(8), "items": range(8)})
    model = espalier.fit(log, user="user", item="item", items=items, kind="neighbours")
    with pytest.raises(InvalidQuery, match=r"fields: got 'score', expected no columns query, rank, item, score"):
        model.search([["i1"]], fields=["items", "score"])
    model.save(tmp_path / "shop/1")
    asked = ["--model", tmp_path / "shop", "--queries", queries, "--out", tmp_path / "top.parquet", "--workers", 1, "--fields"]
    assert run(*asked, "items") == 1
    assert "error: --fields: got 'items', expected no columns items, scores" in capsys.readouterr().err
    assert run(*asked, "score") == 0
    assert pq.read_table(tmp_path / "top.parquet").column_names[-3:] == ["items", "scores", "score"]


def test_rows_and_states_are_written(queries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(*arguments: Any) -> int:
        return embed(["--model", str(SAMPLE), *map(str, arguments)], "espalier embed")

    assert write("--items", tmp_path / "rows.parquet", "--queries", queries, "--states", tmp_path / "states.parquet") == 0
    model = espalier.open(SAMPLE, "cpu")
    rows, states = pq.read_table(tmp_path / "rows.parquet"), pq.read_table(tmp_path / "states.parquet")
    assert rows.column("id").to_pylist()[:2] == model.bundle.items.ids_of(model.bundle.items.rows_of(rows.column("id").to_pylist()[:2]))
    assert rows.column("row").to_pylist() == model.item_rows().tolist()
    assert states.column_names == ["user", "most", "only", "state"]
    assert states.column("state").to_pylist() == model.states(HISTORIES).tolist()
    assert write() == 1
    assert write("--states", tmp_path / "more.parquet") == 1
    assert "--queries is missing; expected both files, --queries and --states" in capsys.readouterr().err
    assert write("--queries", queries) == 1
    assert "--items, --states is missing" in capsys.readouterr().err
    assert write("--queries", queries, "--items", tmp_path / "rows.parquet") == 1
    assert "--states is missing; expected both files, --queries and --states" in capsys.readouterr().err
    pq.write_table(pa.table({"history": [["perl"], None]}), tmp_path / "null.parquet")
    assert write("--queries", tmp_path / "null.parquet", "--states", tmp_path / "more.parquet") == 1
    assert "history[1]: got null, expected a history query in every row" in capsys.readouterr().err
    assert write("--queries", tmp_path / "states.parquet", "--column", "user", "--states", tmp_path / "more.parquet") == 1
    assert "--queries: got 'state', expected no column of this name" in capsys.readouterr().err
    assert write("--items", tmp_path / "rows.parquet", "--column", "history") == 1
    assert write("--queries", queries, "--column", "most", "--states", tmp_path / "more.parquet") == 1
    assert "--column: got 'most: int64', expected a column of lists of ids" in capsys.readouterr().err
