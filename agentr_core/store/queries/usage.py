"""What an iteration used: seconds, tokens, requests; and how many replies were cut by their
limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from agentr_core.answers import is_unreadable
from agentr_core.recipes.models import ModelRole
from agentr_core.store.database import Store
from agentr_core.store.queries.published import GATHERED
from agentr_core.types import Generation


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
    """Return the seconds of an iteration by part: generate, environment, train, and so on."""
    return dict(store.rows("select part, sum(seconds) from timing where iteration_id = ? group by part", iteration_id))


def token_use(store: Store, iteration_id: str) -> TokenUse:
    """Return the tokens of all replies that an iteration asked for; copies of another run's replies
    count for that run.
    """
    (tokens,) = store.rows(_TOKENS, iteration_id) or [(0, 0)]
    return TokenUse(*map(int, tokens))


def experience_tokens(store: Store, run_id: str) -> int:
    """Return the tokens that models wrote in the experience of a run: in its searches, judgements,
    rollouts, revisions and edits, not in its evaluations.

    What was copied from another run counts as if it had been asked for, so that runs on one
    workspace and runs on several are counted alike.
    """
    return store.count(_EXPERIENCE, run_id)


@dataclass(frozen=True, slots=True)
class Written:
    """What a model wrote in a world: units (episodes, or trees), their replies and tokens."""

    units: int
    replies: int
    tokens: int


def written_in(store: Store, model: str, environment: str) -> dict[str, Written]:
    """Return what the runs that begin with a model wrote in a world, by kind: `step` for episodes,
    `node` for trees, `judgement` for the verdicts on trees. Kinds of which nothing is stored are
    left out.
    """
    rows = store.rows(_WRITTEN, model, environment)
    return {kind: Written(units, replies, tokens) for kind, units, replies, tokens in rows}


def longest_sample(store: Store, run_id: str) -> int:
    """Return the most tokens of a sample that a run has trained on; 0 if there is none."""
    return store.count(_LONGEST, run_id)


def trained_online(store: Store, iteration_id: str) -> int:
    """Return how many tokens reinforcement learning trained in an iteration."""
    return store.count("select coalesce(sum(trained_tokens), 0) from rl_step where iteration_id = ?", iteration_id)


def trained_offline(store: Store, iteration_id: str) -> int:
    """Return how many tokens a training on a dataset went through in an iteration, those of later
    passes counted again; 0 before it has ended.
    """
    return store.count(
        "select value from metric where scope = 'iteration' and name = 'trained_tokens' and scope_id = ?", iteration_id
    )


def request_use(
    store: Store,
    iteration_id: str,
    *,
    role: ModelRole,
    per_request: int,
    taught: bool = False,
    lent: Collection[ModelRole] = (),
    edited: Collection[ModelRole] = (),
) -> RequestUse:
    """Return the requests to the model of a role in an iteration, and their tokens.

    Args:
        taught: whether the teacher collected instead of the actor.
        lent: the roles for which the teacher answered beside the episodes that it played.
        edited: those for which it answered where trajectories were made of others.
        per_request: the maximum number of replies to one HTTP request; 0 for no limit.
    """
    collector: ModelRole = "teacher" if taught else "actor"
    kinds = [*_KINDS.get(role, []), *(_COLLECTED if role == collector else [])]
    (sums,) = store.rows(_REQUESTS, iteration_id, kinds, per_request, role, [*lent], [*edited]) or [(0, 0, 0)]
    return RequestUse(*(number or 0 for number in sums))


def cut_replies(store: Store, iteration_id: str) -> dict[str, tuple[int, int]]:
    """Return the number of replies of an iteration, and of those cut by their token limit, by
    purpose; replies for which this is not known are left out.
    """
    return {purpose: (replies, cut) for purpose, replies, cut in store.rows(_CUT, iteration_id)}


def unreadable_replies(store: Store, iteration_id: str) -> dict[str, tuple[int, int]]:
    """Return the number of replies of helpers in an iteration, and of those that were cut before
    their thought had an end, by role.
    """
    unreadable: Counter[str] = Counter()
    for role, text, finish_reason, thinks in store.rows(f"{_HELPERS}{_DOUBTFUL}", iteration_id):
        reply = Generation(
            text=text,
            token_ids=(),
            finish_reason=finish_reason,
            prompt_tokens=0,
            completion_tokens=0,
            thinks=bool(thinks),
        )
        unreadable[role] += is_unreadable(reply)
    counted = store.rows(f"{_HELPERS} select role, count(*) from reply group by role order by role", iteration_id)
    return {role: (replies, unreadable[role]) for role, replies in counted}


_COLLECTED = ["node", "played"]
"""The kinds of generations of collection; `played` are steps of episodes on training instances."""
_KINDS: dict[ModelRole, list[str]] = {"actor": ["step"], "judge": ["judgement"]}
"""The kinds of generations by the role that they come from; side answers name their role."""

# Rows of `generation` that were asked for in iteration $1 and are no copies of another run's. A
# step without a seed was recorded earlier: its trajectory continues from it.
_ASKED = """
    (kind = 'node' and owner_id in (select tree_id from tree where iteration_id = $1 and copied_from is null))
    or (kind = 'judgement' and (owner_id, position) in (
        select (tree_id, node_index) from judgement where iteration_id = $1 and copied_from is null
    ))
    or (kind = 'step' and seed is not null and owner_id in (
        select trajectory_id from trajectory
        where iteration_id = $1 and source in ('episode', 'rollout', 'validation', 'flywheel') and copied_from is null
    ))
