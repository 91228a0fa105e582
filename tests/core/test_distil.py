"""Distillation on the policy's own tokens: what a scorer reads, its scores, and what they add."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from door import Door
from growing import GrowingLine
from transformers import AutoModelForCausalLM

from agentr_core.episodes.transcript import conversations
from agentr_core.errors import ConfigError, DataFault
from agentr_core.methods.faults import parse
from agentr_core.methods.grpo.credit import is_trained_on, step_advantages
from agentr_core.methods.grpo.distil import token_row
from agentr_core.methods.grpo.readings import (
    LOST,
    WON_ELSEWHERE,
    WON_FROM_BEFORE,
    WON_FROM_HERE,
    conversation_until_reply,
    readings,
    record_text,
    relevant_records,
    with_context,
)
from agentr_core.models.checkpoint_dir import check_same_tokens
from agentr_core.recipes.grpo import DistilConfig, GrpoConfig
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.store.codec.ledger import Group
from agentr_core.training.group.policy import PolicyRow, policy_row
from agentr_core.training.group.scoring import Scorer, add_scorer_terms, divergence_from_scorer, scorer_term
from agentr_core.types import Instance, Message, Step, StopReason, Trajectory

DOOR = Instance(environment="door", split="train", index=0)


def step(renderer: Renderer, ids: tuple[int, ...], action: str) -> Step:
    return Step(
        reply=f"Thought: hm.\nAction: {action}",
        action=action,
        observation=f"You {action}.",
        reward=0.0,
        token_ids=ids,
        logprobs=tuple(-0.5 - 0.1 * n for n in range(len(ids))),
        finish_reason="stop",
        tokenizer=renderer.fingerprint,
    )


def episode(renderer: Renderer, *, won: bool = False) -> Trajectory:
    end = renderer.end_of_turn
    return Trajectory(
        instance=DOOR,
        first_observation="A door.",
        steps=(step(renderer, (50, 51, end), "knock"), step(renderer, (60, end), "push")),
        reward=float(won),
        success=won,
        stop=StopReason.STEP_LIMIT,
    )


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> Renderer:
    return load_renderer(tiny_model_dir)


def alone(model: Any, row: PolicyRow) -> list[float]:
    """Return the log-probabilities of a row's tokens, computed with nothing else in the batch."""
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
    return [scores[position - 1, row.input_ids[position]].item() for position in row.positions]


# The formula.


def test_the_term_of_a_token_is_the_difference_of_log_probabilities_by_its_weight_within_limits() -> None:
    row = PolicyRow((1, 2, 3, 4), (1, 2, 3), (-1.0, -2.0, -0.5), (0.5, 0.5, -1.0), 3, (-0.25, -6.0, math.nan))
    (plain,) = add_scorer_terms([row], DistilConfig(weight=2.0))
    assert plain.advantages == pytest.approx((0.5 + 2 * 0.75, 0.5 - 2 * 4.0, -1.0))
    (limit_row,) = add_scorer_terms([row], DistilConfig(weight=2.0, max_difference=0.5))
    assert limit_row.advantages == pytest.approx((1.5, -0.5, -1.0))
    assert scorer_term(math.nan, -1.0, DistilConfig()) == 0
    assert divergence_from_scorer([row]) == pytest.approx((-0.75 + 4.0) / 2)
    assert divergence_from_scorer([row._replace(scores=(math.nan,) * 3)]) is None


def test_without_the_group_only_the_scorer_teaches_and_with_it_groups_that_are_alike_do(renderer: Renderer) -> None:
    episodes = {str(number): episode(renderer, won=number == 0) for number in range(3)}
    mixed_group = Group(number=0, draw=0, policy="p", instance=DOOR, episodes=episodes)
    alike_group = replace(mixed_group, episodes={key: episode(renderer) for key in "012"})
    group_config, joint_config = GrpoConfig(), GrpoConfig(distil=DistilConfig())
    scorer_config = GrpoConfig(distil=DistilConfig(advantage="none"))
    assert [is_trained_on(mixed_group, config) for config in (group_config, joint_config, scorer_config)] == [True] * 3
    assert [is_trained_on(alike_group, config) for config in (group_config, joint_config, scorer_config)] == [
        False,
        True,
        True,
    ]
    assert step_advantages(mixed_group, joint_config) == step_advantages(mixed_group, group_config)
    assert step_advantages(mixed_group, scorer_config) == [[0.0, 0.0]] * 3


# What a scorer reads.


def test_a_record_says_what_was_done_and_not_what_was_thought(renderer: Renderer) -> None:
    assert record_text(episode(renderer), marked_position=1) == (
        "A door.\nAction: knock\nYou knock.\n>>> Action: push\nYou push.\nThe end: no success, reward 0."
    )
    assert record_text(episode(renderer, won=True)).endswith("\nThe end: a success, reward 1.")


