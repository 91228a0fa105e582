"""How the processes of a training are started through `accelerate launch`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from agentr_core.training.job import TrainingJob

RANK = "agentr_core.training.rank"
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables with the rank of a process and the number of processes; a trainer must not see those of
an outer launcher.
"""


def command(job: TrainingJob, *, job_file: Path, events_file: Path, machine_rank: int = 0) -> list[str]:
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
        # The flag stands for several processes by torchrun, with or without GPUs; a single process
        # does not get it.
        *(["--multi_gpu"] if job.config.num_processes > 1 else []),
        *("--module", RANK, str(job_file), str(events_file)),
    ]


def environment(job: TrainingJob, outer: Mapping[str, str], *, gpus: bool) -> dict[str, str]:
    """Return the environment of a job's processes.

    Args:
        outer: the environment of this process.
        gpus: whether the machine has GPUs.
    """
    inner = {name: value for name, value in outer.items() if name not in PLACES}
    launch = job.config.launch
    assert launch is not None
    if not gpus:
        # If told to use the CPU, Accelerate would silently leave out DeepSpeed.
        inner |= {"DS_ACCELERATOR": "cpu"} if launch.deepspeed else {"ACCELERATE_USE_CPU": "true"}
    if launch.deepspeed and job.config.num_processes == 1:
        # DeepSpeed always needs a process group, and Accelerate makes none for a single process.
        inner |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        inner |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return inner


def start_launcher(
    job: TrainingJob, *, job_file: Path, events_file: Path, keep: int | None = None, machine_rank: int = 0
) -> subprocess.Popen[bytes]:
    """Start this machine's processes of a job; return their launcher.

    They end when this process ends, or closes its end of the launcher's standard input. `keep` is a
    file descriptor that the launcher holds open too, so that a lock on it lasts until the last
    process is gone.
    """
    import torch

    return subprocess.Popen(
        command(job, job_file=job_file, events_file=events_file, machine_rank=machine_rank),
        stdin=subprocess.PIPE,
        env=environment(job, os.environ, gpus=torch.cuda.is_available()),
        pass_fds=() if keep is None else (keep,),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
