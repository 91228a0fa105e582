"""Facts that worlds give about their instances, as columns and filters of lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from agentr_core.store.database import Store
from agentr_core.store.queries.listings import LISTINGS, Listing

_MAX_CHOICES = 40
"""A filter by a fact offers its values for choice if there are at most this many."""


class InstanceFact(NamedTuple):
    """A fact that some stored instance has: its name, whether all its values are numbers, and the
    number of distinct values.
    """

    name: str
    numeric: bool
    num_values: int

    @property
    def column(self) -> str:
        """The name of its column and its filter."""
        return f"fact_{self.name}"

    @property
    def text_sql(self) -> str:
        """The SQL expression of its value as text."""
        return f"json_extract_string(facts, '$.{self.name}')"

    @property
    def sort_sql(self) -> str:
        """The SQL expression of its value by which rows are sorted."""
        return f"try_cast({self.text_sql} as double)" if self.numeric else self.text_sql


def load_facts(store: Store, instance_id: str) -> Mapping[str, Any]:
    """Return the facts about an instance, by name; empty if there are none."""
    rows = store.rows("select facts::varchar from instance_facts where instance_id = ?", instance_id)
    return dict(json.loads(rows[0][0])) if rows else {}


def listing_with_facts(store: Store, name: str) -> tuple[Listing, list[InstanceFact]]:
    """Return a list extended by a column and a filter for each fact that some stored instance has,
    and these facts.
    """
    listing = LISTINGS[name]
    facts = [InstanceFact(*row) for row in store.rows(_FACTS)] if name in _INSTANCE_COLUMN else []
    if not facts:
        return listing, []
    source = f"from instance_facts f where f.instance_id = {_INSTANCE_COLUMN[name]}"
    values = ", ".join(f"{fact.sort_sql} as {fact.column}" for fact in facts)
    value_queries = {
        fact.column: f"select distinct {fact.text_sql} from instance_facts where {fact.text_sql} <> ''"
        for fact in facts
    }
    choice_columns = {fact.column for fact in facts if fact.num_values <= _MAX_CHOICES}
    return replace(
        listing,
        detail_joins=f"{listing.detail_joins} left join (select instance_id, {values} from instance_facts) "
        "using (instance_id)",
        filters={
            **listing.filters,
            **{fact.column: f"exists ({source} and {fact.text_sql} = $value)" for fact in facts},
        },
        choices={
            **listing.choices,
            **{column: sql for column, sql in value_queries.items() if column in choice_columns},
        },
        suggestions={
            **listing.suggestions,
            **{column: f"select v, '' from ({sql}) some(v) order by 1" for column, sql in value_queries.items()},
        },
        sort_expressions={fact.column: f"(select {fact.sort_sql} {source})" for fact in facts},
    ), facts


_INSTANCE_COLUMN = {
    **dict.fromkeys(("trajectories", "trees", "pairs"), "t.instance_id"),
    "samples": "s.instance_id",
    "preferences": "p.instance_id",
    "groups": "g.instance_id",
    "regrades": "r.instance_id",
    "differences": "a.instance_id",
}
"""The SQL expression of the instance of a row, by list."""
# The names were checked when a world told them, but a store may come from anywhere.
_FACTS = """
with told as (select facts, unnest(json_keys(facts)) as name from instance_facts)
select name, bool_and(json_type(facts, '$.' || name) in ('UBIGINT', 'BIGINT', 'DOUBLE')),
    count(distinct json_extract_string(facts, '$.' || name))
from told where regexp_full_match(name, '[a-z][a-z0-9_]{0,29}')
group by name order by name limit 24
"""
