"""Tokens a second of the decode loop against Transformers' `generate` and its continuous batching
(`generate_batch`), in the same process on the same model.

Counted in CPU seconds of one thread, so that other work on the machine does not decide the ratio.
The prefix cache is off: each prompt is computed in full.

    pytest -s tests/bench/bench_generation.py
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import continuous
import pytest
import torch

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling

WORDS = ("craft", "oak", "planks", "using", "log", "get", "stick", "table", "wooden", "Observation", "Could", "not")
NEW_TOKENS = 35
PROMPT_TOKENS = 400


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory, save_tiny_model: Callable[..., Path], request: pytest.FixtureRequest
) -> Iterator[TransformersModel]:
    path = save_tiny_model(
        tmp_path_factory.mktemp("models") / "bench",
        context=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        vocab_size=1300,
    )
    local_model = TransformersModel.load(path, dtype=request.param, device="cpu", prefix_cache_bytes=0)
    yield local_model
    asyncio.run(local_model.close())


def prompts(count: int, seed: int, model: TransformersModel) -> list[Request]:
    random_ = random.Random(seed)
    requests = []
    for number in range(count):
        words: list[str] = []
        text = ""
        while model.count_tokens(request := _request(text, number)) < PROMPT_TOKENS:
            words += random_.choices(WORDS, k=8)
            text = " ".join(words)
        requests.append(request)
    return requests


def _request(text: str, seed: int) -> Request:
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS)
    return Request(messages=(Message(role="user", text=text),), sampling=sampling, seed=seed)


def ours(model: TransformersModel, requests: list[Request]) -> int:
    return sum(g.completion_tokens for replies in asyncio.run(model.generate(requests)) for g in replies)


def baseline(model: TransformersModel, requests: list[Request]) -> int:
    decoder = model._decoder
    assert decoder is not None
    rows = [list(model._prompt(request.messages)) for request in requests]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode():
        output = decoder._model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
    return int(output.shape[1] - longest) * len(rows)


def generate_in_batch(model: TransformersModel, requests: list[Request]) -> int:
    decoder = model._decoder
    assert decoder is not None
    return continuous.generate_batch(
        decoder._model, [model._prompt(request.messages) for request in requests], new_tokens=NEW_TOKENS
    )


def rate(run: Callable[..., int], model: TransformersModel, requests: list[Request], repeats: int) -> float:
    run(model, requests)
    start = time.process_time()
    tokens = sum(run(model, requests) for _ in range(repeats))
    return tokens / (time.process_time() - start)


@pytest.mark.parametrize("model", ["float32", "bfloat16"], indirect=True)
def test_tokens_per_second(model: TransformersModel) -> None:
    torch.set_num_threads(1)
    dtype = model._decoder._shape.dtype  # type: ignore[union-attr]
    print(f"\n{dtype}, prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens, 1 thread")  # noqa: T201
    head = f"{'batch':>5} {'prompts':>7} {'generate':>9} {'continuous':>10} {'ours':>9} {'ratio':>6} {'ratio':>6}"
    print(f"{head}  tokens per CPU second; ours to each of the others")  # noqa: T201
    ratios = {}
    for batch, copies in ((1, 1), (16, 1), (64, 1), (64, 4), (128, 1), (128, 4)):
        requests = [r for r in prompts(batch // copies, batch, model) for _ in range(copies)]
        requests = [_request(r.messages[0].text, seed) for seed, r in enumerate(requests)]
        repeats = 3 if batch < 64 else 1
        baseline_rate, our_rate = rate(baseline, model, requests, repeats), rate(ours, model, requests, repeats)
        batch_rate = rate(generate_in_batch, model, requests, repeats)
        continuous.forget(model._decoder._model)  # type: ignore[union-attr]
        ratios[batch, copies] = our_rate / baseline_rate
        line = f"{batch:>5} {batch // copies:>7} {baseline_rate:>9.0f} {batch_rate:>10.0f} {our_rate:>9.0f}"
        print(f"{line} {our_rate / baseline_rate:>6.2f} {our_rate / batch_rate:>6.2f}")  # noqa: T201
    assert ratios[64, 1] > 1
    assert ratios[128, 1] > 1
