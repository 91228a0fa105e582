"""Pruning runs from a store, so that the lineage of everything that stays is complete.

Iterations stay or go as a whole: all iterations of the other runs stay, and those iterations of the
pruned runs that made something from which the others were made, however far back. Such an iteration
stays with all its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from agentr_core.models.files import checkpoint_entries, iteration_of, shared_weights
from agentr_core.store.care.rewriting import Rewritten, copy, rewrite
from agentr_core.store.connection import quoted
from agentr_core.store.database import Store
from agentr_core.store.tables import TABLES
from agentr_core.store.weights import weights_now


class Pruned(NamedTuple):
    """The changes that pruning made.

    `needed` are the iterations of the pruned runs that stay because other runs need them, as run
    and number; `unnamed` are the folders and files of the workspace that no row names any longer:
    weights, finished or not, with their logs, datasets, reports, and weights that samplers shared.
    """

    rewritten: Rewritten
    needed: tuple[tuple[str, int], ...]
    unnamed: tuple[str, ...]


def prune(store: Store, run_ids: Collection[str], *, keep: bool = True) -> Pruned:
    """Rewrite a store without some runs, and return what changed.

    Args:
        keep: whether the rewritten file replaces the old one; otherwise this is a dry run.

    Raises:
        StoreError, StoreBusy, CorruptStore: as for `rewrite`. Nothing is changed then.
    """

    def fill(con: Any) -> tuple[list[Any], list[Any]]:
        con.execute(_KEPT, [list(run_ids)])
        for name, sql in _KEPT_BY.items():
            con.execute(f"create temp table {name} as {sql}")
        copy(con, CONDITIONS)
        # After all rows that may refer to them.
        for table, columns in _POINTED_AT.items():
            pointers = con.execute(_POINTERS, [columns, list(TABLES)]).fetchall()
            named = " union ".join(f"select {quoted(name)} from store.main.{quoted(other)}" for other, name in pointers)
            con.execute(_ADD_POINTED_AT.format(table=table, key=TABLES[table].key[0], named=named))
        # The origin of a variant is an instance, too.
        con.execute(_ADD_ORIGINS)
        needed = con.execute(_NEEDED, [list(run_ids)]).fetchall()
        return needed, [con.execute(sql).fetchall() for sql in (_UNNAMED, _GONE_FILES, _KEPT_IDS)]

    rewritten, (needed, (weights, files, kept)) = rewrite(store, fill, keep=keep)
    found = {weights_now(store, key, path) for key, path in weights}
    root = store.path.parent
    found |= {str(root / name) for (name,) in files if (root / name).exists()}
    found |= {str(path) for path in _trainings(root, {key for key, _ in weights}, {key for (key,) in kept})}
    return Pruned(rewritten, tuple((run, number) for run, number in needed), tuple(sorted(found)))


def _trainings(root: Path, gone: Collection[str], kept: Collection[str]) -> Iterator[Path]:
    """Yield what trainings of a workspace left whose checkpoint is gone, or whose iteration is not
    kept. Unfinished work in which an earlier version named no iteration is left out.
    """
    for key, entries in checkpoint_entries(root).items():
        origins = {origin for entry in entries if (origin := iteration_of(entry))}
        if key not in kept and (key in gone or (origins and not origins & set(kept))):
            yield from entries
            yield from shared_weights(root, key)


_EDGES = """
with made_by as (
    select checkpoint_id, case when iteration_id is null then 'c' || checkpoint_id else 'i' || iteration_id end as maker
    from old.main.checkpoint
), played as (
    select trajectory_id, 'i' || coalesce(t.iteration_id, e.iteration_id) as maker, tree_id, copied_from, source
    from old.main.trajectory t left join old.main.evaluation e using (evaluation_id)
), grown as (
    select tree_id, 'i' || iteration_id as maker, checkpoint_id, copied_from from old.main.tree
), sampled as (
    select sample_id, 'i' || iteration_id as maker, pair_id, trajectory_id, tree_id from old.main.sample
)
select 'i' || iteration_id as needs, 'r' || run_id as needed from old.main.iteration
union select 'i' || iteration_id, maker from (
    unpivot (select iteration_id, checkpoint_in, checkpoint_out, promoted, collected_by from old.main.iteration)
    on checkpoint_in, checkpoint_out, promoted, collected_by into name role value checkpoint_id
) join made_by using (checkpoint_id)
union select m.maker, p.maker from old.main.checkpoint c join made_by m using (checkpoint_id)
    join made_by p on p.checkpoint_id = c.parent_id
