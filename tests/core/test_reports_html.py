from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import HOSTILE, browse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentr_core.methods.agent_r.report import (
    JudgeRecord,
    SpliceSurvival,
    judge_section,
    revision_samples_section,
    survival_section,
)
from agentr_core.reports.document import (
    ErrorRecord,
    Estimate,
    FaultCount,
    FunnelStage,
    IterationReport,
    IterationScore,
    RevisionExample,
    StopCount,
    TokenCounts,
    Turn,
)
from agentr_core.reports.html import render_html, render_index
from agentr_core.reports.iteration import headline, sections
from agentr_core.reports.markdown import render_markdown

EMPTY = IterationReport(recipe_name="r", run_id="run-1", iteration=2, date="2026-03-14", environment="e", model="m")
EMPTY_PARTS: dict[str, Any] = {
    "data_sections": (survival_section(None), judge_section(None)),
    "sample_sections": (revision_samples_section(()),),
}
ATTACK = "</pre></style><script>alert(1)</script><img src=x onerror=alert(2)>\" onload='x' {{ 7 * 7 }} & \x00\ud800"
VOID = {"meta", "img", "br", "link", "input", "hr"}


def score(iteration: int, value: float) -> IterationScore:
    estimate = Estimate(value=value, low=max(0.0, value - 0.1), high=min(1.0, value + 0.1), n=100)
    return IterationScore(iteration=iteration, success=estimate, reward=estimate, loops=(1.0, 0.5), looping=0.25)


def hostile(text: str = ATTACK) -> IterationReport:
    """Return a report in which every string is the given text, a role or a part aside."""
    tally = {text: 3}
    return IterationReport(
        recipe_name=text,
        run_id=text,
        iteration=1,
        date=text,
        environment=text,
        model=text,
        scores=(score(0, 0.2), score(1, 0.4)),
        interval_method=text,
        funnel=(FunnelStage(name=text, count=4, rejected_by_reason=tally),),
        data_sections=(
            survival_section(SpliceSurvival(num_played=7, num_survived=4, num_rejected_by_reason=tally)),
            judge_section(judge_record(text, {2: 3})),
        ),
        seconds_by_activity={text: 5.0},
        tokens=TokenCounts(prompt=5, completion=4, trained_by_class=tally),
        errors=ErrorRecord(
            refusals_by_message=tally,
            stops=(StopCount(reason=text, num_collected=1, num_evaluated=2),),
            faults=(FaultCount(error=text, phase=text, count=1, num_lost=1),),
        ),
        sample_sections=(revision_samples_section((example(text),)),),
        recipe_yaml=text,
        versions={text: text},
        hashes={text: text},
    )


def judge_record(text: str, lengths: Mapping[int, int]) -> JudgeRecord:
    return JudgeRecord(num_steps_by_verdict={text: 3}, num_pairs=4, num_without_error=1, num_pairs_by_length=lengths)


def test_revisions_cut_in_the_shared_steps_are_counted_apart() -> None:
    page = str(judge_section(judge_record("good", {0: 4, 1: 2})))
    assert "In 4 of them the first bad step is one that both paths share (0 steps)" in page
    assert "both paths share" not in str(judge_section(judge_record("good", {1: 2})))


def example(text: str) -> RevisionExample:
    turn = Turn(role="assistant", text=text, part="bad", train=True, first_error=True, verdict=text, judge_reply=text)
    return RevisionExample(
        sample_id=text,
        instance=text,
        tree_id=text,
        good_reward=1.0,
        bad_reward=0.0,
        split=0,
        cut=1,
        turns=(replace(turn, part="opening"), replace(turn, part="opening", role="user"), turn),
    )


