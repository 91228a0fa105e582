"""ET-Agent: tool-integrated reasoning with calibrated behaviour.

Source: Chen, Dong and Dou (arXiv 2601.06860). In an iteration `rft`, a flywheel varies the policy's
trajectories (`flywheel`), and those that qualify are used for fine-tuning (`rft`). An iteration
`rl` is a stage of reinforcement learning (`curriculum`). Pure functions choose the questions that
it trains on (`selection`), compute the reward of an episode within its group (`reward`), and
measure behaviour (`behaviour`, `conciseness`).
"""

from __future__ import annotations

from dataclasses import replace

from agentr_core.methods.catalogue import (
    DATASET,
    EVALUATE_BASE,
    GROUPS_OF_RUN,
    STEPS_OF_GROUPS,
    TRAIN,
    acting_in_groups,
    by_iteration,
    of_unread,
    supervised,
)
from agentr_core.methods.et_agent import curriculum
from agentr_core.methods.et_agent.evaluate import VOTE_TOKENS
from agentr_core.recipes.data import tree_faults
from agentr_core.recipes.et_agent import Calibration, EtAgentConfig, et_agent_faults
from agentr_core.recipes.fields import in_iteration, sampling_of
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.place import Acting, Asked, Funnel, Method, Plan, ReportPart, Stage, imported