union select m.maker, 'i' || d.iteration_id from old.main.checkpoint c join made_by m using (checkpoint_id)
    join old.main.dataset d on d.dataset_id = c.dataset_id
union select 'i' || d.iteration_id, s.maker from old.main.dataset d join old.main.dataset_row using (dataset_id)
    join sampled s using (sample_id)
union select s.maker, 'i' || p.iteration_id from sampled s join old.main.pair p using (pair_id)
union select s.maker, t.maker from sampled s join played t using (trajectory_id)
union select s.maker, t.maker from sampled s join grown t using (tree_id)
union select t.maker, m.maker from grown t join made_by m using (checkpoint_id)
union select t.maker, o.maker from grown t join grown o on o.tree_id = t.copied_from
union select t.maker, g.maker from played t join grown g using (tree_id)
union select t.maker, o.maker from played t join played o on o.trajectory_id = t.copied_from
union select 'i' || j.iteration_id, t.maker from old.main.judgement j
    join grown t on t.tree_id in (j.tree_id, j.copied_from)
union select 'i' || p.iteration_id, t.maker from old.main.pair p join grown t using (tree_id)
union select 'i' || c.iteration_id, 'i' || p.iteration_id from old.main.critique c join old.main.pair p using (pair_id)
union select 'i' || d.iteration_id, t.maker from old.main.derivation d
    join played t on t.trajectory_id in (d.child_id, d.parent_id)
union select 'i' || e.iteration_id, m.maker from old.main.evaluation e join made_by m using (checkpoint_id)
union select 'i' || e.iteration_id, t.maker from old.main.evaluation e join old.main.episode using (evaluation_id)
    join played t using (trajectory_id)
union select 'i' || p.iteration_id, s.maker from old.main.preference p
    join sampled s on s.sample_id in (p.chosen_sample_id, p.rejected_sample_id)
union select 'i' || o.iteration_id, t.maker from old.main.rl_rollout o join played t using (trajectory_id)
union select 'i' || v.iteration_id, t.maker from old.main.rl_validation v join played t using (trajectory_id)
union select 'i' || f.iteration_id, m.maker from old.main.family f join made_by m using (checkpoint_id)
union select 'r' || s.run_id, t.maker from old.main.revision_state s join played t using (trajectory_id)
union select 'r' || r.run_id, 'i' || i.iteration_id from old.main.run r join old.main.iteration i
    on i.run_id in (r.config->>'$.compare.pool', r.config->>'$.compare.samples', r.config->>'$.compare.trees',
        r.config->>'$.evaluation.revision_test.states')
"""
"""Pairs of a thing and one that it needs: iterations (`i` and id), runs (`r`), checkpoints that no
iteration made (`c`). A thing that an iteration made is represented by the iteration."""
_KEPT = f"""
create temp table kept as
with recursive edges as materialized ({_EDGES}),
closed(thing) as (
    select unnest(['r' || run_id, 'i' || iteration_id])
    from old.main.run left join old.main.iteration using (run_id) where run_id not in (select unnest(?::varchar[]))
    union
    select needed from closed join edges on needs = thing
)
select distinct thing from closed where thing is not null
"""
_KEPT_BY: Mapping[str, str] = MappingProxyType(
    {
        "kept_run": "select run_id from old.main.run semi join kept on thing = 'r' || run_id",
        "kept_iteration": "select iteration_id from old.main.iteration semi join kept on thing = 'i' || iteration_id",
        "kept_checkpoint": "select checkpoint_id from old.main.checkpoint c semi join kept "
        "on thing in ('i' || c.iteration_id, 'c' || c.checkpoint_id)",
        "kept_evaluation": "select evaluation_id from old.main.evaluation "
        "semi join kept_iteration using (iteration_id)",
        "kept_trajectory": "select trajectory_id from old.main.trajectory "
        "left join old.main.evaluation e using (evaluation_id) "
        "where coalesce(trajectory.iteration_id, e.iteration_id) in (select iteration_id from kept_iteration)",
        "kept_tree": "select tree_id from old.main.tree semi join kept_iteration using (iteration_id)",
        "kept_sample": "select sample_id from old.main.sample semi join kept_iteration using (iteration_id)",
        "kept_pair": "select pair_id from old.main.pair semi join kept_iteration using (iteration_id)",
        "kept_dataset": "select dataset_id from old.main.dataset semi join kept_iteration using (iteration_id)",
        "kept_judgement": "select tree_id, node_index from old.main.judgement "
        "semi join kept_iteration using (iteration_id)",
    }
)
"""Queries for the ids that stay, ordered so that each needs only earlier ones."""


def _kept(column: str) -> str:
    return f"{column}_id in (select {column}_id from kept_{column})"


_OWNED = """
case kind when 'node' then owner_id in (select tree_id from kept_tree)
    when 'judgement' then (owner_id, position) in (select (tree_id, node_index) from kept_judgement)
    else owner_id in (select trajectory_id from kept_trajectory) end
