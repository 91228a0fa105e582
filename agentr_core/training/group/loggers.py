"""Reports each step to the loggers in `training.report_to`, as a Trainer does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agentr_core.training.job import OnlineJob

Tell = Callable[[int, Mapping[str, float | None]], None]
"""Called with a step and numbers by name; loggers show those that begin with `eval_` separately."""
_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"


@contextmanager
def reporting(job: OnlineJob, model: Any) -> Iterator[Tell]:
    """Yield a function that reports to the loggers of a job; it does nothing if the job names
    none.
    """
    config, steps = job.config, job.objective.grpo.steps
    if not config.report_to:
        yield lambda step, numbers: None
        return
    # Slow to import.
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    arguments = TrainingArguments(
        output_dir=str(job.work.checkpoints),
        run_name=job.output_dir.name,
        max_steps=steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        logging_steps=1,
        report_to=list(config.report_to),
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=job.seed,
    )
    with _set(_TENSORBOARD, str(job.reports)):
        loggers = get_reporting_integration_callbacks(list(config.report_to))
        handler = CallbackHandler([DefaultFlowCallback, *loggers], model, None, None, None)
    state, control = TrainerState(max_steps=steps, logging_steps=1), TrainerControl()

    def tell(step: int, numbers: Mapping[str, float | None]) -> None:
        state.global_step = step
        handler.on_step_end(arguments, state, control)
        handler.on_log(arguments, state, control, {name: one for name, one in numbers.items() if one is not None})

    handler.on_train_begin(arguments, state, control)
    yield tell
    # To loggers this means success, so it is left out when a training fails.
    handler.on_train_end(arguments, state, control)


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
