"""An iteration `rl`: one stage of the curriculum.

The policy answers every question several times (`rollout`); questions whose answers differ most are
chosen (`select`); on these it is trained in groups, with the efficiency reward (`reinforce`, the
engine of method grpo).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentr_core.environment import Environment
from agentr_core.environments.reasoning.grammar import is_answered, last_box, reasoning_tokens, text_of
from agentr_core.environments.reasoning.world import ReasoningWorld
from agentr_core.errors import DataFault
from agentr_core.fingerprint import later
from agentr_core.methods.catalogue import EVALUATE, REINFORCE, arguments_for, reinforcing_faults, sampled_groups
from agentr_core.methods.et_agent.evaluate import weighed_cost, well_formed
from agentr_core.recipes.et_agent import Counts, CurriculumConfig, curriculum_faults
from agentr_core.recipes.fields import in_iteration, spare_numbers
from agentr_core.recipes.grpo import SCHEDULE, GrpoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.place import Asked, Funnel, Plan, ReportPart, Stage, Training, imported
from agentr_core.training.job import GroupRelative
from agentr_core.types import Trajectory

# The reward of an episode relative to its group: its correctness, weighed by how few calls it
# made and how briefly it reasoned.
#
#     reward = correctness * cost(calls) * cost(z(length)) - penalty where the format is invalid
#     cost(x) = A / (1 + exp(sigma * (x - mean over the group)))
#
# z is the number of standard deviations from the mean of the group. Source: ET-Agent (arXiv
# 2601.06860), efficiency reward.

AMPLITUDE = 2.0
"""A in the cost: a right answer of mean cost is worth 1 with an A of 2, and a quarter with 1, as
published.
"""
FORMAT_PENALTY = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyReward:
    """The efficiency reward of a curriculum stage, in the form that an objective takes
    (`objectives.GroupReward`).

    With `decay`, both sigmas fall linearly to 0 at the last step of the stage, as in the published
    code; otherwise they stay, as in the paper. `counts` says what costs: tool calls, or steps.
    """

    sigma_calls: float
    sigma_length: float
    amplitude: float = AMPLITUDE
    format_penalty: float = FORMAT_PENALTY
    decay: bool = False
    counts: Counts = "calls"
    call_costs: tuple[tuple[str, float], ...] = later(())
    """The cost of a call, by the name of its tool; 1 for tools that are not named."""
    refused_calls: bool = later(False)
    boxed_only: bool = later(False)

    def rewards(
        self, group: Sequence[Trajectory], *, step: int, steps: int, env: Environment | None = None
    ) -> list[float]:
        """Return the reward of each episode of a group in a step, counted from 1, of a stage; its
        present reward is its correctness. Where calls are counted, an episode that does not end
        with an answer tag is wrong. With `boxed_only`, `env` knows the right answers.

        Raises `DataFault` for an episode without token ids, whose length is not known, and
        `ValueError` for a step outside the stage.
        """
        if not 1 <= step <= steps:
            raise ValueError(f"step {step} must be from 1 to {steps}")
        share = (steps - step) / (steps - 1) if self.decay and steps > 1 else 1.0
        lengths = [reasoning_tokens(episode) for episode in group]
        known = [length for length in lengths if length is not None]
        if len(known) < len(group):
            raise DataFault(
                f"{group[lengths.index(None)].instance.key}: a reply has no token ids, so the length of its reasoning "
                "is not known; sample from a model that gives them"
            )
        return efficiency_rewards(
            [self._correctness(episode, env) for episode in group],
            [
                weighed_cost(episode, self.counts, dict(self.call_costs), refused=self.refused_calls)
                for episode in group
            ],
            known,
            [well_formed(episode, self.counts) for episode in group],
            sigma_calls=self.sigma_calls * share,
            sigma_length=self.sigma_length * share,
            amplitude=self.amplitude,
            format_penalty=self.format_penalty,
        )

    def _correctness(self, episode: Trajectory, env: Environment | None) -> float:
        if self.counts == "steps":
            return episode.reward
        # An evaluation takes a box among the thoughts for an answer; trained on that, a policy
        # would learn to guess there and never to answer.
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
    """Return the reward of each episode of a group, at least `-format_penalty`; a right answer can
    get more than 1, a wrong one nothing.

    Args:
        correctness: in [0, 1].
        calls: how many tool calls were made, or what they cost.
        lengths: tokens of reasoning, without tool results.
        valid: whether the format is valid, that is, `grammar.format_fault` finds nothing.
        sigma_calls, sigma_length: how much cost counts; 0 ignores it.
        amplitude: A of both costs.
        format_penalty: what an invalid format costs.

    Raises `ValueError` if the lengths of the sequences differ.
    """
    if not len(correctness) == len(calls) == len(lengths) == len(valid):
        raise ValueError("an episode has a correctness, a number of calls, a length and a format")
    if not correctness:
        return []
    right = np.asarray(correctness, dtype=np.float64)
    tools = _cost(np.asarray(calls, dtype=np.float64), sigma_calls, amplitude)
    tokens = np.asarray(lengths, dtype=np.float64)
    # In (population) standard deviations from the mean.
    scaled = np.zeros_like(tokens) if np.all(tokens == tokens[0]) else (tokens - tokens.mean()) / tokens.std()
    length = _cost(scaled, sigma_length, amplitude)
    penalty = np.where(np.asarray(valid, dtype=np.bool_), 0.0, format_penalty)
    return [float(reward) for reward in right * tools * length - penalty]


def _cost(values: NDArray[np.float64], sigma: float, amplitude: float) -> NDArray[np.float64]:
    # tanh never overflows; A / (1 + exp(x)) is A / 2 * (1 - tanh(x / 2)).
    weighed: NDArray[np.float64] = amplitude / 2 * (1.0 - np.tanh(sigma * (values - values.mean()) / 2))
    return weighed


ROLLOUT = Stage(
    name="rollout",
    about="Let the policy answer each training question of an iteration several times.",
    work=imported("agentr_core.methods.et_agent.selection:rollout"),
    reads=("environment", "model", "instances", "et_agent.curriculum", "grpo", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor",),
    spreads=True,
    gathers=True,
    check=imported("agentr_core.methods.et_agent.selection:check_counts"),
)
SELECT = Stage(
    name="select",
    about="Choose the questions to train on: those whose rollouts differ most.",
    work=imported("agentr_core.methods.et_agent.selection:select_questions"),
    reads=("et_agent.curriculum",),
    needs=("env",),
    chooses=True,
)
ASKED = ("models", "et_agent.behaviour", "et_agent.curriculum.counts", "et_agent.curriculum.refused_calls")
ASSESS = replace(
    EVALUATE,
    work=imported("agentr_core.methods.et_agent.evaluate:evaluate"),
    reads=(*EVALUATE.reads, *ASKED),
    roles=("actor", "judge"),
    check=imported("agentr_core.methods.et_agent.evaluate:check_asking"),
)
REINFORCE_EFFICIENCY = replace(REINFORCE, reads=(*REINFORCE.reads, "et_agent.curriculum"))
FUNNEL = Funnel(
    title="From questions to trained episodes",
    stages=imported("agentr_core.methods.et_agent.report:selection_funnel"),
)
SELECTION = ReportPart(sections=imported("agentr_core.methods.et_agent.report:selection_sections"))
STAGES = (ROLLOUT, SELECT, REINFORCE_EFFICIENCY)


def stage_of(recipe: Recipe, iteration: int) -> int:
    """Return which stage of the curriculum an iteration `rl` is, counted from 1."""
    phases = recipe.et_agent.phases
    return sum(in_iteration(phases, before) == "rl" for before in range(1, iteration + 1))


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration `rl`, which has no dataset."""
    training, curriculum, number = recipe.training, recipe.et_agent.curriculum, stage_of(recipe, iteration)
    reward = EfficiencyReward(
        sigma_calls=in_iteration(curriculum.sigma_calls, number),
        sigma_length=in_iteration(curriculum.sigma_length, number),
        amplitude=curriculum.amplitude,
        format_penalty=curriculum.format_penalty,
        decay=curriculum.decay,
        counts=curriculum.counts,
        call_costs=tuple(sorted(curriculum.call_costs.items())),
        refused_calls=curriculum.refused_calls,
        boxed_only=curriculum.boxed_only,
    )
    return Plan(
        stages=(*STAGES, ASSESS),
        training=Training(
            objective=GroupRelative(grpo=recipe.grpo, reward=reward),
            # The curriculum has a schedule of its own.
            config=replace(
                training,
                learning_rate=curriculum.learning_rate,
                lr_scheduler_type=curriculum.lr_scheduler_type,
                lr_scheduler_kwargs=arguments_for(curriculum.lr_scheduler_type, training),
                warmup_ratio=curriculum.warmup_ratio,
            ),
            section="et_agent.curriculum",
        ),
        phase="rl",
        funnel=FUNNEL,
    )


