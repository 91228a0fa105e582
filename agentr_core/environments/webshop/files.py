"""Products of WebShop, and the original files they come from.

`items_shuffle*.json` is a list of products, `items_ins_v2*.json` their attributes and synthetic
instructions by asin, `items_human_ins.json` the wishes of people, by asin. Files are read as
streams: the list one product at a time.

Source: WebShop (arXiv 2207.01206), sections 3 and 4, and its public data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import ijson

from agentr_core.errors import ConfigError, DataFileError
from agentr_core.texts import placed

NO_PRICE = 100.0
NO_ATTRIBUTE = "DUMMY_ATTR"
_MAX_ASIN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A person's wish: an instruction, and the attributes and options that it names."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product. `prices` are one price in dollars, or the ends of a range; `options` are values by
    option name.

    `instruction` is the synthetic one, empty if there is none; `wishes` are those of people.
    """

    asin: str
    title: str
    query: str
    category: str
    product_category: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    instruction: str = ""
    instruction_attributes: tuple[str, ...] = ()
    wishes: tuple[Wish, ...] = ()

    @property
    def price_tag(self) -> str:
        """The price as pages show it."""
        return " to ".join(f"${price}" for price in self.prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueFiles:
    """The files of one catalogue."""

    products: Path
    attributes: Path
    wishes: Path | None


def find_files(folder: Path, suffix: str, *, wishes: bool) -> CatalogueFiles:
    """Return the files of a catalogue: those named with a suffix, such as `_1000`.

    Args:
        wishes: whether the file of people's wishes is needed; if it exists, it is used in any case.

    Raises `ConfigError` when the folder or a file is missing.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"environment.options.data_dir: there is no folder {placed(folder)}; name the one with WebShop's files"
        )
    products, attributes = folder / f"items_shuffle{suffix}.json", folder / f"items_ins_v2{suffix}.json"
    human = folder / "items_human_ins.json"
    for path in (products, attributes, *([human] if wishes else [])):
        if not path.is_file():
            there = ", ".join(sorted(each.name for each in folder.glob("items_*.json"))) or "no items_*.json"
            raise ConfigError(
                f"environment.options.data_dir: {folder} has no {path.name} but {there}; set data_dir, or suffix to "
                "what stands before .json in items_shuffle*.json"
            )
    return CatalogueFiles(products=products, attributes=attributes, wishes=human if human.is_file() else None)


def read_products(files: CatalogueFiles, limit: int = 0) -> Iterator[Product]:
    """Yield the products in the order of their file: of its first `limit` entries, or of all if
    that is 0.

    An entry without a proper asin, or with one that occurred before, is skipped, as published.

    Raises `DataFileError` when a file is cut off or malformed.
    """
    annotations = dict(_entries(files.attributes))
    wishes = dict(_entries(files.wishes)) if files.wishes else {}
    seen = set()
    for position, raw in enumerate(islice(_items(files.products), limit or None)):
        with _naming(files.products, f"product {position}"):
            asin = raw["asin"]
            if asin == "nan" or len(asin) > _MAX_ASIN or asin in seen:
                continue
            seen.add(asin)
            product = _product(raw, annotations.get(asin) or {}, wishes.get(asin) or ())
        yield product


def _product(raw: Mapping[str, Any], annotation: Mapping[str, Any], wishes: Iterable[Mapping[str, Any]]) -> Product:
    bullets = raw["small_description"]
    return Product(
        asin=raw["asin"],
        title=raw["name"] or "",
        query=raw["query"].lower().strip(),
        category=raw["category"],
        product_category=raw["product_category"],
        description=raw["full_description"] or "",
        bullets=tuple(str(bullet) for bullet in (bullets if isinstance(bullets, list) else [bullets or ""])),
        prices=_prices(raw.get("pricing")),
        options={
            name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
            for name, values in (raw["customization_options"] or {}).items()
            if values is not None
        },
        attributes=tuple(annotation.get("attributes", (NO_ATTRIBUTE,))),
        instruction=annotation.get("instruction") or "",
        instruction_attributes=tuple(annotation.get("instruction_attributes") or ()),
        wishes=tuple(
            Wish(
                instruction=wish["instruction"],
                attributes=tuple(wish["instruction_attributes"]),
                options=tuple(wish["instruction_options"]),
            )
            for wish in wishes
        ),
    )


def _prices(text: str | None) -> tuple[float, ...]:
    """Return the one or two prices in a text such as "$9.99" or "$9.99 to $19.99"."""
    found = tuple(float(re.sub(r"[^\d.]", "", part)) for part in (text or "").split("$")[1:])
    return found[:2] or (NO_PRICE,)


def _items(path: Path) -> Iterator[Any]:
    with _naming(path), path.open("rb") as stream:
        yield from ijson.items(stream, "item", use_float=True)


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    with _naming(path), path.open("rb") as stream:
        yield from ijson.kvitems(stream, "", use_float=True)


@contextmanager
def _naming(path: Path, part: str = "") -> Iterator[None]:
    """Turn an error that a damaged file raises into a `DataFileError` that names the file."""
    try:
        yield
    except (OSError, ijson.JSONError) as error:
        why = " ".join(str(error).split())
        raise DataFileError(f"catalogue file {path} is cut off or not JSON ({why}); download it again") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        where = f"{part} of " if part else ""
        raise DataFileError(f"{where}catalogue file {path} is malformed ({why}); download the file again") from error
