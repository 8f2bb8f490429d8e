"""The compiled half of the text vectoriser: words, n-grams and their hashes, vocabularies as hash tables, one row per text.

Knows code points and numbers. Does not know how blocks are configured or where a vocabulary is stored: see `vectoriser.py`.

Legend: B texts, V n-grams.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array
from espalier.compiled_code import compiled

SEPARATOR, LETTER, ALONE = 0, 1, 2
"""Classes of characters: between words; part of a word; a word by itself."""
WORDS, CHARS = 0, 1
"""The units of n-grams."""
PART_WEIGHT = 0.5
"""How much several words in a row, and characters of a word, weigh in a document; single words weigh 1."""
UNKNOWN_TIMES = 2
"""How often the characters of a word that the vocabulary lacks count in a query: nothing else says what the word may mean."""
# Hashes are stored with models, so none of these numbers may ever change.
SEED = np.uint64(0xE5BA_11E2_7F1D_F001)
GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
MIX_1, MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
BLANK = 32


@compiled()
def _fold(state: Any, number: Any) -> Any:
    """Add a number to a hash. Both are uint64: with a signed one numba would compute in floating point."""
    state = (state ^ number) * GOLDEN
    return state ^ (state >> np.uint64(32))


@compiled()
def _mixed(state: Any) -> Any:
    """A hash whose every bit depends on every bit of the state (SplitMix64, Steele et al. 2014)."""
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))


class Words(NamedTuple):
    """The words of one text: where each begins and ends among the code points, int64, and its hash, uint64."""

    begin: Array
    end: Array
    hash: Array


class Grams(NamedTuple):
    """The n-grams of one text and block: hash uint64; first word, and first character in that padded word, int64."""

    hash: Array
    word: Array
    first_char: Array


class Entries(NamedTuple):
    """Every n-gram so far: hash uint64, block uint8, documents int32, the last document int32, its UTF-8 text by offsets int64."""

    hash: Array
    block: Array
    documents: Array
    last: Array
    text_from: Array
    text: Array


@compiled()
def _room(text_from: Array) -> tuple[Words, Grams]:
    """Arrays for the words and n-grams of the longest text: a word of one letter has three characters with its blanks."""
    longest = 0
    for t in range(len(text_from) - 1):
        longest = max(longest, text_from[t + 1] - text_from[t])
    words = Words(np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.uint64))
    return words, Grams(np.empty(3 * longest, np.uint64), np.empty(3 * longest, np.int64), np.empty(3 * longest, np.int64))


@compiled()
def _find_words(codes: Array, begin: int, end: int, classes: Array, words: Words) -> int:
    """Write the words of codes[begin:end]. Returns their number."""
    count, i = 0, begin
    while i < end:
        kind = classes[codes[i]]
        if kind == SEPARATOR:
            i += 1
            continue
        words.begin[count] = i
        state = _fold(SEED, np.uint64(codes[i]))
        i += 1
        while kind == LETTER and i < end and classes[codes[i]] == LETTER:
            state = _fold(state, np.uint64(codes[i]))
            i += 1
        words.end[count], words.hash[count] = i, state
        count += 1
    return count


@compiled()
def _padded(codes: Array, begin: int, end: int, position: int) -> Any:
    """The character at `position` of the word codes[begin:end], which is padded with a blank on each side."""
    return np.uint32(BLANK) if position == 0 or position > end - begin else codes[begin + position - 1]


@compiled()
def _find_ngrams(codes: Array, count: int, words: Words, unit: int, n: int, grams: Grams) -> int:
    """Write the n-grams of a text's `count` words. Returns their number."""
    ngram_count = 0
    start = _fold(SEED, np.uint64(unit * 16 + n))
    if unit == WORDS:
        for w in range(count - n + 1):
            state = start
            for i in range(w, w + n):
                state = _fold(state, words.hash[i])
            grams.hash[ngram_count], grams.word[ngram_count], grams.first_char[ngram_count] = _mixed(state), w, 0
            ngram_count += 1
    else:
        for w in range(count):
            begin, end = words.begin[w], words.end[w]
            length = end - begin + 2
            for first in range(max(1, length - n + 1)):
                state = start
                for i in range(first, min(first + n, length)):
                    state = _fold(state, np.uint64(_padded(codes, begin, end, i)))
                grams.hash[ngram_count], grams.word[ngram_count], grams.first_char[ngram_count] = _mixed(state), w, first
                ngram_count += 1
    return ngram_count


# -- compiled: weighing ---------------------------------------------------------------------------------------------------


