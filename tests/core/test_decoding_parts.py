"""The parts of the decode loop that can be tested without a model."""

from __future__ import annotations

import math
import shutil
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentr_core.models.local.cache import KVBuffer, KVShape, PrefixCache, block_hashes
from agentr_core.models.local.drafting import Drafter, History
from agentr_core.models.local.sampling import (
    Logits,
    apply_penalty,
    choose_tokens,
    filtered_probabilities,
    log_probabilities,
    uniforms,
)
from agentr_core.models.local.waves import (
    StopDetector,
    cut_at_stop,
    ids_covering,
    make_generation,
    padded_rows,
    plan_batches,
    stable_text,
)
from agentr_core.replies import FIRST_BLOCK, FIRST_LINE
from agentr_core.samples.rendering import Renderer, load_tokenizer
from agentr_core.types import Message, Sampling

# ---- waves


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=30),
    data=st.data(),
    max_batch=st.integers(1, 64),
    max_width=st.sampled_from([1, 4, 8]),
)
def test_waves_hold_every_reply_once(lengths: list[int], data: st.DataObject, max_batch: int, max_width: int) -> None:
    counts = data.draw(st.lists(st.integers(1, 20), min_size=len(lengths), max_size=len(lengths)))
    numbers = iter(range(sum(counts)))
    replies = [[next(numbers) for _ in range(count)] for count in counts]
    waves = plan_batches(lengths, replies, max_batch=max_batch, max_width=max_width)
    reply_counts = Counter(reply for wave in waves for row in wave.rows for reply in row.reply_indices)
    assert reply_counts == Counter(range(sum(counts)))
    for wave in waves:
        assert len(wave.rows) == 1 or len(wave.rows) * wave.width <= max_batch
        assert all(0 < len(row.reply_indices) <= wave.width for row in wave.rows)
        assert all(reply in replies[row.prompt_index] for row in wave.rows for reply in row.reply_indices)
        assert [lengths[row.prompt_index] for row in wave.rows] == sorted(
            lengths[row.prompt_index] for row in wave.rows
        )


@given(rows=st.integers(1, 600), width=st.sampled_from([1, 2, 4, 8]))
def test_padded_shapes_are_few_and_close(rows: int, width: int) -> None:
    slots = padded_rows(rows, width) * width
    assert slots % 16 == 0
    assert rows * width <= slots <= max(16, math.ceil(rows * width * 1.5), rows * width + 15)
    assert padded_rows(slots // width, width) * width == slots, "a padded shape is its own padding"


def test_padded_sizes() -> None:
    assert sorted({padded_rows(rows, 1) for rows in range(1, 257)}) == [16, 32, 48, 64, 96, 128, 192, 256]


# ---- drafting


@given(parts=st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=6), length=st.integers(1, 5))
def test_a_reply_goes_on_as_it_last_did_after_the_same_two_tokens(parts: list[list[int]], length: int) -> None:
    history = History(parts[0])
    for part in parts[1:]:
        history.add(part)
    tokens = [token for part in parts for token in part]
    assert history.tokens == tokens
    before = [at for at in range(2, len(tokens)) if tokens[at - 2 : at] == tokens[-2:]]
    expected = tokens[before[-1] :][:length] if before else []
    assert list(history.repeated_tokens(length)) == expected


def test_other_replies_that_share_three_tokens_come_before_the_own_pair_and_that_before_theirs() -> None:
    drafts = Drafter(3)
    assert not drafts.draft(History([1, 2, 3])), "nothing was said before"
    drafts.add_reply(History([9, 9, 1, 2, 3, 4, 5, 6, 7]), 2)
    assert list(drafts.draft(History([8, 1, 2, 3]))) == [4, 5, 6]
    assert list(drafts.draft(History([8, 2, 3]))) == [4, 5, 6], "a pair will do"
    assert list(drafts.draft(History([2, 3, 0, 0, 2, 3]))) == [0, 0, 2], "the own pair is nearer"
    assert list(drafts.draft(History([2, 3, 0, 1, 2, 3]))) == [4, 5, 6], "three tokens say more than two"
    assert list(drafts.draft(History([9, 9]))) == [1, 2, 3], "a reply's first token follows its prompt"
    drafts.add_reply(History([1, 2, 3, 0]), 1)
    assert list(drafts.draft(History([1, 2, 3]))) == [0], "what was said last"


