"""Long lists of stored rows, narrowed by filters and read page by page."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from agentr_core.models.checkpoint_dir import current_weights_folder
from agentr_core.store.connection import literal, quoted, set_runs_at_work
from agentr_core.store.database import Store
from agentr_core.store.tables import Note, row_of
from agentr_core.types import Instance

# Instances of worlds, and the counts of what an iteration made in each world.


def stored_instances(store: Store) -> list[Instance]:
    """Return all stored instances, sorted by world, split and index."""
    return [
        Instance(environment=environment, split=split, index=index)
        for environment, split, index in store.rows(
            "select environment, split, instance_index from instance order by all"
        )
    ]


def product_counts_by_world(store: Store, source_id: str, iteration_id: str) -> dict[str, dict[str, int]]:
    """Return the number of trees, pairs, episodes, preferences, samples and dataset rows that come
    from each world in an iteration, by world and kind; kinds without any are left out.

    Args:
        source_id: the iteration that made the samples.
        iteration_id: the iteration that trains on them.
    """
    counts: dict[str, dict[str, int]] = {}
    for world, kind, count in store.rows(_MADE, source_id, iteration_id):
        counts.setdefault(world, {})[kind] = count
    return counts


_MADE = """
with made as (
    select 1 as place, 'trees' as kind, instance_id from tree where iteration_id = $1
    union all select 2, 'pairs', t.instance_id from pair p join tree t using (tree_id) where p.iteration_id = $1
    union all select 3, 'expert episodes', instance_id from trajectory where iteration_id = $1 and source = 'expert'
    union all select 4, 'explored episodes', instance_id from trajectory where iteration_id = $1 and source = 'rollout'
    union all select 5, 'preference pairs', instance_id from preference where iteration_id = $1
    union all select 6, kind || ' samples', instance_id from sample
        where iteration_id = $1 and instance_id is not null
    union all select 7, 'trained rows', s.instance_id from dataset d join dataset_row w using (dataset_id)
        join sample s using (sample_id) where d.iteration_id = $2 and s.instance_id is not null
)
select i.environment, m.kind, count(*) from made m join instance i using (instance_id)
group by i.environment, m.place, m.kind order by m.place, m.kind
"""


# The faults in the rows of a store; a sound store has none.


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A node or a trajectory whose rows contradict each other."""

    kind: str
    id: str
    position: int
    what: str


def dangling_references(store: Store) -> list[tuple[str, ...]]:
    """Return table, column and value of each reference to a row that does not exist."""
    return [tuple(str(value) for value in row) for row in store.rows("select * from v_orphans")]


def contradictions(store: Store) -> list[Contradiction]:
    """Return the contradictions between rows of the store, sorted."""
    rows = store.rows("select kind, id, position, what from v_contradictions order by all")
    return [Contradiction(*row) for row in rows]


# The lineage of a stored entity, back to the model and the instance that it began with.

