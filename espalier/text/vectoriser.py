"""The n-gram TF-IDF vectoriser: texts to sparse rows, the same in training and serving.

Word and character n-grams are counted, weighted by inverse document frequency and normalised as in PECOS (pecos/core/utils/tfidf.hpp).
With N documents, df(g) that contain the n-gram g, and tf(g) occurrences of g in a text:

    idf(g) = max(ln(N / (df(g) + 1)), 0)        x_block = tf · idf / ‖tf · idf‖        x = [x_block, …] / ‖[x_block, …]‖

A word of a query that the vocabulary lacks may be misspelt. It counts in the length of the single words' block, with the largest idf of its
characters' n-grams, so that the words beside it do not weigh as if they were the whole query; and its characters count twice.

Documents have other rows than queries, as in BM25: a second occurrence adds less than the first, and idf has a small exponent, since the
query's weights contain it already. Pairs of words and parts of words count half, since they repeat what words say:

    d = w · tf / (tf + SATURATION) · idf^½          w = 1 for single words, otherwise ½; not normalised

In a block with `endings`, words that differ only in frequent endings (`endings.py`) have one feature, that of the most frequent one.

Knows what a word is and how n-grams get feature numbers. Does not know where its arrays are stored, how rows are used, languages or stop
words. Letters are those of this Python's Unicode version; newer versions add letters and change none.

Legend: B texts, F features (`width`), V n-grams of all vocabularies.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.arrays import Array, Int32, Int64, read_only
from espalier.entry_lists import with_room
from espalier.errors import BundleCorrupt, InvalidConfig, InvalidData, InvalidQuery
from espalier.stored_arrays import Dtypes, check_arrays
from espalier.text.blocks import TextBlock
from espalier.text.endings import same_words
from espalier.text.ngrams import ALONE, CHARS, LETTER, SEPARATOR, WORDS, count_ngrams, fill_slots, fill_table, weigh
from espalier.text.sparse_rows import MAX_FEATURES, SparseRows, concatenated

CHUNK = 1 << 18
"""Code points that are processed at a time (at least one text), which bounds the memory of large batches."""
SATURATION = 1.2
"""k1 of BM25."""
LARGEST_IDF = 44.0
"""Above ln 2⁶³, the idf of any corpus."""
_ACCENTS = re.compile(
    "[\u0300-\u036f"
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew
    "\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u08ca-\u08e1\u08e3-\u08ff]+"  # Arabic
)
"""Marks that are mostly left out in writing. Vowel signs of Hindi, Thai and others are not: without them, words become other words."""
_LETTERS = {"ı": "i", "ł": "l", "ø": "o", "đ": "d", "ð": "d", "æ": "ae", "œ": "oe", "þ": "th"}
"""Letters that Unicode does not decompose, as people write them without their strokes."""
_LETTER = re.compile(f"[{''.join(_LETTERS)}]")
_ASCII_WORD = re.compile("[0-9a-z]+")
"""As `_word`, in a fifth of the time."""
# Chinese and Japanese are written without spaces: each of these characters is a word. Korean has spaces.
ALONE_RANGES = (
    (0x3005, 0x3007), (0x3021, 0x3029), (0x3031, 0x3035), (0x3038, 0x303C), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x1AFF0, 0x1B16F), (0x20000, 0x3FFFF),
)  # fmt: skip
_VARIATIONS = ((0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
_DTYPES: Dtypes = {
    "vocabulary": np.int64, "hash": np.uint64, "counts_as": np.int32, "idf": np.float32, "text_from": np.int64, "text": np.uint8,
}  # fmt: skip


def normalise(text: str) -> str:
    """Lower case without accents, ligatures or wide letters ("Café" = "cafe", "ﬁ" = "fi"), so that equal words compare equal.

    NFKD without accents and Arabic and Hebrew points, NFC, case folding, "ø" = "o", NFC. Marks that are part of a letter, such as dakuten
    and vowel signs, stay.
    """
    if text.isascii():
        return text.lower()
    plain = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    folded = unicodedata.normalize("NFC", plain).casefold()
    return unicodedata.normalize("NFC", _LETTER.sub(lambda letter: _LETTERS[letter[0]], folded))


def words_of(text: str) -> list[str]:
    """The words, normalised, as the compiled code finds them; each Chinese or Japanese character is one."""
    plain = normalise(text)
    return (_ASCII_WORD if plain.isascii() else _word()).findall(plain)


class Vectoriser:
    """Turns texts into rows of TF-IDF features. Calls share no state: any number of threads may use it.

    blocks  the kinds of n-grams; features are numbered block by block: the vocabulary by descending document frequency (ties by code
            points), then the features for unknown n-grams
    arrays  vocabulary int64[blocks]  n-grams in each block's vocabulary, V together
            hash uint64[V]            all different
            counts_as int32[V]        position of the n-gram of its block whose feature it has, usually its own. Features of the others,
                                      with an idf of 0, are in no row
            idf float32[F]
            text_from int64[V + 1]    where each n-gram's text begins in `text`, uint8[bytes], UTF-8
    Raises BundleCorrupt if two hashes are the same. `from_arrays` makes all other checks.
    """

    def __init__(self, blocks: Sequence[TextBlock], arrays: Mapping[str, Array]) -> None:
        self.blocks = tuple(blocks)
        # All read-only, as mapped files are: numba would compile again for writable arrays.
        aligned = read_only(*(np.require(arrays[name], requirements=["C", "A"]) for name in _DTYPES))
        self._arrays = dict(zip(_DTYPES, aligned, strict=True))
        self._layout = _layout(self.blocks, self._arrays["vocabulary"])
        self.width = _width(self.blocks, self._arrays["vocabulary"])
        self._room = sum(_ngrams_per_code(block) for block in self.blocks)
        hashes = self._arrays["hash"]
        table = np.zeros((_power_of_two(2 * len(hashes)), 2), np.uint64)
        duplicate = fill_table(hashes, self._arrays["counts_as"], self._layout, table)
        if duplicate >= 0:
            raise BundleCorrupt(f"hash: {int(hashes[duplicate])} of two n-grams, expected different hashes")
        (self._table,) = read_only(table)

    @staticmethod
    def from_arrays(blocks: Sequence[TextBlock], arrays: Mapping[str, Array]) -> Vectoriser:
        """The vectoriser with these arrays, as `arrays()` returns them. Raises BundleCorrupt if they do not fit each other or the blocks.

        `features_of` checks whether `text` is UTF-8.
        """
        check_arrays(arrays, _DTYPES)
        sizes, hashes, counts_as, idf, text_from, text = (arrays[name] for name in _DTYPES)
        if not blocks or len({(block.unit, block.n) for block in blocks}) < len(blocks):
            raise BundleCorrupt(f"blocks: {[(block.unit, block.n) for block in blocks]}, expected at least one, and each unit and n once")
        if len(sizes) != len(blocks) or (sizes < 0).any() or (sizes > len(hashes)).any() or sizes.sum() != len(hashes):
            raise BundleCorrupt(f"vocabulary: {sizes.tolist()[:8]}, expected {len(blocks)} sizes, {len(hashes)} together")
        for block, size in zip(blocks, sizes.tolist(), strict=True):
            if 0 < block.max_features < size:
                raise BundleCorrupt(f"vocabulary: {size} n-grams of unit {block.unit}, n {block.n}, expected at most {block.max_features}")
        block_of = np.repeat(np.arange(len(blocks)), sizes)
        if len(counts_as) != len(hashes) or ((counts_as < 0) | (counts_as >= len(hashes))).any():
            raise BundleCorrupt(f"counts_as: {len(counts_as)} positions, expected {len(hashes)}, from 0 to {len(hashes) - 1}")
        if (counts_as[counts_as] != counts_as).any() or (block_of[counts_as] != block_of).any():
            raise BundleCorrupt("counts_as: an n-gram counts as one that has another feature, or is of another block")
        width = _width(blocks, sizes)
        if len(idf) != width or width > MAX_FEATURES:
            raise BundleCorrupt(f"idf: {len(idf)} numbers, expected {width}, one per feature")
        if not ((idf >= 0) & (idf <= LARGEST_IDF)).all():  # NaN fails too
            raise BundleCorrupt(f"idf: from {idf.min()} to {idf.max()}, expected numbers from 0 to {LARGEST_IDF:g}")
        if len(text_from) != len(hashes) + 1 or text_from[0] != 0 or text_from[-1] != len(text) or (text_from[1:] <= text_from[:-1]).any():
            raise BundleCorrupt(f"text_from: {len(text_from)} offsets, expected {len(hashes) + 1}, rising from 0 to {len(text)}")
        return Vectoriser(blocks, arrays)

    @staticmethod
    def fit(texts: Sequence[str], blocks: Sequence[TextBlock]) -> Vectoriser:
        """The vocabularies of some documents. Memory grows with the number of distinct n-grams, not with the length of the texts.

        Raises InvalidConfig if there is no block, or two have the same unit and n; InvalidData if there is no text, no vocabulary has an
        n-gram, or two n-grams have the same hash.
        """
        kinds = [(block.unit, block.n) for block in blocks]
        if not blocks or len(set(kinds)) < len(kinds):
            raise InvalidConfig("blocks", kinds, "at least one, and each unit and n once")
        if len(texts) == 0:
            raise InvalidData("texts", "none", "at least one document")
        counts = _Counts(blocks)
        for codes, text_from in _chunks(texts):
            counts.add(codes, text_from)
        vocabularies = [counts.vocabulary(k, len(texts)) for k in range(len(blocks))]
        if sum(map(len, vocabularies)) == 0:
            found, expected = "no n-gram within min_count and max_share", "n-grams (such as words) that some texts have and others have not"
            raise InvalidData("texts", found, expected)
        sizes = np.array([len(entries) for entries in vocabularies], np.int64)
        width = _width(blocks, sizes)
        if width > MAX_FEATURES:
            raise InvalidConfig("blocks", f"{width} features", f"at most {MAX_FEATURES}; see max_features and unknown")
        positions = [counts.same(k, entries) for k, entries in enumerate(vocabularies)]
        counts_as = np.concatenate([first + same for first, same in zip(accumulate(sizes.tolist(), initial=0), positions, strict=False)])
        arrays: dict[str, Array] = {"vocabulary": sizes, "counts_as": counts_as.astype(np.int32), "idf": np.ones(width, np.float32)}
        arrays |= counts.arrays(np.concatenate(vocabularies))
        # Some features stand for many n-grams; a second pass counts their documents.
        counter = Vectoriser(blocks, arrays)
        documents = np.zeros(width, np.int64)
        for codes, text_from in _chunks(texts):
            np.add.at(documents, counter._rows(codes, text_from).indices, 1)
        idf = np.where(documents > 0, np.maximum(np.log(len(texts) / (documents + 1)), 0), 0)
        return Vectoriser(blocks, arrays | {"idf": idf.astype(np.float32)})

    def arrays(self) -> dict[str, Array]:
        """The arrays that `from_arrays` takes; see the class."""
        return dict(self._arrays)

    @property
    def words(self) -> range:
        """The features of the vocabulary's single words; empty without such a block."""
        for unit, n, first, size, _ in self._layout.tolist():
            if unit == WORDS and n == 1:
                return range(first, first + size)
        return range(0)

    def block_of(self, features: int | Int32) -> Int64:
        """The position of each feature's block."""
        return np.asarray(np.searchsorted(self._layout[:, 2], features, "right") - 1)

    def transform(self, texts: Sequence[str]) -> SparseRows:
        """A row of length 1 per text, empty for a text without features. Any text is valid, and a row depends on its text alone."""
        return self._transformed(texts, 0.0)

    def documents(self, texts: Sequence[str]) -> SparseRows:
        """A document row d per text; see the module."""
        return self._transformed(texts, SATURATION)

    def _transformed(self, texts: Sequence[str], saturation: float) -> SparseRows:
        batches = [self._rows(codes, text_from, saturation) for codes, text_from in _chunks(texts)]
        return batches[0] if len(batches) == 1 else concatenated(batches)

    def features_of(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> list[str]:
        """Readable names: "stainless steel", "_st…", "…ain…", "…el_", "⟨unknown 2 words⟩".

        Raises InvalidQuery if there is no such feature, BundleCorrupt if a text is not UTF-8.
        """
        names = []
        text_from, text = self._arrays["text_from"], self._arrays["text"]
        vocabulary_from = [0, *accumulate(self._arrays["vocabulary"].tolist())]
        for feature in map(int, indices):
            if not 0 <= feature < self.width:
                raise InvalidQuery("indices", feature, f"feature numbers from 0 to {self.width - 1}")
            k = int(self.block_of(feature))
            block, number = self.blocks[k], feature - int(self._layout[k, 2])
            bin_number = number - int(self._layout[k, 3])
            if bin_number >= 0:
                description = (
                    ("" if block.n == 1 else f"{block.n} ") + ("word" if block.unit == "word" else "letter") + ("s" if block.n > 1 else "")
                )
                names.append(f"⟨unknown {description}{f', bin {bin_number}' if block.unknown > 1 else ''}⟩")
                continue
            v = vocabulary_from[k] + number
            try:
                name = text[text_from[v] : text_from[v + 1]].tobytes().decode()
            except UnicodeDecodeError as error:
                raise BundleCorrupt(f"text: feature {feature} is not UTF-8 ({error.reason})") from None
            names.append(name if block.unit == "word" else _affix(name))
        return names

    def _rows(self, codes: Array, text_from: Array, saturation: float = 0.0) -> SparseRows:
        room = self._room * len(codes)
        indptr, indices, values = np.empty(len(text_from), np.int64), np.empty(room, np.int32), np.empty(room, np.float32)
        used = weigh(codes, text_from, _classes(), self._layout, self._table, self._arrays["idf"], saturation, (indptr, indices, values))
        return SparseRows(indptr, indices[:used].copy(), values[:used].copy(), self.width)


class _Counts:
    """Every n-gram of the texts so far, in order of appearance: hash, documents, text."""

    def __init__(self, blocks: Sequence[TextBlock]) -> None:
        self._blocks = blocks
        self._layout = _layout(blocks, np.zeros(len(blocks), np.int64))
        self._size = self._documents = 0
        self._hash = np.empty(0, np.uint64)
        self._block = np.empty(0, np.uint8)
        self.count, self._last = np.empty(0, np.int32), np.empty(0, np.int32)
        self._text_from, self._text = np.zeros(1, np.int64), np.empty(0, np.uint8)
        self._slots = np.full(1, -1, np.int32)

    def add(self, codes: Array, text_from: Array) -> None:
        """Count each document's n-grams once. Raises InvalidData where two n-grams have the same hash."""
        most = self._size + len(codes) * sum(_ngrams_per_code(block) for block in self._blocks)
        self._hash, self._block, self._last = (with_room(array, most) for array in (self._hash, self._block, self._last))
        self.count, self._text_from = with_room(self.count, most), with_room(self._text_from, most + 1)
        # n words and the blanks between them, up to 4 bytes per code point.
        bytes_per_code = sum(5 * block.n * _ngrams_per_code(block) for block in self._blocks)
        self._text = with_room(self._text, int(self._text_from[self._size]) + len(codes) * bytes_per_code)
        if len(self._slots) < 2 * most:
            self._slots = np.full(_power_of_two(3 * most), -1, np.int32)
            fill_slots(self._hash, self._size, self._slots)
        entries = (self._hash, self._block, self.count, self._last, self._text_from, self._text)
        size = count_ngrams(codes, text_from, _classes(), self._layout, self._documents, self._size, self._slots, entries)
        if size < 0:
            text = self._text[self._text_from[-1 - size] : self._text_from[-size]].tobytes().decode()
            raise InvalidData("texts", text, "n-grams with different hashes; another one has the hash of this one")
        self._size = size
        self._documents += len(text_from) - 1

    def vocabulary(self, k: int, documents: int) -> Array:
        """The entries of block k's vocabulary, in the order of their features."""
        block = self._blocks[k]
        entries = np.flatnonzero(self._block[: self._size] == k)
        counts = self.count[entries]
        # Divide, do not multiply: 29 / 100 == 0.29, but 0.29 · 100 < 29 in floating point.
        entries = entries[(counts >= block.min_count) & (counts / documents <= block.max_share)]
        if 0 < block.max_features < len(entries):  # sort only texts that may be kept
            counts = self.count[entries]
            entries = entries[counts >= np.partition(counts, -block.max_features)[-block.max_features]]
        table = pa.table({"count": self.count[entries], "text": self._texts(entries)})
        order: Array = np.asarray(pc.sort_indices(table, [("count", "descending"), ("text", "ascending")]))
        return entries[order][: block.max_features or None]

    def same(self, k: int, entries: Array) -> Array:
        """The position in block k's vocabulary that each of its entries counts as."""
        if not self._blocks[k].endings:
            return np.arange(len(entries))
        return same_words(self._texts(entries).cast(pa.large_string()).to_pylist())

    def arrays(self, entries: Array) -> dict[str, Array]:
        """The arrays of a Vectoriser that describe its n-grams."""
        texts = self._texts(entries)
        _, ends, text = texts.buffers()
        text_from = np.frombuffer(ends, np.int64, len(texts) + 1)
        return {"hash": self._hash[entries], "text_from": text_from, "text": np.frombuffer(text, np.uint8, text_from[-1])}

    def _texts(self, entries: Array) -> pa.Array:
        """The texts of some entries, as bytes."""
        buffers = [None, pa.py_buffer(self._text_from), pa.py_buffer(self._text)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), self._size, buffers).take(pa.array(entries))


