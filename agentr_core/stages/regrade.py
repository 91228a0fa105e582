"""Stored episodes, scored again by another grader, or by the world as it is now; no model plays
them.

The new rewards are rows beside the old ones, which stay (tables `scoring`, `regrade` and
`leaf_regrade`). What was scored is not scored again: the id of a scoring is a hash of all that
determines its rewards.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentr_core.environment import Environment, Repeatability
from agentr_core.episodes.grading import UnreadableGrade, grade, regrade_episode
from agentr_core.episodes.rollout import EnvironmentPool
from agentr_core.episodes.units import UnitError, run_all
from agentr_core.errors import ConfigError
from agentr_core.fingerprint import fingerprint
from agentr_core.protocols import Grader
from agentr_core.runtime.context import RunContext, helpers
from agentr_core.runtime.equipment import model_identity
from agentr_core.runtime.start import content_hash, world_paths
from agentr_core.search.tree import leaf_paths
from agentr_core.store.codec.trajectories import load_trajectories, load_trees
from agentr_core.store.database import Store, Writer
from agentr_core.store.queries.scorings import load_leaf_regrades, load_regrades, scorable_episodes, scorable_leaves
from agentr_core.store.tables import Regrade, Rows, row_of
from agentr_core.types import Trajectory, Tree, TreePath

STAGE = "regrade"
_CONCURRENCY = 16
_BATCH_SIZE = 1000
"""The most episodes, or paths of trees, in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A way of scoring episodes: `grader`, or the world itself where that is None.

    `settings` are plain data: all that determines the rewards.
    """

    name: str
    settings: Mapping[str, Any]
    grader: Grader | None

    # The run is no part of it: copies of these episodes in later runs share their scores, and a
    # recipe names the scoring in data.scoring.
    @property
    def id(self) -> str:
        """The id, which is that of an equal scoring in any run."""
        return fingerprint("scoring", self.name, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringResult:
    """The numbers of episodes and of paths of trees that a scoring covers, how many of both were
    newly scored, and the errors because of which others have no score.
    """

    episodes: int
    paths: int
    new: int
    faults: Sequence[str]


class _Scorable(NamedTuple):
    """An episode or path of a tree to score; `columns` are those of its row in `table` apart from
    the scoring and its result.
    """

    table: str
    columns: Mapping[str, Any]
    trajectory: Trajectory


def world_scoring(ctx: RunContext) -> Scoring:
    """Return the scoring by a recipe's worlds as they are installed now.

    Raises `ConfigError` for a world that has no grader and cannot replay its episodes, and
    `DataFileError` if one of its files cannot be read.
    """
    worlds: dict[str, Any] = {}
    with ctx.worlds() as open_worlds:
        for recipe, env in open_worlds:
            options = recipe.environment.options
            unrepeatable = Repeatability(env.repeatability) is Repeatability.NEVER or env.has(Environment.relay)
            if env.grader is None and unrepeatable:
                raise ConfigError(f"world {env.name} does not repeat itself, so it cannot score again; choose another")
            worlds[env.name] = {
                "name": recipe.environment.name,
                "options": options,
                "version": env.version_of(options),
                "asks": model_settings(ctx, env.grader.asks) if env.grader and env.grader.asks else None,
            }
    files = {name: content_hash(pathlib.Path(path), ctx.recipe) for name, path in world_paths(ctx.recipe).items()}
    return Scoring(name="world", settings={"worlds": worlds, "files": files}, grader=None)


def model_settings(ctx: RunContext, role: Any) -> dict[str, str]:
    """Return the model that a recipe has for a role (`role`, `model`, `identity`), for the settings
    of a scoring. Raises `ModelDirectoryError` for unsound weights.
    """
    model = ctx.recipe.model_of(role)
    return {"role": role, "model": model.label, "identity": model_identity(model)}


async def regrade(
    ctx: RunContext, scoring: Scoring, *, evaluations: bool | None = None, iteration: int | None = None
) -> ScoringResult:
    """Score the episodes of a run, and the paths of its search trees, that a scoring has not scored
    yet, and store their new rewards.

    Where the grader fails there is no reward: the failure is stored as an event, and the next call
    tries again. A reply without a readable grade is stored as it is.

    Args:
        evaluations: True: only the episodes of evaluations; False: only others, and paths of trees;
            None: all.
        iteration: only what was played in this iteration; None: in all.

    Raises:
        ConfigError: there is nothing to score.
        ErrorBudgetSpent: the grader fails more often than the recipe allows.
    """
    episodes = scorable_episodes(ctx.store, ctx.run_id, evaluations=evaluations, iteration=iteration)
    leaves = [] if evaluations else scorable_leaves(ctx.store, ctx.run_id, iteration)
    originals = list(dict.fromkeys(episodes.values()))
    total = len(originals) + len(leaves)
    if not total:
        raise ConfigError(
            f"run {ctx.run_id} has no such episodes and no search trees; `select * from v_episodes` and v_trees list "
            "what it has"
        )
    regrades = load_regrades(ctx.store, scoring.id, originals)
    unscored_ids = [key for key in originals if key not in regrades]
    stored_leaves = load_leaf_regrades(ctx.store, scoring.id, list(dict(leaves)))
    unscored_leaves = [(tree_id, leaf) for tree_id, leaf in leaves if leaf not in stored_leaves[tree_id]]
    count = num_stored = total - len(unscored_ids) - len(unscored_leaves)
    settings = json.dumps(scoring.settings, sort_keys=True)
    ctx.store.write({"scoring": [{"scoring_id": scoring.id, "grader": scoring.name, "settings": settings}]})
    faults: list[str] = []
    with closing(EnvironmentPool(lambda name: ctx.make_environment(ctx.recipe.world_name(name)))) as pool:
        async with Writer(ctx.store) as sink, helpers(ctx, ctx.trained_checkpoint(0).path, None, sink) as roles:
            store_event = ctx.on_error(sink, STAGE, 0)

            async def score(entry: _Scorable) -> Rows:
                await sink.room()
                trajectory = entry.trajectory
                try:
                    if scoring.grader is not None:
                        grading = await grade(scoring.grader, trajectory, roles.ask, seed=ctx.recipe.seed)
                    else:
                        async with pool.lend(trajectory.instance) as env:
                            grading = await regrade_episode(env, trajectory, roles.ask, seed=ctx.recipe.seed)
                    result = Regrade(reward=grading.grade.reward, success=grading.grade.success, answer=grading.answer)
                except UnreadableGrade as unreadable:
                    result = Regrade(reward=None, success=None, answer=unreadable.answer)
                return {entry.table: [row_of(entry.table, result, scoring_id=scoring.id, **entry.columns)]}

            def on_error(error: UnitError) -> None:
                store_event(error)
                if error.is_final:
                    faults.append(f"{error.kind}: {error.message}")

            def on_result(key: str, row: Rows) -> None:
                nonlocal count
                count += 1
                sink.add(row)
                ctx.progress(count, total, f"episodes scored by {scoring.name}")

            for batch in _load_batches(ctx.store, unscored_ids, unscored_leaves):
                await run_all(
                    list(batch.items()),
                    lambda item: score(item[1]),
                    key=lambda item: item[0],
                    errors=ctx.recipe.errors,
                    on_error=on_error,
                    on_result=on_result,
                    concurrency=_CONCURRENCY,
                )
    return ScoringResult(episodes=len(originals), paths=len(leaves), new=count - num_stored, faults=faults)


def _load_batches(
    store: Store, trajectory_ids: Sequence[str], leaves: Sequence[tuple[str, int]]
) -> Iterator[dict[str, _Scorable]]:
    """Yield batches of at most `_BATCH_SIZE` trajectories, then of paths of trees, by the names
    under which events refer to them.
    """
    for start in range(0, len(trajectory_ids), _BATCH_SIZE):
        trajectories = load_trajectories(store, trajectory_ids[start : start + _BATCH_SIZE])
        yield {key: _Scorable("regrade", {"trajectory_id": key}, episode) for key, episode in trajectories.items()}
    for start in range(0, len(leaves), _BATCH_SIZE):
        chunk = set(leaves[start : start + _BATCH_SIZE])
        trees = load_trees(store, sorted({tree_id for tree_id, _ in chunk}))
        yield {
            f"{path.tree_id}:{path.leaf}": _Scorable(
                "leaf_regrade",
                {
                    "tree_id": path.tree_id,
                    "leaf": path.leaf,
                    "old_reward": path.trajectory.reward,
                    "old_success": path.trajectory.success,
                },
                path.trajectory,
            )
            for tree_id, tree in trees.items()
            for path in leaf_paths(tree, tree_id)
            if (path.tree_id, path.leaf) in chunk
        }


def check_scoring(ctx: RunContext) -> None:
    """Raise `ConfigError` if the recipe's `data.scoring` names a scoring that does not exist."""
    scoring = ctx.recipe.data.scoring
    if scoring and ctx.store.missing("scoring", [scoring]):
        raise ConfigError(
            f"data.scoring: there is no scoring {scoring}; `select * from v_scorings` lists those there are"
        )


