"""`espalier new --items`: which column of a table of items has the ids, and which have words that are searched."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import espalier
from espalier.errors import InvalidConfig, InvalidData
from tests.training.commands import command
from tests.training.new_logs import ITEMS, rows
from training.item_columns import are_words
from training.new_configuration import write_configuration

NO_OPTIONS: dict[str, str | None] = dict.fromkeys(("user", "item", "time", "query"))
SHOP = 40


def shop(**columns: list[Any]) -> pl.DataFrame:
    """A table of a shop: a column of numbers, ids, and of words two texts and the brands."""
    numbers = range(SHOP)
    plain: dict[str, list[Any]] = {
        "id": list(numbers),
        "sku": [f"{number}.50" for number in numbers],
        "Name": [f"{'red shoe' if number % 2 else 'green tent'} {number}" for number in numbers],
        "brand": [f"Acme{chr(97 + number % 20)}" for number in numbers],
        "text": [f'a thing, "{number}" inches wide' for number in numbers],
        "price": [number + 0.5 for number in numbers],
        "image": [f"https://shop.example/images/red-shoe-{number}.jpg" for number in numbers],
        "state": ["sold out" if number == 7 else "there" for number in numbers],
        "made": [f"2024-01-{number % 28 + 1:02} 10:00:00" for number in numbers],
    }
    return pl.DataFrame(plain | columns)


def configuration(folder: Path, log: Path | None, items: Path | None, **options: str | None) -> dict[str, Any]:
    file = write_configuration(log, folder / "new.toml", True, options.pop("kind", None), NO_OPTIONS | options, items)
    return tomllib.loads(file.read_text())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["Red shoe", "Blue tent"], True),
        (["Rouge"], False),
        ([f"brand{chr(97 + number)}" for number in range(10)], True),
        ([f"brand{chr(97 + number)}" for number in range(9)] * 2, False),
        ([f"brand{number}" for number in range(30)], False),
        (["红色的鞋" + chr(0x4E00 + number) for number in range(10)], True),
        (["WH-XM 1000", "MFC-L 9340 CDW"], True),
        (["in stock", "in stock"], False),
        (["12.50", "13"], False),
        (["12.50 EUR", "13 EUR"], False),
        (["2024-01-03", "2024-01-04"], False),
        (["03.01.2024 10:00", "24.01.2024 11:00"], False),
        (["https://shop.example/a-red-shoe", "https://shop.example/a-tent"], False),
        (["a@shop.example", "b@shop.example"], False),
        (["images/red-shoe.jpg", "images/a-tent.png"], False),
        (["550e8400-e29b-41d4-a716-446655440000", "dafe8400-abcd-fade-beef-446655440000"], False),
        ([None, "", "Red shoe", None, "Blue tent"], True),
        ([None, None], False),
        ([["garden", "tools"], ["red", None]], True),
        ([[], None], False),
        ([1.5, 2.5], False),
        ([True, False], False),
    ],
)
def test_columns_of_words_are_searched(values: list[Any], expected: bool) -> None:
    assert are_words(pa.array(values)) == expected


@pytest.mark.parametrize("suffix", ["csv", "parquet", "latin-1.csv"])
def test_a_table_alone_is_searched_by_its_words(tmp_path: Path, suffix: str) -> None:
    table, file = shop(brand=[f"Möbel{chr(97 + number % 20)}" for number in range(SHOP)]), tmp_path / f"shop.{suffix}"
    if suffix == "parquet":
        table.write_parquet(file)
    else:
        file.write_text(table.write_csv(separator=";"), encoding="utf-8" if suffix == "csv" else "latin-1")
    raw = configuration(tmp_path, None, file, item="SKU")
    searched = {"items": str(file), "items_id": "sku", "own_texts": ["Name", "brand", "text"]}
    form = {"separator": ";"} | ({"encoding": "latin-1"} if suffix == "latin-1.csv" else {})
    assert raw["kind"] == "xr-linear"
    assert raw["data"] == {"format": "log"} | searched | ({} if suffix == "parquet" else {"items_format": form})
    notes = (tmp_path / "new.toml").read_text()
    assert f"# - {file.name}: ids in column 'sku'" in notes
    assert "# - searched are its columns of words: Name, brand, text; not searched: price, image, state, made, id" in notes


@pytest.mark.parametrize(
    ("columns", "item", "expected"),
    [
        (["id", "sku"], None, "id"),
        (["id", "sku"], "sku", "sku"),
        (["ID", "product_id"], "product", "ID"),
        (["product_id", "text"], "other", "product_id"),
        (["product_id", "Other"], "other", "Other"),
        (["code", "text"], "other", "code"),
    ],
)
def test_ids_are_in_the_column_of_the_logs_name_or_id_or_a_usual_name(
    tmp_path: Path, columns: list[str], item: str | None, expected: str
) -> None:
    ids = [f"{number:05}" for number in range(ITEMS)]
    pl.DataFrame(dict.fromkeys(columns, ids)).write_csv(tmp_path / "items.csv")
    name = item or "item"
    log = tmp_path / "log.csv"
    log.write_text(f"user,{name}\n" + "".join(f"{user},{int(row[1:]):05}\n" for user, row, _ in rows()))
    data = configuration(tmp_path, log, tmp_path / "items.csv", item=name)["data"]
    assert data["items"] == str(tmp_path / "items.csv")
    assert data.get("items_id") == (None if expected in ("id", "ID") else expected)
    assert "own_texts" not in data


def test_a_log_of_histories_has_the_fields_of_its_items(tmp_path: Path) -> None:
    log = pl.DataFrame([(user, item, at) for user, item, at in rows()], ["user", "item", "at"], orient="row")
    items = pl.DataFrame({"id": ["x"] * ITEMS, "item": [f"i{number}" for number in range(ITEMS)], "number": range(ITEMS)})
    found = espalier.fit(log, user="user", time="at", items=items, kind="neighbours").search([["i3"]], m=5, fields=["number"])
    assert [f"i{number}" for number in found["number"]] == found["item"].to_list()


def test_a_log_of_texts_has_a_table_whose_words_are_searched_too(tmp_path: Path) -> None:
    shop().write_csv(tmp_path / "items.csv")
    log = tmp_path / "searches.csv"
    log.write_text("query,sku\n" + "".join(f"shoe {number},{number}.50\n" for number in range(SHOP)))
    data = configuration(tmp_path, log, tmp_path / "items.csv")["data"]
    assert (data["train"], data["item"], data["items_id"]) == (str(log), "sku", "sku")
    assert data["own_texts"] == ["Name", "brand", "text"]


def test_words_of_ids_are_searched_wherever_ids_are(tmp_path: Path) -> None:
    """`id` among own texts is the model's column of ids, not that of the file."""
    names = [f"red-shoe-{chr(97 + number % 26)}-{number}" for number in range(SHOP)]
    found = espalier.fit(items=shop(sku=names).drop("Name", "text", "brand").to_arrow(), item="sku").search(["red shoe b"], m=1)
    assert isinstance(found, pa.Table)  # as the items were
    assert found["item"].to_pylist() in ([names[1]], [names[27]])


