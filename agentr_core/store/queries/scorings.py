"""Scorings of stored episodes: the episodes to score, their new rewards, and old and new scores
side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentr_core.store.database import Store
from agentr_core.store.tables import Regrade, load_records

SCORING_SQL = "select * from v_regrades where scoring_id = '{}' order by run_id, iteration, episodes_of, instance_id"
"""The query with which a user lists the episodes of a scoring; `{}` stands for its id."""


class ScoreComparison(NamedTuple):
    """Old and new scores of the episodes of one kind in one iteration; see view `v_scorings`."""

    iteration: int | None
    episodes_of: str
    episodes: int
    success: float | None
    new_success: float | None
    reward: float | None
    new_reward: float | None
    won: int
    lost: int
    up: int
    down: int
    unreadable: int


class ScoringHead(NamedTuple):
    """A scoring of episodes of a run; `settings` is JSON."""

    scoring_id: str
    grader: str
    settings: str
    run_id: str


class EpisodeRescore(NamedTuple):
    """The result of a scoring for one episode; see view `v_regrades`."""

    scoring_id: str
    grader: str
    reward: float
    new_reward: float | None
    change: str
    reply: str | None


class ScoreChange(NamedTuple):
    """An episode or path of a tree whose score a scoring has changed; see view `v_regrades`."""

    trajectory_id: str | None
    tree_id: str | None
    leaf: int | None
    instance_id: str
    reward: float
    new_reward: float | None
    change: str
    reply: str | None


def scorable_episodes(
    store: Store, run_id: str, *, evaluations: bool | None = None, iteration: int | None = None
) -> dict[str, str]:
    """Return the finished episodes of a run that can be scored: the id of the original by the id of
    the episode. The two differ if the episode was copied from another run.

    Paths of search trees are no episodes; episodes whose grade is still missing are left out.

    Args:
        evaluations: True: only those of evaluations; False: only the others; None: all.
        iteration: only those of this iteration; None: of all.
    """
    return dict(store.rows(_SCORABLE, run_id, evaluations, iteration))


def scorable_leaves(store: Store, run_id: str, iteration: int | None = None) -> list[tuple[str, int]]:
    """Return the leaves of a run's finished trees, as pairs of tree id and index of the node,
    sorted. The id of a tree that was copied is that of the original.

    Args:
        iteration: only those of trees of this iteration; None: of all.
    """
    return store.rows(_SCORABLE_LEAVES, run_id, iteration)


def load_regrades(store: Store, scoring_id: str, trajectory_ids: Sequence[str]) -> dict[str, Regrade]:
    """Return the grades of trajectories in a scoring, by trajectory id; trajectories without one
    are left out. A copy of an episode has the grade of the original.
    """
    if not store.path.exists():
        return {}
    originals = dict(store.rows(_ORIGINALS, list(trajectory_ids)))
    with store.reading() as con:
        condition = "scoring_id = ? and trajectory_id in (select unnest(?::varchar[]))"
        params = [scoring_id, list(set(originals.values()))]
        regrades = dict(load_records(con, "regrade", condition, params, extra_columns=("trajectory_id",)))
    return {key: regrades[originals[key]] for key in trajectory_ids if originals.get(key) in regrades}


def load_leaf_regrades(store: Store, scoring_id: str, tree_ids: Sequence[str]) -> dict[str, dict[int, Regrade]]:
    """Return the grades of paths of trees in a scoring, by tree id and leaf; paths without one are
    left out. A copy of a tree has the grades of the original.
    """
    if not store.path.exists():
        return {}
    originals = dict(store.rows(_ORIGINAL_TREES, list(tree_ids)))
    grades: dict[str, dict[int, Regrade]] = {}
    with store.reading() as con:
        condition = "scoring_id = ? and tree_id in (select unnest(?::varchar[]))"
        params = [scoring_id, list(set(originals.values()))]
        for tree_id, leaf, regrade in load_records(
            con, "leaf_regrade", condition, params, extra_columns=("tree_id", "leaf")
        ):
            grades.setdefault(tree_id, {})[leaf] = regrade
    return {key: grades.get(original, {}) for key, original in originals.items()}


def score_comparisons(store: Store, scoring_id: str, run_id: str) -> list[ScoreComparison]:
    """Return old and new scores of the episodes of a run, by iteration and kind."""
    return [ScoreComparison(*row) for row in store.rows(_SIDE_BY_SIDE, scoring_id, run_id)]


def comparisons_by_scoring(store: Store, run_id: str = "") -> dict[ScoringHead, list[ScoreComparison]]:
    """Return the scorings of the episodes of a run, or of all runs, the earliest first, each with
    old and new scores.
    """
    comparisons: dict[ScoringHead, list[ScoreComparison]] = {}
    # A quick check first: few workspaces have scorings, but pages of all of them ask.
    for row in store.rows(_SCORINGS, run_id) if store.rows("select 1 from scoring limit 1") else ():
        comparisons.setdefault(ScoringHead(*row[:4]), []).append(ScoreComparison(*row[4:]))
    return comparisons


def episode_rescores(store: Store, trajectory_id: str) -> list[EpisodeRescore]:
    """Return the results of all scorings for a trajectory, the earliest scoring first."""
    if not store.rows("select 1 from scoring limit 1"):
        return []
    return [EpisodeRescore(*row) for row in store.rows(_RESCORED, trajectory_id)]


def score_changes(store: Store, scoring_id: str, run_id: str, limit: int) -> list[ScoreChange]:
    """Return at most `limit` episodes and paths of trees of a run whose score has changed or cannot
    be read: first changed successes, then changed rewards, each by the size of the change, then
    unreadable ones.
    """
    return [ScoreChange(*row) for row in store.rows(_CHANGED, scoring_id, run_id, limit)]


_SCORABLE = """
select t.trajectory_id, coalesce(t.copied_from, t.trajectory_id)
from trajectory t left join evaluation e using (evaluation_id)
join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)
where i.run_id = $1 and t.source not in ('tree', 'splice', 'ungraded', 'bare')
    and ($2::boolean is null or (t.evaluation_id is not null) = $2) and ($3::bigint is null or i.iteration = $3)
