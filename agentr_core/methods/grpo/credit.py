"""Assign an advantage to each step of a group's episodes (`grpo.credit`), and measure how far that
agrees with where the steps led.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from agentr_core.environment import MAX_DIFFERENT_SHARE
from agentr_core.errors import TrainingFault
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.store.codec.ledger import Group, load_steps
from agentr_core.store.database import Store
from agentr_core.training.group.advantages import (
    Edge,
    KeyAgreement,
    StateGraph,
    discounted_rewards,
    edges_of,
    group_advantages,
    sibling_advantages,
    state_advantages,
)


def with_credit(groups: Sequence[Group], grpo: GrpoConfig, store: Store, iteration_id: str, step: int) -> list[Group]:
    """Return the groups of a training step with `Group.step_advantages` set: the advantage of each
    step of each episode. With `grpo.credit: episode` they are returned unchanged.

    Raises:
        DataFault: with `states` or `graph`, steps were stored without their state keys.
        TrainingFault: with `graph`, keys do not tell states apart.
    """
    if grpo.credit == "episode":
        return list(groups)
    if grpo.credit == "siblings":
        credit_by_group = [
            sibling_advantages(list(group.episodes.values()), group.compared_rewards, scale=grpo.scale_rewards)
            for group in groups
        ]
    else:
        edges_by_group = [_edges_by_episode(group, grpo) for group in groups]
        earlier_edges: Mapping[str, Sequence[Edge]] = {}
        if grpo.credit == "graph":
            check_keys(map(_agreement, edges_by_group), step)
            if grpo.graph.reach == "run":
                earlier_edges = stored_edges(store, iteration_id, {group.instance.key for group in groups}, step, grpo)
        credit_by_group = [
            _state_credit(group, edges_by_episode, earlier_edges.get(group.instance.key, ()), grpo)
            for group, edges_by_episode in zip(groups, edges_by_group, strict=True)
        ]
    return [
        replace(group, step_advantages=tuple(map(tuple, step_credit)))
        for group, step_credit in zip(groups, credit_by_group, strict=True)
    ]


def step_advantages(group: Group, grpo: GrpoConfig) -> Sequence[Sequence[float]]:
    """Return the advantage of each step of each episode of a group from `with_credit`. What a
    scorer adds to the advantages of single tokens is not included.
    """
    if group.step_advantages is not None:
        return group.step_advantages
    return [
        [advantage] * len(episode.steps)
        for advantage, episode in zip(episode_advantages(group, grpo), group.episodes.values(), strict=True)
    ]


def episode_advantages(group: Group, grpo: GrpoConfig) -> list[float]:
    """Return the advantage of each episode of a group; 0 for all if only a scorer's term is trained
    on (`grpo.distil.advantage: none`).
    """
    if grpo.distil is not None and grpo.distil.advantage == "none":
        return [0.0] * len(group.episodes)
    return group_advantages(group.compared_rewards, scale=grpo.scale_rewards)


def is_trained_on(group: Group, grpo: GrpoConfig) -> bool:
    """Return whether a group from `with_credit` is trained on: some step has an advantage other
    than 0, or there is a scorer.
    """
    return grpo.distil is not None or any(map(any, step_advantages(group, grpo)))


def credit_measures(groups: Sequence[Group], grpo: GrpoConfig) -> dict[str, float | None]:
    """Return how far the credit of a training step's groups agrees with where their steps led, by
    column of table rl_step; None where a measure does not apply, and for all if a state is unknown.

    `compared_share` is the share of sampled steps whose state another sampled step of the group
    shares. `praised_unhelpful` is the share of steps with a positive advantage that do not help,
    `punished_helpful` that of steps with a negative one that do; a step helps if it begins a
    shortest way to a reward that its group found. `state_conflicts` is the share of actions, taken
    again in a state, that led to another state than before.
    """
    episodes = (episode for group in groups for episode in group.episodes.values())
    if grpo.states.key == "world" and any(step.state_key is None for episode in episodes for step in episode.steps):
        return dict.fromkeys(("compared_share", "praised_unhelpful", "punished_helpful", "state_conflicts"))
    agreement = KeyAgreement(0, 0)
    num_steps = num_compared = 0
    helps_by_sign: dict[bool, list[bool]] = {True: [], False: []}
    for group in groups:
        edges_by_episode = _edges_by_episode(group, grpo)
        agreement = agreement.plus(_agreement(edges_by_episode))
        if not is_trained_on(group, grpo):
            continue
        graph = StateGraph.from_edges(list(chain(*edges_by_episode)), discount=grpo.states.discount)
        sampled_steps = [
            step
            for edges, advantages_of_steps, num_given in zip(
                edges_by_episode, step_advantages(group, grpo), group.num_given_steps, strict=True
            )
            for step in list(zip(edges, advantages_of_steps, strict=True))[num_given:]
        ]
        num_by_state = Counter(edge.state for edge, _ in sampled_steps)
        num_steps += len(sampled_steps)
        num_compared += sum(count for count in num_by_state.values() if count > 1)
        for edge, advantage in sampled_steps:
            helps = graph.begins_best_path(edge)
            if advantage and helps is not None:
                helps_by_sign[advantage > 0].append(helps)
    praised_helps, punished_helps = helps_by_sign[True], helps_by_sign[False]
    return {
        "compared_share": num_compared / num_steps if num_steps else None,
        "praised_unhelpful": 1 - sum(praised_helps) / len(praised_helps) if praised_helps else None,
        "punished_helpful": sum(punished_helps) / len(punished_helps) if punished_helps else None,
        "state_conflicts": agreement.conflicts / agreement.pairs if agreement.pairs else None,
    }


def _state_credit(
    group: Group, edges_by_episode: Sequence[Sequence[Edge]], earlier_edges: Sequence[Edge], grpo: GrpoConfig
) -> list[list[float]]:
    """Return the advantage of each step of each episode with `grpo.credit: states` or `graph`.
    Steps that were given, not sampled, are edges of the graph but are not compared.

    Args:
        edges_by_episode: the edges of the steps of each episode.
        earlier_edges: edges of earlier steps of the run, for the graph.
    """
    discount = grpo.states.discount
    values_by_episode: list[list[float | None]]
    if grpo.credit == "graph":
        graph = StateGraph.from_edges([*chain(*edges_by_episode), *earlier_edges], discount=discount)
        values_by_episode = [[graph.edge_value(edge) for edge in edges] for edges in edges_by_episode]
    else:
        sizes = [len(edges) for edges in edges_by_episode]
        values_by_episode = [
            [*step_values] for step_values in discounted_rewards(group.compared_rewards, sizes, discount=discount)
        ]
    for step_values, num_given in zip(values_by_episode, group.num_given_steps, strict=True):
        step_values[:num_given] = [None] * num_given
    return state_advantages(
        [[edge.state for edge in edges] for edges in edges_by_episode],
        values_by_episode,
        group_advantages(group.compared_rewards, scale=grpo.scale_rewards),
        config=grpo.states,
        scale=grpo.scale_rewards,
    )


def _edges_by_episode(group: Group, grpo: GrpoConfig) -> list[list[Edge]]:
    """Return the edges of the steps of each episode of a group. Raises as `edges_of`."""
    return [
        edges_of(episode, reward, key=grpo.states.key)
        for episode, reward in zip(group.episodes.values(), group.compared_rewards, strict=True)
    ]


def _agreement(edges_by_episode: Sequence[Sequence[Edge]]) -> KeyAgreement:
    return KeyAgreement.from_edges(chain(*edges_by_episode))


def check_keys(agreements: Iterable[KeyAgreement], step: int) -> None:
    """Raise `TrainingFault` if, of the actions taken again in a state, a larger share than
    `MAX_DIFFERENT_SHARE` led to another state than before: then distances between states mean
    nothing.
    """
    agreement = KeyAgreement(0, 0)
    for group_agreement in agreements:
        agreement = agreement.plus(group_agreement)
    if agreement.conflicts > MAX_DIFFERENT_SHARE * agreement.pairs:
        raise TrainingFault(
            f"of {agreement.pairs:,} actions of step {step} that were taken again in a state of the same key, "
            f"{agreement.conflicts:,} led to another state, so the keys do not tell states apart and distances mean "
            "nothing; set grpo.credit to states or episode, or mend the world's state()"
        )


def stored_edges(
    store: Store, iteration_id: str, instance_keys: Iterable[str], step: int, grpo: GrpoConfig
) -> dict[str, list[Edge]]:
    """Return the edges of all steps that the run stored on the instances before training step
    `step`, by instance key. Steps that were stored without their states are left out.
    """
    edges_by_instance: defaultdict[str, list[Edge]] = defaultdict(list)
    for stored_step in load_steps(store, iteration_id, sorted(instance_keys), last_step=step - 1):
        state, next_state = stored_step.state_key, stored_step.next_state_key
        if grpo.states.key == "observation":
            state, next_state = fingerprint(stored_step.previous_observation), fingerprint(stored_step.observation)
        if state is not None:
            edges_by_instance[stored_step.instance_id].append(
                Edge.from_step(
                    state,
                    stored_step.action,
                    next_state,
                    stop=stored_step.stop,
                    reward=stored_step.reward,
                )
            )
    return edges_by_instance
