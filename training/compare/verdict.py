"""The verdict of a comparison in two sentences: how the tree's figure differs from the best baseline's, and whether a tree pays.

Knows figures, costs and intervals. Does not know how they were measured.

Validation queries choose the tree's serving beam and the best baseline. The interval is over test queries, which chose nothing, so it is
right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..compare.figures import Difference

MARGIN = 0.05
"""Share of the baseline's figure. A smaller gain does not pay for a model that has to be trained and served."""
MIN_QUERIES = 30
"""With fewer, intervals of means are wrong."""
STRONG = "neighbours"
"""The cheap baseline of histories that is often the best. If it was not run, the claim that a tree pays has a reserve."""
BESIDE, BY_SPEED = "The tree pays only beside another method", "by its speed"
MUCH_FASTER = 0.5
"""Share of a baseline's time for a query. A tree that finds as much in less time pays by its speed."""


@dataclass(frozen=True)
class Contestant:
    """A method at the serving beam that validation chose.

    figure         mean over test queries
    validation     mean over validation queries
    ended          why its choosing or training ended early, or None
    fused_methods  of a fusion
    """

    name: str
    figure: float
    validation: float
    seconds: float
    bytes: int
    ms: float
    ended: str | None = None
    fused_methods: tuple[str, ...] = ()

    @property
    def cost(self) -> str:
        return f"{duration(self.seconds)} to train, {size(self.bytes)}, {self.ms:.2g} ms a query"


Paired = Callable[[str, str], Difference]
"""The names of two contestants → the first's figure minus the second's, on test queries."""


@dataclass(frozen=True)
class Field:
    """All contestants.

    not_judged  name → reason
    strong      the cheap baseline without which a claim has a reserve
    minutes     if time was too short: the minutes in which all could be judged
    all_items   if the metric is the recall of answers with room for all items: their number
    """

    metric: str
    tree: Contestant | None
    others: Sequence[Contestant]
    not_judged: Mapping[str, str]
    paired: Paired
    strong: str = STRONG
    minutes: float | None = None
    all_items: int | None = None

    @property
    def baselines(self) -> list[Contestant]:
        """All contestants that do not need the tree, with fusions of other methods."""
        return [contestant for contestant in self.others if self.tree is None or self.tree.name not in contestant.fused_methods]

    @property
    def fusions(self) -> list[Contestant]:
        return [contestant for contestant in self.others if self.tree is not None and self.tree.name in contestant.fused_methods]


def verdict(field: Field, in_other_metrics: Sequence[Field] = ()) -> tuple[str, str]:
    """Two sentences: how the tree's figure differs from the best baseline's, and whether the tree pays.

    in_other_metrics  the same contestants; where one of these metrics would say otherwise, the second sentence ends with it
    """
    tree = field.tree
    if tree is None:
        why = next((f"judged: {reason}" for name, reason in field.not_judged.items() if name == "recipe"), "measured, since it was not run")
        return f"No tree was {why.rstrip('.')}.", f"Whether one pays here is open{_enough(field)}."
    if not field.baselines:
        return f"The tree has {field.metric} {tree.figure:.4f}; no baseline was judged.", f"Whether it pays is open{_enough(field)}."
    if field.all_items is not None:
        finding = f"{field.metric} decides nothing, because an answer has room for all {field.all_items:,} items."
        return finding, "Undecided: a smaller search.m in a configuration, which `espalier new` writes, can tell the methods apart."
    best = best_baseline(field, in_other_metrics)
    difference = field.paired(tree.name, best.name)
    pays = _pays(field, tree, best, difference)
    fusion = _fusion_that_pays(field, best) if pays.startswith(BESIDE) else None
    subject = tree if fusion is None else fusion
    otherwise = [] if difference.queries < MIN_QUERIES else _otherwise(tree, best, subject, pays, in_other_metrics)
    reserves = _reserves(field, tree, best, otherwise, says_so=pays.startswith("The tree pays"))
    if tree.ended or best.ended:
        pays = f"So far, {pays[0].lower()}{pays[1:]}"
    return _finding(field, tree, best, difference), pays + reserves