def test_drafts_that_do_not_pay_are_tried_now_and_then() -> None:
    drafts = Drafter(4)
    due = []
    for step in range(400):
        due.append(drafts.should_draft())
        if due[-1]:
            drafts.record_gain(1.0 if step < 200 else 4.0)
    assert 0.1 < sum(due[100:200]) / 100 < 0.2
    assert all(due[250:])


# ---- sampling


def test_streams_depend_on_seed_and_number_only() -> None:
    draws = uniforms(3, 1, 100)
    assert np.array_equal(uniforms(3, 1, 10), draws[:10])
    assert not np.array_equal(uniforms(3, 2, 100), draws)
    assert not np.array_equal(uniforms(4, 1, 100), draws)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert uniforms(-1, 0, 1) != uniforms(2**63 - 1, 0, 1), "any integer is a seed"


def _choose(logits: list[float], u: float, *, temperature: float = 1.0, top_p: float = 1.0) -> int:
    column = [torch.tensor([value], dtype=torch.float64) for value in (temperature, top_p, u)]
    return int(choose_tokens(Logits(torch.tensor([logits])), *column))


def test_inverse_distribution_function() -> None:
    logits = [math.log(p) for p in (0.25, 0.5, 0.25)]
    assert [_choose(logits, u) for u in (0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2**-53)] == [0, 0, 1, 1, 2, 2]
    assert [_choose(logits, u, temperature=0.0) for u in (0.0, 0.99)] == [1, 1]
    assert [_choose(logits, u, temperature=1e-4) for u in (0.0, 0.99)] == [1, 1]
    assert [_choose([-math.inf, 0.0, -math.inf], u) for u in (0.0, 0.5, 1 - 2**-53)] == [1, 1, 1]
    assert [_choose([1e4, -1e4], u) for u in (0.0, 1 - 2**-53)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [1, 255, 256, 5000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_tokens_are_those_of_one_sum_over_the_vocabulary(vocabulary: int, spread: float) -> None:
    """As in exact arithmetic, but where a number falls on the border between two tokens."""
    draw = torch.Generator().manual_seed(vocabulary)
    logits = (spread * torch.randn((300, vocabulary), generator=draw)).bfloat16()
    uniform = torch.rand(300, generator=draw, dtype=torch.float64)
    temperature, top_p = torch.full_like(uniform, 0.7), torch.ones_like(uniform)
    ends = (logits.double() / 0.7).softmax(dim=-1).cumsum(dim=-1)
    exact = torch.searchsorted(ends, (uniform * ends[:, -1])[:, None], right=True)[:, 0]
    chosen = choose_tokens(Logits(logits), temperature, top_p, uniform)
    border = (ends.gather(1, torch.minimum(chosen, exact)[:, None])[:, 0] - uniform).abs()
    assert bool(((chosen == exact) | (border < 1e-6)).all())
    assert int((chosen != exact).sum()) <= 1
    alone = [
        int(choose_tokens(Logits(logits[i : i + 1]), *(c[i : i + 1] for c in (temperature, top_p, uniform))))
        for i in range(9)
    ]
    assert alone == chosen[:9].tolist()
    likeliest = choose_tokens(Logits(logits), 0 * temperature, top_p, uniform)
    assert torch.equal(likeliest, logits.float().argmax(dim=-1)), "the first of equal ones"
    plain = logits.double().log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
    torch.testing.assert_close(log_probabilities(Logits(logits), chosen), plain, rtol=0, atol=1e-6)


def test_the_rows_of_a_batch_that_have_filters_leave_the_others_as_they_are() -> None:
    draw = torch.Generator().manual_seed(5)
    logits = Logits(torch.randn((4, 700), generator=draw))
    uniform = torch.rand(4, generator=draw, dtype=torch.float64)
    temperature, ones = torch.tensor([0.0, 1.0, 1.0, 1.0]).double(), torch.ones(4).double()
    free_tokens = choose_tokens(logits, temperature, ones, uniform)
    tokens = choose_tokens(
        logits, temperature, torch.tensor([0.1, 1.0, 0.05, 1.0]).double(), uniform, torch.tensor([0, 0, 0, 1]),
        torch.zeros(4).double(),
    )  # fmt: skip
    assert tokens[:2].tolist() == free_tokens[:2].tolist()
    assert int(tokens[3]) == int(logits.likeliest()[3])
    assert int(tokens[2]) in logits.flat()[2].topk(100).indices


def test_no_temperature_is_too_low() -> None:
    assert [_choose([0.0, 2.0, 1.0], u, temperature=5e-324) for u in (0.0, 0.99)] == [1, 1]


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.6, 0.3)]
    grid = [i / 50 for i in range(50)]
    assert {_choose(logits, u, top_p=0.5) for u in grid} == {1}
    assert {_choose(logits, u, top_p=0.7) for u in grid} == {1, 2}
    assert {_choose(logits, u, top_p=0.95) for u in grid} == {0, 1, 2}


