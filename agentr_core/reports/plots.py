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
from agentr_core.reports.document import BASE_ITERATION, Counts, Estimate, IterationScore

_WIDTH = 440.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 12.0, 18.0, 26.0
_MAX_NAMED = 6
"""With more models than this on an axis, `iteration 7` is written `7`."""
_LAST_BIN = 20
"""Values from here on share the last bar of a histogram."""
_MAX_RADIUS = 7.0
"""The radius of the largest dot of a scatter."""
_LEADING = 12.0
"""The distance from one line of text to the next."""
Point = tuple[float, float]
_MAX_STRETCHES = 200
"""A longer curve is divided into so many parts, and only the lowest and highest point of each is
drawn.
"""
_NUM_STYLES = 6
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

    summary = "; ".join(_point_text(score.iteration, score.success) for score in scores)
    svg = _canvas(height, f"Held-out success by iteration: {summary}")
    for tick in range(5):
        _grid_line(svg, y(top * tick / 4), f"{100 * top * tick / 4:g}", first=tick == 0)
    base = next((score for score in scores if score.iteration == BASE_ITERATION), None)
    if base:
        _line(svg, "base", _LEFT, y(base.success.value), _WIDTH - _RIGHT, y(base.success.value))
    coordinates = " ".join(
        f"{_coordinate(x)},{_coordinate(y(score.success.value))}" for x, score in zip(centres, scores, strict=True)
    )
    ET.SubElement(svg, "polyline", {"class": "line", "points": coordinates})
    for x, score in zip(centres, scores, strict=True):
        mark = ET.SubElement(svg, "g", {"class": "now" if score.iteration == current else "then"})
        _error_bar(mark, x, score.success, y)
        ET.SubElement(
            mark, "circle", {"class": "dot", "cx": _coordinate(x), "cy": _coordinate(y(score.success.value)), "r": "4"}
        )
        _text(mark, x, y(score.success.high) - 7, wording.percent(score.success.value), "middle", "number")
        name = wording.model_name(score)
        _text(mark, x, height - 8, name if len(scores) <= _MAX_NAMED else name.split()[-1], "middle", "tick")
    return _svg_text(svg)


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
        f"{name}: {', '.join(_point_text(number, estimate) for number, estimate in points)}"
        for name, points in series.items()
    )
    svg = _canvas(height, f"{title}: {'; '.join(descriptions)}")
    for tick in range(5):
        _grid_line(svg, y(top * tick / 4), f"{100 * top * tick / 4:g}", first=tick == 0)
    for number in range(last + 1):
        name = wording.iteration_name(number)
        label = name if last < _MAX_NAMED else name.split()[-1]
        _text(svg, _LEFT + slot * (number + 0.5), height - 8, label, "middle", "tick")
    for index, points in enumerate(series.values()):
        offset = (index - (len(series) - 1) / 2) * min(9.0, slot / (len(series) + 1))
        group = ET.SubElement(svg, "g", {"class": f"s{index % _NUM_STYLES}"})
        centres = [(_LEFT + slot * (number + 0.5) + offset, estimate) for number, estimate in points]
        coordinates = " ".join(f"{_coordinate(x)},{_coordinate(y(estimate.value))}" for x, estimate in centres)
        ET.SubElement(group, "polyline", {"class": "line", "points": coordinates})
        for x, estimate in centres:
            _error_bar(group, x, estimate, y)
            _mark(group, index % _NUM_STYLES, x, y(estimate.value))
    return _svg_text(svg)


def line_mark(index: int) -> str:
    """Return the mark of a line of `set_curves` alone, for a legend."""
    svg = ET.Element("svg", {"viewBox": "0 0 22 12", "class": "mark", "aria-hidden": "true"})
    group = ET.SubElement(svg, "g", {"class": f"s{index % _NUM_STYLES}"})
    _line(group, "line", 0, 6, 22, 6)
    _mark(group, index % _NUM_STYLES, 11, 6)
    return _svg_text(svg)


