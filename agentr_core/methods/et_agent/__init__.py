"""ET-Agent: tool-integrated reasoning with calibrated behaviour.

Source: Chen, Dong and Dou (arXiv 2601.06860). In an iteration `rft`, a flywheel makes variants of
the policy's trajectories (`evolve`), and those that qualify are used for fine-tuning (`selection`).
An iteration `rl` is one stage of a curriculum of reinforcement learning: the policy answers every
question several times; the questions whose answers differ most are chosen (`selection`); on these
it is trained in groups, with the efficiency reward (`reward`) and the training loop of method grpo.
`evaluate` measures how efficiently the policy uses tools.
"""

from __future__ import annotations

from dataclasses import replace

from agentr_core.methods.catalogue import (
    DATASET,
    EVALUATE,
    EVALUATE_BASE,
    GROUPS_OF_RUN,
    REINFORCE,
    STEPS_OF_GROUPS,
    TRAIN,
    group_demands,
    group_rl_faults,
    group_rollout_config,
    scheduler_kwargs_for,
    summary_faults,
    supervised,
    unread_lines,
    values_by_iteration,
)
from agentr_core.methods.et_agent.evaluate import VOTE_TOKENS
from agentr_core.methods.et_agent.reward import EfficiencyReward
from agentr_core.recipes.data import tree_faults
from agentr_core.recipes.et_agent import (
    CurriculumConfig,
    EtAgentConfig,
    Phase,
    curriculum_faults,
    et_agent_faults,
)
from agentr_core.recipes.fields import in_iteration, sampling_of, spare_numbers
from agentr_core.recipes.grpo import SCHEDULE, GrpoConfig, on_one_machine
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import (
    Demand,
    Funnel,
    Method,
    Plan,
    ReportPart,
    RolloutConfig,
    Stage,
    Training,
    lazy_import,
)
from agentr_core.training.job import GroupRelative

