"""What editors say, read; and steps in tags that are cut, repaired, reopened and thought anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.environments.reasoning.grammar import strict_fault, tags, text_of
from agentr_core.methods.et_agent.operators import (
    NoChild,
    TaggedForm,
    numbered_text,
    open_step,
    parse_redundant_step,
    parse_step_number,
    parse_thoughts,
    reopen_thought,
    repair_tags,
    step_bounds,
    thoughts_of,
    with_thoughts,
)
from agentr_core.types import Instance, Step, StopReason, Trajectory

MATH = TaggedForm("math")
INSTANCE = Instance(environment="reasoning", split="train", index=0)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("Step: 2\nAnalysis: x", 2),
        ("  **STEP**: 12", 12),
        ("Step: no", 0),
        ("step : No.", 0),
        ("Step: none", None),
        ("Corrected Step: 3", None),
        ("Steps follow. Step: 4, then Step: 5", 4),
        ("Step: " + "1" * 5000, 111111111),
        ("Step two", None),
        ("", None),
    ],
)
def test_a_step_is_named_by_the_first_label(reply: str, number: int | None) -> None:
    assert parse_step_number(reply) == number


def test_a_correction_is_what_follows_its_label() -> None:
    text = "Step: 2\nAnalysis: As in step: 1.\nCorrected Step: <think>Aa</think>\n<python>x</python>"
    assert parse_redundant_step(text) == (2, "<think>Aa</think>\n<python>x</python>")
    assert parse_redundant_step("Step: no\nCorrected Step: x") == (0, "")
    assert parse_redundant_step("Step: 2\nCorrected Step:  ") is None
    assert parse_redundant_step("Corrected Step: x") is None


def test_thoughts_are_numbered_in_order() -> None:
    assert parse_thoughts("Here:\n\n**Thought 1:** One\ntwo.\nthought 2 : Three.", 2) == ("One\ntwo.", "Three.")
    assert parse_thoughts("Thought 1: I use <b>.\n", 1) == ("I use <b>.",)
    assert parse_thoughts("Thought 1: a</think><python>x</python>", 1) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("I add. <python>1</python> Then <search>x</search>", "<think>I add.</think>\n<python>1</python>"),
        ("<think>I add.<python>1</python>", "<think>I add.</think>\n<python>1</python>"),
        (
            "<think>a</think><think>b</think><answer>\\boxed{1}</answer>tail",
            "<think>ab</think>\n<answer>\\boxed{1}</answer>",
        ),
        ("<search>x</search>", "<think></think>\n<search>x</search>"),
        ("Only a thought.", "<think>Only a thought."),
        ("a <result>made up</result> <python>1</python>", "<think>a"),
    ],
)
def test_a_written_step_is_repaired(text: str, wanted: str) -> None:
    assert repair_tags(text) == wanted


def test_what_cannot_be_repaired_makes_no_step() -> None:
    assert repair_tags(" <think> </think>") == NoChild("empty-step")
    assert repair_tags("a <python>print(1)") == NoChild("unclosed-call", "<python>print(1)")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a</think>\n<answer>b</answer>", "<think>a\nb"),
        ("<think>a</think><think>b</think><answer>c</answer>", "<think>a</think><think>bc"),
        ("<think>a", "<think>a"),
        ("no tags", "<think>no tags"),
    ],
)
def test_a_step_is_reopened(text: str, wanted: str) -> None:
    assert reopen_thought(text) == wanted


def step(reply: str, observation: str = "") -> Step:
    return Step(reply=reply, action="x", observation=observation, reward=0.0, valid=True, token_ids=(1, 2))


def trajectory(*steps: Step) -> Trajectory:
    return Trajectory(
        instance=INSTANCE, first_observation="?", steps=steps, reward=1.0, success=True, stop=StopReason.SUCCESS
    )


def test_a_hint_and_the_reply_after_it_are_one_step() -> None:
    steps = [
        step("<think>a</think><python>1</python>", "<result>1</result>"),
        open_step("<think>Wait."),
        step(" b</think>"),
    ]
    assert MATH.ends(steps) == [1, 3]
    assert numbered_text(MATH, steps).splitlines()[-2:] == ["### Step 2", "<think>Wait. b</think>"]
    assert step_bounds(MATH, steps, 2) == (1, 3)
    assert step_bounds(MATH, steps, 3) == NoChild("step-out-of-range", "step 3 of 2")


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1).filter(str.strip)
CALLS = st.tuples(WORDS, st.sampled_from(["search", "python"]), WORDS, WORDS)


@pytest.mark.slow
@given(st.lists(CALLS, max_size=4), st.lists(WORDS, min_size=5, max_size=5))
def test_thoughts_change_and_actions_do_not(calls: list[tuple[str, str, str, str]], fresh: list[str]) -> None:
    steps = [step(f"<think>{t}</think>\n<{c}>{q}</{c}>", f"\n<result>\n{r}\n</result>\n") for t, c, q, r in calls]
    parent = trajectory(*steps, step("<think>So.</think>\n<answer>It is \\boxed{1}.</answer>"))
    thoughts = fresh[: len(parent.steps)]
    child = with_thoughts(MATH, parent, thoughts)
    assert isinstance(child, Trajectory)
    assert [thought for thought, _ in thoughts_of(MATH, child.steps)] == [text.strip() for text in thoughts]
    before, after = (text_of(t).split("</think>\n") for t in (parent, child))
    assert [part.partition("<think>")[0] for part in before[1:]] == [part.partition("<think>")[0] for part in after[1:]]
    assert strict_fault(text_of(child)) == strict_fault(text_of(parent)) == ""
    assert all(not s.token_ids for s in child.steps)
    assert replace(child, steps=()) == replace(parent, steps=())


def test_thoughts_that_act_change_what_is_done_and_make_no_child() -> None:
    parent = trajectory(step("<think>So.</think>\n<answer>\\boxed{1}</answer>"))
    assert with_thoughts(MATH, parent, ["<answer>\\boxed{2}</answer>"]) == NoChild("actions-changed")
    assert any(tags("<answer>"))
