"""Long lists of stored rows, narrowed by filters and read page by page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentr_core.store.database import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A list that can be read page by page."""

    columns: str
    source: str
    """Tables and joins that determine the rows."""
    details: str = ""
    """Joins that only add columns to the rows of a page, which they read as `page`."""
    order: str
    filters: Mapping[str, str]
    """The condition of each filter; `$value` stands for the requested value."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """For filters with few values: the query that lists them."""
    always: tuple[str, ...] = ()
    """Filters that are required."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A page of a list: its rows by column, and the number of rows on all pages."""

    rows: list[dict[str, Any]]
    total: int


def listed(store: Store, listing: Listing, wanted: Mapping[str, str], *, offset: int, limit: int) -> Listed:
    """Return the rows of a list that pass the filters, from row `offset` on; none if a filter is
    missing that the list needs.

    Raises `KeyError` for a filter that the list does not have.
    """
    if not store.path.exists() or not set(listing.always) <= wanted.keys():
        return Listed([], 0)
    conditions = [f"({listing.filters[name].replace('$value', f'${name}')})" for name in wanted]
    rest = f"from {listing.source} where {' and '.join(conditions or ['true'])}"
    page = f"select {listing.columns} {rest} order by {listing.order} limit {int(limit)} offset {int(offset)}"
    with store.reading() as con:
        ((total,),) = con.execute(f"select count(*) {rest}", dict(wanted)).fetchall()
        found = con.execute(f"with page as ({page}) from page {listing.details}", dict(wanted))
        names = [column[0] for column in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    return Listed(rows, total)


def choices(store: Store, listing: Listing) -> dict[str, list[str]]:
    """Return the values of each filter that has few of them, sorted; filters without any are left
    out.
    """
    found = {
        name: [str(value) for (value,) in store.rows(f"select distinct value from ({sql}) known(value) order by 1")]
        for name, sql in listing.choices.items()
    }
    return {name: values for name, values in found.items() if values}


_RUN = "i.run_id = $value"
_ITERATION = "i.iteration = try_cast($value as integer)"
_INSTANCE = "starts_with({}.instance_id, $value)"
_DEPTHS = "select depth from instance where depth is not null"

TRAJECTORIES = Listing(
    columns="t.trajectory_id, t.instance_id, n.depth, t.source, i.iteration, t.success, t.reward, t.num_steps, t.stop",
    source="trajectory t join instance n using (instance_id) left join evaluation e using (evaluation_id) "
    "left join iteration i on i.iteration_id = coalesce(t.iteration_id, e.iteration_id)",
    order="t.created_at, t.trajectory_id",
    filters={
        "run": _RUN,
        "iteration": _ITERATION,
        "evaluation": "t.evaluation_id = $value",
        "instance": _INSTANCE.format("t"),
        "source": "t.source = $value",
        "outcome": "t.success = ($value = 'success')",
        "stop": "t.stop = $value",
        "depth": "n.depth = try_cast($value as integer)",
    },
    choices={
        "source": "select source from trajectory",
        "outcome": "values ('success'), ('no success')",
        "stop": "select stop from trajectory",
        "depth": _DEPTHS,
    },
)
TREES = Listing(
    columns="t.tree_id, t.instance_id, x.depth, i.iteration, t.dives_done, t.finished, t.created_at",
    source="tree t join instance x using (instance_id) left join iteration i using (iteration_id)",
    details="left join (select tree_id, count(*) as nodes, count(*) filter (success) as wins, max(reward) as best "
    "from node where tree_id in (select tree_id from page) group by tree_id) using (tree_id) "
    "order by created_at, tree_id",
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
    columns="p.pair_id, t.instance_id, i.iteration, p.good_reward, p.bad_reward, p.shared_steps, c.first_error, "
    "exists (from sample s where s.pair_id = p.pair_id) as spliced",
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
    order="p.created_at, p.preference_id",
    filters={"run": _RUN, "iteration": _ITERATION, "instance": _INSTANCE.format("p"), "kind": "p.kind = $value"},
    choices={"kind": "select kind from preference"},
)
GROUPS = Listing(
    columns="g.iteration_id, i.iteration, g.step, g.number, g.instance_id, g.episodes, g.wins, g.reward, g.contrast",
    source="rl_group g left join iteration i using (iteration_id)",
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
# The revision tests of two runs may go on from different failures of the same instance.
_GIVEN_THE_SAME = """
not exists (
    from step p join step q using (position)
    where p.trajectory_id = a.trajectory_id and q.trajectory_id = b.trajectory_id and position < a.cut
        and p.reply_id <> q.reply_id
)
"""
DIFFERENCES = Listing(
    columns="a.instance_id, x.depth, a.repeat, a.cut, a.trajectory_id as before_id, b.trajectory_id as after_id, "
    "t.success as before, u.success as after, t.reward as before_reward, u.reward as after_reward",
    source="episode a join episode b using (instance_id, repeat, cut) join instance x using (instance_id) "
    "join trajectory t on t.trajectory_id = a.trajectory_id join trajectory u on u.trajectory_id = b.trajectory_id",
    order="a.instance_id, a.repeat, a.cut",
    filters={
        "before": "a.evaluation_id = $value",
        "after": f"b.evaluation_id = $value and {_GIVEN_THE_SAME}",
        "change": "case $value when 'gained' then u.success and not t.success when 'lost' then t.success and not "
        "u.success else t.success = u.success end",
        "depth": "x.depth = try_cast($value as integer)",
    },
    choices={"change": "values ('gained'), ('lost'), ('same')", "depth": _DEPTHS},
    always=("before", "after"),
)
LISTINGS: Mapping[str, Listing] = {
    "trajectories": TRAJECTORIES,
    "trees": TREES,
    "pairs": PAIRS,
    "samples": SAMPLES,
    "preferences": PREFERENCES,
    "groups": GROUPS,
    "rejections": REJECTIONS,
    "differences": DIFFERENCES,
}
"""The lists by name."""
