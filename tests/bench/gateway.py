"""The gateway between runs and outside agents: the processor time that a call costs it with many
agents at once, and the time from the first token of a reply to its agent.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from measures import Measure

from agentr_core.environments.gateway.world import Gateway

REPLY = "Thought: I need planks.\nAction: craft 4 oak planks using 1 oak log"
OBSERVATION = "Got 2 oak log. Inventory: [oak log] (2) [stick] (4)"


def measure(*, agents: int, calls: int, rounds: int, streams: int) -> list[Measure]:
    """Return the milliseconds of the gateway's processor time a call, and those until an agent has
    the first token of a stream, each a median: of rounds of one episode an agent, and of streams.
    """
    with _gateway() as (url, process):
        costs = [_cost(url, process, agents, calls) for _ in range(rounds)]
        delays = [_delay(url) for _ in range(streams)]
    note = f"{agents} agents at once, {calls} calls an episode, median of {rounds} rounds"
    delay_note = f"median of {streams}, slowest {max(delays):.1f} ms"
    return [
        Measure(name="gateway_call", value=statistics.median(costs), unit="ms", goal="<= 5", note=note),
        Measure(name="gateway_first_token", value=statistics.median(delays), unit="ms", goal="<= 20", note=delay_note),
    ]


@contextmanager
def _gateway() -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a gateway that is started for the block."""
    command = [sys.executable, "-c", "from flows.cli import main; main()", "gateway", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        try:
            yield gateway.stdout.readline().split()[4].partition("/episodes")[0], gateway.pid
        finally:
            gateway.terminate()


def _cost(url: str, process: int, agents: int, calls: int) -> float:
    """Return the milliseconds of processor time that a gateway spends on a call."""
    before = _processor_seconds(process)
    with ThreadPoolExecutor(2 * agents) as threads:
        work = [threads.submit(_act, url, calls) for _ in range(agents)]
        work += [threads.submit(_reply, url, calls) for _ in range(agents)]
        for each in work:
            each.result()
    return 1000 * (_processor_seconds(process) - before) / (agents * calls)


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _act(url: str, calls: int) -> None:
    """Play an episode as an agent whose history grows."""
    history = [{"role": "user", "content": OBSERVATION}]
    with httpx.Client(base_url=url, timeout=60) as http:
        base = http.post("/episodes").raise_for_status().json()["base_url"]
        for _ in range(calls):
            answer = http.post(f"{base}/chat/completions", json={"model": "policy", "messages": history})
            message = answer.raise_for_status().json()["choices"][0]["message"]
            history += [message, {"role": "user", "content": OBSERVATION}]
        http.post(f"{base.removesuffix('/v1')}/reward", json={"reward": 1})


def _reply(url: str, calls: int) -> None:
    """Give the replies of an episode, as a run does."""
    env = _world(url)
    env.reset(env.instances("train")[0])
    for _ in range(calls):
        env.step(REPLY)
    env.close()


def _delay(url: str) -> float:
    """Return the milliseconds from the moment at which a run has the first token of a reply to that
    at which its agent has it.
    """
    event = threading.Event()
    moments: list[float] = []
    env = _world(url)
    with ThreadPoolExecutor(1) as thread:
        agent = thread.submit(_read_stream, url, moments, event)
        env.reset(env.instances("train")[0])
        listener = env.listener()
        assert listener is not None
        start = time.perf_counter()
        listener(REPLY[:5])
        assert event.wait(60)
        env.step(REPLY)
        agent.result()
    env.close()
    return 1000 * (moments[0] - start)


def _read_stream(url: str, moments: list[float], read: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        base = http.post("/episodes").raise_for_status().json()["base_url"]
        body = {"model": "policy", "messages": [{"role": "user", "content": OBSERVATION}], "stream": True}
        with http.stream("POST", f"{base}/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    moments.append(time.perf_counter())
                    read.set()
        http.post(f"{base.removesuffix('/v1')}/reward", json={"reward": 1})


def _world(url: str) -> Gateway:
    return Gateway(url=url, splits={"train": 1, "test": 1})
