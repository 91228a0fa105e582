"""A full report of iteration 2, as HTML, Markdown, index and summary, against golden files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from browser import browse

from agentr_core.methods.agent_r.report import (
    JudgeRecord,
    OracleAgreement,
    SpliceSurvival,
    judge_section,
    revision_samples_section,
    survival_section,
)
from agentr_core.methods.catalogue import FUNNEL_OF_TREES
from agentr_core.reports.document import (
    DepthScore,
    ErrorRecord,
    Estimate,
    FaultCount,
    FunnelStage,
    IterationReport,
    IterationScore,
    ModelUsage,
    PassAt,
    RevisionExample,
    SetScore,
    StopCount,
    TokenCounts,
    Turn,
)
from agentr_core.reports.html import render_html, render_index
from agentr_core.reports.markdown import render_markdown
from agentr_core.reports.model_card import summary_markdown, summary_table

Golden = Callable[[str, str], None]


def estimate(value: float, low: float, high: float, n: int) -> Estimate:
    return Estimate(value=value, low=low, high=high, n=n)


def score(
    iteration: int,
    success: tuple[float, float, float],
    steps: float,
    depths: tuple[tuple[float, float, float], ...],
    revision: tuple[float, float, float],
    loops: tuple[float, ...],
    looping: float,
) -> IterationScore:
    sizes = (62, 82, 50, 6)
    return IterationScore(
        iteration=iteration,
        success=estimate(*success, 200),
        reward=estimate(*success, 200),
        steps_to_success=steps,
        by_depth=tuple(DepthScore(depth=i + 1, success=estimate(*depth, sizes[i])) for i, depth in enumerate(depths)),
        revision=estimate(*revision, 121),
        loops=loops,
        looping=looping,
    )


BASE = score(
    0,
    (0.395, 0.3299, 0.4641),
    6.4,
    ((0.758, 0.638, 0.848), (0.317, 0.226, 0.424), (0.100, 0.043, 0.214), (0.0, 0.0, 0.390)),
    (0.066, 0.034, 0.125),
    (4.31, 1.92, 0.74, 0.30, 0.11),
    0.385,
)
FIRST = score(
    1,
    (0.560, 0.4907, 0.6270),
    6.9,
    ((0.871, 0.766, 0.933), (0.524, 0.418, 0.629), (0.260, 0.159, 0.396), (0.167, 0.030, 0.564)),
    (0.248, 0.180, 0.332),
    (2.05, 0.88, 0.31, 0.12, 0.04),
    0.205,
)
SECOND = score(
    2,
    (0.635, 0.5663, 0.6987),
    7.1,
    ((0.919, 0.825, 0.965), (0.610, 0.502, 0.708), (0.360, 0.242, 0.499), (0.167, 0.030, 0.564)),
    (0.347, 0.268, 0.436),
    (1.22, 0.51, 0.17, 0.06, 0.02),
    0.120,
)

INSTRUCTION = """\
You craft items in a text world. Each turn, reply with one line of thought and one action:
Thought: what is lacking now
Action: one of the three actions"""
GOAL = """\
Crafting commands:
craft 4 oak planks using 1 oak log
craft 4 stick using 2 planks
craft 1 wooden pickaxe using 3 planks, 2 stick

