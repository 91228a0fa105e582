"""The trainer's process: `python -m agentr_core.training.worker JOB_FILE EVENTS_FILE`, started by `sft.train`.

It ends when its standard input does, so that it never outlives the process that wants its checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentr_core.errors import ModelDirectoryError, TrainingFault
from agentr_core.training.checkpoints import ADAPTER, HISTORY, Manifest, is_complete, publish
from agentr_core.training.job import EVENT, JOB, STEP, Event, TrainingJob, TrainingStep

LOCK_WAIT = 30.0
"""Seconds to wait for a trainer of the same job, whose parent was killed, to notice and end."""
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
_REWRITTEN = ("config.json", "generation_config.json", "manifest.json", HISTORY)


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 when the checkpoint is published, 1 after a fault, which the events file tells."""
    job_file, events_file = (Path(argument) for argument in arguments)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = JOB.validate_json(job_file.read_bytes())
    with events_file.open("ab", buffering=0) as events:

        def tell(event: Event) -> None:
            events.write(EVENT.dump_json(event) + b"\n")

        try:
            with _lock(job.work.lock_file):
                if not is_complete(job.output_dir):
                    run(job, tell)
        except Exception as error:
            traceback.print_exc()
            from agentr_core.training.faults import describe

            tell(describe(error, job.work.root))
            return 1
    return 0


def run(job: TrainingJob, tell: Callable[[TrainingStep], None]) -> Manifest:
    """Train a job in this process, from its last intermediate checkpoint if there is one, and publish the result.

    Raises:
        DataFault: the dataset is empty or has broken rows.
        ModelDirectoryError: the model cannot be loaded.
        NonFiniteLoss: loss or gradient became NaN or infinite.
        TrainingFault: the device cannot do what the job asks for.
    """
    import torch
    from transformers import AutoConfig, set_seed
    from transformers.utils.logging import disable_progress_bar

    from agentr_core.training.packing import trained_tokens
    from agentr_core.training.plan import plan
    from agentr_core.training.token_rows import read_rows
    from agentr_core.training.trainer import last_checkpoint, make_trainer, samples_per_step

    if job.config.num_threads:
        torch.set_num_threads(job.config.num_threads)
    if job.config.bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise TrainingFault(f"{torch.cuda.get_device_name()} has no bfloat16; set training.bf16=false")
    disable_progress_bar()
    set_seed(job.seed)
    with _model_faults(job.model_dir):
        text_config = AutoConfig.from_pretrained(job.model_dir).get_text_config()
    rows = read_rows(job.dataset_file, vocabulary=text_config.vocab_size, context=text_config.max_position_embeddings)
    steps = plan(
        [trained_tokens(row) for row in rows],
        per_step=samples_per_step(job.config),
        epochs=job.num_train_epochs,
        max_tokens=job.config.max_tokens,
        seed=job.seed,
    )
    with _model_faults(job.model_dir):
        model, tokenizer, dtype = _load(job.model_dir)
    trainer = make_trainer(job, steps, rows, model=model, tokenizer=tokenizer, tell=tell)
    resume_from = last_checkpoint(job.work.checkpoints)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)

    history = trainer.steps_done()
    _write_checkpoint(job, trainer, history, dtype)
    manifest = Manifest(
        job=job.fingerprint,
        parent=job.parent,
        dataset_hash=job.dataset_hash,
        config=JOB.dump_python(job, mode="json")["config"],
        seed=job.seed,
        steps=len(history),
        epochs=steps.epochs,
        trained_tokens=history[-1].trained_tokens,
        final_loss=history[-1].loss,
        seconds=history[-1].seconds,
        versions={"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
    )
    return publish(job.work.staging, job.output_dir, manifest)


def _load(model_dir: Path) -> tuple[Any, Any, Any]:
    """Return the model with 32-bit weights, its tokenizer, and the number format that it is kept in."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    dtype = model.dtype
    return model.to(torch.float32), AutoTokenizer.from_pretrained(model_dir), dtype


def _write_checkpoint(job: TrainingJob, trainer: Any, history: list[TrainingStep], dtype: Any) -> None:
    staging = job.work.staging
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir()
    model = trainer.accelerator.unwrap_model(trainer.model)
    if job.config.lora_r:
        model.save_pretrained(staging / ADAPTER)
        model = model.merge_and_unload()
    model.to(dtype).save_pretrained(staging)
    # Tokenizer and chat template go along byte for byte: what the model reads must not change with its weights.
    for file in sorted(job.model_dir.iterdir()):
        if file.is_file() and file.name not in _REWRITTEN and not _is_weights(file):
            shutil.copyfile(file, staging / file.name)
    (staging / HISTORY).write_bytes(b"".join(STEP.dump_json(step) + b"\n" for step in history))


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json")


@contextmanager
def _model_faults(model_dir: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelDirectoryError(f"model {model_dir} cannot be loaded: {str(error).splitlines()[0]}") from error


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("a+") as stream:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    stream.seek(0)
                    raise TrainingFault(
                        f"process {stream.read().strip()} trains this job already; wait for it or end it"
                    ) from None
                time.sleep(0.1)
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def _end_with_parent() -> None:
    # Past Python's own buffer, whose lock a thread must not hold when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
