"""Tables of products with judged queries, as their publishers write them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.papers.product_search import changed_texts, judged_texts
from benchmarks.papers.product_search.product_sets import Products, products_of
from espalier.errors import InvalidData


def test_products_of_a_shop_have_all_their_texts_and_the_grades_of_people(tmp_path: Path) -> None:
    folder = tmp_path / "chorus"
    folder.mkdir()
    for number in range(1, 5):
        product = {
            "id": f"{number}0",
            "title": f"Lamp {number}",
            "supplier": "Lux",
            "price": 5,
            "attr_t_colour": "red",
            "attr_n_height": 2.0,
        }
        with zipfile.ZipFile(folder / f"{number}.json.zip", "w") as archive:
            archive.writestr(f"{number}.json", json.dumps([product]))
    judged = ["query,docid,rating", "lamp,10,3", "lamp,20,0", "lamp,90,3", "lux,30,1"]
    (folder / "Broad_Query_Set_rated.csv").write_text("\n".join(judged))
    products = products_of(tmp_path, "chorus", 0)
    assert {name: texts[1] for name, texts in products.fields.items()} == {
        "title": "Lamp 2",
        "short_description": "",
        "supplier": "Lux",
        "attributes": "red 2.0",
    }
    assert products.right == {"lamp": {0: 3, 1: 0}}, "only queries of which a product is good, and products that are there"
    (folder / "2.json.zip").unlink()
    with pytest.raises(InvalidData, match=r"2\.json\.zip: got 'no such file', expected a file of the set"):
        products_of(tmp_path, "chorus", 0)


def test_questions_are_numbered_by_their_position(tmp_path: Path) -> None:
    folder = tmp_path / "cranfield"
    folder.mkdir()
    documents = "".join(
        f"<doc><docno>{row}</docno><title>t{row}</title><author></author><text>w\n{row}</text></doc>" for row in range(1, 4)
    )
    (folder / "cran.all.1400.xml").write_text(documents)
    (folder / "cran.qry.xml").write_text("<top><num> 1</num><title>\nfirst\none</title></top><top><num> 4</num><title>second</title></top>")
    (folder / "cranqrel.trec.txt").write_text("1 0 2 4\n2 0 3 1\n2 0 1 -1\n2 0 99 2\n")
    products = products_of(tmp_path, "cranfield", 0)
    assert products.right == {"first one": {1: 3}, "second": {2: 1}}
    assert products.fields["text"] == ["w\n1", "w\n2", "w\n3"]


def test_changed_texts_are_found_as_if_they_had_been_trained(tmp_path: Path) -> None:
    titles = [f"{one}{two} {two}{one}" for one in ("kar", "mol", "ten", "vis", "dop", "lug") for two in ("ina", "ebu", "oty", "ufe", "aza")]
    products = Products({"title": titles, "note": ["", "note"] * 15}, {title.split()[0]: {row: 2} for row, title in enumerate(titles)})
    rows = {row["system"]: row for row in changed_texts.rows_of(products, 0.5, tmp_path)}
    assert [*rows] == ["trained", "edited", "swapped"]
    assert [row["placed"] for row in rows.values()] == [0, 15, 15]
    assert all(row["unseen"] == row["by_title"] == 100 for row in rows.values())


def test_a_ranker_learns_from_judgements_which_column_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_texts, "TIMES", 1)
    monkeypatch.setattr(judged_texts, "PARTS", 2)
    words = [f"{first}{last}" for first in ("kar", "mol", "ten", "vis", "dop", "lug") for last in ("ina", "ebu", "oty", "ufe")]
    titles = [title for i, word in enumerate(words) for title in (words[i - 7], word, f"{word} 1", f"{word} 2")]
    notes = [note for i, word in enumerate(words) for note in (f"made of {word} and more", "", words[i - 7], words[i - 5])]
    products = Products({"title": titles, "note": notes}, {word: {4 * i: 2} for i, word in enumerate(words)})
    rows = {row["system"]: row for row in judged_texts.measured(products)}
    assert [*rows] == ["retrieval", "without texts", "ranker", "lambdamart"]
    assert rows["retrieval"]["gain"] == 0
    assert rows["ranker"]["gain"] > rows["without texts"]["gain"] + 5
    assert all(row["ndcg10"] == pytest.approx(rows["retrieval"]["ndcg10"] + row["gain"], abs=0.02) for row in rows.values())
