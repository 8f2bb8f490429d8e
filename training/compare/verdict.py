"""Two sentences: what a tree finds beside the best baseline, and whether it therefore pays.

Knows figures, costs and intervals. Does not know how they were measured.

The tree's serving beam and the best baseline are those with the best figure on validation queries, so that the interval, which is of test
queries, is right: nothing in it was chosen by what it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..compare.figures import Difference

MARGIN = 0.05
"""Of the baseline's figure: what is less than this does not pay for a model that has to be trained and served."""
MIN_QUERIES = 30
"""With fewer, intervals of means are wrong."""
STRONG = "neighbours"
"""The cheap baseline of histories that is often the best: where it was not run, no claim that a tree pays is without reserve."""
MUCH_FASTER = 0.5
"""Of a baseline's time for a query: a tree that finds as much in less than this pays by its speed."""


@dataclass(frozen=True)
class Contestant:
    """What is known of a method at the serving beam that validation chose.

    parts       of a fusion: the methods that it is made of
    figure      mean over test queries
    validation  mean over validation queries
    ended       why its choosing or training ended early, where it did
    """

    name: str
    figure: float
    validation: float
    seconds: float
    bytes: int
    ms: float
    ended: str | None = None
    parts: tuple[str, ...] = ()

    @property
    def cost(self) -> str:
        return f"{duration(self.seconds)} to train, {size(self.bytes)}, {self.ms:.2g} ms a query"


Paired = Callable[[str, str], Difference]
"""The names of two contestants → what the first finds more than the second on test queries."""


@dataclass(frozen=True)
class Field:
    """All contestants.

    not_judged  name → why
    strong      the cheap baseline without which no claim is without reserve
    minutes     those in which all could be judged, where time was too short
    """

    metric: str
    tree: Contestant | None
    others: Sequence[Contestant]
    not_judged: Mapping[str, str]
    paired: Paired
    strong: str = STRONG
    minutes: float | None = None

    @property
    def baselines(self) -> list[Contestant]:
        """All that is to be had without the tree, fusions of other methods included."""
        return [other for other in self.others if self.tree is None or self.tree.name not in other.parts]

    @property
    def fusions(self) -> list[Contestant]:
        return [other for other in self.others if self.tree is not None and self.tree.name in other.parts]


def verdict(field: Field) -> tuple[str, str]:
    """What the tree finds, and whether it pays: two sentences."""
    tree = field.tree
    if tree is None:
        why = next((f"judged: {reason}" for name, reason in field.not_judged.items() if name == "recipe"), "measured, since it was not run")
        return f"No tree was {why.rstrip('.')}.", f"Whether one pays here is open{_enough(field)}."
    if not field.baselines:
        return f"The tree has {field.metric} {tree.figure:.4f}; no baseline was judged.", f"Whether it pays is open{_enough(field)}."
    best = max(field.baselines, key=lambda baseline: baseline.validation)
    difference = field.paired(tree.name, best.name)
    pays = _pays(field, tree, best, difference)
    reserves = _reserves(field, tree, best, says_so=pays.startswith("The tree pays"))
    if tree.ended or best.ended:
        pays = f"So far, {pays[0].lower()}{pays[1:]}"
    return _found(field, tree, best, difference), pays + reserves


def _enough(field: Field) -> str:
    return "" if field.minutes is None else f" (--minutes {field.minutes:g} would do)"


def _found(field: Field, tree: Contestant, best: Contestant, difference: Difference) -> str:
    if difference.queries >= MIN_QUERIES and difference.low > 0:
        found = "The tree finds more than"
    elif difference.queries >= MIN_QUERIES and difference.high < 0:
        found = "The tree finds less than"
    elif _is_settled(difference, best):
        found = "The tree finds no more than"
    else:
        found = "The queries do not tell whether the tree finds more than"
    return (
        f"{found} {best.name}, the best baseline on validation queries: {field.metric} {tree.figure:.4f} against {best.figure:.4f}, "
        f"a difference of {_interval(difference)}."
    )