def test_rows_of_a_batch_keep_their_own_settings() -> None:
    logits = Logits(torch.tensor([[0.0, 1.0, 0.5]] * 3))
    columns = [torch.tensor(v, dtype=torch.float64) for v in ((0.0, 1.0, 1.0), (1.0, 1.0, 0.1), (0.0, 0.0, 0.0))]
    assert choose_tokens(logits, *columns).tolist() == [1, 0, 1]


_SETTINGS = [
    (temperature, top_p, top_k, min_p, penalty)
    for temperature in (0.6, 1.0)
    for top_p in (0.7, 1.0)
    for top_k in (0, 1, 20, 999)
    for min_p in (0.0, 0.1)
    for penalty in (0.9, 1.0, 1.1)
]


def _of_transformers(logits: Tensor, read: Tensor, settings: tuple[float, float, int, float, float]) -> Tensor:
    """Return the probabilities [1, vocabulary] by the processors of Transformers, in its order."""
    temperature, top_p, top_k, min_p, penalty = settings
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            TemperatureLogitsWarper(temperature),
            *([TopKLogitsWarper(top_k)] if top_k else []),
            *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
            MinPLogitsWarper(min_p),
        ]
    )
    probabilities: Tensor = chain(read, logits).softmax(dim=-1)
    return probabilities


def test_filters_are_those_of_transformers_row_by_row() -> None:
    draw = torch.Generator().manual_seed(3)
    rows, vocabulary = len(_SETTINGS), 64
    logits = 3 * torch.randn((rows, vocabulary), generator=draw, dtype=torch.float64)
    ids = torch.randint(vocabulary, (rows, 12), generator=draw)
    temperature, top_p, top_k, min_p, penalty = (torch.tensor(column) for column in zip(*_SETTINGS, strict=True))
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    scores = apply_penalty(logits, penalty.double(), mask)
    probabilities = filtered_probabilities(
        scores / temperature.double()[:, None], top_p.double(), top_k, min_p.double()
    )
    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    for row, settings in enumerate(_SETTINGS):
        expected = _of_transformers(logits[row : row + 1], ids[row : row + 1], settings)[0]
        assert torch.equal(probabilities[row] > 0, expected > 0), settings
        torch.testing.assert_close(probabilities[row], expected)
    assert len({int((row > 0).sum()) for row in probabilities}) > 5, "the settings differ in what they leave"


