"""Which words differ only in endings that many words have: connect, connected, connection. They can count as one.

Endings are learned from the words themselves, so this works without knowing their language. Follows GRAS (Paik, Mitra, Parui and Järvelin
2011, ACM TOIS 29(4)). What two words have after their common beginning of at least PREFIX letters is a pair of endings, such as ("", "ed"),
if neither is longer than LONGEST or half of the beginning. Words are neighbours if at least FREQUENT pairs of words have the same endings.
From the word with most neighbours down, each word p that does not count as another one yet takes its neighbours v with

    (1 + |N(p) ∩ N(v)|) / |N(v)| ≥ COHESION         N(w): the neighbours of w

Words with digits are names, and stay alone; so do those of scripts without blanks, which are phrases. Knows words. Does not know texts or
features.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from espalier.arrays import Int32

PREFIX = 3
"""Fewest letters of a common beginning."""
FREQUENT = 4
"""Fewest pairs of words with the same endings."""
COHESION = 0.8
"""δ of the paper."""
LONGEST = 3
"""Most letters of an ending. With more, the second words of German compounds would be endings."""
MOST_WORDS, MOST_TOGETHER = 50_000, 32
"""Only so many words are compared, and so many with the same beginning: the first ones. This bounds the time."""
_PHRASE = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")
"""A letter of Thai, Lao, Burmese or Khmer."""


def same_words(words: Sequence[str]) -> Int32:
    """int32[words]: the position of the first of the words that a word counts as; its own if it stays alone.

    words  different ones; of those that count as one the first gives its name
    """
    neighbours = _neighbours(words)
    counts_as = np.arange(len(words), dtype=np.int32)
    free = set(neighbours)
    for pivot in sorted(neighbours, key=lambda position: (-len(neighbours[position]), position)):
        if pivot in free:
            near = neighbours[pivot]
            taken = [other for other in near & free if 1 + len(near & neighbours[other]) >= COHESION * len(neighbours[other])]
            free.difference_update(taken, (pivot,))
            counts_as[[pivot, *taken]] = min((pivot, *taken))
    return counts_as


def _neighbours(words: Sequence[str]) -> dict[int, set[int]]:
    """The neighbours of each word that has some, by position."""
    by_beginning: dict[str, list[int]] = defaultdict(list)
    for position, word in enumerate(words[:MOST_WORDS]):
        if not any(map(str.isnumeric, word)) and not _PHRASE.search(word):
            for length in range(max(PREFIX, len(word) - LONGEST, -(-2 * len(word) // 3)), len(word) + 1):
                by_beginning[word[:length]].append(position)
    frequency = Counter(endings for _, _, endings in _pairs(words, by_beginning))
    neighbours: dict[int, set[int]] = defaultdict(set)
    for first, second, endings in _pairs(words, by_beginning):
        if frequency[endings] >= FREQUENT:
            neighbours[first].add(second)
            neighbours[second].add(first)
    return neighbours


def _pairs(words: Sequence[str], by_beginning: Mapping[str, Sequence[int]]) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """The positions of each two words that have a beginning in common and no longer one, and their endings in alphabetical order."""
    for beginning, positions in by_beginning.items():
        for first, second in combinations(positions[:MOST_TOGETHER], 2):
            one, other = sorted((words[first][len(beginning) :], words[second][len(beginning) :]))
            if one[:1] != other[:1]:
                yield first, second, (one, other)