@compiled()
def fill_table(hashes: Array, counts_as: Array, layout: Array, table: Array) -> int:
    """Fill table uint64[2^k, 2]: a hash and its feature number + 1; 0 in empty slots. Returns −1, or the position of a duplicate hash."""
    mask = np.uint64(len(table) - 1)
    v = 0
    for k in range(len(layout)):
        first_feature = layout[k, 2] - v  # of the n-gram at position 0, if all were of this block
        for _ in range(layout[k, 3]):
            slot = hashes[v] & mask
            while table[slot, 1] != 0:
                if table[slot, 0] == hashes[v]:
                    return v
                slot = (slot + np.uint64(1)) & mask
            table[slot, 0] = hashes[v]
            table[slot, 1] = first_feature + counts_as[v] + 1
            v += 1
    return -1


@compiled()
def weigh(
    codes: Array,
    text_from: Array,
    classes: Array,
    layout: Array,
    table: Array,
    idf: Array,
    saturation: float,
    rows: tuple[Array, Array, Array],
) -> int:
    """Write the rows of some texts: indptr, indices, values. Returns the number of entries.

    saturation  0: rows of queries, of length 1; above 0: rows of documents, w · tf / (tf + saturation) · idf^½, not normalised
    """
    indptr, indices, values = rows
    words, grams = _room(text_from)
    features = np.empty(UNKNOWN_TIMES * len(grams.hash), np.int32)
    times_W = np.ones(len(words.hash), np.int64)
    used = 0
    indptr[0] = 0
    for t in range(len(text_from) - 1):
        begin, squares = used, 0.0
        count = _find_words(codes, text_from[t], text_from[t + 1], classes, words)
        unknown_squares = _find_unknown(codes, count, words, layout, table, idf, grams, times_W) if saturation == 0 else 0.0
        for k in range(len(layout)):
            is_word = layout[k, 0] == WORDS and layout[k, 1] == 1
            found = _find_ngrams(codes, count, words, layout[k, 0], layout[k, 1], grams)
            matched = _find_features(grams, found, times_W, layout[k], table, idf, features)
            if matched > 0:
                weight, missing = (1.0, unknown_squares) if is_word else (PART_WEIGHT, 0.0)
                used, square = _write_block(features[:matched], idf, saturation, weight, missing, indices, values, used)
                squares += square
        if saturation == 0:
            for e in range(begin, used):
                values[e] = values[e] / np.sqrt(squares)
        times_W[:count] = 1
        indptr[t + 1] = used
    return used


@compiled()
def _find_unknown(codes: Array, count: int, words: Words, layout: Array, table: Array, idf: Array, grams: Grams, times_W: Array) -> Any:
    """Set times_W of the words that the vocabulary of single words lacks, if there is one. Returns the sum of the squares of their idf.

    That is the idf of a word's rarest known letters: so a word that is left out because nearly all texts have it counts next to nothing.
    """
    idf_W = np.zeros(count)
    for k in range(len(layout)):
        if layout[k, 0] == WORDS and layout[k, 1] == 1 and layout[k, 4] == 0:
            for w in range(_find_ngrams(codes, count, words, WORDS, 1, grams)):
                if table[_slot(table, grams.hash[w]), 1] == 0:
                    times_W[w] = UNKNOWN_TIMES
    for k in range(len(layout)):
        if layout[k, 0] == CHARS:
            for g in range(_find_ngrams(codes, count, words, CHARS, layout[k, 1], grams)):
                w, feature = grams.word[g], np.int64(table[_slot(table, grams.hash[g]), 1]) - 1
                if times_W[w] > 1 and feature >= 0:
                    idf_W[w] = max(idf_W[w], np.float64(idf[feature]))
    return (idf_W * idf_W).sum()


@compiled()
def _slot(table: Array, number: Any) -> Any:
    """The slot of a hash; an empty one if the table lacks it."""
    mask = np.uint64(len(table) - 1)
    slot = number & mask
    while table[slot, 1] != 0 and table[slot, 0] != number:
        slot = (slot + np.uint64(1)) & mask
    return slot


@compiled()
def _find_features(grams: Grams, count: int, times_W: Array, block: Array, table: Array, idf: Array, features: Array) -> int:
    """Write the features of a block's n-grams, those with an idf above 0, with repeats. Returns their number.

    times_W  how often characters of each word count
    """
    first, vocabulary_size, unknown = block[2], block[3], block[4]
    matched = 0
    for g in range(count):
        slot = _slot(table, grams.hash[g])
        if table[slot, 1] != 0:
            feature = np.int64(table[slot, 1]) - 1
        elif unknown > 0:  # the bin depends on other bits than the slot does
            feature = first + vocabulary_size + np.int64(grams.hash[g] >> np.uint64(32)) % unknown
        else:
            continue
        if idf[feature] > 0:
            for _ in range(times_W[grams.word[g]] if block[0] == CHARS else 1):
                features[matched] = feature
                matched += 1
    return matched


