"""What counts of the reply of a judge, editor, voter, summariser or reflector that thinks first."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.methods.agent_r.critique import critique_of, judge_paths, parse_verdict, scans_of
from agentr_core.methods.et_agent.evaluate import read_vote
from agentr_core.methods.et_agent.operators import parse_redundant_step, parse_step_number, parse_thoughts
from agentr_core.recipes.agent_r import CritiqueConfig
from agentr_core.replies import after_thoughts, answer_text, is_cut_within_thought
from agentr_core.stages.demonstrate import thought_in, with_label, with_thought
from agentr_core.tools.search import tool
from agentr_core.types import (
    Answer,
    Generation,
    Instance,
    PathPair,
    Request,
    Step,
    StopReason,
    Trajectory,
    TreePath,
    Verdict,
)

QUOTES = (
    "<think>\nI end with one of these lines: Judgement: Good, if the action helps. Judgement: Bad, if it harms, fails, "
    "or does not belong to the task"
)


def make_generation(text: str, finish: Literal["stop", "length"] = "stop", *, thinks: bool = False) -> Generation:
    return Generation(
        text=text, token_ids=(), finish_reason=finish, prompt_tokens=1, completion_tokens=1, thinks=thinks
    )


def make_answer(text: str, finish: Literal["stop", "length"] = "stop") -> Answer:
    return Answer(
        role="editor",
        model="m",
        prompt_hash="h",
        seed=1,
        text=text,
        finish_reason=finish,
        prompt_tokens=1,
        completion_tokens=1,
    )


@pytest.mark.parametrize(
    ("reply", "counts"),
    [
        (make_generation("Judgement: bad"), "Judgement: bad"),
        (make_generation("Judgement: bad. Then it", "length"), "Judgement: bad. Then it"),
        (make_generation("<think>a</think>b"), "b"),
        (make_generation("a</think>b", "length", thinks=True), "b"),
        (make_generation("<think>a</think>b</think>c", "length"), "c"),
        (make_generation(QUOTES, "length"), None),
        (make_generation(QUOTES), None),
        (make_generation("Well.\n <think>a", "length"), None),
        (make_generation("<think>a</think>\n<think>b", "length"), None),
        (make_generation("Judgement: bad", "length", thinks=True), None),
        (make_generation("Judgement: bad", thinks=True), "Judgement: bad"),
        (
            make_generation("It writes <think> twice. Judgement: bad", "length"),
            "It writes <think> twice. Judgement: bad",
        ),
    ],
)
def test_what_follows_the_thoughts_counts(reply: Generation, counts: str | None) -> None:
    assert answer_text(reply) == counts


def test_a_reply_that_ended_by_itself_was_not_cut() -> None:
    assert is_cut_within_thought(make_generation(QUOTES, "length"))
    assert not is_cut_within_thought(make_generation(QUOTES))


@pytest.mark.parametrize(
    "thought",
    [
        "<think>Step: 3?</think>",
        "Step: 3?</think>",
        "<think>In <think> and </think>, Step: 3?</think>",
        "<think>I end with </think>. Step: 3?</think>",
        "<think>I begin with <think>. Step: 3?</think>",
        "In <think> and </think>, Step: 3?</think>",
    ],
)
def test_thoughts_that_belong_to_a_reply_stay(thought: str) -> None:
    reply = "\nStep: 2\nCorrected Step: <think>x</think><search>y</search>"
    assert after_thoughts(thought + reply, keep_later_thoughts=True) == reply
    assert parse_redundant_step(thought + reply) == (2, "<think>x</think><search>y</search>")
    assert parse_step_number(thought + reply) == 2
    assert parse_thoughts(f"{thought}\nThought 1: <think>a</think>", 1) == ("a",)
    assert after_thoughts(reply, keep_later_thoughts=True) == reply


def test_options_that_a_thought_quotes_are_no_reply() -> None:
    assert parse_verdict(QUOTES) is Verdict.UNPARSABLE
    assert parse_verdict(f"{QUOTES}</think>\nJudgement: Good") is Verdict.GOOD
    assert read_vote("<think>\nI say <answer>yes</answer> or <answer>no</answer>. The second") is None
    assert read_vote("<think><answer>yes</answer></think><answer>no</answer>") is False
    assert parse_step_number("<think>\nStep: 1 looks fine") is None
    assert parse_redundant_step("<think>\nStep: no, or Corrected step:") is None
    assert tool.read_summary("<think>\nI write the line Findings: and then") == tool.NO_HELP
    assert tool.read_summary("<think>Findings: a</think>\nb") == "b"


def test_the_thought_of_an_editor_is_not_trained() -> None:
    world = TextCraft()
    answer = make_answer("<think>\nI am asked for a thought.\n</think>\n\nI lack wood.")
    assert with_thought(with_label(world, "get 2 oak logs"), thought_in(answer)).startswith("Thought: I lack wood.\n")
    assert thought_in(make_answer("<think>\nI am asked for a thought.")) == ""
    assert thought_in(make_answer("I lack wood. Th", "length")) == ""


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (make_generation(QUOTES, "length"), None),
        (make_generation("Judgement: Bad, if", "length", thinks=True), None),
        (make_generation("I do not know."), 0),
        (make_generation("Judgement: Bad", thinks=True), 0),
    ],
)
def test_a_verdict_cut_within_a_thought_is_no_error(reply: Generation, error: int | None) -> None:
    pair = PathPair(good=path(1, StopReason.SUCCESS), bad=path(2, StopReason.FAILURE), split=0)
    config = CritiqueConfig(unparsable="bad", votes=1)

    async def ask(request: Request) -> list[Generation]:
        return [reply]

    async def judged() -> Any:
        return await judge_paths(
            scans_of([pair], config), ask, config, seed=1, count_tokens=lambda request: 1, context_length=9999
        )

    assert critique_of(pair, asyncio.run(judged()), config).first_error == error


def path(leaf: int, stop: StopReason) -> TreePath:
    step = Step(reply="go", action="go", observation="gone", reward=0.0)
    trajectory = Trajectory.ended(Instance(environment="w", split="s", index=0), "begin", (step,), stop)
    return TreePath(tree_id="t", nodes=(leaf,), trajectory=trajectory)


@pytest.mark.parametrize(("opening", "closing"), [("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>")])
def test_other_tags_of_thoughts_are_read_as_those_of_acting_models_are(opening: str, closing: str) -> None:
    """A server of Magistral leaves its own tags in the text, unless it has a reasoning parser."""

    def retold(text: str) -> str:
        return text.replace("<think>", opening).replace("</think>", closing)

    quotes = retold(QUOTES)
    assert answer_text(make_generation(quotes, "length")) is answer_text(make_generation(quotes)) is None
    assert parse_verdict(quotes) is Verdict.UNPARSABLE
    assert parse_verdict(f"{quotes}{closing}\nI cannot say.") is Verdict.UNPARSABLE
    assert answer_text(make_generation(f"{quotes}{closing}\nJudgement: Good")) == "\nJudgement: Good"
    assert is_cut_within_thought(make_generation("Judgement: bad", "length", thinks=True))
    assert not is_cut_within_thought(make_generation(retold("a</think>b"), "length", thinks=True))
    assert (
        thought_in(make_answer(retold("<think>\nI am asked for a thought.\n</think>\n\nI lack wood.")))
        == "I lack wood."
    )
    # The tags of a step that an editor writes are the world's.
    step = "\nStep: 2\nCorrected Step: <think>x</think><search>y</search>"
    for thought in (f"{opening}Step: 3?{closing}", f"Step: 3?{closing}", f"{opening}In <think> and </think>.{closing}"):
        assert after_thoughts(thought + step, keep_later_thoughts=True) == step


def test_a_thought_may_begin_after_a_sentence() -> None:
    assert is_cut_within_thought(make_generation("Okay. <think>I weigh Judgement: Bad", "length"))
    assert not is_cut_within_thought(make_generation("<think>a</think>Judgement: Bad, since", "length"))
