"""An expert that knows the goal: it searches, pages to the product, chooses its options and
buys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentr_core.environments.webshop.catalogue import Catalogue
from agentr_core.environments.webshop.files import Product
from agentr_core.environments.webshop.goals import Goal
from agentr_core.environments.webshop.pages import BUY, NEXT, PER_PAGE
from agentr_core.environments.webshop.reward import options_met

_PRICE = re.compile(r",? and price lower than [\d.]+ dollars$")
_UNWANTED = re.compile(r"^find me |[\[\]\r\n]", re.IGNORECASE)


def replies(catalogue: Catalogue, goal: Goal) -> list[str] | None:
    """Return replies that buy the product a goal was made from, or None if neither search finds it.

    The first search is the instruction itself; the title takes its place if it leads to the product
    in fewer pages.
    """
    product = catalogue.product(goal.row)
    queries = [_query(_PRICE.sub("", goal.instruction)), _query(product.title)]
    pages = {query: _page(catalogue, query, goal.row) for query in queries if query}
    reached = {query: page for query, page in pages.items() if page is not None}
    if not reached:
        return None
    query = min(reached, key=lambda query: reached[query])
    found = [_reply("I search for what is wanted.", f"search[{query}]")]
    found += [_reply("It is not on this page; the next one may have it.", f"click[{NEXT}]")] * reached[query]
    found.append(_reply(f"{product.asin} is what is wanted.", f"click[{product.asin}]"))
    for name, value in wanted_options(goal, product).items():
        found.append(_reply(f"The {name} must be {value}.", f"click[{value}]"))
    return [*found, _reply("All is chosen; I buy it.", f"click[{BUY}]")]


def wanted_options(goal: Goal, product: Product) -> Mapping[str, str]:
    """Return the values to choose on the product's page, by option name; a wish that no value meets
    is left out.
    """
    chosen: dict[str, str] = {}
    for wish in goal.options:
        open_values: Sequence[tuple[str, str]] = [
            (name, value) for name, values in product.options.items() if name not in chosen for value in values
        ]
        exact = [(name, value) for name, value in open_values if wish in ((name, value), ("", value))]
        close = exact or [(name, value) for name, value in open_values if options_met([wish], [value])]
        chosen.update(close[:1])
    return chosen


def _page(catalogue: Catalogue, query: str, row: int) -> int | None:
    """Return the page of results that a product is on, counted from 0; None if it is on none."""
    found = catalogue.search(query)
    return found.index(row) // PER_PAGE if row in found else None


def _query(text: str) -> str:
    return " ".join(_UNWANTED.sub(" ", text).lower().split())


def _reply(thought: str, action: str) -> str:
    return f"Thought: {thought}\nAction: {action}"
