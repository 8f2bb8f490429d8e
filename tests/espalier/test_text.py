"""Queries become arrays: texts by the vectoriser (words, n-grams, weights, vocabularies, arrays), histories, vectors and features."""

from __future__ import annotations

import doctest
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

import espalier
from espalier.errors import BundleCorrupt, InvalidConfig, InvalidData, InvalidQuery, expectation
from espalier.items import ItemTable
from espalier.queries import (
    PADDING,
    FeaturesKind,
    HistoryKind,
    QueryBatch,
    QueryKind,
    TextKind,
    VectorKind,
    encode_features,
    encode_histories,
    encode_vectors,
    pad_histories,
)
from espalier.text import ngrams
from espalier.text import vectoriser as text_module
from espalier.text.blocks import TextBlock
from espalier.text.sparse_rows import MAX_FEATURES, SparseRows
from espalier.text.vectoriser import Vectoriser, normalise
from tests import ROOT

WORDS_1, WORDS_2 = TextBlock(unit="word", n=1, unknown=1), TextBlock(unit="word", n=2, unknown=1)
CHARS_3 = TextBlock(unit="char", n=3, unknown=1)
USUAL = (WORDS_1, WORDS_2, CHARS_3)
PRODUCTS = ["Stainless steel kettle 1.7 l", "kettle, steel", "red kettle", "Red café table", "table cloth red", "東京 kettle", "", "a"]


# -- the definition in plain Python ---------------------------------------------------------------------------------------


def is_letter(c: str) -> bool:
    variation = "VARIATION SELECTOR-" in unicodedata.name(c, "") and "MONGOLIAN" not in unicodedata.name(c, "")
    return c.isalnum() or (unicodedata.category(c) in ("Mn", "Mc") and not variation)


def is_word(c: str) -> bool:
    name = unicodedata.name(c, "")
    return c.isalnum() and name.startswith(("CJK", "HIRAGANA", "KATAKANA", "HENTAIGANA", "IDEOGRAPHIC ITERATION"))


def words_of(text: str) -> list[str]:
    words, inside = [], False
    for c in normalise(text):
        if is_word(c):
            words.append(c)
            inside = False
        elif is_letter(c):
            words[-1:] = [words[-1] + c] if inside else [*words[-1:], c]
            inside = True
        else:
            inside = False
    return words


def grams_of(text: str, block: TextBlock) -> list[str]:
    words, n = words_of(text), block.n
    if block.unit == "word":
        return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    padded = [f" {word} " for word in words]
    return [word[i : i + n] for word in padded for i in range(max(1, len(word) - n + 1))]


class Oracle:
    """Unknown bins are not told apart here: at most one."""

    def __init__(self, texts: Sequence[str], blocks: Sequence[TextBlock]) -> None:
        self.blocks, self.vocabularies, self.idf, self.firsts = blocks, [], [], [0]
        for block in blocks:
            documents = [set(grams_of(text, block)) for text in texts]
            df = Counter(gram for grams in documents for gram in grams)
            some = [gram for gram, count in df.items() if count >= block.min_count and count / len(texts) <= block.max_share]
            some = [gram for _, gram in sorted((-df[gram], gram) for gram in some)[: block.max_features or None]]
            self.vocabularies.append({gram: k for k, gram in enumerate(some)})
            counts = [df[gram] for gram in some] + [sum(any(gram not in some for gram in grams) for grams in documents)] * block.unknown
            self.idf.append([max(math.log(len(texts) / (count + 1)), 0) if count else 0.0 for count in counts])
            self.firsts.append(self.firsts[-1] + len(counts))

    def unknown_words(self, text: str) -> list[str]:
        """The words that the vocabulary of single words lacks; none without such a vocabulary, or where it has a feature for them."""
        known = [self.vocabularies[k] for k, block in enumerate(self.blocks) if (block.unit, block.n, block.unknown) == ("word", 1, 0)]
        return [word for word in words_of(text) if known and word not in known[0]]

    def rarest_letters(self, word: str) -> float:
        """The largest idf of the word's characters that a vocabulary has."""
        chars = [(k, grams_of(word, block)) for k, block in enumerate(self.blocks) if block.unit == "char"]
        known = [self.idf[k][self.vocabularies[k][gram]] for k, grams in chars for gram in grams if gram in self.vocabularies[k]]
        return max(known, default=0.0)

    def row(self, text: str) -> dict[int, float]:
        row: dict[int, float] = {}
        unknown = self.unknown_words(text)
        for k, block in enumerate(self.blocks):
            own: Counter[int] = Counter()
            grams = grams_of(text, block)
            if block.unit == "char":  # those of an unknown word count twice
                grams += [gram for word in unknown for gram in grams_of(word, block)]
            for gram in grams:
                if gram in self.vocabularies[k] or block.unknown:
                    own[self.vocabularies[k].get(gram, len(self.vocabularies[k]))] += 1
            weights = {feature: count * self.idf[k][feature] for feature, count in own.items() if self.idf[k][feature] > 0}
            squares = [weight**2 for weight in weights.values()]
            if (block.unit, block.n) == ("word", 1):
                squares += [self.rarest_letters(word) ** 2 for word in unknown]
            length = math.sqrt(sum(squares))
            row |= {self.firsts[k] + feature: weight / length for feature, weight in weights.items()}
        length = math.sqrt(sum(weight**2 for weight in row.values()))
        return {feature: row[feature] / length for feature in sorted(row)}


