"""How errors spell values, and that they survive a way to another process."""

from __future__ import annotations

import pickle

from espalier.errors import MISSING, InvalidQuery, spelled


def test_values_are_spelled_short_and_printable() -> None:
    assert spelled("a\u202eb\x9b\ud800é") == '"a\\u202eb\\u009b\\ud800é"'
    assert spelled({("no", "key"): 1, "a": [None, True]}) == '{"a": [null, true]}'
    assert len(spelled(["x" * 100_000] * 1000)) == len(spelled("x" * 100_000, is_json=False)) == 200


def test_a_missing_value_is_still_missing_in_another_process() -> None:
    error = pickle.loads(pickle.dumps(InvalidQuery("ids", MISSING, "a list")))
    assert str(error) == "ids is missing; expected a list"
