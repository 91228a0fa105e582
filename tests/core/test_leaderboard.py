"""The leaderboard: entries of runs and papers, and the Markdown file that shows them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from readme import ROOT

from agentr_core.errors import ConfigError
from agentr_core.reports import wording
from agentr_core.reports.document import Estimate, IterationReport, IterationScore
from agentr_core.reports.leaderboard import (
    END_MARK,
    START_MARK,
    Entry,
    add_entry,
    entry_of,
    leaderboard_table,
    read_entries,
)
from agentr_core.reports.markdown import table_markdown

SHIPPED = ROOT / "data" / "manual" / "pages" / "results.md"


def estimate(value: float, half: float = 0.1) -> Estimate:
    return Estimate(value=value, low=value - half, high=value + half, n=100)


REPORT = IterationReport(
    recipe_name="nightly",
    run_id="a" * 16,
    iteration=1,
    date="2026-11-29 07:12 UTC",
    environment="textcraft",
    model="tiny",
    scores=(
        IterationScore(iteration=0, success=estimate(0.47), reward=estimate(0.47)),
        IterationScore(iteration=1, success=estimate(0.72), reward=estimate(0.72), versus_base=estimate(0.25)),
    ),
    versions={"commit": "c" * 40, "processor": "AMD EPYC, 2 of 4"},
)
PAPER = Entry(world="textcraft", recipe="Agent-R", model="Llama", score=0.78, source="arXiv 2501.11425")


def test_an_entry_is_the_last_score_of_a_run() -> None:
    entry = entry_of(REPORT, seed=3, seconds=5400)
    assert (entry.score, entry.base, entry.gain, entry.gain_interval) == (0.72, 0.47, 0.25, (0.15, 0.35))
    assert (entry.run, entry.seed, entry.date, entry.iteration, entry.episodes) == ("a" * 16, 3, "2026-11-29", 1, 100)
    assert entry.core_hours == 3.0, "an hour and a half on two of four processors"
    with pytest.raises(ConfigError, match="no evaluated model"):
        entry_of(replace(REPORT, scores=()), seed=3, seconds=1)


def test_of_runs_that_end_at_once_none_is_lost(tmp_path: Path) -> None:
    page = tmp_path / "boards" / "board.md"
    entries = [entry_of(replace(REPORT, run_id=f"{number:016x}"), seed=number, seconds=60) for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(partial(add_entry, page), entries))
    assert sorted(entry.run for entry in read_entries(page.with_suffix(".jsonl"))) == [entry.run for entry in entries]


def test_a_machine_that_is_not_known_costs_nothing_known() -> None:
    assert entry_of(replace(REPORT, versions={}), seed=0, seconds=60).core_hours is None


def test_a_file_is_made_and_a_run_has_one_place_in_it(tmp_path: Path) -> None:
    page = tmp_path / "board.md"
    entry = entry_of(REPORT, seed=3, seconds=60)
    add_entry(page, entry)
    add_entry(page, entry.model_copy(update={"run": "b" * 16, "score": 0.9}))
    table = add_entry(page, entry.model_copy(update={"score": 0.8}))
    interval = f"(62.0{wording.DASH}82.0)"
    assert [row.cells[4] for row in table.rows] == [f"90.0 {interval}", f"80.0 {interval}"], "the best is first"
    assert [each.score for each in read_entries(page.with_suffix(".jsonl"))] == [0.9, 0.8]
    assert page.read_text().startswith("# Leaderboard\n")


def test_what_stands_around_it_stays_and_papers_are_marked(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(f"# Mine\n\n{START_MARK}\nold\n{END_MARK}\n\nThe end.\n")
    page.with_suffix(".jsonl").write_text(f"{PAPER.model_dump_json(exclude_defaults=True)}\n")
    add_entry(page, entry_of(REPORT, seed=3, seconds=60))
    text = page.read_text()
    assert text.startswith(f"# Mine\n\n{START_MARK}\n\n| World |")
    assert text.endswith(f"|\n\n{END_MARK}\n\nThe end.\n")
    assert "old" not in text
    paper_row, run_row = text.splitlines()[6:8]
    assert f"| 78.0 | {wording.NOTHING} |" in paper_row
    assert paper_row.endswith("theirs: arXiv 2501.11425 |")
    assert run_row.endswith("cccccccc 2026-11-29 |")


@pytest.mark.parametrize("text", ["# Mine\n", f"{START_MARK}\n", f"{END_MARK}\n{START_MARK}\n"])
def test_a_file_of_other_text_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "notes.md"
    page.write_text(text)
    with pytest.raises(ConfigError, match="has no place for a leaderboard; put the lines"):
        add_entry(page, PAPER)
    assert page.read_text() == text
    assert not page.with_suffix(".jsonl").exists()


@pytest.mark.parametrize(
    ("line", "fault"),
    [("{", "line 1: line: Invalid JSON"), ('{"world": "w"}', "line 1: recipe: Field required"), ("[]", "line 1: line")],
)
def test_entries_that_cannot_be_read_are_refused(tmp_path: Path, line: str, fault: str) -> None:
    page = tmp_path / "board.md"
    page.with_suffix(".jsonl").write_text(line)
    with pytest.raises(ConfigError, match=fault):
        add_entry(page, PAPER)
    assert not page.exists()


def test_the_manual_shows_the_entries_beside_it() -> None:
    entries = read_entries(SHIPPED.with_suffix(".jsonl"))
    assert any(entry.run for entry in entries)
    assert all(bool(entry.run) != bool(entry.source) for entry in entries)
    assert f"{START_MARK}\n\n{table_markdown(leaderboard_table(entries))}\n{END_MARK}" in SHIPPED.read_text(
        encoding="utf-8"
    )
