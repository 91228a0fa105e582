"""Explore with the policy, and compare trajectories to make preference pairs. Source: ETO section
3.2. The part of each trajectory that is trained on:

    instruction, acknowledgement, observation, shared steps | later replies | later observations
    in both sides, never trained                            | trained       | never trained

Both sides end with a reply. A losing side, unless it is the expert's, is cut to at most
`eto.preferences.extra_rounds` steps more than the better one has: the log-probability of a
trajectory is a sum over its tokens, so a very long failure would outweigh everything else.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import require_state
from agentr_core.episodes.transcript import of_another_run, summaries_in, transcript
from agentr_core.errors import ConfigError
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.exchange.imports import read_pairs
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.eto import acting
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.recipes.fields import exceeds
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.episode_shard import plan_rollouts, play_rollouts, rollout_id
from agentr_core.runtime.equipment import Worlds
from agentr_core.runtime.instances import separate_instances
from agentr_core.runtime.place import Workplace
from agentr_core.samples.chat_file import World
from agentr_core.samples.identity import conversation_key, sample_id
from agentr_core.stages.dataset import whole_rows
from agentr_core.stages.demonstrate import best_expert_episodes
from agentr_core.stages.regrade import check_scoring, scored_by, scored_paths
from agentr_core.store.codec.ledger import rejection_rows, store_anew
from agentr_core.store.codec.samples import load_planned, preference_rows
from agentr_core.store.codec.trajectories import finished_trees_of_run, load_trajectories, load_trees
from agentr_core.store.queries.datasets import failed_subjects
from agentr_core.store.queries.runs import runs_beginning
from agentr_core.store.tables import merge
from agentr_core.system import check_wanted, in_thread
from agentr_core.types import (
    Instance,
    Path,
    Preference,
    PreferenceCase,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    Trajectory,
)

# Exploration: the policy plays the training instances of an iteration, or goes on from the
# expert's first steps.

EXPLORE = "explore"


def check_state(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if `eto.explore.repeats` is set and the environment does not report its
    state, which tells whether an episode repeats itself.
    """
    if recipe.eto.explore.repeats:
        require_state(env, "eto.explore.repeats")


