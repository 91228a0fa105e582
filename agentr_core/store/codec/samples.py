"""Training samples and datasets to rows and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentr_core.fingerprint import canonical, fingerprint
from agentr_core.store.codec.trajectories import COPY_IDS, COPY_TRAJECTORY, instance_row, load_trajectories
from agentr_core.store.database import Store, insert_rows
from agentr_core.store.tables import Rows, load_records, merge, row_of
from agentr_core.types import Answer, Derivation, Instance, Preference, PreferenceCase, Sample, Trajectory


def sample_rows(
    sample_id: str,
    sample: Sample,
    *,
    iteration_id: str,
    pair_id: str | None = None,
    trajectory_id: str | None = None,
) -> Rows:
    """Return the rows of a sample, with its messages, and of its instance; they are one unit. Its
    length in tokens is stored when it becomes part of a dataset (`store_dataset`).

    Args:
        pair_id: the pair a revision was made from.
        trajectory_id: the stored trajectory behind it, such as an expert's episode or a continued
            splice.
    """
    row = row_of(
        "sample",
        sample,
        sample_id=sample_id,
        iteration_id=iteration_id,
        instance_id=None if sample.instance is None else sample.instance.key,
        pair_id=pair_id,
        trajectory_id=trajectory_id,
        tree_id=sample.provenance.tree_id or None,
    )
    return {"instance": [] if sample.instance is None else [instance_row(sample.instance)], "sample": [row]}


def dataset_rows(
    dataset_id: str, sample_ids: Sequence[str], *, iteration_id: str, content_hash: str, counts: Mapping[str, Any]
) -> Rows:
    """Return the rows of a dataset: its hash and counts, and its samples in their order; they are
    one unit.
    """
    return {
        "dataset": [
            {
                "dataset_id": dataset_id,
                "iteration_id": iteration_id,
                "hash": content_hash,
                "counts": canonical(dict(counts)),
            }
        ],
        "dataset_row": [
            {"dataset_id": dataset_id, "position": position, "sample_id": sample_id}
            for position, sample_id in enumerate(sample_ids)
        ],
    }


def store_dataset(store: Store, rows: Rows, lengths: Mapping[str, tuple[int, int]]) -> None:
    """Store the rows of a dataset and of its new samples, and the length of each of its samples.
    `lengths` has for each sample id the numbers of all tokens and of those that carry loss. Raises
    as `Store.write` does.
    """
    tokens, trained_tokens = ([length[index] for length in lengths.values()] for index in (0, 1))
    with store.transaction() as con:
        insert_rows(con, rows)
        con.execute(_SET_LENGTHS, [list(lengths), tokens, trained_tokens])


def load_samples(
    store: Store, ids: Sequence[str] | None = None, *, iteration_id: str | None = None
) -> dict[str, Sample]:
    """Return stored samples by id: those of the given ids in their order, or those of an iteration
    sorted by id.
    """
    if not store.path.exists():
        return {}
    conditions = {
        "iteration_id = ?": iteration_id,
        "sample_id in (select unnest(?::varchar[]))": None if ids is None else list(ids),
    }
    given_conditions = {condition: value for condition, value in conditions.items() if value is not None}
    with store.reading() as con:
        condition = " and ".join(given_conditions) or "true"
        samples = dict(
            load_records(con, "sample", condition, list(given_conditions.values()), extra_columns=("sample_id",))
        )
    return {key: samples[key] for key in (sorted(samples) if ids is None else ids) if key in samples}


def load_dataset(store: Store, dataset_id: str) -> list[tuple[str, Sample]]:
    """Return the sample ids and samples of a dataset in their order; a sample may occur more than
    once.
    """
    rows = store.rows("select sample_id from dataset_row where dataset_id = ? order by position", dataset_id)
    ids = [sample_id for (sample_id,) in rows]
    samples = load_samples(store, ids)
    return [(sample_id, samples[sample_id]) for sample_id in ids]


_SET_LENGTHS = """
update sample set num_tokens = tokens, num_trained_tokens = trained
from (select unnest(?::varchar[]) as id, unnest(?::integer[]) as tokens, unnest(?::integer[]) as trained)
where sample_id = id
"""


# The plan of an iteration, to rows and back: the instances chosen for it, and the episodes it is
# to play.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRollout:
    """An episode that an iteration plans to play; it may have been played already."""

    trajectory_id: str
    instance: Instance
    number: int
    """Its number among the episodes of its instance; 0 is greedy."""
    num_forced_steps: int
    """How many of its first steps are the expert's."""

    @property
    def key(self) -> str:
        """Its name in messages; see `Instance.episode`."""
        return self.instance.episode(self.number, self.num_forced_steps)


