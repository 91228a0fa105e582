"""Makes recipes.json, the TextCraft recipe table, from the game data in the PyPI package
`minecraft-data`.

The package says what is crafted from what; it spells out every tag and every list of options, one
variant for each member, and drops recipe groups and the order in which a recipe names its
ingredients. This script folds the variants back and adds what was dropped, as rules where there is
a rule and as facts where there is none.

    python data/textcraft/derive.py          writes recipes.json beside this file
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "1.16.5"
TARGET = Path(__file__).with_name("recipes.json")

WOODS = ("oak", "spruce", "birch", "jungle", "acacia", "dark_oak")
FUNGI = ("crimson", "warped")
COLORS = (
    "white", "orange", "magenta", "light_blue", "yellow", "lime", "pink", "gray",
    "light_gray", "cyan", "purple", "blue", "brown", "green", "red", "black",
)  # fmt: skip


class Family(NamedTuple):
    """Items that can stand for each other in the recipes of some outputs.

    `name` is the tag the recipes name; None means that they list the members as options, and then
    the first counts. `outputs` are shell patterns.
    """

    members: frozenset[str]
    name: str | None
    outputs: tuple[str, ...] = ("*",)


class Variant(NamedTuple):
    """One way to craft `made` pieces of something: `cells` has a name for each filled cell of the
    grid, row by row.
    """

    made: int
    cells: tuple[str, ...]


def _trunks(wood: str) -> list[str]:
    log, bark = ("stem", "hyphae") if wood in FUNGI else ("log", "wood")
    return [f"{stripped}{wood}_{part}" for stripped in ("", "stripped_") for part in (log, bark)]


def _families() -> list[Family]:
    """Return the families, larger ones first: a small one may be part of a larger one."""
    tags = {
        "planks": [f"{wood}_planks" for wood in WOODS + FUNGI],
        "wooden_slabs": [f"{wood}_slab" for wood in WOODS + FUNGI],
        "logs": [trunk for wood in WOODS + FUNGI for trunk in _trunks(wood)],
        "wool": [f"{color}_wool" for color in COLORS],
        "soul_fire_base_blocks": ["soul_sand", "soul_soil"],
    }
    tags |= {f"{wood}_{'stems' if wood in FUNGI else 'logs'}": _trunks(wood) for wood in WOODS + FUNGI}
    families = [Family(frozenset(members), name) for name, members in tags.items()]
    stones = frozenset({"cobblestone", "blackstone"})
    families += [
        Family(stones, "stone_crafting_materials", ("furnace", "brewing_stand")),
        Family(stones, "stone_tool_materials", ("stone_*",)),
        Family(frozenset({"coal", "charcoal"}), "coals", ("campfire",)),
        Family(frozenset({"coal", "charcoal"}), None, ("torch", "soul_torch", "fire_charge")),
        Family(frozenset({"sand", "red_sand"}), None, ("tnt",)),
        Family(frozenset({"quartz_block", "chiseled_quartz_block", "quartz_pillar"}), None),
        Family(frozenset({"purpur_block", "purpur_pillar"}), None),
    ]
    for stone in ("sandstone", "red_sandstone"):
        families.append(Family(frozenset({stone, f"chiseled_{stone}"}), None, ("*_slab",)))
        families.append(Family(frozenset({stone, f"chiseled_{stone}", f"cut_{stone}"}), None, ("*_stairs",)))
    return sorted(families, key=lambda family: -len(family.members))


def _groups() -> dict[str, str]:
    """Return the recipe group of each output that has one."""
    groups = {"stick": "sticks", "bone_meal": "bonemeal"}
    for wood in WOODS + FUNGI:
        groups[f"{wood}_planks"] = "planks"
        groups[f"{wood}_boat"] = "boat"
        groups[f"{wood}_sign"] = "sign"
        for thing in ("button", "door", "fence", "fence_gate", "pressure_plate", "slab", "stairs", "trapdoor"):
            groups[f"{wood}_{thing}"] = f"wooden_{thing}"
        groups |= dict.fromkeys(_trunks(wood), "bark")
    for color in COLORS:
        for thing in ("banner", "bed", "carpet", "concrete_powder", "stained_glass", "stained_glass_pane"):
            groups[f"{color}_{thing}"] = thing
        groups[f"{color}_terracotta"] = "stained_terracotta"
        if color != "white":
            groups[f"{color}_wool"] = "wool"
    # Groups that carry the name of their only output.
    mixed = {"cyan", "gray", "lime", "purple"}
    own = [f"{color}_dye" for color in COLORS if color not in mixed]
    own += ["iron_ingot", "gold_ingot", "netherite_ingot", "rabbit_stew", "sugar"]
    return groups | {name: name for name in own}


NAMED_FIRST = {
    "*_fence": "stick",
    "*_axe": "stick",
    "*_hoe": "stick",
    "*_pickaxe": "stick",
    "*_shovel": "stick",
    "*_sword": "stick",
    "activator_rail": "redstone_torch stick",
    "arrow": "stick",
    "beacon": "nether_star",
    "blast_furnace": "smooth_stone furnace",
    "cake": "milk_bucket sugar wheat",
    "campfire": "#logs",
    "cartography_table": "#planks",
    "chain": "iron_ingot",
    "crossbow": "string",
    "daylight_detector": "quartz",
    "detector_rail": "redstone stone_pressure_plate",
    "diorite": "quartz",
    "dispenser": "redstone",
    "dropper": "redstone",
    "enchanting_table": "book obsidian",
    "end_crystal": "ghast_tear ender_eye",
    "end_rod": "popped_chorus_fruit",
    "fletching_table": "#planks",
    "hopper": "chest",
    "lantern": "torch",
    "lever": "cobblestone",
    "loom": "#planks",
    "observer": "quartz redstone",
    "piston": "redstone cobblestone",
    "powered_rail": "redstone stick",
    "rail": "stick",
    "red_nether_bricks": "nether_wart",
    "redstone_torch": "stick",
    "scaffolding": "string",
    "shulker_box": "chest",
    "smithing_table": "#planks",
    "soul_campfire": "#logs",
    "soul_lantern": "soul_torch",
    "sticky_piston": "piston",
    "target": "hay_block",
    "tnt": "sand",
    "torch": "stick",
    "tripwire_hook": "#planks stick",
}
"""The ingredients that a recipe names ahead of the order in which its grid, row by row, first uses
them.
"""


def table(recipes: dict[str, Any], names: dict[int, str]) -> list[list[Any]]:
    """Return `[output, count, group, {ingredient: count}]` for each recipe, in the order of the
    recipes' file names.

    A tag among the ingredients starts with "#". A recipe's file name is its output's, or that with
    a "_from_..." to follow, so that files in order of names are outputs in order of names; the
    package keeps the order within one.

    Args:
        recipes: variants by result id, as the package has them.
        names: item names by id.
    """
    families, groups = _families(), _groups()
    rows: list[list[Any]] = []
    for output, found in sorted((names[int(result)], variants) for result, variants in recipes.items()):
        variants = [_variant(each, names) for each in found]
        for family in families:
            if any(fnmatch.fnmatchcase(output, pattern) for pattern in family.outputs):
                variants = _fold(variants, family)
        if output == "sugar":
            # The published folder still has the recipe file of an older game beside its two
            # successors.
            rows.append([output, 1, None, {"sugar_cane": 1}])
        for variant in variants:
            redyed = output.endswith("_bed") and "white_bed" in variant.cells
            group = "dyed_bed" if redyed else groups.get(output)
            rows.append([output, variant.made, group, _ingredients(output, variant)])
    return rows


def _variant(raw: dict[str, Any], names: dict[int, str]) -> Variant:
    ids = raw["ingredients"] if "ingredients" in raw else chain.from_iterable(raw["inShape"])
    return Variant(raw["result"]["count"], tuple(names[number] for number in ids if number is not None))


def _fold(variants: Sequence[Variant], family: Family) -> list[Variant]:
    """Return the variants with each full set of those that differ only in the family's member
    replaced by one.
    """
    stand_in = "*"
    members: dict[Variant, list[str]] = {}
    for variant in variants:
        used = family.members.intersection(variant.cells)
        if len(used) == 1:
            (member,) = used
            members.setdefault(_swap(variant, member, stand_in), []).append(member)
    folded: dict[Variant, None] = {}
    for variant in variants:
        for member in family.members.intersection(variant.cells):
            options = members.get(_swap(variant, member, stand_in), [])
            if set(options) == family.members:
                variant = _swap(variant, member, f"#{family.name}" if family.name else options[0])
                break
        folded[variant] = None
    return list(folded)


def _swap(variant: Variant, old: str, new: str) -> Variant:
    return variant._replace(cells=tuple(new if cell == old else cell for cell in variant.cells))


def _ingredients(output: str, variant: Variant) -> dict[str, int]:
    counts = Counter(variant.cells)
    patterns = [pattern for pattern in NAMED_FIRST if fnmatch.fnmatchcase(output, pattern)]
    first = NAMED_FIRST[patterns[0]].split() if patterns else []
    return {name: counts[name] for name in [*first, *(name for name in counts if name not in first)] if name in counts}


def render(rows: Iterable[Sequence[Any]]) -> str:
    """Return the text of recipes.json: one recipe a line."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f"[\n{lines}\n]\n"


def derive() -> str:
    """Return the text of recipes.json as made from the installed package."""
    import minecraft_data

    data = minecraft_data(VERSION)
    return render(table(data.recipes, {item["id"]: item["name"] for item in data.items_list}))


if __name__ == "__main__":
    TARGET.write_text(derive(), encoding="utf-8", newline="\n")
    sys.stdout.write(f"wrote {TARGET}\n")
