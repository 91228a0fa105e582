"""Starts a trainer's process, follows it through its events, and ends it when this process ends.

Training has its own process so that a crash, a lack of memory or a cancellation ends only that
process, and so that its memory is freed when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from agentr_core.errors import (
    AgentrError,
    AlarmRaised,
    ConfigError,
    DataFault,
    ModelDirectoryError,
    NonFiniteLoss,
    OutOfMemory,
    TrainingFault,
)
from agentr_core.models.checkpoint_dir import adapter_base, read_json
from agentr_core.system import python_path, report_write_errors
from agentr_core.texts import path_for_message
from agentr_core.training.checkpoints import Manifest, is_complete, read_manifest
from agentr_core.training.job import (
    EVENT,
    JOB,
    LESS_MEMORY_HINT,
    Fault,
    Report,
    TrainingJob,
    WorkFolder,
    write_atomically,
)

# DeepSpeed configurations: those that agentr ships, by name, or a file of the user.

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "_data" / "deepspeed", _PACKAGE.parent / "deployments" / "deepspeed")


def deepspeed_names() -> list[str]:
    """Return the names of the DeepSpeed configurations that agentr ships, sorted."""
    return sorted({file.stem for folder in _FOLDERS for file in folder.glob("*.json")})


def read_deepspeed(name: str) -> dict[str, Any]:
    """Return a DeepSpeed configuration, whose "auto" fields the Hugging Face Trainer fills in
    later.

    Args:
        name: one of `deepspeed_names()`, or the path of a JSON file.

    Raises `ConfigError` when there is no such file or it holds no JSON object.
    """
    files = [Path(name), *(folder / f"{name}.json" for folder in _FOLDERS)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        path = path_for_message(Path(name)) if Path(name).suffix else name
        raise ConfigError(
            f"training.launch.deepspeed: there is no file {path}; name one, or choose {', '.join(deepspeed_names())}"
        )
    try:
        return read_json(file)
    except ModelDirectoryError as error:
        raise ConfigError(f"training.launch.deepspeed: {error}") from error


def splits_weights(content: dict[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration splits the weights themselves among processes
    (ZeRO-3).
    """
    zero = content.get("zero_optimization")
    return isinstance(zero, dict) and zero.get("stage") == 3


