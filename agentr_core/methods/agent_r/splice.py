"""Splicing: each judged pair becomes a revision sample or a rejection; good paths become samples
unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from agentr_core.environment import Environment
from agentr_core.episodes.rollout import steps_ask
from agentr_core.episodes.transcript import Fits
from agentr_core.errors import ConfigError
from agentr_core.evaluation.episodes import EpisodePlan
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.methods.agent_r.collect import finished_trees
from agentr_core.methods.agent_r.critique import pairs_of
from agentr_core.methods.agent_r.pairs import good_paths, pair_id
from agentr_core.methods.agent_r.splicing import (
    UNPLAYABLE,
    continued,
    good_sample,
    pair_stream,
    splice,
    turned_back,
    unplayable,
)
from agentr_core.models.checkpoint_dir import context_length_of
from agentr_core.recipes.fields import sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.episode_shard import play_rollouts, rollout_id
from agentr_core.runtime.equipment import Worlds
from agentr_core.runtime.place import Workplace
from agentr_core.samples.dataset import drops, split
from agentr_core.samples.identity import sample_id
from agentr_core.samples.rendering import load_renderer
from agentr_core.search.tree import leaf_paths
from agentr_core.store.codec.ledger import rejection_rows, store_anew
from agentr_core.store.codec.samples import sample_rows
from agentr_core.store.codec.trajectories import load_critiques, load_trajectories, trajectory_rows
from agentr_core.store.tables import Rows, merge
from agentr_core.system import check_wanted, in_thread
from agentr_core.types import Critique, Instance, Path, PathPair, Rejection, Sample, SampleKind, Step, Trajectory, Tree

# Continuation: after the revision turn the policy itself plays on, several times for each pair.

CONTINUE = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The continuation of a judged pair: its steps up to the revision turn, or why there are none,
    and its tries, by trajectory id.
    """

    begun: tuple[Step, ...] | Rejection
    tries: Mapping[str, Trajectory]


async def continuations(
    place: Workplace, iteration: int, pairs: Sequence[PathPair], critiques: Mapping[str, Critique], *, seed: int
) -> dict[str, Continued]:
    """Play the missing tries of judged pairs; return all judged pairs, by id.

    Args:
        critiques: by the id of their pair.
        seed: of the revision turns.

    Raises:
        ErrorBudgetSpent: more tries failed than the recipe allows; what was played is kept.
        WorkerLost: workers were lost again and again; what came back is kept.
    """
    config = place.recipe.splice.continuation
    judged = {pair_id(pair): pair for pair in pairs if pair_id(pair) in critiques}
    begun = await in_thread(_begun, place, judged, critiques, seed)
    iteration_id, collector = place.iteration_id(iteration), place.collector(iteration)
    # The pair id and the plan of each try, by trajectory id.
    wanted: dict[str, tuple[str, EpisodePlan]] = {}
    of_tree: defaultdict[str, count[int]] = defaultdict(count)
    for pair in pairs:
        # Numbered by tree, so that a tree that is grown later does not change them.
        key, index = pair_id(pair), next(of_tree[pair.bad.tree_id])
        prefix = begun.get(key)
        if prefix is None or isinstance(prefix, Rejection):
            continue
        for number in range(config.samples):
            plan = EpisodePlan(
                instance=pair.bad.trajectory.instance,
                # Pairs of an instance may be cut at the same length: numbers tell their episodes
                # apart.
                number=index * config.samples + number,
                seed=derive_seed(place.recipe.seed, CONTINUE, iteration, pair_stream(pair), number),
                prefix=prefix,
            )
            wanted[rollout_id(iteration_id, collector.id, plan)] = key, plan
    await play_rollouts(
        place,
        iteration,
        {key: plan for key, (_, plan) in wanted.items()},
        stage=CONTINUE,
        name="revision",
        sampling=sampling_of(config),
        max_steps=config.max_steps,
    )
    tries: dict[str, dict[str, Trajectory]] = {}
    for key, played in load_trajectories(place.store, list(wanted)).items():
        tries.setdefault(wanted[key][0], {})[key] = played
    return {key: Continued(begun=steps, tries=tries.get(key, {})) for key, steps in begun.items()}


