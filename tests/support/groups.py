"""A recipe of method grpo that trains on the door in seconds, in this process or in one that is
killed: `python -m groups RECIPE [STEP]`, which kills itself once the groups of that step are
stored.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

from agentr_core.methods.grpo import train
from agentr_core.methods.grpo.train import reinforce
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from tasks.wiring import load_recipe, quiet_context, run_reference

RECIPE = """\
name: groups
method: grpo
workspace: {workspace}
iterations: 1
environment: {{name: door}}
model: {{path: {model}, device: cpu, dtype: float32, max_batch: 16, workers: 1}}
grpo:
  steps: 4
  groups: 3
  num_generations: 4
  resample: 1
  max_steps: 3
  max_new_tokens: 6
  minibatches: 2
  save_steps: 2
training: {{learning_rate: 1.0e-3, bf16: false, num_threads: 1}}
evaluation: {{max_steps: 4, max_new_tokens: 6, revision_test: {{enabled: false}}}}
"""


WATCHED = "evaluation: {sets: {dev: {split: dev}}, development: dev}\ngrpo: {eval_steps: 1}\n"
"""More of a recipe: a validation after each step."""


def write(folder: Path, model: Path, *, more: str = "") -> Path:
    """Write the recipe into a folder; its workspace lies there, too.

    Args:
        more: fields that are added to those of its sections, as YAML.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "groups.yaml"
    recipe = yaml.safe_load(RECIPE.format(workspace=folder / "runs", model=model))
    for section, fields in yaml.safe_load(more or "{}").items():
        recipe[section] = recipe.get(section, {}) | fields
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


async def begun(file: Path, *overrides: str) -> RunContext:
    """Return the workplace of the recipe with its first iteration begun."""
    recipe = load_recipe(file, list(overrides))
    ctx = quiet_context(run_reference(recipe), recipe)
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    return ctx


async def trained(file: Path, *overrides: str) -> dict[str, Any]:
    """Train the first iteration, and return the summary."""
    ctx = await begun(file, *overrides)
    with ctx.store.keep_open():
        return await reinforce(ctx, 1)


def die_before_training_on(wanted: int) -> None:
    """Kill this process, as `kill -9` does, between the samples of a step and its training."""
    update = train._update

    def update_or_die(learner: Any, rows: Any, job: Any, step: int) -> Any:
        if step == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(learner, rows, job, step)

    train._update = update_or_die


async def main() -> None:
    """Train the first iteration."""
    file, *step = sys.argv[1:]
    if step:
        die_before_training_on(int(step[0]))
    await trained(Path(file))


if __name__ == "__main__":
    asyncio.run(main())