def _pays(field: Field, tree: Contestant, best: Contestant, difference: Difference) -> str:
    """The second sentence, without its full stop's reserves."""
    costs = f"{tree.name}: {tree.cost}; {best.name}: {best.cost}"
    if difference.queries < MIN_QUERIES:
        return f"Undecided: {difference.queries} queries are too few to tell ({costs})"
    fused = _fusion_that_pays(field, best)
    if difference.low > 0:
        if field.strong in field.not_judged:
            return f"Undecided: {field.strong}, often the best baseline, were not judged ({costs})"
        others = [other.name for other in field.baselines if field.paired(tree.name, other.name).low <= 0]
        if others:
            return f"Undecided: {_listed(others)}, which validation did not choose, may find as much as the tree ({costs})"
        if difference.high < MARGIN * best.figure:
            return f"Use {best.name} unless so little more is worth the cost ({costs}{_model_of(best)})"
        more = "" if fused is None or field.paired(fused.name, tree.name).low <= 0 else f", and {_fused(fused)} find more still"
        return f"The tree pays{more} ({costs})"
    if fused is not None:
        gain = _interval(field.paired(fused.name, best.name))
        return f"The tree pays only beside another method: {_fused(fused)} find {gain} more than {best.name} ({costs}; fused: {fused.cost})"
    if difference.high < 0 or _is_settled(difference, best):
        rivals = [other for other in field.baselines if field.paired(tree.name, other.name).low <= 0]
        if difference.high >= 0 and difference.low > -MARGIN * best.figure and all(tree.ms < MUCH_FASTER * rival.ms for rival in rivals):
            return f"The tree pays by its speed: it finds as much in less time ({costs})"
        return f"Use {best.name} ({costs}{_model_of(best)})"
    return f"Undecided with {difference.queries:,} queries: they leave room for either ({costs})"


def _model_of(best: Contestant) -> str:
    """How to serve what is to be used instead of a tree, where that is a kind of model, too."""
    return f"; `fit --kind {STRONG}` makes a model of them" if best.name == STRONG else ""


def _is_settled(difference: Difference, best: Contestant) -> bool:
    """Whether the tree cannot find so much more that it would pay."""
    return difference.high < MARGIN * best.figure and difference.queries >= MIN_QUERIES


def _fusion_that_pays(field: Field, best: Contestant) -> Contestant | None:
    """The fusion with the tree, the best of them on validation queries, where it finds so much more than the best baseline that it pays."""
    fused = max(field.fusions, key=lambda fusion: fusion.validation, default=None)
    if fused is None:
        return None
    gain = field.paired(fused.name, best.name)
    return fused if gain.low > 0 and gain.high >= MARGIN * best.figure else None


def _reserves(field: Field, tree: Contestant, best: Contestant, *, says_so: bool) -> str:
    """What makes the verdict less sure, and the full stop. says_so: whether the tree is said to pay, for which all others count."""
    short = [f"{one.name} ended early ({one.ended}), and more time may change this" for one in (tree, best) if one.ended]
    missing = [name for name in field.not_judged if name.split(":")[0] != "fusion"]
    unjudged = [f"{_listed(missing)} {'was' if len(missing) == 1 else 'were'} not judged{_enough(field)}"] if missing else []
    others = [one.name for one in field.baselines if says_so and one.ended and one.name != best.name]
    also = [f"{_listed(others)} ended early, too" if short else f"{_listed(others)} ended early"] if others else []
    has_strong = any(one.name == field.strong for one in field.baselines) or field.strong in field.not_judged
    unasked = [f"{field.strong}, often the best baseline, were not run"] if says_so and not has_strong else []
    reserves = "; ".join([*short, *also, *unjudged, *unasked])
    return f"; but {reserves}." if reserves else "."


def _fused(fusion: Contestant) -> str:
    return f"{' and '.join('the tree' if part == 'recipe' else part for part in fusion.parts)}, fused,"


def _interval(difference: Difference) -> str:
    return (
        f"{difference.mean:+.4f} (95 % interval {difference.low:+.4f} to {difference.high:+.4f}, {difference.queries:,} "
        f"{'query' if difference.queries == 1 else 'queries'})"
    )


def _listed(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def duration(seconds: float) -> str:
    """Seconds as a person says them: 0.4 s, 12 s, 3.5 min, 2.1 h."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """Bytes as kB, MB or GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