def _begun(
    place: Workplace, pairs: Mapping[str, PathPair], critiques: Mapping[str, Critique], seed: int
) -> dict[str, tuple[Step, ...] | Rejection]:
    """Return, for each pair, its played steps up to the revision turn, or why there are none."""
    begun: dict[str, tuple[Step, ...] | Rejection] = {}
    with place.worlds() as worlds:
        for key, pair in pairs.items():
            check_wanted()
            env = worlds.of(pair.bad.trajectory.instance)
            try:
                begun[key] = turned_back(pair, critiques[key], env, place.recipe.splice, seed=seed)
            except UNPLAYABLE as error:
                begun[key] = unplayable(key, error)
    return begun


STAGE = "splice"
_Made = tuple[list[Rows], list[Rejection]]
"""The rows of samples, and the rejections."""


def check_models(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Raise `ConfigError` if splices are played to see their reward, and models that are not asked
    then decide about it, or about observations.
    """
    if recipe.splice.mode != "verified":
        return
    if steps_ask(env):
        raise ConfigError(
            f"splice.mode: steps of {env.name} ask a model, and none is asked when splices are played; set it to "
            "continued or blind"
        )
    if env.grader is not None and env.grader.asks is not None:
        raise ConfigError(
            f"splice.mode: in {env.name} a model of role {env.grader.asks} grades episodes, and it is not asked when "
            "splices are played; set it to continued or blind"
        )


async def splice_pairs(place: Workplace, iteration: int) -> dict[str, Any]:
    """Make the samples of an iteration from its pairs, critiques and good paths; return how many of
    each there are.

    In splice mode `continued` the policy first plays on from the revision turns. Raises as
    `continuations`.
    """
    trees = finished_trees(place, iteration)
    return await _make_samples(place, iteration, trees, pairs_of(place, iteration, trees))


async def keep_good_paths(place: Workplace, iteration: int) -> dict[str, Any]:
    """Make samples of an iteration's good paths only, without judging anything; return how many
    there are.
    """
    return await _make_samples(place, iteration, finished_trees(place, iteration), [])


async def _make_samples(
    place: Workplace, iteration: int, trees: dict[str, Tree], pairs: list[PathPair]
) -> dict[str, Any]:
    critiques = load_critiques(place.store, [pair_id(pair) for pair in pairs])
    seed = derive_seed(place.recipe.seed, "splice", iteration)
    played: dict[str, Continued] = {}
    if place.recipe.splice.mode == "continued":
        played = await continuations(place, iteration, pairs, critiques, seed=seed)
    fits = _fits(place, iteration)

    def make() -> tuple[_Made, _Made]:
        with place.worlds() as worlds:
            return (
                _spliced(place, worlds, pairs, critiques, played, iteration, fits, seed),
                _good(place, worlds, trees, iteration, fits),
            )

    with place.timed(STAGE, iteration):
        (revisions, unspliced), (good, unread) = await in_thread(make)
        rejections = [*unspliced, *unread]
        iteration_id = place.iteration_id(iteration)
        rows = merge([*revisions, *good, rejection_rows(rejections, iteration_id=iteration_id)])
        store_anew(place.store, rows, iteration_id=iteration_id, stage=STAGE, kinds=[SampleKind.REVISION])
    return {"revision": len(revisions), "good": len(good), "rejected": len(rejections)}


def _spliced(
    place: Workplace,
    worlds: Worlds,
    pairs: Sequence[PathPair],
    critiques: Mapping[str, Critique],
    played: Mapping[str, Continued],
    iteration: int,
    fits: Fits | None,
    seed: int,
) -> _Made:
    """Return the rows of revision samples of pairs, and the rejections."""
    rows: list[Rows] = []
    rejections: list[Rejection] = []
    iteration_id = place.iteration_id(iteration)
    for done, pair in enumerate(pairs, start=1):
        check_wanted()
        place.progress(done, len(pairs), "pairs spliced")
        key, env = pair_id(pair), worlds.of(pair.bad.trajectory.instance)
        try:
            made = _revisions(place, env, pair, critiques.get(key), played.get(key), iteration, seed)
        except UNPLAYABLE as error:
            made = unplayable(key, error)
        if isinstance(made, Rejection):
            rejections.append(made)
            continue
        for trajectory_id, whole in made:
            read = _as_read(place, whole, fits, key)
            if isinstance(read, Rejection):
                rejections.append(read)
                continue
            rows.extend(
                sample_rows(
                    sample_id(sample), sample, iteration_id=iteration_id, pair_id=key, trajectory_id=trajectory_id
                )
                for sample in read
            )
    return rows, rejections


def _good(place: Workplace, worlds: Worlds, trees: Mapping[str, Tree], iteration: int, fits: Fits | None) -> _Made:
    """Return the rows of good paths' samples, and the rejections."""
    alpha, rule = place.recipe.alpha(iteration), place.recipe.pairs.alpha_rule
    iteration_id = place.iteration_id(iteration)
    rows: list[Rows] = []
    rejections: list[Rejection] = []
    for key, tree in trees.items():
        for path in good_paths(leaf_paths(tree, key), alpha, rule):
            read = _good_samples(place, worlds.of(tree.instance), path, fits)
            if isinstance(read, Rejection):
                rejections.append(read)
            else:
                trajectory_id = fingerprint("path", path.tree_id, path.leaf)
                # The path is stored beside its samples, as a trajectory of its own.
                walked = trajectory_rows(
                    trajectory_id,
                    path.trajectory,
                    source="tree",
                    iteration_id=iteration_id,
                    tree_id=path.tree_id,
                    leaf=path.leaf,
                )
                rows += [
                    merge(
                        [
                            walked,
                            sample_rows(
                                sample_id(sample), sample, iteration_id=iteration_id, trajectory_id=trajectory_id
                            ),
                        ]
                    )
                    for sample in read
                ]
    return rows, rejections


def _fits(place: Workplace, iteration: int) -> Fits | None:
    """Return a test for whether a prompt leaves the policy room for a reply; None if the recipe has
    no window.
    """
    recipe = place.recipe
    if recipe.context == "stop":
        return None
    path = place.policy(iteration).path
    renderer = load_renderer(path, at=place.started_at())
    context = context_length_of(path, recipe.model.context_length)
    continued = recipe.splice.mode == "continued"
    room = recipe.splice.continuation.max_new_tokens if continued else recipe.search.max_new_tokens
    return lambda messages: len(renderer.render_prompt(messages)) + room <= context


def _as_read(place: Workplace, sample: Sample, fits: Fits | None, subject: str) -> tuple[Sample, ...] | Rejection:
    """Return a splice as a policy with a window would read it: its turns were not sampled in
    sequence, so what the window leaves out is computed here.
    """
    if fits is None:
        return (sample,)
    return split(sample, drops(sample.messages, fits), place.recipe.data.windowed, stage=STAGE, subject=subject)


def _good_samples(place: Workplace, env: Environment, path: Path, fits: Fits | None) -> tuple[Sample, ...] | Rejection:
    """Return the samples of a good path: windowed as when its replies were drawn or, if it was
    pruned, as `_as_read` does.
    """
    prune = place.recipe.splice.prune
    subject = f"{path.tree_id}:{path.leaf}"
    try:
        sample = good_sample(path, env, prune=prune)
    except UNPLAYABLE as error:
        return unplayable(subject, error)
    if prune:
        return _as_read(place, sample, fits, subject)
    dropped = [step.dropped for step in path.trajectory.steps]
    return split(sample, dropped, place.recipe.data.windowed, stage=STAGE, subject=subject)


def _revisions(
    place: Workplace,
    env: Environment,
    pair: PathPair,
    critique: Critique | None,
    played: Continued | None,
    iteration: int,
    seed: int,
) -> list[tuple[str | None, Sample]] | Rejection:
    """Return the revision samples of a pair, each with the id of its own trajectory if it has
    one.
    """
    config, alpha, rule = place.recipe.splice, place.recipe.alpha(iteration), place.recipe.pairs.alpha_rule
    if critique is None and config.mode != "direct":
        detail = "judging its tree failed; table event has the error"
        return Rejection(stage=STAGE, subject=pair_id(pair), reason="not-judged", detail=detail)
    if played is not None:
        if isinstance(played.begun, Rejection):
            return played.begun
        samples = continued(pair, critique, played.begun, played.tries, env, config, alpha=alpha, rule=rule, seed=seed)
        return samples if isinstance(samples, Rejection) else list(samples.items())
    made = splice(pair, critique, env, config, alpha=alpha, rule=rule, seed=seed)
    return made if isinstance(made, Rejection) else [(None, made)]