def assert_rows_are(rows: SparseRows, expected: Sequence[dict[int, float]]) -> None:
    rows.check()
    assert_array_equal(np.diff(rows.indptr), [len(row) for row in expected])
    assert_array_equal(rows.indices, [feature for row in expected for feature in row])
    assert_allclose(rows.values, [weight for row in expected for weight in row.values()], rtol=1e-6)


def names_of(vectoriser: Vectoriser) -> list[str]:
    return vectoriser.features_of(range(vectoriser.width))


# -- normalising ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Café", "cafe"),
        ("Cafe\u0301", "cafe"),
        ("ＷＩＤＥ　１２", "wide 12"),
        ("ﬁne", "fine"),
        ("Straße", "strasse"),
        ("İstanbul", "istanbul"),
        ("IŞIK", "isik"),
        ("ışık", "isik"),
        ("Łódź", "lodz"),
        ("Rødgrød Ǿ Đorđe", "rodgrod o dorde"),
        ("Æsir œuvre Þór ð", "aesir oeuvre thor d"),
        ("مُحَمَّد", "محمد"),
        ("كـــتاب", "كتاب"),
        ("שָׁלוֹם", "שלום"),
        ("ΣΊΣΥΦΟΣ", "σισυφοσ"),
        ("が", "が"),  # the dakuten is half of the letter
        ("か\u3099", "が"),
        ("ｶﾞ", "ガ"),
        ("हिन्दी", "हिन्दी"),
        ("ที่นี่", "ที่นี่"),
        ("한국", "한국"),
        ("a\ud800B", "a\ud800b"),
    ],
)
def test_texts_that_read_the_same_are_the_same(text: str, plain: str) -> None:
    assert normalise(text) == plain


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


# -- rows against the definition ------------------------------------------------------------------------------------------