def best_baseline(field: Field, in_other_metrics: Sequence[Field] = ()) -> Contestant:
    """The best one on validation queries; at ties the best one in other metrics, which have figures of test queries only."""
    figures = [{contestant.name: contestant.figure for contestant in other.others} for other in in_other_metrics]
    return max(field.baselines, key=lambda baseline: (baseline.validation, *(of_name[baseline.name] for of_name in figures)))


def _enough(field: Field) -> str:
    return "" if field.minutes is None else f" (--minutes {field.minutes:g} would do)"


def _finding(field: Field, tree: Contestant, best: Contestant, difference: Difference) -> str:
    if difference.queries >= MIN_QUERIES and difference.low > 0:
        phrase = "The tree finds more than"
    elif difference.queries >= MIN_QUERIES and difference.high < 0:
        phrase = "The tree finds less than"
    elif _is_settled(difference, best):
        phrase = "The tree finds no more than"
    else:
        phrase = "The queries do not tell whether the tree finds more than"
    return (
        f"{phrase} {best.name}, the best baseline on validation queries: {field.metric} {tree.figure:.4f} against {best.figure:.4f}, "
        f"a difference of {_interval(difference)}."
    )


def _pays(field: Field, tree: Contestant, best: Contestant, difference: Difference) -> str:
    """The second sentence, without the reserves and the full stop."""
    costs = f"{tree.name}: {tree.cost}; {best.name}: {best.cost}"
    if difference.queries < MIN_QUERIES:
        queries = "1 query is" if difference.queries == 1 else f"{difference.queries} queries are"
        return f"Undecided: {queries} too few to tell ({costs})"
    finds_more, is_little, fusion = difference.low > 0, _is_settled(difference, best), _fusion_that_pays(field, best)
    if field.strong in field.not_judged and (finds_more or fusion is not None):
        return f"Undecided: {field.strong}, often the best baseline, were not judged ({costs})"
    if finds_more and not is_little:
        if rivals := _rivals(field, tree):
            return f"Undecided: {rivals}, which validation did not choose, may find as much as the tree ({costs})"
        addition = "" if fusion is None or field.paired(fusion.name, tree.name).low <= 0 else f", and {_fused(fusion)} find more still"
        return f"The tree pays{addition} ({costs})"
    if fusion is not None:
        if rivals := _rivals(field, fusion):
            return f"Undecided: {rivals}, which validation did not choose, may find as much as {_fused(fusion).removesuffix(',')} ({costs})"
        gain = _interval(field.paired(fusion.name, best.name))
        costs = f"{costs}; fused: {fusion.cost}"
        return f"{BESIDE}: {_fused(fusion)} find {gain} more than {best.name} ({costs})"
    if is_little:
        if difference.high >= 0 and difference.low > -MARGIN * best.figure and _is_much_faster(field, tree):
            return f"The tree pays {BY_SPEED}: it finds as much in less time ({costs})"
        unless = " unless so little more is worth the cost" if finds_more else ""
        return f"Use {best.name}{unless} ({costs}{_model_of(best)})"
    return f"Undecided with {difference.queries:,} queries: they leave room for either ({costs})"


def _rivals(field: Field, winner: Contestant) -> str:
    """The baselines that may find as much as what finds more than the best one, in words; "" if there are none."""
    names = [baseline.name for baseline in field.baselines if field.paired(winner.name, baseline.name).low <= 0]
    return _listed(names) if names else ""


def _is_much_faster(field: Field, tree: Contestant) -> bool:
    """Whether every baseline that may find as much as the tree, within MARGIN, takes much longer."""
    rivals = [baseline for baseline in field.baselines if field.paired(tree.name, baseline.name).low < MARGIN * baseline.figure]
    return all(tree.ms < MUCH_FASTER * rival.ms for rival in rivals)