@pytest.mark.parametrize("spread", [0.01, 2.0, 8.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_stable_sort(spread: float) -> None:
    draw = torch.Generator().manual_seed(7)
    logits = (spread * torch.randn((6, 3000), generator=draw)).bfloat16().double()  # Many are equal.
    top_p = torch.tensor([0.1, 0.5, 0.9, 0.99, 1.0, 1e-9]).double()
    plain = logits.softmax(dim=-1)
    probabilities, order = plain.sort(dim=-1, descending=True, stable=True)
    fewest = (probabilities.cumsum(dim=-1) - probabilities < top_p[:, None]) | (top_p == 1)[:, None]
    expected = torch.zeros_like(plain).scatter(1, order, torch.where(fewest, probabilities, 0.0))
    assert torch.equal(filtered_probabilities(logits, top_p), expected)
    for row in range(6):
        part = slice(row, row + 1)
        assert torch.equal(filtered_probabilities(logits[part], top_p[part]), expected[part]), (
            "whatever the others have"
        )


def test_a_row_without_filters_is_as_if_there_were_none() -> None:
    logits = torch.randn((2, 500), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    top_p = torch.ones(2, dtype=torch.float64)
    beside = filtered_probabilities(
        logits, torch.tensor([1.0, 0.5]).double(), torch.tensor([0, 3]), torch.tensor([0.0, 0.3]).double()
    )
    assert torch.equal(beside[0], filtered_probabilities(logits, top_p)[0])
    assert torch.equal(apply_penalty(logits, torch.tensor([1.0, 2.0]), torch.ones_like(logits).bool())[0], logits[0])


def test_log_probabilities() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert log_probabilities(Logits(logits), torch.tensor([1])).exp().tolist() == pytest.approx([0.75])


# ---- stop strings


def test_cut_at_the_first_stop_string() -> None:
    assert cut_at_stop("a\nb;c", Sampling(stop=(";", "\n"))) == "a"
    assert cut_at_stop("abc", Sampling(stop=("x",))) == "abc"
    assert cut_at_stop("abc", Sampling()) == "abc"


def test_a_stop_string_is_kept_on_demand() -> None:
    assert cut_at_stop("a\nb;c", Sampling(stop=(";", "\n"), include_stop=True)) == "a\n"
    assert cut_at_stop("see <b></b> x", Sampling(stop=("</a>", "</b>"), include_stop=True)) == "see <b></b>"
    assert cut_at_stop("abc", Sampling(stop=("x",), include_stop=True)) == "abc"
    assert cut_at_stop("a</t", Sampling(stop=("</t>", "</t"), include_stop=True)) == "a</t"


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        ("Thought: x\nAction: get 1 a\nObservation: Got 1 a\nAction: get 2 b", "Thought: x\nAction: get 1 a"),
        ("Action: get 1 a\nThought: y\nAction: get 2 b\n", "Action: get 1 a"),
        ("**Action 1:**\n\nget 1 a\n\nmore", "**Action 1:**\n\nget 1 a"),
        ("Action:\n```sh\nget 1 a\n```\nmore", "Action:\n```sh\nget 1 a"),
        ("Next action: get 1 a\nmore", "Next action: get 1 a"),
        ("I take it. Action: get 1 a\nmore", "I take it. Action: get 1 a"),
        ("I give an Action: soon\nAction: get 1 a\nmore", "I give an Action: soon\nAction: get 1 a"),
        ("<think>\nAction: b\n</think>\nAction: a\nmore", "<think>\nAction: b\n</think>\nAction: a"),
        ("Action: get 1 a", "Action: get 1 a"),
        ("Action:\n\n", "Action:\n\n"),
        ("get 1 a\nget 2 b\n", "get 1 a\nget 2 b\n"),
        ("an action\nand more\n", "an action\nand more\n"),
    ],
)
def test_a_reply_ends_with_the_line_of_its_first_action(reply: str, kept: str) -> None:
    sampling = Sampling(until=FIRST_LINE)
    assert cut_at_stop(reply, sampling) == kept
    watch = StopDetector(lambda ids: "".join(map(chr, ids)))
    flags = [watch.is_completed([ord(char) for char in reply[: end + 1]], (), FIRST_LINE) for end in range(len(reply))]
    assert flags.index(True) == len(kept) if kept != reply else not any(flags)


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        ('Action: find {\n "a": 1\n}\nObservation: x', 'Action: find {\n "a": 1\n}'),
        ("Action: find\nThought: 2\nAction: end", "Action: find"),
        ('Action: find {\n "a": 1\n}', 'Action: find {\n "a": 1\n}'),
    ],
)
def test_an_action_of_several_lines_ends_where_something_else_is_labelled(reply: str, kept: str) -> None:
    assert cut_at_stop(reply, Sampling(until=FIRST_BLOCK)) == kept


