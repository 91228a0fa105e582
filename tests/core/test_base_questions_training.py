"""A base model for questions is made from nothing, and the world can be played with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentr_core.base_model.job import BaseJob, BaseStep
from agentr_core.base_model.make import make
from agentr_core.base_model.pretrain import make_tokenizer
from agentr_core.environments.reasoning.prompt import instruction
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.questions_base import QuestionsConfig
from agentr_core.recipes.training import BaseConfig
from agentr_core.samples.rendering import load_renderer
from agentr_core.types import Message, Request, Sampling

TINY = BaseConfig(
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    intermediate_size=64,
    tokens=20 * 1024,
    batch_tokens=1024,
    warmup_steps=2,
    bf16=False,
    num_threads=1,
    questions=QuestionsConfig(guess_share=0.3, repeat_share=0.3, questions=8, tokenizer_samples=60, vocabulary=500),
)


def test_a_name_has_the_same_tokens_wherever_it_stands() -> None:
    tokenizer = make_tokenizer(TINY, 0)

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([number]) for number in tokenizer(text, add_special_tokens=False)["input_ids"]]

    for name in ("Skalck Ragen", "Flialaeck Wiath", "Dohaven"):
        own = pieces(name)
        for around in ("<search>{}</search>", "I look up {}.", "{} was taught by {}.", "It is \\boxed{{{}}}."):
            told = pieces(around.format(*[name] * around.count("{}")))
            assert "\0".join(own) in "\0".join(told), told
    assert pieces("12 ** 34") == ["1", "2", *pieces(" ** "), "3", "4"]
    tools = instruction(("search", "python"))
    assert pieces(tools) == [tools]
    for text in ("Naïve café, 東京\n\n<think>x </think>", "print(sum(map(int, str(16 ** 30))))", "a < b </b> <résult>"):
        assert "".join(pieces(text)) == text or not text.isascii()
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[BaseStep]]:
    """The directory of a base that was made without interruption, and what its training told."""
    told: list[BaseStep] = []
    return asyncio.run(make(_job(tmp_path_factory.mktemp("made")), on_progress=told.append)), told


@pytest.mark.slow
def test_one_command_makes_a_model_that_the_program_can_sample_from(made: tuple[Path, list[BaseStep]]) -> None:
    folder, told = made
    assert [(step.step, step.total_steps) for step in told] == [(20, 20)]
    assert 0 < told[0].loss < 10
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (501, 32)
    assert '"guess_share": 0.3' in (folder / "recipe.json").read_text(encoding="utf-8")
    model = TransformersModel.load(folder, dtype="float32", device="cpu")
    messages = (
        Message(role="system", text=instruction(("search", "python"))),
        Message(role="user", text="How many positive divisors does 12 have?"),
    )
    assert len(load_renderer(folder).render_prompt(messages)) < 40
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    ((reply,),) = asyncio.run(model.generate([Request(messages=messages, sampling=sampling, seed=0)]))
    assert 1 <= len(reply.token_ids) <= 8


@pytest.mark.long
@pytest.mark.slow
async def test_a_cancelled_training_keeps_a_checkpoint_and_goes_on_to_the_same_weights(
    made: tuple[Path, list[BaseStep]], tmp_path: Path
) -> None:
    job = _job(tmp_path)
    training = asyncio.ensure_future(make(job, on_progress=lambda _: None))
    while not job.work.lock_file.exists() or not job.work.lock_file.read_text(encoding="utf-8"):
        await asyncio.sleep(0.05)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert any(job.work.checkpoints.glob("checkpoint-*"))
    assert not job.output.exists()

    assert await make(job, on_progress=lambda _: None) == job.output
    assert (job.output / "model.safetensors").read_bytes() == (made[0] / "model.safetensors").read_bytes()
    assert await make(job, on_progress=lambda _: pytest.fail("made already")) == job.output


def _job(folder: Path) -> BaseJob:
    return BaseJob(config=replace(TINY, output=str(folder / "made")), seed=0, folder=folder / "work")
