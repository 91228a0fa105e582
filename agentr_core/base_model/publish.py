"""From a recipe of method `base` to a finished model directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from agentr_core.errors import TrainingFault
from agentr_core.fingerprint import canonical, fingerprint
from agentr_core.recipes import BaseConfig


def make_and_publish(
    config: BaseConfig, *, seed: int, work: Path, progress: Callable[[int, int, str], None], cancelled: Event
) -> Path:
    """Return the directory of the finished model, made if it is not there yet.

    An interrupted training goes on from its last checkpoint in `work`. The directory appears only
    when it is complete; its `recipe.json` says what it was made of. Once `cancelled` is set, the
    training saves a checkpoint after its current step and raises `TrainingFault`.
    """
    from agentr_core.base_model.pretrain import pretrain

    output = Path(config.output)
    # The location of a model is not part of what it is made of.
    made_of = replace(config, output="")
    key = fingerprint("base-model", made_of, seed)
    record = output / "recipe.json"
    if record.exists() and json.loads(record.read_text(encoding="utf-8")).get("key") == key:
        return output

    callbacks = [_reporting(progress, cancelled)]
    model, tokenizer = pretrain(config, seed=seed, work=work / key, callbacks=callbacks)
    if cancelled.is_set():
        raise TrainingFault(
            f"the training of {output} was cancelled; the same command goes on from its checkpoint in {work}"
        )
    draft = output.with_name(output.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    model.config.use_cache = True  # the trainer turns it off
    model.float().save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    (draft / "recipe.json").write_text(
        json.dumps({"key": key, "seed": seed, "base": json.loads(canonical(made_of))}, indent=2) + "\n",
        encoding="utf-8",
    )
    if output.exists():
        output.rename(output.with_name(f"{output.name}.before-{key}"))
    draft.rename(output)
    return output


def _reporting(progress: Callable[[int, int, str], None], cancelled: Event) -> Any:
    """Return a trainer's callback that passes its log on to `progress`, and a cancellation back."""
    from transformers import TrainerCallback

    class Report(TrainerCallback):  # type: ignore[misc]
        """A callback that passes the trainer's log on, and a cancellation back."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Report step and loss."""
            if logs and "loss" in logs:
                progress(state.global_step, state.max_steps, f"steps, loss {float(logs['loss']):.3f}")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Save and stop once cancelled."""
            if cancelled.is_set():
                control.should_save = control.should_training_stop = True

    return Report()
