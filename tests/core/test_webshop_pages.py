"""The pages of the shop, text by text and click by click."""

from __future__ import annotations

from pathlib import Path

import pytest
from shop import entry, opened

from agentr_core.environments.webshop.goals import Catalogue
from agentr_core.environments.webshop.world import Visit, buttons, page_text, visit_after

WISH = "find me a mug"
HEAD = f"Instruction: [SEP] {WISH} [SEP] Back to Search [SEP] "
BUTTONS = "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    mug = entry(
        "B0MUG",
        "Blue Mug",
        full_description=" Holds tea. ",
        small_description=["Big.", "  ", "Blue & <round>."],
        options={"color": ["Blue", "red/white"], "size": ["12 oz", "red/white"], "look": ["features"]},
    )
    return opened(
        tmp_path_factory.mktemp("shop"),
        [mug, *(entry(f"B{number:02}", f"Pot {number}", pricing="$5.00 to $7.50") for number in range(25))],
    )


def after(shop: Catalogue, *actions: str) -> Visit:
    visit = Visit()
    for action in actions:
        following = visit_after(shop, visit, action)
        assert following is not None, action
        visit = following
    return visit


def page(shop: Catalogue, *actions: str) -> str:
    return page_text(shop, after(shop, *actions), WISH)


def test_start(shop: Catalogue) -> None:
    assert page(shop) == f"WebShop [SEP] Instruction: [SEP] {WISH} [SEP] Search"
    assert buttons(shop, Visit()) == ()


def test_results(shop: Catalogue) -> None:
    assert (
        page(shop, "search[MUG]")
        == HEAD + "Page 1 (Total results: 1) [SEP] Next > [SEP] B0MUG [SEP] Blue Mug [SEP] $9.5"
    )
    third_page = page(shop, "search[pot]", "click[Next >]", "click[next >]")
    rows = [f"B{number:02} [SEP] Pot {number} [SEP] $5.0 to $7.5" for number in range(20, 25)]
    assert third_page == HEAD + " [SEP] ".join(["Page 3 (Total results: 25)", "< Prev", "Next >", *rows])
    assert page(shop, "search[pot]", "click[Next >]", "click[< Prev]") == page(shop, "search[pot]")
    assert (
        page(shop, "search[pot]", *["click[Next >]"] * 3)
        == HEAD + "Page 4 (Total results: 25) [SEP] < Prev [SEP] Next >"
    )
    assert page(shop, "search[unheard]") == HEAD + "Page 1 (Total results: 0) [SEP] Next >"


def test_product_and_its_subpages(shop: Catalogue) -> None:
    actions = ["search[mug]", "click[b0mug]"]
    options = "color [SEP] blue [SEP] red | white [SEP] size [SEP] 12 oz [SEP] red | white [SEP] look [SEP] features"
    item = f"{HEAD}< Prev [SEP] {options} [SEP] Blue Mug [SEP] Price: $9.5 [SEP] Rating: N.A. [SEP] {BUTTONS}"
    assert page(shop, *actions) == item
    assert page(shop, *actions, "click[blue]") == item
    assert page(shop, *actions, "click[Description]") == HEAD + "< Prev [SEP] Holds tea."
    assert page(shop, *actions, "click[Features]") == HEAD + "< Prev [SEP] Big. [SEP]  [SEP] Blue & <round>."
    assert page(shop, *actions, "click[Reviews]") == HEAD + "< Prev"
    assert page(shop, *actions, "click[Features]", "click[< Prev]") == item
    assert page(shop, *actions, "click[Back to Search]") == page(shop)


@pytest.mark.parametrize(
    ("bullets", "description", "features", "described"),
    [
        ([""], "", "< Prev [SEP] ", "< Prev"),
        (["  "], "  ", "< Prev [SEP] ", "< Prev [SEP] "),
        ([], "\n", "< Prev", "< Prev"),
        ("", "Tall.", "< Prev [SEP] ", "< Prev [SEP] Tall."),
    ],
)
def test_blanks_are_parts_as_in_the_public_text_mode(
    tmp_path: Path, bullets: object, description: str, features: str, described: str
) -> None:
    blank = entry("B0MUG", "Blue Mug", small_description=bullets, full_description=description)
    shop = opened(tmp_path, [blank, entry("B1", "Pot")])
    actions = ["search[mug]", "click[b0mug]"]
    assert page(shop, *actions, "click[Features]") == HEAD + features
    assert page(shop, *actions, "click[Description]") == HEAD + described
    assert page(shop, *actions, "click[Reviews]") == HEAD + "< Prev"


