"""Whether the samples that share a row are kept apart by the model that is trained.

Transformers makes a block-diagonal mask of position ids that restart, but only if a model's code
passes them on to the function that makes its masks. Where it does not, as with gpt-oss, OPT and
Falcon, a sample sees those before it, and nothing fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import masking_utils

from agentr_core.models.files import adapter_base
from agentr_core.recipes.training import TrainingConfig
from agentr_core.training.adapters import skeleton
from agentr_core.training.packing import packing_faults
from agentr_core.training.parent import text_config


class _Asked(Exception):
    """Ends a forward pass as soon as its mask is made of positions."""


def mixing_faults(model_dir: Path, config: TrainingConfig) -> list[str]:
    """Return why samples of the model in a directory cannot share rows, one sentence each. Raises
    `ModelDirectoryError` when the directory does not give the shape of a model.
    """
    if faults := packing_faults(text_config(model_dir), config):
        return faults
    # FlashAttention needs no mask: it is given the positions themselves.
    if not config.packing or config.attn_implementation.startswith("flash_attention"):
        return []
    model = skeleton(adapter_base(model_dir) or model_dir)
    if separates_samples(model):
        return []
    return [
        f"training.packing: the attention of a model of type {model.config.model_type} is not told where the samples "
        "of a row begin, so that each would see those before it; set it to false, which gives each sample a row of "
        "its own"
    ]


def separates_samples(model: Any) -> bool:
    """Return whether a model, whose weights may take no memory, makes its masks of the positions of
    its tokens.
    """
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    replaced = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _ask
    try:
        with torch.no_grad():
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except _Asked:
        return True
    # Masks are made before the first layer; what layers do without weights is anyone's guess.
    except Exception:
        return False
    finally:
        masking_utils.find_packed_sequence_indices = replaced
    return False


def _ask(*_: Any) -> NoReturn:
    raise _Asked
