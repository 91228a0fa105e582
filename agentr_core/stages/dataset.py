"""The dataset of an iteration: its samples filtered, mixed and tokenised, as a Parquet file and
rows in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentr_core.environment import Environment
from agentr_core.episodes.transcript import conversations
from agentr_core.errors import ConfigError, DataFault, StoreError
from agentr_core.fingerprint import derive_seed, fingerprint
from agentr_core.models.checkpoint_dir import own_context_length
from agentr_core.recipes.data import DataConfig
from agentr_core.runtime.instances import held_out
from agentr_core.runtime.place import Workplace
from agentr_core.samples.chat_file import read_chat
from agentr_core.samples.dataset import (
    Dataset,
    FilterResult,
    TokenRow,
    Way,
    build_dataset,
    build_pairs,
    exchanged,
    hash_of,
    split,
)
from agentr_core.samples.identity import sample_id, trained_spans
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.samples import dataset_rows, load_preferences, load_samples, sample_rows, store_dataset
from agentr_core.store.queries.datasets import instance_traits, stored_dataset, whole_datasets
from agentr_core.store.tables import Rows, merge
from agentr_core.system import writing
from agentr_core.types import Instance, Provenance, Rejection, Sample, SampleKind, Trajectory

STAGE = "dataset"
_HASH = b"agentr.dataset_hash"
"""The field of a file's metadata that has the hash of its rows."""


def dataset_id(place: Workplace, iteration: int) -> str:
    """Return the id of the dataset of an iteration."""
    return fingerprint("dataset", place.iteration_id(iteration), place.recipe.data)


def dataset_file(place: Workplace, iteration: int) -> Path:
    """Return the path of the Parquet file with columns `input_ids` and `labels`; for pairs, with
    both columns for each side.
    """
    return place.root / "datasets" / f"{dataset_id(place, iteration)}.parquet"


def stored_tokens(place: Workplace, iteration: int) -> list[tuple[list[int], list[int]]]:
    """Return the token ids and labels of each sample of a dataset, in order. The dataset must not
    be one of pairs.

    Raises `ConfigError` when its file is missing or damaged.
    """
    file = dataset_file(place, iteration)
    try:
        table = pq.read_table(file, columns=["input_ids", "labels"])
    except FileNotFoundError as error:
        raise ConfigError(f"{file}, which has the tokens of iteration {iteration}, is missing; restore it") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"{file}, which has the tokens of iteration {iteration}, is damaged ({error}); restore it"
        ) from error
    return list(zip(table["input_ids"].to_pylist(), table["labels"].to_pylist(), strict=True))


async def dataset(place: Workplace, iteration: int) -> dict[str, Any]:
    """Build the dataset of an iteration unless it exists; return its hash as `dataset_hash`, with
    its counts.

    Raises `DataFault` when no sample is left, since training on nothing would only repeat the
    policy, and when the file of a stored dataset is missing or changed and its samples no longer
    reproduce it.
    """
    with place.timed(STAGE, iteration):
        return await asyncio.to_thread(_build, place, iteration)


def check_dataset(place: Workplace, iteration: int, content_hash: str) -> None:
    """Raise `StoreError` unless the store has all rows of the dataset of an iteration with this
    hash, and `DataFault` if its file exists and has other contents.
    """
    file = dataset_file(place, iteration)
    if content_hash not in whole_datasets(place.store, place.iteration_id(iteration)):
        raise StoreError(
            f"{place.store.path} lacks rows of the dataset of iteration {iteration} of run {place.run_id}; put back a "
            "store that has them, or take the run out with `agentr store prune` and run it again"
        )
    if file.exists() and _hash_of(file) != content_hash:
        raise DataFault(f"{file} is not the dataset that is stored; move it away, and build it again")


def _hash_of(file: Path) -> str:
    """Return the hash of the dataset in a Parquet file, computed from its rows if an earlier
    version stored none; empty if the file is missing, damaged or no dataset.
    """
    try:
        stored_hash = (pq.read_schema(file).metadata or {}).get(_HASH)
        if stored_hash is not None:
            return str(stored_hash.decode())
        columns = pq.read_table(file).to_pydict()
        sides = [""] if "input_ids" in columns else ["chosen_", "rejected_"]
        rows = [zip(columns[f"{side}input_ids"], columns[f"{side}labels"], strict=True) for side in sides]
    except (OSError, pa.ArrowInvalid, KeyError):
        return ""
    return hash_of(chain.from_iterable(zip(*rows, strict=True)))


