"""Divides a comparison's time among its methods: before the first begins, and again after each.

Knows the needs of methods, by name, and a clock. Does not know how they learn.

A method gets time if it can see ENOUGH of its data and of its steps to be judged. The strong baseline comes first, since a verdict without
it is worth nothing; then the tree, whose memory uses the same neighbours; then the others, the least needy first. Remaining time is shared
by weight, until each method has all that it needs, and what nobody needs as a reserve. Time that a method leaves goes to later ones. A
method that got none at first may get it then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..compare.contest import FUSION, RECIPE, fused_methods
from ..compare.verdict import STRONG, duration
from ..retrieval.needs import ENOUGH, Needs
from ..retrieval.task import Clock

USED = 0.95
"""Planned share of the whole time. The rest is for steps that take longer than planned."""
WEIGHTS = {RECIPE: 3.0}
"""Weights other than 1 in remaining time. The comparison is about the tree, and a tree with too little training is judged too low."""
MINUTES_STEP = 0.5
"""Proposed minutes are a multiple of this."""


@dataclass
class Plan:
    """The waiting methods and their time.

    seconds   of the whole comparison, from `begin_s` of the clock
    needs     method → seconds of choosing and training
    answers   method → seconds of answering validation and test queries, and of timing
    refused   method → why it cannot be fitted to this log, or was not measured
    done      methods that have been fitted
    """

    clock: Clock
    begin_s: float
    seconds: float
    needs: Mapping[str, Needs]
    answers: Mapping[str, float]
    refused: Mapping[str, str]
    done: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.reasons = self._reasons()

    @property
    def left_s(self) -> float:
        """Planned seconds that are left. Fusions of methods that have ended may use the rest of the time, too."""
        used = 1.0 if all(map(_is_fusion, self.waiting)) else USED
        return self.begin_s + used * self.seconds - self.clock()

    @property
    def waiting(self) -> list[str]:
        """The waiting methods by importance: each is planned only if earlier ones leave it enough time."""
        names = [name for name in self.needs if name not in self.done]
        return sorted(names, key=lambda name: (_is_fusion(name), name != STRONG, name != RECIPE, self.needs[name].least_s))

    def shares(self) -> dict[str, float]:
        """Waiting method that can be judged → seconds of choosing and training."""
        left_s, share = self.left_s, dict[str, float]()
        for name in self.waiting:
            least_s = self.needs[name].least_s
            if least_s + self.answers[name] <= left_s and not self._lacking(name, share):
                share[name] = least_s
                left_s -= least_s + self.answers[name]
        return share_out(share, {name: self.needs[name].full_s for name in share}, left_s)

    def spare_s(self, name: str, shares: Mapping[str, float]) -> float:
        """A method's part, by weight, of the seconds that remain when every waiting method has its share and its time for answers: it may
        take longer than was measured, or go on since it still improves. Fusions have what is left then."""
        spare_s = max(0.0, self.left_s - sum(seconds + self.answers[method] for method, seconds in shares.items()))
        methods = [method for method in shares if not _is_fusion(method)] or [*shares]
        return spare_s * _weight(name) / sum(map(_weight, methods)) if name in methods else 0.0

    def lacks_time_alone(self, name: str) -> bool:
        """Whether an unjudged method could be judged with more time: neither it nor a method of a fusion is refused."""
        return name in self.needs and not (_is_fusion(name) and self.refused.keys() & {*fused_methods(name)})

    def _lacking(self, name: str, shares: Mapping[str, float]) -> list[str]:
        """The methods of a fusion that are also methods of the plan and are not judged."""
        methods = fused_methods(name) if _is_fusion(name) else ()
        return [method for method in methods if method in self.refused or (method in self.waiting and method not in shares)]

    def _reasons(self) -> dict[str, str]:
        """Method → why it has no time, with the steps that it would make if it were the only one."""
        shares = self.shares()
        reasons = {}
        for name in (name for name in self.waiting if name not in shares):
            needs, alone_s = self.needs[name], max(0.0, self.left_s - self.answers[name])
            if lacking := self._lacking(name, shares):
                reasons[name] = f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not judged"
            elif needs.steps is None:
                reasons[name] = f"one fit to all data takes {duration(needs.least_s)}"
            else:
                reasons[name] = f"{_steps(needs, alone_s)} in {duration(alone_s)}; half of them take {duration(needs.least_s)}"
        return reasons

    def minutes(self, names: Iterable[str]) -> float:
        """About how many minutes the comparison needs for these methods, with the time spent so far."""
        least_s = sum(self.needs[name].least_s + self.answers[name] for name in names)
        return MINUTES_STEP * math.ceil((self.clock() - self.begin_s + least_s) / USED / 60 / MINUTES_STEP)

    def rows(self) -> list[dict[str, Any]]:
        """{"method", "seconds", "least_seconds", "full_seconds", "steps", "share"} of each method; seconds and share are 0 without time."""
        shares = self.shares()
        return [
            {
                "method": name,
                "seconds": round(shares.get(name, 0.0), 2),
                "least_seconds": round(needs.least_s, 2),
                "full_seconds": round(needs.full_s, 2),
                "steps": needs.steps,
                "share": round(needs.share(shares[name]), 4) if name in shares else 0.0,
            }
            for name, needs in self.needs.items()
        ]

    def table(self) -> str:
        """The plan as text: method, seconds, and the share of its data or steps."""
        shares = self.shares()
        width = max(map(len, ["method", *self.needs, *self.refused]))
        spent_s = self.clock() - self.begin_s
        lines = [f"{'method':{width}}  seconds  plan for {duration(self.seconds)}, of which reading and measuring took {duration(spent_s)}"]
        for name, needs in self.needs.items():
            if name in shares:
                share_text = "all data" if needs.steps is None else _steps(needs, shares[name])
                lines.append(f"{name:{width}}  {shares[name]:7.0f}  {share_text}")
            else:
                lines.append(f"{name:{width}}  {'-':>7}  not judged: {self.reasons[name]}")
        lines += [f"{name:{width}}  {'-':>7}  not judged: {reason}" for name, reason in self.refused.items()]
        if RECIPE in self.reasons:
            lines.append(f"--minutes {self.minutes([*shares, RECIPE]):g} would do for the tree")
        if self.reasons:
            lines.append(f"--minutes {self.minutes(self.waiting):g} would do for all that fit this log")
        return "\n".join(lines)


def share_out(least: Mapping[str, float], full: Mapping[str, float], left_s: float) -> dict[str, float]:
    """Method → seconds: its least, and a share of `left_s` by weight, together at most its full need."""
    share = dict(least)
    unfilled = [name for name in share if share[name] < full[name]]
    while unfilled and left_s > 1e-6:
        part_s = left_s / sum(_weight(name) for name in unfilled)
        for name in unfilled:
            extra_s = min(part_s * _weight(name), full[name] - share[name])
            share[name] += extra_s
            left_s -= extra_s
        unfilled = [name for name in unfilled if full[name] - share[name] > 1e-6]
    return share


def _weight(name: str) -> float:
    return WEIGHTS.get(name, 1.0)


def _is_fusion(name: str) -> bool:
    return name.split(":")[0] == FUSION


def _steps(needs: Needs, seconds: float) -> str:
    """How many of its steps a method makes in so many seconds, in words."""
    steps = needs.steps or 0
    return f"{int(needs.share(seconds) * steps):,} of {steps:,} steps"


def is_judged(share: float) -> bool:
    """Whether a method saw enough of its data and of its steps to get figures."""
    return share >= ENOUGH
