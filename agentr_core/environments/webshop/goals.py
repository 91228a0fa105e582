"""Goals from synthetic or human instructions, their price bounds, and the splits.

The published shop draws prices and bounds from an unseeded generator, so that goals change with
every start. Here both follow from a seed. The order of goals is the published one, so an index
means the same goal.

Source: WebShop (arXiv 2207.01206), section 3.1, and AgentGym (arXiv 2406.04151), whose 6910 ids are
the synthetic goals of the first 1000 products.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ijson

from agentr_core.environments.webshop.catalogue import Catalogue
from agentr_core.environments.webshop.files import Product
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.fingerprint import derive_seed

GoalKind = Literal["synthetic", "human"]
SplitRule = Literal["product", "webshop"]

UNBOUNDED = 1_000_000.0
_BOUNDS = [10.0 * step for step in range(1, 100)]
_ORDER_SEED = 233
_TEST, _DEV = range(500), range(500, 1500)
_TEST_SHARE, _DEV_SHARE = 0.2, 0.1
LISTED = ("test", "train")
"""The splits that AgentGym lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A wish and the product it was made from, by row. The name of an option of a human goal is
    empty.
    """

    row: int
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    price_bound: float


def price(product: Product, seed: int) -> float:
    """Return the price of a product in dollars; for a price range, a point in it that the seed and
    the asin determine.
    """
    if len(product.prices) == 1:
        return product.prices[0]
    low, high = product.prices
    return random.Random(derive_seed("webshop-price", seed, product.asin)).uniform(low, high)


def make_goals(catalogue: Catalogue, kind: GoalKind, seed: int) -> tuple[Goal, ...]:
    """Return the goals of a catalogue, in the published order. All are held in memory, about a
    kilobyte each.

    Raises `ConfigError` when the catalogue has no instruction of that kind.
    """
    rng = random.Random(seed)
    of_row = _synthetic if kind == "synthetic" else _human
    rows = catalogue.instructed if kind == "synthetic" else catalogue.wished
    goals = [goal for row in rows for goal in of_row(row, catalogue.product(row), rng, seed)]
    if not goals:
        raise ConfigError(f"environment.options.goals: the catalogue has no {kind} instruction; choose the other kind")
    random.Random(_ORDER_SEED).shuffle(goals)
    return tuple(goals)


def _synthetic(row: int, product: Product, rng: random.Random, seed: int) -> Iterator[Goal]:
    """Yield a goal for each combination of option values. One bound is drawn for all of them."""
    bound, price_text = _bound(price(product, seed), rng)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        options = tuple(zip(names, values, strict=True))
        option_text = ", and ".join(f"{name}: {value}" for name, value in options)
        yield Goal(
            row=row,
            instruction=f"{product.instruction}{' with ' if options else ''}{option_text}{price_text}",
            attributes=product.instruction_attributes,
            options=options,
            price_bound=bound,
        )


def _human(row: int, product: Product, rng: random.Random, seed: int) -> Iterator[Goal]:
    """Yield a goal for each wish that names an attribute."""
    for wish in product.wishes:
        if wish.attributes:
            bound, price_text = _bound(price(product, seed), rng)
            yield Goal(
                row=row,
                instruction=wish.instruction.strip(".") + price_text,
                attributes=wish.attributes,
                options=tuple(("", value) for value in wish.options),
                price_bound=bound,
            )


def _bound(cost: float, rng: random.Random) -> tuple[float, str]:
    """Return the greater of two random ones of the next four multiples of ten above a price, and
    its wording in the instruction.
    """
    above = [bound for bound in _BOUNDS if bound > cost][:4]
    if len(above) < 2:
        return UNBOUNDED, ""
    bound = max(rng.sample(above, 2))
    return bound, f", and price lower than {bound:.2f} dollars"


def split_goals(goals: Sequence[Goal], rule: SplitRule) -> Mapping[str, tuple[int, ...]]:
    """Return the goal indices of the splits `train`, `dev` and `test`.

    `webshop` takes the published ranges: test is 0 to 499, dev 500 to 1499, train the rest.
    `product` splits by product, so that no product is to be bought in two splits: test has a fifth
    of the products, dev a tenth. Goals that read like one of an earlier split (in the order test,
    dev, train) are left out of the later one.

    Raises `ConfigError` when there are too few goals for the rule.
    """
    if rule == "webshop":
        place = {
            index: "test" if index in _TEST else "dev" if index in _DEV else "train" for index in range(len(goals))
        }
    else:
        rows = sorted({goal.row for goal in goals})
        random.Random(_ORDER_SEED).shuffle(rows)
        test, dev = round(len(rows) * _TEST_SHARE), round(len(rows) * (_TEST_SHARE + _DEV_SHARE))
        part = {row: "test" if at < test else "dev" if at < dev else "train" for at, row in enumerate(rows)}
        place = {index: part[goal.row] for index, goal in enumerate(goals)}
    found = _without_twins(
        goals, {name: [index for index, of in place.items() if of == name] for name in ("test", "dev", "train")}
    )
    if not all(found.values()):
        raise ConfigError(
            f"environment.options.split: {len(goals)} goals are too few for the rule {rule!r}; "
            "choose product, or a larger catalogue"
        )
    return found


def listed_in(folder: Path, split: str) -> Path:
    """Return AgentGym's file with the goals of a split."""
    return folder / f"webshop_{split}.json"


def listed_goals(goals: Sequence[Goal], folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the splits `train` and `test` as AgentGym lists them: `webshop_train.json` and
    `webshop_test.json`.

    Raises `DataFileError` when a file is missing or malformed, or lists a goal that does not exist.
    """
    listed = {name: _listed(listed_in(folder, name)) for name in LISTED}
    for name, indices in listed.items():
        beyond = [index for index in indices if not 0 <= index < len(goals)]
        if beyond:
            raise DataFileError(
                f"{listed_in(folder, name)} lists goal {beyond[0]}, but there are {len(goals)} goals; "
                "its ids are for the synthetic goals of the first 1000 products (suffix _1000)"
            )
    return _without_twins(goals, listed)


def _listed(path: Path) -> list[int]:
    try:
        with path.open("rb") as stream:
            return [int(item.removeprefix("webshop_")) for item in ijson.items(stream, "item.item_id")]
    except (OSError, ijson.JSONError, ValueError, AttributeError) as error:
        raise DataFileError(
            f"{path} is not a list of AgentGym items ({' '.join(str(error).split())}); set "
            "environment.options.ids_dir to the folder of webshop_train.json and webshop_test.json"
        ) from error


def _without_twins(goals: Sequence[Goal], splits: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return splits in which no goal reads like one of an earlier split, nor like an earlier one of
    its own.
    """
    seen: set[str] = set()
    found = {}
    for name, indices in splits.items():
        kept = []
        for index in indices:
            if goals[index].instruction not in seen:
                seen.add(goals[index].instruction)
                kept.append(index)
        found[name] = tuple(kept)
    return found