Goal: craft wooden pickaxe."""


def step(part: str, reply: str, observation: str, **flags: object) -> tuple[Turn, Turn]:
    return (
        Turn(role="assistant", text=reply, part=part, **flags),  # type: ignore[arg-type]
        Turn(role="user", text=observation, part=part),  # type: ignore[arg-type]
    )


def example(number: int, live: float | None) -> RevisionExample:
    return RevisionExample(
        sample_id=f"5f0c9d1e77ab42{number:02d}",
        instance=f"textcraft/train/{140 + 17 * number}",
        tree_id=f"c41b7e90d2f6a8{number:02d}",
        good_reward=1.0,
        bad_reward=0.0,
        live_reward=live,
        split=1,
        cut=3,
        turns=(
            Turn(role="user", text=INSTRUCTION, part="opening"),
            Turn(role="assistant", text="OK.", part="opening"),
            Turn(role="user", text=GOAL, part="opening"),
            *step(
                "shared",
                "Thought: wooden pickaxe takes 3 planks, 2 stick; lacking 3 planks.\nAction: get 2 oak log",
                "Got 2 oak log",
            ),
            *step(
                "bad",
                "Thought: planks come from the log.\nAction: craft 4 oak planks using 1 oak log",
                "Crafted 4 minecraft:oak_planks",
                verdict="good",
                judge_reply="Planks are needed for both the sticks and the pickaxe.\nJudgement: Good",
            ),
            *step(
                "bad",
                "Thought: all is there for the pickaxe.\nAction: craft 1 wooden pickaxe using 3 oak planks, 2 stick",
                "Could not find enough items to craft minecraft:wooden_pickaxe",
                verdict="bad",
                first_error=True,
                judge_reply="There is no stick in the inventory, so the command cannot work.\nJudgement: Bad",
            ),
            Turn(
                role="assistant",
                text="Thought: That did not work, I skipped something. Back to what is missing.\nAction: wait",
                part="revision",
                train=True,
            ),
            Turn(role="user", text="ok.", part="revision"),
            *step(
                "good",
                "Thought: stick takes 2 planks; lacking nothing.\nAction: craft 4 stick using 2 oak planks",
                "Crafted 4 minecraft:stick",
                train=True,
            ),
            *step(
                "good",
                "Thought: planks are short by one.\nAction: craft 4 oak planks using 1 oak log",
                "Crafted 4 minecraft:oak_planks",
                train=True,
            ),
            *step(
                "good",
                "Thought: all is there for wooden pickaxe.\nAction: craft 1 wooden pickaxe using 3 oak planks, 2 stick",
                "Crafted 1 minecraft:wooden_pickaxe",
                train=True,
            ),
        ),
    )


def full_report() -> IterationReport:
    """Return a report with every part filled in."""
    return IterationReport(
        recipe_name="textcraft-tiny",
        run_id="2c8e61f09ad7b534",
        iteration=2,
        date="2026-03-14 09:26 UTC",
        environment="textcraft",
        model="tiny-crafter 4.1M",
        roles={"judge": "crafter-70b"},
        scores=(BASE, FIRST, SECOND),
        versus_base=estimate(0.240, 0.161, 0.319, 200),
        versus_previous=estimate(0.075, -0.004, 0.154, 200),
        interval_method="Wilson for shares, paired bootstrap over instances for differences",
        funnel_title=FUNNEL_OF_TREES.title,
        funnel=(
            FunnelStage(name="trees", count=200),
            FunnelStage(name="ended paths", count=3318, rejected_by_reason=dict(tree_without_reward=29)),
            FunnelStage(
                name="candidate pairs", count=4127, rejected_by_reason=dict(gap_at_most_beta=2893, good_below_alpha=611)
            ),
            FunnelStage(name="judged", count=1584, rejected_by_reason=dict(cap_per_tree=2310, cap_per_bad_leaf=233)),
            FunnelStage(name="spliced", count=1402, rejected_by_reason=dict(no_error_found=182)),
            FunnelStage(
                name="verified", count=1043, rejected_by_reason=dict(reward_below_alpha=297, ended_in_bad_part=62)
            ),
            FunnelStage(name="samples", count=1688, rejected_by_reason=dict(duplicate=112, too_long=4)),
            FunnelStage(name="trained rows", count=1688),
        ),
        data_sections=(
            survival_section(
                SpliceSurvival(
                    num_played=1402,
                    num_survived=1043,
                    num_rejected_by_reason=dict(reward_below_alpha=297, ended_in_bad_part=62),
                )
            ),
            judge_section(
                JudgeRecord(
                    num_steps_by_verdict=dict(good=3922, bad=1402, uncertain=871, unparsable=64),
                    num_pairs=1584,
                    model_label="crafter-70b",
                    num_without_error=182,
                    num_pairs_by_length={
                        1: 388,
                        2: 341,
                        3: 242,
                        4: 166,
                        5: 97,
                        6: 71,
                        7: 40,
                        9: 31,
                        12: 17,
                        21: 6,
                        26: 3,
                    },
                    oracle=OracleAgreement(
                        accuracy=estimate(0.812, 0.802, 0.822, 6195),
                        precision=0.774,
                        recall=0.693,
                        first_error=estimate(0.664, 0.640, 0.687, 1584),
                    ),
                )
            ),
        ),
        seconds_by_activity={"generate": 1984.2, "train": 911.7, "environment": 41.3, "store": 18.6, "other": 63.9},
        tokens=TokenCounts(
            prompt=48_211_904,
            completion=1_602_733,
            trained_by_class=dict(revision_turn=29_204, good_suffix=148_930, good_path=97_115),
            cut_by_purpose={"collected": (21_504, 388), "evaluated": (2_961, 0), "judged": (6_259, 12)},
            usages=(
                ModelUsage(
                    role="judge", model="crafter-70b", requests=6259, prompt=5_804_113, completion=188_204, cost=3.4729
                ),
            ),
        ),
        errors=ErrorRecord(
            refusals_by_message=dict(invalid_action=611, missing_ingredient=455, wrong_count=214, irrelevant_item=122),
            stops=(
                StopCount(reason="success", num_collected=1511, num_evaluated=127),
                StopCount(reason="step_limit", num_collected=1764, num_evaluated=73),
                StopCount(reason="context_limit", num_collected=43, num_evaluated=0),
            ),
            faults=(FaultCount(error="ModelUnavailable", phase="collect", count=3, num_lost=0),),
        ),
        sample_sections=(
            revision_samples_section(tuple(example(number, 1.0 if number % 2 else None) for number in range(1, 6))),
        ),
        recipe_yaml="name: textcraft-tiny\nmethod: agent-r\nseed: 7\nsearch:\n  dives: 8\n  width: 4\n",
        versions={"agentr": "0.1.0", "torch": "2.13.0", "trl": "1.16.0"},
        hashes={
            "checkpoint": "91d7f0a2c3b84e65",
            "parent": "0be2497f5a61d8c3",
            "dataset": "e7305c1b88fa9d24",
            "weights": "sha256:4f1d0c66a7b2e95fd7c8a1b03e6249d5f8c0b7a2e1d34c5968ff70a1b2c3d4e5",
            "store": "6a40d7be12c95f38",
        },
    )


@pytest.mark.parametrize(
    ("name", "render"), [("report.html", render_html), ("report.md", render_markdown)], ids=["html", "markdown"]
)
def test_a_full_report(name: str, render: Callable[[IterationReport], str], golden: Golden) -> None:
    golden(name, render(full_report()))


def with_sets() -> IterationReport:
    """Return the report of a run that plays a larger set beside the first one, and samples its
    base.
    """
    depths = (0.9, 0.5, 0.1)

    def set_scores(iteration: int, gain: float) -> tuple[SetScore, ...]:
        versus = estimate(gain, gain - 0.04, gain + 0.04, 300) if iteration else None
        return tuple(
            SetScore(
                name=name,
                split=split,
                instances=instances,
                success=estimate(0.5 + gain, 0.42 + gain, 0.58 + gain, instances),
                versus_base=versus,
                by_depth=tuple(
                    DepthScore(
                        depth=depth,
                        success=estimate(min(1.0, share + gain), share, min(1.0, share + 2 * gain), instances // 3),
                        versus_base=versus,
                    )
                    for depth, share in enumerate(depths, 1)
                ),
            )
            for name, split, instances in (("test", "test", 99), ("renamed", "renamed-test", 300))
        )

    sample_set = SetScore(
        name="sampled",
        split="test",
        instances=99,
        success=estimate(0.52, 0.44, 0.6, 792),
        pass_at=tuple(
            PassAt(
                k=k,
                success=estimate(share, share - 0.08, share + 0.08, 99),
                by_depth=tuple(
                    DepthScore(depth=depth, success=estimate(share, share - 0.1, share + 0.1, 33))
                    for depth in (1, 2, 3)
                ),
            )
            for k, share in ((1, 0.52), (2, 0.58), (4, 0.63), (8, 0.67))
        ),
    )
    report = full_report()
    gains = (0.0, 0.06, 0.11)
    scores = tuple(
        replace(entry, sets=(*set_scores(entry.iteration, gain), *([sample_set] if entry.iteration == 0 else [])))
        for entry, gain in zip(report.scores, gains, strict=True)
    )
    return replace(report, scores=scores)


def test_a_report_of_several_sets(golden: Golden) -> None:
    report = with_sets()
    golden("report-sets.md", render_markdown(report))
    golden("summary-sets.txt", summary_table([report]))
    page = render_html(report)
    for title in ("Held-out sets", "Success by depth", "Headroom: what sampling reaches"):
        assert page.count(f"<h2>{title}</h2>") == 1


def test_an_empty_report(golden: Golden) -> None:
    report = IterationReport(
        recipe_name="r",
        run_id="run",
        iteration=1,
        date="2026-03-14",
        environment="e",
        model="m",
        funnel_title=FUNNEL_OF_TREES.title,
        data_sections=(survival_section(None), judge_section(None)),
        sample_sections=(revision_samples_section(()),),
    )
    golden("report-empty.md", render_markdown(report))


def test_the_pages_of_a_run(golden: Golden) -> None:
    second = full_report()
    first = replace(second, iteration=1, scores=second.scores[:2], versus_base=None, versus_previous=None)
    golden("index.html", render_index([second, first]))
    last = replace(second.scores[-1], versus_base=second.versus_base)
    current = replace(second, scores=(*second.scores[:-1], last))
    golden("summary.txt", summary_table([first, current]))
    golden("summary.md", summary_markdown([first, current]))


def with_worlds() -> IterationReport:
    """Return the report of a run of one model in three worlds."""
    share = estimate(0.456, 0.356, 0.556, 200)
    gain = estimate(0.106, 0.023, 0.189, 200)

    def world(name: str) -> SetScore:
        return SetScore(
            name=name,
            split="test",
            instances=200,
            success=share,
            versus_base=gain,
            reward=share,
            revision=share,
            revision_reward=share,
        )

    report = full_report()
    worlds = tuple(map(world, ("alfworld", "sciworld", "textcraft")))
    return replace(report, scores=tuple(replace(score, worlds=worlds) for score in report.scores))


def test_a_report_of_several_worlds_has_the_intervals_of_recovery() -> None:
    line = next(line for line in render_markdown(with_worlds()).splitlines() if line.startswith("| sciworld | base"))
    assert line.count("45.6 (35.6\N{EN DASH}55.6)") == 4


MEASURE = """
<style>html { width: 60rem }</style><script>
for (const one of document.querySelectorAll(".scroll"))
  if (one.scrollWidth > one.clientWidth)
    document.body.append(`too wide: ${one.scrollWidth} of ${one.clientWidth} in ${one.closest("section").id}; `)
document.body.append("measured")
</script>
"""


@pytest.mark.slow
def test_tables_fit_a_screen(tmp_path: Path) -> None:
    report = full_report()
    pages = {"report": render_html(report), "sets": render_html(with_sets()), "index": render_index([report])}
    pages["worlds"] = render_html(with_worlds())
    for name, page in pages.items():
        page = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
        (tmp_path / f"{name}.html").write_text(page.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
        html = browse((tmp_path / f"{name}.html").as_uri(), tmp_path / "profile")
        assert "measured</body>" in html.replace("\n", ""), name
        assert re.findall(r"too wide: \d[^;]*", html) == [], name
