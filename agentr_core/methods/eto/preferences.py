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
from agentr_core.episodes.transcript import conversations, summary_positions, transcript_of, without_foreign_tokens
from agentr_core.errors import ConfigError
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.exchange.imports import read_pairs
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.eto import rollout_config
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.recipes.fields import exceeds
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.episode_shard import plan_rollouts, play_rollouts, rollout_id
from agentr_core.runtime.equipment import Worlds
from agentr_core.runtime.instances import chosen_instances
from agentr_core.samples.chat_file import World
from agentr_core.samples.dataset import prompt_of
from agentr_core.samples.identity import conversation_key, sample_id
from agentr_core.stages.dataset import whole_episode_rows
from agentr_core.stages.demonstrate import best_expert_episodes
from agentr_core.stages.regrade import check_scoring, rescored_paths, rescored_trajectories
from agentr_core.store.codec.ledger import rejection_rows, replace_stage_output
from agentr_core.store.codec.samples import load_planned_rollouts, preference_rows
from agentr_core.store.codec.trajectories import finished_tree_ids_of_run, load_trajectories, load_trees
from agentr_core.store.queries.datasets import failed_subjects
from agentr_core.store.queries.runs import find_runs
from agentr_core.store.tables import merge
from agentr_core.system import raise_if_cancelled, run_in_thread
from agentr_core.types import (
    Instance,
    Preference,
    PreferenceCase,
    Provenance,
    Rejection,
    Sample,
    SampleKind,
    Trajectory,
    TreePath,
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


def exploration_plans(ctx: RunContext, iteration: int, instances: Sequence[Instance]) -> dict[str, EpisodePlan]:
    """Return the plans of an iteration's exploration, by trajectory id.

    Episode 0 of an instance is greedy, the others are sampled. Unless `eto.preferences.level` is
    `trajectory`, they are repeated from every position in the expert's best episode of the
    instance, if there is one, or from `eto.preferences.forced_steps` positions spread evenly.

    Raises `DataFault` if there is no policy.
    """
    iteration_id = ctx.iteration_id(iteration)
    collector = ctx.collector(iteration)
    experts: dict[str, Trajectory] = {}
    if ctx.plan(iteration).has_pairs and ctx.recipe.eto.preferences.level != "trajectory":
        experts = {key: episode for key, (_, episode) in best_expert_episodes(ctx, iteration).items()}
    recipe = ctx.recipe
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


async def explore(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Play the missing episodes of an iteration's exploration; those of another run with the same
    inputs are copied. Return the numbers of planned `episodes`, of `new` ones, and of `successes`.

    Raises:
        ConfigError: `data.scoring` names no existing scoring, or one that lacks an episode.
        ErrorBudgetSpent: more episodes failed than the recipe allows; what was played is kept.
        DataFault: training and test instances overlap, or the policy is missing.
        WorkerLost: the cluster lost one worker after another; finished episodes are kept.
    """
    return (await _explore(ctx, iteration))[0]


async def explore_and_keep(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Do the same as `explore`, and store its successes as samples. Raises as `explore`."""
    summary, successes = await _explore(ctx, iteration)
    ctx.store.write(whole_episode_rows(ctx, iteration, successes, stage=EXPLORE))
    return summary


async def _explore(ctx: RunContext, iteration: int) -> tuple[dict[str, Any], dict[str, Trajectory]]:
    """Play an exploration; return its counts, and its successful episodes by trajectory id."""
    check_scoring(ctx)
    plans = exploration_plans(ctx, iteration, await chosen_instances(ctx, iteration))
    plan_rollouts(ctx, iteration, plans, stage=EXPLORE)
    rollout_settings = rollout_config(ctx.recipe)
    num_new = await play_rollouts(
        ctx,
        iteration,
        plans,
        stage=EXPLORE,
        name="exploration",
        sampling=rollout_settings.sampling,
        max_steps=rollout_settings.max_steps,
        limits=rollout_settings.limits,
    )
    episodes = rescored_trajectories(ctx, load_trajectories(ctx.store, list(plans)))
    successes = {key: trajectory for key, trajectory in episodes.items() if trajectory.success}
    return {"episodes": len(plans), "new": num_new, "successes": len(successes)}, successes


STAGE = "preferences"

PairingResult = tuple[tuple[Preference, ...], tuple[Rejection, ...]]
"""Preferences, and rejections of the trajectories and pairs that became none."""


class StoredTrajectory(NamedTuple):
    """A stored trajectory with its id. Its first `num_forced` steps are the expert's, the others
    the policy's.
    """

    id: str
    trajectory: Trajectory
    num_forced: int = 0


class _Side(NamedTuple):
    """One side of a pair: the first `num_steps` steps of a trajectory, of which those from
    `num_shared` on are trained.
    """

    stored: StoredTrajectory
    num_shared: int
    num_steps: int
    provenance: Provenance


def preference_id(preference: Preference) -> str:
    """Return the id of a preference: a fingerprint of its two samples."""
    return fingerprint("preference", sample_id(preference.chosen), sample_id(preference.rejected))


def pairs_with_expert(
    expert: StoredTrajectory | None, rollouts: Sequence[StoredTrajectory], env: Environment, config: PreferencesConfig
) -> PairingResult:
    """Compare each episode of an instance with the expert's; return the preferences and rejections.

    The side with the higher reward is chosen; a gap of at most `config.margin` makes no preference.
    With `config.level` `step`, only the replies with which the policy and the expert continue after
    the forced steps are compared; `mixture` makes preferences of both kinds.
    """
    if expert is None:
        detail = "there is no expert trajectory of its instance"
        return (), tuple(_rejection(rollout.id, "no-expert", detail) for rollout in rollouts)
    preferences: list[Preference] = []
    rejections: list[Rejection] = []
    for rollout in rollouts:
        if len(rollout.trajectory.steps) <= rollout.num_forced:
            detail = f"the episode ended with {rollout.trajectory.stop} before any reply"
            rejection: Rejection | None = _rejection(rollout.id, "no-agent-turn", detail)
        elif rollout.trajectory.first_observation != expert.trajectory.first_observation:
            detail = f"its first observation is not that of expert {expert.id}"
            rejection = _rejection(rollout.id, "other-beginning", detail)
        else:
            rejection = _gap_rejection(expert, rollout, config.margin)
        if rejection is not None:
            rejections.append(rejection)
            continue
        results: list[Preference | Rejection] = []
        if config.level != "step" and not rollout.num_forced:
            if rollout.trajectory.reward < expert.trajectory.reward:
                loser = _whole_side(rollout, len(expert.trajectory.steps), config)
                results.append(_preference_or_rejection(PreferenceCase.LOSE, _whole_side(expert), loser, env))
            else:
                results.append(
                    _preference_or_rejection(PreferenceCase.WIN, _whole_side(rollout), _whole_side(expert), env)
                )
        if config.level != "trajectory":
            fork = rollout.num_forced
            if expert.trajectory.steps[fork].reply == rollout.trajectory.steps[fork].reply:
                results.append(_rejection(rollout.id, "same-reply", f"the policy takes the expert's step {fork}"))
            else:
                better, worse = (
                    _Side(
                        episode,
                        num_shared=fork,
                        num_steps=fork + 1,
                        provenance=Provenance(split=fork, extra={"trajectory": episode.id}),
                    )
                    for episode in sorted((expert, rollout), key=lambda episode: -episode.trajectory.reward)
                )
                results.append(_preference_or_rejection(PreferenceCase.STEP, better, worse, env))
        preferences += [result for result in results if isinstance(result, Preference)]
        rejections += [result for result in results if isinstance(result, Rejection)]
    return tuple(preferences), tuple(rejections)


def pair_of_own(rollouts: Sequence[StoredTrajectory], env: Environment, config: PreferencesConfig) -> PairingResult:
    """Return at most one preference from the episodes of an instance: the best against the worst,
    the shortest of each where rewards are equal; and the rejections.

    Where a world begins an instance with different observations, only episodes that begin alike are
    compared, and of several pairs the one with the widest gap is taken.

    Source: ETO table 5, the variant without an expert.
    """
    candidates = [rollout for rollout in rollouts if rollout.trajectory.steps]
    rejections = [_rejection(rollout.id, "no-agent-turn") for rollout in rollouts if not rollout.trajectory.steps]
    episodes_by_beginning: dict[str, list[StoredTrajectory]] = {}
    for rollout in candidates:
        episodes_by_beginning.setdefault(rollout.trajectory.first_observation, []).append(rollout)
    reason, detail = "single-episode", "there is nothing to compare it with"
    if len(candidates) > 1:
        reason, detail = "other-beginning", "no other episode of its instance has its first observation"
    extremes: list[tuple[StoredTrajectory, StoredTrajectory]] = []
    for episodes in episodes_by_beginning.values():
        if len(episodes) == 1:
            rejections.append(_rejection(episodes[0].id, reason, detail))
            continue
        best = min(episodes, key=lambda rollout: (-rollout.trajectory.reward, len(rollout.trajectory.steps)))
        worst = min(episodes, key=lambda rollout: (rollout.trajectory.reward, len(rollout.trajectory.steps)))
        extremes.append((best, worst))
    if not extremes:
        return (), tuple(rejections)
    best, worst = max(extremes, key=lambda pair: pair[0].trajectory.reward - pair[1].trajectory.reward)
    preference: Preference | Rejection | None = _gap_rejection(best, worst, config.margin)
    if preference is None:
        loser = _whole_side(worst, len(best.trajectory.steps), config)
        preference = _preference_or_rejection(PreferenceCase.OWN, _whole_side(best), loser, env)
    if isinstance(preference, Rejection):
        return (), (*rejections, preference)
    return (preference,), tuple(rejections)


def pairs_in_tree(
    paths: Sequence[TreePath], env: Environment, config: PreferencesConfig, tree_id: str
) -> PairingResult:
    """Return a preference for each fork of a search tree whose branches differ in mean reward, and
    the rejections.

    Chosen is the best path through the branch with the highest mean reward, rejected the worst path
    through the one with the lowest; their rewards must differ by more than `config.margin`. The
    steps before the fork belong to the prompt. Branches without an ended path are ignored.

    Args:
        paths: all leaf paths of one tree, whose id is `tree_id`.
    """
    branches_by_prefix: dict[tuple[int, ...], dict[int, list[TreePath]]] = {}
    for path in paths:
        for depth, node in enumerate(path.nodes):
            branches_by_prefix.setdefault(path.nodes[:depth], {}).setdefault(node, []).append(path)
    preferences: list[Preference] = []
    rejections: list[Rejection] = []
    for prefix, branches in sorted(branches_by_prefix.items()):
        if len(branches) < 2:
            continue
        worst_branch, *_, best_branch = sorted(branches.values(), key=lambda ps: (_mean_reward(ps), -ps[0].leaf))
        best = min(best_branch, key=lambda p: (-p.trajectory.reward, len(p.nodes), p.leaf))
        worst = min(worst_branch, key=lambda p: (p.trajectory.reward, len(p.nodes), p.leaf))
        subject = f"{tree_id}:{prefix[-1] if prefix else 0}"
        if not exceeds(_mean_reward(best_branch), _mean_reward(worst_branch)):
            rejections.append(
                _rejection(subject, "tie", f"{len(branches)} branches of mean reward {_mean_reward(best_branch):g}")
            )
        elif not exceeds(best.trajectory.reward - worst.trajectory.reward, config.margin):
            detail = f"rewards {best.trajectory.reward:g} and {worst.trajectory.reward:g}"
            rejections.append(_rejection(subject, "margin", detail))
        else:
            num_kept, split = min(len(worst.nodes), len(best.nodes) + config.extra_rounds), len(prefix)
            chosen = _Side(
                StoredTrajectory(f"{best.tree_id}:{best.leaf}", best.trajectory),
                num_shared=split,
                num_steps=len(best.nodes),
                provenance=Provenance(
                    tree_id=best.tree_id, good_leaf=best.leaf, split=split, good_reward=best.trajectory.reward
                ),
            )
            loser = _Side(
                StoredTrajectory(f"{worst.tree_id}:{worst.leaf}", worst.trajectory),
                num_shared=split,
                num_steps=num_kept,
                provenance=Provenance(
                    tree_id=worst.tree_id, bad_leaf=worst.leaf, split=split, bad_reward=worst.trajectory.reward
                ),
            )
            preference = _preference_or_rejection(PreferenceCase.TREE, chosen, loser, env)
            if isinstance(preference, Rejection):
                rejections.append(preference)
            else:
                preferences.append(preference)
    if not preferences and not rejections:
        rejections.append(_rejection(tree_id, "no-fork", f"{len(paths)} ended paths"))
    return tuple(preferences), tuple(rejections)


def distinct_preferences(preferences: Iterable[Preference]) -> PairingResult:
    """Return the first of all preferences with the same two conversations, and a rejection for each
    other one; repeats with the same id are dropped without a rejection.
    """
    first_by_key: dict[tuple[str, str], Preference] = {}
    rejections = []
    for preference in preferences:
        key = (conversation_key(preference.chosen), conversation_key(preference.rejected))
        earlier = first_by_key.setdefault(key, preference)
        if earlier is not preference and preference_id(earlier) != preference_id(preference):
            detail = f"reads as preference {preference_id(earlier)}"
            rejections.append(_rejection(preference_id(preference), "duplicate", detail))
    return tuple(first_by_key.values()), tuple(rejections)


def capped_preferences(preferences: Sequence[Preference], per_instance: int) -> PairingResult:
    """Keep the `per_instance` preferences of each instance that have the widest reward margins, in
    the given order, and return them and the rejections of the others.

    With 0, all are kept; preferences without an instance are kept in any case.
    """
    if not per_instance:
        return tuple(preferences), ()
    order = sorted(range(len(preferences)), key=lambda position: (-(preferences[position].margin or 0.0), position))
    num_by_instance: dict[str, int] = {}
    kept_positions: set[int] = set()
    for position in order:
        instance = preferences[position].chosen.instance
        key = "" if instance is None else instance.key
        num_by_instance[key] = num_by_instance.get(key, 0) + 1
        if num_by_instance[key] <= per_instance or not key:
            kept_positions.add(position)
    detail = f"the cap is {per_instance}"
    return (
        tuple(preference for position, preference in enumerate(preferences) if position in kept_positions),
        tuple(
            _rejection(preference_id(preference), "per-instance-cap", detail)
            for position, preference in enumerate(preferences)
            if position not in kept_positions
        ),
    )


def _gap_rejection(reference: StoredTrajectory, episode: StoredTrajectory, margin: float) -> Rejection | None:
    gap = abs(reference.trajectory.reward - episode.trajectory.reward)
    if not exceeds(gap, 0):
        return _rejection(episode.id, "tie", f"both have reward {reference.trajectory.reward:g}")
    if not exceeds(gap, margin):
        detail = f"rewards {reference.trajectory.reward:g} and {episode.trajectory.reward:g}"
        return _rejection(episode.id, "margin", detail)
    return None


def _whole_side(
    episode: StoredTrajectory, better_length: int | None = None, config: PreferencesConfig | None = None
) -> _Side:
    """Return a trajectory, trained from its first step, as one side of a pair. If it lost,
    `better_length` is the length of the better side, and it is cut to `config.extra_rounds` steps
    more than that.
    """
    length = len(episode.trajectory.steps)
    num_steps = length if better_length is None or config is None else min(length, better_length + config.extra_rounds)
    return _Side(
        episode, num_shared=0, num_steps=num_steps, provenance=Provenance(split=0, extra={"trajectory": episode.id})
    )


def _preference_or_rejection(
    case: PreferenceCase, chosen: _Side, rejected: _Side, env: Environment
) -> Preference | Rejection:
    for side in (chosen, rejected):
        if any(step.dropped for step in side.stored.trajectory.steps[: side.num_steps]):
            detail = (
                "its history outgrew the context and was read through a window; both sides of a pair have one prompt"
            )
            return _rejection(side.stored.id, "windowed", detail)
        if summary_positions(side.stored.trajectory.steps[: side.num_steps]):
            detail = "its history outgrew the context and was summed up; both sides of a pair have one prompt"
            return _rejection(side.stored.id, "summed-up", detail)
        kept = replace(side.stored.trajectory, steps=side.stored.trajectory.steps[: side.num_steps])
        last = side.num_steps - 1
        if any(part.is_left_out and last in part.positions for part in conversations(env, kept)):
            detail = "its last reply is in a conversation beside the task, such as one for a title"
            return _rejection(side.stored.id, "side-conversation", detail)
    chosen_sample = _sample(SampleKind.CHOSEN, chosen, env)
    rejected_sample = _sample(SampleKind.REJECTED, rejected, env)
    if prompt_of(chosen_sample) != prompt_of(rejected_sample):
        detail = (
            f"its last conversation does not begin as that of {chosen.stored.id}; both sides of a pair have one prompt"
        )
        return _rejection(rejected.stored.id, "other-beginning", detail)
    return Preference(
        case=case,
        chosen=chosen_sample,
        rejected=rejected_sample,
        chosen_reward=chosen.stored.trajectory.reward,
        rejected_reward=rejected.stored.trajectory.reward,
        dropped=0 if case is PreferenceCase.STEP else len(rejected.stored.trajectory.steps) - rejected.num_steps,
    )


def _sample(kind: SampleKind, side: _Side, env: Environment) -> Sample:
    trajectory = side.stored.trajectory
    steps = trajectory.steps[: side.num_steps]
    train = [position >= side.num_shared for position in range(len(steps))]
    messages = transcript_of(env).sample(env, trajectory.first_observation, steps, train)
    return Sample(kind=kind, messages=messages, instance=trajectory.instance, provenance=side.provenance)


def _mean_reward(paths: Sequence[TreePath]) -> float:
    return sum(path.trajectory.reward for path in paths) / len(paths)


def _rejection(subject: str, reason: str, detail: str = "") -> Rejection:
    return Rejection(stage=STAGE, subject=subject, reason=reason, detail=detail)


# Preferences: compare the trajectories of an iteration, and store pairs of samples.


async def prefer(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Make and store the preferences of an iteration; return how many there are of each case, and
    how many trajectories and pairs were `rejected`.

    Raises:
        ConfigError: `eto.preferences.trees` matches no run, several runs, or one without finished
            trees of the recipe's environments; or `data.scoring` is unusable.
        DataFileError: the file of pairs is malformed.
        DataFault: training and test instances overlap.
    """
    await chosen_instances(ctx, iteration)
    with ctx.timed(STAGE, iteration):
        preferences, rejections = await run_in_thread(_make_preferences, ctx, iteration)
        iteration_id = ctx.iteration_id(iteration)
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
        replace_stage_output(ctx.store, rows, iteration_id=iteration_id, stage=STAGE, sample_kinds=sides)
    kinds = [str(preference.case) for preference in preferences]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))} | {"rejected": len(rejections)}


def check_pairs(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `DataFileError` if the recipe takes its pairs from a file and this is malformed."""
    if recipe.eto.preferences.source == "file":
        _pairs_from_file(recipe, env)


def _pairs_from_file(recipe: Recipe, env: Environment) -> PairingResult:
    world = World(env.name, recipe.environment.name)
    return read_pairs(pathlib.Path(recipe.eto.preferences.file), world=world, split=recipe.instances.train)


def _make_preferences(ctx: RunContext, iteration: int) -> PairingResult:
    config = ctx.recipe.eto.preferences
    with ctx.worlds() as worlds:
        if config.source == "file":
            pairing_result = _joined(_pairs_from_file(recipe, env) for recipe, env in worlds)
        else:
            pairing_result = (
                _pairs_from_trees(ctx, worlds)
                if config.source == "trees"
                else _pairs_from_episodes(ctx, iteration, worlds)
            )
    iteration_id = ctx.iteration_id(iteration)

    def with_iteration(sample: Sample) -> Sample:
        # Several iterations may use the same file or tree; their samples need different ids.
        provenance = replace(sample.provenance, extra={**sample.provenance.extra, "iteration": iteration_id})
        return replace(sample, provenance=provenance)

    stamped_preferences = [
        replace(p, chosen=with_iteration(p.chosen), rejected=with_iteration(p.rejected)) for p in pairing_result[0]
    ]
    unique_preferences, duplicates = distinct_preferences(stamped_preferences)
    preferences, over_cap = capped_preferences(unique_preferences, config.per_instance)
    return preferences, (*pairing_result[1], *duplicates, *over_cap)


def _pairs_from_episodes(ctx: RunContext, iteration: int, worlds: Worlds) -> PairingResult:
    config = ctx.recipe.eto.preferences
    plans = load_planned_rollouts(ctx.store, ctx.iteration_id(iteration))
    trajectories = load_trajectories(ctx.store, [plan.trajectory_id for plan in plans])
    scored_trajectories = rescored_trajectories(ctx, trajectories)
    failed_keys = set(failed_subjects(ctx.store, ctx.iteration_id(iteration), EXPLORE))
    episodes_by_instance: dict[str, list[StoredTrajectory]] = {}
    rejections: list[Rejection] = []
    for plan in plans:
        key = plan.trajectory_id
        episodes = episodes_by_instance.setdefault(plan.instance.key, [])
        if key in scored_trajectories:
            episodes.append(StoredTrajectory(key, scored_trajectories[key], num_forced=plan.num_forced_steps))
        else:
            reason, explanation = "not-played", "was not begun: the collection was limited, or interrupted"
            if plan.key in failed_keys:
                reason, explanation = "no-reward", "has no reward; table event has the error that ended it"
            if key in trajectories:
                reason, explanation = "no-grade", "has no grade by data.scoring: the reply about it is unreadable"
            detail = f"episode {plan.key} {explanation}"
            rejections.append(Rejection(stage=STAGE, subject=key, reason=reason, detail=detail))
    instances_by_key = {plan.instance.key: plan.instance for plan in plans}
    results: list[PairingResult] = [((), tuple(rejections))]
    if config.against == "own":
        results += [
            pair_of_own(episodes, worlds.env_of(instances_by_key[key]), config)
            for key, episodes in episodes_by_instance.items()
        ]
        return _joined(results)
    # `data.scoring` does not apply to the expert: each run plays the expert itself, so a scoring of
    # another run's episodes cannot contain these.
    experts = {
        expert.instance.key: StoredTrajectory(key, expert)
        for key, expert in best_expert_episodes(ctx, iteration).values()
    }
    for instance, episodes in episodes_by_instance.items():
        raise_if_cancelled()
        results.append(
            pairs_with_expert(experts.get(instance), episodes, worlds.env_of(instances_by_key[instance]), config)
        )
    return _joined(results)


def _pairs_from_trees(ctx: RunContext, worlds: Worlds) -> PairingResult:
    config = ctx.recipe.eto.preferences
    run_ids = find_runs(ctx.store, config.trees or ctx.run_id)
    if len(run_ids) != 1:
        matches = f"{len(run_ids)} runs of {ctx.root} begin" if run_ids else f"no run of {ctx.root} begins"
        raise ConfigError(f"eto.preferences.trees: {matches} with {config.trees!r}; `agentr runs` lists them all")
    tree_ids = finished_tree_ids_of_run(ctx.store, run_ids[0])
    if not tree_ids:
        raise ConfigError(f"eto.preferences.trees: run {run_ids[0]} has no finished tree; name a run of method agent-r")
    trees = load_trees(ctx.store, tree_ids)
    environment_names = [env.name for _, env in worlds]
    foreign_names = sorted({tree.instance.environment for tree in trees.values()} - {*environment_names})
    if foreign_names:
        raise ConfigError(
            f"eto.preferences.trees: run {run_ids[0]} has trees of {', '.join(foreign_names)}, and the recipe's "
            f"environment is {', '.join(environment_names)}"
        )
    if run_ids[0] != ctx.run_id:
        for key, tree in trees.items():
            nodes = (n if n.step is None else replace(n, step=without_foreign_tokens([n.step])[0]) for n in tree.nodes)
            trees[key] = replace(tree, nodes=tuple(nodes))
    paths = rescored_paths(ctx, trees, run_ids[0])
    return _joined(pairs_in_tree(paths[key], worlds.env_of(tree.instance), config, key) for key, tree in trees.items())


def _joined(results: Iterable[PairingResult]) -> PairingResult:
    results = list(results)
    preferences = tuple(preference for items, _ in results for preference in items)
    return preferences, tuple(rejection for _, items in results for rejection in items)