def exploration(place: Workplace, iteration: int, instances: Sequence[Instance]) -> dict[str, EpisodePlan]:
    """Return the plans of an iteration's exploration, by trajectory id.

    Episode 0 of an instance is greedy, the others are sampled. Unless `eto.preferences.level` is
    `trajectory`, they are repeated from every position in the expert's best episode of the
    instance, if there is one, or from `eto.preferences.forced_steps` positions spread evenly.

    Raises `DataFault` if there is no policy.
    """
    iteration_id = place.iteration_id(iteration)
    collector = place.collector(iteration)
    experts: dict[str, Trajectory] = {}
    if place.plan(iteration).pairs and place.recipe.eto.preferences.level != "trajectory":
        experts = {key: episode for key, (_, episode) in best_expert_episodes(place, iteration).items()}
    recipe = place.recipe
    plans: list[EpisodePlan] = []
    for instance in instances:
        expert = experts.get(instance.key)
        config = recipe.in_world(instance.environment).eto.explore
        cuts = [0]
        if expert:
            length = len(expert.steps)
            limit = min(recipe.eto.preferences.forced_steps or length, length)
            cuts = [position * length // limit for position in range(limit)]
        plans += [
            EpisodePlan(
                instance=instance,
                number=number,
                seed=derive_seed(recipe.seed, EXPLORE, iteration, instance.key, number),
                prefix=expert.steps[:cut] if expert else (),
                greedy=number == 0,
                max_steps=config.max_steps,
                repeats=config.repeats,
            )
            for cut in cuts
            for number in range(0 if config.greedy else 1, config.samples + 1)
        ]
    return {rollout_id(iteration_id, collector.id, plan): plan for plan in plans}


async def explore(place: Workplace, iteration: int) -> dict[str, Any]:
    """Play the missing episodes of an iteration's exploration; those of another run with the same
    inputs are copied. Return the numbers of planned `episodes`, of `new` ones, and of `successes`.

    Raises:
        ConfigError: `data.scoring` names no existing scoring, or one that lacks an episode.
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: training and test instances overlap, or the policy is missing.
        WorkerLost: the cluster lost one worker after another; finished episodes are kept.
    """
    return (await _explore(place, iteration))[0]


async def explore_and_keep(place: Workplace, iteration: int) -> dict[str, Any]:
    """Do the same as `explore`, and store its successes as samples. Raises as `explore`."""
    summary, successes = await _explore(place, iteration)
    place.store.write(whole_rows(place, iteration, successes, stage=EXPLORE))
    return summary


async def _explore(place: Workplace, iteration: int) -> tuple[dict[str, Any], dict[str, Trajectory]]:
    """Play an exploration; return its counts, and its successful episodes by trajectory id."""
    check_scoring(place)
    plans = exploration(place, iteration, await separate_instances(place, iteration))
    plan_rollouts(place, iteration, plans, stage=EXPLORE)
    settings = acting(place.recipe)
    new = await play_rollouts(
        place,
        iteration,
        plans,
        stage=EXPLORE,
        name="exploration",
        sampling=settings.sampling,
        max_steps=settings.max_steps,
        limits=settings.limits,
    )
    episodes = scored_by(place, load_trajectories(place.store, list(plans)))
    successes = {key: trajectory for key, trajectory in episodes.items() if trajectory.success}
    return {"episodes": len(plans), "new": new, "successes": len(successes)}, successes


STAGE = "preferences"

Made = tuple[tuple[Preference, ...], tuple[Rejection, ...]]
"""Preferences, and rejections of the trajectories and pairs that became none."""


class StoredTrajectory(NamedTuple):
    """A stored trajectory with its id. Its first `forced` steps are the expert's, the others the
    policy's.
    """

    id: str
    trajectory: Trajectory
    forced: int = 0


class _Side(NamedTuple):
    """One side of a pair: the first `end` steps of a trajectory, of which those from `shared` on
    are trained.
    """

    played: StoredTrajectory
    shared: int
    end: int
    origin: Provenance


def preference_id(preference: Preference) -> str:
    """Return the id of a preference: a fingerprint of its two samples."""
    return fingerprint("preference", sample_id(preference.chosen), sample_id(preference.rejected))


def against_expert(
    expert: StoredTrajectory | None, rollouts: Sequence[StoredTrajectory], env: Environment, config: PreferencesConfig
) -> Made:
    """Compare each episode of an instance with the expert's; return the preferences and rejections.

    The side with the higher reward is chosen; a gap of at most `config.margin` makes no preference.
    With `config.level` `step`, only the replies with which the policy and the expert continue after
    the forced steps are compared; `mixture` makes preferences of both kinds.
    """
    if expert is None:
        detail = "there is no expert trajectory of its instance"
        return (), tuple(_reject(rollout.id, "no-expert", detail) for rollout in rollouts)
    preferences: list[Preference] = []
    rejections: list[Rejection] = []
    for rollout in rollouts:
        if len(rollout.trajectory.steps) <= rollout.forced:
            detail = f"the episode ended with {rollout.trajectory.stop} before any reply"
            fault: Rejection | None = _reject(rollout.id, "no-agent-turn", detail)
        elif rollout.trajectory.first_observation != expert.trajectory.first_observation:
            detail = f"its first observation is not that of expert {expert.id}"
            fault = _reject(rollout.id, "other-beginning", detail)
        else:
            fault = _unequal(expert, rollout, config.margin)
        if fault is not None:
            rejections.append(fault)
            continue
        results: list[Preference | Rejection] = []
        if config.level != "step" and not rollout.forced:
            if rollout.trajectory.reward < expert.trajectory.reward:
                loser = _side(rollout, len(expert.trajectory.steps), config)
                results.append(_preference(PreferenceCase.LOSE, _side(expert), loser, env))
            else:
                results.append(_preference(PreferenceCase.WIN, _side(rollout), _side(expert), env))
        if config.level != "trajectory":
            fork = rollout.forced
            if expert.trajectory.steps[fork].reply == rollout.trajectory.steps[fork].reply:
                results.append(_reject(rollout.id, "same-reply", f"the policy takes the expert's step {fork}"))
            else:
                better, worse = (
                    _Side(
                        episode,
                        shared=fork,
                        end=fork + 1,
                        origin=Provenance(split=fork, extra={"trajectory": episode.id}),
                    )
                    for episode in sorted((expert, rollout), key=lambda episode: -episode.trajectory.reward)
                )
                results.append(_preference(PreferenceCase.STEP, better, worse, env))
        preferences += [result for result in results if isinstance(result, Preference)]
        rejections += [result for result in results if isinstance(result, Rejection)]
    return tuple(preferences), tuple(rejections)


def among_own(rollouts: Sequence[StoredTrajectory], env: Environment, config: PreferencesConfig) -> Made:
    """Return at most one preference from the episodes of an instance: the best against the worst,
    the shortest of each where rewards are equal; and the rejections.

    Source: ETO table 5, the variant without an expert.
    """
    candidates = [rollout for rollout in rollouts if rollout.trajectory.steps]
    silent = tuple(_reject(p.id, "no-agent-turn") for p in rollouts if not p.trajectory.steps)
    if len(candidates) < 2:
        return (), (
            *silent,
            *(_reject(p.id, "single-episode", "there is nothing to compare it with") for p in candidates),
        )
    best = min(candidates, key=lambda p: (-p.trajectory.reward, len(p.trajectory.steps)))
    worst = min(candidates, key=lambda p: (p.trajectory.reward, len(p.trajectory.steps)))
    fault = _unequal(best, worst, config.margin)
    if fault:
        return (), (*silent, fault)
    preference = _preference(PreferenceCase.OWN, _side(best), _side(worst, len(best.trajectory.steps), config), env)
    return ((), (*silent, preference)) if isinstance(preference, Rejection) else ((preference,), silent)


def in_tree(paths: Sequence[Path], env: Environment, config: PreferencesConfig, tree_id: str) -> Made:
    """Return a preference for each fork of a search tree whose branches differ in mean reward, and
    the rejections.

    Chosen is the best path through the branch with the highest mean reward, rejected the worst path
    through the one with the lowest; their rewards must differ by more than `config.margin`. The
    steps before the fork belong to the prompt. Branches without an ended path are ignored.

    Args:
        paths: all leaf paths of one tree, whose id is `tree_id`.
    """
    forks: dict[tuple[int, ...], dict[int, list[Path]]] = {}
    for path in paths:
        for depth, node in enumerate(path.nodes):
            forks.setdefault(path.nodes[:depth], {}).setdefault(node, []).append(path)
    preferences: list[Preference] = []
    rejections: list[Rejection] = []
    for prefix, branches in sorted(forks.items()):
        if len(branches) < 2:
            continue
        worst_branch, *_, best_branch = sorted(branches.values(), key=lambda ps: (_mean(ps), -ps[0].leaf))
        best = min(best_branch, key=lambda p: (-p.trajectory.reward, len(p.nodes), p.leaf))
        worst = min(worst_branch, key=lambda p: (p.trajectory.reward, len(p.nodes), p.leaf))
        subject = f"{tree_id}:{prefix[-1] if prefix else 0}"
        if not exceeds(_mean(best_branch), _mean(worst_branch)):
            rejections.append(
                _reject(subject, "tie", f"{len(branches)} branches of mean reward {_mean(best_branch):g}")
            )
        elif not exceeds(best.trajectory.reward - worst.trajectory.reward, config.margin):
            detail = f"rewards {best.trajectory.reward:g} and {worst.trajectory.reward:g}"
            rejections.append(_reject(subject, "margin", detail))
        else:
            length, split = min(len(worst.nodes), len(best.nodes) + config.extra_rounds), len(prefix)
            chosen = _Side(
                StoredTrajectory(f"{best.tree_id}:{best.leaf}", best.trajectory),
                shared=split,
                end=len(best.nodes),
                origin=Provenance(
                    tree_id=best.tree_id, good_leaf=best.leaf, split=split, good_reward=best.trajectory.reward
                ),
            )
            loser = _Side(
                StoredTrajectory(f"{worst.tree_id}:{worst.leaf}", worst.trajectory),
                shared=split,
                end=length,
                origin=Provenance(
                    tree_id=worst.tree_id, bad_leaf=worst.leaf, split=split, bad_reward=worst.trajectory.reward
                ),
            )
            preference = _preference(PreferenceCase.TREE, chosen, loser, env)
            if isinstance(preference, Rejection):
                rejections.append(preference)
            else:
                preferences.append(preference)
    if not preferences and not rejections:
        rejections.append(_reject(tree_id, "no-fork", f"{len(paths)} ended paths"))
    return tuple(preferences), tuple(rejections)


def distinct(preferences: Iterable[Preference]) -> Made:
    """Return the first of all preferences with the same two conversations, and a rejection for each
    other one; repeats with the same id are dropped without a rejection.
    """
    first: dict[tuple[str, str], Preference] = {}
    rejections = []
    for preference in preferences:
        key = (conversation_key(preference.chosen), conversation_key(preference.rejected))
        earlier = first.setdefault(key, preference)
        if earlier is not preference and preference_id(earlier) != preference_id(preference):
            detail = f"reads as preference {preference_id(earlier)}"
            rejections.append(_reject(preference_id(preference), "duplicate", detail))
    return tuple(first.values()), tuple(rejections)


def capped(preferences: Sequence[Preference], per_instance: int) -> Made:
    """Keep the `per_instance` preferences of each instance that have the widest reward margins, in
    the given order, and return them and the rejections of the others.

    With 0, all are kept; preferences without an instance are kept in any case.
    """
    if not per_instance:
        return tuple(preferences), ()
    order = sorted(range(len(preferences)), key=lambda position: (-(preferences[position].margin or 0.0), position))
    counts: dict[str, int] = {}
    positions: set[int] = set()
    for position in order:
        instance = preferences[position].chosen.instance
        key = "" if instance is None else instance.key
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= per_instance or not key:
            positions.add(position)
    detail = f"the cap is {per_instance}"
    return (
        tuple(preference for position, preference in enumerate(preferences) if position in positions),
        tuple(
            _reject(preference_id(preference), "per-instance-cap", detail)
            for position, preference in enumerate(preferences)
            if position not in positions
        ),
    )


def _unequal(reference: StoredTrajectory, episode: StoredTrajectory, margin: float) -> Rejection | None:
    gap = abs(reference.trajectory.reward - episode.trajectory.reward)
    if not exceeds(gap, 0):
        return _reject(episode.id, "tie", f"both have reward {reference.trajectory.reward:g}")
    if not exceeds(gap, margin):
        detail = f"rewards {reference.trajectory.reward:g} and {episode.trajectory.reward:g}"
        return _reject(episode.id, "margin", detail)
    return None


def _side(episode: StoredTrajectory, better: int | None = None, config: PreferencesConfig | None = None) -> _Side:
    """Return a trajectory, trained from its first step, as one side of a pair. If it lost, `better`
    is the length of the better side, and it is cut to `config.extra_rounds` steps more than that.
    """
    length = len(episode.trajectory.steps)
    end = length if better is None or config is None else min(length, better + config.extra_rounds)
    return _Side(episode, shared=0, end=end, origin=Provenance(split=0, extra={"trajectory": episode.id}))


def _preference(case: PreferenceCase, chosen: _Side, rejected: _Side, env: Environment) -> Preference | Rejection:
    for side in (chosen, rejected):
        if any(step.dropped for step in side.played.trajectory.steps[: side.end]):
            detail = (
                "its history outgrew the context and was read through a window; both sides of a pair have one prompt"
            )
            return _reject(side.played.id, "windowed", detail)
        if summaries_in(side.played.trajectory.steps[: side.end]):
            detail = "its history outgrew the context and was summed up; both sides of a pair have one prompt"
            return _reject(side.played.id, "summed-up", detail)
    return Preference(
        case=case,
        chosen=_sample(SampleKind.CHOSEN, chosen, env),
        rejected=_sample(SampleKind.REJECTED, rejected, env),
        chosen_reward=chosen.played.trajectory.reward,
        rejected_reward=rejected.played.trajectory.reward,
        dropped=0 if case is PreferenceCase.STEP else len(rejected.played.trajectory.steps) - rejected.end,
    )


def _sample(kind: SampleKind, side: _Side, env: Environment) -> Sample:
    trajectory = side.played.trajectory
    steps = trajectory.steps[: side.end]
    train = [position >= side.shared for position in range(len(steps))]
    messages = transcript(env, trajectory.first_observation, steps, train=train)
    return Sample(kind=kind, messages=messages, instance=trajectory.instance, provenance=side.origin)


def _mean(paths: Sequence[Path]) -> float:
    return sum(path.trajectory.reward for path in paths) / len(paths)


def _reject(subject: str, reason: str, detail: str = "") -> Rejection:
    return Rejection(stage=STAGE, subject=subject, reason=reason, detail=detail)


# Preferences: compare the trajectories of an iteration, and store pairs of samples.


async def prefer(place: Workplace, iteration: int) -> dict[str, Any]:
    """Make and store the preferences of an iteration; return how many there are of each case, and
    how many trajectories and pairs were `rejected`.

    Raises:
        ConfigError: `eto.preferences.trees` matches no run, several runs, or one without finished
            trees of the recipe's environments; or `data.scoring` is unusable.
        DataFileError: the file of pairs is malformed.
        DataFault: training and test instances overlap.
    """
    await separate_instances(place, iteration)
    with place.timed(STAGE, iteration):
        preferences, rejections = await in_thread(_make, place, iteration)
        iteration_id = place.iteration_id(iteration)
        units = [
            preference_rows(
                preference_id(preference),
                preference,
                chosen_id=sample_id(preference.chosen),
                rejected_id=sample_id(preference.rejected),
                iteration_id=iteration_id,
            )
            for preference in preferences
        ]
        rows = merge([*units, rejection_rows(rejections, iteration_id=iteration_id)])
        sides = SampleKind.CHOSEN, SampleKind.REJECTED
        store_anew(place.store, rows, iteration_id=iteration_id, stage=STAGE, kinds=sides)
    kinds = [str(preference.case) for preference in preferences]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))} | {"rejected": len(rejections)}