def describe(recipe: Recipe, train: int) -> str:
    """Return a line for `agentr plan` about an iteration `rl`."""
    curriculum, grpo = recipe.et_agent.curriculum, recipe.grpo
    return (
        f"an iteration rl plays {train} questions {curriculum.rollouts} times each, chooses at most "
        f"{curriculum.questions} of them, and trains on these in {grpo.steps} steps of {grpo.groups} groups of "
        f"{grpo.num_generations} episodes"
    )


def sampled(recipe: Recipe, train: int, test: int) -> dict[str, Asked]:
    """Return the most that an iteration `rl` asks of the policy."""
    grpo = recipe.grpo
    number = train * recipe.et_agent.curriculum.rollouts
    rollouts = Asked.episodes(number, steps=grpo.max_steps, most=grpo.max_new_tokens, limits=grpo.limits)
    return {"rollouts": rollouts} | sampled_groups(recipe, test)


def faults(recipe: Recipe) -> list[str]:
    """Return what is wrong with the settings for iterations `rl`, one sentence each; in a recipe
    without such iterations, the sections that have no use.
    """
    if "rl" not in recipe.et_agent.phases:
        sections = {"grpo": recipe.grpo, "et_agent.curriculum": recipe.et_agent.curriculum}
        # Evaluations count what an episode costs, whatever trains.
        counts, refused = recipe.et_agent.curriculum.counts, recipe.et_agent.curriculum.refused_calls
        read = CurriculumConfig(counts=counts, refused_calls=refused)
        plain = {"grpo": GrpoConfig(), "et_agent.curriculum": read}
        return [f"{name}: has no use without an iteration rl" for name, own in sections.items() if own != plain[name]]
    found = curriculum_faults(recipe.et_agent.curriculum, stage_of(recipe, recipe.iterations))
    sigmas = ("sigma_calls", "sigma_length")
    found += [
        f"et_agent.curriculum.{name}: it has more numbers than et_agent.phases has iterations rl; leave the last out"
        for name in spare_numbers(recipe.et_agent.curriculum, CurriculumConfig(), sigmas, recipe.et_agent.phases, "rl")
    ]
    found += [
        f"grpo.{name}: section et_agent.curriculum has it for iterations rl; leave it out here"
        for name in SCHEDULE
        if getattr(recipe.grpo, name) is not None
    ]
    if recipe.grpo.expert_share:
        found.append(
            "grpo.expert_share: the efficiency reward counts the tokens of all replies, and an expert's has none"
        )
    return found + reinforcing_faults(recipe, alone=set(recipe.et_agent.phases) == {"rl"})