EVOLVE = Stage(
    name="evolve",
    about="Let the policy answer the training questions of an iteration, and vary what it wrote.",
    work=lazy_import("agentr_core.methods.et_agent.evolve:evolve"),
    reads=("environment", "model", "models", "teacher_iterations", "instances", "et_agent.flywheel", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor", "teacher", "reflector", "editor"),
    spreads=True,
    gathers=True,
    check=lazy_import("agentr_core.methods.et_agent.evolve:check_operators"),
)
SELECT_RFT = Stage(
    name="select_rft",
    about="Make samples of the trajectories that are fit to be trained on.",
    work=lazy_import("agentr_core.methods.et_agent.selection:select_rft"),
    reads=("environment", "et_agent.rft"),
    needs=("env",),
)
ROLLOUT = Stage(
    name="rollout",
    about="Let the policy answer each training question of an iteration several times.",
    work=lazy_import("agentr_core.methods.et_agent.selection:rollout"),
    reads=("environment", "model", "instances", "et_agent.curriculum", "grpo", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor",),
    spreads=True,
    gathers=True,
    check=lazy_import("agentr_core.methods.et_agent.selection:check_counts"),
)
SELECT = Stage(
    name="select",
    about="Choose the questions to train on: those whose rollouts differ most.",
    work=lazy_import("agentr_core.methods.et_agent.selection:select_questions"),
    reads=("et_agent.curriculum",),
    needs=("env",),
    chooses=True,
)
SIDE_QUESTION_FIELDS = (
    "models",
    "et_agent.behaviour",
    "et_agent.curriculum.counts",
    "et_agent.curriculum.refused_calls",
)
ASSESS = replace(
    EVALUATE,
    work=lazy_import("agentr_core.methods.et_agent.evaluate:evaluate"),
    reads=(*EVALUATE.reads, *SIDE_QUESTION_FIELDS),
    roles=("actor", "judge"),
    check=lazy_import("agentr_core.methods.et_agent.evaluate:check_asking"),
)
REINFORCE_EFFICIENCY = replace(REINFORCE, reads=(*REINFORCE.reads, "et_agent.curriculum"))
FUNNEL_OF_SELECTION = Funnel(
    title="From questions to trained episodes",
    stages=lazy_import("agentr_core.methods.et_agent.report:selection_funnel"),
)
SELECTION = ReportPart(sections=lazy_import("agentr_core.methods.et_agent.report:selection_sections"))
CURRICULUM = (ROLLOUT, SELECT, REINFORCE_EFFICIENCY)
FUNNEL_OF_FLYWHEEL = Funnel(
    title="From trajectories to training rows", stages=lazy_import("agentr_core.methods.et_agent.report:funnel")
)


def phase_of(et_agent: EtAgentConfig, iteration: int) -> Phase:
    """Return the phase of an iteration, counted from 1."""
    return in_iteration(et_agent.phases, iteration)


def curriculum_stage_of(recipe: Recipe, iteration: int) -> int:
    """Return which stage of the curriculum an iteration `rl` is, counted from 1."""
    phases = recipe.et_agent.phases
    return sum(in_iteration(phases, earlier_iteration) == "rl" for earlier_iteration in range(1, iteration + 1))


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration, which depends on its phase; an iteration `rl` makes no
    dataset.
    """
    if phase_of(recipe.et_agent, iteration) == "rft":
        return Plan(
            stages=(EVOLVE, SELECT_RFT, DATASET, TRAIN, ASSESS),
            training=supervised(recipe, iteration),
            phase="rft",
            funnel=FUNNEL_OF_FLYWHEEL,
        )
    training, curriculum, curriculum_stage = (
        recipe.training,
        recipe.et_agent.curriculum,
        curriculum_stage_of(recipe, iteration),
    )
    reward = EfficiencyReward(
        sigma_calls=in_iteration(curriculum.sigma_calls, curriculum_stage),
        sigma_length=in_iteration(curriculum.sigma_length, curriculum_stage),
        amplitude=curriculum.amplitude,
        format_penalty=curriculum.format_penalty,
        decay=curriculum.decay,
        counts=curriculum.counts,
        call_costs=tuple(sorted(curriculum.call_costs.items())),
        refused_calls=curriculum.refused_calls,
        boxed_only=curriculum.boxed_only,
    )
    return Plan(
        stages=(*CURRICULUM, ASSESS),
        training=Training(
            objective=GroupRelative(grpo=recipe.grpo, reward=reward),
            # The curriculum has a schedule of its own.
            config=replace(
                on_one_machine(training),
                learning_rate=curriculum.learning_rate,
                lr_scheduler_type=curriculum.lr_scheduler_type,
                lr_scheduler_kwargs=scheduler_kwargs_for(curriculum.lr_scheduler_type, training),
                warmup_ratio=curriculum.warmup_ratio,
            ),
            section="et_agent.curriculum",
        ),
        phase="rl",
        funnel=FUNNEL_OF_SELECTION,
    )


def _describe(recipe: Recipe, num_train: int, num_test: int) -> list[str]:
    flywheel, phases = recipe.et_agent.flywheel, recipe.over_iterations(recipe.et_agent.phases)
    lines = [f"iterations: {values_by_iteration(recipe, phases)}; each ends with {num_test} held-out episodes"]
    if "rft" in phases:
        lines.append(
            f"an iteration rft has a flywheel of {flywheel.rounds} rounds ({flywheel.policy}) on {num_train} questions"
        )
    if "rl" in phases:
        curriculum, grpo = recipe.et_agent.curriculum, recipe.grpo
        lines += [
            f"an iteration rl plays {num_train} questions {curriculum.rollouts} times each, chooses at most "
            f"{curriculum.questions} of them, and trains on these in {grpo.steps} steps of {grpo.groups} groups of "
            f"{grpo.num_generations} episodes",
            *unread_lines(recipe),
        ]
    return lines


def max_members(recipe: Recipe) -> int:
    """Return the most trajectories that a recipe's flywheel may make for a question."""
    flywheel = recipe.et_agent.flywheel
    max_children, num_members = max(len(flywheel.correct), len(flywheel.incorrect)), flywheel.fresh
    for _ in range(flywheel.rounds):
        num_parents = num_members if flywheel.policy == "expand-all" else 1
        num_members = min(num_members + num_parents * max_children, flywheel.most_members)
    return num_members


_EDITOR_QUESTIONS = {"C1": 1, "C2": 1, "I1": 2, "I2": 2}
"""The most questions that an operator asks the editor: I1 and I2 ask for the flawed step again if
the editor's own thought stopped the first reply.
"""
_REFLECTOR_QUESTIONS = {"I1": 2, "I4": 1}
"""The number of questions that an operator asks the reflector."""


def _demands(recipe: Recipe, num_train: int, num_test: int) -> dict[str, Demand]:
    """Return the most that an iteration asks of models, by purpose, without purposes that ask
    nothing.
    """
    flywheel, phases = recipe.et_agent.flywheel, recipe.over_iterations(recipe.et_agent.phases)
    demands: dict[str, Demand] = {}
    if "rl" in phases:
        grpo, num_episodes = recipe.grpo, num_train * recipe.et_agent.curriculum.rollouts
        rollouts = Demand.episodes(
            num_episodes, steps=grpo.max_steps, max_new_tokens=grpo.max_new_tokens, limits=grpo.limits
        )
        demands = {"rollouts": rollouts} | group_demands(recipe, num_test)
    if "rft" in phases:
        num_episodes = num_train * max_members(recipe)
        steps, max_tokens = flywheel.max_steps, flywheel.max_new_tokens
        demands["flywheel"] = Demand.episodes(
            num_episodes, steps=steps, max_new_tokens=max_tokens, limits=flywheel.limits
        )
        # The most trajectories that are varied, each by all of its operators.
        num_variations = num_train * flywheel.rounds * (flywheel.most_members if flywheel.policy == "expand-all" else 1)
        operators = flywheel.correct, flywheel.incorrect
        num_edits, num_reflections = (
            num_variations * max(sum(questions_by_operator.get(name, 0) for name in names) for names in operators)
            for questions_by_operator in (_EDITOR_QUESTIONS, _REFLECTOR_QUESTIONS)
        )
        demands["edit"] = Demand.questions("editor", num_edits, flywheel.editor.max_new_tokens)
        demands["reflect"] = Demand.questions("reflector", num_reflections, flywheel.reflector.max_new_tokens)
    behaviour, evaluation = recipe.et_agent.behaviour, recipe.evaluation
    demands["votes"] = Demand.questions("judge", num_test * behaviour.votes, VOTE_TOKENS)
    if behaviour.nudge:
        steps, max_tokens = evaluation.max_steps, evaluation.max_new_tokens
        demands["nudge"] = Demand.episodes(num_test, steps=steps, max_new_tokens=max_tokens, limits=evaluation.limits)
    return {purpose: demand for purpose, demand in demands.items() if demand.replies}


def _rollout_config(recipe: Recipe) -> RolloutConfig:
    if "rft" not in recipe.et_agent.phases:
        return group_rollout_config(recipe)
    flywheel = recipe.et_agent.flywheel
    return RolloutConfig(sampling=sampling_of(flywheel), max_steps=flywheel.max_steps, limits=flywheel.limits)


def _faults(recipe: Recipe) -> list[str]:
    faults = [*summary_faults(recipe), *tree_faults(recipe.data), *et_agent_faults(recipe.et_agent)]
    faults += _faults_of_curriculum(recipe)
    if recipe.et_agent.behaviour.votes and recipe.models.judge is None:
        faults.append(
            "models.judge: et_agent.behaviour.votes asks it, and without one the policy would judge itself; name a "
            "model, which may be the one that the run begins with"
        )
    role = recipe.answering_role("reflector")
    reflector = recipe.model_of(role)
    reflects = "rft" in recipe.et_agent.phases and not {"I1", "I4"}.isdisjoint(recipe.et_agent.flywheel.incorrect)
    if reflector.backend == "openai" and not reflector.server.continues and reflects:
        faults.append(
            "et_agent.flywheel.incorrect: I1 and I4 begin the reply of the reflector, which its server cannot go on "
            "from; leave them out or, if it has vLLM's fields for it, set "
            f"{'model' if role == 'actor' else f'models.{role}'}.server.continues"
        )
    return faults


def _faults_of_curriculum(recipe: Recipe) -> list[str]:
    """Return what is wrong with the settings for iterations `rl`, one sentence each. In a recipe
    without such iterations, any setting of sections that only these use is wrong.
    """
    if "rl" not in recipe.et_agent.phases:
        sections = {"grpo": recipe.grpo, "et_agent.curriculum": recipe.et_agent.curriculum}
        # Evaluations use these two, whatever the training is.
        counts, refused_calls = recipe.et_agent.curriculum.counts, recipe.et_agent.curriculum.refused_calls
        default_curriculum = CurriculumConfig(counts=counts, refused_calls=refused_calls)
        defaults = {"grpo": GrpoConfig(), "et_agent.curriculum": default_curriculum}
        return [
            f"{name}: has no use without an iteration rl"
            for name, section in sections.items()
            if section != defaults[name]
        ]
    faults = curriculum_faults(recipe.et_agent.curriculum, curriculum_stage_of(recipe, recipe.iterations))
    sigmas = ("sigma_calls", "sigma_length")
    faults += [
        f"et_agent.curriculum.{name}: it has more numbers than et_agent.phases has iterations rl; leave the last out"
        for name in spare_numbers(recipe.et_agent.curriculum, CurriculumConfig(), sigmas, recipe.et_agent.phases, "rl")
    ]
    faults += [
        f"grpo.{name}: section et_agent.curriculum has it for iterations rl; leave it out here"
        for name in SCHEDULE
        if getattr(recipe.grpo, name) is not None
    ]
    if recipe.grpo.revision_cut == "verdict":
        faults.append(
            "grpo.revision_cut: verdict asks the judge as section critique says, which method et-agent has not; set it "
            "to value, or leave it out"
        )
    if recipe.grpo.expert_share:
        faults.append(
            "grpo.expert_share: the efficiency reward counts the tokens of all replies, and an expert's has none"
        )
    return faults + group_rl_faults(recipe, is_only_phase=set(recipe.et_agent.phases) == {"rl"})


FAMILIES = ReportPart(sections=lazy_import("agentr_core.methods.et_agent.report:family_sections"))
BEHAVIOUR = ReportPart(sections=lazy_import("agentr_core.methods.et_agent.report:behaviour_sections"))
TOOLS = ReportPart(sections=lazy_import("agentr_core.methods.et_agent.report:tool_sections"))
METHOD = Method(
    name="et-agent",
    title="ET-Agent",
    sections=("et_agent", "grpo", "iterations"),
    stages=(EVOLVE, SELECT_RFT, DATASET, TRAIN, *CURRICULUM, ASSESS),
    plan=plan,
    before=(replace(ASSESS, reads=(*EVALUATE_BASE.reads, *SIDE_QUESTION_FIELDS)),),
    faults=_faults,
    describe=_describe,
    demands=_demands,
    shared_stages=("collect", "critique", "explore", "evaluate", EVOLVE.name, ROLLOUT.name),
    rollout_config=_rollout_config,
    measures=lazy_import("agentr_core.methods.et_agent.evaluate:measures"),
    report=(FAMILIES, SELECTION, STEPS_OF_GROUPS, GROUPS_OF_RUN, BEHAVIOUR, TOOLS),
)