ALPHABETS = st.sampled_from(["ab ", "abc de-", "aé1, ", "東京のタ kß", "हिन्दी क", "a\U0001d400\U00010400😀 b", "\ud800\udc00ab "])
TEXTS = ALPHABETS.flatmap(lambda letters: st.lists(st.text(letters, max_size=25) | st.text(max_size=12), min_size=1, max_size=12))
BLOCKS = st.lists(
    st.builds(
        TextBlock,
        unit=st.sampled_from(["word", "char"]),
        n=st.integers(1, 8) | st.integers(1, 3),
        max_features=st.sampled_from([0, 0, 1, 3, 10]),
        min_count=st.sampled_from([1, 1, 2]),
        max_share=st.sampled_from([0.3, 0.5, 0.98, 1.0]),
        unknown=st.sampled_from([0, 1]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda block: (block.unit, block.n),
)


@given(TEXTS)
def test_words_are_those_that_rows_are_made_of(texts: list[str]) -> None:
    """Vowel signs are parts of words: without them, different words of Hindi or Tamil are the same."""
    for text in [*texts, "हिन्दी किताब", "கடல் கடை", "カード・ゲーム"]:
        assert text_module.words_of(text) == words_of(text)


@given(TEXTS, BLOCKS, st.lists(st.text(max_size=20), max_size=3))
def test_rows_are_those_of_the_definition(texts: list[str], blocks: list[TextBlock], others: list[str]) -> None:
    oracle = Oracle(texts, blocks)
    if not any(oracle.vocabularies):
        with pytest.raises(InvalidData, match="n-gram"):
            Vectoriser.fit(texts, blocks)
        return
    vectoriser = Vectoriser.fit(texts, blocks)
    assert vectoriser.width == oracle.firsts[-1]
    assert_allclose(vectoriser.arrays()["idf"], [idf for block in oracle.idf for idf in block], rtol=1e-6)
    assert_rows_are(vectoriser.transform([*texts, *others]), [oracle.row(text) for text in [*texts, *others]])


def test_every_letter_of_unicode_is_classed_by_its_name() -> None:
    """Letters that normalising replaces (wide, circled, compatibility forms) never reach the classes."""
    assigned = (c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in ("Cn", "Co"))
    letters = [c for c in assigned if normalise(c) == c]
    expected = [2 if is_word(c) else int(is_letter(c)) for c in letters]
    classes = text_module._classes()[[ord(c) for c in letters]]
    unlike = {letters[i] for i in np.flatnonzero(classes != expected)}
    assert unlike <= set("〆〇〡〢〣〤〥〦〧〨〩〱〲〳〴〵〼〻")  # Han and kana by another name


def test_many_texts_at_once_are_taken_in_parts_and_arrays_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcé \U0001d400"), size)) for size in rng.integers(0, 60, 200)]
    vectoriser = Vectoriser.fit(texts, USUAL)
    rows = vectoriser.transform(texts)
    monkeypatch.setattr(text_module, "CHUNK", 50)
    assert 100 < len([*text_module._chunks(texts)]) < 200, "some texts at a time"
    again = Vectoriser.from_arrays(USUAL, Vectoriser.fit(texts, USUAL).arrays())
    assert names_of(again) == names_of(vectoriser)
    for name, array in vectoriser.arrays().items():
        assert_array_equal(again.arrays()[name], array)
    parts = again.transform(texts)
    for name in ("indptr", "indices", "values"):
        assert_array_equal(getattr(parts, name), getattr(rows, name))


def test_threads_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(1)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(300)]
    texts = [" ".join(rng.choice(words, size)) for size in rng.integers(1, 30, 400)]
    vectoriser = Vectoriser.fit(texts, USUAL)
    expected = [vectoriser.transform([text]) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for row, own in zip(pool.map(lambda text: vectoriser.transform([text]), texts * 5), expected * 5, strict=True):
            assert (row.indices.tobytes(), row.values.tobytes()) == (own.indices.tobytes(), own.values.tobytes())


def gram_texts(vectoriser: Vectoriser) -> list[str]:
    arrays = vectoriser.arrays()
    begins, text = arrays["text_from"].tolist(), arrays["text"].tobytes()
    return [text[begin:end].decode() for begin, end in pairwise(begins)]


# -- vocabularies ---------------------------------------------------------------------------------------------------------


def vocabulary(texts: Sequence[str], **limits: Any) -> list[str]:
    block = TextBlock.model_validate({"unit": "word", "n": 1, "unknown": 0, "max_share": 1, **limits})
    return names_of(Vectoriser.fit(texts, [block]))


def test_features_are_numbered_by_falling_frequency_then_by_the_string() -> None:
    """However late strings differ."""
    texts = ["b c é a \U0001d7d8x", "b c zz \u5b57", "b \U00010400"]
    assert vocabulary(texts) == ["b", "c", "0x", "a", "e", "zz", "字", "\U00010428"]
    long = "stainless" * 5
    texts = [f"{long}b {long}a {long} stainles stainless stainlesr {long}ab"]
    assert vocabulary(texts) == sorted(texts[0].split())


@pytest.mark.parametrize(("share", "kept"), [(0.29, ["y"]), (0.2899, []), (0.3, ["x", "y"])])
def test_max_share_is_reached_but_not_passed(share: float, kept: list[str]) -> None:
    texts = ["x y"] * 29 + ["x"] + [f"w{i}" for i in range(70)]
    assert [word for word in vocabulary(texts, max_share=share) if word in "xy"] == kept


def test_what_cannot_be_fitted_is_refused() -> None:
    """One vocabulary may be empty, not all."""
    vectoriser = Vectoriser.fit(["tea", "cup", "pot"], [WORDS_2, WORDS_1, TextBlock(unit="word", n=3, unknown=0)])
    assert names_of(vectoriser) == ["⟨unknown 2 words⟩", "cup", "pot", "tea", "⟨unknown word⟩"]
    for texts, blocks, error, said in (
        (["tea", "cup", "pot"], [WORDS_2], InvalidData, "texts: got 'no n-gram within .*words. that some texts have and others"),
        ([], USUAL, InvalidData, "at least one document"),
        (["", "…"], USUAL, InvalidData, "n-gram"),
        (PRODUCTS, [], InvalidConfig, "at least one"),
        (PRODUCTS, [WORDS_1, TextBlock(unit="word", n=1, max_features=3)], InvalidConfig, "each unit and n once"),
        (PRODUCTS, [TextBlock(unit="word", n=1, unknown=MAX_FEATURES)], InvalidConfig, "at most 67108864"),
    ):
        with pytest.raises(error, match=said):
            Vectoriser.fit(texts, blocks)


def test_a_hash_of_two_ngrams_is_noticed() -> None:
    """There is no such pair to be had, so what is remembered of the first n-gram is changed behind the counter's back."""
    counts = text_module._Counts([WORDS_1, CHARS_3])
    counts.add(*text_module._codes(["kettle"]))
    counts.add(*text_module._codes(["kettle"]))
    counts._text[0] = ord("m")
    with pytest.raises(InvalidData, match="mettle"):
        counts.add(*text_module._codes(["kettle"]))


# -- what is unknown ------------------------------------------------------------------------------------------------------


def test_unknown_words_fall_into_bins_by_their_hash() -> None:
    rare = [f"rare{i}" for i in range(200)]
    texts = ["tea tea", "tea cup", "cup", *rare]
    vectoriser = Vectoriser.fit(texts, [TextBlock(unit="word", n=1, min_count=2, unknown=4)])
    assert names_of(vectoriser) == ["cup", "tea", *(f"⟨unknown word, bin {i}⟩" for i in range(4))]
    rows = vectoriser.transform(rare)
    assert_array_equal(np.diff(rows.indptr), 1)
    in_bin = np.bincount(rows.indices, minlength=6)[2:]
    assert in_bin.min() > 25
    assert_allclose(vectoriser.arrays()["idf"][2:], np.log(203 / (in_bin + 1)), rtol=1e-6)
    # The same word, known or not at training, is in the same bin; two words of one bin count as one twice.
    pair = [rare[i] for i in np.flatnonzero(rows.indices == rows.indices[0])[:2]]
    assert_array_equal(vectoriser.transform([" ".join(pair)]).indices, rows.indices[:1])


# -- names ----------------------------------------------------------------------------------------------------------------


def test_features_have_names_for_people() -> None:
    blocks = [
        TextBlock(unit="word", n=2, max_share=1, unknown=1),
        TextBlock(unit="char", n=3, max_share=1, unknown=1),
        TextBlock(unit="char", n=1, max_share=1, unknown=2),
    ]
    vectoriser = Vectoriser.fit(["Steel,  mug", "à 東京"], blocks)
    words, chars = 3, 3 + 1 + 5 + 3 + 3
    names = names_of(vectoriser)
    assert names[: words + 1] == ["a 東", "steel mug", "東 京", "⟨unknown 2 words⟩"]
    assert set(names[words + 1 : chars + 1]) >= {"_st…", "…tee…", "…el_", "_a_", "_東_", "⟨unknown 3 letters⟩"}
    assert names[chars + 1] == "_"
    assert names[-2:] == ["⟨unknown letter, bin 0⟩", "⟨unknown letter, bin 1⟩"]
    assert len(set(names)) == len(names)
    assert vectoriser.features_of(np.array([1], np.int32)) == ["steel mug"]
    for wrong in (-1, vectoriser.width):
        with pytest.raises(InvalidQuery, match="feature numbers"):
            vectoriser.features_of([wrong])


# -- arrays ---------------------------------------------------------------------------------------------------------------


def test_hashes_never_change() -> None:
    """Bundles hold them: with other ones every n-gram of an older bundle would be unknown."""
    blocks = [WORDS_2, TextBlock(unit="char", n=3, max_features=3), WORDS_1]
    vectoriser = Vectoriser.fit(["été tea", "x"], blocks)
    assert gram_texts(vectoriser) == ["ete tea", " et", " te", " x ", "ete", "tea", "x"]
    assert vectoriser.arrays()["hash"].tolist() == [
        0x0A063AE985F3B16E,
        0x0AAA6DFF33B9305C,
        0x8A60629A71161439,
        0x71BA35770FF5819A,
        0xA8F9CB12930389E7,
        0x1B000FC0F9FD22B7,
        0x2F368FD95CDA9529,
    ]  # fmt: skip


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an array is missing": (lambda a: a.pop("idf"), "idf"),
    "an array too many": (lambda a: a.update(more=a["idf"]), "more"),
    "another dtype": (lambda a: a.update(hash=a["hash"].astype(np.int64)), "hash is int64"),
    "two dimensions": (lambda a: a.update(idf=a["idf"][None]), "idf is float32"),
    "a size too few": (lambda a: a.update(vocabulary=a["vocabulary"][:2]), "vocabulary: .* expected 3 sizes"),
    "a negative size": (lambda a: a["vocabulary"].__iadd__([-99, 99, 0]), "vocabulary: "),
    "a huge size": (lambda a: a["vocabulary"].__iadd__([2**62, 2**62, 2**62]), "vocabulary: "),
    "sizes of another sum": (lambda a: a["vocabulary"].__iadd__([1, 0, 0]), "vocabulary: "),
    "an idf too few": (lambda a: a.update(idf=a["idf"][:-1]), "idf: .* one per feature"),
    "idf no number": (lambda a: a["idf"].__setitem__(3, np.nan), "idf: "),
    "idf infinite": (lambda a: a["idf"].__setitem__(3, np.inf), "idf: "),
    "idf negative": (lambda a: a["idf"].__setitem__(3, -0.5), "idf: "),
    "a hash twice": (lambda a: a["hash"].__setitem__(5, a["hash"][0]), "hash: .* of two n-grams"),
    "a hash too few": (lambda a: a.update(hash=a["hash"][:-1]), "vocabulary: "),
    "arrays of an earlier state": (lambda a: a.pop("counts_as"), "if an earlier state of this software wrote them, train the model again"),
    "an n-gram that counts as none": (lambda a: a["counts_as"].__setitem__(3, -1), "counts_as: .* from 0 to"),
    "an n-gram that counts as one too many": (lambda a: a["counts_as"].__setitem__(3, len(a["hash"])), "counts_as: .* from 0 to"),
    "a position too few": (lambda a: a.update(counts_as=a["counts_as"][:-1]), "counts_as: .* expected"),
    "counts as one that counts as another": (lambda a: a["counts_as"].__setitem__([0, 1], [1, 0]), "has another feature"),
    "counts as one of another block": (lambda a: a["counts_as"].__setitem__(0, len(a["hash"]) - 1), "of another block"),
    "an offset too few": (lambda a: a.update(text_from=a["text_from"][:-1]), "text_from: "),
    "offsets from 1": (lambda a: a["text_from"].__setitem__(0, 1), "text_from: "),
    "offsets that fall": (lambda a: a["text_from"].__setitem__(4, 10**12), "text_from: "),
    "an offset twice": (lambda a: a["text_from"].__setitem__(4, a["text_from"][3]), "text_from: "),
    "text cut off": (lambda a: a.update(text=a["text"][:-1]), "text_from: .* rising from 0 to"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_arrays_are_refused(damage: str) -> None:
    arrays = {name: array.copy() for name, array in Vectoriser.fit(PRODUCTS, USUAL).arrays().items()}
    do, message = DAMAGES[damage]
    do(arrays)
    with pytest.raises(BundleCorrupt, match=message):
        Vectoriser.from_arrays(USUAL, arrays)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([WORDS_1, WORDS_1, CHARS_3], "at least one, and each unit and n once"),
        ([], "at least one"),
        ([TextBlock(unit="word", n=1, max_features=2), WORDS_2, CHARS_3], "expected at most 2"),
        ([TextBlock(unit="word", n=1, unknown=2), WORDS_2, CHARS_3], "one per feature"),
    ],
)
def test_arrays_of_other_blocks_are_refused(blocks: list[TextBlock], said: str) -> None:
    with pytest.raises(BundleCorrupt, match=said):
        Vectoriser.from_arrays(blocks, Vectoriser.fit(PRODUCTS, USUAL).arrays())


def test_text_that_is_no_utf8_is_found_when_it_is_shown() -> None:
    arrays = {name: array.copy() for name, array in Vectoriser.fit(PRODUCTS, USUAL).arrays().items()}
    arrays["text"][0] = 0xFF
    vectoriser = Vectoriser.from_arrays(USUAL, arrays)
    assert len(vectoriser.transform(["kettle"]).indices) > 0
    with pytest.raises(BundleCorrupt, match="feature 0 is not UTF-8"):
        vectoriser.features_of([0])


# -- histories, vectors and features; errors name the field, in plain words -----------------------------------------------


IDS = ["apple", "pear", "né", "梨"]


@given(st.lists(st.lists(st.integers(-1, 9), max_size=9), max_size=5), st.integers(1, 6))
def test_a_history_keeps_its_last_known_items_at_the_right(histories: list[list[int]], length: int) -> None:
    kind = HistoryKind(length=length)
    batch = pad_histories(kind, [np.array(history, np.int64) for history in histories])
    assert batch.kind == kind
    expected = []
    for history in histories:
        last = [item for item in history if item >= 0][-length:]
        expected.append([PADDING] * (length - len(last)) + last)
    assert batch.array.tolist() == expected
    assert batch.array.shape == (len(histories), length)
    assert batch.array.dtype == np.int64
    assert len(batch) == len(histories)


@given(st.lists(st.lists(st.sampled_from([*IDS, "unknown", ""]), max_size=6), max_size=4))
def test_unknown_ids_are_skipped_and_reported_as_minus_one(histories: list[list[str]]) -> None:
    table = ItemTable.build(pa.table({"id": IDS}))
    batch, rows = encode_histories(HistoryKind(length=3), table, histories)
    assert [row.tolist() for row in rows] == [[IDS.index(name) if name in IDS else -1 for name in history] for history in histories]
    assert_array_equal(batch.array, pad_histories(HistoryKind(length=3), rows).array)


def test_vectors_become_32_bit_rows_up_to_the_largest_numbers() -> None:
    largest = float(np.finfo(np.float32).max)
    batch = encode_vectors(VectorKind(width=2), [[1, 2.5], [-3.0, 1e-3], [largest, -largest]])
    assert batch.array.dtype == np.float32
    assert_array_equal(batch.array, np.array([[1, 2.5], [-3, 1e-3], [largest, -largest]], np.float32))
    assert batch.take(np.array([2, 0])).array[:, 0].tolist() == [largest, 1]
    assert encode_vectors(VectorKind(width=2), []).array.shape == (0, 2)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1.0], r"queries\[1\].vector: got '1 numbers', expected 2 numbers"),
        ([1.0, 2.0, 3.0], r"queries\[1\].vector: got '3 numbers', expected 2 numbers"),
        ([0.0, float("nan")], r"queries\[1\].vector: got nan, expected finite 32-bit numbers"),
        ([float("-inf"), 0.0], r"queries\[1\].vector: got -inf, expected finite"),
        ([0.0, 1e39], r"queries\[1\].vector: got 1e\+39, expected finite"),
        ([0.0, -1e39], r"queries\[1\].vector: got -1e\+39, expected finite"),
    ],
)
def test_a_bad_vector_is_named_with_its_place_and_value(vector: list[float], message: str) -> None:
    with pytest.raises(InvalidQuery, match=message) as caught:
        encode_vectors(VectorKind(width=2), [[0.0, 0.0], vector])
    assert caught.value.field == "queries[1].vector"


