"""A shop of a few hand-made products in WebShop's own files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentr_core.environments.webshop.goals import Catalogue, find_files, open_catalogue


def entry(asin: str, name: str = "Plain Mug", **fields: Any) -> dict[str, Any]:
    """Return a product as the original file has it; options are given as lists of values."""
    options = fields.pop("options", {})
    return {
        "asin": asin,
        "name": name,
        "category": "garden",
        "query": "mugs",
        "product_category": "Kitchen \u203a Cups \u203a Mugs",
        "full_description": "",
        "small_description": [],
        "pricing": "$9.50",
        "images": [""],
        "customization_options": {key: [{"value": value} for value in values] for key, values in options.items()},
        **fields,
    }


def write(
    folder: Path,
    products: Sequence[Mapping[str, Any]],
    annotations: Mapping[str, Any] | None = None,
    wishes: Mapping[str, Any] | None = None,
    *,
    suffix: str = "",
) -> Path:
    """Write the three files into a folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath(f"items_shuffle{suffix}.json").write_text(json.dumps(products), encoding="utf-8")
    folder.joinpath(f"items_ins_v2{suffix}.json").write_text(json.dumps(annotations or {}), encoding="utf-8")
    folder.joinpath("items_human_ins.json").write_text(json.dumps(wishes or {}), encoding="utf-8")
    return folder


def opened(
    folder: Path,
    products: Sequence[Mapping[str, Any]],
    annotations: Mapping[str, Any] | None = None,
    wishes: Mapping[str, Any] | None = None,
) -> Catalogue:
    """Return the catalogue of products written into a folder, with its cache beside them."""
    write(folder, products, annotations, wishes)
    return open_catalogue(find_files(folder, "", wishes=True), 0, folder / "cache")