def histogram(counts: Mapping[int, int], title: str) -> str:
    """Return a histogram of whole numbers from their counts; the tail shares the last bar."""
    bins = Counter[int]()
    for value, count in counts.items():
        bins[min(value, _LAST_BIN)] += count
    last = f"{_LAST_BIN}+" if max(counts) > _LAST_BIN else str(_LAST_BIN)
    values = range(min(bins), max(bins) + 1)
    return bars({last if value == _LAST_BIN else str(value): bins[value] for value in values}, title)


def bars(numbers: Counts, title: str) -> str:
    """Return counts as named bars side by side."""
    height = 150.0
    largest = max([1, *numbers.values()])
    # A bar is at most a tenth of the drawing wide, so that a few bars do not fill all of it.
    slot = min((_WIDTH - 2 * _RIGHT) / len(numbers), _WIDTH / 10)
    svg = _canvas(height, f"{title}: " + "; ".join(f"{name}: {count}" for name, count in numbers.items()))
    floor, plot_height = height - _BOTTOM, height - _TOP - _BOTTOM
    for index, (name, count) in enumerate(numbers.items()):
        x, bar_height = _RIGHT + slot * index, plot_height * count / largest
        box = {
            "x": _coordinate(x + slot * 0.12),
            "y": _coordinate(floor - bar_height),
            "width": _coordinate(slot * 0.76),
            "height": _coordinate(bar_height),
        }
        ET.SubElement(svg, "rect", {"class": "bar", **box})
        if count:
            _text(svg, x + slot / 2, floor - bar_height - 4, str(count), "middle", "number")
        _text(svg, x + slot / 2, height - 9, name, "middle", "tick")
    _line(svg, "axis", _RIGHT, floor, _RIGHT + slot * len(numbers), floor)
    return _svg_text(svg)


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
        _text(svg, left - 7, y(value) + 4, _tick_label(value, ticks[1] - ticks[0]), "end", "tick")
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
        stretch = max(1, math.ceil(len(curve) / _MAX_STRETCHES))
        extremes = [
            point
            for start in range(0, len(curve), stretch)
            for point in sorted(
                {min(curve[start : start + stretch], key=_value), max(curve[start : start + stretch], key=_value)}
            )
        ]
        group = ET.SubElement(svg, "g", {"class": f"s{number % _NUM_STYLES}"})
        if len(curve) == 1:
            ((step, value),) = curve
            ET.SubElement(
                group, "circle", {"class": "dot", "cx": _coordinate(x(step)), "cy": _coordinate(y(value)), "r": "3"}
            )
        else:
            coordinates = " ".join(f"{_coordinate(x(step))},{_coordinate(y(value))}" for step, value in extremes)
            dashes = {"stroke-dasharray": "4 3"} if number else {}
            ET.SubElement(group, "polyline", {"class": "line", "points": coordinates, **dashes})
        _text(group, _WIDTH - right + 5, heights[number], name, "start", "name")
    _text(svg, x(first), height - 8, f"{first:g}", "middle", "tick")
    if last > first:
        _text(svg, x(last), height - 8, f"{last:g}", "middle", "tick")
    return _svg_text(svg)


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
        return _LEFT + _MAX_RADIUS + (_WIDTH - _LEFT - _MAX_RADIUS - _RIGHT) * value / x_ticks[-1]

    def y(value: float) -> float:
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * value / y_ticks[-1]

    svg = _canvas(height, title)
    for value in y_ticks:
        _grid_line(svg, y(value), _tick_label(value, y_ticks[1]), first=not value)
    for value in x_ticks:
        _text(svg, x(value), height - 8, _tick_label(value, x_ticks[1]), "middle", "tick")
    for css_class, points in (("then", plain_points), ("now", marked_points)):
        group = ET.SubElement(svg, "g", {"class": css_class})
        for (across, up), number in sorted(Counter(points).items()):
            size = min(_MAX_RADIUS, 2.5 + number**0.5)
            attributes = {"cx": _coordinate(x(across)), "cy": _coordinate(y(up)), "r": _coordinate(size)}
            ET.SubElement(group, "circle", {"class": "dot", **attributes})
    return _svg_text(svg)


