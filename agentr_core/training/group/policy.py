"""The gradient of the loss on episodes, accumulated in the model over forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentr_core.errors import ConfigError
from agentr_core.recipes.grpo import GrpoConfig
from agentr_core.recipes.training import TrainingConfig
from agentr_core.samples.labels import IGNORED
from agentr_core.training.adapters import adapted, full, plain_faults, whole_weights
from agentr_core.training.group.loss import Surrogate, surrogate
from agentr_core.training.group.rows import PolicyRow, numbered
from agentr_core.training.group.split import Whole
from agentr_core.training.packing import QUANTUM, ROW, forward_passes, idle_pass, padded_length, together
from agentr_core.training.parent import load_parent, recomputes, tied_faults

ROUNDING = 1e-3
"""The limit in nats on the difference between two log-probabilities of one token that the same
weights computed in 32 bits in different batches; 1e-5 was observed.
"""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the sampled tokens of updates; `loss` and `norm`, the norm of the gradient before
    clipping, are summed over the updates instead.
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
        """Return the sum with this name divided by the number of tokens."""
        return float(getattr(self, name)) / max(1, self.tokens)


class Policy:
    """A model on a GPU or the CPU, with 32-bit numbers for the trained parameters: all weights, or
    LoRA adapters. Not thread-safe.

    Args:
        seed: for the initialisation of new adapters.
        held: how this process and others hold it.

    Raises `ModelDirectoryError` when the model cannot be loaded, `ConfigError` when its adapters
    could not be given to samplers.
    """

    def __init__(
        self,
        model_dir: Path,
        training: TrainingConfig,
        grpo: GrpoConfig,
        *,
        seed: int = 0,
        held: Whole | None = None,
    ) -> None:
        self.held = Whole() if held is None else held
        self._device = self.held.device
        parent = load_parent(model_dir, training, zero3=self.held.zero3)
        model = parent.model
        if parent.lora is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = adapted(model, training)
        if training.lora_r and (faults := [*tied_faults(model, model_dir), *plain_faults(model)]):
            raise ConfigError("; ".join(faults))
        self.dtype: torch.dtype = parent.dtype
        """The number format in which the checkpoint is published."""
        # Samplers, too, draw only tokens that the tokenizer has.
        self._vocabulary = max(parent.tokenizer.get_vocab().values()) + 1
        # Evaluation mode: the trained policy must be the one that sampled, without dropout.
        self.model: Any = model.eval()
        if recomputes(training):
            _checkpoint(self.model)
        self.model = self.held.placed(self.model)
        self._called = self.held.prepare(self.model, self._groups(training), training.learning_rate)
        self._bf16, self._grpo, self._adapted = training.bf16 is True, grpo, bool(training.lora_r)
        self._training = training
        self._reference: Any = None
        if grpo.beta:
            reference = load_parent(model_dir, training, zero3=self.held.zero3).model.eval().requires_grad_(False)
            reference = self.held.placed(reference)
            self._reference = self.held.prepare(reference, [], 0.0, trained=False)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that are trained, by name, each once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all weights, each once, on the CPU, with adapters merged and the names of a model
        without adapters; of several processes the first gets them, and the others nothing.
        """
        return whole_weights(self.model, dtype, gathered=self.held.gathered, wanted=self.held.rank == 0)

    def whole_state(self) -> dict[str, Tensor]:
        """Return the trained parameters, and what belongs to them, whole and on the CPU; of several
        processes the first gets them, and the others nothing.
        """
        found, parameters = {}, dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in self.state().items():
            with self.held.gathered([parameters[name]] if name in parameters else []):
                # Under ZeRO-3 the value above is empty.
                tensor = full(parameters.get(name, value)).detach()
                if self.held.rank == 0:
                    found[name] = tensor.to("cpu", copy=True)
        return found

    def state(self) -> dict[str, Tensor]:
        """Return what this process holds of the trained parameters, and what belongs to them, in
        the form that `restore` takes.
        """
        trained = self.parameters
        return {name: value for name, value in self.model.state_dict().items() if name in trained or not self._adapted}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Return to an earlier state of the same training."""
        self.model.load_state_dict(state, strict=not self._adapted)

    def count_passes(self, rows: Sequence[PolicyRow]) -> int:
        """Return in how many forward passes episodes are computed."""
        return len(self._passes(rows))

    def accumulate(self, rows: Sequence[PolicyRow], weights: Sequence[float], *, passes: int = 0) -> Totals:
        """Add the gradient of the loss on episodes to that of the parameters, and return the sums
        measured meanwhile.

        Args:
            weights: for each episode, the weight of its tokens.
            passes: how many forward passes there must be: idle ones follow where there are fewer.
        """
        totals = Totals(tokens=sum(len(row.positions) for row in rows))
        values = self._values(rows, weights)
        made = list(self._passes(rows, passes))
        for number, one in enumerate(made, start=1):
            found, entropy = self._pass(one, values)
            self.held.backward(found.loss, last=number == len(made))
            totals += Totals(
                loss=found.loss.item(),
                entropy=entropy,
                clipped=found.clipped.item(),
                sampler_kl=found.sampler_kl.item(),
                kl=found.kl.item(),
            )
        return totals

    def settled(self, rows: Sequence[PolicyRow], *, passes: int = 0) -> list[PolicyRow]:
        """Return episodes that this policy sampled, with its own log-probabilities in place of the
        sampler's where these differ by rounding alone.

        Timing decides which requests a sampler computes together, and thereby the last bit of a
        log-probability. The trained weights must not depend on timing.

        Args:
            passes: as in `accumulate`.
        """
        values = torch.tensor([value for row in rows for value in row.logprobs])
        for one in self._passes(rows, passes):
            numbers, sampled = _numbers(one)
            with torch.no_grad():
                own = self._logprobs(self._scores(self._called, one, sampled), one, sampled).cpu()
            stored = values[numbers]
            values[numbers] = torch.where((own - stored).abs() < ROUNDING, own, stored)
        settled = iter(values.tolist())
        return [row._replace(logprobs=tuple(islice(settled, len(row.positions)))) for row in rows]

    def _groups(self, training: TrainingConfig) -> list[dict[str, Any]]:
        """Return the parameters for the optimizer: as in the Trainer, norms and biases do not
        decay.
        """
        wide: list[Tensor] = []
        narrow: list[Tensor] = []
        for parameter in self.parameters.values():
            # Under ZeRO-3 a parameter is flat, and remembers its shape.
            (wide if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 else narrow).append(parameter)
        return [{"params": wide, "weight_decay": training.weight_decay}, {"params": narrow, "weight_decay": 0.0}]

    def _passes(self, rows: Sequence[PolicyRow], count: int = 0) -> list[dict[str, Tensor]]:
        """Return forward passes over episodes, and idle ones up to a number."""
        longest = padded_length(max((len(row.input_ids) for row in rows), default=1))
        most = together(self._training, max(1, self._grpo.micro_batch_tokens // max(ROW, longest)))
        made = forward_passes(numbered(rows), packing=self._training.packing, rows_per_pass=most)
        return made + [idle_pass()] * (count - len(made))

    def _values(self, rows: Sequence[PolicyRow], weights: Sequence[float]) -> dict[str, Tensor]:
        """Return the arguments of the loss for each sampled token, in the order of `numbered`."""
        lengths = torch.tensor([len(row.positions) for row in rows], dtype=torch.long)
        values = {
            "sampled_logprobs": torch.tensor([value for row in rows for value in row.logprobs]),
            "advantages": torch.tensor([value for row in rows for value in row.advantages]),
            "weights": torch.tensor(weights).repeat_interleave(lengths),
        }
        return {name: value.float().to(self._device) for name, value in values.items()}

    def _pass(self, one: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> tuple[Surrogate, float]:
        """Return the loss of a forward pass, and the sum of its tokens' entropies in nats."""
        numbers, sampled = _numbers(one)
        chosen = {name: value[numbers.to(self._device)] for name, value in values.items()}
        scores = self._scores(self._called, one, sampled)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._scores(self._reference, one, sampled), one, sampled)
        grpo = self._grpo
        found = surrogate(
            self._logprobs(scores, one, sampled),
            **chosen,
            epsilon=grpo.epsilon,
            epsilon_high=grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
            delta=grpo.delta,
            reference=reference,
            beta=grpo.beta,
        )
        with torch.no_grad():
            entropy = -(scores.exp() * scores).sum().item()
        return found, entropy

    def _logprobs(self, scores: Tensor, one: Mapping[str, Tensor], sampled: Tensor) -> Tensor:
        targets = one["input_ids"][:, 1:].reshape(-1)[sampled].to(self._device)
        return scores.gather(1, targets[:, None])[:, 0]

    def _scores(self, model: Any, one: Mapping[str, Tensor], sampled: Tensor) -> Tensor:
        """Return the log-probabilities [sampled tokens, vocabulary] from which each sampled token
        of a pass was drawn.
        """
        positions = sampled.nonzero().squeeze(1)
        # In a pass of one row only the sampled positions are scored, padded to a few lengths.
        alone = len(one["input_ids"]) == 1
        keep = torch.nn.functional.pad(positions, (0, -len(positions) % QUANTUM)).to(self._device) if alone else 0
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            logits = model(
                input_ids=one["input_ids"].to(self._device),
                position_ids=one["position_ids"].to(self._device),
                use_cache=False,
                logits_to_keep=keep,
            ).logits
        kept = logits[0, : len(positions)] if alone else logits[:, :-1].flatten(0, 1)[positions.to(self._device)]
        return torch.log_softmax(kept[:, : self._vocabulary].float(), -1)


def _checkpoint(model: Any) -> None:
    """Have the layers of a model compute their activations again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # A layer does so in training mode only; what it consists of stays without dropout.
            layer.training = True


def _numbers(one: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the numbers of a pass's sampled tokens, and a mask of them over its flat targets."""
    numbers = one["labels"][:, 1:].reshape(-1)
    sampled = numbers != IGNORED
    return numbers[sampled], sampled
