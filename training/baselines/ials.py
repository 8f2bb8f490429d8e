"""iALS: matrix factorisation of implicit feedback by alternating least squares (Hu, Koren and Volinsky 2008), by the `implicit` package.

    Σ_{u, i} c_ui (x_ui − ⟨w_u, h_i⟩)² + λ (‖W‖² + ‖H‖²),   c_ui = 1 + alpha · x_ui,   λ = l2 · √(U · I)

x_ui is 1 if user u has item i. A history's user vector comes from the same least squares with fixed item vectors, and alpha · recency^d in
place of alpha for the item d before the last. So the user need not have been in training. Items without a learned vector do not count.

λ follows Rendle et al. 2022 ("Revisiting the performance of iALS on item recommendation benchmarks"). They scale it by the numbers of users
and items, and find the same l2 good on several logs. `implicit` has one λ; only the product of both scales counts, since W · c and H / c
are the same model. `implicit` does not scale λ by the events of each row, as they do.

Legend: U users, I items, F factors, B queries, M results, L items of a history that count.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from espalier.arrays import Bool, Float32, Float64, Int64
from espalier.errors import DeviceUnavailable, InvalidData
from espalier.hardware import cores

from ..baselines.tuned_method import bytes_of, tune
from ..data.user_item_matrix import latest_items, user_item_matrix
from ..neighbours.fit import fading
from ..retrieval.needs import available_bytes
from ..retrieval.scores import best_then_popular, by_popularity
from ..retrieval.task import NO_DEADLINE, Deadline, Fitted, Task
from ..retrieval.tuning import Option, Options, Remembered

if TYPE_CHECKING:
    from implicit.cpu.als import AlternatingLeastSquares
    from threadpoolctl import ThreadpoolController


GRID = (
    Option("recency", (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99, 1.0)),
    Option("l2", (0.0003, 0.001, 0.003, 0.01), times=3, least=1e-7, most=1.0),
    Option("alpha", (1.0, 3.0, 10.0, 30.0), times=3, least=0.01, most=1000.0),
    Option("factors", (64, 128, 256), times=2, least=8, most=512),
    Option("iterations", (8, 16), times=2, least=2, most=64),
)
TRAINED = ("l2", "alpha", "factors", "iterations")
"""Options that the factors depend on."""
START: Options = {"recency": 1.0, "l2": 0.003, "alpha": 10.0, "factors": 64, "iterations": 8}
LONGEST = 1000
VALIDATION_QUERIES = 5000
FEW_QUERIES = 16
"""At most so many queries are answered by one thread: starting others would take longer."""
MOST_TRIALS = 60
EVENTS_PER_THREAD = 50_000
"""Least events for each thread: with fewer it waits longer for the others than it works."""


def answering(model: AlternatingLeastSquares, users_I: Int64, options: Options) -> Fitted:
    """The model with the options of answers. users_I: how many training users an item has.

    Items without training users have no score. If no item of the history has training users, no item has a score.
    """
    trained_I, popular_I = users_I > 0, by_popularity(users_I)
    scores = partial(scores_of, model, trained_I, fading(options["recency"], LONGEST))
    return Fitted(partial(best_then_popular, scores, popular_I), options, bytes_of(model.item_factors, trained_I, popular_I), 0.0)


def scores_of(model: AlternatingLeastSquares, trained_I: Bool, weight_L: Float64, histories: Sequence[Int64]) -> Float32:
    """float32[B, I]. trained_I: whether an item has training users; weight_L: weights of a history's last item, the one before it, …."""
    latest = [_latest(history[trained_I[history]], len(weight_L)) for history in histories]
    history_BI = sparse.csr_matrix(latest_items([items[::-1] for items in latest], weight_L, len(trained_I)))
    model.num_threads = cores() if len(latest) > FEW_QUERIES else 1
    with _blas().limit(limits=1, user_api="blas"):
        user_BF = model.recalculate_user(np.arange(len(latest)), history_BI)
        score_BI: Float32 = user_BF @ model.item_factors.T
    score_BI[:, ~trained_I] = np.nan
    score_BI[[len(items) == 0 for items in latest]] = np.nan
    return score_BI


@cache
def _blas() -> ThreadpoolController:
    """The loaded BLAS libraries. Finding them takes milliseconds, longer than a query."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _latest(history: Int64, most: int) -> Int64:
    """The last `most` distinct items of a history, the last first."""
    items, first_position = np.unique(history[::-1], return_index=True)
    return items[np.argsort(first_position)][:most]


class _TimeIsOver(Exception):
    """Leaves `implicit`'s loop over iterations."""


