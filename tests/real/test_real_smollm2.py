"""SmolLM2-135M-Instruct itself: decoding, masks, a step of fine-tuning, a tree, and what is
published of it. `make test-real` runs this, in about five minutes; `make test` skips it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from real_model import smollm2

from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.methods.faults import parse
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.stages.dataset import dataset_file
from agentr_core.types import Message, Request, Sampling
from flows.commands.publishing import publish_checkpoint
from tasks import wiring

pytestmark = pytest.mark.slow
QUESTIONS = ("What is the capital of France?", "Write one line about the sea.", "Count from 1 to 12.")
TOKENS = 24
PLAYED = {"max_steps": 1, "max_new_tokens": 8, "revision_test": {"enabled": False}}


@pytest.fixture(scope="module")
def real() -> Path:
    """The model directory."""
    if not os.environ.get("AGENTR_TEST_REAL"):
        pytest.skip("real weights are tested by `make test-real`, which fetches 93 MB")
    return smollm2()


@pytest.fixture(scope="module")
def tokenizer(real: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real)


def by_generate(folder: Path, tokenizer: Any, conversations: list[list[dict[str, str]]]) -> list[list[int]]:
    """Return what Transformers' `generate` says greedily to each conversation, by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model, replies = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for turns in conversations:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            reply = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
        replies.append(reply[0, ids["input_ids"].shape[1] :].tolist())
    return replies


async def by_ours(folder: Path, conversations: list[list[dict[str, str]]]) -> list[list[int]]:
    """Return what the backend `transformers` says, to all in one batch."""
    model = TransformersModel.load(folder, device="cpu")
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    requests = [
        Request(
            messages=tuple(Message(role=turn["role"], text=turn["content"]) for turn in turns),  # type: ignore[arg-type]
            sampling=sampling,
            seed=0,
        )
        for turns in conversations
    ]
    try:
        return [list(reply.token_ids) for (reply,) in await model.generate(requests)]
    finally:
        await model.close()


def conversations() -> list[list[dict[str, str]]]:
    """Return short ones, and a goal of TextCraft with its instruction."""
    env = TextCraft()
    goal = env.reset(env.instances("train")[0])
    craft = [("user", env.instruction), ("assistant", "Ok."), ("user", goal)]
    questions = [[("user", text)] for text in QUESTIONS]
    return [[{"role": role, "content": text} for role, text in turns] for turns in (*questions, craft)]


async def begun(folder: Path, model: Path, **more: Any) -> RunContext:
    data = {
        "name": "real",
        "workspace": str(folder / "runs"),
        "iterations": 1,
        "environment": {"name": "textcraft"},
        "model": {"path": str(model), "device": "cpu", "dtype": "float32", "workers": 1},
        "instances": {"train_limit": 4, "test_limit": 1},
        "evaluation": PLAYED,
    }
    recipe = parse(data | more)
    ctx = wiring.quiet_context(wiring.run_reference(recipe), recipe)
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    return ctx


async def test_greedy_replies_are_those_of_generate(real: Path, tokenizer: Any) -> None:
    replies, expected = await by_ours(real, conversations()), by_generate(real, tokenizer, conversations())
    assert replies == expected
    assert "Paris" in tokenizer.decode(replies[0])
    assert replies[0][-1] == tokenizer.eos_token_id == tokenizer.pad_token_id, "it ends its turn"


async def test_a_step_of_cloning_is_that_of_transformers_and_its_model_loads_there(
    real: Path, tokenizer: Any, tmp_path: Path
) -> None:
    ctx = await begun(
        tmp_path,
        real,
        method="eto",
        eto={"phases": ["sft"]},
        data={"max_length": 2048},
        # One step on all rows.
        training={"learning_rate": 1e-4, "num_train_epochs": [1], "warmup_ratio": 0, "bf16": False, "num_threads": 1,
                  "per_device_train_batch_size": 8},
    )  # fmt: skip
    for name in ("demonstrate", "dataset", "train"):
        await ctx.plan(1).stage(name).work(ctx, 1)
    rows = pq.read_table(dataset_file(ctx, 1)).to_pylist()
    check_masks(tokenizer, rows)
    ((loss, trained),) = ctx.store.rows("select loss, trained_tokens from training_step")
    expected, count = loss_by_hand(real, rows)
    assert trained == count
    assert loss == pytest.approx(expected, rel=1e-3)

    folder = tmp_path / "given"
    publish_checkpoint(
        ctx.root, ctx.trained_checkpoint(1).id, folder, base_model="somebody/smollm2", licence="apache-2.0"
    )
    assert loss_by_hand(folder, rows)[0] < 0.9 * expected, "it learnt something, and that is what was published"
    from transformers import AutoTokenizer

    assert await by_ours(folder, conversations()) == by_generate(
        folder, AutoTokenizer.from_pretrained(folder), conversations()
    )


def check_masks(tokenizer: Any, rows: list[dict[str, list[int]]]) -> None:
    """Fail unless each row is a demonstration as the published template renders it, and its labels
    are the expert's replies, each with its end of turn.
    """
    env = TextCraft()
    demonstrations = {}
    for instance in env.instances("train"):
        turns = [("user", env.instruction), ("assistant", "Ok."), ("user", env.reset(instance))]
        replies = list(env.expert(instance) or ())
        for reply in replies:
            turns += [("assistant", reply), ("user", env.step(env.parse(reply)).observation)]
        messages = [{"role": role, "content": text} for role, text in turns[:-1]]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        demonstrations[tuple(tokenizer(text, add_special_tokens=False)["input_ids"])] = replies
    assert len(rows) == 4
    for row in rows:
        replies = demonstrations[tuple(row["input_ids"])]
        trained = tokenizer.decode([label for label in row["labels"] if label != IGNORE_INDEX])
        assert trained == "".join(f"{reply}<|im_end|>" for reply in replies)


def loss_by_hand(folder: Path, rows: list[dict[str, list[int]]]) -> tuple[float, int]:
    """Return the mean loss over the trained tokens, row by row, and their number."""
    import torch
    from transformers import AutoModelForCausalLM

    model, total, count = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0, 0
    with torch.inference_mode():
        for row in rows:
            labels = torch.tensor(row["labels"][1:])
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            total += float(
                torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
            )
            count += int((labels != IGNORE_INDEX).sum())
    return total / count, count


async def test_a_tree_grows(real: Path, tokenizer: Any, tmp_path: Path) -> None:
    ctx = await begun(
        tmp_path,
        real,
        method="agent-r",
        instances={"train_limit": 1, "test_limit": 1},
        search={"dives": 2, "width": 2, "depth": 3, "max_new_tokens": 24},
    )
    await ctx.plan(1).stage("collect").work(ctx, 1)
    assert ctx.store.rows("select count(*) from tree where finished") == [(1,)]
    replies = ctx.store.rows("select token_ids, finish_reason, reply as text from generation where kind = 'node'")
    assert len(replies) >= 6
    for ids, finish, text in replies:
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert (ids[-1] == tokenizer.eos_token_id) == (finish == "stop")
        assert len(ids) <= 24