def _model_of(best: Contestant) -> str:
    """How to serve the baseline, if it is also a kind of model."""
    return f"; `fit --kind {STRONG}` makes a model of them" if best.name == STRONG else ""


def _is_settled(difference: Difference, best: Contestant) -> bool:
    """Whether the tree's gain is certainly too small to pay."""
    return difference.high < MARGIN * best.figure and difference.queries >= MIN_QUERIES


def _fusion_that_pays(field: Field, best: Contestant) -> Contestant | None:
    """Of the fusions with the tree the best on validation queries, if its gain over the best baseline pays."""
    fused = max(field.fusions, key=lambda fusion: fusion.validation, default=None)
    if fused is None:
        return None
    gain = field.paired(fused.name, best.name)
    return fused if gain.low > 0 and gain.high >= MARGIN * best.figure else None


def _otherwise(tree: Contestant, best: Contestant, subject: Contestant, pays: str, in_other_metrics: Sequence[Field]) -> list[str]:
    """The other metrics that decide otherwise on whether the tree, or the fusion that pays beside it, pays.

    subject  the tree, or that fusion
    """
    phrases = []
    for other in in_other_metrics:
        if other.tree is None:
            continue
        measured = {contestant.name: contestant for contestant in [*other.others, other.tree]}
        difference, rival = other.paired(subject.name, best.name), measured[best.name]
        if pays.startswith("The tree pays"):
            least_gain = 0.0 if subject is tree and BY_SPEED in pays else MARGIN * rival.figure
            differs = difference.high < least_gain
        else:
            differs = difference.high >= MARGIN * rival.figure and all(
                other.paired(tree.name, baseline.name).low > 0 for baseline in other.baselines
            )
        if differs:
            figures = f"{measured[subject.name].figure:.4f} against {rival.figure:.4f}"
            has = "the tree has" if subject is tree else f"{_fused(subject)} have"
            phrases.append(f"by {other.metric} {has} {figures}, a difference of {_interval(difference)}")
    return phrases


def _reserves(field: Field, tree: Contestant, best: Contestant, otherwise: Sequence[str], *, says_so: bool) -> str:
    """The reserves that make the verdict less sure, and the full stop. says_so: whether it says that the tree pays."""
    short = [f"{method.name} ended early ({method.ended}), and more time may change this" for method in (tree, best) if method.ended]
    missing = [name for name in field.not_judged if name.split(":")[0] != "fusion"]
    unjudged = [f"{_listed(missing)} {'was' if len(missing) == 1 else 'were'} not judged{_enough(field)}"] if missing else []
    ended_early = [method.name for method in field.baselines if says_so and method.ended and method.name != best.name]
    early = [f"{_listed(ended_early)} ended early, too" if short else f"{_listed(ended_early)} ended early"] if ended_early else []
    has_strong = any(method.name == field.strong for method in field.baselines) or field.strong in field.not_judged
    not_run = [f"{field.strong}, often the best baseline, were not run"] if says_so and not has_strong else []
    reserves = "; ".join([*otherwise, *short, *early, *unjudged, *not_run])
    return f"; but {reserves}." if reserves else "."


def _fused(fusion: Contestant) -> str:
    return f"{' and '.join('the tree' if method == 'recipe' else method for method in fusion.fused_methods)}, fused,"


def _interval(difference: Difference) -> str:
    return (
        f"{difference.mean:+.4f} (95 % interval {difference.low:+.4f} to {difference.high:+.4f}, {difference.queries:,} "
        f"{'query' if difference.queries == 1 else 'queries'})"
    )


def _listed(names: Sequence[str]) -> str:
    *other_names, last_name = names
    return f"{', '.join(other_names)} and {last_name}" if other_names else last_name


def duration(seconds: float) -> str:
    """Seconds for readers: 0.4 s, 12 s, 3.5 min, 2.1 h."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """Bytes as kB, MB or GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