@pytest.mark.parametrize(
    ("kind", "array", "expected"),
    [
        (HistoryKind(length=3), np.zeros((2, 4), np.int64), r"got 'int64\[2, 4\]', expected int64\[B, 3\]"),
        (HistoryKind(length=3), np.zeros((2, 3), np.int32), r"got 'int32\[2, 3\]', expected int64\[B, 3\]"),
        (HistoryKind(length=3), np.zeros(3, np.int64), r"got 'int64\[3\]', expected int64\[B, 3\]"),
        (VectorKind(width=3), np.zeros((2, 3)), r"got 'float64\[2, 3\]', expected float32\[B, 3\]"),
        (VectorKind(width=3), np.zeros((2, 2), np.float32), r"got 'float32\[2, 2\]', expected float32\[B, 3\]"),
    ],
)
def test_an_array_of_another_form_is_no_batch(kind: HistoryKind | VectorKind, array: np.ndarray, expected: str) -> None:
    with pytest.raises(InvalidQuery, match=f"queries: {expected}"):
        QueryBatch(kind, array)


def test_features_are_checked_and_sorted() -> None:
    kind = FeaturesKind(width=5)
    rows = encode_features(kind, [([3, 0], [1.0, 2.0]), ([], [])]).features
    assert (rows.indptr.tolist(), rows.indices.tolist(), rows.values.tolist()) == ([0, 2, 2], [0, 3], [2.0, 1.0])
    unit = encode_features(FeaturesKind(width=5, unit=True), [([3, 0], [3.0, 4.0]), ([], [])]).features
    assert_array_equal(unit.values, np.array([0.8, 0.6], np.float32))
    for indices, values, message in (
        ([1, 2], [1.0], r"queries\[0\].features.values: got '1 numbers', expected 2, one for each index"),
        ([1, 5], [1.0, 1.0], r"queries\[0\].features.indices: got 5, expected feature numbers from 0 to 4"),
        ([-1, 2], [1.0, 1.0], r"queries\[0\].features.indices: got -1, expected feature numbers from 0 to 4"),
        ([1, 10**30], [1.0, 1.0], r"queries\[0\].features.indices: got 1000000000000000000000000000000, expected feature numbers from 0"),
        ([-(10**30), 2], [1.0, 1.0], r"queries\[0\].features.indices: got -1000000000000000000000000000000, expected feature numbers"),
        ([2, 2], [1.0, 1.0], r"queries\[0\].features.indices: got 2, expected each feature number once"),
        ([1, 2], [1.0, 1e39], r"queries\[0\].features.values: got 1e\+39, expected finite 32-bit numbers"),
    ):
        with pytest.raises(InvalidQuery, match=message):
            encode_features(kind, [(indices, values)])


