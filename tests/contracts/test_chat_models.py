"""One contract for every model backend, and what only the in-process model promises.

To add a backend: write a fixture that gives its model, with a context of 512 tokens, and name it in
`BACKENDS`.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from agentr_core.errors import ConfigError, ModelDirectoryError, ModelFault, PromptTooLong
from agentr_core.models.local.drafting import Drafter
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.local.waves import DecodeBatch
from agentr_core.models.local.workers import LoadCommand, Workers, load_local
from agentr_core.models.scripted import ScriptedModel
from agentr_core.protocols import ChatModel, Reloading
from agentr_core.recipes.models import ServerConfig
from agentr_core.samples.rendering import Renderer
from agentr_core.types import Generation, Message, Request, Sampling, Span, grown_turn

# tests/gpu runs this contract where the client and the server of HTTP need not be installed.
if TYPE_CHECKING:
    from served import Served

    from agentr_core.models.openai.chat import OpenAIModel

WORDS = ("craft", "get", "oak", "planks", "log", "stick", "table", "wooden", "Observation:", "Could", "not", "four")


def written_reply(messages: tuple[Message, ...], seed: int, number: int) -> str:
    """A reply of up to 40 words that depends on all of its arguments."""
    draw = random.Random(repr((messages, seed, number)))
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 40)))


HOT = 2.0
"""A temperature at which replies of a trained model differ, too."""


def request(words: int = 5, *, seed: int = 0, n: int = 1, **sampling: Any) -> Request:
    text = " ".join(random.Random(words).choices(WORDS, k=words))
    options = {"max_new_tokens": 24} | sampling
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(**options), seed=seed, n=n)


def loading(path: Path) -> LoadCommand:
    return LoadCommand(
        path=path, dtype="float32", device="cpu", max_batch=32, context_length=0, prefix_cache_bytes=1 << 20, at=None
    )


async def answer(model: ChatModel, *requests: Request) -> list[list[Generation]]:
    return await model.generate(requests)


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> TransformersModel:
    return TransformersModel.load(tiny_model_dir, device="cpu", max_batch=32)


@pytest.fixture
def scripted() -> ScriptedModel:
    return ScriptedModel(written_reply, context_length=512)


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path) -> Iterator[Served]:
    """A server of the same model that is loaded in this process."""
    from served import serving

    with serving(lambda: TransformersModel.load(tiny_model_dir, device="cpu", max_batch=32)) as chat_server:
        yield chat_server


@pytest.fixture
async def openai(server: Served, tiny_model_dir: Path) -> AsyncIterator[OpenAIModel]:
    from agentr_core.models.openai.chat import Endpoint, OpenAIModel

    config = ServerConfig(
        model="tiny",
        tokenizer=str(tiny_model_dir),
        token_ids=True,
        continues=True,
        sampling_fields=("top_k", "min_p", "repetition_penalty"),
        max_retries=0,
    )
    model = await asyncio.to_thread(OpenAIModel.connect, Endpoint(url=server.url, key=""), config)
    yield model
    await model.close()


@pytest.fixture(scope="module")
def workers(tiny_model_dir: Path) -> Iterator[Workers]:
    model = load_local(loading(tiny_model_dir), num_workers=2)
    assert isinstance(model, Workers)
    yield model
    asyncio.run(model.close())


BACKENDS = ("scripted", "tiny", "workers", "openai")


@pytest.fixture(params=BACKENDS)
def model(request: pytest.FixtureRequest) -> ChatModel:
    backend: ChatModel = request.getfixturevalue(request.param)
    return backend


# ---- every backend


async def test_is_a_chat_model(model: ChatModel) -> None:
    assert isinstance(model, ChatModel)
    assert model.name
    assert len(model.fingerprint) == 16


async def test_as_many_replies_as_asked_for_in_order(model: ChatModel) -> None:
    replies = await answer(model, request(3, n=1), request(9, n=5), request(3, n=2))
    assert [len(group) for group in replies] == [1, 5, 2]
    assert await answer(model) == []


async def test_each_filter_of_sampling_is_heeded_in_one_batch(model: ChatModel) -> None:
    """A filter that leaves the likeliest token alone makes a reply greedy; a penalty changes that
    one. A scripted model is its function, whatever the settings.
    """
    greedy, free, *filter_replies, penalty_reply = await answer(
        model,
        request(6, temperature=0.0),
        request(6, temperature=HOT),
        request(6, top_k=1),
        request(6, top_p=1e-9),
        request(6, min_p=1.0),
        request(6, temperature=0.0, repetition_penalty=1.9),
    )
    assert all(reply == greedy for reply in filter_replies)
    if greedy[0].token_ids:
        assert free[0].token_ids != greedy[0].token_ids
    # The model behind a real vLLM says a word here, of which nothing is repeated.
    if len(set(greedy[0].token_ids)) < len(greedy[0].token_ids):
        assert penalty_reply[0].token_ids != greedy[0].token_ids
        assert len(set(penalty_reply[0].token_ids)) > len(set(greedy[0].token_ids))


async def test_prompt_tokens_are_those_of_count_tokens(model: ChatModel) -> None:
    requests = [request(3), request(70, n=3)]
    for req, group in zip(requests, await answer(model, *requests), strict=True):
        assert {g.prompt_tokens for g in group} == {model.count_tokens(req)}
    assert model.count_tokens(requests[0]) < model.count_tokens(requests[1])


async def test_reply_depends_on_seed_and_number_alone(model: ChatModel) -> None:
    req = request(12, seed=5, n=4, temperature=HOT)
    requests = [request(words, seed=words, n=1 + words % 5) for words in (1, 30, 80)]
    group = (await answer(model, req))[0]
    assert (await answer(model, *requests, req))[-1] == group
    assert (await answer(model, replace(req, n=2)))[0] == group[:2]
    assert (await answer(model, replace(req, seed=6)))[0] != group
    assert len({g.text for g in group}) > 1


async def test_a_reply_that_is_watched_is_the_same_and_its_texts_are_its_beginnings(model: ChatModel) -> None:
    texts: dict[int, list[str]] = {seed: [] for seed in range(1, 8)}
    requests = [request(8, seed=seed, temperature=HOT, stop=("not",)) for seed in range(8)]
    stream_requests = [replace(req, on_text=texts[req.seed].append) if req.seed in texts else req for req in requests]
    assert all(req in requests for req in stream_requests)
    replies = await answer(model, *stream_requests)
    assert replies == await answer(model, *requests)
    for seed, prefixes in texts.items():
        (reply,) = replies[seed]
        assert prefixes == sorted(prefixes, key=len)
        assert all(reply.text.startswith(text) for text in prefixes)
    early = [0 < len(text) < len(replies[seed][0].text) for seed, prefixes in texts.items() for text in prefixes]
    # A server's replies come as a whole.
    assert any(early) == (type(model).__name__ != "OpenAIModel")


async def test_reply_length_is_limited(model: ChatModel) -> None:
    for group in await answer(model, *(request(4, seed=seed, n=4, max_new_tokens=5) for seed in range(4))):
        for g in group:
            assert g.completion_tokens <= 5
            assert g.finish_reason == "stop" or g.completion_tokens == 5


async def test_stop_string_ends_the_text_before_it(model: ChatModel) -> None:
    free = (await answer(model, request(4, seed=1, n=8)))[0]
    stop = free[0].text[4:6]
    cut = (await answer(model, request(4, seed=1, n=8, stop=("never \N{SNOWMAN}", stop))))[0]
    for before, after in zip(free, cut, strict=True):
        assert after.text == before.text.split(stop)[0]
        if stop in before.text:
            assert after.finish_reason == "stop"


async def test_a_stop_string_is_kept_on_demand(model: ChatModel) -> None:
    free = (await answer(model, request(4, seed=1, n=8)))[0]
    stop = free[0].text[4:6]
    cut = (await answer(model, request(4, seed=1, n=8, stop=(stop,))))[0]
    with_stop = (await answer(model, request(4, seed=1, n=8, stop=(stop,), include_stop=True)))[0]
    for without, whole, before in zip(cut, with_stop, free, strict=True):
        assert whole.token_ids == without.token_ids
        assert whole.text == without.text + stop * (stop in before.text)


async def test_a_reply_ends_at_a_match_and_so_do_its_tokens(model: ChatModel) -> None:
    req = request(4, seed=1, n=8, max_new_tokens=40, logprobs=True)
    free = (await answer(model, req))[0]
    end = re.escape(free[0].text[4:7])
    until = f"(?s)(?<={end})(?=.)"
    until_req = replace(req, sampling=replace(req.sampling, until=until))
    cut = (await answer(model, until_req))[0]
    fewer = []
    for before, after in zip(free, cut, strict=True):
        match = re.search(until, before.text)
        assert after.text == (before.text if match is None else before.text[: match.end()])
        if match is None:
            assert after == before
            continue
        assert after.finish_reason == "stop"
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        if after.token_ids:
            assert after.logprobs == (before.logprobs or ())[: len(after.token_ids)]
        if before.token_ids:
            fewer.append(len(after.token_ids) < len(before.token_ids))
    assert any(fewer) or not free[0].token_ids


async def test_a_reply_goes_on_with_an_unfinished_turn(model: ChatModel) -> None:
    req = request(4, seed=2, n=3)
    short_req = replace(req, messages=(*req.messages, grown_turn([Span(text="get oak"), Span(text=" log. ")])))
    long_req = replace(
        req, messages=(*req.messages, grown_turn([Span(text="get oak"), Span(text=" log. stick table four")]))
    )
    replies, long_replies = await answer(model, short_req, long_req)
    assert {reply.prompt_tokens for reply in replies} == {model.count_tokens(short_req)}
    assert model.count_tokens(req) < model.count_tokens(short_req) < model.count_tokens(long_req)
    assert [reply.text for reply in replies] != [reply.text for reply in long_replies]
    assert (await answer(model, short_req))[0] == replies


async def test_prompt_without_room_is_refused(model: ChatModel) -> None:
    with pytest.raises(PromptTooLong, match="leaves no room"):
        await answer(model, request(3), request(600))


async def test_reply_is_cut_by_the_context(model: ChatModel) -> None:
    words = next(w for w in range(600, 0, -1) if model.count_tokens(request(w)) <= model.context_length - 3)
    req = request(words, n=8, max_new_tokens=100)
    room = model.context_length - model.count_tokens(req)
    group = (await answer(model, req))[0]
    assert max(g.completion_tokens for g in group) == room
    assert "length" in {g.finish_reason for g in group}


async def test_logprobs_on_request(model: ChatModel) -> None:
    plain, with_logprobs = await answer(model, request(4), request(4, logprobs=True))
    assert plain[0].logprobs is None
    assert with_logprobs[0].logprobs is not None
    assert len(with_logprobs[0].logprobs) == len(with_logprobs[0].token_ids)
    assert replace(with_logprobs[0], logprobs=None) == plain[0]


async def test_a_cancelled_request_leaves_the_model_in_order(model: ChatModel) -> None:
    req = request(12, seed=5, n=2)
    before = await answer(model, req)
    long = asyncio.create_task(answer(model, request(40, n=16, max_new_tokens=200)))
    await asyncio.sleep(0.02)
    if long.cancel():
        with pytest.raises(asyncio.CancelledError):
            await long
    assert await answer(model, req) == before


async def test_no_work_after_close(model: ChatModel, tiny_model_dir: Path) -> None:
    # The model in this process is shared by all tests.
    closing = model
    if isinstance(model, TransformersModel | Workers):
        closing = load_local(loading(tiny_model_dir), num_workers=2 if isinstance(model, Workers) else 1)
    await closing.close()
    await closing.close()
    with pytest.raises(ModelFault, match="is closed"):
        await closing.generate([request()])
    if isinstance(closing, Reloading):
        with pytest.raises(ModelFault, match="is closed"):
            await closing.reload(tiny_model_dir / "model.safetensors")


# ---- the same model here and behind a server


async def test_a_server_of_ours_changes_nothing(tiny: TransformersModel, openai: OpenAIModel) -> None:
    requests = [request(words, seed=2**62 + words, n=3, logprobs=True) for words in (3, 12, 30)]
    # A server sends ids, and does not say whose they are.
    expected = [[replace(g, tokenizer=None) for g in group] for group in await answer(tiny, *requests)]
    assert await answer(openai, *requests) == expected
    assert [openai.count_tokens(req) for req in requests] == [tiny.count_tokens(req) for req in requests]
    assert openai.context_length == tiny.context_length


# ---- the same model here and in other processes


async def test_workers_change_nothing(tiny: TransformersModel, workers: Workers) -> None:
    requests = [request(words, seed=words, n=1 + words % 3, logprobs=True) for words in range(1, 40)]
    assert {workers.worker_of(req) for req in requests} == set(workers.workers)
    groups, worker_groups = await answer(tiny, *requests), await answer(workers, *requests)
    for group, worker_group in zip(groups, worker_groups, strict=True):
        for reply, worker_reply in zip(group, worker_group, strict=True):
            assert replace(reply, logprobs=None) == replace(worker_reply, logprobs=None)
            assert reply.logprobs == pytest.approx(worker_reply.logprobs, abs=1e-4)
    assert workers.fingerprint == tiny.fingerprint
    assert workers.context_length == tiny.context_length
    assert workers.name == tiny.name


# ---- the in-process model


async def test_token_ids_are_the_text_and_end_with_the_turn(tiny: TransformersModel) -> None:
    group = (await answer(tiny, request(4, n=64, max_new_tokens=200)))[0]
    end = tiny.renderer.end_of_turn
    assert {g.finish_reason for g in group} == {"stop", "length"}, "both kinds of ending must be looked at"
    for g in group:
        assert (g.token_ids[-1] == end) == (g.finish_reason == "stop")
        assert end not in g.token_ids[:-1]
        assert g.completion_tokens == len(g.token_ids)
        assert g.text == tiny._tokenizer.decode(list(g.token_ids), skip_special_tokens=True)


async def assert_decodes_like_plain_forward_passes(model: TransformersModel) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = model._decoder._model.name_or_path  # type: ignore[union-attr]
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # 1 token, around one block of 64, and several blocks; one reply alone, and several on one row
    # of the cache.
    greedy = [request(words, temperature=0.0, logprobs=True) for words in (0, 20, 21, 22, 23, 90)]
    stochastic = [request(words, n=3, seed=words, logprobs=True) for words in (4, 70)]
    for req, group in zip([*greedy, *stochastic], await answer(model, *greedy, *stochastic), strict=True):
        prompt = model.renderer.render_prompt(req.messages)
        for g in group:
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *g.token_ids]])
                expected = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            if req in greedy:
                assert list(g.token_ids) == expected.argmax(-1).tolist()
            logprobs = expected[range(len(g.token_ids)), list(g.token_ids)].tolist()
            assert list(g.logprobs or ()) == pytest.approx(logprobs, abs=1e-4)


async def test_replies_and_logprobs_are_those_of_a_plain_forward_pass(tiny: TransformersModel) -> None:
    await assert_decodes_like_plain_forward_passes(tiny)


async def test_layers_with_a_sliding_window_and_without(windowed_model_dir: Path) -> None:
    await assert_decodes_like_plain_forward_passes(TransformersModel.load(windowed_model_dir, device="cpu"))


async def test_a_sliding_window_in_every_layer(all_windowed_model_dir: Path) -> None:
    await assert_decodes_like_plain_forward_passes(TransformersModel.load(all_windowed_model_dir, device="cpu"))


def of_many_lengths() -> list[Request]:
    return [request(words, max_new_tokens=4) for words in range(1, 140)]


@pytest.mark.parametrize("directory", ["tiny_model_dir", "windowed_model_dir", "all_windowed_model_dir"])
async def test_the_few_wide_passes_of_a_gpu_compute_the_same(
    directory: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentr_core.models.local import cache, decoding

    outputs = []
    for sizes in (cache.CPU_PASS_SIZES, cache.GPU_PASS_SIZES):
        monkeypatch.setattr(decoding, "CPU_PASS_SIZES", sizes)
        model = TransformersModel.load(request.getfixturevalue(directory), device="cpu", max_batch=128)
        await assert_decodes_like_plain_forward_passes(model)
        assert model._decoder is not None
        forward = Mock(wraps=model._decoder.prefill._forward)
        monkeypatch.setattr(cache.Prefill, "_forward", lambda _, *args, forward=forward: forward(*args))
        groups = await answer(model, *of_many_lengths())
        outputs.append(([g.token_ids for group in groups for g in group], forward.call_count))
        monkeypatch.undo()
    (cpu_ids, cpu_passes), (gpu_ids, gpu_passes) = outputs
    assert cpu_ids == gpu_ids
    assert 0 < gpu_passes < cpu_passes / 2


@pytest.mark.parametrize("window", [2, 40, 100])
async def test_windows_of_any_size_over_long_replies(
    tmp_path: Path, window: int, save_windowed_model: Callable[..., Path]
) -> None:
    """Replies of 150 tokens outgrow the columns that were made ready, and a window that covers a
    short prompt.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kinds = ["sliding_attention", "full_attention"]
    path = save_windowed_model(tmp_path / "model", use_sliding_window=True, layer_types=kinds, sliding_window=window)
    model = TransformersModel.load(path, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    requests = [request(words, n=n, seed=words, max_new_tokens=150, logprobs=True) for words, n in ((3, 3), (60, 2))]
    lengths = []
    for req, group in zip(requests, await answer(model, *requests), strict=True):
        prompt = model.renderer.render_prompt(req.messages)
        for g in group:
            lengths.append(len(g.token_ids))
            with torch.inference_mode():
                scores = plain(input_ids=torch.tensor([[*prompt, *g.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = scores.log_softmax(-1)[range(len(g.token_ids)), list(g.token_ids)]
            assert list(g.logprobs or ()) == pytest.approx(expected.tolist(), abs=1e-4)
    assert max(lengths) > 100


async def test_sampling_follows_the_models_probabilities(tiny: TransformersModel) -> None:
    import torch

    req = request(6, n=3000, max_new_tokens=1, logprobs=True)
    group = (await answer(tiny, req))[0]
    frequencies = torch.zeros(tiny._decoder._vocabulary)  # type: ignore[union-attr]
    expected: dict[int, float] = {}
    for g in group:
        frequencies[g.token_ids[0]] += 1 / len(group)
        expected[g.token_ids[0]] = 2.718281828 ** (g.logprobs or (0.0,))[0]
    for token, probability in expected.items():
        deviation = (probability * (1 - probability) / len(group)) ** 0.5
        assert abs(float(frequencies[token]) - probability) < 5 * deviation + 1e-3


async def test_top_p_keeps_the_likeliest_tokens_only(tiny: TransformersModel) -> None:
    wide, narrow, least = await answer(
        tiny,
        request(6, n=400, max_new_tokens=1, logprobs=True),
        request(6, n=400, max_new_tokens=1, top_p=0.3, logprobs=True),
        request(6, n=400, max_new_tokens=1, top_p=1e-9),
    )
    likely = {g.token_ids[0]: 2.718281828 ** (g.logprobs or (0.0,))[0] for g in narrow}
    assert len({g.token_ids for g in least}) == 1
    assert len(likely) < len({g.token_ids for g in wide})
    assert sum(likely.values()) - min(likely.values()) < 0.3 < sum(likely.values())


async def test_a_penalty_is_that_of_transformers(tiny: TransformersModel, tiny_model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    requests = [request(words, temperature=0.0, repetition_penalty=1.3, n=2) for words in (3, 40, 90)]
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for req, group in zip(requests, await answer(tiny, *requests), strict=True):
        prompt = torch.tensor([tiny.renderer.render_prompt(req.messages)])
        output = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, repetition_penalty=1.3, max_new_tokens=24
        )
        ids = tuple(output[0, prompt.shape[1] :].tolist())
        assert [reply.token_ids for reply in group] == [ids, ids]


async def test_settings_of_a_reply_do_not_reach_its_neighbours(tiny: TransformersModel) -> None:
    draw = random.Random(5)
    requests = [
        request(
            words,
            seed=seed,
            n=draw.choice((1, 2, 5)),
            max_new_tokens=draw.choice((3, 9, 24)),
            temperature=draw.choice((0.0, 0.7, 1.0)),
            top_p=draw.choice((0.8, 1.0)),
            top_k=draw.choice((0, 2, 7, 10**6)),
            min_p=draw.choice((0.0, 0.2)),
            repetition_penalty=draw.choice((0.8, 1.0, 1.0, 1.4)),
            logprobs=True,
        )
        for seed, words in enumerate(draw.choices(range(1, 60), k=30))
    ]
    for req, group in zip(requests, await answer(tiny, *requests), strict=True):
        (expected,) = await answer(tiny, req)
        assert [g.token_ids for g in expected] == [g.token_ids for g in group]


async def test_log_probabilities_are_those_before_penalty_and_filters(tiny: TransformersModel) -> None:
    plain, filter_group = await answer(
        tiny,
        request(6, n=200, max_new_tokens=1, logprobs=True),
        request(6, n=200, max_new_tokens=1, logprobs=True, temperature=0.5, top_k=5, min_p=0.1, repetition_penalty=1.5),
    )
    expected = {g.token_ids: g.logprobs for g in plain}
    common = [g for g in filter_group if g.token_ids in expected]
    assert common
    for g in common:
        assert g.logprobs == pytest.approx(expected[g.token_ids])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_batch_invariance(tiny: TransformersModel, temperature: float) -> None:
    draw = random.Random(17)
    requests = [
        request(words, seed=seed, n=draw.choice((1, 1, 2, 4, 7)), temperature=temperature, logprobs=True)
        for seed, words in enumerate(draw.sample(range(1, 100), 30))
    ]
    for req, group in zip(requests, await answer(tiny, *requests), strict=True):
        (expected,) = await answer(tiny, req)
        ((single,),) = await answer(tiny, replace(req, n=1))
        assert [g.token_ids for g in expected] == [g.token_ids for g in group]
        assert single.token_ids == group[0].token_ids
        for reply, batch_reply in zip(expected, group, strict=True):
            assert reply.logprobs == pytest.approx(batch_reply.logprobs, abs=1e-4)


@pytest.mark.parametrize("directory", ["tiny_model_dir", "windowed_model_dir", "all_windowed_model_dir"])
@pytest.mark.parametrize("n", [1, 3])
async def test_prefix_cache_changes_no_token(directory: str, n: int, request: pytest.FixtureRequest) -> None:
    """What was sampled is taken from the cache as what was read; only the last bits may differ."""
    path: Path = request.getfixturevalue(directory)
    cache_model, bare_model = (
        TransformersModel.load(path, device="cpu", prefix_cache_bytes=size) for size in (1 << 20, 0)
    )
    messages: tuple[Message, ...] = (Message(role="user", text="craft oak planks " * 20),)
    for turn in range(4):
        req = Request(messages=messages, sampling=Sampling(max_new_tokens=40, logprobs=True), seed=turn, n=n)
        first, second = (await answer(cache_model, req))[0], (await answer(bare_model, req))[0]
        for reply, bare_reply in zip(first, second, strict=True):
            assert replace(reply, logprobs=None) == replace(bare_reply, logprobs=None)
            assert reply.logprobs == pytest.approx(bare_reply.logprobs, abs=1e-4)
        message = Message(role="assistant", text=first[-1].text, token_ids=first[-1].token_ids)
        messages = (*messages, message, Message(role="user", text="Got oak log. "))
    prompts = [cache_model.count_tokens(replace(req, messages=messages[: 2 * turn + 1])) for turn in range(4)]
    # All but the first prompt, less half a block and what is new in each turn.
    assert cache_model.cached_share() * sum(prompts) > sum(prompts[:-1]) + 3 * (39 - 16)
    assert bare_model.cached_share() == 0
    assert len(bare_model._decoder._prefix_cache) == 0  # type: ignore[union-attr]
    await cache_model.close()
    await bare_model.close()


@pytest.mark.parametrize("directory", ["tiny_model_dir", "windowed_model_dir", "all_windowed_model_dir"])
@pytest.mark.parametrize("n", [1, 3])
async def test_drafts_change_no_token_and_save_passes(directory: str, n: int, request: pytest.FixtureRequest) -> None:
    """Whether a draft is right, wrong or right at first; only the last bits may differ.

    A random model has hundreds of likely tokens, so once in thousands of tokens a last bit moves a
    random number across the edge between two of them.
    """
    path: Path = request.getfixturevalue(directory)
    draft_model, plain = (TransformersModel.load(path, device="cpu", max_batch=64) for _ in range(2))
    assert draft_model._decoder is not None
    draft_model._decoder._drafter = Drafter(4)
    requests = [
        Request(
            messages=(Message(role="user", text=text * (1 + number % 5)),),
            sampling=Sampling(temperature=number % 2, max_new_tokens=7 + 6 * number, logprobs=True, stop=("oak",)),
            seed=number // 2,
            n=n,
        )
        for number, text in enumerate(("craft oak planks ", "get 3 sticks ", "go on ") * 4)
    ]
    expected = [reply for replies in await answer(plain, *requests) for reply in replies]
    passes = []
    for _ in range(2):  # The second time, every token is foreseen.
        before = draft_model.passes()
        replies = [reply for group in await answer(draft_model, *requests) for reply in group]
        passes.append(draft_model.passes() - before)
        equal = [
            (reply, plain_reply)
            for reply, plain_reply in zip(replies, expected, strict=True)
            if replace(reply, logprobs=None) == replace(plain_reply, logprobs=None)
        ]
        assert len(equal) >= len(expected) - 1
        for reply, plain_reply in equal:
            assert reply.logprobs == pytest.approx(plain_reply.logprobs, abs=1e-4)
    assert draft_model.written() == pytest.approx(2 * plain.written(), rel=0.1)
    # A draft that is right gives five tokens a pass.
    assert passes[1] < 0.5 * passes[0] <= 0.5 * plain.passes()
    await draft_model.close()
    await plain.close()


async def test_equal_prompts_share_one_prefill(tiny: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny._decoder
    assert decoder is not None
    waves: list[DecodeBatch] = []
    original = decoder.decode

    def decode(wave: DecodeBatch, *rest: Any) -> None:
        waves.append(wave)
        original(wave, *rest)

    monkeypatch.setattr(decoder, "decode", decode)
    same = [request(9, seed=seed) for seed in range(4)]
    replies = await answer(tiny, *same)
    assert [(wave.width, len(wave.rows)) for wave in waves] == [(4, 1)]
    assert replies == [(await answer(tiny, req))[0] for req in same]


async def test_event_loop_stays_responsive(tiny: TransformersModel) -> None:
    working = asyncio.create_task(answer(tiny, request(40, n=32, max_new_tokens=60)))
    turns = 0
    while not working.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 5


async def test_grouped_query_model_decodes_too(tmp_path: Path, save_tiny_model: Callable[..., Path]) -> None:
    model = TransformersModel.load(save_tiny_model(tmp_path / "grouped", num_key_value_heads=2), device="cpu")
    together, alone = await answer(model, request(9, n=4), request(30)), await answer(model, request(9, n=1))
    assert together[0][:1] == alone[0]
    await assert_decodes_like_plain_forward_passes(model)
    await model.close()


async def test_replies_of_a_grouped_query_model_share_a_row(
    tmp_path: Path, save_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TransformersModel.load(save_tiny_model(tmp_path / "grouped", num_key_value_heads=1), device="cpu")
    assert model._decoder is not None
    waves: list[DecodeBatch] = []
    original = model._decoder.decode

    def decode(wave: DecodeBatch, *rest: Any) -> None:
        waves.append(wave)
        original(wave, *rest)

    monkeypatch.setattr(model._decoder, "decode", decode)
    error = AssertionError("keys and values are copied for each query head")
    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", Mock(side_effect=error))
    await answer(model, request(60, n=8))
    assert [(wave.width, len(wave.rows)) for wave in waves] == [(8, 1)]
    await model.close()


async def test_grouped_queries_behind_a_sliding_window(
    tmp_path: Path, save_windowed_model: Callable[..., Path]
) -> None:
    path = save_windowed_model(
        tmp_path / "grouped",
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = TransformersModel.load(path, device="cpu")
    await assert_decodes_like_plain_forward_passes(model)
    await model.close()


async def test_bfloat16(tiny_model_dir: Path, tiny: TransformersModel) -> None:
    model = TransformersModel.load(tiny_model_dir, dtype="bfloat16", device="cpu")
    assert model.fingerprint != tiny.fingerprint
    req = request(12, n=3, logprobs=True)
    assert model._decoder is not None
    drafts, model._decoder._drafter = model._decoder._drafter, None
    assert await answer(model, req) == await answer(model, req)
    model._decoder._drafter = drafts
    (first,), (second,) = await answer(model, req), await answer(model, req)
    for reply, draft_reply in zip(first, second, strict=True):
        # The second time, replies are drafted from the first ones, and rounded otherwise.
        same = next(
            (i for i, (a, b) in enumerate(zip(reply.token_ids, draft_reply.token_ids, strict=False)) if a != b), 24
        )
        assert same > 1
        assert reply.logprobs is not None
        assert draft_reply.logprobs is not None
        assert reply.logprobs[:same] == pytest.approx(draft_reply.logprobs[:same], abs=0.1)
    assert model.renderer.render_prompt(req.messages) == tiny.renderer.render_prompt(req.messages)
    await model.close()


async def test_layers_laid_out_anew_compute_the_same_and_follow_new_weights(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from agentr_core.models.local.decoding import PackedLinear, pack_linears

    linear = torch.nn.Linear(48, 80).bfloat16()
    rows = torch.randn(5, 48).bfloat16()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with torch.inference_mode():
            assert torch.equal(PackedLinear(linear)(rows), linear(rows))
    plain = torch.nn.Sequential(torch.nn.Linear(48, 80))
    pack_linears(plain)
    assert type(plain[0]) is torch.nn.Linear, "float32 stays as it is"

    weights = load_file(tiny_model_dir / "model.safetensors")
    double_dir = tmp_path / "doubled"
    shutil.copytree(tiny_model_dir, double_dir)
    save_file(
        {name: 2 * tensor for name, tensor in weights.items()}, double_dir / "model.safetensors", {"format": "pt"}
    )
    req = request(12, logprobs=True, temperature=0.0, max_new_tokens=1)
    model, double_model = (
        TransformersModel.load(path, dtype="bfloat16", device="cpu") for path in (tiny_model_dir, double_dir)
    )
    before, expected = await answer(model, req), await answer(double_model, req)
    await model.reload(double_dir / "model.safetensors")
    ((after,),) = await answer(model, req)
    assert after.logprobs == expected[0][0].logprobs != before[0][0].logprobs
    await model.close()
    await double_model.close()


def test_fingerprint_follows_the_template(tiny_model_dir: Path, tiny: TransformersModel, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    assert TransformersModel.load(copy, device="cpu", max_batch=32).fingerprint == tiny.fingerprint
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))
    assert TransformersModel.load(copy, device="cpu", max_batch=32).fingerprint != tiny.fingerprint


async def test_a_template_that_opens_a_thought_is_told_with_each_reply(
    tiny_model_dir: Path, tiny: TransformersModel, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    template = copy / "chat_template.jinja"
    begins = "<|im_start|>assistant\n"
    template.write_text(template.read_text().replace(begins, f"{begins}<think>\n"))
    model = TransformersModel.load(copy, device="cpu", max_batch=32)
    ((reply,),) = await answer(model, request(12))
    ((plain,),) = await answer(tiny, request(12))
    assert (reply.thinks, plain.thinks) == (True, False)
    await model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "model.dtype 'float8' is unknown"),
        ({"device": "toaster"}, "model.device 'toaster' is not a device"),
        ({"context_length": 4096}, "was made for 512"),
    ],
)
def test_wrong_options(tiny_model_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformersModel.load(tiny_model_dir, **options)


def test_weights_of_another_shape(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ModelDirectoryError, match=r"lacks weights or has them in another shape: model\.layers\.2"):
        TransformersModel.load(copy, device="cpu")


def test_template_of_the_directory_is_used(tiny: TransformersModel) -> None:
    assert isinstance(tiny.renderer, Renderer)
    text = tiny._tokenizer.decode(tiny.renderer.render_prompt((Message(role="user", text="hi"),)))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
