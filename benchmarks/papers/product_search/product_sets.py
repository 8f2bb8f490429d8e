"""Tables of products with queries that people or the texts themselves ask, and what is right for each.

psearch          products with a title and a description, and the judged queries of which a product has a grade of 3 or 4 of 4; grades count
                 as 2^(grade − 1) − 1
debian-describe  packages with the first words of their description and with name and section, asked for by later words of it; every right
                 package counts the same
chorus           19,406 products of Open Icecat with title, short description, brand and attributes, and queries judged 0 to 3, of which a
                 product has a grade of 2 or 3. Files of github.com/querqy/chorus in DIR/chorus: `N.json.zip` of
                 data-encoder/ecommerce/vectors/data, and katas/Broad_Query_Set_rated.csv. A search engine chose which products were judged
cranfield        1,400 abstracts with titles and authors, and 225 questions. Files of github.com/oussbenk/cranfield-trec-dataset in
                 DIR/cranfield
cisi, cacm, med  1,460, 3,204 and 1,033 abstracts with 76, 52 and 30 questions. Files of github.com/B-F0X/Information-Retrieval in DIR/cisi,
                 of github.com/philippexian/InformationRetrieval in DIR/cacm, and of github.com/ronancummins/gen_polya in DIR/med
climate-fever    5,240 sentences of Wikipedia with the titles of their articles, and 1,535 claims; sentences that support or refute a claim
                 have grade 2, others that it was compared with 1. queries.jsonl of github.com/memekhant/climate-fever-data in
                 DIR/climate-fever
time             423 news stories with 83 questions. Files of github.com/Chaplinski/IR-Assignment3 in DIR/time
npl              11,426 abstracts of a few lines with 93 questions. Files of github.com/stefreschke/Information-Retrieval in DIR/npl
homedepot        54,667 titles of a hardware shop, and 11,795 queries with products judged 1 to 3 by people, 9,716 of which have one of
                 2.67 or more; grades are the judgements, rounded, less one. `data/train.csv.zip` of
                 github.com/MohammedFCIS/Home-Depot-Product-Search-Relevance in DIR/homedepot
mixed            as many items as wanted, each of the names and halves of the descriptions of two packages; a query is four words of one
                 item, which alone counts

Products that were not judged count as 0.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.papers.product_search.text_sets import describe, read_frame
from espalier.errors import InvalidData

ASKED = 500
"""Queries of the set `mixed` that are measured."""


@dataclass(frozen=True)
class Products:
    """Texts of each product by field, and the grade of each right product of each query, 1 … 3."""

    fields: Mapping[str, Sequence[str]]
    right: Mapping[str, Mapping[int, int]]


def _debian(folder: Path) -> Products:
    frame = read_frame(folder, "debian-describe")
    task = describe(frame)
    (fold,) = task.folds
    first = [" ".join((text or "").split()[:12]) for text in frame["description"].to_list()]
    right = {query: dict.fromkeys(rows.tolist(), 1) for query, rows in zip(fold.texts, fold.relevant, strict=True)}
    return Products({"description": first, "name": task.own_texts}, right)


def _psearch(folder: Path) -> Products:
    frame = read_frame(folder, "psearch")
    by_title: dict[str, str] = {}
    grades: dict[str, dict[int, int]] = {}
    rows: dict[str, int] = {}
    for query, title, description, grade in frame.select("query", "product_title", "product_description", "median_relevance").iter_rows():
        row = rows.setdefault(title, len(rows))
        by_title[title] = max(by_title.get(title, ""), description or "", key=len)
        grades.setdefault(query, {})[row] = int(float(grade)) - 1
    return Products({"title": list(rows), "description": list(by_title.values())}, _answered(grades))


def _chorus(folder: Path) -> Products:
    products = []
    for number in range(1, 5):
        with zipfile.ZipFile(_file(folder / "chorus" / f"{number}.json.zip")) as archive:
            products += json.loads(archive.read(f"{number}.json"))
    rows = {product["id"]: row for row, product in enumerate(products)}
    fields = {name: [product.get(name) or "" for product in products] for name in ("title", "short_description", "supplier")}
    fields["attributes"] = [" ".join(str(value) for key, value in product.items() if key.startswith("attr_")) for product in products]
    grades: dict[str, dict[int, int]] = defaultdict(dict)
    judged = pl.read_csv(_file(folder / "chorus" / "Broad_Query_Set_rated.csv"), schema_overrides={"docid": pl.String})
    for query, product, grade in judged.iter_rows():
        if product in rows:
            grades[query][rows[product]] = grade
    return Products(fields, _answered(grades))


def _homedepot(folder: Path) -> Products:
    with zipfile.ZipFile(_file(folder / "homedepot" / "train.csv.zip")) as archive:
        judged = pl.read_csv(archive.read("train.csv"), encoding="latin1")
    rows: dict[int, int] = {}
    titles: list[str] = []
    grades: dict[str, dict[int, int]] = defaultdict(dict)
    for _, product, title, query, relevance in judged.iter_rows():
        row = rows.setdefault(product, len(rows))
        if row == len(titles):
            titles.append(title)
        grades[query][row] = round(relevance) - 1
    return Products({"title": titles}, _answered(grades))


def _cranfield(folder: Path) -> Products:
    documents, questions = (
        re.findall(rf"<{tag}>(.*?)</{tag}>", _file(folder / "cranfield" / name).read_text("utf-8"), re.DOTALL)
        for name, tag in (("cran.all.1400.xml", "doc"), ("cran.qry.xml", "top"))
    )
    rows = {_element(document, "docno"): row for row, document in enumerate(documents)}
    fields = {name: [_element(document, name) for document in documents] for name in ("title", "author", "text")}
    texts = [" ".join(_element(question, "title").split()) for question in questions]
    grades: dict[str, dict[int, int]] = defaultdict(dict)
    for line in _file(folder / "cranfield" / "cranqrel.trec.txt").read_text().splitlines():
        question, _, document, grade = line.split()  # questions by their position
        if document in rows and int(grade) > 0:
            grades[texts[int(question) - 1]][rows[document]] = min(3, int(grade))
    return Products(fields, grades)


def _marked(file: Path) -> list[tuple[int, dict[str, str]]]:
    """The number and the fields of each document or question, by the letter that marks a field."""
    read = []
    for entry in re.split(r"^\.I ", _file(file).read_text("utf-8", "replace"), flags=re.MULTILINE)[1:]:
        number, rest = entry.split("\n", 1)
        fields: dict[str, str] = {}
        for part in re.split(r"^\.(?=[A-Z] *$)", rest, flags=re.MULTILINE)[1:]:
            fields.setdefault(part[0], " ".join(part[1:].split()))
        read.append((int(number), fields))
    return read


def _marked_set(documents: Path, questions: Path, judgements: Path, columns: Mapping[str, str], document_column: int = 1) -> Products:
    read = _marked(documents)
    rows = {number: row for row, (number, _) in enumerate(read)}
    texts = {number: " ".join(filter(None, (fields.get("T"), fields.get("W")))) for number, fields in _marked(questions)}
    grades: dict[str, dict[int, int]] = defaultdict(dict)
    for line in _file(judgements).read_text().splitlines():
        numbers = line.split()
        question, document = int(numbers[0]), int(numbers[document_column])
        if texts.get(question) and document in rows:
            grades[texts[question]][rows[document]] = 1
    return Products({name: [fields.get(letter, "") for _, fields in read] for name, letter in columns.items()}, grades)


def _cisi(folder: Path) -> Products:
    documents, questions, judgements = (folder / "cisi" / f"CISI.{kind}" for kind in ("ALL", "QRY", "REL"))
    return _marked_set(documents, questions, judgements, {"title": "T", "author": "A", "text": "W"})


def _cacm(folder: Path) -> Products:
    documents, questions, judgements = (folder / "cacm" / name for name in ("cacm.all", "query.text", "qrels.text"))
    return _marked_set(documents, questions, judgements, {"title": "T", "author": "A", "text": "W", "keywords": "K"})


def _med(folder: Path) -> Products:
    documents, questions, judgements = (folder / "med" / f"MED.{kind}" for kind in ("ALL", "QRY", "REL"))
    return _marked_set(documents, questions, judgements, {"text": "W"}, document_column=2)


def _climate_fever(folder: Path) -> Products:
    rows: dict[str, int] = {}
    titles: list[str] = []
    sentences: list[str] = []
    right: dict[str, dict[int, int]] = {}
    for line in filter(str.strip, _file(folder / "climate-fever" / "queries.jsonl").read_text("utf-8").splitlines()):
        claim = json.loads(line)
        grades = right.setdefault(claim["text"], {})
        for evidence in claim["metadata"]["evidences"]:
            row = rows.setdefault(evidence["evidence_id"], len(rows))
            if row == len(titles):
                titles.append(evidence["article"])
                sentences.append(evidence["evidence"])
            grades[row] = 2 if evidence["evidence_label"] in ("SUPPORTS", "REFUTES") else 1
    return Products({"title": titles, "text": sentences}, right)


def _npl(folder: Path) -> Products:
    read = [_file(folder / "npl" / name).read_text().split("/\n") for name in ("doc-text", "query-text", "rlv-ass")]
    documents, questions, judgements = ([entry.split() for entry in entries if entry.strip()] for entries in read)
    rows = {number: row for row, (number, *_) in enumerate(documents)}
    texts = {number: " ".join(words).lower() for number, *words in questions}
    right = {texts[number]: {rows[document]: 1 for document in found if document in rows} for number, *found in judgements}
    return Products({"text": [" ".join(words) for _, *words in documents]}, right)


def _time(folder: Path) -> Products:
    stories, questions = (
        [entry.replace("*STOP", "").split() for entry in re.split(mark, _file(folder / "time" / name).read_text("latin-1"), flags=re.M)[1:]]
        for name, mark in (("TIME.ALL", r"^\*TEXT.*$"), ("TIME.QUE", r"^\*FIND"))
    )
    texts = {number: " ".join(words).lower() for number, *words in questions}
    right: dict[str, dict[int, int]] = defaultdict(dict)
    for line in filter(str.strip, _file(folder / "time" / "TIME.REL").read_text().splitlines()):
        number, *positions = line.split()
        for position in map(int, positions):
            if position <= len(stories):
                right[texts[number]][position - 1] = 1
    return Products({"text": [" ".join(words) for words in stories]}, right)


_READERS: Mapping[str, Callable[[Path], Products]] = {
    "psearch": _psearch,
    "debian-describe": _debian,
    "chorus": _chorus,
    "homedepot": _homedepot,
    "cranfield": _cranfield,
    "cisi": _cisi,
    "cacm": _cacm,
    "med": _med,
    "climate-fever": _climate_fever,
    "npl": _npl,
    "time": _time,
}
SETS = (*_READERS, "mixed")


def _answered(grades: Mapping[str, Mapping[int, int]]) -> dict[str, Mapping[int, int]]:
    """The queries of which a product has a grade of at least 2."""
    return {query: product_grades for query, product_grades in grades.items() if max(product_grades.values()) >= 2}


def _file(path: Path) -> Path:
    if not path.is_file():
        raise InvalidData(str(path), "no such file", "a file of the set; the module says where it is from")
    return path


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[1].strip() if found else ""


def products_of(folder: Path, name: str, items: int) -> Products:
    """A set. items: the size of the set `mixed`. Raises InvalidData where a file is missing."""
    return mixed(folder, items) if name == "mixed" else _READERS[name](folder)


def mixed(folder: Path, count: int) -> Products:
    frame, rng = read_frame(folder, "debian-describe"), np.random.default_rng(0)
    packages = [(name, (text or "").split()) for name, text in frame.select("package", "description").iter_rows()]
    packages = [(name, words) for name, words in packages if len(words) >= 12]
    pairs = [(packages[a], packages[b]) for a, b in rng.integers(len(packages), size=(count, 2)).tolist()]
    texts = [first[: len(first) // 2] + second[len(second) // 2 :] for (_, first), (_, second) in pairs]
    fields = {"title": [f"{a} {b}" for (a, _), (b, _) in pairs], "description": [" ".join(text) for text in texts]}
    answers = {}
    for row in rng.choice(count, min(count, 2 * ASKED), replace=False).tolist():
        word_positions = np.sort(rng.choice(len(texts[row]), 4, replace=False))
        answers[" ".join(texts[row][position] for position in word_positions)] = {row: 1}
    return Products(fields, answers)
