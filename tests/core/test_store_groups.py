"""Groups of episodes come back from the store as they went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentr_core.store.codec.ledger import (
    VALIDATION,
    Group,
    GroupOutcome,
    group_rows,
    iteration_rows,
    load_group_outcomes,
    load_groups,
    load_scorer_logprobs,
    rl_step_rows,
    scorer_logprob_rows,
    validation_rows,
)
from agentr_core.store.codec.samples import derivation_rows
from agentr_core.store.codec.trajectories import finished_tree_rows, instance_row, trajectory_rows, tree_rows
from agentr_core.store.database import Store
from agentr_core.store.queries.datasets import instance_traits
from agentr_core.store.queries.trees import Validation, step_hashes, validation_of, validations
from agentr_core.store.tables import TreeHead, merge
from agentr_core.types import Derivation, Instance, Node, Step, StopReason, Trajectory, Tree

DOORS = [Instance(environment="door", split="train", index=index) for index in range(2)]


def episode(instance: Instance, reward: float) -> Trajectory:
    step = Step(
        reply=f"word {reward}",
        action="open",
        observation="It opens." if reward else "Wrong 1.",
        reward=reward,
        terminated=True,
        success=reward == 1,
        token_ids=(5, 6),
        logprobs=(-0.1, -0.2),
        finish_reason="stop",
        tokenizer="t",
    )
    stop = StopReason.SUCCESS if reward == 1 else StopReason.FAILURE
    return Trajectory(
        instance=instance, first_observation="A door.", steps=(step,), reward=reward, success=reward == 1, stop=stop
    )


def group(number: int, rewards: list[float]) -> Group:
    door = DOORS[number]
    # Their ids are in another order than their episodes.
    episodes = {f"t{number}-{9 - place}": episode(door, reward) for place, reward in enumerate(rewards)}
    return Group(number=number, draw=0, policy="policy@0", instance=door, episodes=episodes)


@pytest.mark.slow
def test_groups_keep_their_episodes_and_the_order_of_these(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    mixed_group, alike_group = group(0, [1.0, 0.0, 1.0, 0.0]), group(1, [0.0, 0.0])
    for g in (mixed_group, alike_group):
        store.write(merge(trajectory_rows(k, t, source="rollout", iteration_id="i") for k, t in g.episodes.items()))
    assert load_groups(store, "i", 1) == []
    store.write(
        merge(
            [
                group_rows(mixed_group, [1.0, -1.0, 1.0, -1.0], iteration_id="i", step=1, has_contrast=True),
                group_rows(alike_group, [0.0, 0.0], iteration_id="i", step=1, has_contrast=False),
            ]
        )
    )

    back = load_groups(store, "i", 1)

    assert back == [mixed_group, alike_group]
    branch, parent = list(mixed_group.episodes)[:2]
    derivation = Derivation(child=branch, parent=parent, operator="branch", position=1, seed=0)
    store.write(derivation_rows([derivation], iteration_id="i"))
    assert load_groups(store, "i", 1) == [replace(mixed_group, given={branch: 1}), alike_group]
    assert [len(steps) for steps in load_groups(store, "i", 1)[0].sampled_steps] == [0, 1, 1, 1]
    assert [list(g.episodes) for g in back] == [list(mixed_group.episodes), list(alike_group.episodes)]
    assert (mixed_group.rewards, mixed_group.num_wins) == ((1.0, 0.0, 1.0, 0.0), 2)
    assert load_group_outcomes(store, "i", last_step=1) == [
        GroupOutcome(origin=DOORS[0].key, episodes=4, reward=0.5),
        GroupOutcome(origin=DOORS[1].key, episodes=2, reward=0.0),
    ]
    assert load_group_outcomes(store, "i", last_step=0) == []
    assert load_groups(store, "i", 2) == []


def test_rewards_that_are_equal_without_being_whole_promise_no_contrast(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    for number, iteration_id in enumerate(("searched", "i")):
        store.write(iteration_rows(iteration_id, run_id="r", iteration=number))
    for number, rewards in enumerate(([0.5, 0.5], [0.25, 0.5])):
        differ = rewards[0] != rewards[1]
        store.write(group_rows(group(number, rewards), [0.0, 0.0], iteration_id="i", step=1, has_contrast=differ))
        head = TreeHead(
            tree_id=f"tree {number}",
            iteration_id="searched",
            checkpoint_id="c",
            config={},
            instance=DOORS[number],
            first_observation="A door.",
            seed=0,
        )
        tree = make_tree(rewards)
        store.write(merge([tree_rows(head, tree), finished_tree_rows(head, tree)]))
    outcomes = load_group_outcomes(store, "i", last_step=1)
    assert [(outcome.origin, outcome.reward) for outcome in outcomes] == [
        (DOORS[0].key, 1.0),
        (DOORS[1].key, 0.375),
    ] * 2


def test_variants_of_an_instance_are_known_as_that_instance(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    of_other_name = instance_row(DOORS[1], origin=DOORS[0])
    store.write({"instance": [instance_row(DOORS[0]), of_other_name]})
    for number in (0, 1):
        store.write(group_rows(group(number, [1.0, 0.0]), [1.0, -1.0], iteration_id="i", step=1, has_contrast=True))
    assert [outcome.origin for outcome in load_group_outcomes(store, "i", last_step=1)] == [DOORS[0].key] * 2
    assert {traits.origin for traits in instance_traits(store, [door.key for door in DOORS[:2]]).values()} == {
        DOORS[0].key
    }


@pytest.mark.slow
def test_what_earlier_iterations_of_the_run_saw_is_known_before_the_first_step(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    runs = {"i": ("r", 3), "grouped": ("r", 2), "searched": ("r", 1), "later": ("r", 4), "other": ("s", 1)}
    for iteration_id, (run_id, number) in runs.items():
        store.write(iteration_rows(iteration_id, run_id=run_id, iteration=number))
        store.write(group_rows(group(0, [1.0, 0.0]), [1.0, -1.0], iteration_id=iteration_id, step=1, has_contrast=True))
    for number, (iteration_id, is_finished) in enumerate([("searched", True), ("searched", False), ("other", True)]):
        head = TreeHead(
            tree_id=f"tree {number}",
            iteration_id=iteration_id,
            checkpoint_id="c",
            config={},
            instance=DOORS[1],
            first_observation="A door.",
            seed=0,
        )
        search_tree = make_tree([1.0, 0.0, 0.0, 0.0])
        store.write(tree_rows(head, search_tree))
        if is_finished:
            store.write(finished_tree_rows(head, search_tree))

    outcomes = [(o.origin, o.episodes, o.reward) for o in load_group_outcomes(store, "i", last_step=0)]

    tree, of_group = (DOORS[1].key, 4, 0.25), (DOORS[0].key, 2, 0.5)
    assert outcomes == [tree, of_group, of_group], "the search, then the groups of iterations 1 and 2"
    assert len(load_group_outcomes(store, "i", last_step=1)) == 4


def test_what_was_won_after_the_experts_first_steps_was_not_won(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    for number, iteration_id in enumerate(("searched", "i")):
        store.write(iteration_rows(iteration_id, run_id="r", iteration=number))
    head = TreeHead(
        tree_id="t",
        iteration_id="searched",
        checkpoint_id="c",
        config={},
        instance=DOORS[1],
        first_observation="A door.",
        seed=0,
    )
    tree = make_tree([0.0, 0.0])
    expert_node = replace(tree.nodes[1], index=3, terminal=False, stop=None, duplicates=0)
    win_node = replace(tree.nodes[1], index=4, parent=3, depth=2, step=episode(DOORS[1], 1.0).steps[0])
    expert_tree = replace(tree, nodes=(*tree.nodes, expert_node, win_node))
    store.write(merge([tree_rows(head, expert_tree), finished_tree_rows(head, expert_tree)]))
    assert load_group_outcomes(store, "i", last_step=0) == [GroupOutcome(origin=DOORS[1].key, episodes=2, reward=0.0)]


def make_tree(rewards: list[float]) -> Tree:
    """Return a tree of one step, in which each of some paths ended."""
    root = Node(index=0, parent=-1, depth=0, step=None)
    leaves = [
        Node(
            index=at,
            parent=0,
            depth=1,
            step=episode(DOORS[1], reward).steps[0],
            terminal=True,
            stop=StopReason.STEP_LIMIT,
        )
        for at, reward in enumerate(rewards, 1)
    ]
    return Tree(instance=DOORS[1], first_observation="A door.", nodes=(root, *leaves), dives_done=1, seed=0)


def test_what_an_episode_is_worth_is_kept_beside_its_reward(tmp_path: Path) -> None:
    store, rl_group = Store(tmp_path / "store.duckdb"), replace(group(0, [1.0, 0.0]), shaped_rewards=(1 / 3, -1.0))
    store.write(merge(trajectory_rows(k, t, source="rollout", iteration_id="i") for k, t in rl_group.episodes.items()))
    store.write(group_rows(rl_group, [0.5, -0.5], iteration_id="i", step=1, has_contrast=True))
    assert load_groups(store, "i", 1) == [rl_group]
    assert (rl_group.rewards, rl_group.compared_rewards) == ((1.0, 0.0), (1 / 3, -1.0))
    assert store.query("select reward from rl_group")["reward"].tolist() == [0.5], "the environment's"


def test_steps_keep_advantages_of_their_own(tmp_path: Path) -> None:
    store, rl_group = (
        Store(tmp_path / "store.duckdb"),
        replace(group(0, [1.0, 0.0]), step_advantages=((0.5,), (-0.25,))),
    )
    store.write(merge(trajectory_rows(k, t, source="rollout", iteration_id="i") for k, t in rl_group.episodes.items()))
    store.write(group_rows(rl_group, [1.0, -1.0], iteration_id="i", step=1, has_contrast=True))
    assert load_groups(store, "i", 1) == [rl_group]
    assert store.rows("select * exclude created_at from rl_credit order by advantage") == [
        ("t0-8", 0, -0.25),
        ("t0-9", 0, 0.5),
    ]


def test_a_validation_is_what_its_episodes_came_to(tmp_path: Path) -> None:
    store, rl_group = Store(tmp_path / "store.duckdb"), group(0, [1.0, 0.5, 0.0, 0.0])
    episodes = rl_group.episodes.items()
    store.write(
        merge(trajectory_rows(key, trajectory, source=VALIDATION, iteration_id="i") for key, trajectory in episodes)
    )
    assert validations(store, "i") == []
    store.write(validation_rows("i", 20, list(rl_group.episodes)))
    validation = Validation(step=20, episodes=4, success=0.25, reward=0.375)
    assert validations(store, "i") == [validation]
    assert validation_of(store, "i", 20) == validation
    assert validation_of(store, "i", 10) is None


def test_scores_come_back_and_are_of_what_the_weights_were_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    rl_group = group(0, [1.0, 0.0])
    store.write(merge(trajectory_rows(k, t, source="rollout", iteration_id="i") for k, t in rl_group.episodes.items()))
    store.write(group_rows(rl_group, [1.0, -1.0], iteration_id="i", step=1, has_contrast=True))
    whole = dict.fromkeys(("reward", "pass_at_1", "pass_at_n", "mixed_share", "episode_tokens", "episode_steps"), 0.0)
    counts = dict.fromkeys(("drawn_again", "sampled_tokens", "trained_tokens"), 0)
    store.write(rl_step_rows("i", 1, {**whole, **counts, "cut_share": 0.0}))
    before = step_hashes(store, "i")
    first, second = rl_group.episodes
    scores = {first: {0: (-0.5, -0.25)}, second: {0: (-1.0, -2.0)}}
    store.write(scorer_logprob_rows(scores))
    assert load_scorer_logprobs(store, [first, second, "another"]) == scores
    assert load_scorer_logprobs(store, []) == {}
    after = step_hashes(store, "i")
    assert after.keys() == before.keys() == {1}
    assert after != before, "weights are not gone on from where scores are missing"