def chosen_instance_rows(iteration_id: str, instances_by_purpose: Mapping[str, Sequence[Instance]]) -> Rows:
    """Return the rows that name the instances of an iteration, by the purpose they are chosen
    for.
    """
    return {
        "chosen_instance": [
            {"iteration_id": iteration_id, "name": name, "position": position, "instance_id": instance.key}
            for name, instances in instances_by_purpose.items()
            for position, instance in enumerate(instances)
        ]
    }


def load_chosen_instances(store: Store, iteration_id: str) -> dict[str, tuple[Instance, ...]]:
    """Return the instances of an iteration in order, by the purpose for which they are chosen;
    empty until they are chosen.
    """
    instances_by_purpose: dict[str, list[Instance]] = {}
    for name, environment, split, index in store.rows(_CHOSEN_INSTANCES, iteration_id):
        instances_by_purpose.setdefault(name, []).append(Instance(environment=environment, split=split, index=index))
    return {name: tuple(instances) for name, instances in instances_by_purpose.items()}


def planned_rollout_rows(iteration_id: str, rollouts: Iterable[PlannedRollout]) -> Rows:
    """Return the rows of all episodes that an iteration plans to play, in their order."""
    return {
        "planned_rollout": [
            {
                "trajectory_id": rollout.trajectory_id,
                "iteration_id": iteration_id,
                "position": position,
                "instance_id": rollout.instance.key,
                "number": rollout.number,
                "forced": rollout.num_forced_steps,
            }
            for position, rollout in enumerate(rollouts)
        ]
    }


def load_planned_rollouts(store: Store, iteration_id: str) -> list[PlannedRollout]:
    """Return the episodes that an iteration plans to play, in their order."""
    return [
        PlannedRollout(
            trajectory_id=key,
            instance=Instance(environment=environment, split=split, index=index),
            number=number,
            num_forced_steps=num_forced,
        )
        for key, environment, split, index, number, num_forced in store.rows(_PLANNED, iteration_id)
    ]


_CHOSEN_INSTANCES = """
select c.name, i.environment, i.split, i.instance_index
from chosen_instance c join instance i using (instance_id)
where c.iteration_id = ?
order by c.name, c.position
"""
_PLANNED = """
select p.trajectory_id, i.environment, i.split, i.instance_index, p.number, p.forced
from planned_rollout p join instance i using (instance_id)
where p.iteration_id = ?
order by p.position
"""


# Derivations of trajectories from others, to rows.


def derivation_rows(derivations: Iterable[Derivation], *, iteration_id: str) -> Rows:
    """Return the rows of derivations; store them with the trajectories of the children."""
    return {"derivation": [row_of("derivation", derivation, iteration_id=iteration_id) for derivation in derivations]}


# Families of a flywheel, and the model answers that made them, to rows and back.

