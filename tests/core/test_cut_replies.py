"""Replies that their token limit cut: how they end reaches the sample, and no end of turn is
trained for them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from toy import Line, Policy, instance
from toy_paths import ToyTree, good_sample, renderer, sampled_ids, tokenizer

from agentr_core.episodes.rollout import act, roll_out_episode
from agentr_core.episodes.transcript import AlternatingTurns
from agentr_core.methods.eto.preferences import StoredTrajectory, pairs_with_expert, preference_id
from agentr_core.recipes.data import DataConfig
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.samples.dataset import build_dataset, build_pairs, token_row
from agentr_core.samples.identity import IGNORE_INDEX, sample_id
from agentr_core.store.codec.samples import load_samples, sample_rows
from agentr_core.store.codec.trajectories import load_trajectories, trajectory_rows
from agentr_core.store.database import Store
from agentr_core.types import FinishReason, Generation, Message, Request, Sample, Sampling, Trajectory

END = renderer().end_of_turn
OTHER_END = tokenizer().pad_token_id


def conversation(reply: Message) -> list[Message]:
    return [Message(role="user", text="?"), reply, Message(role="user", text="?")]


def trained_ids(reply: Message) -> list[int]:
    return [label for label in renderer().render_sample(conversation(reply)).labels if label != IGNORE_INDEX]


def make_reply(ids: tuple[int, ...] | None, reason: FinishReason | None, text: str = "look") -> Message:
    return Message(role="assistant", text=text, train=True, token_ids=ids, finish_reason=reason)


@pytest.mark.parametrize("reason", ["length", None])
def test_a_cut_reply_is_followed_by_an_end_of_turn_that_is_not_trained(reason: FinishReason | None) -> None:
    whole = renderer().render_sample(conversation(make_reply((5, 6, END), "stop"))).input_ids
    cut = renderer().render_sample(conversation(make_reply((5, 6), reason)))
    assert cut.input_ids == whole, "the template needs the end of turn: the model reads it before its next reply"
    assert trained_ids(make_reply((5, 6), reason)) == [5, 6]
    assert renderer().is_cut(make_reply((5, 6), reason))


def test_a_cut_reply_without_token_ids_is_not_trained_to_end_either() -> None:
    assert END not in trained_ids(make_reply(None, "length"))
    assert trained_ids(make_reply(None, "length")) == trained_ids(make_reply(None, "stop"))[:-1]


def test_a_reply_that_ended_is_trained_to_end_once() -> None:
    assert trained_ids(make_reply((5, 6, END), "stop")) == [5, 6, END]
    assert trained_ids(make_reply((5, 6), "stop")) == [5, 6, END], "a server may keep its end of turn to itself"
    assert trained_ids(make_reply(None, None))[-1] == END, "a written turn ends where it was written to end"


@pytest.mark.parametrize("reason", ["stop", None])
def test_another_token_that_ends_a_reply_gets_no_second_trained_one(reason: FinishReason | None) -> None:
    reply = make_reply((5, 6, OTHER_END), reason)
    ids, labels = renderer().render_sample(conversation(reply))
    assert [label for label in labels if label != IGNORE_INDEX] == [5, 6, OTHER_END]
    assert ids[ids.index(OTHER_END) + 1] == END
    assert not renderer().is_cut(reply)


class ClippedPolicy(Policy):
    """Its second reply, and no other, is cut by the token limit."""

    async def __call__(self, request: Request) -> list[Generation]:
        cut = len(request.messages) == 5
        replies = await super().__call__(request)
        return [
            replace(
                reply,
                token_ids=(*sampled_ids(reply.text)[: -1 if cut else None],),
                finish_reason="length" if cut else "stop",
            )
            for reply in replies
        ]


async def clipped_episode() -> Trajectory:
    return await roll_out_episode(
        instance(1), Line(), ClippedPolicy(["right"]), max_steps=5, sampling=Sampling(), seed=0
    )


async def test_how_a_reply_ended_reaches_step_message_and_sample() -> None:
    trajectory = await clipped_episode()
    assert [step.finish_reason for step in trajectory.steps] == ["stop", "length", "stop"]
    messages = AlternatingTurns().prompt(Line(), "The goal.", trajectory.steps)[3:]
    assert [m.finish_reason for m in messages] == ["stop", None, "length", None, "stop", None]
    sample = good_sample(replace(ToyTree(1).path("right"), trajectory=trajectory), Line())
    labels = token_row(sample, renderer()).labels
    assert labels.count(END) == 2


def test_a_played_step_without_a_generation_has_no_finish_reason() -> None:
    world = Line()
    world.reset(instance(1))
    assert act(world, "Action: right").step.finish_reason is None


async def test_the_store_keeps_how_a_reply_ended(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    trajectory = await clipped_episode()
    # What a text server gives: no tokens, and yet why the reply ended.
    trajectory = replace(trajectory, steps=tuple(replace(step, token_ids=()) for step in trajectory.steps))
    store.write(trajectory_rows("t", trajectory, source="rollout"))
    assert load_trajectories(store, ["t"])["t"] == trajectory
    sample = good_sample(replace(ToyTree(1).path("right"), trajectory=trajectory), Line())
    store.write(sample_rows("s", sample, iteration_id="i"))
    assert load_samples(store, ["s"])["s"].messages == sample.messages


def samples() -> tuple[Sample, Sample]:
    """Return a sample whose replies all ended, and the same with one that was cut."""
    path = ToyTree(1).path("right", "right", "right")
    whole = [replace(step, finish_reason="stop") for step in path.trajectory.steps]
    cut = [whole[0], replace(whole[1], token_ids=whole[1].token_ids[:-1], finish_reason="length"), whole[2]]
    return tuple(  # type: ignore[return-value]
        good_sample(replace(path, trajectory=replace(path.trajectory, steps=tuple(steps))), Line())
        for steps in (whole, cut)
    )


def test_that_a_reply_ended_changes_no_id_and_that_it_was_cut_does() -> None:
    whole, cut = samples()
    unknown = replace(whole, messages=tuple(replace(m, finish_reason=None) for m in whole.messages))
    assert sample_id(whole) == sample_id(unknown)
    same_tokens = replace(cut, messages=tuple(replace(m, finish_reason=None) for m in cut.messages))
    assert sample_id(cut) != sample_id(same_tokens)


@pytest.mark.parametrize("reason", ["length", None])
def test_samples_with_cut_replies_are_kept_or_rejected(reason: FinishReason | None) -> None:
    whole, cut = samples()
    longer = replace(whole, messages=(Message(role="system", text="Be brief."), *whole.messages))
    cut = replace(
        cut,
        messages=tuple(
            replace(m, finish_reason=reason if m.finish_reason == "length" else m.finish_reason) for m in cut.messages
        ),
    )
    dataset = build_dataset([longer, cut], DataConfig(), renderer(), test_instances=[], seed=0)
    assert {row.sample_id for row in dataset.rows} == {sample_id(longer), sample_id(cut)}
    strict_dataset = build_dataset(
        [longer, cut], DataConfig(cut_replies="reject"), renderer(), test_instances=[], seed=0
    )
    assert [row.sample_id for row in strict_dataset.rows] == [sample_id(longer)]
    assert [(r.subject, r.reason) for r in strict_dataset.rejections] == [(sample_id(cut), "cut-reply")]
    assert "1 trained replies" in strict_dataset.rejections[0].detail


def test_a_cut_reply_that_is_not_trained_is_no_reason_to_reject() -> None:
    _, cut = samples()
    sample = replace(
        cut, messages=tuple(replace(m, train=m.train and m.finish_reason != "length") for m in cut.messages)
    )
    dataset = build_dataset([sample], DataConfig(cut_replies="reject"), renderer(), test_instances=[], seed=0)
    assert len(dataset.rows) == 1


def test_pairs_with_cut_replies_are_kept_or_rejected() -> None:
    tree = ToyTree(1)
    better, worse = tree.path("right", "right", "right").trajectory, tree.path("left", "look").trajectory
    last = worse.steps[-1]
    worse = replace(
        worse, steps=(*worse.steps[:-1], replace(last, token_ids=last.token_ids[:-1], finish_reason="length"))
    )
    ((pair,), _) = pairs_with_expert(
        StoredTrajectory("e", better), [StoredTrajectory("p", worse)], Line(), PreferencesConfig()
    )
    pairs = {preference_id(pair): pair}
    dataset = build_pairs(pairs, DataConfig(), renderer(), test_instances=(), seed=0)
    assert dataset.rows[1].labels.count(END) == 1
    strict_dataset = build_pairs(pairs, DataConfig(cut_replies="reject"), renderer(), test_instances=(), seed=0)
    assert not strict_dataset.rows
    assert [r.reason for r in strict_dataset.rejections] == ["cut-reply"]
