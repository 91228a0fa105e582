"""A LoRA adapter over the tiny model on a real vLLM: what it says is what the transformers backend
says of it.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from vllm_engine import TINY, serving, settings

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.vllm.model import VllmModel
from agentr_core.models.vllm.replicas import make_launch
from agentr_core.types import Generation, Message, Request, Sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # peft reads an attribute that transformers renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def make_adapter(folder: Path) -> Path:
    """Save an adapter of random numbers that changes what the tiny model says, as a training
    publishes it.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    shape = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), shape).save_pretrained(folder)
    for file in TINY.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def adapter(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter") / "adapter")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(engine: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmModel]:
    logs = tmp_path_factory.mktemp("adapter-logs")
    async with serving(make_launch(adapter, settings()), engine=engine, logs=logs) as model:
        yield model


def make_request(text: str, *, n: int = 1, **options: object) -> Request:
    sampling = Sampling(**({"max_new_tokens": 24, "logprobs": True} | options))  # type: ignore[arg-type]
    return Request(messages=(Message(role="user", text=text),), sampling=sampling, seed=5, n=n)


async def greedy(path: Path, requests: list[Request], context: int) -> list[list[Generation]]:
    """Return what the transformers backend says on a directory."""
    plain = TransformersModel.load(path, device="cpu", context_length=context)
    try:
        return await plain.generate(requests)
    finally:
        await plain.close()


async def test_replies_and_logprobs_are_those_of_transformers(adapted: VllmModel, adapter: Path) -> None:
    requests = [make_request(f"craft {number} oak planks", temperature=0.0) for number in (1, 2, 3)]
    replies = await greedy(adapter, requests, adapted.context_length)
    base_replies = await greedy(TINY, requests, adapted.context_length)
    assert [reply.token_ids for (reply,) in replies] != [reply.token_ids for (reply,) in base_replies], (
        "the adapter is heard"
    )
    for (reply,), (expected,) in zip(await adapted.generate(requests), replies, strict=True):
        assert reply.token_ids == expected.token_ids
        assert reply.text == expected.text
        assert reply.finish_reason == expected.finish_reason
        assert reply.logprobs == pytest.approx(expected.logprobs, abs=2e-3)


async def test_several_replies_to_a_request_repeat(adapted: VllmModel) -> None:
    requests = [make_request(f"craft {number} sticks", n=3, temperature=1.0) for number in range(8)]
    batch = await adapted.generate(requests)
    assert [[reply.token_ids for reply in replies] for replies in await adapted.generate(requests)] == [
        [reply.token_ids for reply in replies] for replies in batch
    ]
    assert all(reply.token_ids and reply.logprobs for replies in batch for reply in replies)
