"""Models whose layers or positions the in-process sampler cannot decode."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

from agentr_core.errors import ModelDirectoryError
from agentr_core.models.local.loading import attention_of
from agentr_core.models.local.transformers import TransformersModel

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=2, layer_types=["full_attention"] * 2, **more)


@pytest.mark.parametrize(
    ("more", "context"),
    [
        ({"rope_parameters": LONG}, 8192),
        ({"rope_scaling": LONG}, 8192),
        ({"rope_parameters": {"full_attention": LONG}}, 8192),
        ({"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 2048}, 4096),
    ],
)
def test_positions_that_depend_on_the_batch_are_refused(more: dict[str, Any], context: int) -> None:
    with pytest.raises(ModelDirectoryError, match=r"of a batch beyond \d+ tokens; set model.context_length to \d+ or"):
        attention_of(Path("m"), config(**more), context)
    attention_of(Path("m"), config(**more), context // 2)


def test_other_positions_and_none_are_taken() -> None:
    for more in ({"rope_parameters": {"rope_type": "yarn"}}, {"rope_parameters": None}, {}):
        attention_of(Path("m"), config(**more), 1 << 20)


def test_layers_that_are_no_attention_are_refused() -> None:
    with pytest.raises(ModelDirectoryError, match="layers of kind linear_attention, which this backend cannot decode"):
        attention_of(Path("m"), SimpleNamespace(layer_types=["linear_attention"], num_hidden_layers=1), 64)


def test_a_model_that_reads_masks_in_its_own_way_is_refused_in_a_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    settings = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=1, n_head=2)
    BloomForCausalLM(settings).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelDirectoryError, match=r"does not run in this backend \(ValueError: .*serve it with vLLM$"):
        TransformersModel.load(tmp_path, device="cpu", context_length=64)