def factors_of(
    matrix: sparse.csr_array[np.float64], options: Options, seed: int, deadline: Deadline = NO_DEADLINE
) -> AlternatingLeastSquares:
    """The model, trained on a binary matrix of users and items with at most the process's cores. It does not depend on their number.

    After the deadline no iteration begins, except for the first. `iterations` of the model is then the number of iterations made.
    """
    from implicit.cpu.als import AlternatingLeastSquares

    with _blas().limit(limits=1, user_api="blas"):  # threads of BLAS beside those of `implicit` make it ten times slower
        model = AlternatingLeastSquares(
            factors=options["factors"],
            regularization=options["l2"] * float(np.sqrt(np.prod(np.array(matrix.shape, np.float64)))),
            alpha=options["alpha"],
            iterations=options["iterations"],
            num_threads=max(1, min(cores(), matrix.nnz // EVENTS_PER_THREAD)),
            random_state=seed,
        )

        def iterated(iteration: int, seconds: float, loss: float | None) -> None:
            if deadline.is_over() and iteration + 1 < options["iterations"]:
                model.iterations = iteration + 1
                raise _TimeIsOver

        with contextlib.suppress(_TimeIsOver):
            model.fit(sparse.csr_matrix(matrix.astype(np.float32)), show_progress=False, callback=iterated)
    model.user_factors, model.num_threads = None, 1  # queries are answered on one thread
    return model


def ials(task: Task) -> Fitted:
    """Choose the options on at most VALIDATION_QUERIES validation queries in at most MOST_TRIALS trials, and fit on all training users.

    Raises DeviceUnavailable if `implicit` is not installed, InvalidData if the smallest vectors would take more than a
    quarter of the available memory.
    """
    begin, deadline = time.perf_counter(), task.deadline()
    if not implicit_is_installed():
        raise DeviceUnavailable("implicit is not installed: pip install implicit, or the extra `baselines`")
    matrix = user_item_matrix(task.split.lists, task.split.train)
    rows, least = sum(matrix.shape), 8
    most_bytes = available_bytes() // 4
    most_factors = most_bytes // (4 * rows)
    if most_factors < least:
        expected = f"at most {most_bytes // (4 * least)}: iALS's vectors of {least} numbers would take {4 * least * rows / 2**30:.1f} GiB"
        raise InvalidData("log", f"{rows} users and items", f"{expected} and may take {most_bytes / 2**30:.1f} GiB")
    grid = [_limited(option, most_factors) if option.name == "factors" else option for option in GRID]
    grid = grid if task.split.lists.order != "none" else grid[1:]
    users_I = np.bincount(matrix.indices, minlength=matrix.shape[1])
    seconds: list[float] = []
    shares: list[float] = []

    def trained(options: Options) -> AlternatingLeastSquares:
        started = time.perf_counter()
        model = factors_of(matrix, options, task.seed, deadline)
        seconds.append((time.perf_counter() - started) / _work(options))
        shares.append(model.iterations / options["iterations"])
        return model

    models = Remembered(trained, TRAINED)

    def fitted(options: Options) -> Fitted:
        return answering(models.of(options), users_I, options)

    def cost_s(options: Options) -> float:
        return 0.0 if models.has(options) else seconds[-1] * _work(options)

    start = {**START, "factors": min(START["factors"], most_factors)}
    best_fit = tune(
        task,
        begin,
        deadline,
        fitted,
        start,
        grid,
        VALIDATION_QUERIES,
        models,
        cost_s=cost_s,
        most_trials=MOST_TRIALS,
    )
    iterations = round(shares[0] * start["iterations"])
    return best_fit if shares[0] == 1 else replace(best_fit, ended=f"{iterations} of {start['iterations']} iterations", share=shares[0])


def _work(options: Options) -> float:
    """Training time grows at most like this."""
    return float(options["iterations"] * options["factors"] ** 2)


def _limited(option: Option, most: int) -> Option:
    values = tuple(value for value in option.values if value <= most) or (most,)
    return Option(option.name, values, times=option.times, least=option.least, most=min(option.most, most))


def implicit_is_installed() -> bool:
    return importlib.util.find_spec("implicit") is not None