# -- what pydantic refused, in plain words, which go after “expected” ---------------------------------------------------


def _refuse(_: str) -> str:
    raise ValueError("expected a colour")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, "many", "a valid integer"),
        (int, 1.5, "a valid integer"),
        (int, "9" * 5000, "an integer of fewer digits"),
        (bool, "perhaps", "true or false"),
        (bool, [], "true or false"),
        (Path, 5, "a path"),
        (Annotated[int, Field(ge=1)], 0, "greater than or equal to 1"),
        (Annotated[list[int], Field(min_length=1)], [], "at least 1 value"),
        (Annotated[dict[str, int], Field(max_length=0)], {"a": 1}, "at most 0 values"),
        (Annotated[str, Field(min_length=2)], "a", "at least 2 characters"),
        (Annotated[str, Field(max_length=1)], "ab", "at most 1 character"),
        (Annotated[str, Field(pattern="^a+$")], "b", "text of the form ^a+$"),
        (Annotated[str, AfterValidator(_refuse)], "a", "a colour"),
    ],
)
def test_it_is_said_in_plain_words(kind: Any, value: object, expected: str) -> None:
    with pytest.raises(ValidationError) as error:
        TypeAdapter(kind).validate_python(value)
    assert expectation(error.value.errors()[0]) == expected


