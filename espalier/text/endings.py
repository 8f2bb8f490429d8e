"""Which words differ only in endings that many words have: connect, connected, connection. They can count as one.

Endings are learned from the words themselves, so this works without knowing their language. Follows GRAS (Paik, Mitra, Parui and Järvelin
2011, ACM TOIS 29(4)). What two words have after their common beginning of at least PREFIX letters is a pair of endings, such as ("", "ed").
Words are neighbours if at least FREQUENT pairs of words have the same endings. From the word with most neighbours down, each word p that
does not count as another one yet takes its neighbours v with

    (1 + |N(p) ∩ N(v)|) / |N(v)| ≥ COHESION         N(w): the neighbours of w

Words with digits are names, and stay alone; so do those of scripts without blanks, which are phrases. Knows words. Does not know texts or
features.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, takewhile
from operator import eq

import numpy as np

from espalier.arrays import Int32

PREFIX = 5
"""Fewest letters of a common beginning."""
FREQUENT = 4
"""Fewest pairs of words with the same endings."""
COHESION = 0.8
"""δ of the paper."""
LONGEST = 6
"""Most letters of an ending."""
MOST_WORDS, MOST_TOGETHER = 50_000, 200
"""Only so many words are compared, and so many with the same first letters: the first ones. This bounds the time."""
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
    groups: dict[str, list[int]] = defaultdict(list)
    for position, word in enumerate(words[:MOST_WORDS]):
        if len(word) >= PREFIX and not any(map(str.isnumeric, word)) and not _PHRASE.search(word):
            groups[word[:PREFIX]].append(position)
    together = [group[:MOST_TOGETHER] for group in groups.values()]
    frequency = Counter(endings for _, _, endings in _pairs(words, together))
    neighbours: dict[int, set[int]] = defaultdict(set)
    for first, second, endings in _pairs(words, together):
        if frequency[endings] >= FREQUENT:
            neighbours[first].add(second)
            neighbours[second].add(first)
    return neighbours


def _pairs(words: Sequence[str], groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """The positions of each two words of a group, and their endings in alphabetical order, unless one is too long."""
    for group in groups:
        for first, second in combinations(group, 2):
            one, other = words[first], words[second]
            least = max(PREFIX, len(one) - LONGEST, len(other) - LONGEST)  # letters of the common beginning, or an ending is too long
            if one[:least] == other[:least]:
                common = least + sum(takewhile(bool, map(eq, one[least:], other[least:])))
                endings = sorted((one[common:], other[common:]))
                yield first, second, (endings[0], endings[1])
