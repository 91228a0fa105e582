"""A stop string that no reply can contain is told before the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentr_core.models.local.transformers import TransformersModel
from agentr_core.types import Message, Request, Sampling
from flows.preflight.checks import faults_of
from tasks.wiring import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("search.stop=['<|user|>']", "search.stop: the stop string '<|user|>' has '<|user|>', a control"),
        ("critique.stop=['!<|user|>']", "critique.stop: the stop string '!<|user|>' has '<|user|>'"),
        ("search.stop=['<|end|>', Observation]", ""),
    ],
)
def test_a_stop_string_with_a_control_token_is_refused(tmp_path: Path, change: str, said: str) -> None:
    recipe = load_recipe(ROOT / "deployments" / "recipes" / "textcraft-tiny.yaml", [change, f"workspace={tmp_path}"])
    errors = [str(fault) for fault in faults_of(recipe, asks=False).errors]
    assert len(errors) == bool(said)
    assert all(fault.startswith(said) for fault in errors)


@pytest.mark.slow
async def test_it_would_not_have_ended_a_reply(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = TransformersModel.load(tiny_model_dir, device="cpu")
    try:
        messages = (Message(role="user", text="Say anything."),)
        sampling = Sampling(max_new_tokens=300, stop=("<|im_start|>",))
        replies = await model.generate([Request(messages=messages, sampling=sampling, seed=0, n=16)])
    finally:
        await model.close()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert any(start in reply.token_ids[:-1] for reply in replies[0])
