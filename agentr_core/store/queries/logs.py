"""What the log of an evaluation holds apart from its episodes."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from agentr_core.store.database import Store


class EvaluationHead(NamedTuple):
    """An evaluation and its model. `started_at` and `ended_at`, the time of its last episode, are
    in UTC; `ended_at` is None without an episode, and `versions` is JSON.
    """

    evaluation_id: str
    run_id: str
    recipe: str
    method: str
    versions: str
    iteration: int
    name: str
    split: str
    finished: bool
    checkpoint_id: str
    model: str
    weights_sha256: str
    started_at: datetime
    ended_at: datetime | None


class EpisodeCosts(NamedTuple):
    """The costs of an episode, without those of the steps that it was given; None where not known.
    `grade` is the reply of a model that graded it.
    """

    invalid_actions: int | None
    sampling_seconds: float | None
    environment_seconds: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    grade: str | None


def find_evaluations(store: Store, prefix: str) -> list[EvaluationHead]:
    """Return the evaluations whose own id, or that of their iteration or run, begins with a prefix,
    in the order of their iterations and names.
    """
    return [EvaluationHead(*row) for row in store.rows(_EVALUATIONS, prefix)]


def episode_costs(store: Store, evaluation_id: str) -> dict[str, EpisodeCosts]:
    """Return what the episodes of an evaluation took, by trajectory."""
    return {key: EpisodeCosts(*facts) for key, *facts in store.rows(_EPISODES, evaluation_id)}


def failure_reasons(store: Store, evaluation_id: str) -> dict[str, str]:
    """Return why episodes of an evaluation failed for good, by the key of the episode."""
    return dict(store.rows(_LOST, evaluation_id))


_EVALUATIONS = """
select e.evaluation_id, r.run_id, r.recipe, r.method, r.versions, i.iteration, e.name, e.split, e.finished,
    c.checkpoint_id, c.path, c.weights_sha256, e.created_at,
    (select max(t.created_at) from trajectory t where t.evaluation_id = e.evaluation_id)
from evaluation e join iteration i using (iteration_id) join run r using (run_id)
join checkpoint c on c.checkpoint_id = e.checkpoint_id
where starts_with(e.evaluation_id, $1) or starts_with(i.iteration_id, $1) or starts_with(r.run_id, $1)
order by r.started_at, r.run_id, i.iteration, e.name
"""
_EPISODES = """
select p.trajectory_id, any_value(p.invalid_actions), any_value(p.sampling_seconds), any_value(p.environment_seconds),
    sum(s.prompt_tokens)::bigint, sum(s.completion_tokens)::bigint,
    (select any_value(a.text) from answer a
        where a.kind = 'step' and a.purpose = 'grade' and a.owner_id = p.trajectory_id)
from episode p left join v_steps s on s.trajectory_id = p.trajectory_id and s.position >= p.cut
where p.evaluation_id = ?
group by p.trajectory_id
"""
_LOST = """
select substr(subject, length($1) + 2), detail from rejection
where stage = 'evaluate' and reason = 'no-reward' and starts_with(subject, $1 || ':')
"""