def test_the_context_is_at_the_end_of_the_last_turn_before_the_reply(renderer: Renderer) -> None:
    trajectory, expert = episode(renderer), episode(renderer, won=True)
    (whole,) = conversations(Door(), trajectory)
    for context, head in (("hindsight", "this whole episode"), ("expert", "an expert's whole episode")):
        contexts = list(readings(Door(), trajectory, DistilConfig(context=context), [expert], num_untrained=0))  # type: ignore[arg-type]
        assert [reading.positions for reading in contexts] == [(0,), (0, 1)]
        for number, reading in enumerate(contexts):
            place = len(reading.messages) - 2
            assert reading.num_given == number
            assert head in reading.messages[place].text
            assert reading.messages[place].text.startswith(f"{whole.messages[place].text}\n\n")
            messages = [message for at, message in enumerate(reading.messages) if at != place]
            assert messages == [message for at, message in enumerate(whole.messages[: place + 2]) if at != place]
    # The step that is scored is the one with the mark.
    first, second = readings(Door(), trajectory, DistilConfig(context="hindsight"), (), num_untrained=0)
    assert ">>> Action: knock" in first.messages[-2].text
    assert ">>> Action: push" in second.messages[-2].text
    # Nothing is made up where there is no record.
    assert list(readings(Door(), trajectory, DistilConfig(context="expert"), (), num_untrained=0)) == []
    positions = [
        reading.positions
        for reading in readings(Door(), trajectory, DistilConfig(context="hindsight"), (), num_untrained=1)
    ]
    assert positions == [(0, 1)]
    (plain,) = readings(Door(), trajectory, DistilConfig(), (), num_untrained=0)
    assert (plain.messages, plain.positions, plain.num_given) == (whole.messages, (0, 1), 0)


def through(renderer: Renderer, states: str, *, won: bool = False) -> Trajectory:
    """Return an episode that takes a step in each of some states, named by letters."""
    steps = tuple(
        replace(
            step(renderer, (50, renderer.end_of_turn), f"leave {state}"), state_key=state, observation=f"Left {state}."
        )
        for state in states
    )
    return replace(episode(renderer, won=won), steps=steps)


@pytest.mark.parametrize(
    ("states", "position", "won", "others", "told"),
    [
        ("abc", 2, False, ["abcxy+", "azc+", "ac-"], [(WON_FROM_HERE, 0, "leave c", 1)]),
        ("abc", 1, False, ["abxyc+", "azbc+", "bbb-"], [(WON_FROM_HERE, 0, "leave b", 1)]),
        ("abc", 2, False, ["abx+", "ay+", "abz-"], [(WON_FROM_BEFORE, 2, "leave b", 0), (LOST, 2, "leave b", 2)]),
        ("abc", 2, False, ["xyz+", "uv+", "bca-"], [(WON_ELSEWHERE, 0, None, 1), (LOST, 3, "leave c", 2)]),
        ("abc", 2, False, [], []),
        ("abc", 1, True, ["abxy+", "b-"], []),
        ("abcd", 1, True, ["abx+"], [(WON_FROM_HERE, 0, "leave b", 0)]),
        ("abc", 1, True, ["xy+", "b-"], []),
    ],
)
def test_records_are_chosen_by_the_state_of_the_step(
    renderer: Renderer,
    states: str,
    position: int,
    won: bool,
    others: list[str],
    told: list[tuple[str, int, str | None, int]],
) -> None:
    trajectories = [through(renderer, path[:-1], won=path[-1] == "+") for path in others]
    expected = [
        f"{head.format(mark='>>>', step=step)}\n\n"
        + record_text(
            trajectories[number],
            marked_position=None
            if action is None
            else max(n for n, s in enumerate(trajectories[number].steps) if s.action == action),
        )
        for head, step, action, number in told
    ]
    assert list(relevant_records(through(renderer, states, won=won), position, trajectories, "world")) == expected


def test_states_without_a_key_are_equal_to_none_and_an_observation_will_do(renderer: Renderer) -> None:
    trajectory, winner = episode(renderer), episode(renderer, won=True)
    assert list(relevant_records(trajectory, 1, [winner], "world")) == [f"{WON_ELSEWHERE}\n\n{record_text(winner)}"]
    (record,) = relevant_records(trajectory, 1, [winner], "observation")
    assert record == f"{WON_FROM_HERE.format(mark='>>>')}\n\n{record_text(winner, marked_position=1)}"
    distil = DistilConfig(context="records", key="observation")
    first, second = readings(Door(), trajectory, distil, [winner], num_untrained=0)
    assert record_text(winner, marked_position=0) in first.messages[-2].text
    assert second.messages[-2].text.endswith(f"{record_text(trajectory, marked_position=1)}\n\n{record}")


