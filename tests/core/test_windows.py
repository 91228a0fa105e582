"""Histories that outgrow the context: what is left out, what is read, and that what was read is
what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as File

import pytest
from toy import Line, Policy, Script, instance
from toy_paths import ToyTree, critique, good_sample, renderer

from agentr_core.episodes.rollout import roll_out_episode
from agentr_core.episodes.transcript import AlternatingTurns, max_droppable, min_dropped_to_fit, without_exchanges
from agentr_core.errors import PromptTooLong
from agentr_core.fingerprint import derive_seed
from agentr_core.methods.agent_r.splice import splice
from agentr_core.methods.eto.preferences import StoredTrajectory, pair_of_own
from agentr_core.recipes.agent_r import SearchConfig, SpliceConfig
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.samples.dataset import (
    cap_good_per_tree,
    check_flags,
    count_dropped,
    split_windowed,
    token_row,
    turn_classes,
)
from agentr_core.search.grow import grow
from agentr_core.search.tree import Expansion, leaf_paths
from agentr_core.store.codec.trajectories import load_trajectories, load_trees, trajectory_rows, tree_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import TreeHead, merge
from agentr_core.types import Generation, Message, Rejection, Request, Sample, Sampling, StopReason, Trajectory

READ = 9
"""Turns that the toy's context holds: the four that stay, and two exchanges with the last
observation.
"""


def fits(messages: tuple[Message, ...]) -> bool:
    return len(messages) <= READ


def texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


def prompts_of(samples: Sequence[Sample]) -> list[list[tuple[str, str]]]:
    """What stands before each trained reply, with the reply at the end, in the order of the
    replies.
    """
    return [
        texts(sample.messages[: position + 1])
        for sample in samples
        for position, message in enumerate(sample.messages)
        if message.train
    ]


class Walk(Policy):
    """Looks around for so many steps, and then walks to the goal."""

    def __init__(self, looks: int, *, max_messages: int = 1000) -> None:
        super().__init__(max_messages=max_messages)
        self.looks = looks

    def reply(self, request: Request, number: int) -> str:
        num_requests = len([r for r in self.requests if len(r.messages) <= self.max_messages])
        return f"Thought: {num_requests}\nAction: {'look' if num_requests <= self.looks else 'right'}"


async def play(policy: Policy, *, window: bool = True) -> Trajectory:
    sampling = Sampling(max_new_tokens=5)
    return await roll_out_episode(
        instance(0), Line(), policy, max_steps=20, sampling=sampling, seed=1, fits=fits if window else None
    )


def drop_as_published(messages: list[Message], limit: int) -> list[Message]:
    """The published rule: while the history is too long, the messages 4 and 5 go."""
    while len(messages) > limit and len(messages) > 5:
        del messages[4:6]
    return messages


def test_the_oldest_exchanges_go_and_the_beginning_stays() -> None:
    env = Line()
    steps = ToyTree(3).path(*["look"] * 4, "right").trajectory.steps
    whole = AlternatingTurns().prompt(env, "The goal.", steps)
    for limit in range(1, 16):
        num_dropped = min_dropped_to_fit(whole, lambda messages, limit=limit: len(messages) <= limit)  # type: ignore[misc]
        assert list(without_exchanges(whole, num_dropped)) == drop_as_published(list(whole), limit)
    assert max_droppable(whole) == 4
    assert texts(without_exchanges(whole, 4)) == [*texts(whole[:4]), *texts(whole[-1:])]
    assert min_dropped_to_fit(whole[:3], lambda _: False) == 0


async def test_an_episode_goes_on_and_each_stretch_is_what_was_read() -> None:
    policy = Walk(looks=6)
    trajectory = await play(policy)
    assert (trajectory.stop, len(trajectory.steps)) == (StopReason.SUCCESS, 8)
    assert [step.dropped for step in trajectory.steps] == [0, 0, 0, 0, 1, 2, 3, 4]
    assert max(len(request.messages) for request in policy.requests) == READ

    path = ToyTree(0).path("look")
    whole = good_sample(type(path)(tree_id="t", nodes=tuple(range(1, 9)), trajectory=trajectory), Line())
    samples = split_windowed(
        whole, [step.dropped for step in trajectory.steps], "stretches", stage="splice", subject="t:8"
    )
    assert isinstance(samples, tuple)
    assert len(samples) == 5
    replies = [("assistant", step.reply) for step in trajectory.steps]
    prompts = [[*texts(request.messages), reply] for request, reply in zip(policy.requests, replies, strict=True)]
    assert prompts_of(samples) == prompts
    for sample in samples:
        check_flags(sample)
        assert turn_classes(sample) == ("good_path",) * len(turn_classes(sample))
    assert [sample.provenance.extra["stretch"] for sample in samples] == [0, 1, 2, 3, 4]


async def test_without_a_window_the_episode_ends_where_the_context_does() -> None:
    trajectory = await play(Walk(looks=6, max_messages=READ), window=False)
    assert (trajectory.stop, len(trajectory.steps)) == (StopReason.CONTEXT_LIMIT, 4)
    assert {step.dropped for step in trajectory.steps} == {0}


async def test_a_model_that_counts_more_than_we_do_is_asked_again_with_less() -> None:
    policy = Walk(looks=6, max_messages=READ - 2)
    trajectory = await play(policy)
    assert trajectory.stop is StopReason.SUCCESS
    assert [step.dropped for step in trajectory.steps] == [0, 0, 0, 1, 2, 3, 4, 5]
    tiny = await play(Walk(looks=6, max_messages=4))
    assert (tiny.stop, len(tiny.steps)) == (StopReason.CONTEXT_LIMIT, 1)


@pytest.mark.parametrize("method", ["mcts", "rollouts"])
async def test_paths_of_a_tree_are_trained_as_they_were_read_also_after_an_interruption(method: str) -> None:
    config = SearchConfig(method=method, dives=4, width=2, depth=8)  # type: ignore[arg-type]
    policy = Policy(("look", "look", "look", "right"), max_messages=READ)
    expansions: list[Expansion] = []
    tree = await grow(instance(3), Line(), policy, config, seed=4, fits=fits, on_expansion=expansions.append)
    assert max(node.step.dropped for node in tree.nodes if node.step) == 5
    assert StopReason.CONTEXT_LIMIT not in {node.stop for node in tree.nodes}

    sent_prompts = {tuple(texts(request.messages)) for request in policy.requests}
    paths = leaf_paths(tree, "t")
    for path in paths:
        drops = [step.dropped for step in path.trajectory.steps]
        samples = split_windowed(good_sample(path, Line()), drops, "stretches", stage="splice", subject="t")
        assert isinstance(samples, tuple)
        prompts = prompts_of(samples)
        assert len(prompts) == len(drops)
        assert all(tuple(prompt[:-1]) in sent_prompts for prompt in prompts)
        # Measured again, as a splice is, the same exchanges are left out.
        assert list(count_dropped(good_sample(path, Line()).messages, fits)) == drops


@pytest.mark.slow
async def test_what_was_left_out_is_stored(tmp_path: File) -> None:
    store = Store(tmp_path / "store.duckdb")
    tree = await grow(
        instance(3), Line(), Policy(("look",)), SearchConfig(dives=1, width=1, depth=8), seed=4, fits=fits
    )
    head = TreeHead(
        tree_id="t",
        iteration_id="i",
        instance=tree.instance,
        first_observation=tree.first_observation,
        checkpoint_id="c",
        seed=4,
        config=SearchConfig(),
    )
    trajectory = await play(Walk(looks=6))
    store.write(merge([tree_rows(head, tree), trajectory_rows("e", trajectory, source="rollout", iteration_id="i")]))
    stored_tree = load_trees(store, ["t"])["t"]
    assert [n.step.dropped for n in stored_tree.nodes if n.step] == [n.step.dropped for n in tree.nodes if n.step]
    assert [s.dropped for s in load_trajectories(store, ["e"])["e"].steps] == [s.dropped for s in trajectory.steps]


def splice_sample(good: Sequence[str], bad: Sequence[str], error: int) -> Sample:
    sample = splice(ToyTree(2).pair(good, bad), critique(error), Line(), SpliceConfig(mode="blind"), alpha=1.0, seed=0)
    assert isinstance(sample, Sample)
    return sample


def test_a_splice_is_trained_through_the_window_that_it_would_be_read_through() -> None:
    whole = splice_sample(["look", "right", "right", "right", "right"], ["look", *["left"] * 4, "look"], 3)
    replies = [position for position in range(3, len(whole.messages), 2)]
    drops = count_dropped(whole.messages, fits)
    assert drops == (0, 0, 0, 0, 1, 2, 3, 4, 5)
    samples = split_windowed(whole, drops, "stretches", stage="splice", subject="t:1:2")
    assert isinstance(samples, tuple)
    expected = [
        [*texts(without_exchanges(whole.messages[:reply], number)), *texts(whole.messages[reply : reply + 1])]
        for reply, number in zip(replies, drops, strict=True)
        if whole.messages[reply].train
    ]
    assert prompts_of(samples) == expected
    assert [turn_classes(sample) for sample in samples] == [("revision_turn",)] + [("good_suffix",)] * 4
    assert {sample.provenance.cut for sample in samples} == {4}
    for sample in samples:
        check_flags(sample)
        assert token_row(sample, renderer()).trained_tokens


def test_a_windowed_path_is_turned_away_if_the_recipe_says_so() -> None:
    whole = splice_sample(["look", "right", "right", "right", "right"], ["look", *["left"] * 4, "look"], 3)
    rejection = split_windowed(whole, count_dropped(whole.messages, fits), "reject", stage="splice", subject="t:1:2")
    assert isinstance(rejection, Rejection)
    assert (rejection.subject, rejection.reason) == ("t:1:2", "windowed")
    assert rejection.detail.startswith("from step 4 on")
    short = splice_sample(["right", "right", "right", "right"], ["left", "look"], 0)
    assert split_windowed(
        short, count_dropped(short.messages, lambda _: True), "reject", stage="splice", subject="t"
    ) == (short,)


async def test_the_stretches_of_a_path_count_once_under_the_cap() -> None:
    samples: list[Sample] = []
    for leaf, looks in enumerate((6, 4, 5)):
        trajectory = await play(Walk(looks=looks))
        path = ToyTree(0).path("look")
        whole = good_sample(type(path)(tree_id="t", nodes=(leaf,), trajectory=trajectory), Line())
        stretches = split_windowed(
            whole, [step.dropped for step in trajectory.steps], "stretches", stage="splice", subject="t"
        )
        assert isinstance(stretches, tuple)
        samples += stretches
    good_samples, rejections = cap_good_per_tree(samples, 1)
    assert {sample.provenance.good_leaf for sample in good_samples} == {1}
    assert len(good_samples) == 3
    assert len(good_samples) + len(rejections) == len(samples)


async def test_no_pair_has_a_windowed_side() -> None:
    good = await play(Script(["right"]))
    bad = await play(Walk(looks=99))
    assert bad.stop is StopReason.STEP_LIMIT
    pairs = [StoredTrajectory("good", good), StoredTrajectory("bad", bad)]
    preferences, rejections = pair_of_own(pairs, Line(), PreferencesConfig(extra_rounds=9))
    assert preferences == ()
    assert [(rejection.subject, rejection.reason) for rejection in rejections] == [("bad", "windowed")]
    # The losing side is cut before it was read through a window.
    preferences, rejections = pair_of_own(pairs, Line(), PreferencesConfig(extra_rounds=2))
    assert (len(preferences), rejections) == (1, ())


async def test_the_conversation_that_fits_is_the_one_that_is_sent() -> None:
    async def deaf(request: Request) -> list[Generation]:
        raise PromptTooLong("nothing fits")

    trajectory = await roll_out_episode(
        instance(0), Line(), deaf, max_steps=3, sampling=Sampling(), seed=derive_seed(1), fits=lambda _: False
    )
    assert (trajectory.stop, trajectory.steps) == (StopReason.CONTEXT_LIMIT, ())
