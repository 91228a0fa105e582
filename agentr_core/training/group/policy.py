"""The gradient of the loss on episodes, accumulated in the model over forward passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from agentr_core.errors import ConfigError, DataFault
from agentr_core.recipes.grpo import GrpoConfig, LossType
from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.samples.rendering import Renderer
from agentr_core.training.group.split import Strategy
from agentr_core.training.packing import (
    LENGTH_STEP,
    ROW_LENGTH,
    TokenRow,
    forward_passes,
    idle_pass,
    max_rows_per_pass,
    padded_length,
)
from agentr_core.training.parent import (
    add_adapters,
    gathered_tensor,
    load_parent,
    non_lora_faults,
    tied_faults,
    uses_gradient_checkpointing,
    whole_weights,
)
from agentr_core.types import Message, Span, Step

# Episodes as token rows: the loss applies to the tokens that the sampler returned, and to no
# others.
#
# A reply that was cut by its token limit is followed by an end-of-turn token that was not sampled,
# and a server may not return that token: neither has a log-probability, so neither is trained.


class PolicyRow(NamedTuple):
    """One episode, or a part of one that is a conversation of its own.

    `positions` are the indices of the sampled tokens in `input_ids`; for each of these, `logprobs`
    has the natural log-probability with which it was sampled, `advantages` its advantage, and
    `scores` a scorer's log-probability: NaN where it gave none; empty without a scorer.
    `episode_tokens` is the number of sampled tokens of the whole episode.
    """

    input_ids: tuple[int, ...]
    positions: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    episode_tokens: int
    scores: tuple[float, ...] = ()


def policy_row(
    messages: Sequence[Message],
    steps: Sequence[Step],
    renderer: Renderer,
    advantages: Sequence[float],
    *,
    num_given: int = 0,
    scores: Sequence[Sequence[float]] | None = None,
) -> PolicyRow:
    """Return the row of a whole episode.

    Args:
        messages: its conversation, in which the replies of `steps` carry loss, in order. An empty
            reply in the middle of a growing turn carries none, and is not trained.
        advantages: the advantages of the steps.
        num_given: the number of first steps that the episode continued from; they are not trained,
            and need no log-probabilities.
        scores: the scorer's log-probabilities of the tokens of each step, or at least of the first
            of them, those that are trained; an empty sequence where it gave none. None: there is no
            scorer.

    Raises `DataFault` if replies lack the log-probabilities of their tokens, or if the rendered
    conversation does not contain the sampled tokens.
    """
    sample = renderer.render_sample(messages)
    # In a growing turn, replies and observations alternate.
    replies: list[tuple[Span, bool]] = []
    for message in messages:
        if message.spans:
            last_index = len(message.spans) - 1
            replies += [(span, index == last_index) for index, span in enumerate(message.spans) if index % 2 == 0]
        elif message.train:
            replies.append((message.parts[0], True))
    if len(replies) != len(steps):
        raise DataFault(f"an episode of {len(steps)} replies has a conversation of {len(replies)}")
    trained_positions = [position for position, label in enumerate(sample.labels) if label != IGNORE_INDEX]
    positions: list[int] = []
    logprobs: list[float] = []
    token_advantages: list[float] = []
    token_scores: list[float] = []
    for step_index, ((span, ends_turn), step, advantage) in enumerate(zip(replies, steps, advantages, strict=True)):
        if not span.train:
            continue
        has_logprobs = step.logprobs is not None and len(step.logprobs) == len(step.token_ids)
        if step_index >= num_given and not has_logprobs:
            raise DataFault(f"the reply {step.reply[:60]!r} has no log-probability for each of its tokens")
        # If the turn continues after this reply, the end-of-turn token that was sampled is left
        # out.
        previous_id = sample.input_ids[trained_positions[0] - 1] if trained_positions else None
        reply_ids = step.token_ids if ends_turn and not span.is_external else renderer.inner_ids(span, previous_id)
        reply_positions, trained_positions = trained_positions[: len(reply_ids)], trained_positions[len(reply_ids) :]
        if tuple(sample.input_ids[position] for position in reply_positions) != reply_ids:
            raise DataFault(f"the reply {step.reply[:60]!r} is not rendered as the tokens that were sampled")
        if ends_turn and reply_positions and trained_positions[:1] == [reply_positions[-1] + 1]:
            # This end-of-turn token was not sampled.
            trained_positions = trained_positions[1:]
        if step_index < num_given:
            continue
        positions += reply_positions
        logprobs += (step.logprobs or ())[: len(reply_ids)]
        token_advantages += [advantage] * len(reply_ids)
        if scores is not None:
            token_scores += scores[step_index][: len(reply_ids)] or [math.nan] * len(reply_ids)
    if trained_positions:
        raise DataFault(
            f"an episode of {len(steps)} replies is rendered with loss on {len(trained_positions)} further tokens"
        )
    return PolicyRow(
        input_ids=tuple(sample.input_ids),
        positions=tuple(positions),
        logprobs=tuple(logprobs),
        advantages=tuple(token_advantages),
        episode_tokens=len(positions),
        scores=tuple(token_scores),
    )


def number_tokens(rows: Sequence[PolicyRow]) -> list[TokenRow]:
    """Return rows for `packing.forward_passes` whose labels, instead of token ids, are the numbers
    of the sampled tokens: from 0, counted over all rows.
    """
    token_rows, token_number = [], 0
    for row in rows:
        labels = [IGNORE_INDEX] * len(row.input_ids)
        for position in row.positions:
            labels[position] = token_number
            token_number += 1
        token_rows.append(TokenRow(row.input_ids, tuple(labels)))
    return token_rows


# The clipped policy-gradient loss on sampled tokens, as pure functions of flat tensors.
#
# It equals the loss of TRL's GRPOTrainer for `loss_type` dapo, grpo and dr_grpo. The weights of
# tokens say how they are averaged, so that a step may be split into forward passes in any way.


class LossSums(NamedTuple):
    """The loss of some tokens (already weighted), and unweighted sums over them; all scalars."""

    loss: Tensor
    num_clipped: Tensor
    """The number of tokens whose gradient is 0 because the ratio is beyond its limit."""
    sampler_kl: Tensor
    """The summed estimate of the KL divergence from the policy that sampled, in nats."""
    kl: Tensor
    """The summed estimate of the KL divergence to the reference, in nats; 0 without a reference."""


def token_weights(
    lengths: Sequence[int], *, episode_lengths: Sequence[int] | None = None, loss_type: LossType, max_tokens: int
) -> list[float]:
    """Return for each episode the weight of each of its tokens in the sum that is the loss of an
    optimizer step.

    Args:
        lengths: the number of sampled tokens of each episode, or of each part of one.
        episode_lengths: for parts, the number of sampled tokens of the whole episode: a part
            counts as that fraction of an episode. None: all are whole episodes.
        max_tokens: the most sampled tokens that an episode may have, for `dr_grpo`.
    """
    if loss_type == "dapo":
        return [1 / sum(lengths)] * len(lengths)
    episode_lengths = lengths if episode_lengths is None else episode_lengths
    num_episodes = sum(length / episode_length for length, episode_length in zip(lengths, episode_lengths, strict=True))
    return [
        1 / (num_episodes * (episode_length if loss_type == "grpo" else max_tokens))
        for episode_length in episode_lengths
    ]


# The old policy of the ratio is the sampler itself. Most trainers recompute it with their own
# kernels, so that episodes are off-policy from the start, and correct that by truncated importance
# sampling. Here the ratio is the importance weight, and the clip truncates it.
def surrogate_loss(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    reference: Tensor | None = None,
    beta: float = 0.0,
) -> LossSums:
    """Return `sum(weights * -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A))`, where
    `r = exp(logprobs - sampled_logprobs)`, plus `beta` times the KL divergence to the reference.
    With `delta`, the first r is at most `delta`, so that a token of negative advantage costs at
    most `delta * -A` however likely it became: the dual clip of PPO (arXiv 1912.09729).

    All tensors have the shape [tokens]; log-probabilities are natural. Divergences are estimated as
    `exp(d) - d - 1` for a difference d (Schulman's k3).
    """
    log_ratio = logprobs - sampled_logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded_ratio = ratio if delta is None else ratio.clamp(max=delta)
    losses = -torch.minimum(bounded_ratio * advantages, clipped_ratio * advantages)
    clip_mask = ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))
    clip_mask |= (bounded_ratio < ratio) & (advantages < 0)
    kl = torch.zeros_like(logprobs) if reference is None else k3_divergence(reference - logprobs)
    losses = losses + beta * kl
    return LossSums(
        loss=(weights * losses).sum(),
        num_clipped=clip_mask.sum().detach(),
        sampler_kl=k3_divergence(log_ratio).sum().detach(),
        kl=kl.sum().detach(),
    )


def k3_divergence(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate (Schulman, "Approximating KL Divergence") of a KL divergence for each
    difference of log-probabilities; it is at least 0.
    """
    return log_ratio.exp() - log_ratio - 1


MAX_ROUNDING_NATS = 1e-3
"""The largest difference, in nats, between two log-probabilities of a token that counts as
rounding: that of the same weights in 32 bits in different batches; 1e-5 was observed.
"""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the sampled tokens of updates; but `updates`, `loss` and `norm`, the norm of the
    gradient before clipping, are sums over the updates. Entropies and divergences are in nats.
    """

    tokens: int = 0
    entropy: float = 0.0
    clipped: float = 0.0
    sampler_kl: float = 0.0
    kl: float = 0.0
    updates: int = 0
    loss: float = 0.0
    norm: float = 0.0

    def __iadd__(self, other: Totals) -> Self:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def mean(self, name: str) -> float:
        """Return the sum of this name divided by the number of tokens."""
        return float(getattr(self, name)) / max(1, self.tokens)


class Policy:
    """A model on a GPU or the CPU, with 32-bit numbers for the trained parameters: all weights, or
    LoRA adapters. Not thread-safe.

    Args:
        seed: for the initialisation of new adapters.
        strategy: how this process and others hold the policy; None: this process holds all of it.

    Raises `ModelDirectoryError` when the model cannot be loaded, `ConfigError` when its adapters
    could not be given to samplers, and what else `load_parent` raises.
    """

    def __init__(
        self,
        model_dir: Path,
        training: TrainingConfig,
        grpo: GrpoConfig,
        *,
        seed: int = 0,
        strategy: Strategy | None = None,
    ) -> None:
        self.strategy = Strategy() if strategy is None else strategy
        self._device = self.strategy.device
        parent = load_parent(model_dir, training, zero3=self.strategy.zero3)
        model = parent.model
        if parent.lora is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = add_adapters(model, training)
        if training.lora_r and (faults := [*tied_faults(model, model_dir), *non_lora_faults(model)]):
            raise ConfigError("; ".join(faults))
        self.dtype: torch.dtype = parent.dtype
        """The number format in which the checkpoint is published."""
        # As in the samplers, only tokens that the tokenizer has can be drawn.
        self._vocabulary_size = max(parent.tokenizer.get_vocab().values()) + 1
        # Evaluation mode: the trained policy must be the one that sampled, without dropout.
        self.model: Any = model.eval()
        if uses_gradient_checkpointing(training):
            # The layers compute their activations again in the backward pass.
            from transformers.modeling_layers import GradientCheckpointingLayer

            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    # A layer does so in training mode only; its submodules stay in evaluation mode,
                    # without dropout.
                    layer.training = True
        self.model = self.strategy.place(self.model)
        # As in the Trainer, norms and biases do not decay.
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for parameter in self.parameters.values():
            # Under ZeRO-3 a parameter is flat, and remembers its shape.
            (matrices if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 else vectors).append(parameter)
        self._forward_model = self.strategy.prepare(
            self.model,
            [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            training.learning_rate,
        )
        self._uses_bf16, self._grpo, self._has_adapters = training.bf16 is True, grpo, bool(training.lora_r)
        self._training = training
        self._reference: Any = None
        if grpo.beta:
            reference = load_parent(model_dir, training, zero3=self.strategy.zero3).model.eval().requires_grad_(False)
            reference = self.strategy.place(reference)
            self._reference = self.strategy.prepare(reference, [], 0.0, is_trained=False)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that are trained, by name, each once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all weights, each once, on the CPU in `dtype`, with adapters merged and the names
        of a model without adapters. Only the process of rank 0 gets them; the others get an empty
        dict, but must call this, too.
        """
        return whole_weights(
            self.model, dtype, gather_context=self.strategy.gather_parameters, collect=self.strategy.rank == 0
        )

    def full_state(self) -> dict[str, Tensor]:
        """Return what `state` returns, gathered from all processes and on the CPU. Only the process
        of rank 0 gets it; the others get an empty dict, but must call this, too.
        """
        state, parameters = {}, dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in self.state().items():
            with self.strategy.gather_parameters([parameters[name]] if name in parameters else []):
                # Under ZeRO-3 the value above is empty.
                tensor = gathered_tensor(parameters.get(name, value)).detach()
                if self.strategy.rank == 0:
                    state[name] = tensor.to("cpu", copy=True)
        return state

    def state(self) -> dict[str, Tensor]:
        """Return this process's part of the model's state dict: of all of it, or with adapters of
        the trained parameters only. `restore` takes it.
        """
        parameters = self.parameters
        return {
            name: value
            for name, value in self.model.state_dict().items()
            if name in parameters or not self._has_adapters
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned earlier in the same training."""
        self.model.load_state_dict(state, strict=not self._has_adapters)

    def count_passes(self, rows: Sequence[PolicyRow]) -> int:
        """Return how many forward passes these episodes take."""
        return len(self._make_passes(rows))

    def accumulate_gradient(
        self, rows: Sequence[PolicyRow], weights: Sequence[float], *, min_passes: int = 0
    ) -> Totals:
        """Add the gradient of the loss on episodes to the parameters' gradients; return the sums
        measured on the way.

        Args:
            weights: for each episode, the weight of its tokens.
            min_passes: the least number of forward passes; idle ones are appended if there are
                fewer.
        """
        totals = Totals(tokens=sum(len(row.positions) for row in rows))
        # The arguments of the loss for each sampled token, in the order of `number_tokens`.
        lengths = torch.tensor([len(row.positions) for row in rows], dtype=torch.long)
        loss_inputs = {
            "sampled_logprobs": torch.tensor([value for row in rows for value in row.logprobs]),
            "advantages": torch.tensor([value for row in rows for value in row.advantages]),
            "weights": torch.tensor(weights).repeat_interleave(lengths),
        }
        loss_inputs = {name: value.float().to(self._device) for name, value in loss_inputs.items()}
        batches = list(self._make_passes(rows, min_passes))
        for pass_number, batch in enumerate(batches, start=1):
            loss_sums, entropy = self._forward_loss(batch, loss_inputs)
            self.strategy.backward(loss_sums.loss, is_last=pass_number == len(batches))
            totals += Totals(
                loss=loss_sums.loss.item(),
                entropy=entropy,
                clipped=loss_sums.num_clipped.item(),
                sampler_kl=loss_sums.sampler_kl.item(),
                kl=loss_sums.kl.item(),
            )
        return totals

    def remove_rounding_noise(self, rows: Sequence[PolicyRow], *, min_passes: int = 0) -> list[PolicyRow]:
        """Return episodes that this policy sampled, with its own log-probabilities in place of the
        sampler's where these differ by rounding alone.

        Timing decides which requests a sampler computes together, and thereby the last bit of a
        log-probability. The trained weights must not depend on timing.

        Args:
            min_passes: as in `accumulate_gradient`.
        """
        logprobs = torch.tensor([value for row in rows for value in row.logprobs])
        for batch in self._make_passes(rows, min_passes):
            token_numbers, mask = sampled_token_numbers(batch)
            with torch.no_grad():
                own_logprobs = chosen_logprobs(
                    self._compute_vocabulary_logprobs(self._forward_model, batch, mask), batch, mask
                ).cpu()
            sampler_logprobs = logprobs[token_numbers]
            logprobs[token_numbers] = torch.where(
                (own_logprobs - sampler_logprobs).abs() < MAX_ROUNDING_NATS, own_logprobs, sampler_logprobs
            )
        remaining_logprobs = iter(logprobs.tolist())
        return [row._replace(logprobs=tuple(islice(remaining_logprobs, len(row.positions)))) for row in rows]

    def _make_passes(self, rows: Sequence[PolicyRow], min_passes: int = 0) -> list[dict[str, Tensor]]:
        """Return the inputs of the forward passes over episodes, with idle passes appended until
        there are at least `min_passes`.
        """
        longest = padded_length(max((len(row.input_ids) for row in rows), default=1))
        rows_per_pass = max_rows_per_pass(
            self._training, max(1, self._grpo.micro_batch_tokens // max(ROW_LENGTH, longest))
        )
        passes = forward_passes(number_tokens(rows), packing=self._training.packing, rows_per_pass=rows_per_pass)
        return passes + [idle_pass()] * (min_passes - len(passes))

    def _forward_loss(self, batch: Mapping[str, Tensor], loss_inputs: Mapping[str, Tensor]) -> tuple[LossSums, float]:
        """Return the loss of a forward pass, and the sum of the entropies, in nats, of the
        distributions from which its tokens were sampled.
        """
        token_numbers, mask = sampled_token_numbers(batch)
        pass_inputs = {name: inputs[token_numbers.to(self._device)] for name, inputs in loss_inputs.items()}
        vocabulary_logprobs = self._compute_vocabulary_logprobs(self._forward_model, batch, mask)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = chosen_logprobs(
                    self._compute_vocabulary_logprobs(self._reference, batch, mask), batch, mask
                )
        grpo = self._grpo
        loss_sums = surrogate_loss(
            chosen_logprobs(vocabulary_logprobs, batch, mask),
            **pass_inputs,
            epsilon=grpo.epsilon,
            epsilon_high=grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
            delta=grpo.delta,
            reference=reference,
            beta=grpo.beta,
        )
        with torch.no_grad():
            entropy = -(vocabulary_logprobs.exp() * vocabulary_logprobs).sum().item()
        return loss_sums, entropy

    def _compute_vocabulary_logprobs(self, model: Any, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._uses_bf16):
            return compute_vocabulary_logprobs(
                model, batch, mask, vocabulary_size=self._vocabulary_size, device=self._device
            )


def compute_vocabulary_logprobs(
    model: Any, batch: Mapping[str, Tensor], mask: Tensor, *, vocabulary_size: int, device: torch.device
) -> Tensor:
    """Return the log-probabilities [sampled tokens, vocabulary] of the distributions from which the
    sampled tokens of a forward pass were drawn, over the first `vocabulary_size` tokens.

    Args:
        mask: which targets are sampled tokens, as `sampled_token_numbers` returns it.
    """
    positions = mask.nonzero().squeeze(1)
    # In a pass of one row only the sampled positions are scored, padded to a few lengths.
    is_single_row = len(batch["input_ids"]) == 1
    logits_to_keep = (
        torch.nn.functional.pad(positions, (0, -len(positions) % LENGTH_STEP)).to(device) if is_single_row else 0
    )
    logits = model(
        input_ids=batch["input_ids"].to(device),
        position_ids=batch["position_ids"].to(device),
        use_cache=False,
        logits_to_keep=logits_to_keep,
    ).logits
    token_logits = logits[0, : len(positions)] if is_single_row else logits[:, :-1].flatten(0, 1)[positions.to(device)]
    return torch.log_softmax(token_logits[:, :vocabulary_size].float(), -1)


def chosen_logprobs(vocabulary_logprobs: Tensor, batch: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """Return from `vocabulary_logprobs`, the result of `compute_vocabulary_logprobs`, the
    log-probabilities [sampled tokens] of the tokens that were drawn.
    """
    targets = batch["input_ids"][:, 1:].reshape(-1)[mask].to(vocabulary_logprobs.device)
    return vocabulary_logprobs.gather(1, targets[:, None])[:, 0]


def sampled_token_numbers(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the numbers (see `number_tokens`) of a pass's sampled tokens, and a mask that selects
    them among its targets: the tokens of all rows but each row's first, flattened.
    """
    token_numbers = batch["labels"][:, 1:].reshape(-1)
    mask = token_numbers != IGNORE_INDEX
    return token_numbers[mask], mask
