"""What all sections of a recipe share: the kind of record, and the ranges of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, TypeVar, cast, dataclass_transform, get_args

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from agentr_core.fingerprint import later_field
from agentr_core.types import EpisodeLimits, Sampling

# Comparisons of rewards with the thresholds of a recipe, with room for rounding.

AlphaRule = Literal["at_least", "more_than"]

_ROUNDING = 1e-9
"""Room for rounding: rewards are sums and quotients of small numbers, which differ by far more than
this, and floats do not hold them exactly.
"""


def clears(reward: float, alpha: float, rule: AlphaRule = "at_least") -> bool:
    """Return whether a reward reaches `alpha`, or by the rule `more_than` lies above it.

    The paper writes "more than alpha" and sets alpha to 1.0 in its third iteration, where that
    would accept nothing, so the full reward, 1, clears every alpha by either rule.
    """
    if rule == "more_than" and reward < 1 - _ROUNDING:
        return exceeds(reward, alpha)
    return reward >= alpha - _ROUNDING


def exceeds(value: float, threshold: float) -> bool:
    """Return whether a value lies above a line by more than rounding."""
    return value > threshold + _ROUNDING


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(section: type[T]) -> type[T]:
    """Return a class as a section: a frozen dataclass that refuses unknown fields."""
    record_class = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(section)
    return cast("type[T]", record_class)


def in_iteration(values: Sequence[T], iteration: int) -> T:
    """Return the value for an iteration, counted from 1; the last serves all later ones, too."""
    return values[min(iteration, len(values)) - 1]


def spare_numbers(
    section: object, defaults: object, names: Sequence[str], phases: Sequence[str], phase: str
) -> list[str]:
    """Return the fields, among some that have a number for each iteration of a kind, with more
    numbers than a run of these phases could ever have such iterations; defaults may have.
    """
    num_iterations = phases.count(phase)
    if not num_iterations or phases[-1] == phase:
        return []
    numbers = {name: getattr(section, name) for name in names}
    return [
        name for name, values in numbers.items() if len(values) > num_iterations and values != getattr(defaults, name)
    ]


def _check_repeats(repeats: int) -> int:
    if repeats == 1:
        raise ValueError("1 would end every episode at its first reply; give 2 or more, or 0 for never")
    return repeats


Unit = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Repeats = Annotated[Natural, AfterValidator(_check_repeats)]
"""The number of repeated replies that ends an episode; 0: it goes on."""
Temperature = Annotated[float, Field(ge=0, le=5)]
CutReplies = Literal["keep", "reject"]
"""What becomes of samples with a trained reply that was cut off at its token limit."""


# How replies are drawn: the fields shared by all sections that ask a model.

BeyondProtocol = Literal["top_k", "min_p", "repetition_penalty"]
"""Fields that are not in OpenAI's protocol."""
TopP = Annotated[float, Field(gt=0, le=1)]


@record
class SamplingFields:
    """The fields that sections share; each section has its own temperature. They are applied in
    this order: penalty, temperature, top-k, top-p, min-p.
    """

    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = later_field(1.0)
    """Divides the positive logits, and multiplies the negative ones, of tokens that occur in the
    prompt or in the reply so far; 1 changes nothing. It also applies to greedy replies.
    """
    top_k: Natural = later_field(0)
    """Sample only from this many of the likeliest tokens; 0: from all."""
    top_p: TopP = later_field(1.0)
    """Sample only from the smallest set of likeliest tokens that together reach this probability.
    """
    min_p: Unit = later_field(0.0)
    """Sample only from tokens with at least this fraction of the likeliest token's probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = later_field(())
    """Texts that end a reply, in addition to those of the world. In a world of one growing turn
    they stay in the reply, as the world's own do; elsewhere they are cut off."""

    def sampling(self, *, temperature: float, max_new_tokens: int, logprobs: bool = False) -> Sampling:
        """Return how replies are drawn at a temperature, with at most `max_new_tokens` tokens
        each.
        """
        return Sampling(
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            logprobs=logprobs,
            repetition_penalty=self.repetition_penalty,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=self.stop,
        )

    def beyond_protocol(self) -> list[BeyondProtocol]:
        """Return the fields that are not in OpenAI's protocol and not at their defaults."""
        defaults = SamplingFields()
        return [name for name in get_args(BeyondProtocol) if getattr(self, name) != getattr(defaults, name)]


@record
class EpisodeFields:
    """The limits of whole episodes, in sections that play them. An episode that reaches one ends
    without success and is not graded; the report counts these by their stop reasons.
    """

    max_episode_tokens: Natural = later_field(0)
    """The most tokens of all replies of an episode together with what stands between them, such as
    results of tools (stop reason `token_limit`): a reply may have no more than are left. 0: no
    limit but the context. A served model without `server.tokenizer` estimates their number."""
    max_episode_seconds: Annotated[float, Field(ge=0)] = later_field(0.0)
    """The most seconds of an episode, waiting for models included (stop reason `time_limit`). A
    reply that is not done by then is given up; a call of a tool is waited for. 0: no limit."""

    @property
    def limits(self) -> EpisodeLimits:
        """The limits of an episode."""
        return EpisodeLimits(tokens=self.max_episode_tokens, seconds=self.max_episode_seconds)


class SampledSection(Protocol):
    """A section with `SamplingFields`, a temperature and a limit of its own."""

    @property
    def temperature(self) -> float: ...

    @property
    def max_new_tokens(self) -> int: ...

    def sampling(self, *, temperature: float, max_new_tokens: int) -> Sampling: ...


def sampling_of(section: SampledSection) -> Sampling:
    """Return how replies are drawn at a section's own temperature and limit."""
    return section.sampling(temperature=section.temperature, max_new_tokens=section.max_new_tokens)


@record
class DrawingConfig(SamplingFields):
    """How a model other than the policy is sampled where it edits the text of others."""

    temperature: Temperature = 1.0
    top_p: TopP = 0.95
    max_new_tokens: Count = 4096
