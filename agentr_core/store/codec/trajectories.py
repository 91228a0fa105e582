"""Trajectories, and the episodes of an evaluation, to rows and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from agentr_core.store.codec.calls import call_rows, grade_rows, load_calls
from agentr_core.store.codec.generations import TOKENS_ONLY, Draw, draw_row, has_tokens, step_tokens
from agentr_core.store.codec.steps import COLUMNS, read_step, step_columns
from agentr_core.store.codec.texts import instance_row, text_id, text_rows
from agentr_core.store.database import Store
from agentr_core.store.snapshot import snapshot
from agentr_core.store.tables import Row, Rows, merge
from agentr_core.types import Grading, Instance, Step, StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode of an evaluation: number `repeat` of its instance, after `cut` replayed steps."""

    trajectory_id: str
    instance: Instance
    repeat: int
    cut: int
    trajectory: Trajectory
    depth: int | None = None
    origin: str = ""
    """The instance that its instance is a variant of, or that instance itself."""


def trajectory_rows(
    trajectory_id: str,
    trajectory: Trajectory,
    *,
    source: str,
    iteration_id: str | None = None,
    evaluation_id: str | None = None,
    tree_id: str | None = None,
    leaf: int | None = None,
    draws: Mapping[int, Draw] | None = None,
    grading: Grading | None = None,
    given: int = 0,
) -> Rows:
    """Return the rows of a trajectory; they are one unit.

    Args:
        source: where it comes from: tree, rollout, episode, splice, expert, or a word chosen by the
            method that made it.
        tree_id, leaf: the tree and the last node, if it is a path of a tree.
        draws: the draws that the replies come from, by step position.
        grading: the grade of a trajectory whose reward a grader gave.
        given: how many of its first steps were recorded earlier; their calls were not made again.
    """
    replies_from = draws or {}
    rows: Rows = {
        "instance": [instance_row(trajectory.instance)],
        "text": text_rows(_texts(trajectory)),
        "trajectory": [
            {
                **_trajectory_row(trajectory_id, trajectory),
                "source": source,
                "iteration_id": iteration_id,
                "evaluation_id": evaluation_id,
                "tree_id": tree_id,
                "leaf": leaf,
            }
        ],
        "step": [
            _step_row(trajectory_id, position, step, replies_from.get(position))
            for position, step in enumerate(trajectory.steps)
        ],
        "generation": [
            row
            for position, step in enumerate(trajectory.steps)
            for row in _generation_rows(trajectory_id, position, step, replies_from.get(position))
        ],
    }
    calls = call_rows("step", trajectory_id, enumerate(trajectory.steps), given=given)
    graded = grade_rows("step", trajectory_id, len(trajectory.steps) - 1, grading) if grading else {}
    return merge([rows, calls, graded])


def episode_rows(
    trajectory_id: str,
    trajectory: Trajectory,
    *,
    evaluation_id: str,
    iteration_id: str,
    repeat: int = 0,
    cut: int = 0,
    invalid_actions: int | None = None,
    environment_seconds: float | None = None,
    sampling_seconds: float | None = None,
    draws: Mapping[int, Draw] | None = None,
    grading: Grading | None = None,
) -> Rows:
    """Return the rows of one episode of an evaluation with its trajectory; they are one unit.

    `repeat` is its number among the episodes of its instance, in a revision test that of the failed
    episode; `cut` is how many steps were replayed before the model took over.
    """
    episode = {
        "evaluation_id": evaluation_id,
        "instance_id": trajectory.instance.key,
        "repeat": repeat,
        "cut": cut,
        "trajectory_id": trajectory_id,
        "invalid_actions": invalid_actions,
        "environment_seconds": environment_seconds,
        "sampling_seconds": sampling_seconds,
    }
    steps = trajectory_rows(
        trajectory_id,
        trajectory,
        source="episode",
        iteration_id=iteration_id,
        evaluation_id=evaluation_id,
        draws=draws,
        grading=grading,
        given=cut,
    )
    return merge([steps, {"episode": [episode]}])


