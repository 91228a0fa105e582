"""What the shipped methods do: the stages of every iteration, every id, and the hash of every
dataset.

The recipes are the shipped ones, cut down to seconds: their world is the door, and their model the
one beside this file, in float32. Nothing is trained: what an iteration would train is stored as the
model that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import door
import pytest

from agentr_core.fingerprint import fingerprint
from agentr_core.methods.comparison import arms_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, end_iteration, start_run
from agentr_core.stages.dataset import dataset_id
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.train import training_job
from agentr_core.store.codec.ledger import checkpoint_rows
from agentr_core.store.tables import TABLES
from tasks.wiring import load_recipe, quiet_context, run_reference

RECIPES = Path("deployments/recipes")
MODEL = "{path: tests/golden/model, device: cpu, dtype: float32, max_batch: 16}"
CUT = (
    "environment={name: door, options: {knows: true}}",
    f"model={MODEL}",
    "instances={train: train, test: test}",
    "evaluation={max_steps: 4, max_new_tokens: 6, revision_test: {max_steps: 4}}",
    "training.num_threads=1",
    # `auto` would be another setting, and another id, on a processor without bfloat16.
    "training.bf16=true",
)
TREES = ("search={dives: 2, width: 4, depth: 4, max_new_tokens: 6}", "critique={max_new_tokens: 6, unparsable: bad}")
BUDGET = (
    "training.max_tokens=130000",
    "training.step_tokens=0",
    "training.per_device_train_batch_size=8",
    "training.launch=null",
)
"""As when the golden files were made: budgets and steps are chosen anew with each base."""
EXPLORED = ("eto.explore.samples=2", "eto.explore.max_steps=4", "eto.explore.max_new_tokens=6", "eto.explore.repeats=0")
CLONED = (
    "data={max_length: 2048}",
    "training={num_train_epochs: [1], learning_rate: 1.0e-3, per_device_train_batch_size: 8}",
    "training.num_threads=1",
    "training.bf16=true",
)
UNSTORED = {"text", "timing", "event", "training_step", "metric"}
"""Tables whose keys say nothing of what was made, or that are empty without a training."""


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Recipe], RunContext]:
    """Return a maker of workplaces in one workspace, with the door among the environments."""
    monkeypatch.syspath_prepend(str(door.install(tmp_path / "site")))

    def make(recipe: Recipe) -> RunContext:
        return quiet_context(run_reference(recipe), recipe)

    return make


def cut(name: str, workspace: Path, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", [*CUT, f"workspace={workspace}", *overrides])


async def begin_run(ctx: RunContext) -> None:
    await start_run(ctx)
    if not ctx.recipe.compare.pool:
        await evaluate(ctx, 0)
    await end_iteration(ctx, 0)


async def do_iteration(ctx: RunContext, iteration: int) -> list[str]:
    """Do an iteration but for its training, and return what it made as lines."""
    await begin_iteration(ctx, iteration)
    plan, iteration_id = ctx.plan(iteration), ctx.iteration_id(iteration)
    lines = [f"  iteration {iteration} {iteration_id}: {' '.join(stage.name for stage in plan.stages)}"]
    for stage in plan.stages:
        if stage.name != "train":
            counts = await stage.work(ctx, iteration)
        if stage.name == "dataset":
            assert plan.training is not None
            lines.append(f"    {plan.training.objective.kind}, checkpoint {store_checkpoint(ctx, iteration)}")
            key = dataset_id(ctx, iteration)
            lines.append(f"    dataset {key} with hash {counts['dataset_hash']}: {counts['samples']}")
    await end_iteration(ctx, iteration)
    return lines


def store_checkpoint(ctx: RunContext, iteration: int) -> str:
    """Store the checkpoint of an iteration as if it had been trained, and return its id."""
    checkpoint, base = training_job(ctx, iteration).output_dir.name, ctx.trained_checkpoint(0)
    weights = {"path": str(base.path), "weights_sha256": base.weights_sha256}
    ctx.store.write(checkpoint_rows(checkpoint, **weights, config={}, dataset_id=dataset_id(ctx, iteration)))
    key = ctx.iteration_id(iteration)
    ctx.store.update("iteration", {"iteration_id": key, "checkpoint_out": checkpoint})
    return checkpoint


def table_lines(ctx: RunContext) -> list[str]:
    """Return each table's number of rows and the fingerprint of all their keys."""
    lines = []
    for name, table in TABLES.items():
        if name not in UNSTORED and (rows := ctx.store.rows(f"select {', '.join(table.key)} from {name} order by all")):
            lines.append(f"  {name}: {len(rows)}, {fingerprint(rows)}")
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [("textcraft-tiny", (*TREES, *BUDGET, f"models.judge={MODEL}")), ("textcraft-eto-tiny", (*EXPLORED, *CLONED))],
)
async def test_wheel(
    name: str,
    more: Sequence[str],
    ctx: Callable[[Recipe], RunContext],
    tmp_path: Path,
    golden: Callable[[str, str], None],
) -> None:
    recipe = cut(name, tmp_path / "runs", *more)
    run = ctx(recipe)
    await begin_run(run)
    lines = [f"run {run.run_id}"]
    for iteration in range(1, recipe.iterations + 1):
        lines += await do_iteration(run, iteration)
    golden(f"{name}.txt", "\n".join([*lines, "rows", *table_lines(run)]) + "\n")


@pytest.mark.long
@pytest.mark.slow
async def test_comparison(
    ctx: Callable[[Recipe], RunContext], tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    # As when the golden file was made.
    data = ("data={use: both, good_per_tree: 1, max_length: 2048}", "compare.metrics=[]", "compare.seeds=[0]")
    budget = (*BUDGET, "training.max_tokens=80000")
    recipe = cut("textcraft-compare-tiny", tmp_path / "runs", *TREES, *EXPLORED, *data, *budget)
    pool = ctx(recipe)
    await begin_run(pool)
    lines = [f"run {pool.run_id}", *await do_iteration(pool, 1)]
    for arm in (arm for arm in arms_of(recipe, pool.run_id) if arm.samples_recipe is None):
        run = ctx(arm.recipe)
        await begin_run(run)
        lines += [f"arm {arm.name}, seed {arm.seed}: run {run.run_id}", *await do_iteration(run, 1)]
    golden("textcraft-compare-tiny.txt", "\n".join([*lines, "rows", *table_lines(pool)]) + "\n")