def offloads(content: dict[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration offloads weights and optimizer to main memory."""
    zero = content.get("zero_optimization")
    sections = [zero.get(name) for name in ("offload_param", "offload_optimizer")] if isinstance(zero, dict) else [None]
    return all(isinstance(section, dict) and section.get("device", "none") != "none" for section in sections)


# How the processes of a training are started through `accelerate launch`.

RANK_MODULE = "agentr_core.training.rank"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables with the rank of a process and the number of processes; a trainer must not see those of
a launcher that started this process.
"""


def launch_command(job: TrainingJob, *, job_file: Path, events_file: Path, machine_rank: int = 0) -> list[str]:
    """Return the command that starts this machine's processes of a job with a `launch` section."""
    launch = job.config.launch
    assert launch is not None
    options = {
        "num_processes": job.config.num_processes,
        "num_machines": launch.num_machines,
        "machine_rank": machine_rank,
        "main_process_port": launch.main_process_port,
        "mixed_precision": "bf16" if job.config.bf16 else "fp16" if job.config.fp16 else "no",
        "dynamo_backend": "no",
    }
    if launch.main_process_ip:
        options["main_process_ip"] = launch.main_process_ip
    if job.config.num_threads:
        options["num_cpu_threads_per_process"] = job.config.num_threads
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        # The flag makes Accelerate start several processes with torchrun, with or without GPUs; a
        # single process does not get it.
        *(["--multi_gpu"] if job.config.num_processes > 1 else []),
        *("--module", RANK_MODULE, str(job_file), str(events_file)),
    ]


def launch_environment(job: TrainingJob, parent_variables: Mapping[str, str], *, has_gpus: bool) -> dict[str, str]:
    """Return the environment variables of a job's processes.

    Args:
        parent_variables: the environment variables of this process.
        has_gpus: whether the machine has GPUs.
    """
    variables = {name: value for name, value in parent_variables.items() if name not in RANK_VARIABLES}
    launch = job.config.launch
    assert launch is not None
    if not has_gpus:
        # If told to use the CPU, Accelerate would silently leave out DeepSpeed.
        variables |= {"DS_ACCELERATOR": "cpu"} if launch.deepspeed else {"ACCELERATE_USE_CPU": "true"}
    if launch.deepspeed and job.config.num_processes == 1:
        # DeepSpeed always needs a process group, and Accelerate makes none for a single process.
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    return variables


def start_launcher(
    job: TrainingJob, *, job_file: Path, events_file: Path, inherited_fd: int | None = None, machine_rank: int = 0
) -> subprocess.Popen[bytes]:
    """Start this machine's processes of a job through `accelerate launch`; return the launcher's
    process.

    They end when this process ends, or closes its end of the launcher's standard input.
    `inherited_fd` is a file descriptor that the launcher inherits, so that a lock on it lasts until
    the last process is gone.
    """
    import torch

    return subprocess.Popen(
        launch_command(job, job_file=job_file, events_file=events_file, machine_rank=machine_rank),
        stdin=subprocess.PIPE,
        env=launch_environment(job, os.environ, has_gpus=torch.cuda.is_available()),
        pass_fds=() if inherited_fd is None else (inherited_fd,),
    )


POLL_SECONDS = 0.2
"""Seconds between two readings of the events file."""
LINGER_SECONDS = 60.0
"""Seconds that a trainer has to end by itself once its checkpoint is published."""
NUM_TAIL_LINES = 15
"""The number of the log's last lines in an error message."""
ERRORS_BY_NAME: dict[str, type[AgentrError]] = {
    kind.__name__: kind
    for kind in (AlarmRaised, ConfigError, DataFault, ModelDirectoryError, NonFiniteLoss, OutOfMemory, TrainingFault)
}
"""The errors that a trainer may report, by the names of their classes."""

Step = TypeVar("Step")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProcess(Generic[Step]):
    """A description of a trainer's process, and the method that runs it.

    The process is `python -m MODULE JOB_FILE EVENTS_FILE`, with the variables `environment`;
    `job_json` is the content of JOB_FILE. `parse_event` parses a line of EVENTS_FILE;
    `is_published` returns whether the result is there. `memory_hint` tells a user which fields of a
    recipe reduce the need for memory. `grace_seconds` is the seconds that a cancelled trainer has
    to end by itself.
    """

    module: str
    work_folder: WorkFolder
    job_json: bytes
    environment: Mapping[str, str]
    parse_event: Callable[[bytes], Step | Fault]
    is_published: Callable[[], bool]
    memory_hint: str
    grace_seconds: float = 5.0

    async def run(self, on_progress: Callable[[Step], None]) -> None:
        """Run the process to its end, and call `on_progress` with each step that it reports.

        If it fails, raise the `AgentrError` that it reported, or else one that its exit status
        implies: `OutOfMemory` if it was killed, otherwise `TrainingFault`. Raises `DiskError` if
        the work folder cannot be made or written to.
        """
        with report_write_errors(self.work_folder.root):
            self.work_folder.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.work_folder.job_file, self.job_json)
        log = self.work_folder.log_file
        log_start = log.stat().st_size if log.exists() else 0
        exit_status, fault = await self._follow(on_progress)
        if exit_status:
            lines = log.read_bytes()[log_start:].decode("utf-8", errors="replace").splitlines()[-NUM_TAIL_LINES:]
            if fault is not None:
                error_class, message = ERRORS_BY_NAME[fault.kind], fault.message
                if error_class is AlarmRaised:
                    # The trainer itself has no fault.
                    raise error_class(message)
            # A launcher tells only its log that a worker was killed.
            elif exit_status == -signal.SIGKILL or any("SIGKILL" in line for line in lines):
                error_class = OutOfMemory
                message = (
                    "the trainer was killed by the system, probably because memory ran out; "
                    f"{self.memory_hint}, or give the machine more memory"
                )
            elif exit_status < 0:
                error_class, message = (
                    TrainingFault,
                    f"the trainer was ended by signal {signal.Signals(-exit_status).name}",
                )
            else:
                error_class, message = (
                    TrainingFault,
                    f"the trainer ended with exit status {exit_status} and gave no reason",
                )
            resumable = any(self.work_folder.checkpoints.glob("checkpoint-*"))
            note = "; its last intermediate checkpoint is kept" if resumable else ""
            message_lines = [
                f"{message}{note}. End of {self.work_folder.log_file}:",
                *(f"    {line}" for line in lines),
            ]
            raise error_class("\n".join(message_lines))

    async def _follow(self, on_progress: Callable[[Step], None]) -> tuple[int, Fault | None]:
        """Start the process and wait until it ends; return its exit status (negative: the signal
        that ended it) and the first fault that it reported, or None.

        Once the checkpoint is published, the training is done (status 0): processes that have not
        ended `LINGER_SECONDS` seconds later are ended, since those of a group may wait for each
        other indefinitely.
        """
        fault: Fault | None = None
        publish_time: float | None = None
        with (
            self.work_folder.log_file.open("ab") as log,
            # A new file for each attempt: the events of earlier ones have been reported already.
            tempfile.NamedTemporaryFile(dir=self.work_folder.root, prefix="events-", suffix=".jsonl") as events,
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self.module,
                str(self.work_folder.job_file),
                events.name,
                # Never written to: the trainer sees this pipe close when this process dies, however
                # that happens.
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self.environment, "PYTHONPATH": python_path()},
                # An interrupt at the terminal is for this process, which then shuts the trainer
                # down.
                start_new_session=True,
            )
            exit_future = asyncio.ensure_future(process.wait())
            partial_line = b""
            try:
                while True:
                    await asyncio.wait({exit_future}, timeout=POLL_SECONDS)
                    has_ended = exit_future.done()
                    *lines, partial_line = (partial_line + events.read()).split(b"\n")
                    for line in lines:
                        event = self.parse_event(line)
                        if isinstance(event, Fault):
                            # The first fault is the cause: other processes then report only that
                            # one is gone.
                            fault = fault or event
                        else:
                            on_progress(event)
                    if has_ended:
                        return exit_future.result(), fault
                    if publish_time is None and self.is_published():
                        publish_time = time.monotonic()
                    if publish_time is not None and time.monotonic() - publish_time > LINGER_SECONDS:
                        return 0, fault
            finally:
                await self._stop(process, exit_future)

    async def _stop(self, process: asyncio.subprocess.Process, exit_future: asyncio.Future[int]) -> None:
        if exit_future.done():
            return
        try:
            _signal_group(process, signal.SIGTERM)
            await asyncio.wait({exit_future}, timeout=self.grace_seconds)
        finally:
            if not exit_future.done():
                _signal_group(process, signal.SIGKILL)
                await asyncio.wait({exit_future})


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a trainer's whole process group: a launcher in it passes the signal on to
    the processes that it started.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


