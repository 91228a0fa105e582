"""Training seen from outside: start the trainer's process, follow it, and report how it ended.

Training has its own process so that a crash, a lack of memory or a cancellation ends only that
process, and so that its memory is freed when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentr_core.errors import (
    AgentrError,
    ConfigError,
    DataFault,
    ModelDirectoryError,
    NonFiniteLoss,
    OutOfMemory,
    TrainingFault,
)
from agentr_core.lifetime import python_path
from agentr_core.models.files import adapter_base
from agentr_core.training.checkpoints import is_complete, read_manifest
from agentr_core.training.job import EVENT, JOB, Fault, TrainingJob, TrainingStep, WorkFolder, write_whole
from agentr_core.training.launch import PLACES
from agentr_core.writing import writing

WORKER = "agentr_core.training.worker"
POLL = 0.2
"""Seconds between two readings of the events."""
GRACE = 5.0
"""Seconds a cancelled trainer has to end by itself."""
LINGER = 60.0
"""Seconds a trainer has to end by itself once its checkpoint is published."""
TAIL = 15
"""Lines of the log in an error message."""
_KINDS: dict[str, type[AgentrError]] = {
    kind.__name__: kind
    for kind in (ConfigError, DataFault, ModelDirectoryError, NonFiniteLoss, OutOfMemory, TrainingFault)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """A published checkpoint at `path`; `reused` says that it existed already and nothing was
    trained.

    `trained_tokens` counts tokens actually seen, repeats included; `final_loss` is that of the last
    step, in nats a token; `seconds` is time spent in training; `ended_by` is the setting that
    decided when training ended.
    """

    path: Path
    weights_sha256: str
    steps: int
    epochs: float
    trained_tokens: int
    final_loss: float
    seconds: float
    ended_by: str
    reused: bool


def _ignore(step: TrainingStep) -> None:
    pass


async def train(job: TrainingJob, *, on_progress: Callable[[TrainingStep], None] = _ignore) -> TrainingResult:
    """Return the checkpoint of a job: trained, continued after an interruption, or already there.

    `on_progress` is called after each optimizer step. Cancelling ends the trainer's process;
    calling again continues from its last intermediate checkpoint, to the same weights as without
    the interruption on the same processor and number of threads. A trainer whose parent was killed
    ends by itself.

    Raises:
        NonFiniteLoss: loss or gradient became NaN or infinite. The weights were not changed by it.
        OutOfMemory: memory ran out, or the system killed the trainer, which is how Linux reports
            that.
        TrainingFault: another fault, for example a full disk, or a foreign directory at
            `output_dir`.
        DataFault: the dataset is missing or has broken rows.
        ModelDirectoryError: the model directory cannot be loaded.
        ConfigError: the settings ask for a package, a device or a name that is not available.
        DiskError: the folder of the job cannot be made or written to.
    """
    if job.output_dir.exists():
        return _finished(job, reused=True)
    _check_inputs(job)
    with writing(job.work.root):
        job.work.root.mkdir(parents=True, exist_ok=True)
        write_whole(job.work.job_file, JOB.dump_json(job, indent=1))
    exit_status, fault = await _run(job, on_progress)
    if exit_status:
        raise _translate(exit_status, fault, job.work)
    return _finished(job, reused=False)


def _check_inputs(job: TrainingJob) -> None:
    base = adapter_base(job.model_dir) or job.model_dir
    if not (base / "config.json").is_file():
        raise ModelDirectoryError(f"{base} has no config.json; give a Hugging Face model directory")
    if not job.dataset_file.is_file():
        raise DataFault(f"dataset file {job.dataset_file} does not exist; build the dataset before training on it")


def _finished(job: TrainingJob, *, reused: bool) -> TrainingResult:
    if not is_complete(job.output_dir):
        raise TrainingFault(f"{job.output_dir} exists and is not a complete checkpoint; remove it or train elsewhere")
    manifest = read_manifest(job.output_dir)
    if manifest.job != job.fingerprint:
        raise TrainingFault(
            f"{job.output_dir} holds the checkpoint of another training (job {manifest.job}, not {job.fingerprint}); "
            "remove it or train elsewhere"
        )
    if job.work.root.exists():
        shutil.rmtree(job.work.root)
    return TrainingResult(
        path=job.output_dir,
        weights_sha256=manifest.weights_sha256,
        steps=manifest.steps,
        epochs=manifest.epochs,
        trained_tokens=manifest.trained_tokens,
        final_loss=manifest.final_loss,
        seconds=manifest.seconds,
        ended_by=manifest.ended_by,
        reused=reused,
    )


async def _run(job: TrainingJob, on_progress: Callable[[TrainingStep], None]) -> tuple[int, Fault | None]:
    """Return the exit status of the trainer's process (negative: the signal that ended it) and the
    fault that it reported.

    Once the checkpoint is published, the training is done: processes that do not end by themselves,
    since those of a group may wait for each other for ever, are ended.
    """
    fault: Fault | None = None
    published: float | None = None
    with (
        job.work.log_file.open("ab") as log,
        # A new file for each attempt: the events of earlier ones have been reported already.
        tempfile.NamedTemporaryFile(dir=job.work.root, prefix="events-", suffix=".jsonl") as events,
    ):
        process = await _started(job, events.name, log)
        exited = asyncio.ensure_future(process.wait())
        rest = b""
        try:
            while True:
                await asyncio.wait({exited}, timeout=POLL)
                ended = exited.done()
                *lines, rest = (rest + events.read()).split(b"\n")
                for line in lines:
                    event = EVENT.validate_json(line)
                    if isinstance(event, Fault):
                        # The first fault is the cause: other processes then report only that one is
                        # gone.
                        fault = fault or event
                    else:
                        on_progress(event)
                if ended:
                    return exited.result(), fault
                if published is None and is_complete(job.output_dir):
                    published = time.monotonic()
                if published is not None and time.monotonic() - published > LINGER:
                    return 0, fault
        finally:
            await _end(process, exited)


async def _started(job: TrainingJob, events: str, log: BinaryIO) -> asyncio.subprocess.Process:
    """Return the trainer's process, which writes what happens to the file `events`."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        WORKER,
        str(job.work.job_file),
        events,
        # Never written to: the trainer sees this pipe end when this process dies, however that
        # happens.
        stdin=asyncio.subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=_environment(job),
        # An interrupt at the terminal is for this process, which then shuts the trainer down.
        start_new_session=True,
    )


