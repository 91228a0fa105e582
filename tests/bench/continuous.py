"""Continuous batching of Transformers (`generate_batch`), to measure ours against."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

_PAGE = 256
_TOKENS_A_PASS = 2048
"""As many tokens as one forward pass takes on a CPU: prompts that wait are computed beside replies
that grow.
"""


def generate_batch(model: Any, rows: Sequence[Sequence[int]], *, new_tokens: int) -> int:
    """Sample a reply of `new_tokens` tokens to each prompt, and return how many tokens these are.

    The pages of keys and values are kept from call to call, which is what a server would do;
    `forget` frees them. On a CPU there are as many as the first call needs, for it would take most
    of the machine's memory by itself.
    """
    sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0)
    sizes = {}
    if model.device.type == "cpu":
        pages = sum(-(-(len(row) + new_tokens) // _PAGE) for row in rows)
        sizes = {"page_size": _PAGE, "num_blocks": pages + len(rows), "max_batch_tokens": _TOKENS_A_PASS}
    # It warns in each call that the pages are kept.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    replies = model.generate_batch(
        [list(row) for row in rows],
        generation_config=sampling,
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        persistent_manager=True,
    )
    num_tokens = sum(len(reply.generated_tokens) for reply in replies.values())
    if num_tokens != new_tokens * len(rows):
        reason = next((reply.error for reply in replies.values() if reply.error), "it does not say why")
        raise RuntimeError(f"continuous batching made {num_tokens} tokens of {new_tokens * len(rows)}: {reason}")
    return num_tokens


def forget(model: Any) -> None:
    """Free what `generate_batch` kept."""
    model.destroy_cached_continuous_batching_manager()