# -- the example --------------------------------------------------------------------------------------------------------


def test_the_example_of_the_library_finds_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert doctest.testmod(espalier, raise_on_error=True) == (0, 4)


def test_kinds_and_blocks_have_limits() -> None:
    """Of features there are at most so many that an array of them fits into memory."""
    block = TextBlock(unit="word", n=1, unknown=MAX_FEATURES)
    assert FeaturesKind(width=MAX_FEATURES).width == TextKind(width=MAX_FEATURES, blocks=(block,)).width == 67_108_864
    for kind in ({"kind": "features"}, {"kind": "text", "blocks": [block]}):
        with pytest.raises(ValidationError, match="less than or equal to 67108864"):
            TypeAdapter(QueryKind).validate_python(kind | {"width": MAX_FEATURES + 1})
    wrong: list[dict[str, Any]] = [{"n": 0}, {"n": 9}, {"unit": "line"}, {"max_share": 0}, {"max_share": 1.1}, {"min_count": 0}]
    for limits in (*wrong, {"unknown": -1}, {"nn": 2}, {"unknown": MAX_FEATURES + 1}):
        with pytest.raises(ValidationError, match=next(iter(limits))):
            TextBlock.model_validate({"unit": "word", "n": 2, **limits})


def test_writable_read_only_and_unaligned_arrays_compile_one_function() -> None:
    arrays = Vectoriser.fit(PRODUCTS, USUAL).arrays()
    unaligned = {name: np.frombuffer(b"\0" + array.tobytes(), array.dtype, offset=1) for name, array in arrays.items()}
    for some in (arrays, {name: array.copy() for name, array in arrays.items()}, unaligned):
        Vectoriser.from_arrays(USUAL, some).transform(["kettle", ""])
        Vectoriser.from_arrays(USUAL, some).transform([])
    assert len(ngrams.weigh.signatures) == 1
    assert len(ngrams.fill_table.signatures) == 1


