"""Score the replies of another system, next to the episodes of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from agentr_core.environment import Environment
from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import no_helper
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.exchange.imports import Demonstration, read_demonstrations
from agentr_core.recipes.environments import TEST
from agentr_core.recipes.recipe import Recipe
from agentr_core.reports import wording
from agentr_core.reports.document import Column, Row, Table
from agentr_core.reports.model_card import table_text
from agentr_core.samples.chat_file import World
from agentr_core.stages.demonstrate import replay_replies
from agentr_core.stages.evaluate import gain, measure
from agentr_core.stages.report import finite_estimate, report_estimate
from agentr_core.store.codec.trajectories import Episode, load_episodes
from agentr_core.store.queries.datasets import finished_evaluations
from agentr_core.types import Instance, Trajectory
from tasks.wiring import load_recipe, make_environment, run_reference
from tasks.workspaces import open_store


def score_answers(path: Path, overrides: Sequence[str], answers: Path, *, opening: int) -> str:
    """Replay the replies in a file on the held-out instances of a recipe; return a table of their
    scores, followed by those of each evaluated model of the recipe's run on the same instances.

    An instance may have several episodes; each ends with its last reply, or at the step limit of
    the evaluation. Nothing is stored.

    Args:
        opening: the number of turns of each record before the one with the problem.

    Raises:
        ConfigError: the recipe is wrong, of several worlds, or of one whose rewards a model gives.
        DataFileError: the file is malformed, has no record, or has instances that are not held out.
    """
    recipe = load_recipe(path, list(overrides))
    if recipe.environments:
        raise ConfigError("--answers are of one world; give a recipe of that world alone")
    episodes = _episodes(recipe, answers, opening)
    if not episodes:
        raise DataFileError(f"{answers} has no record; there must be an object on each line, or one array of them")
    columns = (
        Column("Episodes of", "text"),
        Column("Success %"),
        Column("95% interval", "text"),
        Column("Reward"),
        Column(f"{answers.name} against it", "text"),
        Column("Episodes"),
    )
    evaluations = {answers.name: episodes, **dict(_episodes_of_run(recipe, {episode.instance for episode in episodes}))}
    disaster_reward = recipe.evaluation.disaster_counts
    rows = (
        _row(name, evaluation, episodes if evaluation is not episodes else (), disaster_reward)
        for name, evaluation in evaluations.items()
    )
    return table_text(Table(columns, tuple(rows)))


def _episodes(recipe: Recipe, answers: Path, opening: int) -> list[Episode]:
    env = make_environment(recipe)
    try:
        world = World(env.name, recipe.environment.name)
        by_instance = read_demonstrations(
            answers, world=world, split=recipe.instances.test, opening=opening, setting="--answers"
        )
        held_out = frozenset(env.instances(recipe.instances.test))
        for demonstration in chain.from_iterable(by_instance.values()):
            _check_held_out(demonstration, held_out, recipe)
        limit = recipe.evaluation.max_steps
        return [
            Episode(
                trajectory_id="",
                instance=demonstration.instance,
                repeat=number,
                cut=0,
                trajectory=_grade(env, replay_replies(env, demonstration.instance, demonstration.replies[:limit])),
                depth=env.depth(demonstration.instance),
                origin=demonstration.instance.key,
            )
            for group in by_instance.values()
            for number, demonstration in enumerate(group)
        ]
    finally:
        env.close()


def _grade(env: Environment, trajectory: Trajectory) -> Trajectory:
    """Return an episode with the reward of its environment's grader. Raises `ConfigError` if a
    model would have to give it.
    """
    result, _ = asyncio.run(grade_episode(env, trajectory, no_helper, seed=0))
    return result


def _check_held_out(demonstration: Demonstration, held_out: frozenset[Instance], recipe: Recipe) -> None:
    if demonstration.instance not in held_out:
        raise DataFileError(
            f"{demonstration.where}: {demonstration.instance.key} is no instance of split {recipe.instances.test}, "
            "which the recipe holds out; leave it out"
        )


def _episodes_of_run(recipe: Recipe, instances: set[Instance]) -> Iterable[tuple[str, list[Episode]]]:
    """Yield the name of each model of a recipe's run that was evaluated on all given instances, and
    its episodes on them.
    """
    store = open_store(Path(recipe.workspace))
    for evaluation in finished_evaluations(store, run_reference(recipe).run_id, after=-1):
        if evaluation.name == TEST:
            episodes = [
                episode for episode in load_episodes(store, evaluation.evaluation_id) if episode.instance in instances
            ]
            if {episode.instance for episode in episodes} == instances:
                yield wording.iteration_name(evaluation.iteration), episodes


def _row(name: str, episodes: Sequence[Episode], answers: Sequence[Episode], disaster_counts: float) -> Row:
    measures = measure(episodes, disaster_counts=disaster_counts)
    success = report_estimate(measures["success"])
    against = wording.NOTHING
    if answers:
        difference = gain(answers, episodes)
        interval = finite_estimate(difference)
        against = wording.points(difference.mean) + (f" ({wording.points_interval(interval)})" if interval else "")
    cells = (wording.percent(success.value), wording.interval(success), f"{measures['reward'].mean:.3f}", against)
    return Row((name, *cells, wording.count(len(episodes))))