"""
# Rows of `answer` that were asked for in iteration $1 and are no copies of another run's.
_ANSWERED = """
    (kind = 'node' and owner_id in (select tree_id from tree where iteration_id = $1 and copied_from is null))
    or (kind = 'step' and owner_id in (
        select trajectory_id from trajectory
        where iteration_id = $1 and source <> 'ungraded' and copied_from is null
    ) and given is not true)
"""
_PLAYED = f"select trajectory_id from trajectory where iteration_id = $1 and source in {GATHERED}"
_TOKENS = f"""
select coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0) from (
    select prompt_tokens, completion_tokens from generation where {_ASKED}
    union all
    select prompt_tokens, completion_tokens from answer where {_ANSWERED}
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
    where iteration_id in (from own) and source in {GATHERED}
)
select coalesce(sum(completion_tokens), 0)::bigint from (
    select completion_tokens from generation
    where (kind in ('node', 'judgement') and owner_id in (from tree_id_of))
        or (kind = 'step' and seed is not null and owner_id in (from trajectory_id_of))
    union all
    select completion_tokens from answer
    where given is not true and (
        (kind = 'node' and owner_id in (from tree_id_of)) or (kind = 'step' and owner_id in (from trajectory_id_of))
    )
    union all
    select completion_tokens from edit where iteration_id in (from own)
)
"""
# The replies to one request share owner and seed. A request for more than $3 replies was sent in
# parts (0: in one).
_REQUESTS = f"""
with request as (
    select if($3 = 0, 1, ceil(count(*) / $3)) as parts, max(prompt_tokens) as prompt,
        sum(completion_tokens) as completion
    from generation
    where seed is not null and ({_ASKED})
        and if(kind = 'step' and owner_id in ({_PLAYED}), 'played', kind) in (select unnest($2::varchar[]))
    group by kind, owner_id, seed
    union all
    select 1, prompt_tokens, completion_tokens from answer
    where if(list_contains($5::varchar[], role) and (kind = 'node' or owner_id in ({_PLAYED})), 'teacher', role) = $4
        and ({_ANSWERED})
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
    select if(t.source in {GATHERED}, 'collected', 'evaluated'), g.finish_reason
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
    select 'judge' as role, reply_id, finish_reason, thinks from generation
    where kind = 'judgement'
        and (owner_id, position) in (select (tree_id, node_index) from judgement where iteration_id = $1)
    union all
    select role, reply_id, finish_reason, thinks from answer
    where given is not true and (
        (kind = 'node' and owner_id in (select tree_id from tree where iteration_id = $1))
        or (kind = 'step' and owner_id in (
            select trajectory_id from trajectory where iteration_id = $1 and source <> 'ungraded'
        ))
    )
    union all
    select role, reply_id, finish_reason, thinks from edit where iteration_id = $1
)
"""
# No other reply can be unreadable: see `answers.is_unreadable`.
_DOUBTFUL = """
select role, text, finish_reason, thinks from reply join text on text_id = reply_id
where finish_reason = 'length' and (thinks or contains(text, '<think>'))
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