# Fine-tuning from outside: from a job to a finished checkpoint.

WORKER_MODULE = "agentr_core.training.worker"


async def train(job: TrainingJob, *, on_progress: Callable[[Report], None] = lambda step: None) -> Manifest:
    """Train a job unless its checkpoint exists already, continuing after an interruption; return
    the checkpoint's manifest.

    `on_progress` is called after each optimizer step, and for each alarm threshold that one has
    crossed. Cancelling ends the trainer's process; calling again continues from its last
    intermediate checkpoint, to the same weights as without the interruption on the same processor
    and number of threads. A trainer whose parent was killed ends by itself.

    Raises:
        NonFiniteLoss: loss or gradient became NaN or infinite. The weights were not changed by it.
        OutOfMemory: memory ran out, or the system killed the trainer, which is how Linux reports
            that.
        AlarmRaised: an alarm ended the training; its last intermediate checkpoint is kept.
        TrainingFault: another fault, for example a full disk, or a foreign directory at
            `output_dir`.
        DataFault: the dataset is missing or has invalid rows.
        ModelDirectoryError: the model directory cannot be loaded.
        ConfigError: the settings ask for a package, a device or a name that is not available.
        DiskError: the folder of the job cannot be made or written to.
    """
    if job.output_dir.exists():
        return _finished_manifest(job)
    base = adapter_base(job.model_dir) or job.model_dir
    if not (base / "config.json").is_file():
        raise ModelDirectoryError(f"{base} has no config.json; give a Hugging Face model directory")
    if not job.dataset_file.is_file():
        raise DataFault(f"dataset file {job.dataset_file} does not exist; build the dataset before training on it")
    # Remove unfinished work of the same job that began with other weights: a parent that was
    # trained on what it sampled may come out differently under the same id.
    if job.work_folder.job_file.exists():
        earlier_weights: str | None = None
        with suppress(ValidationError):
            earlier_weights = JOB.validate_json(job.work_folder.job_file.read_bytes()).parent_weights
        if earlier_weights not in ("", job.parent_weights):
            shutil.rmtree(job.work_folder.root)
    variables = {
        **{name: value for name, value in os.environ.items() if name not in RANK_VARIABLES},
        # Everything the trainer reads is local; a query to the hub would only add the network to
        # what can fail.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "TENSORBOARD_LOGGING_DIR": str(job.logger_folder),
    }
    if job.config.launch is None:
        # Only one device: the Trainer would split each batch over all visible ones.
        visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = "0" if visible_gpus is None else visible_gpus.split(",")[0]
    if job.config.num_threads:
        variables["OMP_NUM_THREADS"] = str(job.config.num_threads)
    process: TrainerProcess[Report] = TrainerProcess(
        module=WORKER_MODULE,
        work_folder=job.work_folder,
        job_json=JOB.dump_json(job, indent=1),
        environment=variables,
        parse_event=EVENT.validate_json,
        is_published=lambda: is_complete(job.output_dir),
        memory_hint=LESS_MEMORY_HINT,
    )
    await process.run(on_progress)
    return _finished_manifest(job)


def _finished_manifest(job: TrainingJob) -> Manifest:
    if not is_complete(job.output_dir):
        raise TrainingFault(f"{job.output_dir} exists and is not a complete checkpoint; remove it or train elsewhere")
    manifest = read_manifest(job.output_dir)
    if manifest.job != job.fingerprint:
        raise TrainingFault(
            f"{job.output_dir} holds the checkpoint of another training (job {manifest.job}, not {job.fingerprint}); "
            "remove it or train elsewhere"
        )
    if job.work_folder.root.exists():
        shutil.rmtree(job.work_folder.root)
    return manifest
