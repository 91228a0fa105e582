import hashlib
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentr_core import system
from agentr_core.environments.crafting.recipes import (
    Ingredient,
    Recipe,
    RecipeBook,
    build_book,
    load_folder,
    load_shipped,
    load_splits,
)
from agentr_core.errors import DataFault, DataFileError

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT.parent / "shared" / "data" / "textcraft"


def item(name: str) -> dict[str, str]:
    return {"item": f"minecraft:{name}"}


def tag(name: str) -> dict[str, str]:
    return {"tag": f"minecraft:{name}"}


def shapeless(output: str, *inputs: Any, group: str = "", count: int = 1) -> dict[str, Any]:
    return {
        "type": "minecraft:crafting_shapeless",
        **({"group": group} if group else {}),
        "ingredients": [item(i) if isinstance(i, str) else i for i in inputs],
        "result": {**item(output), "count": count},
    }


def load(folder: Path, **files: dict[str, Any]) -> RecipeBook:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        folder.joinpath(f"{name}.json").write_text(json.dumps(content))
    return load_folder(folder)


def outputs(book: RecipeBook) -> list[str]:
    return [recipe.output.removeprefix("minecraft:") for recipe in book.recipes]


def only_inputs(book: RecipeBook) -> list[tuple[str, int, bool]]:
    (recipe,) = book.recipes
    return [(i.name, i.count, i.is_tag) for i in recipe.inputs]


def test_shaped_counts_letters_in_the_order_of_the_key(tmp_path: Path) -> None:
    book = load(
        tmp_path,
        pump={
            "type": "minecraft:crafting_shaped",
            "pattern": ["P P", "PRP"],
            "key": {"R": item("rod"), "P": item("plate")},
            "result": {**item("pump"), "count": 3},
        },
    )
    assert only_inputs(book) == [("minecraft:rod", 1, False), ("minecraft:plate", 4, False)]
    assert book.recipes[0].count == 3


def test_shapeless_counts_repeats_and_a_plain_result_means_one(tmp_path: Path) -> None:
    recipe = shapeless("dough", "flour", "egg", "flour") | {"result": "minecraft:dough"}
    book = load(tmp_path, dough=recipe)
    assert only_inputs(book) == [("minecraft:flour", 2, False), ("minecraft:egg", 1, False)]
    assert book.recipes[0].count == 1


def test_first_option_counts(tmp_path: Path) -> None:
    assert only_inputs(load(tmp_path, a=shapeless("a", [item("x"), item("y")]))) == [("minecraft:x", 1, False)]


def test_other_recipe_types_and_other_files_are_passed_over(tmp_path: Path) -> None:
    tmp_path.joinpath("notes.txt").write_text("not a recipe")
    book = load(tmp_path, ash={"type": "minecraft:smelting", "result": "minecraft:ash"}, a=shapeless("a", "x"))
    assert outputs(book) == ["a"]
    assert "minecraft:ash" not in book.items


def test_a_lone_block_is_no_ingredient_but_its_product_is_known(tmp_path: Path) -> None:
    book = load(tmp_path, a=shapeless("gem", "gem_block"), b=shapeless("lamp", "gem_block", "torch"))
    assert outputs(book) == ["lamp"]
    assert "minecraft:gem" in book.items
    assert book.depth("minecraft:gem") == 0


def test_the_recipe_that_would_close_a_circle_is_left_out_by_file_name(tmp_path: Path) -> None:
    forward, back = shapeless("ingot", "nugget"), shapeless("nugget", "ingot")
    assert outputs(load(tmp_path / "one", a=forward, b=back)) == ["ingot"]
    assert outputs(load(tmp_path / "two", b=forward, a=back)) == ["nugget"]


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_long_circles_are_cut_whatever_the_order(tmp_path: Path, order: str) -> None:
    recipes = (shapeless("x", "y"), shapeless("y", "z"), shapeless("z", "x"))
    book = load(tmp_path, **dict(zip(order, recipes, strict=True)))
    assert len(book.recipes) == 2
    assert [depth for _, depth in book.goals] == [1, 2]


def test_a_circle_through_a_tag_is_cut(tmp_path: Path) -> None:
    frame, board = shapeless("frame", tag("boards")), shapeless("oak_board", "frame", group="boards")
    assert outputs(load(tmp_path / "one", a=frame, b=board)) == ["frame"]
    assert outputs(load(tmp_path / "two", b=frame, a=board)) == ["oak_board"]


def test_an_item_cannot_be_made_of_itself(tmp_path: Path) -> None:
    assert outputs(load(tmp_path, a=shapeless("x", "x", "y"), b=shapeless("z", "y"))) == ["z"]


