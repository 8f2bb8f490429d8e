"""Sets for search by text: training pairs of text and item, and test texts with the items that are right.

None is a shop's log. Knows how each is split:

debian-describe  a part of a package's description → the package. Training queries: the first 12 words of each description, and the
                 package's name with its section; test queries: words 13 to 36 of 5,000 packages that have at least 24. No test text is a
                 training text. Right is every package whose description has these same words there, as packages of one source do. It is a
                 set of *lexical* search: two short texts an item, one item a text, nobody's clicks. Nothing here can be learned from
                 behaviour, which is what the paper's method is for.
debian-depends   a package's description → the packages that it depends on, of those with at least 3 dependants; a tenth of the describing
                 packages is held out. The words of a description are not those of what is depended on, so that relations have to be
                 learned. Packages of one source share sentences and dependencies, and are on both sides of the split, which favours
                 neighbours: `apart` are the test queries that share no run of 8 words with a training query.
psearch          a shop's query → products judged 3 or 4 of 4 by people. 261 queries are too few to learn from, and each product was judged
                 for the query that found it: the queries are dealt into 5 folds, all products' titles and the queries of four folds are
                 training queries, the fifth fold is asked. So nearly every right answer has its own title as its only training text:
                 a set of cold starts. Products that nobody judged for a query count as wrong.
"""

from __future__ import annotations

import gzip
import io
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from espalier.arrays import Bool, Int32, Int64
from espalier.errors import InvalidData
from training.data.query_logs import LabelledTexts, labelled

RUN = 8
"""Words in a row that two texts share when they are not `apart`."""
FOLDS = 5
TEST_ITEMS = 5000
FIRST, LEAST, END = 12, 24, 36
"""Words of a description: training queries end at the first number, test queries at the last, and need the middle one."""
SETS = {
    "debian-describe": "xmc-debian-bookworm/packages.tsv.gz",
    "debian-depends": "xmc-debian-bookworm/packages.tsv.gz",
    "psearch": "psearch-crowdflower/crowdflower_train.csv.gz",
}
WORD = re.compile(r"\w+")


@dataclass(frozen=True, eq=False)
class Fold:
    """Training pairs, and test texts with the item rows that are right; `apart`: those that share no run of words with training texts."""

    train: LabelledTexts
    texts: list[str]
    relevant: list[Int64]
    apart: Bool


@dataclass(frozen=True, eq=False)
class Task:
    """own_texts: each item's own text, which only DSSM's item tower reads."""

    name: str
    own_texts: list[str]
    folds: list[Fold]


def read_set(folder: Path, name: str) -> Task:
    """A named set. Raises InvalidData where its file is missing."""
    return {"debian-describe": describe, "debian-depends": depends, "psearch": psearch}[name](read_frame(folder, name))


def read_frame(folder: Path, name: str) -> pl.DataFrame:
    """The table of a named set. Raises InvalidData where its file is missing."""
    file = folder / SETS[name]
    if not file.is_file():
        raise InvalidData("--data", str(folder), f"a folder that holds {SETS[name]}, the file of the set {name}")
    with gzip.open(file, "rb") as stream:
        return pl.read_csv(
            io.BytesIO(stream.read()),
            separator="\t" if ".tsv" in file.name else ",",
            quote_char=None if ".tsv" in file.name else '"',
            infer_schema=False,
        )


def describe(frame: pl.DataFrame) -> Task:
    """Part of a description → the package."""
    words = [text.split() for text in frame["description"].fill_null("").to_list()]
    names = [f"{name} {section}" for name, section in frame.select("package", "section").iter_rows()]
    pairs = [(" ".join(tokens[:FIRST]), row) for row, tokens in enumerate(words) if tokens]
    pairs += [(name, row) for row, name in enumerate(names)]
    train = pairs_of(pairs)
    trained = set(train.texts)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, tokens in enumerate(words):
        if len(tokens) >= LEAST:
            rows_of[" ".join(tokens[FIRST:END])].append(row)
    askable = [row for row, tokens in enumerate(words) if len(tokens) >= LEAST and " ".join(tokens[FIRST:END]) not in trained]
    chosen = np.sort(np.random.default_rng(0).permutation(askable)[:TEST_ITEMS]).tolist()
    texts = list(dict.fromkeys(" ".join(words[row][FIRST:END]) for row in chosen))
    return Task("debian-describe", names, [fold_of(train, texts, [np.array(rows_of[text]) for text in texts])])