def radar(axes: Sequence[str], series: Mapping[str, Sequence[float]], current: str, title: str) -> str:
    """Return shares in [0, 1] on axes around a centre, a closed line for each name: that of
    `current` is coloured, the first of the others dashed. There are at least three axes.
    """
    height, radius = 300.0, 106.0
    middle_x, middle_y = _WIDTH / 2, height / 2 - 8

    def position(number: int, share: float) -> tuple[float, float]:
        angle = 2 * math.pi * number / len(axes)
        return middle_x + radius * share * math.sin(angle), middle_y - radius * share * math.cos(angle)

    def outline(shares: Sequence[float]) -> dict[str, str]:
        corners = (position(number, share) for number, share in enumerate(shares))
        return {"points": " ".join(f"{_coordinate(x)},{_coordinate(y)}" for x, y in corners), "fill": "none"}

    svg = _canvas(height, title)
    for ring in (0.25, 0.5, 0.75, 1.0):
        ET.SubElement(svg, "polygon", {"class": "grid", **outline([ring] * len(axes))})
    for number, axis in enumerate(axes):
        _line(svg, "grid", middle_x, middle_y, *position(number, 1.0))
        x, y = position(number, 1.1)
        anchor = "middle" if abs(x - middle_x) < 1 else "start" if x > middle_x else "end"
        _text(svg, x, y + 4, axis, anchor, "tick")
    reference_names = [name for name in series if name != current]
    for name in reference_names:
        ET.SubElement(
            svg, "polygon", {"class": "base" if name == reference_names[0] else "line", **outline(series[name])}
        )
    group = ET.SubElement(svg, "g", {"class": "now"})
    ET.SubElement(group, "polygon", {"class": "error", **outline(series[current])})
    for number, share in enumerate(series[current]):
        x, y = position(number, share)
        ET.SubElement(group, "circle", {"class": "dot", "cx": _coordinate(x), "cy": _coordinate(y), "r": "3"})
    return _svg_text(svg)


def _mark(parent: ET.Element, style: int, x: float, y: float) -> None:
    if not style:
        ET.SubElement(parent, "circle", {"class": "dot", "cx": _coordinate(x), "cy": _coordinate(y), "r": "4.2"})
        return
    points = " ".join(f"{_coordinate(x + across)},{_coordinate(y + down)}" for across, down in _CORNERS[style])
    ET.SubElement(parent, "polygon", {"class": "dot", "points": points})


def _ticks(low: float, high: float) -> list[float]:
    """Return numbers in steps of 1, 2 or 5 times a power of ten, from at most `low` to at least
    `high`: two to six distinct ones.
    """
    value_range = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(value_range / 3))
    step = next(power * factor for factor in (1, 2, 5, 10) if value_range <= 4.0001 * power * factor)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _tick_label(value: float, step: float) -> str:
    """Return the label of an axis tick; all ticks with this step get the same notation."""
    text = f"{value:.6g}" if step >= 0.0001 or not value else f"{value:.0e}"
    return text if value >= 0 else f"{wording.MINUS}{text.removeprefix('-')}"


def _point_text(number: int, estimate: Estimate) -> str:
    return f"{wording.iteration_name(number)} {wording.percent(estimate.value)}% ({wording.interval(estimate)})"


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


def _grid_line(svg: ET.Element, y: float, label: str, *, first: bool) -> None:
    _line(svg, "axis" if first else "grid", _LEFT, y, _WIDTH - _RIGHT, y)
    _text(svg, _LEFT - 7, y + 4, label, "end", "tick")


def _canvas(height: float, label: str) -> ET.Element:
    return ET.Element(
        "svg", {"viewBox": f"0 0 {_coordinate(_WIDTH)} {_coordinate(height)}", "role": "img", "aria-label": label}
    )


def _line(parent: ET.Element, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
    ends = {"x1": _coordinate(x1), "y1": _coordinate(y1), "x2": _coordinate(x2), "y2": _coordinate(y2)}
    ET.SubElement(parent, "line", {"class": kind, **ends})


def _text(parent: ET.Element, x: float, y: float, text: str, anchor: str, kind: str) -> None:
    ET.SubElement(
        parent, "text", {"class": kind, "x": _coordinate(x), "y": _coordinate(y), "text-anchor": anchor}
    ).text = text


def _coordinate(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _svg_text(svg: ET.Element) -> str:
    return ET.tostring(svg, encoding="unicode")