class Page(HTMLParser):
    """Collects the elements of a page and checks that they close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_no_text_can_become_markup() -> None:
    report = hostile()
    tame = Page(render_html(hostile("tame")))
    page = Page(render_html(report))
    assert page.tags == tame.tags
    assert {name for name, _ in page.attributes} == {name for name, _ in tame.attributes}
    assert "script" not in page.tags
    assert "alert(1)" in "".join(page.text)
    assert "{{ 7 * 7 }}" in "".join(page.text)


def test_the_index_escapes_too() -> None:
    assert Page(render_index([hostile()])).tags == Page(render_index([hostile("tame")])).tags


def test_a_page_can_be_written_as_utf8_whatever_the_model_said() -> None:
    assert b"\\ud800" in render_html(hostile()).encode("utf-8")
    assert b"\\ud800" in render_markdown(hostile()).encode("utf-8")


def test_a_page_loads_nothing() -> None:
    page = Page(render_html(hostile("tame")))
    assert not {name for name, _ in page.attributes} & {"src", "srcset", "data", "action", "background"}
    assert [value for name, value in page.attributes if name == "href" and not str(value).startswith("#")] == []
    assert page.tags.isdisjoint({"script", "link", "iframe", "img", "object"})
    assert not re.search(r"url\(|@import", render_html(EMPTY))


def test_links_of_the_contents_lead_to_sections() -> None:
    page = Page(render_html(hostile("tame")))
    targets = [str(value)[1:] for name, value in page.attributes if name == "href"]
    assert targets
    assert set(targets) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_the_order_of_the_sections() -> None:
    assert [section.key for section in sections(replace(EMPTY, **EMPTY_PARTS))] == [
        "headline", "scores", "depth", "revision", "loops", "funnel", "survival", "judge", "time", "tokens", "errors",
        "samples", "recipe", "versions",
    ]  # fmt: skip


def test_every_part_that_was_not_measured_says_so() -> None:
    empty = replace(EMPTY, **EMPTY_PARTS)
    assert render_html(empty).count("Not measured: ") == len(sections(empty))
    assert render_markdown(empty).count("Not measured: ") == len(sections(empty))


def test_the_same_report_gives_the_same_page() -> None:
    assert render_html(hostile("tame")) == render_html(hostile("tame"))


def test_differences_are_taken_against_base_and_the_iteration_before() -> None:
    report = replace(EMPTY, scores=(score(0, 0.2), score(1, 0.5), score(2, 0.4)))
    summary = headline(report)
    assert summary is not None
    assert [(delta.text, delta.against) for delta in summary.deltas] == [
        ("+20.0", "base"),
        ("\N{MINUS SIGN}10.0", "iteration 1"),
    ]
    assert summary.conclusion == ""


def test_the_first_iteration_is_compared_with_base_once() -> None:
    summary = headline(replace(EMPTY, iteration=1, scores=(score(0, 0.2), score(1, 0.5))))
    assert summary is not None
    assert [delta.against for delta in summary.deltas] == ["base"]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.01, 0.2, "Above base"), (-0.2, -0.01, "Below base"), (-0.01, 0.2, "No clear difference from base")],
)
def test_the_headline_reads_the_interval_of_a_difference(low: float, high: float, said: str) -> None:
    difference = Estimate(value=(low + high) / 2, low=low, high=high, n=100)
    summary = headline(replace(EMPTY, iteration=1, scores=(score(0, 0.2), score(1, 0.3)), versus_base=difference))
    assert summary is not None
    assert summary.conclusion.startswith(said)


def test_first_error_and_trained_turns_are_marked() -> None:
    turns = (
        Turn(role="assistant", text="kept", part="shared"),
        Turn(role="assistant", text="wrong", part="bad", first_error=True, verdict="bad"),
        Turn(role="assistant", text="sorry", part="revision", train=True),
    )
    samples = revision_samples_section((replace(example("tame"), turns=turns),))
    html = render_html(replace(EMPTY, sample_sections=(samples,)))
    assert re.findall(r'<div class="(turn[^"]*)">', html) == [
        "turn assistant",
        "turn assistant wrong",
        "turn assistant trained",
    ]
    assert html.count("First error</div>") == 1


def test_zero_counts_do_not_divide() -> None:
    report = replace(
        EMPTY,
        funnel=(FunnelStage(name="trees", count=0), FunnelStage(name="leaves", count=0)),
        data_sections=(
            survival_section(SpliceSurvival(num_played=0, num_survived=0)),
            judge_section(
                JudgeRecord(num_steps_by_verdict={}, num_pairs=0, num_without_error=0, num_pairs_by_length={1: 0})
            ),
        ),
        seconds_by_activity={"train": 0.0},
        tokens=TokenCounts(prompt=0, completion=0),
        errors=ErrorRecord(),
    )
    Page(render_html(report))
    assert "no spliced pair has a step judged bad" in render_markdown(report)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(report=st.builds(hostile, st.text()), value=st.floats(0, 1), lengths=st.lists(st.integers(0, 60), max_size=4))
def test_any_text_and_any_number_render(report: IterationReport, value: float, lengths: list[int]) -> None:
    section = judge_section(judge_record("tame", {steps: steps % 3 for steps in lengths}))
    Page(render_html(replace(report, scores=(score(0, value), score(1, 1 - value)), data_sections=(section,))))


def test_reports_of_several_runs_have_no_index() -> None:
    with pytest.raises(ValueError, match="one run, got run-1, run-2"):
        render_index([EMPTY, replace(EMPTY, run_id="run-2")])
    with pytest.raises(ValueError, match="got none"):
        render_index([])


def marks(seen: str) -> set[str]:
    """Return what of a hostile text became part of a page in a browser."""
    tags = set(re.findall(r"<(?:img|iframe|base|form|link|meta|a|button)\b[^>]*taken", seen))
    return tags | set(re.findall(r"<title>taken</title>", seen))


@pytest.mark.slow
def test_a_browser_shows_hostile_texts_as_texts(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(render_html(hostile(HOSTILE)).encode("utf-8"))
    page = browse((tmp_path / "page.html").as_uri(), tmp_path / "profile")
    assert "&lt;a id=taken" in page
    assert not marks(page)
    (tmp_path / "bare.html").write_text(f"<!doctype html><p>{HOSTILE}", encoding="utf-8")
    bare_page = browse((tmp_path / "bare.html").as_uri(), tmp_path / "profile")
    assert "file:///taken-refresh" in bare_page, "it is hostile indeed: the page is left for another"


@pytest.mark.slow
@pytest.mark.long
def test_prefects_page_of_an_artifact_shows_hostile_texts_as_texts(tmp_path: Path) -> None:
    from servers import served
    from wheel import environment

    text = render_markdown(hostile(HOSTILE))
    artifact = {"key": "report", "type": "markdown", "data": text, "description": "Report of iteration 1"}
    with served(environment(tmp_path, tmp_path / "prefect"), ui=True) as env:
        api = env["PREFECT_API_URL"]
        record = httpx.post(f"{api}/artifacts/", json=artifact, timeout=60).raise_for_status().json()
        for pages in ("", "/v2"):
            address = f"{api.removesuffix('/api')}{pages}/artifacts/artifact/{record['id']}"
            # The page draws the text in a worker, which the browser's own time does not wait for.
            tries = (browse(address, tmp_path / "profile", seconds=5) for _ in range(9))
            page = next((dom for dom in tries if "&lt;a id=taken" in dom), "")
            assert page, address
            assert not marks(page)
