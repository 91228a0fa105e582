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
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.instances import held_out_by_set
from agentr_core.samples.chat_file import read_chat
from agentr_core.samples.dataset import (
    Dataset,
    FilterResult,
    TokenRow,
    WindowedRule,
    build_dataset,
    build_pairs,
    exchange_suffixes,
    hash_of,
    split_windowed,
)
from agentr_core.samples.identity import sample_id, trained_spans
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.store.codec.ledger import rejection_rows
from agentr_core.store.codec.samples import dataset_rows, load_preferences, load_samples, sample_rows, store_dataset
from agentr_core.store.queries.datasets import complete_dataset_hashes, instance_traits, stored_dataset
from agentr_core.store.tables import Rows, merge
from agentr_core.system import report_write_errors
from agentr_core.types import Instance, Provenance, Rejection, Sample, SampleKind, Trajectory

STAGE = "dataset"
_HASH_KEY = b"agentr.dataset_hash"
"""The field of a file's metadata that has the hash of its rows."""


def dataset_id(ctx: RunContext, iteration: int) -> str:
    """Return the id of the dataset of an iteration."""
    return fingerprint("dataset", ctx.iteration_id(iteration), ctx.recipe.data)


def dataset_file(ctx: RunContext, iteration: int) -> Path:
    """Return the path of the Parquet file with columns `input_ids` and `labels`; for pairs, with
    both columns for each side.
    """
    return ctx.root / "datasets" / f"{dataset_id(ctx, iteration)}.parquet"


def load_token_rows(ctx: RunContext, iteration: int) -> list[tuple[list[int], list[int]]]:
    """Return the token ids and labels of each sample of a dataset, in order. The dataset must not
    be one of pairs.

    Raises `ConfigError` when its file is missing or damaged.
    """
    file = dataset_file(ctx, iteration)
    try:
        table = pq.read_table(file, columns=["input_ids", "labels"])
    except FileNotFoundError as error:
        raise ConfigError(f"{file}, which has the tokens of iteration {iteration}, is missing; restore it") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"{file}, which has the tokens of iteration {iteration}, is damaged ({error}); restore it"
        ) from error
    return list(zip(table["input_ids"].to_pylist(), table["labels"].to_pylist(), strict=True))


async def dataset(ctx: RunContext, iteration: int) -> dict[str, Any]:
    """Build the dataset of an iteration unless it exists; return its hash as `dataset_hash`, with
    its counts.

    Raises `DataFault` when no sample is left, since training on nothing would only repeat the
    policy, and when the file of a stored dataset is missing or changed and its samples no longer
    reproduce it.
    """
    with ctx.timed(STAGE, iteration):
        return await asyncio.to_thread(_build_and_store, ctx, iteration)


def check_dataset(ctx: RunContext, iteration: int, content_hash: str) -> None:
    """Raise `StoreError` unless the store has all rows of the dataset of an iteration with this
    hash, and `DataFault` if its file exists and has other contents.
    """
    file = dataset_file(ctx, iteration)
    if content_hash not in complete_dataset_hashes(ctx.store, ctx.iteration_id(iteration)):
        raise StoreError(
            f"{ctx.store.path} lacks rows of the dataset of iteration {iteration} of run {ctx.run_id}; put back a "
            "store that has them, or take the run out with `agentr store prune` and run it again"
        )
    if file.exists() and _file_hash(file) != content_hash:
        raise DataFault(f"{file} is not the dataset that is stored; move it away, and build it again")


def _file_hash(file: Path) -> str:
    """Return the hash of the dataset in a Parquet file, computed from its rows if an earlier
    version stored none; empty if the file is missing, damaged or no dataset.
    """
    try:
        stored_hash = (pq.read_schema(file).metadata or {}).get(_HASH_KEY)
        if stored_hash is not None:
            return str(stored_hash.decode())
        columns = pq.read_table(file).to_pydict()
        sides = [""] if "input_ids" in columns else ["chosen_", "rejected_"]
        rows = [zip(columns[f"{side}input_ids"], columns[f"{side}labels"], strict=True) for side in sides]
    except (OSError, pa.ArrowInvalid, KeyError):
        return ""
    return hash_of(chain.from_iterable(zip(*rows, strict=True)))


