"""What each method of a comparison gets of its time: planned before it begins, and again whenever a method has ended.

Knows what methods need, by name, and a clock. Does not know how they learn.

A method is planned if it can see ENOUGH of its data and of its steps to be judged. The strong baseline comes first, as no verdict is
worth anything without it, then the tree, whose memory is made of the same neighbours, then whatever needs least. What is left then goes to
all of them by weight, until they have all that they need. Whatever a method leaves goes to those after it; one that had no time at first
gets it then, if it is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..compare.contest import FUSION, RECIPE, parts_of
from ..compare.verdict import STRONG, duration
from ..retrieval.needs import ENOUGH, Needs
from ..retrieval.task import Clock

USED = 0.95
"""Of the whole time: the rest is for what takes longer than planned."""
WEIGHTS = {RECIPE: 3.0}
"""Parts of what is left, where they are not 1: the question is about the tree, and one that is trained for too short is judged too low."""
MINUTES_STEP = 0.5
"""Minutes are proposed in steps of so many."""


@dataclass
class Plan:
    """The methods that wait, and their time.

    seconds   of everything, from `begin_s` of the clock
    needs     method → seconds of choosing and training
    answers   method → seconds of answering validation and test queries, and of timing
    refused   method → why it cannot be fitted to this log at all, or was not measured
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
        return self.begin_s + USED * self.seconds - self.clock()

    @property
    def waiting(self) -> list[str]:
        """By importance: each is planned only if those before it leave it enough."""
        names = [name for name in self.needs if name not in self.done]
        return sorted(names, key=lambda name: (_is_fusion(name), name != STRONG, name != RECIPE, self.needs[name].least_s))

    def shares(self) -> dict[str, float]:
        """Method → seconds of choosing and training, of those that wait and can be judged."""
        left_s, share = self.left_s, dict[str, float]()
        for name in self.waiting:
            least_s = self.needs[name].least_s
            if least_s + self.answers[name] <= left_s and not self._lacking(name, share):
                share[name] = least_s
                left_s -= least_s + self.answers[name]
        return share_out(share, {name: self.needs[name].full_s for name in share}, left_s)

    def spare_s(self, shares: Mapping[str, float]) -> float:
        """What is left where everybody who waits gets as much as these shares say, and answers."""
        return max(0.0, self.left_s - sum(seconds + self.answers[name] for name, seconds in shares.items()))

    def _lacking(self, name: str, shares: Mapping[str, float]) -> list[str]:
        """The parts of a fusion that are methods of the plan, too, and are not judged."""
        parts = parts_of(name) if _is_fusion(name) else ()
        return [part for part in parts if part in self.refused or (part in self.waiting and part not in shares)]

    def _reasons(self) -> dict[str, str]:
        """Why methods have no time: by what the tree, or they, would have alone."""
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
        """About how many would do for these methods, too, after what has been done until now."""
        least_s = sum(self.needs[name].least_s + self.answers[name] for name in names)
        return MINUTES_STEP * math.ceil((self.clock() - self.begin_s + least_s) / USED / 60 / MINUTES_STEP)

    def rows(self) -> list[dict[str, Any]]:
        """Of each method {"method", "seconds", "least_seconds", "full_seconds", "steps", "share"}; seconds and share are 0 without time."""
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
        """The plan for people: method, seconds, and the share of its data or steps."""
        shares = self.shares()
        width = max(map(len, ["method", *self.needs, *self.refused]))
        spent_s = self.clock() - self.begin_s
        lines = [f"{'method':{width}}  seconds  plan for {duration(self.seconds)}, of which reading and measuring took {duration(spent_s)}"]
        for name, needs in self.needs.items():
            if name in shares:
                seen = "all data" if needs.steps is None else _steps(needs, shares[name])
                lines.append(f"{name:{width}}  {shares[name]:7.0f}  {seen}")
            else:
                lines.append(f"{name:{width}}  {'-':>7}  not judged: {self.reasons[name]}")
        lines += [f"{name:{width}}  {'-':>7}  not judged: {reason}" for name, reason in self.refused.items()]
        if RECIPE in self.reasons:
            lines.append(f"--minutes {self.minutes([*shares, RECIPE]):g} would do for the tree")
        if self.reasons:
            lines.append(f"--minutes {self.minutes(self.waiting):g} would do for all that fit this log")
        return "\n".join(lines)


def share_out(least: Mapping[str, float], full: Mapping[str, float], left_s: float) -> dict[str, float]:
    """The least of each, and what is left by weight, to none more than it needs in full."""
    share = dict(least)
    open_ = [name for name in share if share[name] < full[name]]
    while open_ and left_s > 1e-6:
        part_s = left_s / sum(_weight(name) for name in open_)
        for name in open_:
            given_s = min(part_s * _weight(name), full[name] - share[name])
            share[name] += given_s
            left_s -= given_s
        open_ = [name for name in open_ if full[name] - share[name] > 1e-6]
    return share


def _weight(name: str) -> float:
    return WEIGHTS.get(name, 1.0)


def _is_fusion(name: str) -> bool:
    return name.split(":")[0] == FUSION


def _steps(needs: Needs, seconds: float) -> str:
    """How many of its steps a method makes, in words."""
    steps = needs.steps or 0
    return f"{int(needs.share(seconds) * steps):,} of {steps:,} steps"


def is_judged(share: float) -> bool:
    """Whether a method saw so much of its data and of its steps that it gets figures."""
    return share >= ENOUGH
