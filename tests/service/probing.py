"""A recall probe of a test's own over a service that runs, and what it measures."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from service.models.probe import Probe
from service.watch.metrics import Metrics
from tests.service.exported_models import MS
from tests.service.running import Running


def sample(text: str, metric: str, **labels: Any) -> float | None:
    """Of one series of an exposition, None where it is not there."""
    pattern = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    found = re.search(rf"^{metric}(?:\{{{pattern}\}})? (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


class Probing:
    """Its metrics are the probe's alone."""

    def __init__(self, running: Running) -> None:
        self.running, self.metrics = running, Metrics()
        self.probe = Probe(running.app.state.service.registry, self.metrics, per_s=1000.0)

    def ask(self, times: int) -> None:
        """Let the probe ask each version that many queries, one after the other."""

        async def asked() -> None:
            for _ in range(times):
                self.probe.forget(self.probe.ready())
                await asyncio.gather(*(self.probe.query(key) for key in self.probe.ready()))

        self.running.client.runner.run(asked())

    def value(self, metric: str, version: int = 1, model: str = "books", **labels: Any) -> float | None:
        return sample(self.text(), f"espalier_{metric}", model=model, version=version, **labels)

    def recall(self, version: int = 1, metric: str = "recall") -> dict[int, float]:
        found = {m: self.value(f"probe_{metric}", version, m=m) for m in MS}
        return {m: number for m, number in found.items() if number is not None}

    def drift(self) -> float:
        found = self.value("probe_drift")
        assert found is not None
        return found

    def queries(self, outcome: str, model: str = "books") -> float:
        return self.value("probe_queries_total", model=model, outcome=outcome) or 0.0

    def text(self) -> str:
        return self.metrics.render().decode()