def test_the_last_group_of_an_item_is_its_tag(tmp_path: Path) -> None:
    book = load(
        tmp_path,
        bed1=shapeless("bed", "wool", group="beds"),
        bed2=shapeless("bed", "cloth", group="dyed"),
        dye=shapeless("dye", "flower", group="dye"),
        cot=shapeless("cot", "cloth", group="beds"),
    )
    assert dict(book.item_to_tag) == {"minecraft:bed": "minecraft:dyed", "minecraft:cot": "minecraft:beds"}
    assert book.tags == {"minecraft:beds", "minecraft:dyed"}
    assert book.members("minecraft:dyed") == ("minecraft:bed",)
    assert [r.output for r in book.recipes_by_tag["minecraft:beds"]] == ["minecraft:bed", "minecraft:cot"]
    assert next(r for r in book.recipes if r.output == "minecraft:dye").output_tag == "minecraft:dye"


def test_a_tag_that_nothing_satisfies_becomes_an_item(tmp_path: Path) -> None:
    book = load(
        tmp_path,
        board=shapeless("oak_board", tag("oak_logs"), group="boards"),
        box=shapeless("box", tag("boards"), tag("boards")),
    )
    board, box = book.recipes
    assert board.inputs == (Ingredient(name="minecraft:oak_logs", count=1, is_tag=False),)
    assert box.inputs == (Ingredient(name="minecraft:boards", count=2, is_tag=True),)
    assert book.items == {"minecraft:oak_board", "minecraft:oak_logs", "minecraft:box"}
    assert book.recipes_by_ingredient["minecraft:boards"] == (box,)
    assert "minecraft:box" not in book.recipes_by_ingredient


def test_depth_is_the_shallowest_recipe_of_the_deepest_ingredient(tmp_path: Path) -> None:
    book = load(
        tmp_path,
        board=shapeless("board", "log", group="boards"),
        stick=shapeless("stick", tag("boards")),
        stick_from_bamboo=shapeless("stick", "bamboo"),
        sword=shapeless("sword", "stick", tag("boards")),
        rack=shapeless("rack", "sword", "log"),
    )
    depths = {name: book.depth(f"minecraft:{name}") for name in ("log", "board", "boards", "stick", "sword", "rack")}
    assert depths == {"log": 0, "board": 1, "boards": 1, "stick": 1, "sword": 2, "rack": 3}
    assert book.goals == (
        ("minecraft:board", 1),
        ("minecraft:stick", 1),
        ("minecraft:sword", 2),
        ("minecraft:rack", 3),
    )


def test_goals_keep_the_load_order_within_a_depth(tmp_path: Path) -> None:
    book = load(tmp_path, c=shapeless("first", "x"), d=shapeless("third", "first"), e=shapeless("second", "x"))
    assert [name.removeprefix("minecraft:") for name, _ in book.goals] == ["first", "second", "third"]


def test_build_book_takes_recipes_as_they_are() -> None:
    def recipe(output: str, inner: str, is_tag: bool = False) -> Recipe:
        inputs = (Ingredient(name=inner, count=1, is_tag=is_tag),)
        return Recipe(output=output, count=1, output_tag=None, inputs=inputs)

    recipes = (recipe("m:a", "m:x_block"), recipe("m:b", "m:t", True))
    book = build_book(recipes, item_to_tag={"m:c": "m:t"}, items=["m:d"])
    assert book.recipes == recipes
    assert book.items == {"m:a", "m:b", "m:x_block", "m:d"}
    assert book.members("m:t") == ("m:c",)
    with pytest.raises(DataFault, match=r"cycle: .*m:a"):
        build_book([recipe("m:a", "m:b"), recipe("m:b", "m:a")]).depth("m:a")


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"folder .*nowhere does not exist"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(DataFileError, match="has no crafting recipe"):
        load_folder(tmp_path)


