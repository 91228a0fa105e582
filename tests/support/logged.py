"""An evaluation with an episode of each kind that a log tells apart."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import transcript_of
from agentr_core.exchange.inspect_log import LoggedEpisode, LoggedEvaluation
from agentr_core.exchange.training_set import opening_turns
from agentr_core.types import Instance, Message, Span, Step, StopReason, Trajectory, grown_turn

REPLY = Step(
    reply="Thought: on\nAction: right",
    action="right",
    observation="You are at 1. \u202e é",
    reward=0.0,
    valid=True,
    terminated=False,
    success=False,
    token_ids=(5, 6, 7),
    finish_reason="stop",
)
CUT = Step(
    reply="Thought: on and",
    action="",
    observation="Say an action.",
    reward=0.5,
    valid=False,
    terminated=False,
    success=False,
    finish_reason="length",
)


def trajectory(index: int, stop: StopReason, *steps: Step) -> Trajectory:
    """Return an episode of an instance of a line, won if it stops so."""
    success = stop == StopReason.SUCCESS
    return Trajectory(
        instance=Instance(environment="line", split="test", index=index),
        first_observation="The goal is 2 to the right.",
        steps=steps,
        reward=float(success),
        success=success,
        stop=stop,
    )


def episode(played: Trajectory, messages: tuple[Message, ...], **facts: Any) -> LoggedEpisode:
    """Return an episode with its conversation, scored as it ended."""
    scores = {"success": float(played.success), "reward": played.reward}
    fields = {
        "key": played.instance.key,
        "number": 1,
        "scores": scores,
        "num_opening_turns": len(opening_turns(messages)),
    }
    return LoggedEpisode(**{**fields, **facts}, trajectory=played, messages=messages)


def evaluation(env: Environment) -> LoggedEvaluation:
    """Return an evaluation of the world `line` with two episodes of its first instance: one won,
    one cut off; a grown turn; offered tools; a lost episode; a disaster.
    """
    success = trajectory(0, StopReason.SUCCESS, REPLY, REPLY)
    cutoff = trajectory(0, StopReason.STEP_LIMIT, REPLY, CUT)
    disaster = trajectory(1, StopReason.DISASTER, CUT)
    custom = trajectory(2, StopReason.SUCCESS, REPLY)
    turns = {
        outcome.stop: transcript_of(env).prompt(env, outcome.first_observation, outcome.steps)
        for outcome in (success, cutoff, disaster)
    }
    grown = grown_turn(
        [Span(text="think", train=True), Span(text=" result"), Span(text="answer", train=True), Span(text="")]
    )
    user = Message(role="user", text="What?")
    tools = Message(role="tools", text='[{"name": "look"}]')
    call_turns = (
        Message(role="assistant", text="<tool_call>look</tool_call>"),
        Message(role="tool", text="You see 4."),
    )
    episodes = [
        episode(success, turns[success.stop], prompt_tokens=10, completion_tokens=6, seconds=1.5, facts={"depth": 2}),
        episode(cutoff, turns[cutoff.stop], number=2, explanation="The judge says no."),
        episode(disaster, turns[disaster.stop], scores={"success": 0.0, "reward": -1.0}, completion_tokens=4),
        episode(custom, (Message(role="system", text="Think."), user, grown), target=("42", "forty-two")),
        episode(custom, (tools, user, *call_turns), key="line/test/2@1", num_opening_turns=2),
        LoggedEpisode(key="line/test/3", number=1, trajectory=trajectory(3, StopReason.FAILURE), error="OSError: gone"),
    ]
    all_scores = [entry.scores for entry in episodes if entry.scores]
    return LoggedEvaluation(
        evaluation_id="e1",
        run_id="r1",
        task="toy: line-test",
        split="test",
        model="runs/checkpoints/c1",
        started_at=datetime(2026, 1, 2, 3, 4, 5, 600),
        ended_at=datetime(2026, 1, 2, 3, 5),
        episodes=episodes,
        measures={
            name: (
                sum(scores[name] for scores in all_scores) / len(all_scores),
                None if name == "reward" else 0.2,
                None,
                len(all_scores),
            )
            for name in ("success", "reward")
        },
        sampling={"temperature": 0.0, "top_p": 1.0, "max_tokens": 72},
        limits={StopReason.STEP_LIMIT: 20.0},
        versions={"agentr": "1"},
        facts={"iteration": 1},
    )
