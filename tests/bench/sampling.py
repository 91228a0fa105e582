"""Sampling with a real model's shape: tokens a second of the decode loop against Transformers'
`generate` on the same prompts, and against steps of one token each.

The model has SmolLM2-135M's shape and tokenizer and random weights, in bfloat16; its replies are
forced to be those that the shipped tiny model gave in whole episodes, so that drafts are as often
right as they are at work. Prompts grow by a reply and an observation a turn, and their beginnings
come from the prefix cache; `generate` computes them in full, as it must. One thread each: the
sampler's other processors have workers of their own.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measures import Clock, Measure
from transformers import AutoConfig, AutoModelForCausalLM

from agentr_core.environments.crafting import TextCraft
from agentr_core.episodes.transcript import transcript_of
from agentr_core.models.local.decoding import Decoder, Grid
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling

TINY = Path("data/models/textcraft-tiny")
SMOLLM2 = Path("data/models/smollm2-tokenizer")
Talk = tuple[Message, ...]


def measure(
    folder: Path, *, batches: Sequence[int], layers: int, timed: Sequence[int], runs: int, clock: Clock
) -> list[Measure]:
    """Return the ratios for each number of conversations.

    Args:
        layers: 30 as SmolLM2 has, or fewer.
        timed: the turns that are timed, counted from 0, ascending; those before them fill the
            cache.
    """
    talks = asyncio.run(_play(max(batches), timed[-1] + 1))
    path = _model(folder, layers)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    measures = []
    for count in batches:
        turns = [_requests(talks[:count], turn) for turn in range(timed[-1] + 1)]
        results = [asyncio.run(_ours(path, turns, timed, clock, drafts=drafts)) for drafts in (False, *[True] * runs)]
        one_token, with_drafts = results[0], results[1:]
        theirs = [_generate(plain, path, [turns[turn] for turn in timed], clock) for _ in range(max(1, runs // 2))]
        steps = statistics.mean(result.tokens_per_step for result in with_drafts)
        for name, part, goal in (("decoding", 0, ">= 4"), ("with_prefill", 1, ">= 5")):
            rates = sorted(result.rates[part] for result in with_drafts)
            base = max(rate[part] for rate in theirs)
            note = (
                f"{rates[0]:.0f}, {statistics.median(rates):.0f}, {rates[-1]:.0f} tokens/s against {base:.0f} of "
                f"generate and {one_token.rates[part]:.0f} in steps of one token; {steps:.2f} tokens a step"
            )
            value = statistics.median(rates) / base
            measures.append(Measure(name=f"sampling_{name}_ratio_{count}", value=value, unit="x", goal=goal, note=note))
    return measures


class ForcedSampler:
    """A decoder's `_sample` that takes as long and then says what it is told to, by the reply's
    seed; and what its steps came to.
    """

    def __init__(self, decoder: Decoder, clock: Clock) -> None:
        self.wanted: dict[int, list[int]] = {}
        self.decoding = 0.0
        self.steps = 0
        self._clock = clock
        self._sample_itself, self._generate_itself = decoder._sample, decoder._generate
        decoder._sample, decoder._generate = self._sample, self._generate  # type: ignore[method-assign,assignment]

    def _sample(self, logits: torch.Tensor, grid: Grid, size: int) -> tuple[list[int], list[float]]:
        _, logprobs = self._sample_itself(logits, grid, size)
        tokens = []
        for reply, guess in zip(grid.live_replies, grid._current_drafts, strict=True):
            target, start = self.wanted[reply.seed], len(reply.tokens)
            tokens += [target[min(start + step, len(target) - 1)] for step in range(1 + len(guess))]
        self.steps += len(grid.live_replies)
        return tokens, logprobs

    def _generate(self, *args: Any) -> None:
        start = self._clock()
        self._generate_itself(*args)
        self.decoding += self._clock() - start


class Result:
    """Tokens a second of decoding alone and with the prompts, and tokens a reply had a step."""

    def __init__(self, tokens: int, decoding: float, whole: float, steps: int) -> None:
        self.rates = (tokens / decoding, tokens / whole)
        self.tokens_per_step = tokens / steps


async def _ours(
    path: Path, turns: Sequence[Sequence[tuple[Request, str]]], timed: Sequence[int], clock: Clock, *, drafts: bool
) -> Result:
    model = TransformersModel.load(path, dtype="bfloat16", device="cpu", max_batch=64)
    assert model._decoder is not None
    if not drafts:
        model._decoder._drafter = None
    sampler = ForcedSampler(model._decoder, clock)
    tokens, whole, steps, decoding = 0, 0.0, 0, 0.0
    for turn, requests in enumerate(turns):
        for request, text in requests:
            ids = model._tokenizer(text, add_special_tokens=False)["input_ids"]
            sampler.wanted[request.seed] = [*ids, model.renderer.end_of_turn]
        before = sampler.steps, sampler.decoding
        start = clock()
        replies = await model.generate([request for request, _ in requests])
        seconds = clock() - start
        if turn in timed:
            tokens += sum(reply.completion_tokens for (reply,) in replies)
            whole += seconds
            steps, decoding = steps + sampler.steps - before[0], decoding + sampler.decoding - before[1]
    await model.close()
    return Result(tokens, decoding, whole, steps)


def _generate(
    plain: Any, path: Path, turns: Sequence[Sequence[tuple[Request, str]]], clock: Clock
) -> tuple[float, float]:
    """Return the tokens a second of `generate` without and with the prompts, for replies that are
    all as long as the mean.
    """
    model = TransformersModel.load(path, dtype="bfloat16", device="cpu")
    tokens, decoding, whole = 0, 0.0, 0.0
    for requests in turns:
        rows = [list(model._prompt(request.messages)) for request, _ in requests]
        lengths = [len(model._tokenizer(text)["input_ids"]) + 1 for _, text in requests]
        new = round(statistics.mean(lengths))
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        seconds = []
        for count in (1, new):
            start = clock()
            with torch.inference_mode():
                plain.generate(
                    ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=count, min_new_tokens=count
                )
            seconds.append(clock() - start)
        tokens += new * len(rows)
        whole += seconds[1]
        # The first token comes with the prompt.
        decoding += (seconds[1] - seconds[0]) * new / (new - 1)
    asyncio.run(model.close())
    return tokens / decoding, tokens / whole


async def _play(count: int, num_turns: int) -> list[tuple[Talk, list[str]]]:
    """Return conversations of so many turns with the shipped tiny model, and its replies."""
    model = TransformersModel.load(TINY, dtype="float32", device="cpu")
    worlds = [TextCraft() for _ in range(count)]
    instances = worlds[0].instances("renamed")
    talks: list[Talk] = []
    for world, instance in zip(worlds, instances, strict=False):
        talks.append(tuple(transcript_of(world).prompt(world, world.reset(instance), ())))
    replies: list[list[str]] = [[] for _ in worlds]
    for turn in range(num_turns):
        sampling = Sampling(temperature=1.0, max_new_tokens=48)
        generations = await model.generate(
            [Request(messages=talk, sampling=sampling, seed=turn * count + row) for row, talk in enumerate(talks)]
        )
        for row, (world, (reply,)) in enumerate(zip(worlds, generations, strict=True)):
            replies[row].append(reply.text)
            observation = world.step(world.parse(reply.text)).observation
            talks[row] = (
                *talks[row],
                Message(role="assistant", text=reply.text),
                Message(role="user", text=observation),
            )
    await model.close()
    return list(zip(talks, replies, strict=True))


def _requests(talks: Sequence[tuple[Talk, list[str]]], turn: int) -> list[tuple[Request, str]]:
    """Return what is asked in a turn, and the reply that is given."""
    sampling = Sampling(temperature=1.0, max_new_tokens=128, logprobs=True)
    requests = []
    for row, (talk, replies) in enumerate(talks):
        opening = len(talk) - 2 * len(replies)
        messages = talk[: opening + 2 * turn]
        requests.append((Request(messages=messages, sampling=sampling, seed=turn * len(talks) + row), replies[turn]))
    return requests


def _model(folder: Path, layers: int) -> Path:
    """Return a directory with a model of SmolLM2's shape, with random weights."""
    path = folder / "smollm2-shape"
    config = AutoConfig.from_pretrained(SMOLLM2)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(SMOLLM2 / name, path / name)
    (path / "tokenizer.json").write_bytes(gzip.decompress((SMOLLM2 / "tokenizer.json.gz").read_bytes()))
    return path