@compiled()
def _write_block(
    features: Array,
    idf: Array,
    saturation: float,
    document_weight: float,
    unknown_squares: float,
    indices: Array,
    values: Array,
    used: int,
) -> tuple[int, float]:
    """Append a block's weights to a row: tf · idf of a query, of length 1 together with its unknown words, or a document's weights.

    unknown_squares  the sum of the squares of the unknown words' idf
    Returns the number of entries, and the square of the block's length.
    """
    features.sort()
    begin, squares, g = used, 0.0, 0
    while g < len(features):
        first = g
        while g < len(features) and features[g] == features[first]:
            g += 1
        frequency, rarity = np.float64(g - first), np.float64(idf[features[first]])
        damped = document_weight * frequency / (frequency + saturation) * np.sqrt(rarity)
        weight = frequency * rarity if saturation == 0 else damped
        squares += weight * weight
        indices[used], values[used] = features[first], weight
        used += 1
    if saturation == 0:
        length = np.sqrt(squares + unknown_squares)
        for e in range(begin, used):
            values[e] = values[e] / length
    return used, squares / (squares + unknown_squares)


# -- compiled: counting ---------------------------------------------------------------------------------------------------


@compiled()
def fill_slots(hashes: Array, size: int, slots: Array) -> None:
    """Fill slots int32[2^k], which are all −1, with the entries' numbers by their hashes."""
    mask = np.uint64(len(slots) - 1)
    for entry in range(size):
        slot = hashes[entry] & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = entry


@compiled()
def _write_utf8(text: Array, at: int, code: Any) -> int:
    """Write a code point as UTF-8. Returns the position after it."""
    if code < 0x80:
        text[at] = code
        return at + 1
    if code < 0x800:
        text[at] = 0xC0 | (code >> 6)
        text[at + 1] = 0x80 | (code & 0x3F)
        return at + 2
    if code < 0x10000:
        text[at] = 0xE0 | (code >> 12)
        text[at + 1] = 0x80 | ((code >> 6) & 0x3F)
        text[at + 2] = 0x80 | (code & 0x3F)
        return at + 3
    text[at] = 0xF0 | (code >> 18)
    text[at + 1] = 0x80 | ((code >> 12) & 0x3F)
    text[at + 2] = 0x80 | ((code >> 6) & 0x3F)
    text[at + 3] = 0x80 | (code & 0x3F)
    return at + 4


@compiled()
def count_ngrams(
    codes: Array, text_from: Array, classes: Array, layout: Array, document: int, size: int, slots: Array, arrays: tuple[Array, ...]
) -> int:
    """Count the documents that have each n-gram. Returns the number of entries, or −1 − e if another n-gram has the hash of entry e.

    document  the number of the first text
    size      the number of entries so far; `arrays`, the fields of Entries, have room for all new entries
    """
    entries = Entries(*arrays)
    mask = np.uint64(len(slots) - 1)
    words, grams = _room(text_from)
    for t in range(len(text_from) - 1):
        count = _find_words(codes, text_from[t], text_from[t + 1], classes, words)
        for k in range(len(layout)):
            unit, n = layout[k, 0], layout[k, 1]
            for g in range(_find_ngrams(codes, count, words, unit, n, grams)):
                # Write the text after the last entry's; it stays there if the n-gram is new.
                begin = entries.text_from[size]
                end = _write_ngram(codes, words, unit, n, grams.word[g], grams.first_char[g], entries.text, begin)
                slot = grams.hash[g] & mask
                while slots[slot] >= 0 and entries.hash[slots[slot]] != grams.hash[g]:
                    slot = (slot + np.uint64(1)) & mask
                entry = slots[slot]
                if entry < 0:
                    slots[slot] = size
                    entries.hash[size], entries.block[size], entries.documents[size], entries.last[size] = grams.hash[g], k, 1, document + t
                    size += 1
                    entries.text_from[size] = end
                elif entries.block[entry] != k or not _has_text(entries, entry, begin, end):
                    return -1 - int(entry)
                elif entries.last[entry] != document + t:
                    entries.last[entry] = document + t
                    entries.documents[entry] += 1
    return size


@compiled()
def _write_ngram(codes: Array, words: Words, unit: int, n: int, word: int, first_char: int, text: Array, at: int) -> int:
    """Write an n-gram as UTF-8. Returns the position after it."""
    if unit == WORDS:
        for w in range(word, word + n):
            if w > word:
                at = _write_utf8(text, at, np.uint32(BLANK))
            for i in range(words.begin[w], words.end[w]):
                at = _write_utf8(text, at, codes[i])
    else:
        begin, end = words.begin[word], words.end[word]
        for i in range(first_char, min(first_char + n, end - begin + 2)):
            at = _write_utf8(text, at, _padded(codes, begin, end, i))
    return at


@compiled()
def _has_text(entries: Entries, entry: int, begin: int, end: int) -> Any:
    """Whether an entry's text is text[begin:end]."""
    entry_begin = entries.text_from[entry]
    same = entries.text_from[entry + 1] - entry_begin == end - begin
    if same:
        for i in range(end - begin):
            same = same and entries.text[entry_begin + i] == entries.text[begin + i]
    return same
