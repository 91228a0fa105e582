"""An iteration `rl`: one stage of the curriculum.

The policy answers every question several times (`rollout`); questions whose answers differ most are
chosen (`select`); on these it is trained in groups, with the efficiency reward (`reinforce`, the
engine of method grpo).
"""

from __future__ import annotations

from dataclasses import replace

from agentr_core.methods.catalogue import EVALUATE, REINFORCE
from agentr_core.methods.et_agent.reward import EfficiencyReward
from agentr_core.methods.objectives import arguments_for, reinforcing_faults, sampled_groups
from agentr_core.recipes.curriculum import CurriculumConfig, curriculum_faults
from agentr_core.recipes.fields import in_iteration, spare_numbers
from agentr_core.recipes.grpo import SCHEDULE, GrpoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.training import TrainingConfig
from agentr_core.runtime.place import Asked, Funnel, Plan, ReportPart, Stage, Training, imported
from agentr_core.training.objectives import GroupRelative

ROLLOUT = Stage(
    name="rollout",
    about="Let the policy answer each training question of an iteration several times.",
    work=imported("agentr_core.methods.et_agent.stages.rollout:rollout"),
    reads=("environment", "model", "instances", "et_agent.curriculum", "grpo", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor",),
    spreads=True,
    gathers=True,
    check=imported("agentr_core.methods.et_agent.stages.rollout:check_counts"),
)
SELECT = Stage(
    name="select",
    about="Choose the questions to train on: those whose rollouts differ most.",
    work=imported("agentr_core.methods.et_agent.stages.select:select_questions"),
    reads=("et_agent.curriculum",),
    needs=("env",),
    chooses=True,
)
ASKED = ("models", "et_agent.behaviour", "et_agent.curriculum.counts", "et_agent.curriculum.refused_calls")
ASSESS = replace(
    EVALUATE,
    work=imported("agentr_core.methods.et_agent.stages.evaluate:evaluate"),
    reads=(*EVALUATE.reads, *ASKED),
    roles=("actor", "judge"),
    check=imported("agentr_core.methods.et_agent.stages.evaluate:check_asking"),
)
REINFORCE_EFFICIENCY = replace(REINFORCE, reads=(*REINFORCE.reads, "et_agent.curriculum"))
FUNNEL = Funnel(
    title="From questions to trained episodes",
    stages=imported("agentr_core.methods.et_agent.report_selection:funnel"),
)
SELECTION = ReportPart(sections=imported("agentr_core.methods.et_agent.report_selection:selection_sections"))
STAGES = (ROLLOUT, SELECT, REINFORCE_EFFICIENCY)


def stage_of(recipe: Recipe, iteration: int) -> int:
    """Return which stage of the curriculum an iteration `rl` is, counted from 1."""
    phases = recipe.et_agent.phases
    return sum(in_iteration(phases, before) == "rl" for before in range(1, iteration + 1))


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration `rl`, which has no dataset."""
    curriculum, number = recipe.et_agent.curriculum, stage_of(recipe, iteration)
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
            config=_scheduled(recipe),
            section="et_agent.curriculum",
        ),
        phase="rl",
        funnel=FUNNEL,
    )


def _scheduled(recipe: Recipe) -> TrainingConfig:
    """Return section `training` with the schedule of the curriculum in place of its own."""
    training, curriculum = recipe.training, recipe.et_agent.curriculum
    return replace(
        training,
        learning_rate=curriculum.learning_rate,
        lr_scheduler_type=curriculum.lr_scheduler_type,
        lr_scheduler_kwargs=arguments_for(curriculum.lr_scheduler_type, training),
        warmup_ratio=curriculum.warmup_ratio,
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
