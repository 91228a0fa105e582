"""Splices that the acting model goes on from: where it may begin, which of its tries are kept, and
what is trained.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy import Line
from toy_paths import ToyTree, critique, reply

from agentr_core.episodes.rollout import play_replies
from agentr_core.errors import ConfigError
from agentr_core.methods.agent_r.splice import REFLECTIONS, continuation_samples, play_prefix
from agentr_core.methods.faults import parse
from agentr_core.recipes.agent_r import ContinuationConfig, SpliceConfig
from agentr_core.types import PathPair, Rejection, Sample, Step, StopReason, Trajectory

CONFIG = SpliceConfig(mode="continued", action="look", no_error="reject")
PAIR = ToyTree(0).pair(["right", "right"], ["left", "left", "stop"])


def prefix_steps(pair: PathPair = PAIR, error: int | None = 0) -> tuple[Step, ...]:
    steps = play_prefix(pair, critique(error, len(pair.bad.nodes)), Line(), CONFIG, seed=0)
    assert isinstance(steps, tuple), steps
    return steps


def attempt(*actions: str) -> Trajectory:
    """Play on from the turn of revision of the pair after its first error."""
    steps = prefix_steps()
    replies = [*(step.reply for step in steps), *(reply(action, "On.") for action in actions)]
    observation, outcomes = play_replies(Line(), PAIR.bad.trajectory.instance, replies)
    last = outcomes[-1]
    return Trajectory(
        instance=PAIR.bad.trajectory.instance,
        first_observation=observation,
        steps=tuple(outcome.step for outcome in outcomes),
        reward=last.step.reward,
        success=last.step.success,
        stop=last.stop or StopReason.STEP_LIMIT,
    )


def samples_of(tries: dict[str, Trajectory], config: SpliceConfig = CONFIG) -> dict[str, Sample] | Rejection:
    return continuation_samples(PAIR, critique(0, 3), prefix_steps(), tries, Line(), config, alpha=0.9, seed=0)


def test_the_beginning_is_played_up_to_the_answer_to_the_turn_of_revision() -> None:
    steps = prefix_steps()
    assert [step.action for step in steps] == ["left", "look"]
    thought, action = steps[-1].reply.splitlines()
    assert thought.removeprefix("Thought: ") in REFLECTIONS
    assert action == "Action: look"
    assert steps[-1].observation == "You are at -1."


def test_a_pair_without_an_error_and_one_whose_revision_ends_the_episode_have_no_beginning() -> None:
    assert play_prefix(PAIR, critique(None, 3), Line(), CONFIG, seed=0).reason == "no-error-found"  # type: ignore[union-attr]
    ending = replace(CONFIG, action="stop")
    rejection = play_prefix(PAIR, critique(0, 3), Line(), ending, seed=0)
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "ended-at-revision-turn"
    assert "stop" in rejection.detail


def test_the_shortest_try_that_clears_alpha_becomes_the_sample() -> None:
    tries = {
        "long": attempt("right", "look", "right", "right"),
        "short": attempt("right", "right", "right"),
        "lost": attempt("right", "stop"),
        "fell": attempt("jump"),
    }
    samples = samples_of(tries)
    assert isinstance(samples, dict)
    assert list(samples) == ["short"]
    sample = samples["short"]
    turn, *suffix = [message.text for message in sample.messages if message.train]
    assert turn == prefix_steps()[-1].reply
    assert suffix == [reply("right", "On.")] * 3
    observations = [message.text for message in sample.messages if message.role == "user"]
    assert observations[2:] == ["You are at -1.", "You are at -1.", "You are at 0.", "You are at 1."]
    assert not any(message.train for message in sample.messages if "left" in message.text)
    extra = sample.provenance.extra
    assert (extra["mode"], extra["tries"], extra["cleared"], extra["live_reward"]) == ("continued", 4, 2, 1.0)


def test_as_many_tries_as_asked_for_are_kept() -> None:
    tries = {"a": attempt("right", "right", "right"), "b": attempt("look", "right", "right", "right")}
    samples = samples_of(tries, replace(CONFIG, continuation=ContinuationConfig(per_pair=0)))
    assert isinstance(samples, dict)
    assert list(samples) == ["a", "b"]


def test_a_pair_none_of_whose_tries_clears_alpha_is_rejected_with_the_best_reward() -> None:
    rejection = samples_of({"x": attempt("right", "right", "stop"), "y": attempt("jump")})
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "no-try-cleared-alpha"
    assert rejection.detail == "2 tries, best reward 0.5, alpha 0.9"


def test_a_try_that_ends_with_the_reward_of_its_beginning_is_none() -> None:
    idle, gaining = attempt("right", "right", "right"), attempt("look", "right", "right", "right")
    early = tuple(replace(step, reward=1.0) for step in idle.steps)
    rejection = samples_of({"idle": replace(idle, steps=early)})
    assert isinstance(rejection, Rejection)
    assert (rejection.reason, rejection.detail) == (
        "no-gain",
        "1 tries end with the reward that they had at the revision turn",
    )
    samples = samples_of({"idle": replace(idle, steps=early), "gaining": gaining})
    assert isinstance(samples, dict)
    assert list(samples) == ["gaining"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "splice.continuation.samples=2",
            "splice.continuation: belongs to splice.mode continued or rollback, not blind",
        ),
        ("splice={mode: continued, prune: true}", "splice.prune: works only in splice.mode verified, not continued"),
        (
            "splice={mode: continued, continuation: {temperature: 0}}",
            "splice.continuation: more than one sample at temperature 0",
        ),
        ('splice.action="a\\nb"', "splice.action: give a text of one line"),
    ],
)
def test_faults_of_the_section_are_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match="splice") as fault:
        parse({"name": "x", "environment": {"name": "textcraft"}, "model": {"path": "m"}}, [override])
    assert said in str(fault.value)