def check_pairs(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `DataFileError` if the recipe takes its pairs from a file and this is malformed."""
    if recipe.eto.preferences.source == "file":
        _of_file(recipe, env)


def _of_file(recipe: Recipe, env: Environment) -> Made:
    world = World(env.name, recipe.environment.name)
    return read_pairs(pathlib.Path(recipe.eto.preferences.file), world=world, split=recipe.instances.train)


def _make(place: Workplace, iteration: int) -> Made:
    config = place.recipe.eto.preferences
    with place.worlds() as worlds:
        if config.source == "file":
            outcome = _join(_of_file(recipe, env) for recipe, env in worlds)
        else:
            outcome = _of_trees(place, worlds) if config.source == "trees" else _of_episodes(place, iteration, worlds)
    iteration_id = place.iteration_id(iteration)

    def stamp(sample: Sample) -> Sample:
        # Several iterations may use the same file or tree; their samples need different ids.
        origin = replace(sample.provenance, extra={**sample.provenance.extra, "iteration": iteration_id})
        return replace(sample, provenance=origin)

    stamped_preferences = [replace(p, chosen=stamp(p.chosen), rejected=stamp(p.rejected)) for p in outcome[0]]
    different, duplicates = distinct(stamped_preferences)
    preferences, over_cap = capped(different, config.per_instance)
    return preferences, (*outcome[1], *duplicates, *over_cap)


def _of_episodes(place: Workplace, iteration: int, worlds: Worlds) -> Made:
    config = place.recipe.eto.preferences
    plans = load_planned(place.store, place.iteration_id(iteration))
    trajectories = load_trajectories(place.store, [plan.trajectory_id for plan in plans])
    scored_trajectories = scored_by(place, trajectories)
    failed_keys = set(failed_subjects(place.store, place.iteration_id(iteration), EXPLORE))
    by_instance: dict[str, list[StoredTrajectory]] = {}
    rejections: list[Rejection] = []
    for plan in plans:
        key = plan.trajectory_id
        episodes = by_instance.setdefault(plan.instance.key, [])
        if key in scored_trajectories:
            episodes.append(StoredTrajectory(key, scored_trajectories[key], forced=plan.forced))
        else:
            reason, explanation = "not-played", "was not begun: the collection was limited, or interrupted"
            if plan.key in failed_keys:
                reason, explanation = "no-reward", "has no reward; table event has the error that ended it"
            if key in trajectories:
                reason, explanation = "no-grade", "has no grade by data.scoring: the reply about it is unreadable"
            detail = f"episode {plan.key} {explanation}"
            rejections.append(Rejection(stage=STAGE, subject=key, reason=reason, detail=detail))
    owners = {plan.instance.key: plan.instance for plan in plans}
    parts: list[Made] = [((), tuple(rejections))]
    if config.against == "own":
        parts += [among_own(episodes, worlds.of(owners[key]), config) for key, episodes in by_instance.items()]
        return _join(parts)
    # `data.scoring` does not apply to the expert: each run plays the expert itself, so a scoring of
    # another run's episodes cannot contain these.
    experts = {
        expert.instance.key: StoredTrajectory(key, expert)
        for key, expert in best_expert_episodes(place, iteration).values()
    }
    for instance, episodes in by_instance.items():
        check_wanted()
        parts.append(against_expert(experts.get(instance), episodes, worlds.of(owners[instance]), config))
    return _join(parts)


def _of_trees(place: Workplace, worlds: Worlds) -> Made:
    config = place.recipe.eto.preferences
    runs = runs_beginning(place.store, config.trees or place.run_id)
    if len(runs) != 1:
        matches = f"{len(runs)} runs of {place.root} begin" if runs else f"no run of {place.root} begins"
        raise ConfigError(f"eto.preferences.trees: {matches} with {config.trees!r}; `agentr runs` lists them all")
    ids = finished_trees_of_run(place.store, runs[0])
    if not ids:
        raise ConfigError(f"eto.preferences.trees: run {runs[0]} has no finished tree; name a run of method agent-r")
    trees = load_trees(place.store, ids)
    names = [env.name for _, env in worlds]
    foreign = sorted({tree.instance.environment for tree in trees.values()} - {*names})
    if foreign:
        raise ConfigError(
            f"eto.preferences.trees: run {runs[0]} has trees of {', '.join(foreign)}, and the recipe's environment "
            f"is {', '.join(names)}"
        )
    if runs[0] != place.run_id:
        for key, tree in trees.items():
            nodes = (n if n.step is None else replace(n, step=of_another_run([n.step])[0]) for n in tree.nodes)
            trees[key] = replace(tree, nodes=tuple(nodes))
    paths = scored_paths(place, trees, runs[0])
    return _join(in_tree(paths[key], worlds.of(tree.instance), config, key) for key, tree in trees.items())


def _join(parts: Iterable[Made]) -> Made:
    parts = list(parts)
    preferences = tuple(preference for part, _ in parts for preference in part)
    return preferences, tuple(rejection for _, part in parts for rejection in part)
