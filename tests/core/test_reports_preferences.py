"""The part of a report about preference pairs, in both formats."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from agentr_core.methods.eto.report import PreferenceRecord, preferences_section
from agentr_core.reports import plots
from agentr_core.reports.document import IterationReport
from agentr_core.reports.html import render_html
from agentr_core.reports.markdown import render_markdown
from agentr_core.store.queries.datasets import PreferenceTrainingStep

STEPS = tuple(
    PreferenceTrainingStep(
        step=number,
        loss=0.7 - 0.05 * number,
        reward_accuracy=number / 10,
        chosen_logps=-40.0 + number,
        rejected_logps=-60.0 - number,
        chosen_rewards=0.1 * number,
        rejected_rewards=-0.2 * number,
    )
    for number in range(1, 11)
)
RECORD = PreferenceRecord(
    num_by_case={"lose": 1234, "win": 6},
    num_rejected_by_reason={"no-reward": 3},
    num_by_margin={0.1: 40, 0.9: 1200},
    num_cut=17,
    steps=STEPS,
)
REPORT = IterationReport(
    recipe_name="eto",
    run_id="r",
    iteration=2,
    date="",
    environment="door",
    model="m",
    data_sections=(preferences_section(RECORD),),
)


def test_counts_margins_and_training_are_told() -> None:
    page = render_markdown(REPORT)

    section = page.partition("## Preference pairs\n")[2].partition("\n## ")[0]
    assert "1,234" in section
    assert "lose: the policy got less than the expert | 1,234 |" in section
    assert "no-reward | 3 |" in section
    assert "The rejected side of 17 pairs was cut." in section
    assert "0.9\N{EN DASH}1.0 | 1,200 |" in section
    # First, last and three steps between.
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    assert [row for row in rows if row.isdecimal()] == ["1", "3", "5", "8", "10"]
    assert "100.0" in section


def test_the_page_has_three_drawings() -> None:
    html = render_html(REPORT)
    section = html.partition("Preference pairs")[2]
    assert section.count("<polyline") == 4
    assert section.count('stroke-dasharray="4 3"') == 2


def test_what_was_not_measured_is_said() -> None:
    page = render_markdown(
        replace(REPORT, data_sections=(preferences_section(PreferenceRecord(num_by_case={"file": 2})),))
    )
    assert "Not measured: margins; the pairs tell no rewards." in page
    assert "Not measured: how training went; no steps were stored." in page


def test_a_report_without_pairs_has_no_such_part() -> None:
    assert "Preference pairs" not in render_markdown(replace(REPORT, data_sections=()))


def test_a_flat_curve_is_drawn() -> None:
    svg = ET.fromstring(plots.curves({"one": [(1, 1.0), (2, 1.0)], "other": [(1, 1.0), (2, 1.0)]}, "flat"))
    assert len([mark for mark in svg.iter() if mark.tag == "polyline"]) == 2


def test_curves_that_end_together_have_names_apart_and_round_numbers() -> None:
    ends = {"one": (0.47, 0.857), "other": (0.63, 0.857), "third": (-0.1, 0.85)}
    svg = ET.fromstring(plots.curves({name: list(enumerate(two, 1)) for name, two in ends.items()}, "three"))
    texts = [(mark.text or "", float(mark.get("y") or 0)) for mark in svg.iter() if mark.tag == "text"]
    heights = sorted(y for text, y in texts if text in ends)
    assert all(below - above >= 12 for above, below in pairwise(heights))
    assert [text for text, _ in texts if text[-1].isdigit()] == ["\N{MINUS SIGN}0.5", "0", "0.5", "1", "1", "2"]


def test_names_of_many_curves_at_the_floor_stay_in_the_drawing() -> None:
    svg = ET.fromstring(plots.curves({name: [(1, 1.0), (2, 0.0)] for name in "abcdef"}, "six"))
    heights = sorted(float(mark.get("y") or 0) for mark in svg.iter() if mark.text in tuple("abcdef"))
    assert all(below - above >= 12 for above, below in pairwise(heights))
    assert 0 < heights[0] < heights[-1] <= 180 - 26 + 4


def test_a_curve_stands_where_its_steps_are() -> None:
    """One that begins late is not drawn as wide as the others, and one point is a dot."""
    svg = ET.fromstring(
        plots.curves({"reward": [(1, 0.0), (11, 1.0)], "validation": [(6, 0.5)], "late": [(6, 0.0), (11, 0.0)]}, "s")
    )
    begin, end = (float(point.split(",")[0]) for point in lines(svg)[0].split())
    (dot,) = [mark for mark in svg.iter() if mark.tag == "circle"]
    assert float(dot.get("cx") or 0) == pytest.approx((begin + end) / 2)
    assert [float(point.split(",")[0]) for point in lines(svg)[1].split()] == pytest.approx([(begin + end) / 2, end])


def test_of_a_long_curve_the_peaks_are_drawn() -> None:
    values = [(step, 1000.0 if step == 77_777 else step % 7 / 7) for step in range(100_000)]
    (line,) = lines(ET.fromstring(plots.curves({"norm": values}, "long")))
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert len(heights) <= 400
    assert sum(height < 60 for height in heights) == 1


def lines(svg: ET.Element) -> list[str]:
    return [mark.get("points") or "" for mark in svg.iter() if mark.tag == "polyline"]


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0, 0, "0 0.5"),
        (0, 1e-4, "0 5e-05 1e-04"),
        (0, 1.1e-3, "0 0.0005 0.001 0.0015"),
        (77.9, 105, "70 80 90 100 110"),
        (0, 1234, "0 500 1000 1500"),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, told: str) -> None:
    ticks = plots._ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert " ".join(plots._tick_label(value, ticks[1] - ticks[0]) for value in ticks) == told