def rescored_trajectories(ctx: RunContext, trajectories: Mapping[str, Trajectory]) -> dict[str, Trajectory]:
    """Return trajectories, by id, with the rewards that the recipe's `data.scoring` gives them;
    unchanged if it names none. Those whose grade is unreadable are left out.

    Raises `ConfigError` if the scoring does not exist, or has not scored one of the trajectories.
    """
    scoring = ctx.recipe.data.scoring
    if not scoring:
        return dict(trajectories)
    check_scoring(ctx)
    regrades = load_regrades(ctx.store, scoring, list(trajectories))
    if missing := len(trajectories) - len(regrades):
        raise _missing_scores_error(scoring, ctx.run_id, f"{missing} of {len(trajectories)} episodes have")
    return {
        key: rescored
        for key, trajectory in trajectories.items()
        if (rescored := _with_new_reward(trajectory, regrades[key]))
    }


def rescored_paths(ctx: RunContext, trees: Mapping[str, Tree], run_id: str = "") -> dict[str, tuple[TreePath, ...]]:
    """Return the paths of trees to their leaves, by tree id, with the rewards that the recipe's
    `data.scoring` gives them; unchanged if it names none. Those whose grade is unreadable are left
    out.

    Args:
        run_id: the run that has the trees; by default this one.

    Raises as `rescored_trajectories`.
    """
    paths = {key: leaf_paths(tree, key) for key, tree in trees.items()}
    scoring = ctx.recipe.data.scoring
    if not scoring:
        return paths
    check_scoring(ctx)
    regrades = load_leaf_regrades(ctx.store, scoring, list(trees))
    if missing := sum(path.leaf not in regrades[key] for key, tree_paths in paths.items() for path in tree_paths):
        total = sum(map(len, paths.values()))
        raise _missing_scores_error(scoring, run_id or ctx.run_id, f"{missing} of {total} paths of trees have")
    return {
        key: tuple(
            dataclasses.replace(path, trajectory=rescored)
            for path in tree_paths
            if (rescored := _with_new_reward(path.trajectory, regrades[key][path.leaf]))
        )
        for key, tree_paths in paths.items()
    }


def _missing_scores_error(scoring: str, run_id: str, subject: str) -> ConfigError:
    return ConfigError(
        f"data.scoring: {subject} no score of scoring {scoring}; `agentr regrade {run_id}` by the same grader gives "
        "them; then run again"
    )


def _with_new_reward(trajectory: Trajectory, regrade: Regrade) -> Trajectory | None:
    """Return a trajectory with its new reward and success; None if the new grade is unreadable."""
    if regrade.reward is None:
        return None
    return dataclasses.replace(trajectory, reward=regrade.reward, success=bool(regrade.success))