EVOLVE = Stage(
    name="evolve",
    about="Let the policy answer the training questions of an iteration, and vary what it wrote.",
    work=imported("agentr_core.methods.et_agent.evolve:evolve"),
    reads=("environment", "model", "models", "teacher_iterations", "instances", "et_agent.flywheel", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor", "teacher", "reflector", "editor"),
    spreads=True,
    gathers=True,
    check=imported("agentr_core.methods.et_agent.evolve:check_operators"),
)
SELECT_RFT = Stage(
    name="select_rft",
    about="Make samples of the trajectories that are fit to be trained on.",
    work=imported("agentr_core.methods.et_agent.selection:select_rft"),
    reads=("environment", "et_agent.rft"),
    needs=("env",),
)
FUNNEL = Funnel(
    title="From trajectories to training rows", stages=imported("agentr_core.methods.et_agent.report:funnel")
)


def phase_of(et_agent: EtAgentConfig, iteration: int) -> Calibration:
    """Return the phase of an iteration, counted from 1."""
    return in_iteration(et_agent.phases, iteration)


def plan(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration, which depends on its phase."""
    if phase_of(recipe.et_agent, iteration) != "rft":
        return curriculum.plan(recipe, iteration)
    return Plan(
        stages=(EVOLVE, SELECT_RFT, DATASET, TRAIN, curriculum.ASSESS),
        training=supervised(recipe, iteration),
        phase="rft",
        funnel=FUNNEL,
    )


def _describe(recipe: Recipe, train: int, test: int) -> list[str]:
    flywheel, kinds = recipe.et_agent.flywheel, recipe.over_iterations(recipe.et_agent.phases)
    lines = [f"iterations: {by_iteration(recipe, kinds)}; each ends with {test} held-out episodes"]
    if "rft" in kinds:
        lines.append(
            f"an iteration rft has a flywheel of {flywheel.rounds} rounds ({flywheel.policy}) on {train} questions"
        )
    return [*lines, *([curriculum.describe(recipe, train), *of_unread(recipe)] if "rl" in kinds else [])]


def most_members(recipe: Recipe) -> int:
    """Return the most trajectories that a recipe's flywheel may make for a question."""
    flywheel = recipe.et_agent.flywheel
    children, members = max(len(flywheel.correct), len(flywheel.incorrect)), flywheel.fresh
    for _ in range(flywheel.rounds):
        varied = members if flywheel.policy == "expand-all" else 1
        members = min(members + varied * children, flywheel.most_members)
    return members


_EDITED = {"C1": 1, "C2": 1, "I1": 2, "I2": 2}
"""The most questions to the editor by an operator: a flaw that its thought quotes is looked for
twice."""
_REFLECTED = {"I1": 2, "I4": 1}
"""The questions to the reflector by an operator."""


def _sampled(recipe: Recipe, train: int, test: int) -> dict[str, Asked]:
    """Return the most that an iteration asks of models, by purpose."""
    flywheel, phases = recipe.et_agent.flywheel, recipe.over_iterations(recipe.et_agent.phases)
    found = curriculum.sampled(recipe, train, test) if "rl" in phases else {}
    if "rft" in phases:
        number = train * most_members(recipe)
        steps, most = flywheel.max_steps, flywheel.max_new_tokens
        found["flywheel"] = Asked.episodes(number, steps=steps, most=most, limits=flywheel.limits)
        # How often the trajectories are varied at most, by all of their operators.
        varied = train * flywheel.rounds * (flywheel.most_members if flywheel.policy == "expand-all" else 1)
        operators = flywheel.correct, flywheel.incorrect
        edited, reflected = (
            varied * max(sum(calls.get(name, 0) for name in names) for names in operators)
            for calls in (_EDITED, _REFLECTED)
        )
        found["edit"] = Asked.questions("editor", edited, flywheel.editor.max_new_tokens)
        found["reflect"] = Asked.questions("reflector", reflected, flywheel.reflector.max_new_tokens)
    behaviour, evaluation = recipe.et_agent.behaviour, recipe.evaluation
    found["votes"] = Asked.questions("judge", test * behaviour.votes, VOTE_TOKENS)
    if behaviour.nudge:
        steps, most = evaluation.max_steps, evaluation.max_new_tokens
        found["nudge"] = Asked.episodes(test, steps=steps, most=most, limits=evaluation.limits)
    return {purpose: asked for purpose, asked in found.items() if asked.replies}


def _acting(recipe: Recipe) -> Acting:
    if "rft" not in recipe.et_agent.phases:
        return acting_in_groups(recipe)
    flywheel = recipe.et_agent.flywheel
    return Acting(sampling=sampling_of(flywheel), max_steps=flywheel.max_steps, limits=flywheel.limits)


def _faults(recipe: Recipe) -> list[str]:
    faults = [*tree_faults(recipe.data), *et_agent_faults(recipe.et_agent), *curriculum.faults(recipe)]
    if recipe.et_agent.behaviour.votes and recipe.models.judge is None:
        faults.append(
            "models.judge: et_agent.behaviour.votes asks it, and without one the policy would judge itself; name a "
            "model, which may be the one that the run begins with"
        )
    asked = recipe.asked_beside("reflector")
    reflector = recipe.model_of(asked)
    reflects = "rft" in recipe.et_agent.phases and not {"I1", "I4"}.isdisjoint(recipe.et_agent.flywheel.incorrect)
    if reflector.backend == "openai" and not reflector.server.continues and reflects:
        faults.append(
            "et_agent.flywheel.incorrect: I1 and I4 begin the reply of the reflector, which its server cannot go on "
            "from; leave them out or, if it has vLLM's fields for it, set "
            f"{'model' if asked == 'actor' else f'models.{asked}'}.server.continues"
        )
    return faults


FAMILIES = ReportPart(sections=imported("agentr_core.methods.et_agent.report:family_sections"))
BEHAVIOUR = ReportPart(sections=imported("agentr_core.methods.et_agent.report:behaviour_sections"))
TOOLS = ReportPart(sections=imported("agentr_core.methods.et_agent.report:tool_sections"))
METHOD = Method(
    name="et-agent",
    title="ET-Agent",
    sections=("et_agent", "grpo", "iterations"),
    stages=(EVOLVE, SELECT_RFT, DATASET, TRAIN, *curriculum.STAGES, curriculum.ASSESS),
    plan=plan,
    before=(replace(curriculum.ASSESS, reads=(*EVALUATE_BASE.reads, *curriculum.ASKED)),),
    faults=_faults,
    describe=_describe,
    sampled=_sampled,
    taken_over=("collect", "critique", "explore", "evaluate", curriculum.ROLLOUT.name),
    acting=_acting,
    measures=imported("agentr_core.methods.et_agent.evaluate:measures"),
    report=(FAMILIES, curriculum.SELECTION, STEPS_OF_GROUPS, GROUPS_OF_RUN, BEHAVIOUR, TOOLS),
)
