"""WebShop's own files: what is read of them, what a damaged one is told, and the catalogue kept
from them on disk.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shop import entry, opened, write

from agentr_core.environments.webshop.goals import (
    NO_ATTRIBUTE,
    HumanInstruction,
    Product,
    find_files,
    open_catalogue,
    read_products,
)
from agentr_core.errors import ConfigError, DataFileError


def products(folder: Path, *raw: dict[str, object], limit: int = 0, **others: Any) -> list[Product]:
    return list(read_products(find_files(write(folder, raw, **others), "", wishes=True), limit))


def test_a_product_is_read_as_the_published_shop_reads_it(tmp_path: Path) -> None:
    raw = entry(
        "B01",
        "Tall Mug",
        query=" Mugs ",
        full_description="Holds tea.",
        small_description=["Big.", "Blue."],
        pricing="$9.50 - $1,012.00",
        options={"Color": [" Blue/White ", "Red"], "SIZE": ["12 OZ"]},
    )
    raw["customization_options"]["style"] = None
    wish = {
        "instruction": "i want a mug",
        "instruction_attributes": ["big"],
        "instruction_options": ["red"],
        "worker_id": "x",
    }
    annotation = {"attributes": ["big"], "instruction": "Find me big mugs", "instruction_attributes": ["big"]}

    (product,) = products(tmp_path, raw, annotations={"B01": annotation}, wishes={"B01": [wish]})

    assert product == Product(
        asin="B01",
        title="Tall Mug",
        query="mugs",
        category="garden",
        product_category="Kitchen \u203a Cups \u203a Mugs",
        description="Holds tea.",
        bullets=("Big.", "Blue."),
        prices=(9.5, 1012.0),
        options={"color": ("blue | white", "red"), "size": ("12 oz",)},
        attributes=("big",),
        instruction="Find me big mugs",
        instruction_attributes=("big",),
        wishes=(HumanInstruction(instruction="i want a mug", attributes=("big",), options=("red",)),),
    )
    assert product.price_tag == "$9.5 to $1012.0"


def test_what_is_missing_has_its_published_value(tmp_path: Path) -> None:
    raw = entry("B01", pricing=None, small_description="One.", customization_options="", full_description=None)
    (product,) = products(tmp_path, raw)
    assert (product.prices, product.price_tag) == ((100.0,), "$100.0")
    assert (product.bullets, product.description, product.options) == (("One.",), "", {})
    assert (product.attributes, product.instruction, product.wishes) == ((NO_ATTRIBUTE,), "", ())


def test_bad_and_repeated_numbers_are_passed_over_and_count_towards_the_limit(tmp_path: Path) -> None:
    raw = [entry("nan"), entry("B01"), entry("B0123456789"), entry("B01", "Other"), entry("B02"), entry("B03")]
    assert [p.asin for p in products(tmp_path, *raw)] == ["B01", "B02", "B03"]
    assert [p.asin for p in products(tmp_path, *raw, limit=5)] == ["B01", "B02"]


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("items_shuffle.json", lambda text: text[:-40], r"items_shuffle\.json is cut off or not JSON .* again$"),
        ("items_ins_v2.json", lambda text: text[:-3], r"items_ins_v2\.json is cut off or not JSON"),
        ("items_human_ins.json", lambda _: "", r"items_human_ins\.json is cut off or not JSON"),
        ("items_shuffle.json", lambda _: "[]", r"items_shuffle\.json has no product; download it again$"),
        ("items_shuffle.json", lambda text: text.replace('"query"', '"kwery"'), r"^product 0 of .*\(no 'query'\)"),
        ("items_shuffle.json", lambda text: text.replace("$9.50", "$9.5.0"), r"^product 0 of .*malformed \(could not"),
        ("items_ins_v2.json", lambda _: '{"B01": {"attributes": 7}}', r"^product 0 of .*malformed \('int' object"),
    ],
)
def test_a_damaged_file_is_told_in_one_sentence_and_leaves_nothing(
    tmp_path: Path, name: str, damage: Callable[[str], str], told: str
) -> None:
    folder = write(tmp_path / "data", [entry("B01"), entry("B02")], {"B01": {"attributes": ["big"]}})
    folder.joinpath(name).write_text(damage(folder.joinpath(name).read_text()))
    with pytest.raises(DataFileError, match=told) as told_once:
        open_catalogue(find_files(folder, "", wishes=True), 0, tmp_path / "cache")
    assert "\n" not in str(told_once.value)
    assert not any((tmp_path / "cache").iterdir())


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^environment\.options\.data_dir: there is no folder .*nowhere; name"):
        find_files(tmp_path / "nowhere", "", wishes=False)
    write(tmp_path, [entry("B01")], suffix="_1000")
    with pytest.raises(ConfigError, match=r"has no items_shuffle\.json but .*items_shuffle_1000\.json; set data_dir"):
        find_files(tmp_path, "", wishes=False)
    tmp_path.joinpath("items_human_ins.json").unlink()
    assert find_files(tmp_path, "_1000", wishes=False).wishes is None
    with pytest.raises(ConfigError, match=r"has no items_human_ins\.json"):
        find_files(tmp_path, "_1000", wishes=True)


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    with pytest.raises(ConfigError, match=r"^environment\.options\.cache_dir: .*file.cache cannot be made"):
        open_catalogue(find_files(write(tmp_path, [entry("B01")]), "", wishes=True), 0, tmp_path / "file" / "cache")


def test_a_catalogue_is_built_once_for_one_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = [entry("B01", "Red Mug"), entry("B02", "Tea Pot"), entry("B03", "Red Kettle")]
    first = opened(tmp_path, raw)
    assert [first.product(row).title for row in range(len(first))] == ["Red Mug", "Tea Pot", "Red Kettle"]
    folders = {path.name for path in (tmp_path / "cache").iterdir()}
    assert len(folders) == 1

    with monkeypatch.context() as patch:
        patch.setattr("agentr_core.environments.webshop.goals.read_products", None)
        # Another time of change, the same content.
        second = opened(tmp_path, raw)
    assert second.product(2) == first.product(2)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == folders

    third = opened(tmp_path, raw[:2])
    assert len(third) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_catalogue_is_told(tmp_path: Path) -> None:
    catalogue = opened(tmp_path, [entry("B01")])
    (folder,) = (tmp_path / "cache").iterdir()
    index = folder / "index" / "params.index.json"
    text = index.read_text()
    index.write_text("{")
    with pytest.raises(DataFileError, match=r"index is damaged .*; delete it to have it rebuilt"):
        opened(tmp_path, [entry("B01")])
    index.write_text(text)
    folder.joinpath("starts.npy").write_bytes(b"")
    with pytest.raises(DataFileError, match=rf"catalogue .*{folder.name} is damaged"):
        opened(tmp_path, [entry("B01")])
    folder.joinpath("products.jsonl").write_bytes(b"{")
    with pytest.raises(DataFileError, match=rf"catalogue .*{folder.name} is damaged; delete it"):
        catalogue.product(0)


def build(folder: Path) -> int:
    return len(open_catalogue(find_files(folder, "", wishes=False), 0, folder / "cache"))


@pytest.mark.slow
def test_processes_that_build_at_once_share_one_result(tmp_path: Path) -> None:
    write(tmp_path, [entry(f"B{number}", f"Mug {number}") for number in range(200)])
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(build, [tmp_path] * 2, chunksize=1) == [200] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("red", [0, 2]),
        ("RED MUGS", [0, 3, 2]),
        ("the woman's kettle", [2]),
        ("women", [4]),
        ("2.5 quart", [1]),
        ("unheard", []),
        ("", []),
        ("the of", []),
    ],
)
def test_search_stems_words_and_ranks_by_bm25(tmp_path: Path, query: str, found: list[int]) -> None:
    raw = [
        entry("B01", "Red Mug"),
        entry(
            "B02", "Pot", full_description="Holds 2.5 quarts", small_description=["A", "Second bullets are not read"]
        ),
        entry("B03", "Red Kettle", small_description=["Boils fast"]),
        entry("B04", "Mug", options={"color": ["blue"]}),
        entry("B05", "Women's Cup"),
    ]
    assert list(opened(tmp_path, raw).search(query)) == found


def test_equal_scores_go_by_row_and_at_most_fifty_are_found(tmp_path: Path) -> None:
    catalogue = opened(tmp_path, [entry(f"B{number:03}") for number in range(120)])
    assert catalogue.search("mug") == tuple(range(50))


def test_second_bullets_are_not_searched(tmp_path: Path) -> None:
    catalogue = opened(tmp_path, [entry("B01", small_description=["first", "second"])])
    assert (catalogue.search("first"), catalogue.search("second")) == ((0,), ())


def test_the_files_are_read_as_streams(tmp_path: Path) -> None:
    folder = write(tmp_path, [entry("B01"), entry("B02")])
    path = folder / "items_shuffle.json"
    path.write_text(json.dumps([entry("B01")])[:-1] + ", {broken")
    reading = read_products(find_files(folder, "", wishes=False))
    assert next(reading).asin == "B01"
    with pytest.raises(DataFileError, match="not JSON"):
        next(reading)
