"""The contract of every model backend, and what only vLLM promises, against a real server."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from chat_contract import contract_tests

from agentr_core.errors import ModelUnavailable
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.vllm.model import VllmModel
from agentr_core.types import Message, Request, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONTRACT = contract_tests()
_closing = CONTRACT.pop("test_no_work_after_close")
globals().update(CONTRACT)


def make_request(text: str, **options: object) -> Request:
    sampling = Sampling(**({"max_new_tokens": 24, "logprobs": True} | options))  # type: ignore[arg-type]
    return Request(messages=(Message(role="user", text=text),), sampling=sampling, seed=5, n=1)


async def test_the_whole_contract_is_here(model: VllmModel) -> None:
    assert len(CONTRACT) >= 9


async def test_vllm_is_started_as_it_wants_to_be(model: VllmModel, replicas_log: Path) -> None:
    log = (replicas_log / "replica-0.log").read_text()
    assert "APIServer pid=" in log
    # Other libraries warn, too. The second is what vLLM says of a model that is named by --model.
    warnings = re.findall(r".*(?:api_server.*deprecated|you should provide the model).*", log)
    assert not warnings


async def test_greedy_replies_and_logprobs_are_those_of_transformers(model: VllmModel) -> None:
    plain = TransformersModel.load(model._launch.model, device="cpu", context_length=model.context_length)
    requests = [make_request(f"craft {number} oak planks", temperature=0.0) for number in (1, 2, 3)]
    for (reply,), (plain_reply,) in zip(await model.generate(requests), await plain.generate(requests), strict=True):
        assert reply.token_ids == plain_reply.token_ids
        assert reply.text == plain_reply.text
        assert reply.finish_reason == plain_reply.finish_reason
        assert reply.logprobs == pytest.approx(plain_reply.logprobs, abs=2e-3)
    await plain.close()


async def test_sampled_logprobs_are_the_models_own(model: VllmModel) -> None:
    ((cold,),) = await model.generate([make_request("craft 4 oak planks", temperature=0.0)])
    ((hot,),) = await model.generate([make_request("craft 4 oak planks", temperature=0.001, top_p=0.5)])
    assert hot.token_ids == cold.token_ids
    assert hot.logprobs == pytest.approx(cold.logprobs, abs=1e-3), "neither temperature nor top-p changes them"


async def test_a_reply_that_is_heard_is_the_same(model: VllmModel) -> None:
    request = make_request("craft 4 oak planks", temperature=1.0)
    texts = list[str]()
    ((streamed_reply,),) = await model.generate([replace(request, on_text=texts.append)])
    ((plain,),) = await model.generate([request])
    assert (streamed_reply.text, streamed_reply.token_ids, streamed_reply.finish_reason) == (
        plain.text,
        plain.token_ids,
        plain.finish_reason,
    )
    assert streamed_reply.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    assert texts
    assert all(plain.text.startswith(text) for text in texts)


async def test_long_prompts_with_seeds_in_one_batch(model: VllmModel) -> None:
    """More prompt tokens than the engine takes in one step: cut prompts with seeds would kill
    it.
    """
    text = "Could not find oak log. " * 120
    requests = [make_request(f"{number} {text}", max_new_tokens=4) for number in range(24)]
    assert model.count_tokens(requests[0]) * len(requests) > 4000
    replies = await model.generate(requests)
    assert (await model.generate(requests[-1:]))[0] == replies[-1]


async def test_a_replica_that_is_killed_comes_back(model: VllmModel, replicas_log: Path) -> None:
    request = make_request("craft 4 sticks")
    before = await model.generate([request])
    pids = re.findall(r"\(EngineCore pid=(\d+)\)", (replicas_log / "replica-0.log").read_text())
    os.kill(int(pids[-1]), signal.SIGKILL)

    async def ask_often() -> None:
        for _ in range(50):
            await model.generate([request])

    with pytest.raises(ModelUnavailable):
        await ask_often()
    (after,) = await model.generate([request])
    assert [reply.token_ids for reply in after] == [reply.token_ids for reply in before[0]]


# The last one: all tests share the model.
test_no_work_after_close = _closing
