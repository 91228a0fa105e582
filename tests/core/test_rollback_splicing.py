"""Bad paths that are rolled back to before their first error: what the model that goes on is told,
which of its tries are kept, and that nothing of what it was told is trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from toy import Line, Script, instance
from toy_paths import ToyTree, reply

from agentr_core.episodes.rollout import EnvironmentPool, play_replies
from agentr_core.episodes.transcript import Continuation
from agentr_core.errors import ConfigError
from agentr_core.evaluation.episodes import EpisodePlan, Player
from agentr_core.methods.agent_r.critique import reason_of
from agentr_core.methods.agent_r.splice import continuation_samples, diagnosis, play_prefix
from agentr_core.methods.faults import parse
from agentr_core.recipes.agent_r import ContinuationConfig, SpliceConfig
from agentr_core.runtime.episode_shard import rollout_id
from agentr_core.samples.dataset import exchange_suffixes, turn_classes
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.database import Store
from agentr_core.types import (
    Critique,
    PathPair,
    Rejection,
    Request,
    Sample,
    Sampling,
    Step,
    StepVerdict,
    StopReason,
    Trajectory,
    Verdict,
)
from flows.commands.samples import preview_sample

CONFIG = SpliceConfig(mode="rollback")
PAIR = ToyTree(0).pair(["right", "right"], ["look", "left", "stop"])
REASON = "The goal is on the other side."


def critique(first_error: int | None, length: int = 3) -> Critique:
    verdicts = [
        StepVerdict(
            position=at,
            verdict=Verdict.BAD if at == first_error else Verdict.GOOD,
            reply=f"<think>Hm. Judgement: Good</think>{REASON}\nJudgement: {'Bad' if at == first_error else 'Good'}",
        )
        for at in range(length)
    ]
    return Critique(verdicts=tuple(verdicts), first_error=first_error)


def prefix_steps(
    pair: PathPair = PAIR, error: int | None = 1, config: SpliceConfig = CONFIG
) -> tuple[Step, ...] | Rejection:
    return play_prefix(pair, critique(error, len(pair.bad.nodes)), Line(), config, seed=0)


def attempt(*actions: str) -> Trajectory:
    """Play on from before the first error of the pair."""
    steps = prefix_steps()
    assert isinstance(steps, tuple)
    replies = [*(step.reply for step in steps), *(reply(action, "On.") for action in actions)]
    first_observation, outcomes = play_replies(Line(), PAIR.bad.trajectory.instance, replies)
    stop = outcomes[-1].stop or StopReason.STEP_LIMIT
    return Trajectory.ended(
        PAIR.bad.trajectory.instance, first_observation, [outcome.step for outcome in outcomes], stop
    )


def make_samples(tries: dict[str, Trajectory], config: SpliceConfig = CONFIG) -> dict[str, Sample] | Rejection:
    steps = prefix_steps()
    assert isinstance(steps, tuple)
    return continuation_samples(PAIR, critique(1), steps, tries, Line(), config, alpha=0.9, seed=0)


def test_the_beginning_ends_before_the_first_error_and_has_no_turn_of_revision() -> None:
    steps = prefix_steps()
    assert isinstance(steps, tuple)
    assert [step.action for step in steps] == ["look"]
    assert steps[0].reply == PAIR.bad.trajectory.steps[0].reply
    assert prefix_steps(error=0) == ()


def test_an_error_that_ends_the_episode_is_rolled_back_too() -> None:
    steps = prefix_steps(ToyTree(0).pair(["right", "right"], ["left", "jump"]), error=1)
    assert isinstance(steps, tuple)
    assert [step.action for step in steps] == ["left"]


@pytest.mark.parametrize("no_error", ["keep", "reject"])
def test_without_an_error_there_is_nothing_to_roll_back(no_error: Literal["keep", "reject"]) -> None:
    result = prefix_steps(error=None, config=replace(CONFIG, no_error=no_error))
    assert isinstance(result, Rejection)
    assert result.reason == "no-error-found"


def test_an_error_in_the_shared_steps_is_kept_only_where_the_recipe_says_so() -> None:
    pair = ToyTree(0).pair(["look", "right", "right"], ["look", "left", "stop"])
    result = prefix_steps(pair, error=0)
    assert isinstance(result, Rejection)
    assert result.reason == "cut-in-shared-prefix"
    assert prefix_steps(pair, error=0, config=replace(CONFIG, shared_cut="keep")) == ()
    assert len(prefix_steps(pair, error=1)) == 1  # type: ignore[arg-type]


def test_the_diagnosis_has_the_error_what_came_of_it_and_the_reason() -> None:
    text = diagnosis(PAIR, critique(1))
    assert "Action: left\nObservation: You are at -1.\n" in text
    assert f"That was a mistake. {REASON}\n" in text
    assert "Judgement" not in text
    assert "look" not in text
    bare_critique = replace(critique(1), verdicts=tuple(replace(v, reply="") for v in critique(1).verdicts))
    assert "That was a mistake.\n" in diagnosis(PAIR, bare_critique)
    with pytest.raises(ValueError, match="has no first error to tell of"):
        diagnosis(PAIR, critique(None))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("So it is.\nJudgement: Bad", "So it is."),
        ("Judgement: Bad", ""),
        ("No label, bad.", "No label, bad."),
        ("First Judgement: Good. No:\n**Judgement**: Bad", "First Judgement: Good. No:\n**"),
        ("<think>It never ends", ""),
    ],
)
def test_the_reason_stands_between_the_thoughts_and_the_verdict(said: str, reason: str) -> None:
    assert reason_of(said) == reason


def test_the_sample_is_trained_after_the_beginning_and_says_nothing_of_the_diagnosis() -> None:
    tries = {"long": attempt("right", "look", "right"), "short": attempt("right", "right"), "lost": attempt("stop")}
    samples = make_samples(tries)
    assert isinstance(samples, dict)
    assert list(samples) == ["short"]
    sample = samples["short"]
    assert [message.text for message in sample.messages if message.train] == [reply("right", "On.")] * 2
    replies = [message.text for message in sample.messages if message.role == "assistant"]
    assert replies[1:] == [PAIR.bad.trajectory.steps[0].reply, *[reply("right", "On.")] * 2]
    assert not any("mistake" in message.text for message in sample.messages)
    extra, origin = sample.provenance.extra, sample.provenance
    assert (extra["mode"], extra["tries"], extra["cleared"], extra["first_error"]) == ("rollback", 3, 2, 1)
    assert extra["diagnosis"] == diagnosis(PAIR, critique(1))
    assert "by" not in extra
    assert (origin.cut, origin.split) == (1, 0)
    assert turn_classes(sample) == ("good_suffix",) * 2
    config = replace(CONFIG, continuation=ContinuationConfig(by="teacher", per_pair=0))
    teacher_samples = make_samples(tries, config)
    assert isinstance(teacher_samples, dict)
    assert {item.provenance.extra["by"] for item in teacher_samples.values()} == {"teacher"}
    assert list(teacher_samples) == ["short", "long"]


def test_the_whole_rest_of_a_rollback_is_exchanged_for_that_of_another_instance() -> None:
    samples = make_samples({"won": attempt("right", "right")})
    assert isinstance(samples, dict)
    (sample,) = samples.values()
    # An episode that needs one reply.
    messages = (*sample.messages[:5], replace(sample.messages[5], text=reply("jump", "At once.")))
    other_sample = replace(sample, messages=messages, instance=instance(1))
    swaps = exchange_suffixes([sample, other_sample]).kept_items
    assert {item.instance: item.messages for item in swaps} == {
        sample.instance: other_sample.messages,
        other_sample.instance: sample.messages,
    }


def test_a_pair_none_of_whose_tries_wins_is_rejected() -> None:
    result = make_samples({"x": attempt("left", "stop"), "y": attempt("jump")})
    assert isinstance(result, Rejection)
    assert (result.reason, result.detail) == ("no-try-cleared-alpha", "2 tries, best reward 0, alpha 0.9")


async def play_with_diagnosis(prefix: tuple[Step, ...], env: Line | None = None) -> tuple[Trajectory, list[Request]]:
    line, sample = env or Line(), Script(["right"])
    player = Player(environments=EnvironmentPool(lambda name: line), sample=sample, sampling=Sampling(), max_steps=2)
    plan = EpisodePlan(instance=instance(2), seed=0, prefix=prefix, diagnosis="Left was a mistake.")
    result = await player.play_and_grade(plan)
    return result.trajectory, sample.requests


async def test_what_a_model_is_told_stands_where_it_goes_on_and_is_no_part_of_the_episode() -> None:
    prefix = attempt("right").steps
    trajectory, requests = await play_with_diagnosis(prefix)
    assert [step.observation for step in trajectory.steps] == [
        "You are at 0.",
        *(f"You are at {n}." for n in (1, 2, 3)),
    ]
    texts = [[message.text for message in request.messages] for request in requests]
    assert texts[0][-1] == "You are at 1.\n\nLeft was a mistake."
    assert texts[1][: len(texts[0])] == texts[0], "it stays where it was"
    assert [sum("mistake" in text for text in prompt) for prompt in texts] == [1, 1]


async def test_before_the_first_step_it_stands_behind_the_first_observation() -> None:
    trajectory, requests = await play_with_diagnosis(())
    assert trajectory.first_observation == "The goal is 4 to the right."
    assert [message.text for request in requests for message in request.messages if "mistake" in message.text] == [
        "The goal is 4 to the right.\n\nLeft was a mistake."
    ] * 2


async def test_a_turn_that_grows_is_told_behind_the_observation() -> None:
    line = Line()
    line.transcript = Continuation(stop=("right",))
    _, requests = await play_with_diagnosis(attempt("right").steps, line)
    first, second = ([span.text for span in request.messages[-1].spans] for request in requests)
    assert first[-1] == "You are at 1.\n\nLeft was a mistake."
    assert second[: len(first)] == first
    assert second[-1] == "You are at 2."


def test_tries_with_other_diagnoses_are_other_tries() -> None:
    plan = EpisodePlan(instance=instance(0), seed=0)
    ids = {rollout_id("i", "c", replace(plan, diagnosis=text)) for text in ("", "one", "two")}
    assert len(ids) == 3


@pytest.mark.slow
def test_a_preview_shows_what_was_told_before_the_first_trained_turn(tmp_path: Path) -> None:
    samples = make_samples({"short": attempt("right", "right")})
    assert isinstance(samples, dict)
    store = Store(tmp_path / "store.duckdb")
    store.write(sample_rows("s", samples["short"], iteration_id="i"))
    turns = preview_sample(tmp_path, "s")
    positions = [at for at, (text, _) in enumerate(turns) if "mistake" in text]
    assert positions == [next(at for at, (_, is_trained) in enumerate(turns) if is_trained) - 1]
    assert turns[positions[0]][0].startswith("[told while it was sampled, not in the sample]\n")
    assert len(turns) == len(samples["short"].messages) + 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["splice={mode: rollback, action: look}"], "splice.action: mode rollback has no turn of revision"),
        (["splice={mode: rollback, reflections: 1}"], "splice.reflections: mode rollback has no turn of revision"),
        (["splice={mode: rollback, prune: true}"], "splice.prune: works only in splice.mode verified, not rollback"),
        (["splice={mode: rollback, impossible: keep}"], "splice.impossible: mode rollback plays its splices"),
        (
            ["splice={mode: rollback, continuation: {by: teacher}}"],
            "splice.continuation.by: name models.teacher, or leave it out",
        ),
        (
            ["splice={mode: continued, continuation: {by: teacher}}", "models.teacher.path=t", "teacher_iterations=1"],
            "teacher_iterations: says for how long the teacher collects, and with splice.continuation.by: teacher",
        ),
        (["splice.continuation.by=teacher"], "splice.continuation: belongs to splice.mode continued or rollback"),
    ],
)
def test_faults_are_named(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as fault:
        parse({"name": "x", "environment": {"name": "textcraft"}, "model": {"path": "m"}}, overrides)
    assert said in str(fault.value)


def test_a_teacher_that_goes_on_does_not_collect() -> None:
    data: dict[str, Any] = {
        "name": "x",
        "environment": {"name": "textcraft"},
        "model": {"path": "m"},
        "models": {"teacher": {"path": "t"}},
    }
    assert parse(data, ["splice.mode=rollback"]).is_taught(1)
    assert not parse(data, ["splice={mode: rollback, continuation: {by: teacher}}"]).is_taught(1)