FLYWHEEL = "flywheel"
"""The source of a flywheel's trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEdit:
    """A stored answer of a model that edits trajectories, with its id, the instance of the
    trajectory, and its subject.
    """

    edit_id: str
    subject: str
    instance_id: str
    answer: Answer


def edit_rows(
    edit_id: str, answer: Answer, *, subject: str, prompt: str, instance: Instance, iteration_id: str
) -> Rows:
    """Return the rows of a model's answer that edits a trajectory, with its subject, the name of
    the prompt, and the instance.
    """
    row = row_of(
        "edit",
        answer,
        edit_id=edit_id,
        iteration_id=iteration_id,
        instance_id=instance.key,
        subject=subject,
        prompt=prompt,
    )
    return {"instance": [instance_row(instance)], "edit": [row]}


def load_edits(store: Store, iteration_id: str) -> list[StoredEdit]:
    """Return the answers of models that edit trajectories in an iteration, sorted by id."""
    if not store.path.exists():
        return []
    with store.reading() as con:
        rows = load_records(
            con,
            "edit",
            "iteration_id = ? order by edit_id",
            [iteration_id],
            extra_columns=("edit_id", "subject", "instance_id"),
        )
    return [
        StoredEdit(edit_id=edit_id, subject=subject, instance_id=instance_id, answer=answer)
        for edit_id, subject, instance_id, answer in rows
    ]


def family_rows(
    family_id: str,
    instance: Instance,
    *,
    iteration_id: str,
    checkpoint_id: str,
    members: int,
    rounds: int,
    ended_by: str,
) -> Rows:
    """Return the row of a finished family."""
    row = {
        "family_id": family_id,
        "iteration_id": iteration_id,
        "instance_id": instance.key,
        "checkpoint_id": checkpoint_id,
        "members": members,
        "rounds": rounds,
        "ended_by": ended_by,
    }
    return {"instance": [instance_row(instance)], "family": [row]}


def copy_families(store: Store, original_by_copy: Mapping[str, str], *, iteration_id: str) -> list[str]:
    """Copy finished families as families of an iteration, with their trajectories, derivations, and
    rejected children; return the ids of the copies.

    The models' answers (table `edit`) are not copied. A family of which this iteration has
    anything, finished or not, is left as it is.

    Args:
        original_by_copy: the id of the family to copy, by the id of its copy.
    """
    with store.transaction() as con:
        rows = con.execute(
            _FAMILIES_TO_COPY, [list(original_by_copy), list(original_by_copy.values()), iteration_id]
        ).fetchall()
        new_ids, old_ids = [key for key, _ in rows], [key for _, key in rows]
        members = con.execute(_MEMBERS_TO_COPY, [new_ids, old_ids]).fetchall()
        new_member_ids = [fingerprint("copied member", family, member) for family, member in members]
        old_member_ids = [member for _, member in members]
        con.execute(COPY_TRAJECTORY, [new_member_ids, old_member_ids, iteration_id, None])
        con.execute(_COPY_DERIVATIONS, [new_member_ids, old_member_ids, iteration_id])
        con.execute(_COPY_REJECTIONS, [new_ids, old_ids, iteration_id])
        con.execute(_COPY_FAMILY, [new_ids, old_ids, iteration_id])
    return new_ids


def load_flywheel_trajectories(store: Store, iteration_id: str) -> dict[str, Trajectory]:
    """Return the trajectories of an iteration's flywheel by id."""
    return load_trajectories(store, iteration_id=iteration_id, source=FLYWHEEL)


def sampled_token_counts(store: Store, trajectory_ids: Sequence[str]) -> dict[str, int]:
    """Return the number of tokens that were sampled for each trajectory, by id; steps that it took
    over from an earlier recording do not count.

    Trajectories without sampled tokens are left out.
    """
    return {key: int(tokens) for key, tokens in store.rows(_TOKENS, list(trajectory_ids))}


_FAMILIES_TO_COPY = f"""
{COPY_IDS}
select new_id, old_id from ids join family f on f.family_id = old_id
where new_id not in (select family_id from family) and f.instance_id not in (
    select instance_id from trajectory where iteration_id = ? and source in ('flywheel', 'ungraded'))
"""
_MEMBERS_TO_COPY = f"""
{COPY_IDS}
select new_id, t.trajectory_id
from ids join family f on f.family_id = old_id join trajectory t using (iteration_id, instance_id)
where t.source = 'flywheel'
order by all
"""
_COPY_DERIVATIONS = f"""
insert into derivation by name
{COPY_IDS}
select d.* exclude (created_at) replace (child.new_id as child_id, parent.new_id as parent_id, ? as iteration_id)
from derivation d join ids child on d.child_id = child.old_id join ids parent on d.parent_id = parent.old_id
"""
# The subject of a child that could not be made is the key of its question, a space and its name.
_COPY_REJECTIONS = f"""
insert into rejection by name
{COPY_IDS}
select r.* exclude (created_at) replace (? as iteration_id)
from ids join family f on f.family_id = old_id
join rejection r on r.iteration_id = f.iteration_id and r.stage = 'evolve'
    and starts_with(r.subject, f.instance_id || ' ')
"""
_COPY_FAMILY = f"""
insert into family by name
{COPY_IDS}
select f.* exclude (created_at) replace (new_id as family_id, ? as iteration_id)
from family f join ids on f.family_id = old_id
"""
_TOKENS = """
select trajectory_id, sum(tokens) from (
    select trajectory_id, unnest(asked).completion_tokens as tokens from trajectory
    where trajectory_id in (select unnest(?::varchar[]))
) where tokens is not null group by trajectory_id
"""


