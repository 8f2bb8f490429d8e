"""Faults are put where they were drawn, and found again after changes around them."""

from __future__ import annotations

from tests.mutants import mutants_of, mutated

SOURCE = '''"""A module."""

WIDTH: int = 4


def clipped(value: int, most: int = 9) -> int:
    """A number, at most `most`."""
    if value > most and not value == 12:
        raise ValueError(f"{value} + 1")
    note(value + 1)
    return value


class Box:
    def size(self) -> int:
        return 2 * self.width
'''


def test_every_fault_is_one_change_of_one_line_inside_a_function() -> None:
    faults = {(line, mutant.before, mutant.after) for line, mutant in mutants_of("p", "p/m.py", SOURCE)}
    assert faults == {
        (8, "value > most and not value == 12", "not (value > most and not value == 12)"),
        (8, ">", ">="),
        (8, "and", "or"),
        (8, "not ", ""),
        (8, "==", "!="),
        (8, "12", "13"),
        (10, "note(value + 1)", "pass"),
        (10, "+", "-"),
        (10, "1", "2"),
        (16, "*", "/"),
        (16, "2", "3"),
    }
    for line, mutant in mutants_of("p", "p/m.py", SOURCE):
        found = mutated(mutant, SOURCE)
        assert found is not None
        assert found[1] == line
        compile(found[0], "m", "exec")
        pairs = zip(SOURCE.splitlines(), found[0].splitlines(), strict=True)
        assert [number for number, (before, after) in enumerate(pairs, 1) if before != after] == [line]


def test_a_fault_is_found_after_changes_around_it_and_gone_with_its_line() -> None:
    mutant = next(mutant for line, mutant in mutants_of("p", "p/m.py", SOURCE) if mutant.after == "/")
    later = mutated(mutant, f"import math\n\n{SOURCE}")
    assert later is not None
    assert later[1] == 18
    assert "        return 2 / self.width\n" in later[0]
    assert mutated(mutant, SOURCE.replace("2 *", "3 *")) is None