def test_a_turn_that_grew_is_read_up_to_the_reply(renderer: Renderer) -> None:
    steps = [step(renderer, ids, "go") for ids in ((50, 51, renderer.end_of_turn), (60, 61))]
    trajectory = replace(episode(renderer), steps=tuple(steps))
    env = GrowingLine()
    first, second = readings(env, trajectory, DistilConfig(context="hindsight"), (), num_untrained=0)
    assert len(first.messages[-1].spans) == 1
    assert len(second.messages[-1].spans) == 3
    assert ">>> Action" in first.messages[-2].text
    # Where the turn goes on, its end is not trained: the first scores count.
    scores = {0: (-1.0, -2.0, -3.0), 1: (-4.0, -5.0)}
    for number, reading in enumerate((first, second)):
        row = token_row(reading, trajectory.steps, renderer)
        assert set(row.advantages) == {float(number)}
        assert len(row.positions) == len(scores[number])
    (part,) = conversations(env, trajectory)
    full = policy_row(part.messages, steps, renderer, [0.0, 0.0], scores=[scores[0], scores[1]])
    assert full.scores == (-1.0, -2.0, -4.0, -5.0)


def test_a_conversation_has_no_more_replies_than_it_has(renderer: Renderer) -> None:
    (part,) = conversations(Door(), episode(renderer))
    with pytest.raises(DataFault, match="a conversation of 2 replies has no reply 3"):
        conversation_until_reply(part.messages, 2)
    assert with_context(part.messages, "") == part.messages


# The scores.


def test_scores_in_a_batch_are_those_of_each_row_alone_and_stand_beside_their_tokens(
    renderer: Renderer, tiny_model_dir: Path
) -> None:
    trajectory = episode(renderer)
    rows = [
        token_row(reading, trajectory.steps, renderer)
        for distil in (DistilConfig(), DistilConfig(context="hindsight"))
        for reading in readings(Door(), trajectory, distil, (), num_untrained=0)
    ]
    ids = [[row.input_ids[position] for position in row.positions] for row in rows]
    end = renderer.end_of_turn
    assert ids == [[50, 51, end, 60, end], [50, 51, end], [60, end]]
    scorer = Scorer(tiny_model_dir, dtype="float32", device="cpu", batch_tokens=4096)
    all_scores = scorer.scores(rows)
    assert scorer.scores(rows) == all_scores, "to the last bit"
    scorer.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for row, scores in zip(rows, all_scores, strict=True):
        assert scores == pytest.approx(alone(model, row), abs=1e-4)
    assert all_scores[1] != pytest.approx(all_scores[0][:3], abs=1e-4), "the context counts"

    (part,) = conversations(Door(), trajectory)
    steps = list(trajectory.steps)
    row = policy_row(part.messages, steps, renderer, [1.0, 2.0], scores=[all_scores[1], ()])
    assert row.scores[:3] == all_scores[1]
    assert all(map(math.isnan, row.scores[3:]))
    assert policy_row(part.messages, steps, renderer, [1.0, 2.0]).scores == ()


def test_a_scorer_with_another_tokenizer_is_refused(
    tiny_model_dir: Path, save_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    check_same_tokens(tiny_model_dir, tiny_model_dir)
    scorer_dir = save_tiny_model(tmp_path / "other")
    file = scorer_dir / "tokenizer.json"
    file.write_text(file.read_text("utf-8").replace('"content": "<|im_end|>"', '"content": "<|other|>"'), "utf-8")
    with pytest.raises(ConfigError, match=r"the tokenizer of .*other is not that of .*, and a scorer reads the ids"):
        check_same_tokens(scorer_dir, tiny_model_dir)


# The recipe.


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"models": {"scorer": {"path": "m"}}}, "models.scorer: scores what group RL samples"),
        (
            {"grpo": {"distil": {}}, "models": {"scorer": {"backend": "openai", "server": {"model": "m"}}}},
            "models.scorer.backend: given tokens are scored in the process that trains",
        ),
        (
            {"grpo": {"distil": {}}, "models": {"scorer": {"path": "m", "workers": 2}}},
            "models.scorer.workers: a scorer samples nothing",
        ),
        ({"grpo": {"distil": {"advantage": "none"}}}, "grpo.resample: with distil.advantage: none"),
        (
            {"grpo": {"distil": {"advantage": "none"}, "resample": 0, "scale_rewards": "none"}},
            "grpo.scale_rewards: has no use",
        ),
    ],
)
def test_what_a_scorer_does_not_read_is_refused(changes: dict[str, Any], fault: str) -> None:
    recipe = {"name": "r", "method": "grpo", "model": {"path": "m"}, "iterations": 1}
    parse(recipe | {"grpo": {"distil": {}}, "models": {"scorer": {"path": "m"}}})
    with pytest.raises(ConfigError, match=fault):
        parse(recipe | changes)


def test_a_message_list_ends_with_the_reply_that_is_scored(renderer: Renderer) -> None:
    (part,) = conversations(Door(), episode(renderer))
    cut = conversation_until_reply(part.messages, 0)
    assert cut[-1].role == "assistant"
    assert with_context(cut, "Look.")[-2] == Message(role="user", text="A door.\n\nLook.")
