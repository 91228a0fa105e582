"""The process that trains a base model: `python -m agentr_core.base_model.worker JOB_FILE
EVENTS_FILE`, started by `make`.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from agentr_core.base_model.job import EVENT, JOB, BaseJob, BaseStep
from agentr_core.base_model.make import LESS_MEMORY
from agentr_core.lifetime import end_with_parent, importing
from agentr_core.training.job import Fault
from agentr_core.training.worker import locked


def main(arguments: list[str]) -> int:
    """Make the base model of a job; return the exit status: 0 when it is published.

    SIGTERM lets the training save a checkpoint after its current step. A fault is written to the
    events file.
    """
    job_file, events_file = (Path(argument) for argument in arguments)
    end_with_parent()
    cancelled = Event()
    signal.signal(signal.SIGTERM, lambda *_: cancelled.set())
    job = JOB.validate_json(job_file.read_bytes())
    with events_file.open("ab", buffering=0) as events:

        def tell(event: BaseStep | Fault) -> None:
            events.write(EVENT.dump_json(event) + b"\n")

        try:
            with locked(job.work.lock_file):
                _make(job, tell, cancelled)
        except Exception as error:
            traceback.print_exc()
            from agentr_core.training.faults import describe

            tell(describe(error, job.work.root, less_memory=LESS_MEMORY))
            return 1
    return int(cancelled.is_set())


def _make(job: BaseJob, tell: Callable[[BaseStep | Fault], None], cancelled: Event) -> None:
    if job.is_made():
        return
    with importing():
        import torch

        from agentr_core.base_model.pretrain import pretrain
        from agentr_core.base_model.publish import publish
        from agentr_core.models.cpu_memory import keep_freed_memory

    if not torch.cuda.is_available():
        keep_freed_memory()
    model, tokenizer = pretrain(
        job.config, seed=job.seed, work=job.work.checkpoints, callbacks=[_reporting(tell, cancelled)]
    )
    if not cancelled.is_set():
        publish(job, model, tokenizer)


def _reporting(tell: Callable[[BaseStep | Fault], None], cancelled: Event) -> Any:
    """Return a trainer's callback that passes its log on to `tell`, and a cancellation back."""
    from transformers import TrainerCallback

    class Report(TrainerCallback):  # type: ignore[misc]
        """A callback that passes the trainer's log on, and a cancellation back."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Report step and loss."""
            if logs and "loss" in logs:
                tell(BaseStep(step=state.global_step, total_steps=state.max_steps, loss=float(logs["loss"])))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Save and stop once cancelled."""
            if cancelled.is_set():
                control.should_save = control.should_training_stop = True

    return Report()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
