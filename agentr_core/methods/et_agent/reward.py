"""The reward of an episode relative to its group: its correctness times factors that are higher the
fewer calls it made and the more briefly it reasoned.

    reward = correctness * cost(calls) * cost(z(length)) - penalty where the format is invalid
    cost(x) = A / (1 + exp(sigma * (x - mean over the group)))

z is the number of (population) standard deviations from the mean of the group. Source: ET-Agent
(arXiv 2601.06860), efficiency reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentr_core.environment import Environment
from agentr_core.environments.reasoning.grammar import is_answered, last_box, reasoning_tokens, text_of
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.errors import DataFault
from agentr_core.fingerprint import later_field
from agentr_core.methods.et_agent.evaluate import is_well_formed, weighted_cost
from agentr_core.recipes.et_agent import Counts
from agentr_core.types import Trajectory

AMPLITUDE = 2.0
"""A in the cost: a right answer of mean cost is worth 1 with A = 2, as in the published code, and a
quarter with A = 1, as in the paper.
"""
FORMAT_PENALTY = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyReward:
    """The efficiency reward of a curriculum stage, a `job.GroupReward` for group RL.

    With `decay`, both sigmas fall linearly to 0 at the last step of the stage, as in the published
    code; otherwise they stay the same, as in the paper. `counts` says what costs: tool calls, or
    steps.
    """

    sigma_calls: float
    sigma_length: float
    amplitude: float = AMPLITUDE
    format_penalty: float = FORMAT_PENALTY
    decay: bool = False
    counts: Counts = "calls"
    call_costs: tuple[tuple[str, float], ...] = later_field(())
    """The cost of a call, by the name of its tool; 1 for tools that are not named."""
    refused_calls: bool = later_field(False)
    boxed_only: bool = later_field(False)

    def rewards(
        self, group: Sequence[Trajectory], *, step: int, steps: int, env: Environment | None = None
    ) -> list[float]:
        """Return the reward of each episode of a group in step `step`, from 1 to `steps`, of a
        stage. The episode's own reward is its correctness, with two exceptions where calls are
        counted: an episode that does not end with an answer tag is wrong; with `boxed_only`, an
        answer without a box is wrong unless `env` finds the last box in a mathematics episode
        right.

        Raises `DataFault` for an episode without token ids, whose length is not known, and
        `ValueError` for a step outside the stage.
        """
        if not 1 <= step <= steps:
            raise ValueError(f"step {step} must be from 1 to {steps}")
        sigma_factor = (steps - step) / (steps - 1) if self.decay and steps > 1 else 1.0
        lengths = [reasoning_tokens(episode) for episode in group]
        known_lengths = [length for length in lengths if length is not None]
        if len(known_lengths) < len(group):
            raise DataFault(
                f"{group[lengths.index(None)].instance.key}: a reply has no token ids, so the length of its reasoning "
                "is not known; sample from a model that gives them"
            )
        return efficiency_rewards(
            [self._correctness(episode, env) for episode in group],
            [
                weighted_cost(episode, self.counts, dict(self.call_costs), refused=self.refused_calls)
                for episode in group
            ],
            known_lengths,
            [is_well_formed(episode, self.counts) for episode in group],
            sigma_calls=self.sigma_calls * sigma_factor,
            sigma_length=self.sigma_length * sigma_factor,
            amplitude=self.amplitude,
            format_penalty=self.format_penalty,
        )

    def _correctness(self, episode: Trajectory, env: Environment | None) -> float:
        if self.counts == "steps":
            return episode.reward
        # An evaluation takes a box in the thoughts as an answer; if training did so, a policy would
        # learn to guess in its thoughts and never to answer.
        if not is_answered(episode):
            return 0.0
        if not self.boxed_only or last_box(episode.steps[-1].action) is not None:
            return episode.reward
        if not isinstance(env, ReasoningWorld) or (problem := env.problem(episode.instance)).domain == "knowledge":
            return 0.0
        return problem.correctness(last_box(text_of(episode)) or "", env.answers)


def efficiency_rewards(
    correctness: Sequence[float],
    calls: Sequence[float],
    lengths: Sequence[float],
    valid: Sequence[bool],
    *,
    sigma_calls: float,
    sigma_length: float,
    amplitude: float = AMPLITUDE,
    format_penalty: float = FORMAT_PENALTY,
) -> list[float]:
    """Return the reward of each episode of a group, at least `-format_penalty`; with a valid format
    a right answer can get more than 1, a wrong one gets 0.

    Args:
        correctness: in [0, 1].
        calls: how many tool calls were made, or what they cost.
        lengths: tokens of reasoning, without tool results.
        valid: whether the format is valid, that is, `grammar.format_fault` finds nothing.
        sigma_calls, sigma_length: how strongly calls and length count; 0 ignores them.
        amplitude: A of both costs.
        format_penalty: what an invalid format subtracts.

    Raises `ValueError` if the lengths of the sequences differ.
    """
    if not len(correctness) == len(calls) == len(lengths) == len(valid):
        raise ValueError("an episode has a correctness, a number of calls, a length and a format")
    if not correctness:
        return []
    correct = np.asarray(correctness, dtype=np.float64)
    call_factor = _cost_factor(np.asarray(calls, dtype=np.float64), sigma_calls, amplitude)
    num_tokens = np.asarray(lengths, dtype=np.float64)
    # In (population) standard deviations from the mean.
    z_scores = (
        np.zeros_like(num_tokens)
        if np.all(num_tokens == num_tokens[0])
        else (num_tokens - num_tokens.mean()) / num_tokens.std()
    )
    length_factor = _cost_factor(z_scores, sigma_length, amplitude)
    penalty = np.where(np.asarray(valid, dtype=np.bool_), 0.0, format_penalty)
    return [float(reward) for reward in correct * call_factor * length_factor - penalty]


def _cost_factor(values: NDArray[np.float64], sigma: float, amplitude: float) -> NDArray[np.float64]:
    # tanh never overflows; A / (1 + exp(x)) is A / 2 * (1 - tanh(x / 2)).
    costs: NDArray[np.float64] = amplitude / 2 * (1.0 - np.tanh(sigma * (values - values.mean()) / 2))
    return costs
