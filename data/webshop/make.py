"""Makes the shipped catalogue of invented products, in the formats of WebShop's own files.

Run in the root of the checkout:

    python data/webshop/make.py          writes the three files beside this one

Brands, numbers and texts are put together from the tables below with a fixed seed; nothing is taken
from a real shop.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

SEED = 20261121
PER_KIND = 10
ASIN_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"

COLOURS = ["black", "white", "navy", "forest green", "brick red", "light grey", "mustard", "teal", "rose"]
COLOUR = {"color": COLOURS}
CLOTHES = {**COLOUR, "size": ["small", "medium", "large", "x-large", "xx-large"]}
SHOES = {**COLOUR, "size": ["6", "7.5", "8", "9.5", "11"]}
PACK = {"quantity": ["pack of 1", "pack of 2", "pack of 6", "pack of 12"]}
SCENT = {"scent": ["lavender", "citrus", "unscented", "cedar"]}
FLAVOUR = {"flavor": ["sea salt", "smoked paprika", "honey", "cocoa", "lemon"]}
TEA, SHAPE = {"flavor": ["mint", "ginger", "rooibos"]}, {"shape": ["penne", "fusilli", "linguine"]}
ROAST, KEYS = {"roast": ["light roast", "dark roast"]}, {"style": ["quiet switches", "clicky switches"]}

WEAR = ["machine wash", "hand wash", "long sleeve", "cotton blend", "slim fit", "quick drying", "elastic waist"]
STEP = ["rubber sole", "arch support", "slip resistant", "memory foam", "vegan leather", "lace up"]
CARE = ["cruelty free", "fragrance free", "paraben free", "tea tree", "aloe vera", "sensitive skin", "travel size"]
FOOD = ["gluten free", "sugar free", "non gmo", "low sodium", "certified organic", "individually wrapped", "kosher"]
HOME = ["easy assemble", "solid wood", "stainless steel", "space saving", "easy clean", "water resistant", "heavy duty"]
TECH = [
    "fast charging",
    "noise cancelling",
    "water resistant",
    "wireless",
    "plug play",
    "long battery",
    "carrying case",
]


class Kind(NamedTuple):
    """A kind of product; `prices` are the lowest and the highest one, in whole dollars."""

    category: str
    path: str
    query: str
    title: str
    options: dict[str, list[str]]
    attributes: list[str]
    prices: tuple[int, int]


def sizes(*values: str) -> dict[str, list[str]]:
    """Return the option of a size."""
    return {"size": list(values)}


KINDS = [
    Kind("fashion", "Clothing > Women > Sweaters", "women's sweaters", "Knit Sweater", CLOTHES, WEAR, (18, 60)),
    Kind("fashion", "Clothing > Men > Shirts", "men's shirts", "Oxford Shirt", CLOTHES, WEAR, (15, 50)),
    Kind("fashion", "Clothing > Men > Pants", "men's pants", "Chino Pants", CLOTHES, WEAR, (20, 70)),
    Kind("fashion", "Clothing > Women > Dresses", "women's dresses", "Summer Dress", CLOTHES, WEAR, (22, 90)),
    Kind("fashion", "Shoes > Women > Loafers", "women's loafers", "Canvas Loafer", SHOES, STEP, (25, 95)),
    Kind("fashion", "Shoes > Men > Boots", "men's boots", "Trail Boot", SHOES, STEP, (40, 160)),
    Kind("fashion", "Bags > Backpacks", "backpacks", "Day Backpack", COLOUR, [*HOME[4:], "laptop sleeve"], (20, 80)),
    Kind("beauty", "Skin Care > Face > Creams", "face cream", "Face Cream",
         SCENT | sizes("1 ounce", "2 ounce"), CARE, (6, 45)),
    Kind("beauty", "Hair Care > Shampoo", "shampoo", "Herbal Shampoo",
         SCENT | sizes("8 ounce", "16 ounce"), CARE, (5, 30)),
    Kind("beauty", "Skin Care > Lips > Balms", "lip balm", "Lip Balm", SCENT | PACK, CARE, (3, 20)),
    Kind("beauty", "Oral Care > Toothbrushes", "toothbrush", "Bamboo Toothbrush",
         COLOUR | PACK, ["eco friendly", "soft bristles", *CARE[:2]], (3, 18)),
    Kind("beauty", "Bath > Soaps", "bar soap", "Olive Soap", SCENT | PACK, CARE, (4, 25)),
    Kind("grocery", "Snacks > Nuts", "roasted nuts", "Roasted Almonds",
         FLAVOUR | sizes("4 ounce", "1 pound"), FOOD, (5, 35)),
    Kind("grocery", "Snacks > Crackers", "crackers", "Seed Crackers", FLAVOUR | PACK, FOOD, (4, 28)),
    Kind("grocery", "Beverages > Tea", "herbal tea", "Mountain Tea", TEA | PACK, FOOD, (4, 32)),
    Kind("grocery", "Beverages > Coffee", "ground coffee", "Ground Coffee",
         ROAST | sizes("12 ounce", "2 pound"), FOOD, (7, 40)),
    Kind("grocery", "Pantry > Pasta", "dried pasta", "Durum Pasta", SHAPE | PACK, FOOD, (3, 22)),
    Kind("grocery", "Snacks > Bars", "snack bars", "Oat Bar", FLAVOUR | PACK, FOOD, (5, 30)),
    Kind("garden", "Furniture > Tables > Side Tables", "side tables", "Side Table", COLOUR, HOME, (35, 190)),
    Kind("garden", "Furniture > Shelves", "book shelves", "Book Shelf",
         COLOUR | sizes("3 tier", "5 tier"), HOME, (30, 220)),
    Kind("garden", "Kitchen > Kettles", "kettles", "Gooseneck Kettle",
         COLOUR | sizes("0.8 liter", "1.2 liter"), HOME[2:], (20, 110)),
    Kind("garden", "Bedding > Blankets", "blankets", "Wool Blanket",
         COLOUR | sizes("twin", "queen", "king"), ["machine wash", "super soft", *HOME[4:]], (25, 130)),
    Kind("garden", "Lighting > Lamps > Desk Lamps", "desk lamps", "Desk Lamp",
         COLOUR, [*HOME[3:], "energy efficient"], (15, 85)),
    Kind("garden", "Kitchen > Storage Jars", "storage jars", "Glass Jar",
         sizes("16 ounce", "32 ounce", "64 ounce") | PACK, ["bpa free", "dishwasher safe", *HOME[3:5]], (6, 45)),
    Kind("electronics", "Audio > Headphones", "headphones", "Studio Headphones", COLOUR, TECH, (25, 280)),
    Kind("electronics", "Audio > Speakers", "portable speakers", "Pocket Speaker", COLOUR, TECH, (18, 150)),
    Kind("electronics", "Accessories > Cables", "cables", "Braided Cable",
         COLOUR | sizes("3 feet", "6 feet", "10 feet"), ["heavy duty", "high speed", "gold plated", TECH[0]], (5, 30)),
    Kind("electronics", "Accessories > Chargers", "wall chargers", "Wall Charger",
         COLOUR, ["travel size", "easy carry", "overheat protection", TECH[0]], (9, 60)),
    Kind("electronics", "Computers > Keyboards", "keyboards", "Compact Keyboard", COLOUR | KEYS, TECH[2:], (25, 140)),
    Kind("electronics", "Cameras > Tripods", "tripods", "Travel Tripod", COLOUR | sizes("40 inch", "60 inch"),
         ["aluminum alloy", "easy carry", "quick release", "carrying case"], (18, 120)),
]  # fmt: skip

STARTS = ["Al", "Bren", "Cor", "Dun", "El", "Fen", "Gal", "Hol", "Ist", "Jor", "Kel", "Lum", "Mor", "Nor", "Or", "Pel"]
ENDS = ["vale", "mark", "stead", "wick", "ora", "ette", "field", "low", "ansa", "mere"]
ASKING = [
    "i am looking for {a} {kind}{options}.",
    "i need {kind} that are {a}{options}.",
    "can you find me {a} {kind}{options}?",
    "i want to buy {kind}{options}, and they should be {a}",
]


def make() -> dict[str, str]:
    """Return the text of each file by its name."""
    rng = random.Random(SEED)
    products, annotations, wishes = [], {}, {}
    for kind in rng.sample(KINDS * PER_KIND, PER_KIND * len(KINDS)):
        asin = "AX" + "".join(rng.choices(ASIN_LETTERS, k=8))
        attributes = rng.sample(kind.attributes, 3)
        named = rng.sample(attributes, rng.choice([1, 2]))
        product = _product(rng, asin, kind, attributes)
        products.append(product)
        annotations[asin] = {
            "attributes": attributes,
            "instruction": f"Find me {', '.join(named)} {kind.query}",
            "instruction_attributes": named,
        }
        if rng.random() < 0.6:
            wishes[asin] = [_wish(rng, asin, kind, product, rng.sample(attributes, rng.choice([1, 2])))]
    return {
        "items_shuffle.json": "[\n" + ",\n".join(map(_line, products)) + "\n]\n",
        "items_ins_v2.json": _by_asin(annotations),
        "items_human_ins.json": _by_asin(wishes),
    }


def _product(rng: random.Random, asin: str, kind: Kind, attributes: list[str]) -> dict[str, Any]:
    brand = rng.choice(STARTS) + rng.choice(ENDS)
    price = rng.randint(kind.prices[0] * 100, kind.prices[1] * 100) / 100
    chosen = {name: rng.sample(pool, rng.randint(2, min(3, len(pool)))) for name, pool in kind.options.items()}
    return {
        "asin": asin,
        "name": f"{brand} {kind.title}, {attributes[0].title()}",
        "category": kind.category,
        "query": kind.query,
        "product_category": kind.path.replace(">", "\u203a"),
        "full_description": f"The {kind.title.lower()} by {brand} is made for every day. It is {attributes[1]}.",
        "small_description": [f"{each.capitalize()}." for each in attributes],
        "pricing": f"${price:.2f}" if rng.random() < 0.8 else f"${price:.2f} to ${price * 1.5:.2f}",
        "images": [""],
        "customization_options": {
            name: [{"value": value, "image": None} for value in values] for name, values in chosen.items()
        },
    }


def _wish(rng: random.Random, asin: str, kind: Kind, product: dict[str, Any], attributes: list[str]) -> dict[str, Any]:
    options = product["customization_options"]
    names = rng.sample(sorted(options), rng.randint(0, len(options)))
    values = [rng.choice(options[name])["value"] for name in names]
    text = "".join(f", {'in' if name == 'color' else name} {value}" for name, value in zip(names, values, strict=True))
    return {
        "asin": asin,
        "instruction": rng.choice(ASKING).format(a=" and ".join(attributes), kind=kind.query, options=text),
        "instruction_attributes": attributes,
        "instruction_options": values,
    }


def _by_asin(entries: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f'"{asin}": {_line(entry)}' for asin, entry in entries.items()) + "\n}\n"


def _line(entry: Any) -> str:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    for name, text in make().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