def test_no_action_ends_a_reply_within_the_thought_that_its_prompt_opened() -> None:
    draft, sampling = "I could\nAction: get 1 a\nor rather", Sampling(until=FIRST_LINE)
    assert cut_at_stop(draft, sampling, in_thought=True) == draft
    reply = f"{draft}\n</think>\nAction: get 2 b"
    assert cut_at_stop(f"{reply}\nmore", sampling, in_thought=True) == reply
    assert stable_text(f"{draft} get", sampling, in_thought=True) == f"{draft} get"


def test_a_reply_cut_within_the_thought_that_its_prompt_opened_is_whole(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    template = copy / "chat_template.jinja"
    begin = "<|im_start|>assistant\n"
    template.write_text(template.read_text().replace(begin, f"{begin}<think>\n"))
    tokenizer = load_tokenizer(copy)
    renderer = Renderer(tokenizer)
    prompt = renderer.render_prompt((Message(role="user", text="goal"),))
    draft = "I could\nAction: get 1 a\nor rather"
    ids = tokenizer(draft, add_special_tokens=False)["input_ids"]
    sampling = Sampling(until=FIRST_LINE)
    reply = make_generation(renderer, (), prompt, ids, sampling, ended_by_model=False, logprobs=None)
    assert (reply.text, reply.finish_reason, reply.token_ids) == (draft, "length", tuple(ids))
    assert reply.thinks
    assert reply.unfinished_thought
    after_thought = tokenizer(f"{draft}\n</think>\nAction: get", add_special_tokens=False)["input_ids"]
    for ids_of_reply, has_ended in ((after_thought, False), (ids, True)):
        other = make_generation(renderer, (), prompt, ids_of_reply, sampling, ended_by_model=has_ended, logprobs=None)
        assert (other.thinks, other.unfinished_thought) == (True, False)


def test_no_token_stays_that_only_tells_how_a_reply_would_have_gone_on() -> None:
    pieces = ["Action:", " get", " a", "\n", "Obs", "erv"]

    def text_of(ids: Sequence[int]) -> str:
        return "".join(pieces[token_id] for token_id in ids)

    assert ids_covering(range(6), "Action: get a", text_of) == (0, 1, 2)
    assert ids_covering(range(6), "Action: ge", text_of) == (0, 1), "a token that begins within the text"
    assert ids_covering(range(6), "", text_of) == ()


@given(st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=3), min_size=1, max_size=2))
def test_stop_is_seen_at_the_first_token_that_completes_it(text: str, stops: list[str]) -> None:
    watch = StopDetector(lambda ids: "".join(map(chr, ids)))
    tokens: list[int] = []
    for character in text:
        tokens.append(ord(character))
        present = any(stop in text[: len(tokens)] for stop in stops)
        assert watch.is_completed(tokens, stops) == present
        if present:
            break


def test_stop_of_several_bytes() -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    tokens = list("x東".encode())
    watch = StopDetector(decode)
    assert [watch.is_completed(tokens[: i + 1], ("東",)) for i in range(4)] == [False, False, False, True]


# ---- keys and values


