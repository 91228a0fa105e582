"""The stored runs, their recipes, and how far they got."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from agentr_core.models.checkpoint_dir import current_weights_folder
from agentr_core.recipes.models import ModelRole
from agentr_core.replies import is_cut_within_thought
from agentr_core.store.codec.ledger import Status, as_utc
from agentr_core.store.database import Store
from agentr_core.texts import THOUGHT_START
from agentr_core.types import Generation

# What an iteration has made so far: trajectories, a dataset, a checkpoint.

GATHERED_SOURCES = "('rollout', 'flywheel')"
"""The sources, as a list in SQL, of trajectories that are played to be trained on; paths of trees
are not among them.
"""


class IterationProducts(NamedTuple):
    """The products of an iteration; all None, and not finished, before there are any."""

    dataset_id: str | None = None
    dataset_hash: str | None = None
    checkpoint_id: str | None = None
    checkpoint_path: str | None = None
    finished: bool = False


def iteration_products(store: Store, iteration_id: str) -> IterationProducts:
    """Return the products of an iteration."""
    return next((IterationProducts(*row) for row in store.rows(_PRODUCTS, iteration_id)), IterationProducts())


def count_trajectories(store: Store, iteration_id: str) -> int:
    """Return how many trajectories were gathered for an iteration: leaves of finished trees, and
    episodes that are neither an evaluation's nor made from a pair.
    """
    return store.count(_TRAJECTORIES, iteration_id)


_PRODUCTS = """
select d.dataset_id, d.hash, c.checkpoint_id, c.path, i.status = 'finished'
from iteration i
left join dataset d on d.iteration_id = i.iteration_id
left join checkpoint c on c.checkpoint_id = i.checkpoint_out
where i.iteration_id = ?
"""
_TRAJECTORIES = f"""
select (
    select count(*) from trajectory
    where iteration_id = $1 and (source in {GATHERED_SOURCES} or source = 'expert')
) + (
    select count(*) from node join tree using (tree_id)
    where iteration_id = $1 and finished and stop is not null and parent >= 0
)
"""


# What an iteration used: seconds, tokens, requests; and how many replies were cut by their
# limit.


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Tokens that models read and wrote. In `prompt`, a prompt counts once for each of its
    replies.
    """

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class RequestUse:
    """HTTP requests and their tokens. A prompt counts once for each request."""

    requests: int
    prompt: int
    completion: int


def seconds_by_part(store: Store, iteration_id: str) -> dict[str, float]:
    """Return the seconds of an iteration by part: generate, environment, train, store, other."""
    return dict(store.rows("select part, sum(seconds) from timing where iteration_id = ? group by part", iteration_id))


def stage_seconds(store: Store, run_id: str) -> dict[tuple[int, str], float]:
    """Return the seconds that each stage of a run took, by iteration and name; those of several
    workers are summed. A timing named `STAGE DETAIL` counts for its stage.
    """
    rows = store.rows(
        "select iteration, split_part(stage, ' ', 1), sum(seconds) from timing join iteration using (iteration_id) "
        "where run_id = ? group by all",
        run_id,
    )
    return {(int(iteration), str(stage)): float(seconds) for iteration, stage, seconds in rows}


def stages_with_tokens(store: Store, run_id: str) -> list[tuple[int, str]]:
    """Return the stages of a run that generated or trained tokens, by iteration and name; one whose
    work was taken over from another run did neither.
    """
    rows = store.rows(
        "select distinct iteration, split_part(stage, ' ', 1) from timing join iteration using (iteration_id) "
        "where run_id = ? and part in ('generate', 'train') and tokens > 0",
        run_id,
    )
    return [(int(iteration), str(stage)) for iteration, stage in rows]


def last_finished_run(
    store: Store, *, recipe: str, method: str, iterations: int, excluded_run_id: str = ""
) -> str | None:
    """Return the id of the last finished run of a recipe of this name, with at least so many
    iterations; None if there is none.

    Args:
        excluded_run_id: a run to leave out.
    """
    rows = store.rows(
        "select run_id from run where recipe = ? and method = ? and run_id <> ? and status = 'finished' "
        "and (config->>'$.iterations')::bigint >= ? order by finished_at desc, run_id limit 1",
        recipe,
        method,
        excluded_run_id,
        iterations,
    )
    return str(rows[0][0]) if rows else None