def test_a_word_that_all_texts_have_is_not_misspelt() -> None:
    """The vocabularies lack it and its letters, as `max_share` says."""
    blocks = (TextBlock(unit="word", n=1), TextBlock(unit="char", n=3))
    vectoriser = Vectoriser.fit([f"acme {colour} {thing}" for colour in ("red", "blue", "green") for thing in ("lamp", "chair")], blocks)
    rows = vectoriser.transform(["acme red lamp", "red lamp", "greem lamp", "lamp"])
    assert_array_equal(rows.row(0)[0], rows.row(1)[0])
    assert_array_equal(rows.row(0)[1], rows.row(1)[1])
    lamp = rows.row(3)[0][0]
    assert rows.row(2)[0][0] == lamp
    assert rows.row(2)[1][0] < 0.8 * rows.row(3)[1][0]


def test_a_word_left_out_though_its_letters_are_not_counts_as_little_as_they_do() -> None:
    """Words that more than half of the texts have are left out, and no letters."""
    blocks = (TextBlock(unit="word", n=1, max_share=0.5), TextBlock(unit="char", n=3, max_share=1.0))
    texts = [f"the {word}" for word in ("lamp", "chair", "table", "spoon", "ladder", "bucket", "kettle")] + ["lamp"]
    rows = Vectoriser.fit(texts, blocks).transform(["the lamp", "lamp"])
    lamp = rows.row(1)[0][0]
    assert rows.row(0)[0][0] == lamp
    assert rows.row(0)[1][0] > 0.95 * rows.row(1)[1][0]
