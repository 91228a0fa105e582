"""The advantages of steps by the states that they were taken in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentr_core.errors import DataFault, TrainingFault
from agentr_core.methods.grpo.credit import credit_measures, is_trained_on, step_advantages, with_credit
from agentr_core.recipes.grpo import Credit, GraphConfig, GrpoConfig, StatesConfig
from agentr_core.store.codec.ledger import Group, group_rows, iteration_rows, load_record_ids, load_steps
from agentr_core.store.codec.trajectories import trajectory_rows, tree_rows
from agentr_core.store.database import Store
from agentr_core.store.tables import TreeHead
from agentr_core.types import Instance, Node, Step, StopReason, Trajectory, Tree

ROOM = Instance(environment="room", split="train", index=0)


def episode(path: str, reward: float = 0.0, *, cut: bool = False) -> Trajectory:
    """Return an episode through states, a letter each, whose actions are named after where they
    lead to; the last leads out of the room, unless a limit cut it.
    """
    ends = [*path[1:], "out"]
    steps = tuple(
        Step(
            reply=after,
            action=after,
            observation=f"You see {after}.",
            reward=reward if at == len(path) - 1 else 0.0,
            terminated=at == len(path) - 1 and not cut,
            state_key=state,
        )
        for at, (state, after) in enumerate(zip(path, ends, strict=True))
    )
    return Trajectory(
        instance=ROOM,
        first_observation=f"You see {path[0]}.",
        steps=steps,
        reward=reward,
        success=reward == 1,
        stop=StopReason.STEP_LIMIT if cut else StopReason.SUCCESS if reward == 1 else StopReason.FAILURE,
    )


def group(*episodes: Trajectory, prefix: int = 0) -> Group:
    episodes_by_id = {f"t{number}": episode for number, episode in enumerate(episodes)}
    return Group(number=0, draw=0, policy="p@0", instance=ROOM, episodes=episodes_by_id, prefix=prefix)


def grpo(credit: Credit, **states: object) -> GrpoConfig:
    return GrpoConfig(
        credit=credit,
        scale_rewards="none",
        states=StatesConfig(**{"discount": 0.5, "episode_weight": 0.0, **states}),  # type: ignore[arg-type]
    )


def credit_of(of: Group, config: GrpoConfig, store: Store) -> list[list[float]]:
    (result,) = with_credit([of], config, store, "i1", 1)
    return [list(of_steps) for of_steps in step_advantages(result, config)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.duckdb")


def test_a_good_step_of_a_lost_episode_is_praised_by_distance_and_punished_by_outcome(store: Store) -> None:
    # From a the way leads by b to the win. The lost episode went to b, too, and then astray.
    episodes = group(episode("ab", 1.0), episode("abc", cut=True), episode("aac", cut=True))
    by_distance = credit_of(episodes, grpo("graph"), store)
    # a: to b (worth 1/4), to b, to a (1/8), to c (from which nothing is won: 1/16).
    assert by_distance[0][0] == by_distance[1][0] == pytest.approx(1 / 4 - 11 / 64)
    assert by_distance[2] == pytest.approx([1 / 8 - 11 / 64, 1 / 16 - 11 / 64, 0.0])
    # b: out with the win, or to c.
    assert by_distance[0][1] == pytest.approx(1 / 2 - 9 / 32) == -by_distance[1][1]

    by_outcome = credit_of(episodes, grpo("states"), store)
    # Of four steps in a, one belongs to a won episode, and was two steps before its end.
    assert [of_steps[0] for of_steps in by_outcome] == pytest.approx([1 / 2 - 1 / 8, -1 / 8, -1 / 8])


@pytest.mark.parametrize("stop", [StopReason.STEP_LIMIT, StopReason.FAILURE, StopReason.DISASTER])
def test_where_a_limit_of_the_world_cut_an_episode_nobody_knows_where_its_last_step_led(
    stop: StopReason, store: Store
) -> None:
    # The same action in the same state, with which one episode wins and the other ends.
    won, lost = episode("abc", 1.0), replace(episode("aab"), stop=stop)
    lost = replace(lost, steps=(*lost.steps[:-1], replace(lost.steps[-1], action="c", terminated=stop != "disaster")))
    of_won, of_lost = credit_of(group(won, lost), grpo("graph"), store)
    assert (of_lost[-1] < of_won[1]) is (stop is not StopReason.STEP_LIMIT)


def test_the_episode_counts_as_much_as_it_weighs(store: Store) -> None:
    episodes = group(episode("ab", 1.0), episode("cd", cut=True))
    config = grpo("states", weight=2.0, episode_weight=0.5)
    assert credit_of(episodes, config, store) == [[0.25, 0.25], [-0.25, -0.25]], "no state has two steps"


def test_steps_that_were_given_are_not_compared(store: Store) -> None:
    episodes = group(episode("aab", 1.0), episode("aac", cut=True), prefix=1)
    first, second = credit_of(episodes, grpo("graph"), store)
    assert (first[0], second[0]) == (0.0, 0.0)
    assert first[1] == pytest.approx((1 / 4 - 1 / 16) / 2) == -second[1]


def test_lost_groups_teach_where_the_run_knows_a_way(store: Store) -> None:
    lost_group = group(episode("ab", cut=True), episode("ac", cut=True))
    near, far = grpo("graph"), replace(grpo("graph"), graph=GraphConfig(reach="run"))
    assert not is_trained_on(with_credit([lost_group], near, store, "i2", 1)[0], near)

    root = Node(index=0, parent=-1, depth=0, step=None)
    inner, leaf = (
        Node(index=at + 1, parent=at, depth=at + 1, step=step, stop=StopReason.SUCCESS if at else None)
        for at, step in enumerate(episode("ac", 1.0).steps)
    )
    tree = Tree(instance=ROOM, first_observation="You see a.", nodes=(root, inner, leaf), dives_done=1, seed=0)
    for number in (1, 2):
        store.write(iteration_rows(f"i{number}", run_id="r", iteration=number))
    head = TreeHead(
        tree_id="tree",
        iteration_id="i1",
        checkpoint_id="c",
        config={},
        instance=ROOM,
        first_observation=tree.first_observation,
        seed=0,
    )
    store.write(tree_rows(head, tree))
    (credit,) = with_credit([lost_group], far, store, "i2", 1)
    assert step_advantages(credit, far)[1][0] > 0 > step_advantages(credit, far)[0][0]
    (observation_credit,) = with_credit(
        [lost_group], replace(far, states=replace(far.states, key="observation")), store, "i2", 1
    )
    assert observation_credit.step_advantages == credit.step_advantages, "what is seen tells these states apart as well"


def test_a_stored_episode_is_worth_what_it_was_trained_with_and_known_once_it_is_graded(store: Store) -> None:
    for number in (1, 2):
        store.write(iteration_rows(f"i{number}", run_id="r", iteration=number))
    won = replace(group(episode("ab", 1.0), episode("ac")), shaped_rewards=(0.4, 0.0))
    store.write(group_rows(won, [0.2, -0.2], iteration_id="i1", step=1, has_contrast=True))
    for key, trajectory in won.episodes.items():
        store.write(trajectory_rows(key, trajectory, source="rollout", iteration_id="i1"))
    for source in ("ungraded", "bare"):
        store.write(trajectory_rows(source, episode("ab"), source=source, iteration_id="i1"))
    steps = load_steps(store, "i2", [ROOM.key], last_step=0)
    assert [(step.action, step.stop, step.reward) for step in steps if step.stop] == [
        ("out", StopReason.SUCCESS, 0.4),
        ("out", StopReason.FAILURE, 0.0),
    ]
    records = load_record_ids(store, "i2", [ROOM.key], last_step=0)
    assert set(records[ROOM.key].trajectories) == set(won.episodes)


def test_a_group_without_states_is_told(store: Store) -> None:
    blind = group(*(replace(e, steps=tuple(replace(s, state_key=None) for s in e.steps)) for e in [episode("ab", 1.0)]))
    with pytest.raises(
        DataFault, match=r"^an episode of room/train/0 was stored without the states of its steps; begin"
    ):
        with_credit([blind], grpo("states"), store, "i1", 1)
    assert set(credit_measures([blind], grpo("episode")).values()) == {None}


def test_keys_that_tell_too_little_end_a_graph_and_not_the_states(store: Store) -> None:
    def episode_of(path: str, action: str) -> Trajectory:
        trajectory = episode(path, cut=True)
        return replace(trajectory, steps=tuple(replace(step, action=action) for step in trajectory.steps))

    vague = group(episode_of("ab", "go"), episode_of("ac", "go"))
    with pytest.raises(
        TrainingFault, match=r"^of 1 actions of step 1 .* 1 led to another state, .* mend the world's state"
    ):
        with_credit([vague], grpo("graph"), store, "i1", 1)
    assert credit_measures(with_credit([vague], grpo("states"), store, "i1", 1), grpo("states"))["state_conflicts"] == 1


def test_measures_tell_how_far_credit_and_distance_agree(store: Store) -> None:
    episodes, config = group(episode("ab", 1.0), episode("abc", cut=True)), grpo("episode")
    measures = credit_measures([episodes], config)
    # Both were in a and in b, where the lost one went astray; where it was led from c is not known.
    assert measures == {
        "compared_share": pytest.approx(4 / 5),
        "praised_unhelpful": 0.0,
        "punished_helpful": pytest.approx(1 / 2),
        "state_conflicts": 0.0,
    }
    alike = group(episode("ab", 1.0), episode("ab", 1.0))
    assert credit_measures([alike], config)["compared_share"] is None, "it teaches nothing"
