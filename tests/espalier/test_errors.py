"""How errors spell values, and that they survive a way to another process."""

from __future__ import annotations

import gc
import pickle
import weakref

from espalier.errors import MISSING, InvalidQuery, spelled


def test_values_are_spelled_short_and_printable() -> None:
    assert spelled("a\u202eb\x9b\ud800é") == '"a\\u202eb\\u009b\\ud800é"'
    assert spelled({("no", "key"): 1, "a": [None, True]}) == '{"a": [null, true]}'
    assert len(spelled(["x" * 100_000] * 1000)) == len(spelled("x" * 100_000, is_json=False)) == 200


def test_a_missing_value_is_still_missing_in_another_process() -> None:
    error = pickle.loads(pickle.dumps(InvalidQuery("ids", MISSING, "a list")))
    assert str(error) == "ids is missing; expected a list"


def test_a_spelled_value_is_not_kept() -> None:
    """Not even by a reference cycle: it may be a body of megabytes."""

    class Rows(list[int]):
        pass

    rows = Rows(range(1000))
    kept = weakref.ref(rows)
    gc.disable()
    try:
        assert spelled({"rows": rows}).startswith('{"rows": [0, 1, 2')
        del rows
        assert kept() is None
    finally:
        gc.enable()