_TABLES = {
    "checkpoint": "checkpoint_id",
    "dataset": "dataset_id",
    "sample": "sample_id",
    "pair": "pair_id",
    "preference": "preference_id",
    "tree": "tree_id",
    "trajectory": "trajectory_id",
    "evaluation": "evaluation_id",
}
_BY_TEACHER = """
(source = 'rollout' and coalesce(json_extract_string(r.config, '$.splice.continuation.by') = 'teacher', false))
"""
ORIGINS = {
    "checkpoint": """
select r.recipe, i.run_id as run, i.iteration, c.path as model, left(c.weights_sha256, 12) as weights,
    (select nullif(count(*), 0) from rl_rollout where iteration_id = c.iteration_id) as episodes,
    c.parent_id as "checkpoint: trained from", c.dataset_id as "dataset: trained on"
from checkpoint c left join iteration i using (iteration_id) left join run r using (run_id)
where c.checkpoint_id = $1""",
    "dataset": """
select d.hash, i.run_id as run, i.iteration,
    (select count(*) from dataset_row where dataset_id = d.dataset_id) as rows,
    (select list(n || ' ' || kind order by kind) from (
        select s.kind, count(*) as n from dataset_row w join sample s using (sample_id)
        where w.dataset_id = d.dataset_id group by s.kind)) as samples,
    (select sample_id from dataset_row w join sample s using (sample_id) where w.dataset_id = d.dataset_id
        order by s.pair_id is null, s.tree_id is null, w.position limit 1) as "one of them",
    (select list(distinct policy order by policy) from (
        select case when t.source = 'expert' then null
            else coalesce(g.checkpoint_id, i.collected_by, i.checkpoint_in) end as policy
        from dataset_row w join sample s using (sample_id) join iteration i on i.iteration_id = s.iteration_id
        left join tree g on g.tree_id = s.tree_id left join trajectory t on t.trajectory_id = s.trajectory_id
        where w.dataset_id = d.dataset_id) where policy is not null) as "checkpoint: collected by"
from dataset d left join iteration i on i.iteration_id = d.iteration_id where d.dataset_id = $1""",
    "sample": """
select kind, instance_id as instance, provenance.good_reward as good_reward, provenance.bad_reward as bad_reward,
    provenance.cut as cut, json_extract_string(provenance.extra, '$.by') as "continued by", num_tokens as tokens,
    num_trained_tokens as trained_tokens,
    (select list(dataset_id order by dataset_id) from dataset_row w where w.sample_id = s.sample_id) as datasets,
    pair_id as "pair: spliced from", trajectory_id as "trajectory: taken from",
    case when pair_id is null then tree_id || '#' || provenance.good_leaf end as "node: path to"
from sample s where sample_id = $1""",
    "pair": """
select good_reward, bad_reward, gap, first_error, tree_id || '#' || good_leaf as "node: good path to",
    tree_id || '#' || bad_leaf as "node: bad path to"
from pair left join critique using (pair_id) where pair_id = $1""",
    "preference": """
select kind, instance_id as instance, chosen_reward, rejected_reward,
    chosen_sample_id as "sample: chosen", rejected_sample_id as "sample: rejected"
from preference where preference_id = $1""",
    "node": """
select depth, step.action as action, step.reward as reward, visits,
    round(value_sum / greatest(visits, 1), 3) as value, stop, verdict,
    tree_id as "tree: grown in"
from node left join judgement using (tree_id, node_index)
where tree_id = split_part($1, '#', 1) and node_index = try_cast(split_part($1, '#', 2) as integer)""",
    "tree": """
select instance_id as instance, seed, dives_done as dives,
    (select count(*) from node n where n.tree_id = t.tree_id) as nodes, checkpoint_id as "checkpoint: grown by"
from tree t where tree_id = $1""",
    "trajectory": f"""
select source, t.instance_id as instance, [one.seed for one in t.asked if one is not null][1] as seed,
    t.reward, success, stop, num_steps as steps, operator, g.policy,
    d.parent_id as "trajectory: derived from", tree_id || '#' || leaf as "node: path to",
    if({_BY_TEACHER}, 'teacher', null) as "continued by", case when source <> 'expert' and not {_BY_TEACHER}
        then coalesce(e.checkpoint_id, i.collected_by, i.checkpoint_in) end as "checkpoint: played by"
from trajectory t left join derivation d on d.child_id = t.trajectory_id
left join evaluation e using (evaluation_id) left join iteration i on i.iteration_id = t.iteration_id
left join run r on r.run_id = i.run_id left join rl_rollout o using (trajectory_id)
left join rl_group g on (g.iteration_id, g.step, g.number) = (o.iteration_id, o.step, o.number)
where t.trajectory_id = $1""",
    "evaluation": """
select i.run_id as run, e.name, e.split, e.finished, e.checkpoint_id as "checkpoint: of"
from evaluation e left join iteration i using (iteration_id) where e.evaluation_id = $1""",
}
"""The query for each kind of entity. A column named `kind: relation` has the id, or the ids, of the
entities it was made from; all other columns are facts."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A row of the store that others were made from, or that was made from others.

    `kind` is its table; the key of a node is the id of its tree, `#` and its number.
    """

    kind: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """One line of an ancestry: its depth, its relation to its descendant, and the facts about it.
    `seen` says that the entity already appears further up, with its own ancestors.
    """

    depth: int
    relation: str
    entity: Entity
    facts: dict[str, Any]
    seen: bool = False


