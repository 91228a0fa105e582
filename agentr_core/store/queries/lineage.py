"""The lineage of a stored thing, back to the model and the instance that it began with."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from agentr_core.store.database import Store
from agentr_core.store.weights import weights_now

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
select kind, instance_id as instance, good_reward, bad_reward, cut, num_tokens as tokens,
    num_trained_tokens as trained_tokens,
    (select list(dataset_id order by dataset_id) from dataset_row w where w.sample_id = s.sample_id) as datasets,
    pair_id as "pair: spliced from", trajectory_id as "trajectory: taken from",
    case when pair_id is null then tree_id || '#' || good_leaf end as "node: path to"
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
select depth, action, reward, visits, round(value_sum / greatest(visits, 1), 3) as value, stop, verdict,
    tree_id as "tree: grown in"
from node left join judgement using (tree_id, node_index)
where tree_id = split_part($1, '#', 1) and node_index = try_cast(split_part($1, '#', 2) as integer)""",
    "tree": """
select instance_id as instance, seed, dives_done as dives,
    (select count(*) from node n where n.tree_id = t.tree_id) as nodes, checkpoint_id as "checkpoint: grown by"
from tree t where tree_id = $1""",
    "trajectory": """
select source, t.instance_id as instance,
    (select min_by(seed, position) from generation where kind = 'step' and owner_id = t.trajectory_id) as seed,
    t.reward, success, stop, num_steps as steps, operator, g.policy,
    d.parent_id as "trajectory: derived from", tree_id || '#' || leaf as "node: path to",
    case when source <> 'expert'
        then coalesce(e.checkpoint_id, i.collected_by, i.checkpoint_in) end as "checkpoint: played by"
from trajectory t left join derivation d on d.child_id = t.trajectory_id
left join evaluation e using (evaluation_id) left join iteration i on i.iteration_id = t.iteration_id
left join rl_rollout o using (trajectory_id)
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

    `kind` is its table; the id of a node is that of its tree, `#` and its number.
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


def entities_beginning(
    store: Store, prefix: str, *, limit: int, kinds: Collection[str] = tuple(_TABLES)
) -> list[Entity]:
    """Return at most `limit` entities of some kinds whose id begins with a prefix."""
    tree, mark, number = prefix.partition("#")
    if mark:
        rows = store.rows(
            "select 'node', tree_id || '#' || node_index from node "
            "where starts_with(tree_id, $1) and node_index::varchar = $2 order by 2 limit $3",
            tree,
            number,
            limit,
        )
    else:
        parts = [f"select '{table}', {_TABLES[table]} from {table}" for table in kinds]
        rows = store.rows(
            f"select * from ({' union all '.join(parts)}) known(kind, key) "
            "where starts_with(key, $1) order by 2 limit $2",
            prefix,
            limit,
        )
    return [Entity(kind, key) for kind, key in rows]


def nodes_of_tree(store: Store, prefix: str) -> int | None:
    """Return the number of nodes of the one tree whose id begins with a prefix, or None if there is
    none or several.
    """
    found = store.rows("select count(*) from node where starts_with(tree_id, $1) group by tree_id limit 2", prefix)
    return int(found[0][0]) if len(found) == 1 else None


def ancestry(store: Store, key: str, kind: str) -> list[Ancestor]:
    """Return an entity and all that it was made from, each after its descendant; empty if it is not
    stored.
    """
    return list(_walk(store, Entity(kind, key), "", 0, set()))


def _walk(store: Store, entity: Entity, relation: str, depth: int, seen: set[Entity]) -> Iterator[Ancestor]:
    if entity in seen:
        yield Ancestor(depth=depth, relation=relation, entity=entity, facts={}, seen=True)
        return
    seen.add(entity)
    found = _facts(store, entity)
    if found is None:
        return
    origins = {name: ids for name, ids in found.items() if ": " in name and ids}
    facts = {name: fact for name, fact in found.items() if ": " not in name and fact not in (None, "", [])}
    yield Ancestor(depth=depth, relation=relation, entity=entity, facts=facts)
    for name, ids in origins.items():
        kind, _, how = name.partition(": ")
        for key in ids if isinstance(ids, list) else [ids]:
            yield from _walk(store, Entity(kind, key), how, depth + 1, seen)


def _facts(store: Store, entity: Entity) -> dict[str, Any] | None:
    sql = ORIGINS.get(entity.kind)
    rows = store.rows(f"select to_json(origin) from ({sql}) origin limit 1", entity.key) if sql else []
    facts: dict[str, Any] | None = next((json.loads(row) for (row,) in rows), None)
    if facts is not None and "model" in facts:
        facts["model"] = weights_now(store, entity.key, facts["model"])
    return facts