"""
_BY_ITERATION = (
    *("iteration", "chosen_instance", "planned_rollout", "tree", "judgement", "derivation", "family", "edit", "pair"),
    *("critique", "sample", "rejection", "preference", "dataset", "evaluation", "selection", "rl_step", "rl_group"),
    *("rl_rollout", "rl_validation", "timing"),
)
CONDITIONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_BY_ITERATION, _kept("iteration")),
        **dict.fromkeys(("run", "stage_input", "revision_state"), _kept("run")),
        **dict.fromkeys(("generation", "tool_call", "answer", "grade"), _OWNED),
        **dict.fromkeys(("trajectory", "step", "rl_credit"), _kept("trajectory")),
        **dict.fromkeys(("message", "message_span"), _kept("sample")),
        **dict.fromkeys(("checkpoint", "training_step"), _kept("checkpoint")),
        **dict.fromkeys(("node", "oracle_verdict"), _kept("tree")),
        "verdict": _kept("pair"),
        "dataset_row": _kept("dataset"),
        "episode": _kept("evaluation"),
        "event": f"{_kept('run')} and (iteration_id is null or {_kept('iteration')})",
        "metric": "case scope when 'run' then scope_id in (select run_id from kept_run) "
        "when 'iteration' then scope_id in (select iteration_id from kept_iteration) "
        "else scope_id in (select evaluation_id from kept_evaluation) end",
        # Any later run may reuse the answer of a tool.
        "answered_call": "true",
        "text": "false",
        "instance": "false",
    }
)
"""The condition on the rows of each table that are copied. Texts and instances come after all rows
that refer to them.
"""
_POINTED_AT: Mapping[str, list[str]] = MappingProxyType(
    {
        "text": ["text_id", "reply_id", "observation_id", "first_observation_id", "output_id"],
        "instance": ["instance_id"],
    }
)
"""The columns that refer to rows of texts and instances."""
_POINTERS = """
select table_name, column_name from duckdb_columns()
where database_name = 'store' and schema_name = 'main' and lower(column_name) in (select unnest(?))
    and lower(table_name) in (select unnest(?)) and lower(table_name) not in ('text', 'instance')
"""
_ADD_POINTED_AT = "insert into store.main.{table} by name select * from old.main.{table} where {key} in ({named})"
_ADD_ORIGINS = """
insert into store.main.instance by name select * from old.main.instance
where instance_id in (
    select v.origin_id from store.main.instance v anti join store.main.instance o on o.instance_id = v.origin_id
)
"""
_NEEDED = """
select run_id, iteration from store.main.iteration where run_id in (select unnest(?::varchar[])) order by all
"""
_UNNAMED = """
select checkpoint_id, path from old.main.checkpoint
where iteration_id is not null and path not in (select path from store.main.checkpoint)
"""
_GONE_FILES = """
select 'datasets/' || dataset_id || '.parquet' from old.main.dataset anti join store.main.dataset using (dataset_id)
union all select 'reports/' || run_id from old.main.run anti join store.main.run using (run_id)
"""
_KEPT_IDS = "select checkpoint_id from store.main.checkpoint union all select iteration_id from store.main.iteration"
