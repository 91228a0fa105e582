"""On-policy distillation: a frozen model scores the policy's own tokens, and the scores change the
tokens' advantages.

Source: arXiv 2609.37522. The advantage of a token is `log q(token) - log p(token)`, where q is the
scorer, which may read more than the policy p did when it sampled the token.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from agentr_core.errors import ModelDirectoryError
from agentr_core.models.checkpoint_dir import adapter_base, context_length_of
from agentr_core.models.local.loading import torch_device
from agentr_core.recipes.grpo import DistilConfig
from agentr_core.samples.rendering import load_tokenizer
from agentr_core.system import raise_if_cancelled
from agentr_core.training.attention import use_training_attention
from agentr_core.training.group.policy import (
    PolicyRow,
    chosen_logprobs,
    compute_vocabulary_logprobs,
    number_tokens,
    sampled_token_numbers,
)
from agentr_core.training.packing import ROW_LENGTH, forward_passes, padded_length
from agentr_core.training.parent import load_merged


# Not a sampler's model: those batch requests as they come, so the last bits of a score, which
# trains, would depend on timing. So it also needs no server where the actor has one.
class Scorer:
    """A frozen model that gives the log-probabilities of given tokens. Not thread-safe; `close` it.

    Batches depend on the rows alone, so the same rows have the same scores to the last bit on the
    same machine.

    Args:
        batch_tokens: the most tokens of a forward pass, which has at least one row.
        context_length: the most tokens of a row; 0: as the model's configuration says.

    Raises `ModelDirectoryError` if the model cannot be loaded, `ConfigError` for an unknown device
    and for a context that is longer than the model's.
    """

    def __init__(self, path: Path, *, dtype: str, device: str, batch_tokens: int, context_length: int = 0) -> None:
        self._device = torch_device(device, field="models.scorer.device")
        base_dir, torch_dtype = adapter_base(path), getattr(torch, dtype)
        try:
            if base_dir is None:
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype)
            else:
                model = load_merged(base_dir, path, torch_dtype)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelDirectoryError(f"scorer {path} cannot be loaded: {str(error).splitlines()[0]}") from error
        if self._device.type == "cpu":
            use_training_attention(model)
        self._model: Any = model.eval().requires_grad_(False).to(self._device)
        self._vocabulary_size = max(load_tokenizer(path).get_vocab().values()) + 1
        self._batch_tokens = batch_tokens
        self.context_length = context_length_of(path, context_length)

    @torch.no_grad()
    def scores(self, rows: Sequence[PolicyRow]) -> list[tuple[float, ...]]:
        """Return for each row the natural log-probabilities of its sampled tokens, each given the
        tokens before it, over the tokens that the tokenizer has. Raises what `raise_if_cancelled`
        raises.
        """
        sampled_logprobs = torch.zeros(sum(len(row.positions) for row in rows))
        longest = padded_length(max((len(row.input_ids) for row in rows), default=1))
        rows_per_pass = max(1, self._batch_tokens // max(ROW_LENGTH, longest))
        for batch in forward_passes(number_tokens(rows), packing=False, rows_per_pass=rows_per_pass):
            raise_if_cancelled()
            token_numbers, mask = sampled_token_numbers(batch)
            vocabulary_logprobs = compute_vocabulary_logprobs(
                self._model, batch, mask, vocabulary_size=self._vocabulary_size, device=self._device
            )
            sampled_logprobs[token_numbers] = chosen_logprobs(vocabulary_logprobs, batch, mask).cpu()
        remaining_logprobs = iter(sampled_logprobs.tolist())
        return [tuple(next(remaining_logprobs) for _ in row.positions) for row in rows]

    def close(self) -> None:
        """Free the GPU's memory. The scorer must not be used afterwards."""
        with suppress(AttributeError):
            del self._model
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def scorer_term(score: float, logprob: float, distil: DistilConfig) -> float:
    """Return the scorer's term in the advantage of a token, before its weight: `score - logprob` in
    nats, limited to `max_difference` in both directions; 0 for a token without a score (NaN).
    """
    if math.isnan(score):
        return 0.0
    limit = math.inf if distil.max_difference is None else distil.max_difference
    return min(limit, max(-limit, score - logprob))


def add_scorer_terms(rows: Sequence[PolicyRow], distil: DistilConfig) -> list[PolicyRow]:
    """Return rows with the scorer's weighted term added to the advantage of each token."""
    return [
        row._replace(
            advantages=tuple(
                advantage + distil.weight * scorer_term(score, logprob, distil)
                for advantage, score, logprob in zip(row.advantages, row.scores, row.logprobs, strict=True)
            )
        )
        for row in rows
    ]


def divergence_from_scorer(rows: Sequence[PolicyRow]) -> float | None:
    """Return the mean over all scored tokens of their log-probability under the policy minus the
    scorer's, in nats: an estimate of the KL divergence of the policy from the scorer. None if no
    token has a score.
    """
    differences = [
        logprob - score
        for row in rows
        if row.scores
        for score, logprob in zip(row.scores, row.logprobs, strict=True)
        if not math.isnan(score)
    ]
    return sum(differences) / len(differences) if differences else None