def test_block_names_follow_all_tokens_before() -> None:
    names = block_hashes(range(10), 4)
    assert len(names) == 2
    assert block_hashes(range(8), 4) == names
    assert block_hashes([9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != names[1]
    assert block_hashes(range(3), 4) == []


def test_prefix_cache_forgets_what_was_used_longest_ago() -> None:
    cache = PrefixCache(max_bytes=2 * 8)
    for name in (b"a", b"b", b"c"):
        cache.put(name, (torch.zeros(1), torch.zeros(1), torch.zeros(0), torch.zeros(0)))
    assert cache.get(b"a") is not None
    cache.trim()
    assert [name for name in (b"a", b"b", b"c") if cache.get(name) is not None] == [b"a", b"c"]


def test_a_block_that_is_computed_again_counts_once() -> None:
    """The beginning of a prompt is forgotten first, so what follows it may still be there."""
    cache = PrefixCache(max_bytes=2 * 8)
    for name in (b"a", b"b", b"b", b"b"):
        cache.put(name, (torch.zeros(1), torch.zeros(1), torch.zeros(0), torch.zeros(0)))
    cache.trim()
    assert len(cache) == 2


def _buffer(rows: int, columns: int) -> KVBuffer:
    buffer = KVBuffer(KVShape(1, 1, 1, 2, torch.float32, torch.device("cpu")))
    buffer.reset(rows, columns)
    return buffer


def _write(buffer: KVBuffer, numbers: list[float], column: int) -> list[list[float]]:
    buffer.set_range(column, column + 1)
    return _update(buffer, numbers)


def _scatter(buffer: KVBuffer, numbers: list[float], columns: list[int], rows: list[int]) -> list[list[float]]:
    buffer.set_columns(rows, torch.tensor(columns)[:, None], 2)
    return _update(buffer, numbers)


def _update(buffer: KVBuffer, numbers: list[float]) -> list[list[float]]:
    keys = torch.tensor(numbers, dtype=torch.float32)[:, None, None, None]
    all_keys, values = buffer.update(0, keys, keys.expand(-1, -1, -1, 2))
    assert torch.equal(values[..., :1], all_keys)
    return [row[0] for row in all_keys.squeeze(-1).tolist()]


def _keys(buffer: KVBuffer, row: int) -> list[float]:
    keys: list[float] = buffer.read(row, slice(None))[0].flatten().tolist()
    return keys


def test_buffer_writes_reads_and_keeps_rows() -> None:
    buffer = _buffer(4, 2)
    assert _write(buffer, [1, 2, 3, 4], 0) == [[1], [2], [3], [4]]
    assert _scatter(buffer, [10, 30], [1, 0], [0, 2]) == [[1, 10], [30, 0]], "scattered rows"
    assert _scatter(buffer, [40, 20], [1, 0], [3, 2]) == [[4, 40], [20, 0]], "in another order"
    assert _scatter(buffer, [3, 41], [0, 1], [2, 3]) == [[3, 0], [4, 41]], "neighbouring rows"
    buffer.set_columns([1, 3], torch.tensor([[1], [1]]), torch.tensor([[-1, 1], [0, 1]]))
    assert _update(buffer, [5, 40]) == [[2, 5], [4, 40]], "each row sees columns of its own"
    places = buffer.shrink([1, 3], 2, 2)
    assert places == [1, 0]
    assert [_keys(buffer, row) for row in (0, 1)] == [[4, 40], [2, 5]]
    buffer.grow(3)
    assert _write(buffer, [5, 6], 2) == [[4, 40, 5], [2, 5, 6]]
    copy = _buffer(1, 3)
    copy.write(0, 1, *buffer.read(1, slice(1, 3)))
    assert _keys(copy, 0) == [0, 5, 6]
    copy.write(0, 0, *buffer.read(0, torch.tensor([2, 0])))
    assert _keys(copy, 0) == [5, 4, 6]


def test_a_buffer_that_grows_takes_the_memory_of_one_layer_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    allocate = torch.zeros

    def zeros(*size: int, **options: Any) -> torch.Tensor:
        memory = allocate(*size, **options)
        tensors.add(memory)
        return memory

    monkeypatch.setattr(torch, "zeros", zeros)
    layers, rows = 12, 4
    buffer = KVBuffer(KVShape(layers, 2, 8, 8, torch.float32, torch.device("cpu")))
    buffer.reset(rows, 16)
    for columns in (48, 32, 64):
        buffer.reset(rows, columns)
        buffer.grow(columns + 32)
    of_layer = rows * 2 * 8 * (64 + 32) * 2
    assert sum(memory.numel() for memory in tensors) <= (layers + 1) * of_layer
