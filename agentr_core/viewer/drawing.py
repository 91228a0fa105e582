"""A search tree as a drawing: numbers and short labels in, SVG out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import sqrt
from typing import Final
from xml.etree import ElementTree as ET

from agentr_core.reports import wording
from agentr_core.store.queries.trees import TreeNode
from agentr_core.texts import visible

_ROW: Final = 38
_COLUMN: Final = 188
_BEND: Final = 34
_MARGIN: Final = 30
_LABEL: Final = 20
"""Characters of an action that are shown; the page of its node shows all of it."""
_TONES: Final = ("passed", "", "bad", "good", "both")
MOST_NODES: Final = 1500
"""A drawing of more nodes is too long to look at and slow to show."""


def tree(
    nodes: Sequence[TreeNode],
    tree_id: str,
    good: Collection[int],
    bad: Collection[int],
    first: Sequence[Collection[int]] = (),
) -> str:
    """Return the drawing of a tree, the root at the top left; each node links to its page. Children
    stand from the most visited one down, but paths that were chosen come first.

    Args:
        nodes: by number.
        good, bad: nodes on good and bad paths of pairs, marked so.
        first: the nodes of paths that come before others, in their order.
    """
    paths = (*first, good, bad)

    def place(node: TreeNode) -> tuple[int, int]:
        return next((number for number, path in enumerate(paths) if node.number in path), len(paths)), -node.visits

    children: dict[int, list[int]] = {}
    for node in sorted(nodes, key=place):
        children.setdefault(node.parent, []).append(node.number)
    rows = _rows(children)
    width = 2 * _MARGIN + _COLUMN * (max(node.depth for node in nodes) + 1)
    height = 2 * _MARGIN + _ROW * max(rows.values())
    svg = ET.Element("svg", {"class": "tree", "viewBox": f"0 0 {width} {height:g}", "role": "img"})
    svg.attrib.update({"width": str(width), "height": f"{height:g}", "aria-label": f"{len(nodes)} nodes"})
    spots = {node.number: (_MARGIN + _COLUMN * node.depth, _MARGIN + _ROW * rows[node.number]) for node in nodes}
    # Edges that were not taken are drawn below those that were.
    for node in sorted(nodes[1:], key=lambda node: _TONES.index(_tone(node, good, bad))):
        _edge(svg, spots[node.parent], spots[node.number], _tone(node, good, bad))
    most = max(node.visits for node in nodes)
    for node in nodes:
        _node(svg, node, tree_id, spots[node.number], most, _tone(node, good, bad))
    return ET.tostring(svg, encoding="unicode")


def _rows(children: dict[int, list[int]]) -> dict[int, int]:
    """Return the row of each node, the root in the first, where the drawing is first looked at.

    A node and the first child of each stand in one row, as high as there is room for all of them:
    short branches stand beside long ones, and no edges cross.
    """
    rows: dict[int, int] = {}
    free: dict[int, int] = {}
    waiting = [(0, 0)]
    while waiting:
        node, depth = waiting.pop()
        line = [node]
        while below := children.get(line[-1]):
            line.append(below[0])
        places = range(depth, depth + len(line))
        row = max(free.get(place, 0) for place in places)
        free.update(dict.fromkeys(places, row + 1))
        for place, one in zip(places, line, strict=True):
            rows[one] = row
            # The last one is placed first: the branches of the deepest node.
            waiting.extend((child, place + 1) for child in reversed(children.get(one, [])[1:]))
    return rows


def _tone(node: TreeNode, good: Collection[int], bad: Collection[int]) -> str:
    if node.number in good:
        return "both" if node.number in bad else "good"
    if node.number in bad:
        return "bad"
    return "" if node.visits else "passed"


def _edge(svg: ET.Element, start: tuple[float, float], end: tuple[float, float], tone: str) -> None:
    (x1, y1), (x2, y2) = start, end
    bend = x2 - _BEND
    middle = (bend + x2) / 2
    # Straight along the label of the parent, which is written above and below the edge.
    curve = f"M{x1:g} {y1:g}H{bend:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    ET.SubElement(svg, "path", {"class": f"edge {tone}".strip(), "d": curve})


def _node(svg: ET.Element, node: TreeNode, tree_id: str, spot: tuple[float, float], most: int, tone: str) -> None:
    x, y = spot
    href = f"/node/{tree_id}/{node.number}"
    link = ET.SubElement(svg, "a", {"href": href, "class": f"node {tone}".strip()})
    radius = 3.5 + 7 * sqrt(node.visits / most) if most else 3.5
    shape = {"cx": f"{x:g}", "cy": f"{y:g}", "r": f"{radius:.1f}"}
    ET.SubElement(link, "circle", {"class": "ground", **shape})
    # The better the value, the fuller the circle.
    shape["fill-opacity"] = f"{0.12 + 0.88 * min(max(node.value or 0.0, 0.0), 1.0):.2f}"
    ET.SubElement(link, "circle", shape)
    if node.success or node.disaster:
        ring = {"class": "ring win" if node.success else "ring lost", "cx": f"{x:g}", "cy": f"{y:g}"}
        ET.SubElement(link, "circle", {**ring, "r": f"{radius + 3:.1f}"})
    action = visible(" ".join((node.action or ("start" if node.parent < 0 else "no action")).split()))
    _text(link, x + radius + 5, y - 5, action if len(action) <= _LABEL else action[: _LABEL - 1] + "…", "action")
    _text(link, x + radius + 5, y + 13, _numbers(node), "numbers")
    ET.SubElement(link, "title").text = f"node {node.number}: {action[:300]}"


def _numbers(node: TreeNode) -> str:
    words = [f"{node.visits} {wording.TIMES}", wording.NOTHING if node.value is None else f"{node.value:.2f}"]
    if not node.duplicates:
        words.append("the expert's")
    elif node.duplicates > 1:
        words.append(f"{node.duplicates} alike")
    if not node.valid:
        words.append("invalid")
    words.extend(wording.label(word) for word in (node.verdict, node.stop) if word)
    return " ".join(words)


def _text(parent: ET.Element, x: float, y: float, text: str, kind: str) -> None:
    ET.SubElement(parent, "text", {"class": kind, "x": f"{x:g}", "y": f"{y:g}"}).text = text