def sampling_rate(store: Store, model_path: str) -> float | None:
    """Return the mean number of tokens generated per second in all runs that began with a model;
    None if there are none.
    """
    (row,) = store.rows(
        "select sum(tokens), sum(seconds) from timing join iteration using (iteration_id) join run using (run_id) "
        "where part = 'generate' and tokens > 0 and (config->>'$.model.path') = ?",
        model_path,
    ) or [(None, None)]
    tokens, seconds = row
    return float(tokens) / float(seconds) if tokens and seconds else None


def token_use(store: Store, iteration_id: str) -> TokenUse:
    """Return the tokens of all replies that an iteration asked for; copies of another run's replies
    count for that run.
    """
    (tokens,) = store.rows(_TOKENS, iteration_id) or [(0, 0)]
    return TokenUse(*map(int, tokens))


def experience_tokens(store: Store, run_id: str) -> int:
    """Return the number of tokens that models generated for the experience of a run: in its
    searches, judgements, rollouts, revisions and edits, not in its evaluations.

    What was copied from another run counts as if it had been asked for, so that runs on one
    workspace and runs on several are counted alike.
    """
    return store.count(_EXPERIENCE, run_id)


@dataclass(frozen=True, slots=True)
class OutputCounts:
    """A model's output in a world: units (episodes or trees), and their replies and tokens."""

    units: int
    replies: int
    tokens: int


def output_by_kind(store: Store, model: str, environment: str) -> dict[str, OutputCounts]:
    """Return the sampled output in a world of the runs that begin with a model, by kind: `step` for
    episodes, `node` for trees, `judgement` for the verdicts on trees. Kinds without any are left
    out.
    """
    rows = store.rows(_WRITTEN, model, environment)
    return {kind: OutputCounts(units, replies, tokens) for kind, units, replies, tokens in rows}


def longest_sample_tokens(store: Store, run_id: str) -> int:
    """Return the largest number of tokens of a sample that a run made; 0 if none is known."""
    return store.count(_LONGEST, run_id)


def online_trained_tokens(store: Store, iteration_id: str) -> int:
    """Return how many tokens reinforcement learning trained in an iteration."""
    return store.count("select coalesce(sum(trained_tokens), 0) from rl_step where iteration_id = ?", iteration_id)


def offline_trained_tokens(store: Store, iteration_id: str) -> int:
    """Return how many tokens a training on a dataset went through in an iteration, over all its
    epochs; 0 before it has ended.
    """
    return store.count(
        "select value from metric where scope = 'iteration' and name = 'trained_tokens' and scope_id = ?", iteration_id
    )


def request_use(
    store: Store,
    iteration_id: str,
    *,
    role: ModelRole,
    max_replies_per_request: int,
    teacher_collects: bool = False,
    teacher_plays: bool = False,
    lent_roles: Collection[ModelRole] = (),
    edit_roles: Collection[ModelRole] = (),
) -> RequestUse:
    """Return the requests to the model of a role in an iteration, and their tokens.

    Args:
        teacher_collects: whether the teacher collected instead of the actor.
        teacher_plays: whether it played the single episodes on training instances.
        lent_roles: the roles for which the teacher answered beside the episodes that it played.
        edit_roles: those for which it answered where trajectories were made of others.
        max_replies_per_request: the maximum number of replies to one HTTP request; 0 for no limit.
    """
    by_teacher = {"node": teacher_collects, "played": teacher_plays}
    episode_kinds = [kind for kind, is_teacher in by_teacher.items() if role == ("teacher" if is_teacher else "actor")]
    kinds = [*_GENERATION_KINDS.get(role, []), *episode_kinds]
    (sums,) = store.rows(
        _REQUESTS, iteration_id, kinds, max_replies_per_request, role, [*lent_roles], [*edit_roles], teacher_collects
    ) or [(0, 0, 0)]
    return RequestUse(*(number or 0 for number in sums))


