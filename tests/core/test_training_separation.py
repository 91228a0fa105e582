"""Samples share rows only in models that keep them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_jobs import make_job
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, OPTConfig, Qwen3Config

from agentr_core.errors import TrainingFault
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.parent import mixing_faults, separates_samples
from agentr_core.training.run import run

SMALL = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GATED = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
KINDS = [
    (LlamaConfig(**GATED), True),
    (Qwen3Config(**GATED), True),
    (Gemma2Config(**GATED, sliding_window=16), True),
    (GptOssConfig(**GATED, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_theta": 1e4}), False),
    (OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32), False),
]


@pytest.mark.parametrize(("config", "apart"), KINDS, ids=[config.model_type for config, _ in KINDS])
def test_a_model_that_lets_a_sample_see_another_is_recognised_without_weights(config: Any, apart: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    first, second = torch.randint(3, 199, (1, 9)), torch.randint(3, 199, (1, 7))
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    with torch.no_grad():
        logits, other_logits = [
            model(input_ids=torch.cat([ids, second], dim=1), position_ids=positions, use_cache=False).logits[:, 9:]
            for ids in (first, first.flip(1))
        ]
    assert torch.allclose(logits, other_logits, atol=1e-6) == apart
    with torch.device("meta"):
        assert separates_samples(AutoModelForCausalLM.from_config(config)) == apart


def test_such_a_model_gets_a_row_for_each_sample(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert mixing_faults(tiny_model_dir, TrainingConfig()) == []
    KINDS[3][0].save_pretrained(tmp_path)
    (fault,) = mixing_faults(tmp_path, TrainingConfig())
    assert fault.startswith("training.packing: the attention of a model of type gpt_oss is not told where the samples")
    flash = TrainingConfig(attn_implementation="flash_attention_2", bf16=True)
    assert mixing_faults(tmp_path, TrainingConfig(packing=False)) == mixing_faults(tmp_path, flash) == []
    with pytest.raises(TrainingFault, match=r"^training.packing: the attention of a model of type gpt_oss"):
        run(make_job(tmp_path, tmp_path), lambda step: None)
