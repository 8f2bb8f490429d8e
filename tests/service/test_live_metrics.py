"""The metrics of live catalogues: whichever worker is scraped, the worst of them shows, and an unloaded version leaves no series."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from service.watch.live_metrics import REFUSED, LiveMetrics
from service.watch.metrics import Metrics

Series = dict[tuple[str, ...], float]


def series(text: str) -> Series:
    """(name, values of its labels by their names) → number, of the live catalogue's series; of a histogram its count."""
    return {
        (sample.name.removeprefix("espalier_live_"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("espalier_live_") and not sample.name.endswith(("_bucket", "_sum"))
    }


def test_a_version_says_how_full_it_is() -> None:
    metrics = Metrics()
    live = LiveMetrics(metrics, "books")
    live.holds(2, items=3, tombstones=7, limit=12)
    live.probed(2, 0.875, -0.01)
    live.probed(2, None, None)  # too few answers since: what is known stays
    found = series(metrics.render().decode())
    assert found["items", "books", "2"] == 3
    assert found["tombstones", "books", "2"] == 7
    assert found["capacity_ratio", "books", "2"] == 0.25
    assert found["canary_recall", "books", "2"] == 0.875
    assert found["displacement", "books", "2"] == -0.01


def test_refusals_are_there_before_the_first_and_lines_of_a_bulk_count_each() -> None:
    metrics = Metrics()
    live = LiveMetrics(metrics, "books")
    live.refused(507)
    live.refused(422, writes=4)
    found = series(metrics.render().decode())
    refused = {int(status): value for (name, *_, status), value in found.items() if name == "refused_total"}
    assert refused == {**dict.fromkeys(REFUSED, 0.0), 507: 1.0, 422: 4.0}
    assert found["visible_seconds_count", "books"] == 0


def test_an_unloaded_version_leaves_no_series() -> None:
    metrics = Metrics()
    live = LiveMetrics(metrics, "books")
    for version in (1, 2):
        live.holds(version, 1, 1, 10)
        live.probed(version, 1.0, 0.0)
    live.lag(4)
    metrics.forget_version("books", 1)
    found = series(metrics.render().decode())
    versioned = {key for key in found if key[0] in ("items", "tombstones", "capacity_ratio", "canary_recall", "displacement")}
    assert {key[2] for key in versioned} == {"2"}
    assert len(versioned) == 5
    assert found["lag", "books"] == 4
