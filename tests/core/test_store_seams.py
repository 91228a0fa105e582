"""Open lists of kinds and sources, derivations, and stores of before these."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest
from door import Door

from agentr_core.episodes.transcript import transcript_of
from agentr_core.samples.dataset import turn_classes
from agentr_core.store.codec.samples import derivation_rows, load_samples, sample_rows
from agentr_core.store.codec.trajectories import copy_trajectories, load_trajectories, trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.runs import token_use
from agentr_core.store.tables import Draw, merge
from agentr_core.types import (
    Answer,
    Derivation,
    Generation,
    Instance,
    Message,
    Sample,
    SampleKind,
    Step,
    StopReason,
    ToolCall,
    Trajectory,
)

INSTANCE = Instance(environment="door", split="train", index=1)
CALL = ToolCall(tool="python", parameters={"code": "1 + 1"}, key="1 + 1", milliseconds=2.0, output="2")


def trajectory(*replies: str) -> Trajectory:
    steps = tuple(Step(reply=r, action=r, observation=f"saw {r}", reward=0.0, tool_calls=(CALL,)) for r in replies)
    return Trajectory(
        instance=INSTANCE,
        first_observation="Door 1.",
        steps=steps,
        reward=0.0,
        success=False,
        stop=StopReason.STEP_LIMIT,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.duckdb")


@pytest.mark.slow
def test_a_method_names_sources_and_kinds_of_its_own(store: Store) -> None:
    sample = Sample(
        kind="condensed",
        messages=(
            *transcript_of(Door()).prompt(Door(), "Door 1.", ()),
            Message(role="assistant", text="a", train=True),
        ),
        instance=INSTANCE,
    )
    store.write(
        merge(
            [
                trajectory_rows("t", trajectory("a"), source="condensed", iteration_id="i"),
                sample_rows("s", sample, iteration_id="i", trajectory_id="t"),
            ]
        )
    )
    assert load_samples(store, ["s"]) == {"s": sample}
    assert turn_classes(sample) == ("condensed",)
    assert load_trajectories(store, iteration_id="i", source="condensed") == {"t": trajectory("a")}
    assert load_trajectories(store, iteration_id="i", source="rollout") == {}


@pytest.mark.slow
def test_what_was_made_of_what_is_found_again(store: Store) -> None:
    shorter = Derivation(child="c", parent="a", operator="shorten", position=1, prompt_hash="p", seed=2**62)
    join = Derivation(child="c", parent="b", operator="join")
    for key in "abc":
        store.write(trajectory_rows(key, trajectory(key), source="flywheel"))
    store.write(derivation_rows([join, shorter], iteration_id="i"))
    store.write(derivation_rows([shorter], iteration_id="i"))
    rows = store.rows(
        "select child_id, parent_id, operator, position, prompt_hash, seed, round from derivation order by parent_id"
    )
    assert rows == [astuple(shorter), astuple(join)]
    missing = store.query("select reference from v_orphans where child = 'derivation'")["reference"].tolist()
    assert missing == ["iteration_id"] * 2
    store.write(derivation_rows([Derivation(child="d", parent="a", operator="join")], iteration_id="i"))
    missing = store.query("select reference, missing_id from v_orphans where child = 'derivation'").values.tolist()
    assert ["child_id", "d"] in missing


@pytest.mark.slow
def test_a_copied_rollout_has_its_calls(store: Store) -> None:
    store.write(trajectory_rows("old", trajectory("a", "b"), source="rollout", iteration_id="i"))
    assert copy_trajectories(store, {"new": "old"}, iteration_id="j") == ["new"]
    assert load_trajectories(store, ["new"])["new"] == trajectory("a", "b")
    assert store.query("select owner_id, count(*) from tool_call group by 1 order by 1").values.tolist() == [
        ["new", 2],
        ["old", 2],
    ]


def test_the_kinds_that_come_along_are_words_too() -> None:
    words: dict[str, int] = {SampleKind.GOOD: 1}
    assert list(words) == ["good"]
    assert words["good"] == 1


@pytest.mark.slow
def test_what_a_beginning_brings_along_was_asked_for_once(store: Store) -> None:
    answer = Answer(
        role="summariser",
        model="m",
        prompt_hash="p",
        seed=1,
        text="So.",
        finish_reason="stop",
        prompt_tokens=20,
        completion_tokens=7,
    )
    generation = Generation(text="b", token_ids=(1, 2, 3), finish_reason="stop", prompt_tokens=10, completion_tokens=3)
    episode = trajectory("a", "b")
    steps = tuple(replace(step, token_ids=(1, 2, 3), finish_reason="stop", answers=(answer,)) for step in episode.steps)
    whole = replace(episode, steps=steps)
    draws = {
        position: Draw(seed=5, number=0, generation=replace(generation, text=step.reply))
        for position, step in enumerate(steps)
    }
    store.write(trajectory_rows("t", whole, source="rollout", iteration_id="i", draws=draws))
    first_use = token_use(store, "i")
    assert (first_use.completion, first_use.prompt) == (2 * 3 + 2 * 7, 2 * 10 + 2 * 20)
    branch = trajectory_rows("u", whole, source="rollout", iteration_id="i", draws={1: draws[1]}, num_given_steps=1)
    store.write(branch)
    total_use = token_use(store, "i")
    assert (total_use.completion - first_use.completion, total_use.prompt - first_use.prompt) == (3 + 7, 10 + 20)
    assert load_trajectories(store, ["u"])["u"] == whole, "it has its calls and answers all the same"
    assert store.rows("select owner_id, given from tool_call order by all") == [
        ("t", False),
        ("t", False),
        ("u", False),
        ("u", True),
    ]