SHAPED = {"type": "minecraft:crafting_shaped", "pattern": ["A"], "key": {"A": item("x")}, "result": item("y")}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read as JSON"),
        ("\xff", "cannot be read as JSON"),
        ("[]", "is malformed"),
        ("{}", "no 'type'"),
        (json.dumps(SHAPED | {"key": {}}), "the pattern has 'A', the key does not"),
        (json.dumps(SHAPED | {"key": {"A": []}}), "is malformed"),
        (json.dumps(SHAPED | {"key": {"A": {"thing": "x"}}}), "no 'item'"),
        (json.dumps(SHAPED | {"result": 7}), "is malformed"),
        (json.dumps(SHAPED | {"result": {**item("y"), "count": "two"}}), "count is 'two', not a positive integer"),
    ],
)
def test_a_malformed_file_is_named_with_its_fault(tmp_path: Path, text: str, why: str) -> None:
    tmp_path.joinpath("broken.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataFileError, match=re.escape(why)) as caught:
        load_folder(tmp_path)
    assert "broken.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shipped_table_has_the_published_size() -> None:
    book = load_shipped()
    assert len(book.recipes) == 613
    assert Counter(depth for _, depth in book.goals) == {1: 125, 2: 291, 3: 117, 4: 11}
    assert len(book.members("minecraft:planks")) == 8
    assert book.depth("minecraft:planks") == 1
    assert set(book.recipes_by_tag) == book.tags
    assert not book.tags & book.items


def test_shipped_table_equals_the_published_one() -> None:
    if not PUBLISHED.is_dir():
        pytest.skip(f"no published tables in {PUBLISHED}; they are not part of the project")
    recipes, goals, split = (
        json.loads(PUBLISHED.joinpath(f"published_{name}.json").read_text()) for name in ("recipes", "goals", "split")
    )
    book = load_shipped()
    assert [
        {
            "output": r.output,
            "output_tag": r.output_tag,
            "count": r.count,
            "inputs": [{"count": i.count, ("tag" if i.is_tag else "item"): i.name} for i in r.inputs],
        }
        for r in book.recipes
    ] == recipes["recipes"]
    assert dict(book.item_to_tag) == recipes["item_to_tag"]
    assert sorted(book.items) == sorted(recipes["items"])
    assert sorted(book.tags) == sorted(recipes["tags"])
    entries = [{"data_idx": rank, "goal": goal, "depth": depth} for rank, (goal, depth) in enumerate(book.goals)]
    assert entries == goals
    assert {name: list(load_splits()[name]) for name in ("train", "test")} == split


def test_the_games_own_format_gives_the_same_book(tmp_path: Path) -> None:
    rows = json.loads(system.data_path("textcraft", "recipes.json").read_text())
    for number, (output, count, group, inputs) in enumerate(rows):
        parts = [tag(n[1:]) if n.startswith("#") else item(n) for n, times in inputs.items() for _ in range(times)]
        content = shapeless(output, *parts, group=group or "", count=count)
        tmp_path.joinpath(f"{number:04}.json").write_text(json.dumps(content))
    assert load_folder(tmp_path) == load_shipped()


def test_splits_are_disjoint_and_cover_the_goals() -> None:
    split = load_splits()
    assert {name: len(indices) for name, indices in split.items()} == {"train": 374, "test": 100, "rest": 70}
    assert sorted(sum(split.values(), ())) == list(range(len(load_shipped().goals)))
    depths = [depth for _, depth in load_shipped().goals]
    assert Counter(depths[index] for index in split["test"]) == {1: 31, 2: 41, 3: 25, 4: 3}


def derive_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("textcraft_derive", ROOT / "data" / "textcraft" / "derive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_makes_the_shipped_table_byte_for_byte() -> None:
    pytest.importorskip("minecraft_data", reason="the game data comes with the extra `dev`")
    assert derive_script().derive().encode() == ROOT.joinpath("data", "textcraft", "recipes.json").read_bytes()


def test_readme_names_each_file_with_its_hash() -> None:
    text = ROOT.joinpath("data", "README.md").read_text()
    hashes = dict(re.findall(r"^\| `(\S+/\S+)` \|.*\| `([0-9a-f]{64})` \|$", text, re.M))
    kinds = ("*/*.json", "*/*.jsonl", "*/*.jinja", "models/*-*/*", "shapes/*/*", "reasoning/*/*")
    paths = (path for kind in kinds for path in (ROOT / "data").glob(kind))
    # A script that another test imported leaves its bytecode beside it.
    files = (path for path in paths if path.parent.name != "__pycache__")
    assert {path.relative_to(ROOT / "data").as_posix() for path in files} <= hashes.keys()
    assert hashes == {name: hashlib.sha256((ROOT / "data" / name).read_bytes()).hexdigest() for name in hashes}


def test_data_is_found_in_an_installed_package_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, checkout = tmp_path / "installed", tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(system, "DATA_ROOTS", (package, checkout))
    with pytest.raises(DataFileError, match=r"shipped data textcraft/split\.json is missing"):
        load_splits()
    for root, start in ((checkout, 2), (package, 1)):
        root.joinpath("textcraft").mkdir(parents=True)
        split = {"goals": 3, "train": [[start, 2]], "test": [[0, 0]]}
        root.joinpath("textcraft", "split.json").write_text(json.dumps(split))
        assert load_splits()["train"] == tuple(range(start, 3))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("split", "[]"),
        ("split", '{"goals": 3, "train": [[1]], "test": []}'),
        ("recipes", '[["a", 1, null]]'),
        ("recipes", "7"),
    ],
)
def test_a_damaged_shipped_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setattr(system, "DATA_ROOTS", (tmp_path,))
    tmp_path.joinpath("textcraft").mkdir()
    tmp_path.joinpath("textcraft", f"{name}.json").write_text(text)
    with pytest.raises(DataFileError, match=rf"{name}\.json is malformed"):
        load_splits() if name == "split" else load_shipped()
