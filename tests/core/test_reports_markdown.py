from __future__ import annotations

from dataclasses import replace

import pytest

from agentr_core.reports.document import (
    Bar,
    Column,
    Estimate,
    IterationReport,
    IterationScore,
    Meter,
    Row,
    Table,
    report_name,
)
from agentr_core.reports.markdown import escape, fence, render_markdown, table_markdown
from agentr_core.reports.model_card import summary_markdown, summary_table

EMPTY = IterationReport(recipe_name="r", run_id="run-1", iteration=1, date="2026-03-14", environment="e", model="m")


def score(iteration: int, value: float, n: int = 100) -> IterationScore:
    estimate = Estimate(value=value, low=value - 0.1, high=value + 0.1, n=n)
    return IterationScore(iteration=iteration, success=estimate, reward=estimate)


def test_markdown_in_a_text_is_shown_and_not_obeyed() -> None:
    assert escape("a|b <script>\n*c* `d` [e](f)") == r"a\|b \<script\> \*c\* \`d\` \[e\](f)"


@pytest.mark.parametrize("text", ["plain", "```", "a\n````python\nb\n````", "`"])
def test_a_text_cannot_close_its_fence(text: str) -> None:
    first, *inside, last, end = fence(text).split("\n")
    assert (first, end) == (last + "text", "")
    assert len(last) >= 3
    assert "\n".join(inside) == text
    assert last not in text


def test_a_table_has_one_cell_for_each_column_it_keeps() -> None:
    table = Table(
        (Column("a|b", "text"), Column("", "bar"), Column("n"), Column("deep", "meter")),
        (Row(("x|y", Bar(0.5), "1", Meter("50.0", "40-60", 0.5)), "strong"),),
    )
    assert table_markdown(table) == ("| a\\|b | n | deep |\n| :-- | --: | --: |\n| **x\\|y** | 1 | 50.0 (40-60) |\n")


def test_a_multiline_recipe_stays_in_its_block() -> None:
    assert "```yaml\nname: r\nseed: 1\n" in render_markdown(replace(EMPTY, recipe_yaml="name: r\nseed: 1\n"))


def test_a_summary_takes_the_latest_score_of_each_iteration() -> None:
    first = replace(EMPTY, scores=(score(0, 0.2), score(1, 0.3)))
    second = replace(EMPTY, iteration=2, scores=(score(0, 0.2), score(1, 0.35), score(2, 0.5)))
    lines = summary_table([second, first]).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["base", "20.0"], ["iteration", "1"], ["iteration", "2"]]
    assert "35.0" in lines[2]
    assert "+30.0" in lines[3]
    assert len(set(map(len, lines))) == 1


def test_both_summaries_hold_the_same_cells() -> None:
    report = replace(EMPTY, scores=(score(0, 0.2, n=1234), score(1, 0.3)))
    plain = summary_table([report]).split()
    markdown = summary_markdown([report]).replace("|", " ").replace(":--", "").replace("--:", "").split()
    assert plain == markdown


def test_reports_sort_by_name() -> None:
    assert sorted([report_name(i) for i in (10, 2)]) == ["iteration-02", "iteration-10"]
