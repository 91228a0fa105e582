"""What the shipped methods do: the stages of every iteration, every id, and the hash of every dataset.

The recipes are the shipped ones, cut down to seconds: their world is the door, and their model the one beside this file,
in float32. Nothing is trained: what an iteration would train is stored as the model that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import door
import pytest

from agentr_core.arms import arms_of, pool_stages
from agentr_core.config import Recipe
from agentr_core.fingerprint import fingerprint
from agentr_core.stages.collect import collect
from agentr_core.stages.critique import critique
from agentr_core.stages.dataset import dataset, dataset_id
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.expert import demonstrate
from agentr_core.stages.explore import explore
from agentr_core.stages.place import Workplace
from agentr_core.stages.prefer import prefer
from agentr_core.stages.splice import splice_pairs
from agentr_core.stages.start import begin, end, start
from agentr_core.stages.train import job_of
from agentr_core.store.codec import checkpoint_rows
from agentr_core.store.tables import TABLES
from flows.flywheel import construction
from tasks.wiring import load_recipe, quiet_workplace, reference

RECIPES = Path("deployments/recipes")
MODEL = "{path: tests/golden/model, device: cpu, dtype: float32, max_batch: 16}"
CUT = (
    "environment={name: door, options: {knows: true}}",
    f"model={MODEL}",
    "instances={train: train, test: test}",
    "evaluation={max_steps: 4, max_new_tokens: 6, revision_test: {max_steps: 4}}",
    "training.num_threads=1",
)
TREES = ("search={dives: 2, width: 4, depth: 4, max_new_tokens: 6}", "critique={max_new_tokens: 6, unparsable: bad}")
EXPLORED = ("eto.explore.samples=2", "eto.explore.max_steps=4", "eto.explore.max_new_tokens=6")
STAGES = {
    "collect": collect,
    "critique": critique,
    "splice": splice_pairs,
    "demonstrate": demonstrate,
    "explore": explore,
    "prefer": prefer,
}
UNSTORED = {"text", "timing", "event", "training_step", "metric"}
"""Tables whose keys say nothing of what was made, or that are empty without a training."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Recipe], Workplace]]:
    """Return a maker of workplaces in one workspace, with the door among the environments."""
    monkeypatch.syspath_prepend(str(door.install(tmp_path / "site")))

    def make(recipe: Recipe) -> Workplace:
        return quiet_workplace(reference(recipe), recipe)

    yield make


def cut(name: str, workspace: Path, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", [*CUT, f"workspace={workspace}", *overrides])


async def begun(place: Workplace) -> None:
    await start(place)
    if not place.recipe.compare.pool:
        await evaluate(place, 0)
    await end(place, 0)


async def turned(place: Workplace, iteration: int, constructs: Sequence[str]) -> list[str]:
    """Do an iteration but for its training, and return what it made as lines."""
    await begin(place, iteration)
    for name in constructs:
        await STAGES[name](place, iteration)
    made = await dataset(place, iteration)
    key = dataset_id(place, iteration)
    checkpoint = job_of(place, iteration).output_dir.name
    base = place.trained(0)
    place.store.write(
        checkpoint_rows(checkpoint, path=str(base.path), weights_sha256=base.weights_sha256, config={}, dataset_id=key)
    )
    iteration_id = place.iteration_id(iteration)
    place.store.update("iteration", {"iteration_id": iteration_id, "checkpoint_out": checkpoint})
    await evaluate(place, iteration)
    await end(place, iteration)
    return [
        f"  iteration {iteration} {iteration_id}: {' '.join([*constructs, 'dataset', 'train', 'evaluate'])}",
        f"    phase {place.recipe.phase(iteration)}, checkpoint {checkpoint}",
        f"    dataset {key} with hash {made['dataset_hash']}: {made['samples']}",
    ]


def stored(place: Workplace) -> list[str]:
    """Return each table's number of rows and the fingerprint of all their keys."""
    lines = []
    for name, table in TABLES.items():
        if name not in UNSTORED and (rows := place.all(f"select {', '.join(table.key)} from {name} order by all")):
            lines.append(f"  {name}: {len(rows)}, {fingerprint(rows)}")
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [("textcraft-tiny", (*TREES, f"models.judge={MODEL}")), ("textcraft-eto-tiny", EXPLORED)]
)
async def test_wheel(
    name: str,
    more: Sequence[str],
    place: Callable[[Recipe], Workplace],
    tmp_path: Path,
    golden: Callable[[str, str], None],
) -> None:
    recipe = cut(name, tmp_path / "runs", *more)
    run = place(recipe)
    await begun(run)
    lines = [f"run {run.run_id}"]
    for iteration in range(1, recipe.iterations + 1):
        lines += await turned(run, iteration, [stage.name for stage in construction(recipe, iteration)])
    golden(f"{name}.txt", "\n".join([*lines, "rows", *stored(run)]) + "\n")


@pytest.mark.slow
async def test_comparison(
    place: Callable[[Recipe], Workplace], tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    recipe = cut("textcraft-compare-tiny", tmp_path / "runs", *TREES, *EXPLORED, "compare.seeds=[0]")
    pool = place(recipe)
    await begun(pool)
    await begin(pool, 1)
    lines = [f"run {pool.run_id}", f"  iteration 1 {pool.iteration_id(1)}: {' '.join(pool_stages(recipe))}"]
    for name in pool_stages(recipe):
        await STAGES[name](pool, 1)
    await end(pool, 1)
    for arm in arms_of(recipe, pool.run_id):
        run = place(arm.recipe)
        await begun(run)
        lines += [f"arm {arm.name}, seed {arm.seed}: run {run.run_id}", *await turned(run, 1, ())]
    golden("textcraft-compare-tiny.txt", "\n".join([*lines, "rows", *stored(pool)]) + "\n")