order by i.iteration, t.instance_id, t.trajectory_id
"""
_SCORABLE_LEAVES = """
select distinct coalesce(t.copied_from, t.tree_id) as tree_id, n.node_index
from tree t join iteration i using (iteration_id) join node n using (tree_id)
where i.run_id = $1 and t.finished and n.stop is not null and n.step is not null
    and ($2::bigint is null or i.iteration = $2)
order by all
"""
_ORIGINAL_TREES = """
select tree_id, coalesce(copied_from, tree_id) from tree where tree_id in (select unnest(?::varchar[]))
"""
_ORIGINALS = """
select trajectory_id, coalesce(copied_from, trajectory_id) from trajectory
where trajectory_id in (select unnest(?::varchar[]))
"""
_SCORED = (
    "v.iteration, v.episodes_of, v.episodes, v.success, v.new_success, v.reward, v.new_reward, v.won, v.lost, v.up, "
    "v.down, v.unreadable"
)
_SIDE_BY_SIDE = f"""
select {_SCORED} from v_scorings v where scoring_id = ? and run_id = ? order by iteration, episodes_of
"""
_SCORINGS = f"""
select v.scoring_id, v.grader, s.settings::varchar, v.run_id, {_SCORED}
from v_scorings v join scoring s using (scoring_id)
where $1 in ('', v.run_id) order by s.created_at, v.scoring_id, v.run_id, v.iteration, v.episodes_of
"""
_RESCORED = """
select scoring_id, grader, reward, new_reward, change, reply from v_regrades r
where trajectory_id = ? order by (select created_at from scoring s where s.scoring_id = r.scoring_id), scoring_id
"""
_CHANGED = """
select trajectory_id, tree_id, leaf, instance_id, reward, new_reward, change, reply from v_regrades
where scoring_id = ? and run_id = ? and change <> 'same'
order by case change when 'won' then 0 when 'lost' then 0 when 'unreadable' then 2 else 1 end,
    abs(new_reward - reward) desc, iteration, instance_id, trajectory_id, tree_id, leaf
limit ?
"""
