"""What commands print of themselves."""

from __future__ import annotations

import io
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from functools import cache

import pytest


@cache
def help_of(module: str, subcommand: str | None = None) -> str:
    """What `python -m module [subcommand] --help` prints. It is run in this process: another one would import torch for seconds."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules.*", RuntimeWarning, "runpy")  # it was imported by another test
        patch.setattr(sys, "argv", [module, *([subcommand] if subcommand else []), "--help"])
        patch.setenv("COLUMNS", "200")
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code, printed.getvalue()
    return printed.getvalue()