def load_trajectories(
    store: Store,
    ids: Sequence[str] | None = None,
    *,
    iteration_id: str | None = None,
    source: str | None = None,
) -> dict[str, Trajectory]:
    """Return stored trajectories by id: those of the given ids in their order, or those of an
    iteration and a source sorted by id.
    """
    if not store.path.exists():
        return {}
    chosen = {"ids": None if ids is None else list(ids), "iteration_id": iteration_id, "source": source}
    with store.reading() as con:
        heads = con.execute(_TRAJECTORIES, chosen).fetchall()
        records = con.execute(_STEPS, chosen).fetchall()
        calls = load_calls(con, "step", [key for key, *_ in heads])
    steps = {
        key: tuple(read_step(record[1:], calls.get((key, position), {})) for position, record in enumerate(group))
        for key, group in groupby(records, key=itemgetter(0))
    }
    found = {
        key: Trajectory(
            instance=Instance(environment=environment, split=split, index=index),
            first_observation=first_observation,
            steps=steps.get(key, ()),
            reward=reward,
            success=success,
            stop=StopReason(stop),
        )
        for key, environment, split, index, first_observation, reward, success, stop in heads
    }
    return found if ids is None else {key: found[key] for key in ids if key in found}


def load_episodes(store: Store, evaluation_id: str) -> list[Episode]:
    """Return the episodes of an evaluation that are stored, by instance, repeat and cut."""
    if not store.path.exists():
        return []
    with snapshot(store) as state:
        rows = state.rows(_EPISODES, evaluation_id)
        trajectories = load_trajectories(state, [row[0] for row in rows]) if rows else {}
    return [
        Episode(
            trajectory_id=key,
            instance=trajectories[key].instance,
            repeat=repeat,
            cut=cut,
            trajectory=trajectories[key],
            depth=depth,
            origin=origin,
        )
        for key, repeat, cut, depth, origin in rows
    ]


def _texts(trajectory: Trajectory) -> list[str]:
    said = (text for step in trajectory.steps for text in (step.reply, step.observation))
    return [trajectory.first_observation, *said]


def _trajectory_row(trajectory_id: str, trajectory: Trajectory) -> Row:
    return {
        "trajectory_id": trajectory_id,
        "instance_id": trajectory.instance.key,
        "first_observation_id": text_id(trajectory.first_observation),
        "reward": float(trajectory.reward),
        "success": trajectory.success,
        "stop": str(trajectory.stop),
        "num_steps": len(trajectory.steps),
    }


def _generation_rows(trajectory_id: str, position: int, step: Step, draw: Draw | None) -> Iterable[Row]:
    if draw is None:
        return step_tokens("step", trajectory_id, position, step)
    return [draw_row("step", trajectory_id, position, draw)]


def _step_row(trajectory_id: str, position: int, step: Step, draw: Draw | None) -> Row:
    number = TOKENS_ONLY if has_tokens(step) else None
    return {
        "trajectory_id": trajectory_id,
        "position": position,
        **step_columns(step),
        "draw": number if draw is None else draw.number,
    }


_EPISODES = """
    select e.trajectory_id, e.repeat, e.cut, i.depth, coalesce(i.origin_id, i.instance_id)
    from episode e join instance i using (instance_id)
    where e.evaluation_id = ?
    order by i.environment, i.split, i.instance_index, e.repeat, e.cut
"""

_CHOSEN = """
($ids::varchar[] is null or t.trajectory_id in (select unnest($ids::varchar[])))
    and ($iteration_id::varchar is null or t.iteration_id = $iteration_id)
    and ($source::varchar is null or t.source = $source)
"""
_TRAJECTORIES = f"""
select t.trajectory_id, i.environment, i.split, i.instance_index, o.text, t.reward, t.success, t.stop
from trajectory t
join instance i using (instance_id)
join text o on o.text_id = t.first_observation_id
where {_CHOSEN}
order by t.trajectory_id
"""
_STEPS = f"""
select s.trajectory_id, {COLUMNS}
from step s
join trajectory t using (trajectory_id)
join text r on r.text_id = s.reply_id
join text o on o.text_id = s.observation_id
left join generation g
    on g.kind = 'step' and g.owner_id = s.trajectory_id and g.position = s.position and g.draw = s.draw
where {_CHOSEN}
order by s.trajectory_id, s.position
"""
