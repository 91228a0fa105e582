"""Drawings of a report: each function returns inline SVG as markup.

Made without matplotlib: they are a few hundred bytes each, the same on every machine, and
coloured by the page's style sheet, so that one drawing serves light, dark and print. Classes name
the marks: `axis`, `grid`, `error`, `line`, `dot`, `bar`, `now` (this iteration).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from xml.etree import ElementTree as ET

from agentr_core.reports import wording
from agentr_core.reports.document import BASE, Counts, Estimate, IterationScore

_WIDTH = 440.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 12.0, 18.0, 26.0
_NAMED = 6
"""With more models than this on an axis, `iteration 7` is written `7`."""
_LONGEST = 20
"""Values from here on share the last bar of a histogram."""
_LARGEST = 7.0
"""The radius of the largest dot of a scatter."""
_LEADING = 12.0
"""The distance from one line of text to the next."""
Point = tuple[float, float]
_DRAWN = 200
"""A longer curve is divided into so many parts, and only the lowest and highest point of each is
drawn.
"""
_KINDS = 6
"""The number of kinds of lines that a style sheet distinguishes."""
_CORNERS: tuple[tuple[Point, ...], ...] = (
    (),
    ((-4, -4), (4, -4), (4, 4), (-4, 4)),
    ((0, -5), (4.6, 3.6), (-4.6, 3.6)),
    ((0, -5), (5, 0), (0, 5), (-5, 0)),
    ((0, 5), (4.6, -3.6), (-4.6, -3.6)),
    ((-2, -5), (2, -5), (2, -2), (5, -2), (5, 2), (2, 2), (2, 5), (-2, 5), (-2, 2), (-5, 2), (-5, -2), (-2, -2)),
)
"""The corners of the mark of each kind, around its place; the first is a circle."""


def success(scores: Sequence[IterationScore], current: int) -> str:
    """Return success in percent over iterations with 95% error bars; a dashed line marks the
    base.
    """
    height = 210.0
    top = _ceiling(max(score.success.high for score in scores))
    slot = (_WIDTH - _LEFT - _RIGHT) / len(scores)
    centres = [_LEFT + slot * (i + 0.5) for i in range(len(scores))]

    def y(share: float) -> float:
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * share / top

    summary = "; ".join(_point(score.iteration, score.success) for score in scores)
    svg = _canvas(height, f"Held-out success by iteration: {summary}")
    for tick in range(5):
        _ruler(svg, y(top * tick / 4), f"{100 * top * tick / 4:g}", first=tick == 0)
    base = next((score for score in scores if score.iteration == BASE), None)
    if base:
        _line(svg, "base", _LEFT, y(base.success.value), _WIDTH - _RIGHT, y(base.success.value))
    coordinates = " ".join(f"{_at(x)},{_at(y(score.success.value))}" for x, score in zip(centres, scores, strict=True))
    ET.SubElement(svg, "polyline", {"class": "line", "points": coordinates})
    for x, score in zip(centres, scores, strict=True):
        mark = ET.SubElement(svg, "g", {"class": "now" if score.iteration == current else "then"})
        _error_bar(mark, x, score.success, y)
        ET.SubElement(mark, "circle", {"class": "dot", "cx": _at(x), "cy": _at(y(score.success.value)), "r": "4"})
        _text(mark, x, y(score.success.high) - 7, wording.percent(score.success.value), "middle", "number")
        name = wording.model(score)
        _text(mark, x, height - 8, name if len(scores) <= _NAMED else name.split()[-1], "middle", "tick")
    return _markup(svg)


def set_curves(series: Mapping[str, Sequence[tuple[int, Estimate]]], title: str) -> str:
    """Return shares in percent over iterations with 95% error bars, a line for each name; lines
    differ in dashes and marks as well as in colour, and are set side by side so that they do not
    overlap.
    """
    height, right = 230.0, 12.0
    top = _ceiling(max(estimate.high for points in series.values() for _, estimate in points))
    last = max(number for points in series.values() for number, _ in points)
    slot = (_WIDTH - _LEFT - right) / (last + 1)

    def y(share: float) -> float:
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * share / top

    descriptions = (
        f"{name}: {', '.join(_point(number, estimate) for number, estimate in points)}"
        for name, points in series.items()
    )
    svg = _canvas(height, f"{title}: {'; '.join(descriptions)}")
    for tick in range(5):
        _ruler(svg, y(top * tick / 4), f"{100 * top * tick / 4:g}", first=tick == 0)
    for number in range(last + 1):
        name = wording.iteration(number)
        label = name if last < _NAMED else name.split()[-1]
        _text(svg, _LEFT + slot * (number + 0.5), height - 8, label, "middle", "tick")
    for place, points in enumerate(series.values()):
        aside = (place - (len(series) - 1) / 2) * min(9.0, slot / (len(series) + 1))
        group = ET.SubElement(svg, "g", {"class": f"s{place % _KINDS}"})
        centres = [(_LEFT + slot * (number + 0.5) + aside, estimate) for number, estimate in points]
        coordinates = " ".join(f"{_at(x)},{_at(y(estimate.value))}" for x, estimate in centres)
        ET.SubElement(group, "polyline", {"class": "line", "points": coordinates})
        for x, estimate in centres:
            _error_bar(group, x, estimate, y)
            _mark(group, place % _KINDS, x, y(estimate.value))
    return _markup(svg)


def mark(place: int) -> str:
    """Return the mark of a line of `set_curves` alone, for a legend."""
    svg = ET.Element("svg", {"viewBox": "0 0 22 12", "class": "mark", "aria-hidden": "true"})
    group = ET.SubElement(svg, "g", {"class": f"s{place % _KINDS}"})
    _line(group, "line", 0, 6, 22, 6)
    _mark(group, place % _KINDS, 11, 6)
    return _markup(svg)


def histogram(counts: Mapping[int, int], title: str) -> str:
    """Return a histogram of whole numbers from their counts; the tail shares the last bar."""
    bins = Counter[int]()
    for value, count in counts.items():
        bins[min(value, _LONGEST)] += count
    last = f"{_LONGEST}+" if max(counts) > _LONGEST else str(_LONGEST)
    values = range(min(bins), max(bins) + 1)
    return bars({last if value == _LONGEST else str(value): bins[value] for value in values}, title)


def bars(numbers: Counts, title: str) -> str:
    """Return counts as named bars side by side."""
    height = 150.0
    most = max([1, *numbers.values()])
    # A bar is at most a tenth of the drawing wide, so that a few bars do not fill all of it.
    slot = min((_WIDTH - 2 * _RIGHT) / len(numbers), _WIDTH / 10)
    svg = _canvas(height, f"{title}: " + "; ".join(f"{name}: {count}" for name, count in numbers.items()))
    floor, room = height - _BOTTOM, height - _TOP - _BOTTOM
    for place, (name, count) in enumerate(numbers.items()):
        x, tall = _RIGHT + slot * place, room * count / most
        box = {"x": _at(x + slot * 0.12), "y": _at(floor - tall), "width": _at(slot * 0.76), "height": _at(tall)}
        ET.SubElement(svg, "rect", {"class": "bar", **box})
        if count:
            _text(svg, x + slot / 2, floor - tall - 4, str(count), "middle", "number")
        _text(svg, x + slot / 2, height - 9, name, "middle", "tick")
    _line(svg, "axis", _RIGHT, floor, _RIGHT + slot * len(numbers), floor)
    return _markup(svg)


def curves(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """Return curves over steps on one scale, each with its name at the right: the first solid,
    others dashed and in other colours. A curve of one point is a dot.

    The steps of a curve ascend; it may begin late, end early, or have gaps. A long curve is thinned
    to the lowest and the highest point of each stretch, which looks the same.
    """
    height, left, right = 180.0, _LEFT + 14, 70.0
    points = [point for curve in series.values() for point in curve]
    ticks = _ticks(min(value for _, value in points), max(value for _, value in points))
    first, last = min(step for step, _ in points), max(step for step, _ in points)

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return left + (_WIDTH - left - right) * share

    def y(value: float) -> float:
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    svg = _canvas(height, title)
    for value in ticks:
        _line(svg, "axis" if value == ticks[0] else "grid", left, y(value), _WIDTH - right, y(value))
        _text(svg, left - 7, y(value) + 4, _tick(value, ticks[1] - ticks[0]), "end", "tick")
    # Names are at the heights of the last points. Where they would overlap, they are moved down or,
    # if that would leave the drawing, up.
    heights, above = [y(curve[-1][1]) + 4 for curve in series.values()], -math.inf
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for number in order:
        above = heights[number] = max(heights[number], above + _LEADING)
    below = height - _BOTTOM + 4 + _LEADING
    for number in reversed(order):
        below = heights[number] = min(heights[number], below - _LEADING)
    for number, (name, curve) in enumerate(series.items()):
        part = max(1, math.ceil(len(curve) / _DRAWN))
        extremes = [
            point
            for at in range(0, len(curve), part)
            for point in sorted({min(curve[at : at + part], key=_value), max(curve[at : at + part], key=_value)})
        ]
        group = ET.SubElement(svg, "g", {"class": f"s{number % _KINDS}"})
        if len(curve) == 1:
            ((step, value),) = curve
            ET.SubElement(group, "circle", {"class": "dot", "cx": _at(x(step)), "cy": _at(y(value)), "r": "3"})
        else:
            coordinates = " ".join(f"{_at(x(step))},{_at(y(value))}" for step, value in extremes)
            dashes = {"stroke-dasharray": "4 3"} if number else {}
            ET.SubElement(group, "polyline", {"class": "line", "points": coordinates, **dashes})
        _text(group, _WIDTH - right + 5, heights[number], name, "start", "name")
    _text(svg, x(first), height - 8, f"{first:g}", "middle", "tick")
    if last > first:
        _text(svg, x(last), height - 8, f"{last:g}", "middle", "tick")
    return _markup(svg)


def _value(point: Point) -> float:
    return point[1]


def scatter(plain_points: Sequence[Point], marked_points: Sequence[Point], title: str) -> str:
    """Return a scatter plot of points, each axis from 0 to its largest number; the marked points
    are coloured, and a dot is larger where several points coincide.
    """
    height = 240.0
    x_ticks, y_ticks = (
        _ticks(0.0, max((p[axis] for p in (*plain_points, *marked_points)), default=0.0)) for axis in (0, 1)
    )

    def x(value: float) -> float:
        return _LEFT + _LARGEST + (_WIDTH - _LEFT - _LARGEST - _RIGHT) * value / x_ticks[-1]

    def y(value: float) -> float:
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * value / y_ticks[-1]

    svg = _canvas(height, title)
    for value in y_ticks:
        _ruler(svg, y(value), _tick(value, y_ticks[1]), first=not value)
    for value in x_ticks:
        _text(svg, x(value), height - 8, _tick(value, x_ticks[1]), "middle", "tick")
    for kind, points in (("then", plain_points), ("now", marked_points)):
        group = ET.SubElement(svg, "g", {"class": kind})
        for (across, up), number in sorted(Counter(points).items()):
            size = min(_LARGEST, 2.5 + number**0.5)
            attributes = {"cx": _at(x(across)), "cy": _at(y(up)), "r": _at(size)}
            ET.SubElement(group, "circle", {"class": "dot", **attributes})
    return _markup(svg)


def radar(axes: Sequence[str], series: Mapping[str, Sequence[float]], current: str, title: str) -> str:
    """Return shares in [0, 1] on axes around a centre, a closed line for each name: that of
    `current` is coloured, the first of the others dashed. There are at least three axes.
    """
    height, radius = 300.0, 106.0
    middle_x, middle_y = _WIDTH / 2, height / 2 - 8

    def place(number: int, share: float) -> tuple[float, float]:
        angle = 2 * math.pi * number / len(axes)
        return middle_x + radius * share * math.sin(angle), middle_y - radius * share * math.cos(angle)

    def outline(shares: Sequence[float]) -> dict[str, str]:
        corners = (place(number, share) for number, share in enumerate(shares))
        return {"points": " ".join(f"{_at(x)},{_at(y)}" for x, y in corners), "fill": "none"}

    svg = _canvas(height, title)
    for ring in (0.25, 0.5, 0.75, 1.0):
        ET.SubElement(svg, "polygon", {"class": "grid", **outline([ring] * len(axes))})
    for number, axis in enumerate(axes):
        _line(svg, "grid", middle_x, middle_y, *place(number, 1.0))
        x, y = place(number, 1.1)
        side = "middle" if abs(x - middle_x) < 1 else "start" if x > middle_x else "end"
        _text(svg, x, y + 4, axis, side, "tick")
    other_names = [name for name in series if name != current]
    for name in other_names:
        ET.SubElement(svg, "polygon", {"class": "base" if name == other_names[0] else "line", **outline(series[name])})
    group = ET.SubElement(svg, "g", {"class": "now"})
    ET.SubElement(group, "polygon", {"class": "error", **outline(series[current])})
    for number, share in enumerate(series[current]):
        x, y = place(number, share)
        ET.SubElement(group, "circle", {"class": "dot", "cx": _at(x), "cy": _at(y), "r": "3"})
    return _markup(svg)


def _mark(parent: ET.Element, kind: int, x: float, y: float) -> None:
    if not kind:
        ET.SubElement(parent, "circle", {"class": "dot", "cx": _at(x), "cy": _at(y), "r": "4.2"})
        return
    points = " ".join(f"{_at(x + across)},{_at(y + down)}" for across, down in _CORNERS[kind])
    ET.SubElement(parent, "polygon", {"class": "dot", "points": points})


def _ticks(low: float, high: float) -> list[float]:
    """Return numbers in steps of 1, 2 or 5 times a power of ten, from at most `low` to at least
    `high`: two to six distinct ones.
    """
    room = high - low or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(room / 3))
    step = next(size * times for times in (1, 2, 5, 10) if room <= 4.0001 * size * times)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _tick(value: float, step: float) -> str:
    """Return the label of an axis tick; all ticks with this step get the same notation."""
    text = f"{value:.6g}" if step >= 0.0001 or not value else f"{value:.0e}"
    return text if value >= 0 else f"{wording.MINUS}{text.removeprefix('-')}"


def _point(number: int, estimate: Estimate) -> str:
    return f"{wording.iteration(number)} {wording.percent(estimate.value)}% ({wording.interval(estimate)})"


def _ceiling(share: float) -> float:
    """Return the upper end of an axis from 0 that includes `share` and whose four equal steps are
    whole percents.
    """
    return next((top for top in (0.08, 0.2, 0.4, 0.6, 0.8) if share <= top), 1.0)


def _error_bar(parent: ET.Element, x: float, estimate: Estimate, y: Callable[[float], float]) -> None:
    low, high = y(estimate.low), y(estimate.high)
    _line(parent, "error", x, low, x, high)
    for end in (low, high):
        _line(parent, "error", x - 4, end, x + 4, end)


def _ruler(svg: ET.Element, y: float, label: str, *, first: bool) -> None:
    _line(svg, "axis" if first else "grid", _LEFT, y, _WIDTH - _RIGHT, y)
    _text(svg, _LEFT - 7, y + 4, label, "end", "tick")


def _canvas(height: float, label: str) -> ET.Element:
    return ET.Element("svg", {"viewBox": f"0 0 {_at(_WIDTH)} {_at(height)}", "role": "img", "aria-label": label})


def _line(parent: ET.Element, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
    ends = {"x1": _at(x1), "y1": _at(y1), "x2": _at(x2), "y2": _at(y2)}
    ET.SubElement(parent, "line", {"class": kind, **ends})


def _text(parent: ET.Element, x: float, y: float, text: str, anchor: str, kind: str) -> None:
    ET.SubElement(parent, "text", {"class": kind, "x": _at(x), "y": _at(y), "text-anchor": anchor}).text = text


def _at(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _markup(svg: ET.Element) -> str:
    return ET.tostring(svg, encoding="unicode")