def test_python_searches_a_table_without_a_log() -> None:
    model = espalier.fit(items=shop(), item="sku")
    found = model.search(["tent of 6 inches"], m=1, fields=["Name", "price"])
    assert isinstance(found, pl.DataFrame)
    assert found.row(0)[2] == "6.50"
    assert found.row(0)[4:] == ("green tent 6", 6.5)
    assert model.search(["acmec shoe"], m=1)["item"][0] in ("2.50", "22.50")
    with pytest.raises(InvalidConfig, match=r"^log is missing; expected a log, or a table of items \(items\)"):
        espalier.fit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"item": "ean"}, r"^--item: got 'ean', expected a column of shop\.csv"),
        ({"user": "brand"}, "^--user: got 'brand', expected nothing without a log"),
        ({"time": "file"}, "^--time: got 'file', expected nothing without a log"),
        ({"kind": "otm"}, "^--kind: got 'otm', expected one of xr-linear, xreg without a log"),
    ],
)
def test_what_a_table_alone_cannot_have_is_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    shop().write_csv(tmp_path / "shop.csv")
    with pytest.raises(InvalidConfig, match=message):
        configuration(tmp_path, None, tmp_path / "shop.csv", **options)


def test_tables_that_cannot_be_searched_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "shop.csv"
    shop().select("sku", "price").write_csv(file)
    with pytest.raises(InvalidData, match=r"^shop\.csv: got 'no column of words', expected texts to search"):
        configuration(tmp_path, None, file)
    for first in (["Name"], ["state"], ["text"], [pl.col("sku").alias("")]):
        shop().select(*first, pl.col("sku").alias("code")).write_csv(file)
        with pytest.raises(InvalidConfig, match=r"^--items: got \[.*, 'code'\], expected a column of ids, .* with --item NAME"):
            configuration(tmp_path, None, file)
    shop().select("Name", pl.col("sku").alias("code")).write_csv(file)
    assert configuration(tmp_path, None, file, item="code")["data"]["items_id"] == "code"
    shop(sku=["1"] * SHOP).write_csv(file)
    with pytest.raises(InvalidData, match=r"^shop\.csv: line 3, column sku: got '1', expected each id once; line 2 has it, too"):
        configuration(tmp_path, None, file, item="sku")
    with pytest.raises(InvalidConfig, match=r"^--items: got .*none\.csv', expected a Parquet, CSV or TSV file that exists"):
        configuration(tmp_path, None, tmp_path / "none.csv")
    with pytest.raises(InvalidConfig, match=r"^LOG is missing; expected a log, or a table of items \(--items\)"):
        configuration(tmp_path, None, None)
    file.write_text("sku,Name\n1,red shoe\n")
    with pytest.raises(InvalidConfig, match=r"^--out: got .*, expected another file than the log and the items"):
        write_configuration(None, file, True, None, NO_OPTIONS, file)


