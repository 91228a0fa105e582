"""n replies to one prompt against one reply to each of n prompts of the same length, in one batch
each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from measures import Clock, Measure
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling

MODEL = Path("data/models/textcraft-tiny")
NEW_TOKENS = 16


def measure(folder: Path, *, n: int, words: int, clock: Clock) -> list[Measure]:
    """Return the ratios for prompts of `words` words, without a prefix cache.

    One model has keys and values for each query head, as the shipped one; in the other eight heads
    share two, as in the larger models of these years.
    """
    return [
        *_measure("shared_prefill_ratio", MODEL, n=n, words=words, clock=clock),
        *_measure("shared_prefill_ratio_grouped", grouped_model(folder / "grouped"), n=n, words=words, clock=clock),
    ]


def grouped_model(path: Path) -> Path:
    """Save a random model in which four query heads share keys and values, with the tiny model's
    tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=704,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _measure(name: str, path: Path, *, n: int, words: int, clock: Clock) -> list[Measure]:
    model = TransformersModel.load(path, dtype="bfloat16", device="cpu", prefix_cache_bytes=0)
    prompts = [_prompt(number, words) for number in range(n)]
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS)
    shared_batch = [Request(messages=prompts[0], sampling=sampling, seed=0, n=n)]
    separate_batch = [Request(messages=prompt, sampling=sampling, seed=seed) for seed, prompt in enumerate(prompts)]
    tokens = model.count_tokens(shared_batch[0])
    shared_s, separate_s = asyncio.run(_run(model, [shared_batch, separate_batch], clock))
    return [
        Measure(
            name=name,
            value=separate_s / shared_s,
            unit="x",
            goal="> 1",
            note=f"{n} replies of {NEW_TOKENS} tokens to a prompt of {tokens} tokens in {shared_s:.2f} s, "
            f"to {n} prompts in {separate_s:.2f} s",
        )
    ]


def _prompt(first: int, words: int) -> tuple[Message, ...]:
    text = " ".join(["oak", "stick", *(str(number % 7) for number in range(words))])
    return (Message(role="user", text=f"{first:03} {text}"),)


async def _run(model: TransformersModel, batches: Sequence[Sequence[Request]], clock: Clock) -> list[float]:
    """Return the seconds of each batch, the second time it is asked for."""
    seconds = []
    for batch in batches:
        await model.generate(batch)
        start = clock()
        await model.generate(batch)
        seconds.append(clock() - start)
    await model.close()
    return seconds
