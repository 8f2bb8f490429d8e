"""The stages, their sizes and time limits, the most valuable first.

A stage without timings may run in parallel with its neighbours of the same group. For a new form (mixtures, forests, an overlay of new
items), add a scorer form or an engine to `correctness.py`, a model to `graph_models.py`, and a stage here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["full", "quick", "without-gpu"]
Arguments = Mapping[str, Any]
CARD = "card"
"""The first stage of every run. The other stages get the card that it finds."""


@dataclass(frozen=True)
class Stage:
    """function     `module:function`, which yields rows
    full, quick  its arguments, and its time limit in seconds; None: left out
    without_gpu  the same without a GPU; None: needs one
    group        stages of one group run side by side
    """

    name: str
    function: str
    full: tuple[Arguments, float] | None
    quick: tuple[Arguments, float] | None = None
    without_gpu: tuple[Arguments, float] | None = None
    group: str | None = None

    def of(self, mode: Mode) -> tuple[Arguments, float] | None:
        return {"full": self.full, "quick": self.quick, "without-gpu": self.without_gpu}[mode]


def _correctness(engine: str, function: str, arguments: Arguments, cases: int, interpreter_arguments: Arguments) -> Stage:
    return Stage(
        f"correctness-{engine}",
        f"benchmarks.gpu.correctness:{function}",
        ({**arguments, "cases": cases}, 120),
        ({**arguments, "cases": 6}, 60),
        ({**arguments, **interpreter_arguments, "cases": 3, "device": "cpu"}, 180),
        group="correctness",
    )


PRECISIONS = ("float32", "float16", "bfloat16")
NO_PROGRAMS = 1 << 30
TRIED: tuple[Arguments, ...] = (
    {"level_kernel_queries": NO_PROGRAMS}, {"level_kernel_queries": NO_PROGRAMS, "tile": 128, "warps": 4},
    {"tile": 64, "warps": 4, "registers": 128}, {"tile": 64, "warps": 4, "registers": 168}, {"tile": 128, "warps": 4},
    {"tile": 128, "warps": 8, "registers": 128}, {"tile": 64, "warps": 2}, {"tile": 32}, {"tile": 16}, {"busy_count_tile": 16},
    {"count_tile": 8}, {"chosen_candidates": 0}, {"counted_pairs": 0}, {"dependent_queries": 0},
)  # fmt: skip
"""The changed fields of `Tuning` in each trial."""
STAGES: tuple[Stage, ...] = (
    Stage(CARD, "benchmarks.gpu.timing:card", ({}, 45), ({}, 15), ({}, 45)),
    *(
        _correctness(
            f"triton-{precision}-{kind}",
            "triton",
            {"precision": precision, "kind": kind, "large": kind == "mlp"},
            42,
            {"large": kind == "mlp" and precision != "bfloat16"},
        )
        for precision in PRECISIONS
        for kind in ("mlp", "product")
    ),
    *(
        _correctness(f"sparse-cuda-{precision}", "sparse_cuda", {"precision": precision, "large": True}, 42, {"large": False})
        for precision in PRECISIONS
    ),
    _correctness("onnx-cuda", "onnx_cuda", {}, 42, {}),
    Stage("memory-accesses", "benchmarks.gpu.correctness:sanitized", ({"seconds": 110}, 120), group="correctness"),
    Stage(
        "search-2^20",
        "benchmarks.gpu.search_speed:search",
        ({"height": 20, "beams": [50, 200, 400, 800], "batches": [1, 512, 64]}, 80),
        ({"height": 20, "beams": [50, 200, 400], "batches": [1, 512], "masked": False}, 50),
    ),
    Stage(
        "search-2^20-product",
        "benchmarks.gpu.search_speed:search",
        ({"height": 20, "beams": [50, 200, 400, 800], "batches": [1, 512], "form": "product"}, 60),
    ),
    Stage(
        "sparse-2^20",
        "benchmarks.gpu.sparse_speed:search",
        ({"beams": [10, 50, 200], "batches": [1, 512], "precisions": ["float32", "float16"]}, 100),
        ({"beams": [10, 50, 200], "batches": [1, 512], "precisions": ["float32"], "levels": 3}, 30),
    ),
    Stage(
        "profile",
        "benchmarks.gpu.profiling:profile",
        ({"height": 20, "beams": [50, 400], "batches": [1, 512], "forms": ["mlp", "product"], "levels": 3, "branching": 32}, 50),
        ({"height": 20, "beams": [50, 400], "batches": [1, 512], "forms": ["mlp"], "levels": 2, "branching": 32}, 30),
    ),
    Stage(
        "service",
        "benchmarks.gpu.gpu_service:serve",
        ({"height": 20, "beam": 200, "seconds": 2, "concurrencies": [1, 16, 64, 256], "ready_s": 60}, 150),
        ({"height": 16, "beam": 200, "seconds": 1, "concurrencies": [1, 64], "ready_s": 45}, 60),
    ),
    Stage(
        "tune",
        "benchmarks.gpu.search_speed:tune",
        ({"height": 20, "beams": [50, 400], "batches": [1, 512], "tried": TRIED, "forms": ["mlp", "product"]}, 120),
    ),
    Stage(
        "training",
        "benchmarks.gpu.training_steps:training",
        ({"items": 1_000_000, "users": 50_000, "batches": [100, 256], "beam": 200, "rounds": 5, "queries": 2000, "depth": 200}, 60),
        ({"items": 100_000, "users": 5_000, "batches": [100], "beam": 200, "rounds": 2, "queries": 320, "depth": 200}, 30),
    ),
    Stage("fit", "benchmarks.gpu.training_steps:fit", ({}, 150)),
    Stage("search-2^16", "benchmarks.gpu.search_speed:search", ({"height": 16, "beams": [50, 400], "batches": [1, 512]}, 30)),
    Stage("search-2^22", "benchmarks.gpu.search_speed:search", ({"height": 22, "beams": [50, 400], "batches": [1, 512]}, 50)),
    Stage(
        "search-2^26",
        "benchmarks.gpu.search_speed:search",
        ({"height": 26, "beams": [200], "batches": [1, 512], "peers": ["inner-product"], "masked": False}, 90),
    ),
    Stage(
        "correctness-catalogue",
        "benchmarks.gpu.catalogue_checks:catalogues",
        ({"cases": 12}, 40),
        None,
        ({"cases": 3, "device": "cpu"}, 180),
        group="catalogue",
    ),
    *(
        Stage(
            f"search-2^20-{precision}",
            "benchmarks.gpu.search_speed:search",
            ({"height": 20, "beams": [50, 400], "batches": [1, 512], "precision": precision, "peers": [], "masked": False}, 25),
        )
        for precision in ("float32", "bfloat16")
    ),
)


def groups(stages: tuple[Stage, ...]) -> list[tuple[Stage, ...]]:
    """The stages in order; neighbours of one group together."""
    stage_groups: list[tuple[Stage, ...]] = []
    for stage in stages:
        if stage.group is not None and stage_groups and stage_groups[-1][0].group == stage.group:
            stage_groups[-1] = (*stage_groups[-1], stage)
        else:
            stage_groups.append((stage,))
    return stage_groups