def test_an_option_called_search_cannot_be_clicked(tmp_path: Path) -> None:
    shop = opened(tmp_path, [entry("B0MUG", "Blue Mug", options={"kind": ["Search", "find"]}), entry("B1", "Pot")])
    visit = after(shop, "search[mug]", "click[b0mug]")
    assert "[SEP] kind [SEP] search [SEP] find [SEP]" in page_text(shop, visit, WISH)
    assert visit_after(shop, visit, "click[search]") is None
    assert "search" not in buttons(shop, visit)
    assert visit_after(shop, visit, "click[find]").chosen_options == (("kind", "find"),)  # type: ignore[union-attr]


def test_choices_last_until_the_product_is_left(shop: Catalogue) -> None:
    actions = ["search[pot]", "click[Next >]", "click[B12]"]
    back = after(shop, *actions, "click[< Prev]")
    assert (back.page, back.page_number, back.chosen_options) == ("results", 2, ())

    visit = after(shop, "search[mug]", "click[B0MUG]", "click[blue]", "click[Reviews]", "click[< Prev]", "click[12 oz]")
    assert visit.chosen_options == (("color", "blue"), ("size", "12 oz"))
    assert visit_after(shop, visit, "search[mug]") == after(shop, "search[mug]")


def test_a_value_of_two_options_is_the_last_ones_and_button_names_win(shop: Catalogue) -> None:
    visit = after(shop, "search[mug]", "click[B0MUG]")
    assert visit_after(shop, visit, "click[red | white]").chosen_options == (("size", "red | white"),)  # type: ignore[union-attr]
    assert visit_after(shop, visit, "click[features]").page == "features"  # type: ignore[union-attr]


def test_the_last_page_has_every_label_and_no_way_on(shop: Catalogue) -> None:
    end = after(shop, "search[mug]", "click[B0MUG]", "click[12 oz]", "click[blue]", "click[Buy Now]")
    assert page_text(shop, end, WISH, 2 / 3).split(" [SEP] ") == [
        *("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)", "Purchased"),
        *("asin", "B0MUG", "options", '{"color": "blue", "size": "12 oz"}', "attrs", "None", "category", "None"),
        *("query", "None", "product category", "None", "Target", "asin", "options", "attrs", "price upper"),
        *("instuction text", "category", "product category", "query", "Goal", "None", "Reward"),
        *("Your score (min 0.0, max 1.0)", "0.6666666666666666", "Reward Details", "None"),
    ]
    assert buttons(shop, end) == ()
    assert visit_after(shop, end, "search[mug]") is None


@pytest.mark.parametrize(
    "action",
    [
        "",
        "dance",
        "search[]",
        "search",
        "click[search]",
        "Search[mug]",
        "click[b0mug]",
        "click[buy now]",
        "go click[x]",
    ],
)
def test_what_cannot_be_done_at_the_start(shop: Catalogue, action: str) -> None:
    assert visit_after(shop, Visit(), action) is None


@pytest.mark.parametrize(
    ("actions", "action"),
    [
        (["search[mug]"], "click[b12]"),
        (["search[mug]"], "click[< prev]"),
        (["search[mug]"], "click[buy now]"),
        (["search[mug]"], "click[blue]"),
        (["search[pot]", "click[Next >]"], "click[b02]"),
        (["search[mug]", "click[b0mug]"], "click[next >]"),
        (["search[mug]", "click[b0mug]"], "click[color]"),
        (["search[mug]", "click[b0mug]", "click[features]"], "click[buy now]"),
    ],
)
def test_what_is_not_on_the_page_cannot_be_clicked(shop: Catalogue, actions: list[str], action: str) -> None:
    assert visit_after(shop, after(shop, *actions), action) is None


def test_every_page_can_search(shop: Catalogue) -> None:
    for actions in (
        [],
        ["search[pot]"],
        ["search[pot]", "click[b02]"],
        ["search[pot]", "click[b02]", "click[reviews]"],
    ):
        assert page(shop, *actions, "search[mug]") == page(shop, "search[mug]")
