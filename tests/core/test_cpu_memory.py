"""What the allocator is told spares page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINING = """
import resource, statistics, threading
import torch
from agentr_core.system import keep_freed_memory

torch.set_num_threads(1)
if {keeps}:
    assert keep_freed_memory()
ended = threading.Event()
others = [threading.Thread(target=lambda: (bytearray(1000), ended.wait())) for _ in range(4)]
for other in others:
    other.start()

def multiply():
    for _ in range(2):
        (torch.ones(48, 640, 64) @ torch.ones(48, 64, 640)).softmax(-1)  # 75 MiB each

def faults():
    multiply()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    multiply()
    counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

counted = []
for _ in range(5):
    one = threading.Thread(target=faults)
    one.start()
    one.join()
ended.set()
# The first threads may still make the heap larger.
print(statistics.median(counted))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library")
def test_tensors_of_a_thread_that_starts_later_use_the_same_pages_again() -> None:
    def faults(*, keeps: bool) -> float:
        program = [sys.executable, "-c", TRAINING.format(keeps=keeps)]
        return float(subprocess.run(program, check=True, capture_output=True, text=True).stdout)

    assert faults(keeps=True) < faults(keeps=False) / 4