def cut_reply_counts(store: Store, iteration_id: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of replies of an iteration, and of those cut by their token limit, by
    purpose; replies without a finish reason are left out.
    """
    return {purpose: (replies, cut) for purpose, replies, cut in store.rows(_CUT, iteration_id)}


def unreadable_reply_counts(store: Store, iteration_id: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of replies of helpers in an iteration, and of those that were cut before
    the end of their thinking, by role.
    """
    num_unreadable_by_role: Counter[str] = Counter()
    for role, text, finish_reason, thinks in store.rows(f"{_HELPERS}{_DOUBTFUL}", iteration_id):
        reply = Generation(
            text=text,
            token_ids=(),
            finish_reason=finish_reason,
            prompt_tokens=0,
            completion_tokens=0,
            thinks=bool(thinks),
        )
        num_unreadable_by_role[role] += is_cut_within_thought(reply)
    counts = store.rows(f"{_HELPERS} select role, count(*) from reply group by role order by role", iteration_id)
    return {role: (replies, num_unreadable_by_role[role]) for role, replies in counts}


_GENERATION_KINDS: dict[ModelRole, list[str]] = {"actor": ["step"], "judge": ["judgement"]}
"""The kinds of generations by the role that they come from; side answers name their role."""

# Rows of `generation` that were asked for in iteration $1 and are no copies of another run's. A
# step without a seed was recorded earlier: its trajectory continues from it.
_REQUESTED_GENERATIONS = """
    (kind = 'node' and owner_id in (select tree_id from tree where iteration_id = $1 and copied_from is null))
    or (kind = 'judgement' and (owner_id, position) in (
        select (tree_id, node_index) from judgement where iteration_id = $1 and copied_from is null
    ))
    or (kind = 'step' and seed is not null and owner_id in (
        select trajectory_id from trajectory
        where iteration_id = $1 and source in ('episode', 'rollout', 'validation', 'flywheel') and copied_from is null
    ))
"""
# Rows of `answer` that were asked for in iteration $1 and are no copies: of another run's, or of a
# node's on a path that was stored by itself.
_REQUESTED_ANSWERS = """
    (kind = 'node' and owner_id in (select tree_id from tree where iteration_id = $1 and copied_from is null))
    or (kind = 'step' and owner_id in (
        select trajectory_id from trajectory
        where iteration_id = $1 and source not in ('tree', 'ungraded') and copied_from is null
    ) and not given)
"""
_PLAYED_IDS = f"select trajectory_id from trajectory where iteration_id = $1 and source in {GATHERED_SOURCES}"
_TOKENS = f"""
select coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0) from (
    select prompt_tokens, completion_tokens from generation where {_REQUESTED_GENERATIONS}
    union all
    select prompt_tokens, completion_tokens from answer where {_REQUESTED_ANSWERS}
    union all
    select prompt_tokens, completion_tokens from edit where iteration_id = $1
)
"""
# Every role's tokens in what run $1 made its training data from.
_EXPERIENCE = f"""
with own as (select iteration_id from iteration where run_id = $1 and iteration > 0),
tree_id_of as (select tree_id as id from tree where iteration_id in (from own)),
trajectory_id_of as (
    select trajectory_id as id from trajectory
    where iteration_id in (from own) and source in {GATHERED_SOURCES}
)
select coalesce(sum(completion_tokens), 0)::bigint from (
    select completion_tokens from generation
    where (kind in ('node', 'judgement') and owner_id in (from tree_id_of))
        or (kind = 'step' and seed is not null and owner_id in (from trajectory_id_of))
    union all
    select completion_tokens from answer
    where not given and (
        (kind = 'node' and owner_id in (from tree_id_of)) or (kind = 'step' and owner_id in (from trajectory_id_of))
    )
    union all
    select completion_tokens from edit where iteration_id in (from own)
)
"""
# The replies to one request share owner and seed. A request for more than $3 replies was sent in
# parts (0: in one). `played` are steps of episodes on training instances.
_REQUESTS = f"""
with request as (
    select if($3 = 0, 1, ceil(count(*) / $3)) as parts, max(prompt_tokens) as prompt,
        sum(completion_tokens) as completion
    from generation
    where seed is not null and ({_REQUESTED_GENERATIONS})
        and if(kind = 'step' and owner_id in ({_PLAYED_IDS}), 'played', kind) in (select unnest($2::varchar[]))
    group by kind, owner_id, seed
    union all
    select 1, prompt_tokens, completion_tokens from answer
    where ({_REQUESTED_ANSWERS}) and $4 = if(
        list_contains($5::varchar[], role) and ((kind = 'node' and $7) or owner_id in ({_PLAYED_IDS})), 'teacher', role
    )
    union all
    select 1, prompt_tokens, completion_tokens from edit
    where if(list_contains($6::varchar[], role), 'teacher', role) = $4 and iteration_id = $1
)
select sum(parts)::bigint, sum(parts * prompt)::bigint, sum(completion)::bigint from request
"""
_CUT = f"""
with told as (
    select case g.kind when 'judgement' then 'judged' else 'collected' end as purpose, g.finish_reason
    from generation g join tree t on t.tree_id = g.owner_id
    where t.iteration_id = $1 and g.kind in ('node', 'judgement')
    union all
    select if(t.source in {GATHERED_SOURCES}, 'collected', 'evaluated'), g.finish_reason
    from generation g join trajectory t on t.trajectory_id = g.owner_id
    where t.iteration_id = $1 and g.kind = 'step' and t.source in ('episode', 'rollout', 'validation', 'flywheel')
        and g.seed is not null
)
select purpose, count(*), count(*) filter (finish_reason = 'length')
from told
where finish_reason is not null
group by purpose
order by purpose
"""
_HELPERS = """
with reply as (
    select 'judge' as role, reply as text, finish_reason, thinks from generation
    where kind = 'judgement'
        and (owner_id, position) in (select (tree_id, node_index) from judgement where iteration_id = $1)
    union all
    select role, text, finish_reason, thinks from answer
    where not given and (
        (kind = 'node' and owner_id in (select tree_id from tree where iteration_id = $1))
        or (kind = 'step' and owner_id in (
            select trajectory_id from trajectory where iteration_id = $1 and source not in ('tree', 'ungraded')
        ))
    )
    union all
    select role, text, finish_reason, thinks from edit where iteration_id = $1
)
"""
# No other reply can be unreadable: see `replies.is_cut_within_thought`.
_DOUBTFUL = f"""
select role, text, finish_reason, thinks from reply
where finish_reason = 'length' and (thinks or regexp_matches(text, '(?i){THOUGHT_START}'))
"""
_WRITTEN = """
with unit as (
    select trajectory_id as id, iteration_id, instance_id from trajectory
    where source in ('episode', 'rollout', 'flywheel') and copied_from is null
    union all
    select tree_id, iteration_id, instance_id from tree where finished and copied_from is null
)
select g.kind, count(distinct u.id), count(*), sum(g.completion_tokens)::bigint
from generation g
join unit u on u.id = g.owner_id
join instance n using (instance_id)
join iteration i using (iteration_id)
join run r using (run_id)
where g.seed is not null and (r.config->>'$.model.path') = $1 and n.environment = $2
group by g.kind
"""
_LONGEST = """
select coalesce(max(s.num_tokens), 0) from sample s join iteration i using (iteration_id) where i.run_id = ?
"""


ALL_RUNS_SQL = "select run_id, recipe, seed, model, status, started_at, finished_at from v_runs order by started_at"
"""The query that lists the runs of a workspace for a person, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run; `finished_at` is in UTC, None while it goes on."""

    status: Status
    finished_at: datetime | None
    iterations: int
    """The number of iterations that its recipe asks for."""


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint that an iteration of a run made; `config` is the resolved recipe as JSON."""

    checkpoint_id: str
    path: str
    weights_sha256: str
    run_id: str
    iteration: int
    config: str


def find_checkpoints(store: Store, prefix: str) -> list[RunCheckpoint]:
    """Return the checkpoints whose id begins with a prefix, by id; models that runs begin with are
    left out. Those of a step of a training are named with the step, as in `ab12@30`.
    """
    id_prefix, separator, step = prefix.partition("@")
    rows = store.rows(
        "select c.checkpoint_id, c.path, c.weights_sha256, r.run_id, i.iteration, r.config from checkpoint c "
        "join iteration i using (iteration_id) join run r using (run_id) "
        "where starts_with(c.checkpoint_id, ?) and split_part(c.checkpoint_id, '@', 2) = ? order by c.checkpoint_id",
        id_prefix,
        step if separator else "",
    )
    return [
        RunCheckpoint(key, current_weights_folder(store.path.parent, key, path), *columns)
        for key, path, *columns in rows
    ]


def find_runs(store: Store, prefix: str) -> list[str]:
    """Return the run ids that begin with a prefix, the oldest first."""
    rows = store.rows("select run_id from run where starts_with(run_id, ?) order by started_at", prefix)
    return [run_id for (run_id,) in rows]


def run_state(store: Store, run_id: str) -> RunState | None:
    """Return the state of a run; None if it is not stored."""
    rows = store.rows("select status, finished_at, (config->>'$.iterations')::bigint from run where run_id = ?", run_id)
    for status, end_time, iterations in rows:
        return RunState(status=status, finished_at=as_utc(end_time), iterations=iterations)
    return None


def find_checkpoint_by_weights(store: Store, weights_sha256: str) -> str | None:
    """Return the id of the first checkpoint of the workspace that a training made with these
    weights; None if there is none.
    """
    rows = store.rows(
        "select checkpoint_id from checkpoint where weights_sha256 = ? and iteration_id is not null "
        "order by created_at, checkpoint_id limit 1",
        weights_sha256,
    )
    return next((key for (key,) in rows), None)


def run_config(store: Store, run_id: str) -> str | None:
    """Return the resolved recipe of a run as JSON; None if it is not stored."""
    return next((config for (config,) in store.rows("select config from run where run_id = ?", run_id)), None)


def run_seed(store: Store, run_id: str) -> int | None:
    """Return the seed of a run's recipe; None if it is not stored."""
    rows = store.rows("select (config->>'$.seed')::bigint from run where run_id = ?", run_id)
    return next((int(seed) for (seed,) in rows), None)


def run_versions(store: Store, run_id: str) -> dict[str, str]:
    """Return the versions with which a run began, by name; none if it is not stored."""
    by_name: dict[str, str] = {}
    for (versions,) in store.rows("select versions from run where run_id = ?", run_id):
        by_name = json.loads(versions)
    return by_name


def configs_of_pool(store: Store, pool: str) -> dict[str, str]:
    """Return the resolved recipes, as JSON, of the runs that train on a comparison's pool, by run,
    the oldest first.
    """
    rows = store.rows("select run_id, config from run where (config->>'$.compare.pool') = ? order by started_at", pool)
    return dict(rows)


def data_uses_of_pool(store: Store, pool: str) -> list[str]:
    """Return the distinct values of `data.use` in the recipes of runs that made a dataset of a
    pool's samples.
    """
    rows = store.rows(
        "select distinct r.config->>'$.data.use' from run r join iteration using (run_id) "
        "join dataset using (iteration_id) "
        "where coalesce(nullif(r.config->>'$.compare.samples', ''), r.config->>'$.compare.pool') = ?",
        pool,
    )
    return [use for (use,) in rows]


def has_respliced_dataset(store: Store, pool: str) -> bool:
    """Return whether a run of a comparison has a dataset of samples that another run made anew from
    the trees of the comparison's pool.
    """
    return bool(
        store.count(
            "select count(*) from run r join iteration using (run_id) join dataset using (iteration_id) "
            "where (r.config->>'$.compare.pool') = ? and (r.config->>'$.compare.samples') <> ''",
            pool,
        )
    )


def configs_of_all(store: Store) -> dict[str, str]:
    """Return the resolved recipes, as JSON, of all runs, by run, the oldest first."""
    return dict(store.rows("select run_id, config from run order by started_at"))


def count_finished_runs(store: Store, run_ids: Sequence[str]) -> int:
    """Return how many of the given runs are finished."""
    return store.count(
        "select count(*) from run where status = 'finished' and run_id in (select unnest(?))", list(run_ids)
    )


def count_trees(store: Store, run_id: str) -> int:
    """Return how many trees a run has, finished or not."""
    return store.count("select count(*) from tree join iteration using (iteration_id) where run_id = ?", run_id)


# Iterations: their status, and the checkpoints that they made.


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationState:
    """The state of an iteration; `finished_at` is in UTC, None while it goes on."""

    status: Status
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint that an iteration made, and what it was made from."""

    checkpoint_id: str
    path: Path
    weights_sha256: str
    parent_id: str | None
    dataset_hash: str | None
    """None for the model that a run begins with."""
    trained: bool
    """Whether an iteration made it. Runs that begin with the same weights share one row for them,
    whose path is that of the last one that began."""


class Promotion(NamedTuple):
    """The model with which a run goes on after an iteration: one row of view v_promotions; see the
    comments of its columns.
    """

    iteration: int
    """The iteration that made it; 0: the model that its run begins with."""
    path: str
    development: str
    success: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTraining:
    """A finished training on the samples of a pool."""

    checkpoint_id: str
    dataset_hash: str
    counts: dict[str, Any]
    """The composition of its dataset."""
    trained_tokens: int
    seconds: float


def iteration_state(store: Store, iteration_id: str) -> IterationState | None:
    """Return the state of an iteration; None if it has not begun."""
    rows = store.rows("select status, finished_at from iteration where iteration_id = ?", iteration_id)
    for status, end_time in rows:
        return IterationState(status=status, finished_at=as_utc(end_time))
    return None


def checkpoint_of_iteration(store: Store, iteration_id: str) -> StoredCheckpoint | None:
    """Return the checkpoint that an iteration made, for iteration 0 the model its run begins with;
    None before there is one.
    """
    return _load_checkpoint(store, iteration_id, promoted=False)


def promoted_checkpoint(store: Store, iteration_id: str) -> StoredCheckpoint | None:
    """Return the checkpoint that an iteration promoted, if its recipe goes on with the best one;
    None before the promotion.
    """
    return _load_checkpoint(store, iteration_id, promoted=True)


def promotion_after(store: Store, run_id: str, iteration: int) -> Promotion | None:
    """Return the model with which a run goes on after an iteration; None before there is one."""
    return _first_promotion(store, store.rows(_PROMOTION, run_id, iteration))


def last_promotion(store: Store, run_id: str) -> Promotion | None:
    """Return the model with which a run ended after its last iteration; None before the run is
    finished.
    """
    return _first_promotion(store, store.rows(_LAST_PROMOTION, run_id))


def _first_promotion(store: Store, rows: Sequence[tuple[Any, ...]]) -> Promotion | None:
    for key, iteration, path, development, success in rows:
        return Promotion(iteration, current_weights_folder(store.path.parent, key, path), development, success)
    return None


def _load_checkpoint(store: Store, iteration_id: str, *, promoted: bool) -> StoredCheckpoint | None:
    for key, path, weights, parent, dataset, trained in store.rows(_CHECKPOINT, promoted, iteration_id):
        return StoredCheckpoint(
            checkpoint_id=key,
            path=Path(current_weights_folder(store.path.parent, key, path)),
            weights_sha256=weights,
            parent_id=parent,
            dataset_hash=dataset,
            trained=trained,
        )
    return None


class OutsideTraining(NamedTuple):
    """A training by another program that was imported as an iteration of a run."""

    iteration: int
    checkpoint_id: str
    program: str
    source: str
    """The folder that it was read from."""
    files: str
    """The hash of the weights and rollouts in that folder."""
    rollouts: int
    finished: bool
    """Whether the iteration is finished."""


def outside_trainings(store: Store, run_id: str) -> list[OutsideTraining]:
    """Return the iterations of a run that another program trained, in their order."""
    return [OutsideTraining(*row) for row in store.rows(_OUTSIDE, run_id)]


def training_of_iteration(store: Store, iteration_id: str) -> StoredTraining | None:
    """Return the training of an iteration; None before the iteration is finished."""
    for key, dataset, counts, tokens, seconds in store.rows(_TRAINING, iteration_id):
        return StoredTraining(
            checkpoint_id=key,
            dataset_hash=dataset,
            counts=json.loads(counts),
            trained_tokens=tokens,
            seconds=seconds,
        )
    return None


def training_totals(store: Store, run_id: str) -> tuple[int, float]:
    """Return the trained tokens and the seconds of training of all iterations of a run."""
    ((tokens, seconds),) = store.rows(_TRAINED, run_id) or [(0, 0.0)]
    return int(tokens), float(seconds)


def find_iteration_id(store: Store, run_id: str, iteration: int) -> str | None:
    """Return the id of an iteration of a run; None if it has not begun."""
    rows = store.rows("select iteration_id from iteration where run_id = ? and iteration = ?", run_id, iteration)
    return str(rows[0][0]) if rows else None


def iteration_numbers(store: Store, run_id: str) -> list[int]:
    """Return the numbers of a run's iterations that have begun, 0 among them, in their order."""
    rows = store.rows("select iteration from iteration where run_id = ? order by 1", run_id)
    return [int(number) for (number,) in rows]


def trained_iteration_numbers(store: Store, run_id: str) -> list[int]:
    """Return the numbers of a run's iterations that made a checkpoint, without 0, in their
    order.
    """
    rows = store.rows(
        "select iteration from iteration where run_id = ? and iteration > 0 and checkpoint_out is not null order by 1",
        run_id,
    )
    return [int(number) for (number,) in rows]


def count_finished_iterations(store: Store, run_id: str) -> int:
    """Return how many iterations of a run are finished, without 0."""
    return store.count(
        "select count(*) from iteration where run_id = ? and iteration > 0 and status = 'finished'", run_id
    )


_CHECKPOINT = """
select c.checkpoint_id, c.path, c.weights_sha256, c.parent_id, d.hash, c.iteration_id is not null
from iteration i
join checkpoint c on c.checkpoint_id = case when ? then i.promoted else i.checkpoint_out end
left join dataset d using (dataset_id)
where i.iteration_id = ?
"""
_PROMOTION = """
select promoted, promoted_iteration, path, development, success
from v_promotions
where run_id = ? and iteration = ?
"""
_LAST_PROMOTION = """
select promoted, promoted_iteration, path, development, success
from v_promotions
join run using (run_id)
where run_id = ? and status = 'finished'
order by iteration desc
limit 1
"""
_OUTSIDE = """
select i.iteration, c.checkpoint_id, c.config->>'$.outside.program', c.config->>'$.outside.source',
    c.config->>'$.outside.files', (c.config->>'$.outside.rollouts')::bigint, i.status = 'finished'
from iteration i join checkpoint c on c.checkpoint_id = i.checkpoint_out
where i.run_id = ? and i.iteration > 0 and (c.config->>'$.outside.files') is not null
order by i.iteration
"""
_TRAINED = """
select coalesce(sum(tokens), 0)::bigint, coalesce(sum(seconds), 0)
from (
    select max(t.trained_tokens) as tokens, max(t.seconds) as seconds
    from iteration i
    join training_step t on t.checkpoint_id = i.checkpoint_out
    where i.run_id = ? and i.iteration > 0
    group by i.iteration
)
"""
_TRAINING = """
select c.checkpoint_id, d.hash, d.counts, max(t.trained_tokens), max(t.seconds)
from iteration i
join checkpoint c on c.checkpoint_id = i.checkpoint_out
join dataset d on d.iteration_id = i.iteration_id
join training_step t on t.checkpoint_id = c.checkpoint_id
where i.iteration_id = ? and i.status = 'finished'
group by all
"""
