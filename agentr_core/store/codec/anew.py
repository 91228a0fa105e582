"""What a stage makes of an iteration, stored in place of what an earlier pass of it made."""

from __future__ import annotations

from collections.abc import Collection

from agentr_core.store.database import Store, put
from agentr_core.store.tables import Rows


def store_anew(store: Store, rows: Rows, *, iteration_id: str, stage: str, kinds: Collection[str]) -> None:
    """Store all samples, preferences and rejections that a stage makes of an iteration; remove
    those of an earlier pass that are not among them, unless a dataset has them.

    A second pass may find other episodes: some failed before, or were not begun.

    Args:
        kinds: the kinds of the samples, which no other stage of the iteration makes.

    Raises:
        StoreBusy, CorruptStore, StoreError: as `Store.transaction`; then nothing has changed.
    """
    old = {"iteration_id": iteration_id, "kinds": list(kinds)}
    made = {name: [row[f"{name}_id"] for row in rows.get(name, ())] for name in ("sample", "preference")}
    rejections = rows.get("rejection", ())
    with store.transaction() as con:
        put(con, rows)
        con.execute(_REMOVE_PREFERENCES, {**old, "made": made["preference"]})
        for table in ("message_span", "message", "sample"):
            con.execute(_REMOVE_SAMPLES.format(table=table), {**old, "made": made["sample"]})
        con.execute(
            _REMOVE_REJECTIONS,
            {
                "iteration_id": iteration_id,
                "stage": stage,
                "subjects": [row["subject"] for row in rejections],
                "reasons": [row["reason"] for row in rejections],
            },
        )


_OLD = """
select sample_id from sample
where iteration_id = $iteration_id and list_contains($kinds::varchar[], kind)
    and sample_id not in (select sample_id from dataset_row)
"""
_REMOVE_PREFERENCES = f"""
delete from preference
where iteration_id = $iteration_id and preference_id not in (select unnest($made::varchar[]))
    and chosen_sample_id in ({_OLD})
"""
_REMOVE_SAMPLES = f"""
delete from {{table}}
where sample_id in ({_OLD}) and sample_id not in (select unnest($made::varchar[]))
"""
_REMOVE_REJECTIONS = """
delete from rejection
where iteration_id = $iteration_id and stage = $stage
    and (subject, reason) not in (select unnest($subjects::varchar[]), unnest($reasons::varchar[]))
"""
