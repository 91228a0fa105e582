"""Worker processes: who gets which request, and what becomes of one that dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from asked import asked_for
from toy import Line
from transformers import AutoTokenizer

from agentr_core.errors import ConfigError, DataFault, ModelDirectoryError, ModelFault, ModelUnavailable
from agentr_core.methods.faults import parse
from agentr_core.models.local import worker
from agentr_core.models.local import workers as module
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.local.workers import GenerateCommand, LoadCommand, Progress, Workers, load_local
from agentr_core.models.samplers import WorkerBatchers, sampler_of
from agentr_core.recipes.models import ModelConfig
from agentr_core.runtime.equipment import Equipment
from agentr_core.types import Generation, Message, Request, Sampling


def loading(path: Path, *, max_batch: int = 128) -> LoadCommand:
    return LoadCommand(
        path=path,
        dtype="float32",
        device="cpu",
        max_batch=max_batch,
        context_length=0,
        prefix_cache_bytes=1 << 20,
        at=None,
    )


def ask(seed: int, session: str = "") -> Request:
    messages = (Message(role="user", text="get oak log"),)
    return Request(messages=messages, sampling=Sampling(max_new_tokens=8), seed=seed, session=session)


def children() -> set[int]:
    """Return the worker processes of this one."""
    result = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {int(line.split()[0]) for line in result.stdout.splitlines() if f" -m {module._WORKER_MODULE} " in line}


@pytest.fixture
def model(tiny_model_dir: Path) -> Iterator[Workers]:
    workers = load_local(loading(tiny_model_dir), num_workers=2)
    assert isinstance(workers, Workers)
    yield workers
    asyncio.run(workers.close())
    assert not children()


@pytest.mark.slow
async def test_a_worker_that_dies_fails_its_batch_and_is_started_anew(model: Workers) -> None:
    sampler = sampler_of(model, ModelConfig(path="m"))
    assert isinstance(sampler, WorkerBatchers)
    requests = [ask(seed, session=f"tree-{seed}") for seed in range(8)]
    before = [await sampler.sample(request) for request in requests]
    (victim, *_) = children()
    os.kill(victim, signal.SIGKILL)
    answers = await asyncio.gather(*(sampler.sample(request) for request in requests), return_exceptions=True)
    failures = [
        request for request, answer in zip(requests, answers, strict=True) if isinstance(answer, ModelUnavailable)
    ]
    assert 0 < len(failures) < len(requests)
    assert len({model.worker_of(request) for request in failures}) == 1
    assert all("was killed" in str(answer) for answer in answers if isinstance(answer, Exception))
    assert [await sampler.sample(request) for request in requests] == before
    stats = sampler.stats()
    assert stats.requests == len(requests) * 3 - len(failures)
    assert stats.failures >= 1
    await sampler.close()


@pytest.mark.slow
@pytest.mark.long
async def test_a_worker_that_dies_again_and_again_is_given_up(model: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_RESTARTS", 1)
    worker = model.workers[0]
    errors = []
    for _ in range(2):
        worker._process.kill()
        with pytest.raises(ModelFault) as caught:
            await worker.generate([ask(0)])
        errors.append(caught.value)
    assert isinstance(errors[0], ModelUnavailable)
    assert not isinstance(errors[1], ModelUnavailable)
    assert "has died 2 times" in str(errors[1])
    with pytest.raises(ModelFault, match="has died 2 times"):
        await worker.generate([ask(0)])


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that has worker processes die or hang: the first alone, or each."""
    monkeypatch.setattr(module, "_WORKER_MODULE", "stalling")
    monkeypatch.setenv("PYTHONPATH", f"tests/support{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def stall(where: str, *, each: bool = False) -> None:
        monkeypatch.setenv("STALLING", where)
        monkeypatch.setenv("STALLING_ONCE", "" if each else str(tmp_path / "stalled"))

    return stall


@pytest.mark.slow
@pytest.mark.parametrize("how", ["die", "hang"])
async def test_a_worker_that_is_lost_is_replaced_whatever_it_does(
    tiny_model_dir: Path, stalled: Callable[..., None], tmp_path: Path, how: str
) -> None:
    patience = 3.0 if how == "hang" else 60.0
    stalled(f"{how} load")
    model = await asyncio.to_thread(load_local, loading(tiny_model_dir), num_workers=2, timeout_seconds=patience)
    assert isinstance(model, Workers)
    assert (model.name, sum(worker._num_deaths for worker in model.workers)) == ("echo", 1)
    await model.close()

    for place in ("reload", "ask") if how == "die" else ("ask",):
        (tmp_path / "stalled").unlink()
        stalled(f"{how} {place}")
        model = await asyncio.to_thread(load_local, loading(tiny_model_dir), num_workers=2, timeout_seconds=patience)
        await model.reload(tmp_path / "weights")
        replies = asyncio.gather(*(model.generate([ask(seed)]) for seed in range(4)), return_exceptions=True)
        errors = [reply for reply in await replies if isinstance(reply, Exception)]
        assert (bool(errors), {type(error) for error in errors} <= {ModelUnavailable}) == (place == "ask", True)
        message = "was silent for 3 seconds and was ended (if it only was slow, raise" if how == "hang" else "status 7"
        assert all(message in str(error) and str(error).endswith("; it was restarted") for error in errors)
        assert await model.generate([ask(seed) for seed in range(4)])
        await model.close()
    assert not children()


@pytest.mark.slow
def test_one_that_cannot_be_loaded_without_dying_is_given_up(
    tiny_model_dir: Path, stalled: Callable[..., None]
) -> None:
    stalled("die load", each=True)
    with pytest.raises(ModelFault, match=r"ended with status 7 while it loaded the model; it has died 4 times and is"):
        load_local(loading(tiny_model_dir), num_workers=2)
    assert not children()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["load", "ask"])