def find_entities(store: Store, prefix: str, *, limit: int, kinds: Collection[str] = tuple(_TABLES)) -> list[Entity]:
    """Return at most `limit` entities of some kinds whose id begins with a prefix."""
    tree_prefix, separator, number = prefix.partition("#")
    if separator:
        rows = store.rows(
            "select 'node', tree_id || '#' || node_index from node "
            "where starts_with(tree_id, $1) and node_index::varchar = $2 order by 2 limit $3",
            tree_prefix,
            number,
            limit,
        )
    else:
        parts = [f"select '{table}', {_TABLES[table]} from {table}" for table in kinds]
        source = f"({' union all '.join(parts)}) known(kind, key)"
        rows = store.rows(f"select * from {source} where starts_with(key, $1) order by 2 limit $2", prefix, limit)
    return [Entity(kind, key) for kind, key in rows]


def count_nodes(store: Store, prefix: str) -> int | None:
    """Return the number of nodes of the one tree whose id begins with a prefix, or None if there is
    none or several.
    """
    rows = store.rows("select count(*) from node where starts_with(tree_id, $1) group by tree_id limit 2", prefix)
    return int(rows[0][0]) if len(rows) == 1 else None


def ancestry(store: Store, key: str, kind: str) -> list[Ancestor]:
    """Return an entity and all that it was made from, each after its descendant; empty if it is not
    stored.
    """
    return list(_walk_ancestors(store, Entity(kind, key), "", 0, set()))


