"""Views and clicks made from the sample: what kinds of packages need."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from benchmarks.papers.xreg.debian_kinds import views_and_clicks, write

PACKAGES = pl.DataFrame(
    [
        ("chess", "Chess", "games", ["uitoolkit::gtk", "role::program", "game::board"]),
        ("go", "Go", "games", ["role::program", "uitoolkit::gtk"]),
        ("solo", "Solo", "games", ["uitoolkit::gtk", "role::program"]),
        ("tetris", "Tetris", "games", ["role::program"]),
        ("mail", "Mail", "net", ["role::program"]),
        ("plain", "No tags of these facets", "games", ["game::board"]),
        ("libgtk", "Toolkit", "libs", []),
        ("libc", "C", "libs", []),
    ],
    schema=["id", "title", "section", "debtags"],
    orient="row",
)
DEPENDS = pl.DataFrame(
    [("chess", "libgtk"), ("chess", "libc"), ("go", "libgtk"), ("tetris", "libc"), ("mail", "libc"), ("plain", "libc")],
    schema=["package", "dependency"],
    orient="row",
)
GTK, GAME, NET = "games role::program uitoolkit::gtk", "games role::program", "net role::program"


def test_a_rate_is_the_share_of_a_kinds_packages_that_depend_on_the_item() -> None:
    """`solo` depends on nothing, so it is no view; `plain` has no kind."""
    expected = [(GAME, "libc", 1, 1), (GTK, "libc", 2, 1), (GTK, "libgtk", 2, 2), (NET, "libc", 1, 1)]
    assert views_and_clicks(PACKAGES, DEPENDS, 1).rows() == expected


def test_items_with_few_clicks_are_left_out_and_files_hold_the_others(tmp_path: Path) -> None:
    for name, frame in (("packages", PACKAGES), ("depends", DEPENDS)):
        frame.write_parquet(tmp_path / f"{name}.parquet")
    write(tmp_path, tmp_path / "kinds", min_clicks=3)
    assert pl.read_csv(tmp_path / "kinds" / "log.csv").rows() == [(GAME, "libc", 1, 1), (GTK, "libc", 2, 1), (NET, "libc", 1, 1)]
    assert pl.read_csv(tmp_path / "kinds" / "kinds.csv")["kind"].to_list() == [GAME, GTK, NET]
    assert pl.read_parquet(tmp_path / "kinds" / "items.parquet").rows() == [("libc", "C", "libs")]


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_rows_makes_no_difference(reverse: bool) -> None:
    frames = (PACKAGES.reverse(), DEPENDS.reverse()) if reverse else (PACKAGES, DEPENDS.sample(fraction=1, shuffle=True, seed=1))
    assert views_and_clicks(*frames, 1).equals(views_and_clicks(PACKAGES, DEPENDS, 1))
