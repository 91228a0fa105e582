"""The reward of WebShop term by term, against numbers worked out by hand and those of the published
tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agentr_core.environments.webshop.goals import (
    COLOURS,
    Goal,
    Product,
    colour_of,
    num_attributes_met,
    num_options_met,
    purchase_reward,
    spacy_nouns,
    type_reward,
    word_nouns,
)
from agentr_core.errors import ConfigError

HOME_THEATER = (
    "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"
)
SOUNDBAR = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"


def product(title: str = "Tall Mug", **fields: object) -> Product:
    plain = {
        "asin": "B01",
        "query": "mugs",
        "category": "garden",
        "product_category": "a \u203a b \u203a c",
        "description": "",
        "bullets": (),
        "prices": (9.5,),
        "options": {},
        "attributes": (),
    }
    return Product(title=title, **(plain | fields))  # type: ignore[arg-type]


def goal(attributes: tuple[str, ...], options: tuple[tuple[str, str], ...] = (), bound: float = 40.0) -> Goal:
    return Goal(row=0, instruction="", attributes=attributes, options=options, price_bound=bound)


def reward_of(
    wish: Goal, bought: Product, chosen: dict[str, str], cost: float = 35.0, wanted: Product | None = None
) -> float:
    return purchase_reward(wish, wanted or product(), bought, chosen, cost, word_nouns)


OILS = ("tea tree", "essential oils", "natural ingredients")
MUG = product(attributes=("tea tree", "essential oil", "natural ingredients"))
OPTIONS = (("color", "grey"), ("size", "xl"))


def test_everything_met_is_one() -> None:
    assert reward_of(goal(OILS, OPTIONS), MUG, {"color": "grey", "size": "xl"}) == 1.0


@pytest.mark.parametrize(
    ("wish", "bought", "chosen", "cost", "expected"),
    [
        (goal(OILS, OPTIONS), MUG, {"color": "grey"}, 35.0, 5 / 6),
        (goal(OILS, OPTIONS), MUG, {}, 41.0, 3 / 6),
        (goal(OILS, OPTIONS), product(), {"color": "grey", "size": "xl"}, 40.0, 3 / 6),
        (goal(OILS), MUG, {"color": "pink"}, 35.0, 1.0),
        (goal(("big",)), MUG, {}, 35.0, 1 / 2),
        (goal(("big",)), MUG, {}, 100.0, 0.0),
        (
            goal(OILS, OPTIONS),
            product(query="pots", product_category="x", title="Mug of Very Unlike Make"),
            {},
            1.0,
            1 / 6,
        ),
    ],
)
def test_each_term_has_its_part(
    wish: Goal, bought: Product, chosen: dict[str, str], cost: float, expected: float
) -> None:
    assert reward_of(wish, bought, chosen, cost) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("bought", "expected"),
    [
        (product("Tall Mug"), 1.0),
        (product("Tall Pot", query="pots", product_category="z"), 1.0),
        (product("Steel Pot"), 0.0),
        (product("Steel Pot", query="pots", product_category="z"), 0.0),
    ],
)
def test_type_of_a_short_title(bought: Product, expected: float) -> None:
    assert type_reward(product("Tall Mug"), bought, word_nouns) == expected


@pytest.mark.parametrize(
    ("shared", "fields", "expected"),
    [
        (1, {}, 1.0),
        (1, {"query": "pots"}, 1.0),
        (1, {"query": "pots", "product_category": "b \u203a z \u203a a"}, 1.0),
        (1, {"query": "pots", "product_category": "a \u203a a \u203a z"}, 0.5),
        (2, {"query": "pots", "product_category": "z"}, 0.5),
        (3, {"query": "pots", "product_category": "z"}, 1.0),
    ],
)
def test_type_is_settled_by_query_category_or_title(shared: int, fields: dict[str, str], expected: float) -> None:
    letters = "abcdefghij"
    bought = product(" ".join([*letters[:shared], "other", "words"]), **fields)
    nouns = str.split
    assert type_reward(product(" ".join(letters)), bought, nouns) == expected


def test_a_title_that_shares_less_than_a_tenth_counts_a_tenth() -> None:
    assert type_reward(product(" ".join("abcdefghijk")), product("a z"), str.split) == 0.1


def test_a_wanted_title_without_nouns_counts_as_a_fifth() -> None:
    target = product("2 in 1")
    assert type_reward(target, product("Mug", query="pots", product_category="z"), word_nouns) == 0.5
    assert type_reward(target, product("Mug"), word_nouns) == 1.0


def test_nouns_of_a_title_may_repeat() -> None:
    assert word_nouns("The Men's D.O.N. 2 T-Shirt of 4K and a Bar, for a bar") == [
        *("men", "d", "o", "n", "t", "shirt", "bar", "bar")
    ]


@pytest.mark.parametrize(
    ("wanted", "bought", "published"),
    [
        (
            "adidas Unisex-Adult D.o.n. Issue 2 Basketball Shoe",
            "adidas Unisex-Adult D.o.n. Issue 2 Indoor Court Shoe",
            0.85,
        ),
        (f"{SOUNDBAR} Home Theater System Subwoofer", HOME_THEATER, 0.31),
        (SOUNDBAR, HOME_THEATER, 0.17),
        (
            "Rusticware 921ORB Kitchen and Bath Cabinet Knob",
            "Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover Portable Makeup Tweezers (Silver)",
            0.0,
        ),
    ],
)
def test_words_come_near_the_published_overlaps(wanted: str, bought: str, published: float) -> None:
    names = word_nouns(wanted)
    assert len(set(names) & set(word_nouns(bought))) / len(names) == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(
    ("bought", "expected"),
    [
        (product(attributes=("essential oil", "natural ingredients")), 2),
        (product(bullets=("This soap has Essential Oils",), description="Made with natural ingredients"), 2),
        (product("Tea Tree Oil"), 1),
        (product("English tea for breakfast", attributes=("tea bag", "earl gray")), 0),
    ],
)
def test_attributes(bought: Product, expected: int) -> None:
    assert num_attributes_met(OILS, bought) == expected


@pytest.mark.parametrize(
    ("wanted", "chosen", "expected"),
    [
        (["grey", "xl", "pack of 12"], ["pack of 12", "grey", "xl"], 3),
        (["grey", "xl", "pack of 12"], ["pack of 12", "blue", "xl"], 2),
        (["cool powder snow"], ["powder snow"], 1),
        (["dark red stripe"], ["dark navy"], 1),
        (["large"], ["x-large"], 1),
        ([], ["xl"], 0),
        (["xl"], [], 0),
    ],
)
def test_options_of_people_are_bare_values(wanted: list[str], chosen: list[str], expected: int) -> None:
    assert num_options_met([("", value) for value in wanted], chosen) == expected


@pytest.mark.parametrize(
    ("wanted", "chosen", "expected"),
    [
        (("size", "large"), "large", 1),
        (("size", "large"), "x-large", 0),
        (("color", "red"), "brick red", 1),
        (("color", "dark red"), "dark blue", 0),
        (("color", "brick red"), "red", 1),
        (("color", "brick red"), "blue", 0),
    ],
)
def test_synthetic_options_are_pairs_of_name_and_value(wanted: tuple[str, str], chosen: str, expected: int) -> None:
    assert num_options_met([wanted], [chosen]) == expected


@pytest.mark.parametrize(
    ("wanted", "chosen", "met"),
    [
        # Characters 128 to 255 are left out before the comparison, and those beyond are not.
        ("nude\u00e9", "nudee\u0301", True),
        ("caf\u00e9", "caf", True),
        ("\u00e9", "\u00e9", False),
        ("\u0142\u00f3d\u017a", "\u0142d\u017a", True),
        ("\u0142od\u017a", "lodz", False),
    ],
)
def test_options_outside_ascii_meet_as_in_the_public_code(wanted: str, chosen: str, met: bool) -> None:
    assert num_options_met([("", wanted)], [chosen]) == met


def test_a_pair_is_compared_as_python_writes_it() -> None:
    # A blank that is not printable becomes the word xa0 there, and nothing in what was chosen.
    assert num_options_met([("oz", "12\u00a014")], ["12\u00a014"]) == 0
    assert num_options_met([("size", "12 oz")], ["size 12 oz"]) == 1
    assert num_attributes_met(["caf\u00e9"], product("x", attributes=("caf",))) == 1


def test_colours_are_looked_for_in_their_order() -> None:
    assert [colour_of(value) for value in ("light brick red", "washed", "4 ounce")] == ["light", "ash", "4 ounce"]
    assert list(COLOURS) == sorted(COLOURS)
    assert len(COLOURS) == len(set(COLOURS)) == 102


def test_a_missing_spacy_model_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^environment\.options\.nouns: the spaCy model 'no_such' cannot be loaded"):
        spacy_nouns("no_such")


def test_a_spacy_model_says_which_words_are_nouns(tmp_path: Path) -> None:
    spacy = pytest.importorskip("spacy", reason="comes with the extra `webshop`")
    model = spacy.blank("en")
    model.add_pipe("attribute_ruler").add_patterns(
        [
            {"patterns": [[{"LOWER": "mug"}]], "attrs": {"POS": "NOUN"}},
            {"patterns": [[{"LOWER": "elmark"}]], "attrs": {"POS": "PROPN"}},
            {"patterns": [[{"LOWER": "tall"}]], "attrs": {"POS": "ADJ"}},
        ]
    )
    model.to_disk(tmp_path / "model")
    assert list(spacy_nouns(str(tmp_path / "model"))("Tall Elmark Mug, MUG")) == ["elmark", "mug", "mug"]