@cache
def _classes() -> NDArray[np.uint8]:
    """uint8[0x110000]: SEPARATOR, LETTER or ALONE for each code point."""
    classes = np.array([c.isalnum() or unicodedata.category(c) in ("Mn", "Mc") for c in map(chr, range(0x110000))], np.uint8)
    for first, last in ALONE_RANGES:
        for code in range(first, last + 1):
            if chr(code).isalnum():
                classes[code] = ALONE
    for first, last in _VARIATIONS:  # otherwise the invisible part of an emoji would be a word
        classes[first : last + 1] = SEPARATOR
    return read_only(classes)[0]


@cache
def _word() -> re.Pattern[str]:
    """A word, by the classes of its characters. Marks that are letters are none to `re`."""
    alone = "".join(f"{chr(first)}-{chr(last)}" for first, last in ALONE_RANGES)
    marks = "".join(c for c in map(chr, np.flatnonzero(_classes() == LETTER)) if not c.isalnum())
    return re.compile(rf"(?!\W)[{alone}]|(?:[^\W_{alone}]+|[{marks}]+)+")


def _chunks(texts: Sequence[str]) -> Iterator[tuple[Array, Array]]:
    """Texts in chunks, at least one chunk: the code points of all texts (uint32, read-only), and where each text begins (int64)."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        plain = normalise(text)
        if chunk and size + len(plain) > CHUNK:
            yield _codes(chunk)
            chunk, size = [], 0
        chunk.append(plain)
        size += len(plain)
    yield _codes(chunk)


def _codes(texts: list[str]) -> tuple[Array, Array]:
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    return codes, np.array([0, *accumulate(map(len, texts))], np.int64)


def _layout(blocks: Sequence[TextBlock], sizes: Array) -> Array:
    """int64[blocks, 5]: unit, n, first feature, n-grams of the vocabulary, features for unknown n-grams."""
    firsts = [0, *accumulate(size + block.unknown for block, size in zip(blocks, sizes.tolist(), strict=True))]
    rows = zip(blocks, firsts, sizes.tolist(), strict=False)
    units = [(CHARS if block.unit == "char" else WORDS, block.n, first, size, block.unknown) for block, first, size in rows]
    return read_only(np.array(units, np.int64))[0]


def _width(blocks: Sequence[TextBlock], sizes: Array) -> int:
    return int(sizes.sum()) + sum(block.unknown for block in blocks)


def _ngrams_per_code(block: TextBlock) -> int:
    """Most n-grams per code point of a text. With its blanks, a word of one letter has three characters."""
    return max(1, 4 - block.n) if block.unit == "char" else 1


def _affix(gram: str) -> str:
    """A readable character n-gram, distinct from any word."""
    begin, end = gram.startswith(" "), gram.endswith(" ")
    return ("_" if begin else "…") + gram.strip(" ") + ("_" if end and len(gram) > 1 else "" if end else "…")


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
