"""Groups that go on from failed episodes: which ones, after which step, and what of them is
trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.methods.grpo.rollouts import Beginning, GroupInProgress, choose_failures, cut_beginning
from agentr_core.methods.grpo.train import measures
from agentr_core.recipes.grpo import BranchingConfig, GrpoConfig
from agentr_core.store.codec.ledger import (
    Group,
    group_rows,
    iteration_rows,
    load_failed_ids,
    load_group_outcomes,
    load_groups,
)
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import merge
from agentr_core.training.group.policy import Totals
from agentr_core.types import Instance, Step, StopReason, Trajectory

ROOMS = [Instance(environment="room", split="train", index=index) for index in range(8)]
ALWAYS = BranchingConfig(initial_rollouts=2, branch_probability=1.0)


def step(name: str) -> Step:
    ids, logprobs = (1, 2), (-1.0, -1.0)
    return Step(
        reply=name,
        action=name,
        observation="seen",
        reward=0.0,
        token_ids=ids,
        logprobs=logprobs,
        finish_reason="stop",
        tokenizer="t",
    )


def make_trajectory(room: Instance, *steps: Step, won: bool = False) -> Trajectory:
    stop = StopReason.SUCCESS if won else StopReason.STEP_LIMIT
    return Trajectory(
        instance=room, first_observation="A room.", steps=steps, reward=float(won), success=won, stop=stop
    )


def long(room: Instance, *, won: bool, steps: int = 3) -> Trajectory:
    return make_trajectory(room, *(step(f"{number}") for number in range(steps)), won=won)


def test_a_share_of_the_instances_goes_on_from_one_of_their_failures() -> None:
    failures = {room.key: [f"{room.key}-{n}" for n in range(3)] for room in ROOMS[:6]}
    choices = [choose_failures(ROOMS, failures, share=0.5, seed=seed) for seed in range(50)]
    assert all(len(choice) == 4 for choice in choices)
    assert {key for choice in choices for key in choice} == set(failures), "each has its turn"
    assert {parent for choice in choices for parent in choice.values()} == {
        key for keys in failures.values() for key in keys
    }
    assert all(parent in failures[key] for choice in choices for key, parent in choice.items())
    assert choose_failures(ROOMS, failures, share=0.5, seed=3) == choices[3]
    assert len(choose_failures(ROOMS, failures, share=1.0, seed=0)) == 6, "those that never failed begin at the start"
    assert choose_failures(ROOMS, {}, share=1.0, seed=0) == {}
    assert len(choose_failures(ROOMS[:6], failures, share=1.0, seed=0)) == 5, "a step has episodes from the start"


def test_a_beginning_keeps_a_step_and_cuts_one_off() -> None:
    whole = long(ROOMS[0], won=False, steps=4)
    cuts = [cut_beginning("t", whole, seed=n) for n in range(60)]
    assert {len(start.steps) for start in cuts} == {1, 2, 3}
    assert all(start.steps == whole.steps[: len(start.steps)] for start in cuts)
    assert cuts[7].steps == cut_beginning("another id", whole, seed=7).steps


def test_a_group_after_the_experts_beginning_tells_so() -> None:
    whole = long(ROOMS[0], won=True, steps=4)
    start = cut_beginning("expert's", whole, seed=0, operator="continuation")
    group = GroupInProgress(instance=ROOMS[0], first_number=0, seed_of=lambda n: n, beginning=start)
    plans = group.next_plans(GrpoConfig(num_generations=2), 100)
    derivations = group.add_episodes({f"t{plan.number}": (plan, went_on(plan)) for plan in plans})
    made_of = ("expert's", "continuation", len(start.steps))
    assert [(derivation.parent, derivation.operator, derivation.position) for derivation in derivations] == [
        made_of
    ] * 2


def test_branches_may_follow_the_experts_beginning() -> None:
    prefix = (Step(reply="e", action="e", observation="seen", reward=0.0),)
    start = Beginning(steps=prefix, parent_id="expert's", operator="continuation")
    group = GroupInProgress(instance=ROOMS[0], first_number=0, seed_of=lambda n: n, beginning=start)
    config, derivations = GrpoConfig(num_generations=4, branching=ALWAYS), []
    while plans := group.next_plans(config, 100):
        derivations += group.add_episodes({f"t{plan.number}": (plan, went_on(plan)) for plan in plans})
    assert [derivation.operator for derivation in derivations] == ["continuation", "continuation", "branch", "branch"]


@pytest.mark.parametrize("branching", [None, ALWAYS])
def test_a_group_goes_on_from_its_beginning_and_tells_so(branching: BranchingConfig | None) -> None:
    prefix = (step("x"), step("y"))
    config = GrpoConfig(num_generations=3, max_steps=9, branching=branching)
    group = GroupInProgress(
        instance=ROOMS[0], first_number=0, seed_of=lambda n: n, beginning=Beginning(steps=prefix, parent_id="lost")
    )
    derivations = []
    while plans := group.next_plans(config, 100):
        assert all(plan.prefix[:2] == prefix for plan in plans)
        # None is the recipe's limit, which does not count a prefix.
        assert [plan.max_steps for plan in plans] == [None if plan.prefix == prefix else 8 for plan in plans]
        derivations += group.add_episodes({f"t{plan.number}": (plan, went_on(plan)) for plan in plans})
    made_of = [
        (derivation.child, derivation.parent, derivation.operator, derivation.position) for derivation in derivations
    ]
    assert made_of[:2] == [("t0", "lost", "revision", 2), ("t1", "lost", "revision", 2)]
    assert made_of[2:] == [("t2", "t0", "branch", 3) if branching else ("t2", "lost", "revision", 2)]


def went_on(plan: EpisodePlan) -> Trajectory:
    return make_trajectory(plan.instance, *plan.prefix, *(step(f"{plan.number}.{n}") for n in range(3)))


def store_group(store: Store, group: Group, iteration_id: str, at: int) -> None:
    rows = [trajectory_rows(key, t, source="rollout", iteration_id="i") for key, t in group.episodes.items()]
    has_contrast = len(set(group.rewards)) > 1
    of_group = group_rows(group, list(group.rewards), iteration_id=iteration_id, step=at, has_contrast=has_contrast)
    store.write(merge([*rows, of_group]))


@pytest.mark.slow
def test_the_last_failures_from_the_start_are_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.duckdb")
    room = ROOMS[0]
    for iteration_id, number in (("before", 1), ("i", 2), ("later", 3)):
        store.write(iteration_rows(iteration_id, run_id="r", iteration=number))

    def group(name: str, number: int, *episodes: Trajectory, prefix: int = 0) -> Group:
        by_key = {f"{name}{place}": trajectory for place, trajectory in enumerate(episodes)}
        instance = episodes[0].instance
        return Group(number=number, draw=0, policy="p", instance=instance, prefix=prefix, episodes=by_key)

    other_room = ROOMS[1]
    store_group(store, group("a", 0, long(room, won=False), long(room, won=True)), "before", 1)
    store_group(store, group("b", 1, long(other_room, won=False), long(other_room, won=False, steps=1)), "before", 1)
    store_group(store, group("c", 0, long(room, won=True), long(room, won=False)), "i", 1)
    store_group(store, group("d", 0, long(room, won=False), long(room, won=True), prefix=1), "i", 2)
    store_group(store, group("e", 1, long(other_room, won=True)), "i", 2)
    store_group(store, group("f", 0, long(room, won=False)), "i", 3)
    store_group(store, group("g", 0, long(room, won=False)), "later", 1)

    assert load_failed_ids(store, "i", last_step=0) == {room.key: ["a0"], other_room.key: ["b0"]}, (
        "too short to be cut: b1"
    )
    assert load_failed_ids(store, "i", last_step=2) == {room.key: ["c1"], other_room.key: ["b0"]}
    assert load_failed_ids(store, "i", last_step=3) == {room.key: ["f0"], other_room.key: ["b0"]}
    assert [g.prefix for g in load_groups(store, "i", 2)] == [1, 0]
    outcomes = [(outcome.origin, outcome.episodes) for outcome in load_group_outcomes(store, "i", last_step=2)]
    assert outcomes == [(room.key, 2), (other_room.key, 2), (room.key, 2), (other_room.key, 1)], (
        "d is about another state"
    )


def test_a_step_tells_recovery_apart_from_success() -> None:
    room = ROOMS[0]
    fresh = Group(
        number=0, draw=0, policy="p", instance=room, episodes={"a": long(room, won=True), "b": long(room, won=True)}
    )
    episodes = {"c": long(room, won=False, steps=5), "d": long(room, won=True, steps=5)}
    recovering = Group(number=1, draw=0, policy="p", instance=room, prefix=4, episodes=episodes)
    expert_group = replace(recovering, number=2, is_expert_led=True)

    metrics = measures([fresh, recovering], Totals(), GrpoConfig())

    assert (metrics["pass_at_1"], metrics["pass_at_n"], metrics["reward"]) == (1.0, 1.0, 1.0)
    assert metrics["recovered"] == 0.5
    assert metrics["mixed_share"] == 0.5
    assert metrics["episode_steps"] == (3 + 3 + 1 + 1) / 4, "what was given is not counted"
    assert measures([fresh], Totals(), GrpoConfig())["recovered"] is None
    metrics = measures([fresh, expert_group], Totals(), GrpoConfig())
    assert metrics["recovered"] is None, "what the expert began was not failed"
    assert metrics["pass_at_1"] == 1.0
    assert metrics["mixed_share"] == 0.5
    branch_group = replace(fresh, given={"b": 2})
    metrics = measures([branch_group], Totals(), GrpoConfig())
    assert metrics["sampled_tokens"] == 2 * (3 + 1), "the branch sampled its last step alone"
    assert metrics["episode_steps"] == 2