async def _end(process: asyncio.subprocess.Process, exited: asyncio.Future[int]) -> None:
    if exited.done():
        return
    try:
        _signal(process, signal.SIGTERM)
        await asyncio.wait({exited}, timeout=GRACE)
    finally:
        if not exited.done():
            _signal(process, signal.SIGKILL)
            await asyncio.wait({exited})


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a trainer and to the launcher of its processes, which passes it on to
    them.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _environment(job: TrainingJob) -> dict[str, str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in PLACES},
        "PYTHONPATH": python_path(),
        # Everything the trainer reads is local; a query to the hub would only add the network to
        # what can fail.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "TENSORBOARD_LOGGING_DIR": str(job.reports),
    }
    if job.config.launch is None:
        # Otherwise the Trainer would split each batch over all visible devices.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = "0" if visible is None else visible.split(",")[0]
    if job.config.num_threads:
        environment["OMP_NUM_THREADS"] = str(job.config.num_threads)
    return environment


def _translate(exit_status: int, fault: Fault | None, work: WorkFolder) -> AgentrError:
    lines = work.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    if fault is not None:
        kind, message = _KINDS[fault.kind], fault.message
    # A launcher reports this only in its log.
    elif exit_status == -signal.SIGKILL or any("SIGKILL" in line for line in lines):
        kind = OutOfMemory
        message = (
            "the trainer was killed by the system, probably because memory ran out; set "
            "training.gradient_checkpointing=true, lower training.per_device_train_batch_size or data.max_length, or "
            "give the machine more memory"
        )
    elif exit_status < 0:
        kind, message = TrainingFault, f"the trainer was ended by signal {signal.Signals(-exit_status).name}"
    else:
        kind, message = TrainingFault, f"the trainer ended with exit status {exit_status} and gave no reason"
    kept = "; its last intermediate checkpoint is kept" if any(work.checkpoints.glob("checkpoint-*")) else ""
    return kind("\n".join([f"{message}{kept}. End of {work.log_file}:", *(f"    {line}" for line in lines)]))
