"""The command `espalier`: its help, what it says of wrong words, Ctrl-C, and `embed`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import espalier
from espalier_cli.__main__ import COMMANDS, main
from espalier_cli.completion import main as complete
from espalier_cli.embed import main as embed
from tests import ROOT
from tests.cli.conftest import HISTORIES, SAMPLE


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
    (tmp_path / "texts.csv").write_text("name;history\nfirst, second;perl\n")  # the column says what stands between
    assert write("--queries", tmp_path / "texts.csv", "--states", tmp_path / "more.parquet") == 1
    assert "--column: got 'history: string', expected a column of lists of ids" in capsys.readouterr().err
    assert write("--queries", tmp_path / "states.parquet", "--column", "user", "--states", tmp_path / "more.parquet") == 1
    assert "--queries: got 'state', expected no column of this name" in capsys.readouterr().err
    assert write("--items", tmp_path / "rows.parquet", "--column", "history") == 1
    assert write("--queries", queries, "--column", "most", "--states", tmp_path / "more.parquet") == 1
    assert "--column: got 'most: int64', expected a column of lists of ids" in capsys.readouterr().err