# Preference pairs to rows and back.


def preference_rows(
    preference_id: str, preference: Preference, *, chosen_id: str, rejected_id: str, iteration_id: str
) -> Rows:
    """Return the rows of a preference and its two samples; they are one unit.

    Args:
        chosen_id, rejected_id: the ids of the samples.
    """
    instance = preference.chosen.instance
    preference_row = {
        "preference_id": preference_id,
        "iteration_id": iteration_id,
        "kind": str(preference.case),
        "instance_id": None if instance is None else instance.key,
        "chosen_sample_id": chosen_id,
        "rejected_sample_id": rejected_id,
        "chosen_reward": preference.chosen_reward,
        "rejected_reward": preference.rejected_reward,
        "margin": preference.margin,
        "dropped_steps": preference.dropped,
    }
    sample_units = [
        sample_rows(
            key, sample, iteration_id=iteration_id, trajectory_id=sample.provenance.extra.get("trajectory") or None
        )
        for key, sample in ((chosen_id, preference.chosen), (rejected_id, preference.rejected))
    ]
    return merge([*sample_units, {"preference": [preference_row]}])


def load_preferences(store: Store, iteration_id: str) -> dict[str, Preference]:
    """Return the preferences of an iteration by id."""
    rows = store.rows(
        "select preference_id, kind, chosen_sample_id, rejected_sample_id, chosen_reward, rejected_reward, "
        "dropped_steps from preference where iteration_id = ? order by preference_id",
        iteration_id,
    )
    samples = load_samples(store, sorted({key for row in rows for key in row[2:4]}))
    return {
        key: Preference(
            case=PreferenceCase(kind),
            chosen=samples[chosen],
            rejected=samples[rejected],
            chosen_reward=chosen_reward,
            rejected_reward=rejected_reward,
            dropped=dropped_steps,
        )
        for key, kind, chosen, rejected, chosen_reward, rejected_reward, dropped_steps in rows
    }


# The selection of the instances that a stage of the curriculum trains on, to rows and back.


@dataclass(frozen=True, slots=True)
class SelectionOutcome:
    """The outcome of the selection for one instance, as in table selection; see the comments of its
    columns.
    """

    instance_id: str
    episodes: int
    correctness: float
    cost: float
    s_corr: float | None
    s_tool: float | None
    front: int | None
    crowding: float | None
    selected: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """The outcome of a planned rollout; only `instance_id` is not None if it was not played."""

    instance_id: str
    reward: float | None
    calls: int | None
    steps: int | None


def selection_rows(iteration_id: str, outcomes: Iterable[SelectionOutcome]) -> Rows:
    """Return the rows of a selection; store them with the instances that were chosen."""
    return {"selection": [{"iteration_id": iteration_id, **asdict(selection)} for selection in outcomes]}


def load_selection(store: Store, iteration_id: str) -> list[SelectionOutcome]:
    """Return the outcome of the selection for each instance, sorted by instance id; none before the
    selection.
    """
    return [SelectionOutcome(*row) for row in store.rows(_SELECTION, iteration_id)]


def load_rollout_outcomes(store: Store, iteration_id: str) -> list[RolloutOutcome]:
    """Return the outcomes of the rollouts that an iteration planned, in the order of the plan."""
    return [RolloutOutcome(*row) for row in store.rows(_OUTCOMES, iteration_id)]


_SELECTION = """
select instance_id, episodes, correctness, cost, s_corr, s_tool, front, crowding, selected, reason
from selection where iteration_id = ? order by instance_id
"""
_OUTCOMES = """
select p.instance_id, t.reward, list_sum([len(step.tool_calls) for step in t.steps]), t.num_steps
from planned_rollout p
left join trajectory t using (trajectory_id)
where p.iteration_id = ?
order by p.position
"""