def _build_and_store(ctx: RunContext, iteration: int) -> dict[str, Any]:
    dataset_key, file = dataset_id(ctx, iteration), dataset_file(ctx, iteration)
    stored = stored_dataset(ctx.store, dataset_key)
    if stored is not None and file.exists() and _file_hash(file) == stored.hash:
        return {"dataset_hash": stored.hash, **stored.counts}
    renderer = load_renderer(ctx.policy(iteration).path, at=ctx.started_at())
    built = (
        _build_from_pairs(ctx, iteration, renderer)
        if ctx.plan(iteration).has_pairs
        else _build_from_samples(ctx, iteration, renderer)
    )
    _check_built(ctx, iteration, built.dataset, stored.hash if stored is not None else None)
    _write_file(built.sides, file, built.dataset.manifest.dataset_hash)
    sample_ids = {row.sample_id for row in built.dataset.rows}
    manifest = built.dataset.manifest
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
    replies = {sample_id(sample): trained_spans(sample) for sample in built.samples if sample_id(sample) in sample_ids}
    num_tokenised_anew = sum(
        bool(span.token_ids) and not renderer.sampled_ids(span) for spans in replies.values() for span in spans
    )
    if num_tokenised_anew:
        counts["tokenised_anew"] = num_tokenised_anew
    iteration_id = ctx.iteration_id(iteration)
    new_samples = [*built.exchanged, *(sample for sample in built.general if sample_id(sample) in sample_ids)]
    rows = [
        *(sample_rows(sample_id(sample), sample, iteration_id=iteration_id) for sample in new_samples),
        rejection_rows([*built.rejections, *built.dataset.rejections], iteration_id=iteration_id),
        dataset_rows(
            dataset_key,
            [row.sample_id for row in built.dataset.rows],
            iteration_id=iteration_id,
            content_hash=manifest.dataset_hash,
            counts=counts,
        ),
    ]
    lengths = {row.sample_id: (len(row.input_ids), sum(row.trained_tokens.values())) for row in built.dataset.rows}
    store_dataset(ctx.store, merge(rows), lengths)
    return {"dataset_hash": manifest.dataset_hash, **counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltDataset:
    """A dataset and what it was built from: `samples` are all candidates for its rows, `exchanged`
    those of them that were given suffixes of others, `general` conversations from a file, and
    `useless` the rejections of candidates. `sides` has the rows by the prefix of their columns.
    """

    dataset: Dataset
    samples: Sequence[Sample]
    sides: Mapping[str, Sequence[TokenRow]]
    general: Sequence[Sample] = ()
    exchanged: Sequence[Sample] = ()
    rejections: Sequence[Rejection] = ()


def _build_from_samples(ctx: RunContext, iteration: int, renderer: Renderer) -> _BuiltDataset:
    recipe = ctx.recipe
    general, unusable_records = read_chat(Path(recipe.data.general.file)) if recipe.data.general.share else ((), ())
    samples = tuple(load_samples(ctx.store, iteration_id=ctx.source_id(iteration)).values())
    takes_sample = ctx.plan(iteration).takes_sample
    taken_samples: list[Sample] = []
    rejections: list[Rejection] = []
    for sample in samples:
        if takes_sample is None or takes_sample(sample):
            taken_samples.append(sample)
        else:
            detail = f"{ctx.method.title} does not train on this {sample.kind} sample"
            rejections.append(Rejection(stage=STAGE, subject=sample_id(sample), reason="not-taken", detail=detail))
    # The two sides of a pair are no training samples by themselves.
    earlier = [
        sample
        for earlier_iteration in range(1, iteration if recipe.data.replay else 1)
        if not ctx.plan(earlier_iteration).has_pairs
        for sample in load_samples(ctx.store, iteration_id=ctx.iteration_id(earlier_iteration)).values()
    ]
    forbidden = _forbidden_instances(ctx, (*taken_samples, *earlier))
    exchange: FilterResult[Sample] = FilterResult((), ())
    if recipe.data.suffixes == "exchanged":
        exchange = exchange_suffixes(taken_samples)
        taken_samples = list(exchange.kept_items)
    dataset = build_dataset(
        taken_samples,
        _config_within_context(ctx, iteration),
        renderer,
        test_instances=forbidden,
        seed=derive_seed(ctx.recipe.seed, "dataset", iteration),
        earlier_samples=earlier,
        general_samples=general,
        shares=_world_shares(ctx),
    )
    return _BuiltDataset(
        dataset=dataset,
        samples=(*samples, *exchange.kept_items, *earlier),
        sides={"": dataset.rows},
        general=general,
        exchanged=exchange.kept_items,
        rejections=(*unusable_records, *rejections, *exchange.rejections),
    )


def _build_from_pairs(ctx: RunContext, iteration: int, renderer: Renderer) -> _BuiltDataset:
    preferences = load_preferences(ctx.store, ctx.source_id(iteration))
    samples = tuple(side for pair in preferences.values() for side in (pair.chosen, pair.rejected))
    dataset = build_pairs(
        preferences,
        _config_within_context(ctx, iteration),
        renderer,
        test_instances=_forbidden_instances(ctx, samples),
        seed=derive_seed(ctx.recipe.seed, "dataset", iteration),
        shares=_world_shares(ctx),
    )
    sides = {"chosen_": dataset.rows[::2], "rejected_": dataset.rows[1::2]}
    return _BuiltDataset(dataset=dataset, samples=samples, sides=sides)


def _config_within_context(ctx: RunContext, iteration: int) -> DataConfig:
    """Return the recipe's section `data`, with `max_length` lowered to the context length of the
    trained model.
    """
    config, context = ctx.recipe.data, own_context_length(ctx.policy(iteration).path)
    if not context or 0 < config.max_length <= context:
        return config
    return replace(config, max_length=context)


def _forbidden_instances(ctx: RunContext, samples: Iterable[Sample]) -> list[Instance]:
    """Return the instances that must not be trained on: those of all evaluation sets, and those of
    `samples` that have the same origin as one of them.
    """
    test = list(dict.fromkeys(chain.from_iterable(held_out_by_set(ctx).values())))
    instances = list(dict.fromkeys(sample.instance for sample in samples if sample.instance is not None))
    traits = instance_traits(ctx.store, [instance.key for instance in (*test, *instances)])
    origins = {traits[instance.key].origin for instance in test if instance.key in traits}
    return test + [
        instance for instance in instances if instance.key in traits and traits[instance.key].origin in origins
    ]


def _world_shares(ctx: RunContext) -> dict[str, float]:
    """Return the wanted share of each world in the rows; empty if the recipe sets none."""
    return {name: world.share for name, world in ctx.recipe.environments.items() if world.share}


def _check_built(ctx: RunContext, iteration: int, dataset: Dataset, stored_hash: str | None) -> None:
    """Raise `DataFault` for a dataset that is empty, or that differs from the stored one."""
    key, content, file = dataset_id(ctx, iteration), dataset.manifest.dataset_hash, dataset_file(ctx, iteration)
    if not dataset.rows:
        plan = ctx.plan(iteration)
        purpose = f" for {ctx.recipe.name} ({plan.phase})" if plan.takes_sample else ""
        raise DataFault(
            f"iteration {iteration} of run {ctx.source_run(iteration)} has no sample to train on"
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
        metadata={_HASH_KEY: content_hash.encode()},
    )
    draft = path.with_suffix(".new")
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(table, draft)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        draft.replace(path)


# Whole episodes as samples: all replies are trained, and nothing else.


def whole_episode_rows(ctx: RunContext, iteration: int, trajectories: Mapping[str, Trajectory], *, stage: str) -> Rows:
    """Return the rows of the samples made of whole trajectories, given by id, and of the rejections
    of those that give none.
    """
    iteration_id = ctx.iteration_id(iteration)
    units: list[Rows] = []
    with ctx.worlds() as worlds:
        for key, trajectory in trajectories.items():
            env = worlds.env_of(trajectory.instance)
            for result in whole_samples(env, key, trajectory, ctx.recipe.data.windowed, stage=stage):
                if isinstance(result, Rejection):
                    units.append(rejection_rows([result], iteration_id=iteration_id))
                else:
                    units.append(sample_rows(sample_id(result), result, iteration_id=iteration_id, trajectory_id=key))
    return merge(units)


def whole_samples(
    env: Environment,
    key: str,
    trajectory: Trajectory,
    windowed: WindowedRule,
    *,
    stage: str,
    provenance: Provenance | None = None,
) -> Iterator[Sample | Rejection]:
    """Yield the samples of a trajectory, in which all its replies are trained: one for each stretch
    of a conversation whose prompts left out the same exchanges, or the rejection of a conversation.

    Args:
        key: the subject of rejections.
        provenance: where the trajectory comes from; by default `key` is the id that it has.
    """
    origin = provenance or Provenance(good_reward=trajectory.reward, extra={"trajectory": key})
    for conversation in (parts := conversations(env, trajectory)):
        if conversation.is_left_out:
            continue
        extra = {**origin.extra} | ({"conversation": conversation.positions[0]} if len(parts) > 1 else {})
        sample = Sample(
            kind=SampleKind.GOOD,
            messages=conversation.messages,
            instance=trajectory.instance,
            provenance=replace(origin, extra=extra),
        )
        drop_counts = [trajectory.steps[position].dropped for position in conversation.positions]
        result = split_windowed(sample, drop_counts, windowed, stage=stage, subject=key)
        yield from [result] if isinstance(result, Rejection) else result
