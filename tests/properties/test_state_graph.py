"""Credit by state against brute force, whatever the transitions are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.recipes.grpo import StatesConfig
from agentr_core.training.group.advantages import Edge, KeyAgreement, StateGraph, discounted_rewards, state_advantages

STATES = "abcdef"
REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 0.7, 1.0])
# Loops, several wins, dead ends and episodes that a limit cut: all of them occur.
EDGES = st.builds(
    lambda state, action, after, reward: Edge(state, action, after, None if after else reward),
    st.sampled_from(STATES),
    st.sampled_from("xyz"),
    st.none() | st.sampled_from(STATES),
    st.none() | REWARDS,
)
GRAPHS = st.lists(EDGES, max_size=12)
DISCOUNT = 0.5


def ways(edges: Sequence[Edge], state: str, passed: frozenset[str] = frozenset()) -> Iterator[tuple[int, float]]:
    """Yield the length and the reward of each way to a reward that enters no state twice."""
    for edge in edges:
        if edge.state != state:
            continue
        if edge.next_state is None:
            if edge.reward is not None and edge.reward > 0:
                yield 1, edge.reward
        elif edge.next_state not in passed | {state}:
            for length, reward in ways(edges, edge.next_state, passed | {state}):
                yield length + 1, reward


def worth_of(edges: Sequence[Edge], state: str) -> float | None:
    return max((reward * DISCOUNT**length for length, reward in ways(edges, state)), default=None)


@given(GRAPHS)
def test_a_state_is_worth_the_best_way_from_it(edges: list[Edge]) -> None:
    graph = StateGraph.from_edges(edges, discount=DISCOUNT)
    assert graph.values_by_state == {state: worth for state in STATES if (worth := worth_of(edges, state)) is not None}


@given(GRAPHS)
def test_an_edge_is_worth_a_step_less_than_what_it_leads_to(edges: list[Edge]) -> None:
    graph = StateGraph.from_edges(edges, discount=DISCOUNT)
    worst = min((worth for state in STATES if (worth := worth_of(edges, state)) is not None), default=0.0)
    for edge in edges:
        worth = graph.edge_value(edge)
        if edge.next_state is not None:
            after = worth_of(edges, edge.next_state)
            assert worth == DISCOUNT * (DISCOUNT * worst if after is None else after)
        elif edge.reward is not None:
            assert worth == (DISCOUNT * edge.reward if edge.reward > 0 else DISCOUNT * DISCOUNT * worst)
        else:
            same = [e for e in edges if e[:2] == edge[:2] and (e.next_state, e.reward) != (None, None)]
            assert worth == (graph.edge_value(same[0]) if same else None)


@given(GRAPHS)
def test_nearer_is_what_lies_on_a_best_way(edges: list[Edge]) -> None:
    graph = StateGraph.from_edges(edges, discount=DISCOUNT)
    for edge in edges:
        state_value, worth = worth_of(edges, edge.state), graph.edge_value(edge)
        assert graph.begins_best_path(edge) == (None if state_value is None or worth is None else worth == state_value)


@given(st.integers(1, 9), st.integers(0, 9))
def test_with_one_reward_a_distance_is_that_of_the_published_formula(far: int, back: int) -> None:
    # A line of states to a win, and a way from its start to where nothing can be won.
    line = [Edge(str(at), "on", str(at + 1), None) for at in range(far)] + [Edge(str(far), "win", None, 1.0)]
    dead_ends = [Edge("0", "astray", "lost", None), Edge("lost", "stay", "lost", None)]
    loops = [Edge(str(at), "back", str(max(0, at - back)), None) for at in range(far)]
    graph = StateGraph.from_edges([*line, *dead_ends, *loops], discount=0.9)
    distances = {str(at): far - at + 1 for at in range(far + 1)} | {"lost": far + 2}
    for edge in (*line[:-1], *dead_ends, *loops):
        assert edge.next_state is not None
        assert graph.edge_value(edge) == pytest.approx(0.9 ** (distances[edge.next_state] + 1))
    assert graph.edge_value(line[-1]) == pytest.approx(0.9)


@given(GRAPHS)
def test_keys_disagree_where_an_action_led_elsewhere(edges: list[Edge]) -> None:
    between = [edge for edge in edges if edge.next_state is not None]
    agreement = KeyAgreement.from_edges(edges)
    assert agreement.pairs == len(between) - len({edge[:2] for edge in between})
    next_states = {edge[:2]: edge.next_state for edge in reversed(between)}
    assert agreement.conflicts == sum(edge.next_state != next_states[edge[:2]] for edge in between)


@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=6), REWARDS), min_size=2, max_size=6),
    st.floats(0, 2),
    st.floats(0.1, 2),
)
def test_the_advantage_of_a_state_is_that_of_its_steps_alone(
    played: list[tuple[str, float]], episode_weight: float, weight: float
) -> None:
    states, rewards = [list(path) for path, _ in played], [reward for _, reward in played]
    worths: list[list[float | None]] = [
        [*of_steps] for of_steps in discounted_rewards(rewards, [len(path) for path in states], discount=0.95)
    ]
    worths[0][0] = None
    of_episodes = [reward - fmean(rewards) for reward in rewards]
    advantages = state_advantages(
        states,
        worths,
        of_episodes,
        config=StatesConfig(weight=weight, episode_weight=episode_weight),
        scale="group",
    )
    for episode, path in enumerate(states):
        for step, state in enumerate(path):
            worth = worths[episode][step]
            same = [
                value
                for number, keys in enumerate(states)
                for at, key in enumerate(keys)
                if key == state and (value := worths[number][at]) is not None
            ]
            term = 0.0
            if worth is not None and len(set(same)) > 1:
                term = (worth - fmean(same)) / (stdev(same) + 1e-4)
            assert advantages[episode][step] == pytest.approx(episode_weight * of_episodes[episode] + weight * term)


def test_a_published_worth_falls_with_the_steps_that_follow() -> None:
    assert discounted_rewards([1.0, 0.5, 0.0], [3, 1, 2], discount=0.5) == [[0.25, 0.5, 1.0], [0.5], [0.0, 0.0]]