async def test_a_run_that_is_cancelled_does_not_wait_for_a_hung_worker(
    tiny_model_dir: Path, stalled: Callable[..., None], place: str
) -> None:
    stalled(f"hang {place}", each=True)
    command = loading(tiny_model_dir)
    equipment = Equipment(
        recipe=parse({"name": "r", "model": {"path": str(tiny_model_dir)}}),
        run_id="run",
        make_environment=lambda _: Line(),
        load_model=lambda role, path: load_local(command, num_workers=2),
        progress=lambda done, total, note: None,
    )

    async def stage() -> None:
        async with equipment.sampling(tiny_model_dir) as sampler:
            await asyncio.gather(*(sampler.sample(ask(seed)) for seed in range(8)))

    running = asyncio.create_task(stage())
    await asyncio.sleep(1)
    assert not running.done()
    running.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not await asyncio.to_thread(children)


class Counting:
    """A model in a worker whose computing goes on for some signs, and then hangs for as many."""

    def __init__(self, going: int) -> None:
        self.going, self.looked = going, 0

    def passes(self) -> int:
        self.looked += 1
        return min(self.looked, self.going)

    async def generate(self, requests: object) -> list[list[Generation]]:
        while self.looked < 4 * self.going:
            await asyncio.sleep(0)
        return []

    def cached_share(self) -> float:
        return 0.0

    def written(self) -> int:
        return 7 * self.looked


async def test_a_worker_shows_that_it_computes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PROGRESS_SECONDS", 0.001)
    messages: list[object] = []
    model, connection = Counting(5), SimpleNamespace(send=messages.append)
    batch = GenerateCommand(requests=(ask(0),), streamed_indices=frozenset())
    await worker._answer(model, batch, connection)  # type: ignore[arg-type]
    assert 0 < len(messages) <= model.going
    counts = [sign.num_sampled_tokens for sign in messages if isinstance(sign, Progress)]
    assert counts == sorted(counts)
    assert len(counts) == len(messages)


async def test_a_model_in_this_process_gives_up_at_its_next_pass(tiny_model_dir: Path) -> None:
    model = load_local(loading(tiny_model_dir), num_workers=1)
    await model.generate([ask(0)])
    assert isinstance(model, TransformersModel)
    assert model.passes() > 1
    model.abandon()
    with pytest.raises(ModelFault, match="the work under way was given up"):
        await model.generate([ask(0)])
    await model.close()