def _walk_ancestors(
    store: Store, entity: Entity, relation: str, depth: int, seen_entities: set[Entity]
) -> Iterator[Ancestor]:
    if entity in seen_entities:
        yield Ancestor(depth=depth, relation=relation, entity=entity, facts={}, seen=True)
        return
    seen_entities.add(entity)
    sql = ORIGINS.get(entity.kind)
    rows = store.rows(f"select to_json(origin) from ({sql}) origin limit 1", entity.key) if sql else []
    record: dict[str, Any] | None = next((json.loads(row) for (row,) in rows), None)
    if record is None:
        return
    if "model" in record:
        record["model"] = current_weights_folder(store.path.parent, entity.key, record["model"])
    origins = {name: ids for name, ids in record.items() if ": " in name and ids}
    facts = {name: fact for name, fact in record.items() if ": " not in name and fact not in (None, "", [])}
    yield Ancestor(depth=depth, relation=relation, entity=entity, facts=facts)
    for name, ids in origins.items():
        kind, _, origin_relation = name.partition(": ")
        for key in ids if isinstance(ids, list) else [ids]:
            yield from _walk_ancestors(store, Entity(kind, key), origin_relation, depth + 1, seen_entities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A list that can be read page by page."""

    columns: str
    source: str
    """Tables and joins that determine the rows."""
    detail_joins: str = ""
    """Joins that only add columns to the rows of a page, which they read as `page`."""
    order: str
    filters: Mapping[str, str]
    """The condition of each filter; `$value` stands for the requested value."""
    suggestions: Mapping[str, str] = field(default_factory=dict)
    """For filters with many values: the query for some of the values, each with a title."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """For filters with few values: the query that lists them."""
    required_filters: tuple[str, ...] = ()
    """Filters that are required."""
    sort_expressions: Mapping[str, str] = field(default_factory=dict)
    """The expressions that rows are sorted by, for columns of `detail_joins` that allow it."""


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page of a list: its rows by column, and the number of rows on all pages."""

    rows: list[dict[str, Any]]
    total: int


def read_list(
    store: Store, listing: Listing, filters: Mapping[str, str], *, offset: int, limit: int, sort: str = ""
) -> ListPage:
    """Return the rows of a list that pass the filters, from row `offset` on; none if a filter is
    missing that the list needs.

    Args:
        sort: the column by which they are sorted, with a minus sign before it for the largest
            first; empty for the list's own order.

    Raises `KeyError` for a filter that the list does not have.
    """
    if not store.path.exists() or not set(listing.required_filters) <= filters.keys():
        return ListPage([], 0)
    values = {name: f"${name}" for name in filters}
    with store.reading() as con:
        ((total,),) = con.execute(f"select count(*) {_from_and_where(listing, values)}", dict(filters)).fetchall()
        page = _page_sql(listing, values, sort, f" limit {int(limit)} offset {int(offset)}")
        cursor = con.execute(page, dict(filters))
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return ListPage([{name: row[name] for name in names if name != "place"} for row in rows], total)


def sortable_columns(listing: Listing) -> frozenset[str]:
    """Return the columns by which a list can be sorted; columns of `details` only if
    `sort_expressions` has them.
    """
    names = (part.split(" ")[-1].rpartition(".")[2] for part in re.split(r", (?![^()]*\))", listing.columns))
    return frozenset([*names, *listing.sort_expressions])


def listing_sql(listing: Listing, filters: Mapping[str, str], *, sort: str = "") -> str:
    """Return the query of all rows of a list that pass the filters, as `agentr sql` takes it."""
    values = {name: literal(value) for name, value in filters.items()}
    return _page_sql(listing, values, sort, "")


def _from_and_where(listing: Listing, values: Mapping[str, str]) -> str:
    # Not `re.sub`, in which a backslash in a value would have a meaning.
    conditions = [f"({listing.filters[name].replace('$value', value)})" for name, value in values.items()]
    return f"from {listing.source} where {' and '.join(conditions or ['true'])}"


def _page_sql(listing: Listing, values: Mapping[str, str], sort: str, limit_clause: str) -> str:
    column = sort.removeprefix("-")
    assert not column or column in sortable_columns(listing)
    sort_expression = listing.sort_expressions.get(column, quoted(column))
    sort_prefix = f"{sort_expression} {'desc' if sort.startswith('-') else 'asc'} nulls last, " if column else ""
    page = (
        f"select {listing.columns} {_from_and_where(listing, values)} "
        f"order by {sort_prefix}{listing.order}{limit_clause}"
    )
    return (
        f"with page as (select *, row_number() over () as place from ({page})) "
        f"select * from page {listing.detail_joins} order by place"
    )


def filter_choices(store: Store, listing: Listing) -> dict[str, list[str]]:
    """Return the values of each filter that has few of them, sorted; filters without any are left
    out.
    """
    order = "group by value order by try_cast(value::varchar as double), value"
    by_filter = {
        name: [str(value) for (value,) in store.rows(f"select value from ({sql}) known(value) {order}")]
        for name, sql in listing.choices.items()
    }
    return {name: values for name, values in by_filter.items() if values}


def filter_suggestions(store: Store, listing: Listing) -> dict[str, list[tuple[str, str]]]:
    """Return values of each filter that has many, each with a title; at most 500 for a filter."""
    by_filter = {
        name: [(str(value), str(title)) for value, title in store.rows(f"{sql} limit 500")]
        for name, sql in {**_SUGGESTIONS, **listing.suggestions}.items()
        if name in listing.filters and name not in listing.choices
    }
    return {name: values for name, values in by_filter.items() if values}


def find_first_observation(store: Store, instance_id: str) -> str | None:
    """Return the first observation of the episodes of an instance; None if none is stored."""
    rows = store.rows(_OPENINGS.format("?"), instance_id)
    return rows[0][1] if rows else None


def find_instance_id(store: Store, words: str) -> str | None:
    """Return the id of an instance that begins with `words`: that itself if there is one, else the
    shortest; None if there is none.
    """
    sql = "select instance_id from instance where starts_with(instance_id, $1) order by length(instance_id), 1 limit 1"
    rows = store.rows(sql, words)
    return rows[0][0] if rows else None


_EVALUATIONS_BY_NAME = """
select e.evaluation_id, r.recipe || ' ' || left(r.run_id, 8) || ', '
    || if(i.iteration = 0, 'base', 'iteration ' || i.iteration) || ', ' || e.name
from evaluation e join iteration i using (iteration_id) join run r using (run_id)
order by r.started_at desc, e.name, i.iteration"""
_SUGGESTIONS = {
    "run": "select run_id, recipe from run order by started_at desc",
    "iteration": "select distinct iteration, '' from iteration order by 1",
    "evaluation": _EVALUATIONS_BY_NAME,
    "before": _EVALUATIONS_BY_NAME,
    "after": _EVALUATIONS_BY_NAME,
    "instance": "select instance_id, '' from instance order by split, instance_index",
    "dataset": "select dataset_id, '' from dataset order by created_at desc",
}


_RUN = "i.run_id = $value"
_ITERATION = "i.iteration = try_cast($value as integer)"
# A whole id is that of one instance, although those of others begin with it.
_INSTANCE = (
    "{0}.instance_id = $value or "
    "(starts_with({0}.instance_id, $value) and $value not in (select instance_id from instance))"
)
_DEPTHS = "select depth from instance where depth is not null"
_OPENINGS = (
    "select instance_id, min(first_observation) as first_observation from (select instance_id, first_observation "
    "from tree union all select instance_id, first_observation from trajectory) where instance_id in ({}) "
    "group by instance_id"
)
_WITH_OPENING = f"left join ({_OPENINGS.format('select instance_id from page')}) using (instance_id)"

TRAJECTORIES = Listing(
    columns="t.trajectory_id, t.first_observation, t.instance_id, n.depth, t.source, i.run_id, i.iteration, "
    "e.name as evaluation, t.success, t.reward, t.num_steps, t.stop, n.environment, n.split, t.created_at, "
    "o.tags, o.text as note",
    source="trajectory t join instance n using (instance_id) left join evaluation e using (evaluation_id) "
    "left join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id) "
    "left join note o using (trajectory_id)",
    order="t.created_at, t.trajectory_id",
    filters={
        "run": _RUN,
        "iteration": _ITERATION,
        "evaluation": "t.evaluation_id = $value",
        "instance": _INSTANCE.format("t"),
        "source": "t.source = $value",
        "outcome": "t.success = ($value = 'success')",
        "stop": "t.stop = $value",
        "tag": "list_contains(o.tags, $value)",
        "depth": "n.depth = try_cast($value as integer)",
    },
    choices={
        "source": "select source from trajectory",
        "outcome": "values ('success'), ('no success')",
        "stop": "select stop from trajectory",
        "tag": "select unnest(tags) from note",
        "depth": _DEPTHS,
    },
)
TREES = Listing(
    columns="t.tree_id, t.first_observation, t.instance_id, x.depth, i.iteration, t.dives_done, t.finished, "
    "t.created_at",
    source="tree t join instance x using (instance_id) left join iteration i using (iteration_id)",
    detail_joins="left join (select tree_id, count(*) as nodes, count(*) filter (step.success) as wins, "
    "max(step.reward) as best from node where tree_id in (select tree_id from page) group by tree_id) using (tree_id)",
    order="t.created_at, t.tree_id",
    filters={
        "run": _RUN,
        "iteration": _ITERATION,
        "instance": _INSTANCE.format("t"),
        "depth": "x.depth = try_cast($value as integer)",
    },
    choices={"depth": _DEPTHS},
)
PAIRS = Listing(
    columns="p.pair_id, t.first_observation, t.instance_id, i.iteration, p.good_reward, p.bad_reward, p.shared_steps, "
    "c.first_error, exists (from sample s where s.pair_id = p.pair_id) as spliced",
    source="pair p join tree t using (tree_id) left join iteration i on i.iteration_id = p.iteration_id "
    "left join critique c using (pair_id)",
    order="p.created_at, p.pair_id",
    filters={
        "run": _RUN,
        "iteration": _ITERATION,
        "instance": _INSTANCE.format("t"),
        "tree": "p.tree_id = $value",
        "first_error": "case $value when 'found' then c.first_error is not null when 'none' then c.pair_id is not null "
        "and c.first_error is null else c.pair_id is null end",
    },
    choices={"first_error": "values ('found'), ('none'), ('not judged')"},
)
SAMPLES = Listing(
    columns="s.sample_id, s.kind, s.instance_id, i.iteration, s.num_tokens, s.num_trained_tokens, "
    "exists (from dataset_row w where w.sample_id = s.sample_id) as used",
    source="sample s left join iteration i using (iteration_id)",
    detail_joins=_WITH_OPENING,
    order="s.created_at, s.sample_id",
    filters={
        "run": _RUN,
        "iteration": _ITERATION,
        "instance": _INSTANCE.format("s"),
        "kind": "s.kind = $value",
        "used": "exists (from dataset_row w where w.sample_id = s.sample_id) = ($value = 'yes')",
        "dataset": "exists (from dataset_row w where w.sample_id = s.sample_id and w.dataset_id = $value)",
    },
    choices={"kind": "select kind from sample", "used": "values ('yes'), ('no')"},
)
PREFERENCES = Listing(
    columns="p.preference_id, p.kind, p.instance_id, i.iteration, p.chosen_reward, p.rejected_reward, p.margin, "
    "p.dropped_steps",
    source="preference p left join iteration i using (iteration_id)",
    detail_joins=_WITH_OPENING,
    order="p.created_at, p.preference_id",
    filters={"run": _RUN, "iteration": _ITERATION, "instance": _INSTANCE.format("p"), "kind": "p.kind = $value"},
    choices={"kind": "select kind from preference"},
)
GROUPS = Listing(
    columns="g.iteration_id, i.iteration, g.step, g.number, g.instance_id, g.episodes, g.wins, g.reward, g.contrast",
    source="rl_group g left join iteration i using (iteration_id)",
    detail_joins=_WITH_OPENING,
    order="i.created_at, g.step, g.number",
    filters={
        "run": _RUN,
        "iteration": _ITERATION,
        "instance": _INSTANCE.format("g"),
        "step": "g.step = try_cast($value as integer)",
        "contrast": "g.contrast = ($value = 'yes')",
    },
    choices={"contrast": "values ('yes'), ('no')"},
)
REJECTIONS = Listing(
    columns="i.iteration, x.stage, x.reason, x.subject, x.detail",
    source="rejection x left join iteration i using (iteration_id)",
    order="i.created_at, x.stage, x.reason, x.subject",
    filters={"run": _RUN, "iteration": _ITERATION, "stage": "x.stage = $value", "reason": "x.reason = $value"},
    choices={"stage": "select stage from rejection", "reason": "select reason from rejection"},
)
# The revision tests of two runs may go on from different failures of the same instance. Steps are
# read only where some were given: to read them all takes several times as long as all else.
_GIVEN_THE_SAME = (
    "not exists (from trajectory p, trajectory q where a.cut > 0 and p.trajectory_id = a.trajectory_id and "
    "q.trajectory_id = b.trajectory_id and [s.reply for s in p.steps[:a.cut]] <> [s.reply for s in q.steps[:a.cut]])"
)
DIFFERENCES = Listing(
    columns="a.instance_id, t.first_observation, x.depth, a.repeat, a.cut, a.trajectory_id as before_id, "
    "b.trajectory_id as after_id, t.success as before, u.success as after, t.reward as before_reward, "
    "u.reward as after_reward",
    source="episode a join episode b using (instance_id, repeat, cut) join instance x using (instance_id) "
    "join trajectory t on t.trajectory_id = a.trajectory_id join trajectory u on u.trajectory_id = b.trajectory_id",
    order="a.instance_id, a.repeat, a.cut",
    filters={
        "before": "a.evaluation_id = $value",
        "after": f"b.evaluation_id = $value and {_GIVEN_THE_SAME}",
        "change": "case $value when 'gained' then u.success and not t.success when 'lost' then t.success and not "
        "u.success when 'changed' then t.success <> u.success else t.success = u.success end",
        "depth": "x.depth = try_cast($value as integer)",
    },
    choices={"change": "values ('changed'), ('gained'), ('lost'), ('same')", "depth": _DEPTHS},
    required_filters=("before", "after"),
)
REGRADES = Listing(
    columns="r.trajectory_id, if(r.trajectory_id is null, r.tree_id || '#' || r.leaf, null) as node, "
    "coalesce(t.first_observation, g.first_observation) as first_observation, r.instance_id, r.scoring_id, r.grader, "
    "r.run_id, r.iteration, r.episodes_of, r.success, r.new_success, r.reward, r.new_reward, r.change, r.reply",
    source="v_regrades r left join trajectory t using (trajectory_id) left join tree g on g.tree_id = r.tree_id",
    order="r.iteration, r.instance_id, r.trajectory_id, r.tree_id, r.leaf, r.scoring_id",
    filters={
        "scoring": "r.scoring_id = $value",
        "run": "r.run_id = $value",
        "iteration": "r.iteration = try_cast($value as integer)",
        "instance": _INSTANCE.format("r"),
        "episodes_of": "r.episodes_of = $value",
        "change": "r.change = $value or ($value = 'changed' and r.change <> 'same')",
    },
    suggestions={"scoring": "select scoring_id, grader from scoring order by created_at desc"},
    choices={
        "episodes_of": "select name from evaluation union all select source from trajectory "
        "where trajectory_id in (from regrade select trajectory_id) and evaluation_id is null "
        "union all select 'tree' where exists (from leaf_regrade)",
        "change": "values ('changed'), ('won'), ('lost'), ('up'), ('down'), ('unreadable'), ('same')",
    },
)
LISTINGS: Mapping[str, Listing] = {
    "trajectories": TRAJECTORIES,
    "trees": TREES,
    "pairs": PAIRS,
    "samples": SAMPLES,
    "preferences": PREFERENCES,
    "groups": GROUPS,
    "rejections": REJECTIONS,
    "regrades": REGRADES,
    "differences": DIFFERENCES,
}
"""The lists by name."""


# People's notes on trajectories.


def load_note(store: Store, trajectory_id: str) -> Note | None:
    """Return the note on a trajectory, an empty one if there is none yet; None if there is no such
    trajectory.
    """
    rows = store.rows(
        "select coalesce(o.tags, []), coalesce(o.text, '') from trajectory t left join note o using (trajectory_id) "
        "where t.trajectory_id = $1",
        trajectory_id,
    )
    return Note(tags=tuple(rows[0][0]), text=rows[0][1]) if rows else None


def write_note(store: Store, trajectory_id: str, note: Note) -> None:
    """Store the note of a trajectory in place of the one before. Raises as `Store.write` does."""
    store.write({"note": [row_of("note", note, trajectory_id=trajectory_id)]})


# What a workspace holds at a glance: its runs, and the iterations of one of them.


class RunLine(NamedTuple):
    """A run in the list of runs; times are in UTC."""

    run_id: str
    recipe: str
    method: str
    status: str
    started_at: datetime
    finished_at: datetime | None
    iterations: int
    pool: str | None
    """The run whose samples it is trained on, if it is an arm of a comparison."""
    seed: int | None
    model: str | None
    at_work: bool
    """Whether a process of this machine works on it."""


class IterationLine(NamedTuple):
    """An iteration of a run, and the number of rows of each kind that it made."""

    iteration_id: str
    iteration: int
    status: str
    checkpoint_out: str | None
    dataset_id: str | None
    trees: int
    trajectories: int
    pairs: int
    samples: int
    preferences: int
    groups: int
    rejections: int


class EvaluationLine(NamedTuple):
    """An evaluation of a run with its measures: `success`, its interval and the mean reward and
    steps are None until they are stored.
    """

    evaluation_id: str
    iteration: int
    name: str
    split: str
    finished: bool
    episodes: int
    success: float | None
    low: float | None
    high: float | None
    reward: float | None
    steps: float | None


class StageLine(NamedTuple):
    """The seconds of a stage so far by part, summed over its workers, and its tokens."""

    iteration: int
    stage: str
    generate: float
    environment: float
    train: float
    other: float
    tokens: int
    ended_at: datetime


class EpisodeLine(NamedTuple):
    """A trajectory of a run, and when it was stored, in UTC."""

    trajectory_id: str
    iteration: int
    source: str
    instance_id: str
    success: bool
    reward: float
    num_steps: int
    stop: str
    stored_at: datetime
    first_observation: str


class EventLine(NamedTuple):
    """Errors of one class in one phase of a stage of a run."""

    stage: str
    level: str
    error: str
    phase: str
    times: int
    message: str
    """The message of one of them."""


def run_lines(store: Store) -> list[RunLine]:
    """Return the runs of a workspace, the newest first."""
    return _run_lines(store, "")


def run_line(store: Store, run_id: str) -> RunLine | None:
    """Return a run; None if it is not stored."""
    return next(iter(_run_lines(store, run_id)), None)


def iteration_lines(store: Store, run_id: str) -> list[IterationLine]:
    """Return the iterations of a run in their order."""
    return [IterationLine(*row) for row in _rows_with_runs_at_work(store, _ITERATIONS, run_id)]


def evaluation_lines(store: Store, run_id: str) -> list[EvaluationLine]:
    """Return the evaluations of a run, those of one name together, by iteration."""
    return [EvaluationLine(*row) for row in store.rows(_EVALUATIONS, run_id)]


def event_lines(store: Store, run_id: str, *, iteration_id: str = "", stage: str = "") -> list[EventLine]:
    """Return the 20 most frequent errors of a run, an iteration or a stage by class and phase."""
    return [EventLine(*row) for row in store.rows(_EVENTS, run_id, iteration_id, stage)]


def stage_lines(store: Store, run_id: str) -> list[StageLine]:
    """Return the stages of a run that took time, in the order in which they ended."""
    return [StageLine(*row) for row in store.rows(_STAGES, run_id)]


def last_episodes(store: Store, run_id: str, *, iteration: int | None = None, limit: int) -> list[EpisodeLine]:
    """Return the last `limit` trajectories of a run or of one iteration, the latest first."""
    return [EpisodeLine(*row) for row in store.rows(_LAST_EPISODES, run_id, iteration, limit)]


def _run_lines(store: Store, run_id: str) -> list[RunLine]:
    return [RunLine(*row) for row in _rows_with_runs_at_work(store, _RUNS, run_id)]


def _rows_with_runs_at_work(store: Store, sql: str, run_id: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query about runs at work; none if there is no store."""
    if not store.path.exists():
        return []
    with store.reading() as con:
        set_runs_at_work(con, store.path.parent)
        rows: list[tuple[Any, ...]] = con.execute(sql, [run_id]).fetchall()
    return rows


_RUNS = """
select run_id, recipe, method, status, started_at, finished_at,
    (select count(*) from iteration i where i.run_id = r.run_id and i.iteration > 0),
    (select coalesce(nullif(config->>'$.compare.samples', ''), nullif(config->>'$.compare.pool', ''))
        from run o where o.run_id = r.run_id),
    seed, model,
    coalesce(list_contains(getvariable('runs_at_work')::varchar[], run_id), status in ('running', 'evaluating'))
from v_runs r where $1 in ('', run_id) order by started_at desc, run_id
"""
_ITERATIONS = """
with mine as (
    select i.* replace (case
        when i.status in ('finished', 'failed') or r.status in ('running', 'evaluating') then i.status
        when r.status = 'collecting' then r.status
        -- A finished run does more only for a forecast (of its first model) or to gather for a further iteration.
        when r.status = 'finished' then if(i.iteration = 0, r.status, 'collecting')
        else 'interrupted' end as status)
    from iteration i join v_runs r using (run_id) where run_id = ?
),
made as (
    select 'tree' as kind, iteration_id from tree
    union all select 'trajectory', coalesce(t.iteration_id, e.iteration_id) from trajectory t
        left join evaluation e using (evaluation_id)
    union all select 'pair', iteration_id from pair
    union all select 'sample', iteration_id from sample
    union all select 'preference', iteration_id from preference
    union all select 'group', iteration_id from rl_group
    union all select 'rejection', iteration_id from rejection
),
counts as (
    select iteration_id, kind, count(*) as n from made
    where iteration_id in (select iteration_id from mine) group by all
)
select m.iteration_id, m.iteration, m.status, m.checkpoint_out,
    (select any_value(dataset_id) from dataset d where d.iteration_id = m.iteration_id),
    coalesce(sum(n) filter (kind = 'tree'), 0)::bigint, coalesce(sum(n) filter (kind = 'trajectory'), 0)::bigint,
    coalesce(sum(n) filter (kind = 'pair'), 0)::bigint, coalesce(sum(n) filter (kind = 'sample'), 0)::bigint,
    coalesce(sum(n) filter (kind = 'preference'), 0)::bigint, coalesce(sum(n) filter (kind = 'group'), 0)::bigint,
    coalesce(sum(n) filter (kind = 'rejection'), 0)::bigint
from mine m left join counts using (iteration_id) group by all order by m.iteration
"""
_EVALUATIONS = """
select evaluation_id, iteration, evaluation, split, finished, episodes, success, success_low, success_high,
    reward, steps
from v_evaluations where run_id = ? order by evaluation, split, iteration
"""
_STAGES = """
select i.iteration, split_part(t.stage, ' ', 1) as stage,
    coalesce(sum(seconds) filter (part = 'generate'), 0), coalesce(sum(seconds) filter (part = 'environment'), 0),
    coalesce(sum(seconds) filter (part = 'train'), 0), coalesce(sum(seconds) filter (part in ('store', 'other')), 0),
    coalesce(sum(tokens), 0)::bigint, max(t.created_at) as ended
from timing t join iteration i using (iteration_id) where i.run_id = ?
group by 1, 2 order by i.iteration, ended, stage
"""
_LAST_EPISODES = """
select t.trajectory_id, i.iteration, t.source, t.instance_id, t.success, t.reward, t.num_steps, t.stop, t.created_at,
    t.first_observation
from trajectory t left join evaluation e using (evaluation_id)
join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)
where i.run_id = $1 and coalesce(i.iteration = $2, true)
order by t.created_at desc, t.trajectory_id
limit $3
"""
_EVENTS = """
select stage, level, "class", phase, count(*), any_value(message) from event
where run_id = $1 and $2 in ('', iteration_id) and $3 in ('', stage)
group by all order by count(*) desc limit 20
"""