def test_a_table_that_is_taken_for_a_log_is_recognised(tmp_path: Path) -> None:
    for columns in (["sku", "Name", "text"], ["id", "Name"]):
        shop().select(columns).write_csv(tmp_path / "shop.csv")
        with pytest.raises(InvalidData, match=r"If these are items to search by text, say so with --items shop\.csv$"):
            configuration(tmp_path, tmp_path / "shop.csv", None)
        with pytest.raises(InvalidData) as error:
            configuration(tmp_path, tmp_path / "shop.csv", None, user="nobody")
        assert "--items" not in str(error.value)
    shop().select("sku", "price").write_csv(tmp_path / "shop.csv")
    with pytest.raises(InvalidData) as error:
        configuration(tmp_path, tmp_path / "shop.csv", None)
    assert "--items" not in str(error.value)


def test_stray_quotes_of_a_table_are_characters(tmp_path: Path) -> None:
    lines = [f"{number},a red shoe {number},plain" for number in range(1500)]
    lines[1200] = '1200,"7 inch shoe,plain'
    (tmp_path / "shop.csv").write_text("\n".join(["sku,Name,text", *lines, ""]))
    assert configuration(tmp_path, None, tmp_path / "shop.csv")["data"]["items_format"] == {"quote": ""}


def test_broken_rows_of_a_table_are_left_out_and_said(tmp_path: Path) -> None:
    lines = [f"{number},a red shoe {number},plain" for number in range(100)]
    lines[50] = "50,broken"
    (tmp_path / "shop.csv").write_text("\n".join(["sku,Name,text", *lines, ""]))
    assert configuration(tmp_path, None, tmp_path / "shop.csv")["data"]["items_format"] == {"bad_rows": "skip"}
    assert "# - rows that cannot be read are left out, the first being shop.csv: line 52" in (tmp_path / "new.toml").read_text()


def test_the_command_writes_what_fit_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shop().write_csv(tmp_path / "shop.csv")
    assert command("new", "--items", "shop.csv", "--item", "sku").status == 0
    assert command("fit", "--config", "shop.toml", "--out", "models/shop/1").status == 0
    found = espalier.open(tmp_path / "models" / "shop" / "1").search(["green tent 6"], m=1, fields=["Name", "state"])
    assert found["Name"].to_list() == ["green tent 6"]
    assert "sku" not in found.columns