def depends(frame: pl.DataFrame) -> Task:
    """A description → what the package depends on."""
    items, needs = dependencies(frame)
    order = np.random.default_rng(0).permutation(len(needs))
    test, training = np.split(order, [len(needs) // 10])
    train = pairs_of([(needs[b][0], row) for b in np.sort(training).tolist() for row in needs[b][1]])
    trained = set(train.texts)
    relevant_of = {needs[b][0]: np.array(needs[b][1]) for b in np.sort(test).tolist() if needs[b][0] not in trained}
    # An item whose dependants are all held out cannot be found: it stays, as the paper's cold starts do.
    return Task("debian-depends", items, [fold_of(train, list(relevant_of), list(relevant_of.values()))])


def psearch(frame: pl.DataFrame) -> Task:
    """A shop's query → the products that people judged to be right."""
    titles, right_rows = judgements(frame)
    queries = list(right_rows)
    title_pairs = [(title, row) for row, title in enumerate(titles)]
    folds = []
    for fold in range(FOLDS):
        test = queries[fold::FOLDS]
        training = [query for query in queries if query not in set(test)]
        train = pairs_of(title_pairs + [(query, row) for query in training for row in right_rows[query]])
        folds.append(fold_of(train, test, [np.array(right_rows[query]) for query in test]))
    return Task("psearch", titles, folds)


def dependencies(frame: pl.DataFrame) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """The packages that at least three others depend on, and of each description which of them its package does, where it does."""
    needs = [sorted(set(filter(None, (value or "").split(",")))) for value in frame["depends"].to_list()]
    dependants = Counter(name for names in needs for name in names)
    items = sorted(name for name, count in dependants.items() if count >= 3)
    row_of = {name: row for row, name in enumerate(items)}
    texts = frame["description"].fill_null("").to_list()
    answers = [(text, [row_of[name] for name in names if name in row_of]) for text, names in zip(texts, needs, strict=True)]
    return items, [(text, rows) for text, rows in answers if rows and text]


def judgements(frame: pl.DataFrame) -> tuple[list[str], dict[str, list[int]]]:
    """The products' titles, and of each query, in a seeded order, which of them were judged 3 or 4 of 4."""
    titles = list(dict.fromkeys(frame["product_title"].to_list()))
    row_of = {title: row for row, title in enumerate(titles)}
    right_rows: dict[str, set[int]] = defaultdict(set)
    for query, title, relevance in frame.select("query", "product_title", "median_relevance").iter_rows():
        if float(relevance) >= 3:
            right_rows[query].add(row_of[title])
    names = sorted(right_rows)
    return titles, {names[b]: sorted(right_rows[names[b]]) for b in np.random.default_rng(0).permutation(len(names)).tolist()}


def pairs_of(pairs: Sequence[tuple[str, int]]) -> LabelledTexts:
    frame = pl.DataFrame({"query": [text for text, _ in pairs], "item": [str(row) for _, row in pairs]}).with_columns(weight=pl.lit(1.0))
    return labelled(frame, {str(row): row for row in range(1 + max(row for _, row in pairs))})


def fold_of(train: LabelledTexts, texts: list[str], relevant: list[Int64]) -> Fold:
    seen = {run for text in train.texts for run in _runs(text)}
    return Fold(train, texts, [rows.astype(np.int64) for rows in relevant], np.array([seen.isdisjoint(_runs(text)) for text in texts]))


def _runs(text: str) -> set[int]:
    words = WORD.findall(text.lower())
    return {hash(tuple(words[k : k + RUN])) for k in range(len(words) - RUN + 1)}


def item_rows(texts: LabelledTexts) -> list[Int32]:
    return np.split(texts.labels.indices, texts.labels.indptr[1:-1])
