"""Words that differ only in endings count as one, and what a vectoriser makes of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from espalier.text import endings as endings_module
from espalier.text.blocks import TextBlock
from espalier.text.endings import COHESION, FREQUENT, LONGEST, PREFIX, same_words
from espalier.text.vectoriser import Vectoriser

STEMS = ("connect", "select", "protect", "direct", "collect")
FORMS = [stem + ending for stem, ending in product(STEMS, ("", "ed", "ing", "ion", "s"))]
WORDS = TextBlock(unit="word", n=1, endings=True)


def classes(words: list[str]) -> dict[str, str]:
    """Each word and the one that it counts as."""
    return {word: words[position] for word, position in zip(words, same_words(words).tolist(), strict=True)}


def oracle(words: list[str]) -> list[int]:
    """The rule of the module, over all pairs."""
    pairs = []
    for a, b in combinations(range(len(words)), 2):
        common = next((i for i, (x, y) in enumerate(zip(words[a], words[b], strict=False)) if x != y), min(len(words[a]), len(words[b])))
        rest = tuple(sorted((words[a][common:], words[b][common:])))
        if common >= PREFIX and max(map(len, rest)) <= min(LONGEST, common / 2):
            pairs.append((a, b, rest))
    often = Counter(rest for *_, rest in pairs)
    near: dict[int, set[int]] = {position: set() for position in range(len(words))}
    for a, b, rest in pairs:
        if often[rest] >= FREQUENT:
            near[a].add(b)
            near[b].add(a)
    counts_as: dict[int, int] = {}
    for pivot in sorted(near, key=lambda position: (-len(near[position]), position)):
        if pivot not in counts_as:
            own = {pivot} | {v for v in near[pivot] if v not in counts_as and (1 + len(near[pivot] & near[v])) / len(near[v]) >= COHESION}
            counts_as |= dict.fromkeys(own, min(own))
    return [counts_as[position] for position in range(len(words))]


def test_words_with_frequent_endings_count_as_the_first_of_them() -> None:
    words = [*FORMS, "kettle", "connects7", "conned", "selfish"]
    random.Random(3).shuffle(words)
    found = classes(words)
    for stem in STEMS:
        forms = [word for word in words if word.startswith(stem) and word in FORMS]
        assert {found[word] for word in forms} == {forms[0]}
    assert {word for word, other in found.items() if word == other} >= {"kettle", "connects7", "conned", "selfish"}


def test_endings_of_too_few_words_mean_nothing() -> None:
    words = [form for form in FORMS if form.startswith(STEMS[: FREQUENT - 1])]
    assert same_words(words).tolist() == list(range(len(words)))


@given(st.lists(st.text("ab", max_size=8).map(lambda tail: f"stem{tail}"), unique=True, max_size=60))
def test_the_rule_is_that_of_the_module(words: list[str]) -> None:
    assert same_words(words).tolist() == oracle(words)


def test_only_the_first_words_of_many_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = same_words(FORMS)
    monkeypatch.setattr(endings_module, "MOST_WORDS", 20)  # four of the five stems
    assert same_words(FORMS).tolist() == [*whole[:20].tolist(), *range(20, 25)]
    monkeypatch.setattr(endings_module, "MOST_TOGETHER", 2)
    assert [position for position, other in enumerate(same_words(FORMS).tolist()) if position != other] == [1, 3, 6, 8, 11, 13, 16, 18]


def test_long_words_have_the_same_endings() -> None:
    words = ["a" * 1000 + form for form in FORMS]
    assert same_words(words).tolist() == same_words(FORMS).tolist() == oracle(words)


PEOPLE, CLOTHES = ("damen", "herren", "kinder", "mädchen", "jungen"), ("schuhe", "jacke", "socken", "mantel", "krawatte")
ROOMS, SHORT = ("wohnzimmer", "kinderzimmer", "schlafzimmer", "badezimmer"), ("car", "leg", "cat", "dim")
GARMENTS, COLOURS = ("เสื้อยืด", "กางเกง", "กระโปรง", "รองเท้า", "ถุงเท้า"), ("แดง", "ดำ", "ขาว", "เขียว")


@pytest.mark.parametrize(
    ("words", "beginnings", "endings"),
    [
        ((*PEOPLE, *CLOTHES), PEOPLE, CLOTHES),  # compounds
        (ROOMS, ROOMS, ("lampe", "tisch")),  # long by itself
        (SHORT, SHORT, ("pet", "end")),  # long beside the beginning
        ((), GARMENTS, COLOURS),  # phrases without blanks
    ],
)
def test_what_is_long_is_no_ending(words: tuple[str, ...], beginnings: tuple[str, ...], endings: tuple[str, ...]) -> None:
    every = [*words, *(beginning + ending for beginning, ending in product(beginnings, endings))]
    assert same_words(every).tolist() == list(range(len(every)))


def test_forms_of_a_word_have_one_feature_whose_idf_counts_their_texts() -> None:
    texts = [*FORMS, "kettle", "kettle red"]
    vectoriser = Vectoriser.fit(texts, [WORDS, TextBlock(unit="word", n=2)])
    rows = vectoriser.transform(["connected", "connection", "connect connects", "kettle"])
    starts = rows.indptr.tolist()
    first, second, third, fourth = (rows.indices[a:b].tolist() for a, b in pairwise(starts))
    assert first == second == third != fourth
    assert vectoriser.features_of(first) == ["connect"]
    assert_allclose(vectoriser.arrays()["idf"][first], np.log(len(texts) / (5 + 1)), rtol=1e-6)
    once, twice = (vectoriser.documents([text]).values.tolist() for text in ("connected", "connected connection"))
    assert once < twice
    again = Vectoriser.from_arrays(vectoriser.blocks, vectoriser.arrays())
    assert_array_equal(again.transform(texts).indices, vectoriser.transform(texts).indices)


def test_without_endings_every_form_has_its_own_feature() -> None:
    vectoriser = Vectoriser.fit(FORMS, [TextBlock(unit="word", n=1)])
    assert sorted(vectoriser.transform(FORMS).indices.tolist()) == list(range(len(FORMS)))


def test_endings_are_of_single_words() -> None:
    for unit, n in (("word", 2), ("char", 1)):
        with pytest.raises(ValueError, match=f"endings: got true for unit {unit}, n {n}, expected unit word, n 1"):
            TextBlock.model_validate({"unit": unit, "n": n, "endings": True})