def _build(place: Workplace, iteration: int) -> dict[str, Any]:
    key, file = dataset_id(place, iteration), dataset_file(place, iteration)
    record = stored_dataset(place.store, key)
    if record is not None and file.exists() and _hash_of(file) == record.hash:
        return {"dataset_hash": record.hash, **record.counts}
    renderer = load_renderer(place.policy(iteration).path, at=place.started_at())
    build = (
        _make_pairs(place, iteration, renderer) if place.plan(iteration).pairs else _make(place, iteration, renderer)
    )
    _check(place, iteration, build.dataset, record.hash if record is not None else None)
    _write_file(build.sides, file, build.dataset.manifest.dataset_hash)
    sample_ids = {row.sample_id for row in build.dataset.rows}
    manifest = build.dataset.manifest
    counts: dict[str, Any] = {
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "samples": {str(kind): count for kind, count in manifest.samples.items()},
        "trained_tokens": dict(manifest.trained_tokens),
        "replayed": manifest.replayed,
        "general_passes": manifest.general_passes,
        "seed": manifest.seed,
    }
    # Trained turns that were sampled with another tokenizer.
    replies = {sample_id(sample): trained_spans(sample) for sample in build.samples if sample_id(sample) in sample_ids}
    anew = sum(bool(span.token_ids) and not renderer.own_ids(span) for spans in replies.values() for span in spans)
    if anew:
        counts["tokenised_anew"] = anew
    iteration_id = place.iteration_id(iteration)
    new = [*build.exchanged, *(sample for sample in build.general if sample_id(sample) in sample_ids)]
    rows = [
        *(sample_rows(sample_id(sample), sample, iteration_id=iteration_id) for sample in new),
        rejection_rows([*build.useless, *build.dataset.rejections], iteration_id=iteration_id),
        dataset_rows(
            key,
            [row.sample_id for row in build.dataset.rows],
            iteration_id=iteration_id,
            content_hash=manifest.dataset_hash,
            counts=counts,
        ),
    ]
    lengths = {row.sample_id: (len(row.input_ids), sum(row.trained_tokens.values())) for row in build.dataset.rows}
    store_dataset(place.store, merge(rows), lengths)
    return {"dataset_hash": manifest.dataset_hash, **counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A dataset and what it was built from: `samples` are all candidates for its rows, `exchanged`
    those of them that were given suffixes of others, `general` conversations from a file, and
    `useless` the rejections of candidates. `sides` has the rows by the prefix of their columns.
    """

    dataset: Dataset
    samples: Sequence[Sample]
    sides: Mapping[str, Sequence[TokenRow]]
    general: Sequence[Sample] = ()
    exchanged: Sequence[Sample] = ()
    useless: Sequence[Rejection] = ()


def _make(place: Workplace, iteration: int, renderer: Renderer) -> _Made:
    recipe = place.recipe
    general, useless = read_chat(Path(recipe.data.general.file)) if recipe.data.general.share else ((), ())
    samples = tuple(load_samples(place.store, iteration_id=place.source_id(iteration)).values())
    takes = place.plan(iteration).takes
    taken_samples: list[Sample] = []
    rejections: list[Rejection] = []
    for sample in samples:
        if takes is None or takes(sample):
            taken_samples.append(sample)
        else:
            detail = f"{place.method.title} does not train on this {sample.kind} sample"
            rejections.append(Rejection(stage=STAGE, subject=sample_id(sample), reason="not-taken", detail=detail))
    # The two sides of a pair are no training samples by themselves.
    earlier = [
        sample
        for before in range(1, iteration if recipe.data.replay else 1)
        if not place.plan(before).pairs
        for sample in load_samples(place.store, iteration_id=place.iteration_id(before)).values()
    ]
    forbidden = _held_out(place, (*taken_samples, *earlier))
    control: FilterResult[Sample] = FilterResult((), ())
    if recipe.data.suffixes == "exchanged":
        control = exchanged(taken_samples)
        taken_samples = list(control.kept)
    dataset = build_dataset(
        taken_samples,
        _fitting(place, iteration),
        renderer,
        test=forbidden,
        seed=derive_seed(place.recipe.seed, "dataset", iteration),
        earlier=earlier,
        general=general,
        shares=_shares(place),
    )
    return _Made(
        dataset=dataset,
        samples=(*samples, *control.kept, *earlier),
        sides={"": dataset.rows},
        general=general,
        exchanged=control.kept,
        useless=(*useless, *rejections, *control.rejected),
    )


def _make_pairs(place: Workplace, iteration: int, renderer: Renderer) -> _Made:
    preferences = load_preferences(place.store, place.source_id(iteration))
    samples = tuple(side for pair in preferences.values() for side in (pair.chosen, pair.rejected))
    dataset = build_pairs(
        preferences,
        _fitting(place, iteration),
        renderer,
        test=_held_out(place, samples),
        seed=derive_seed(place.recipe.seed, "dataset", iteration),
        shares=_shares(place),
    )
    sides = {"chosen_": dataset.rows[::2], "rejected_": dataset.rows[1::2]}
    return _Made(dataset=dataset, samples=samples, sides=sides)


def _fitting(place: Workplace, iteration: int) -> DataConfig:
    """Return the recipe's section `data`, with `max_length` lowered to the context length of the
    trained model.
    """
    config, context = place.recipe.data, own_context_length(place.policy(iteration).path)
    if not context or 0 < config.max_length <= context:
        return config
    return replace(config, max_length=context)


def _held_out(place: Workplace, samples: Iterable[Sample]) -> list[Instance]:
    """Return the instances that must not be trained on: those of all evaluation sets, and those of
    `samples` that have the same origin as one of them.
    """
    test = list(dict.fromkeys(chain.from_iterable(held_out(place).values())))
    instances = list(dict.fromkeys(sample.instance for sample in samples if sample.instance is not None))
    traits = instance_traits(place.store, [instance.key for instance in (*test, *instances)])
    origins = {traits[instance.key].origin for instance in test if instance.key in traits}
    return test + [
        instance for instance in instances if instance.key in traits and traits[instance.key].origin in origins
    ]


def _shares(place: Workplace) -> dict[str, float]:
    """Return the wanted share of each world in the rows; empty if the recipe sets none."""
    return {name: world.share for name, world in place.recipe.environments.items() if world.share}


def _check(place: Workplace, iteration: int, dataset: Dataset, stored_hash: str | None) -> None:
    """Raise `DataFault` for a dataset that is empty, or that differs from the stored one."""
    key, content, file = dataset_id(place, iteration), dataset.manifest.dataset_hash, dataset_file(place, iteration)
    if not dataset.rows:
        plan = place.plan(iteration)
        purpose = f" for {place.recipe.name} ({plan.phase})" if plan.takes else ""
        raise DataFault(
            f"iteration {iteration} of run {place.source_run(iteration)} has no sample to train on"
            f"{purpose}; `select * from v_funnel` and `select * from v_rejections` show where they were lost"
        )
    if stored_hash is not None and stored_hash != content:
        raise DataFault(
            f"dataset {key} was stored with hash {stored_hash} and is {content} now, and its file "
            f"{file} is {'another one' if file.exists() else 'gone'}; bring the file back, or begin a new run"
        )


def _write_file(sides: Mapping[str, Sequence[TokenRow]], path: Path, content_hash: str) -> None:
    table = pa.table(
        {
            f"{side}{name}": pa.array([list(getattr(row, name)) for row in rows], pa.list_(pa.int32()))
            for side, rows in sides.items()
            for name in ("input_ids", "labels")
        },
        metadata={_HASH: content_hash.encode()},
    )
    draft = path.with_suffix(".new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(table, draft)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        draft.replace(path)


# Whole episodes as samples: all replies are trained, and nothing else.


def whole_rows(place: Workplace, iteration: int, trajectories: Mapping[str, Trajectory], *, stage: str) -> Rows:
    """Return the rows of the samples made of whole trajectories, given by id, and of the rejections
    of those that give none.
    """
    iteration_id = place.iteration_id(iteration)
    units: list[Rows] = []
    with place.worlds() as worlds:
        for key, trajectory in trajectories.items():
            env = worlds.of(trajectory.instance)
            for result in whole_samples(env, key, trajectory, place.recipe.data.windowed, stage=stage):
                if isinstance(result, Rejection):
                    units.append(rejection_rows([result], iteration_id=iteration_id))
                else:
                    units.append(sample_rows(sample_id(result), result, iteration_id=iteration_id, trajectory_id=key))
    return merge(units)


def whole_samples(
    env: Environment, key: str, trajectory: Trajectory, way: Way, *, stage: str
) -> Iterator[Sample | Rejection]:
    """Yield the samples of a trajectory, in which all its replies are trained: one for each stretch
    of a conversation whose prompts left out the same exchanges, or the rejection of a conversation.
    """
    for part in (parts := conversations(env, trajectory)):
        if part.is_left_out:
            continue
        extra = {"trajectory": key} | ({"conversation": part.positions[0]} if len(parts) > 1 else {})
        sample = Sample(
            kind=SampleKind.GOOD,
            messages=part.messages,
            instance=trajectory.instance,
            provenance=Provenance(good_reward=trajectory.reward, extra=extra),
        )
        drop_counts = [trajectory.steps[position].dropped for position in part.positions]
        result = split(sample, drop_counts, way, stage=stage, subject=key)
        yield from [result] if isinstance(result, Rejection) else result