@pytest.mark.slow
async def test_a_request_that_breaks_the_computation_fails_alone(model: Workers) -> None:
    sampler, before = sampler_of(model, ModelConfig(path="m")), children()
    wrong = replace(ask(0, session="one"), sampling=Sampling(max_new_tokens=None))  # type: ignore[arg-type]
    requests = [ask(1, session="one"), wrong, ask(2, session="one"), ask(3, session="one")]
    for _ in range(module._MAX_RESTARTS + 2):
        answers = await asyncio.gather(*(sampler.sample(request) for request in requests), return_exceptions=True)
        assert [isinstance(answer, ModelFault) for answer in answers] == [False, True, False, False]
        assert "failed with TypeError" in str(answers[1])
    assert children() == before
    await sampler.close()


async def test_a_token_that_the_model_cannot_read_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "grown")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    model = load_local(loading(folder), num_workers=1)
    sampler = sampler_of(model, ModelConfig(path="m"))
    strange = replace(ask(1), messages=(Message(role="user", text="get a zebra"),))
    answers = await asyncio.gather(sampler.sample(ask(0)), sampler.sample(strange), return_exceptions=True)
    assert [isinstance(answer, DataFault) for answer in answers] == [False, True]
    assert "reads 'zebra' as token 384, but the model has embeddings for 384 tokens" in str(answers[1])
    await sampler.close()
    await model.close()


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tiny_model_dir: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; sys.path[:0] = ['tests/core', 'tests/support']\n"
        "from test_workers import loading, load_local, children\n"
        f"model = load_local(loading(Path({str(tiny_model_dir)!r})), num_workers=2)\n"
        "print(*children(), flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.long
def test_a_directory_that_cannot_be_loaded_is_told_as_without_workers(tiny_model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model_dir.iterdir():
        if file.name != "model.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelDirectoryError) as first:
        load_local(loading(broken), num_workers=1)
    with pytest.raises(ModelDirectoryError) as second:
        load_local(loading(broken), num_workers=2)
    assert str(first.value) == str(second.value)
    assert not children()


def test_one_worker_is_no_process(tiny_model_dir: Path) -> None:
    assert isinstance(load_local(loading(tiny_model_dir), num_workers=1), TransformersModel)
    assert isinstance(load_local(loading(tiny_model_dir, max_batch=32), num_workers="auto"), TransformersModel)


@pytest.mark.parametrize(
    ("device", "workers", "processors", "gpus", "expected"),
    [
        ("auto", "auto", 2, 0, ["cpu", "cpu"]),
        ("auto", "auto", 64, 0, ["cpu"] * 4),
        ("cpu", 3, 2, 8, ["cpu"] * 3),
        ("auto", "auto", 2, 2, ["cuda:0", "cuda:1"]),
        ("auto", 3, 2, 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", "auto", 2, 2, ["cuda:1"]),
    ],
)
def test_workers_are_placed(
    monkeypatch: pytest.MonkeyPatch, device: str, workers: int, processors: int, gpus: int, expected: list[str]
) -> None:
    monkeypatch.setattr(module, "processors", lambda: processors)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    command = LoadCommand(
        path=Path(), dtype="float32", device=device, max_batch=128, context_length=0, prefix_cache_bytes=0, at=None
    )
    assert module._devices(command, workers) == expected


def test_workers_are_no_part_of_what_a_recipe_asks_for() -> None:
    least = {"name": "r", "model": {"path": "m"}}
    assert asked_for(parse(least)) == asked_for(parse(least, ["model.workers=auto", "model.worker_timeout=60"]))
    assert parse(least, ["model.workers=3"]).model.workers == 3
    for wrong in ("0", "many", "true"):
        with pytest.raises(ConfigError, match=r"model\.workers"):
            parse(least, [f"model.workers={wrong}"])
    with pytest.raises(ConfigError, match="only backend transformers has workers"):
        parse({"name": "r", "model": {"path": "m", "backend": "vllm"}}, ["model.workers=2"])
    with pytest.raises(ConfigError, match=r"worker_timeout: only backend transformers has workers"):
        parse({"name": "r", "model": {"path": "m", "backend": "vllm"}}, ["model.worker_timeout=20"])
