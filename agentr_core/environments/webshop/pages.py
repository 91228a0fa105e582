"""The pages of the shop as pure functions: where an action leads, and the text that is seen there.

Source: WebShop (arXiv 2207.01206), section 3.1; page texts are those of its public text mode, as
AgentGym serves it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from jinja2.utils import htmlsafe_json_dumps

from agentr_core.environments.webshop.catalogue import Catalogue

Page = Literal["start", "results", "item", "description", "features", "reviews", "end"]

SEPARATOR = " [SEP] "
PER_PAGE = 10
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
_SUBPAGES: dict[str, Page] = {"description": "description", "features": "features", "reviews": "reviews"}
ACTION = re.compile(r"(.+)\[(.+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The page that a shopper is on, and all that the shop remembers.

    `number` counts pages of results from 1, `row` is the product looked at, `chosen` are option
    names with values.
    """

    page: Page = "start"
    query: str = ""
    number: int = 1
    row: int = -1
    chosen: tuple[tuple[str, str], ...] = ()


def buttons(catalogue: Catalogue, visit: Visit) -> tuple[str, ...]:
    """Return the texts that can be clicked, in lower case."""
    back, previous = BACK.lower(), PREVIOUS.lower()
    if visit.page in ("start", "end"):
        return ()
    if visit.page == "results":
        asins = (catalogue.product(row).asin.lower() for row in _shown(catalogue, visit))
        return (back, *([previous] if visit.number > 1 else []), NEXT.lower(), *asins)
    if visit.page == "item":
        values = (value for values in catalogue.product(visit.row).options.values() for value in values)
        # The public shop refuses clicks on anything named like its search, even an option.
        return (back, previous, *_SUBPAGES, BUY.lower(), *(value for value in values if value != "search"))
    return (back, previous)


def follow(catalogue: Catalogue, visit: Visit, action: str) -> Visit | None:
    """Return the visit after an action, or None if it cannot be done here. A search is possible on
    any page but the last.
    """
    match = ACTION.match(action)
    if match is None or visit.page == "end":
        return None
    kind, argument = match[1], match[2].lower()
    if kind == "search":
        return Visit(page="results", query=argument)
    if kind != "click" or argument not in buttons(catalogue, visit):
        return None
    return _click(catalogue, visit, argument)


def _click(catalogue: Catalogue, visit: Visit, button: str) -> Visit:
    if button == BUY.lower():
        return replace(visit, page="end")
    if button == BACK.lower():
        return Visit()
    if button == NEXT.lower():
        return replace(visit, number=visit.number + 1)
    if button == PREVIOUS.lower():
        if visit.page == "results":
            return replace(visit, number=visit.number - 1)
        if visit.page == "item":
            return Visit(page="results", query=visit.query, number=visit.number)
        return replace(visit, page="item")
    if visit.page == "results":
        row = next(row for row in _shown(catalogue, visit) if catalogue.product(row).asin.lower() == button)
        return replace(visit, page="item", row=row)
    if button in _SUBPAGES:
        return replace(visit, page=_SUBPAGES[button])
    # A value that two options share belongs to the last of them, as published.
    name = [name for name, values in catalogue.product(visit.row).options.items() if button in values][-1]
    return replace(visit, chosen=tuple({**dict(visit.chosen), name: button}.items()))


def text(catalogue: Catalogue, visit: Visit, instruction: str, reward: float = 0.0) -> str:
    """Return the text of a page. `reward` is shown on the last page."""
    parts = _end(catalogue, visit, reward) if visit.page == "end" else _parts(catalogue, visit, instruction)
    # As in the public text mode: an empty text is no part, but blanks are an empty part.
    return SEPARATOR.join(part.strip() for part in parts if part not in ("", "\n"))


def _parts(catalogue: Catalogue, visit: Visit, instruction: str) -> list[str]:
    if visit.page == "start":
        return ["WebShop", "Instruction:", instruction, "Search"]
    parts = ["Instruction:", instruction, BACK]
    if visit.page == "results":
        parts.append(f"Page {visit.number} (Total results: {len(catalogue.search(visit.query))})")
        parts.extend([*([PREVIOUS] if visit.number > 1 else []), NEXT])
        for row in _shown(catalogue, visit):
            product = catalogue.product(row)
            parts.extend([product.asin, product.title, product.price_tag])
        return parts
    product = catalogue.product(visit.row)
    parts.append(PREVIOUS)
    if visit.page == "item":
        for name, values in product.options.items():
            parts.extend([name, *values])
        parts.extend([product.title, f"Price: {product.price_tag}", "Rating: N.A."])
        parts.extend([*(name.capitalize() for name in _SUBPAGES), BUY])
    elif visit.page == "description":
        parts.append(product.description)
    elif visit.page == "features":
        # The page has a blank before each bullet, so that an empty one is written, too.
        parts.extend(f" {bullet}" for bullet in product.bullets)
    # Products come without reviews; their page of reviews ends here.
    return parts


def _end(catalogue: Catalogue, visit: Visit, reward: float) -> list[str]:
    """Return the last page, with the labels of all that the public shop hides from people but not
    from agents.
    """
    options = str(htmlsafe_json_dumps(dict(visit.chosen), sort_keys=True))
    bought = ["asin", catalogue.product(visit.row).asin, "options", options]
    for label in ("attrs", "category", "query", "product category"):
        bought.extend([label, "None"])
    target = ["asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query"]
    thanks = ["Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)"]
    score = ["Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None"]
    return [*thanks, "Purchased", *bought, "Target", *target, "Goal", "None", *score]


def _shown(catalogue: Catalogue, visit: Visit) -> tuple[int, ...]:
    """Return the products on a page of results, by row."""
    return catalogue.search(visit.query)[(visit.number - 1) * PER_PAGE : visit.number * PER_PAGE]
