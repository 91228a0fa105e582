"""The shipped stages and report parts. Methods choose from these, and may add their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentr_core.methods.table import method_of
from agentr_core.protocols.environment import Environment
from agentr_core.recipes.eto import EtoConfig
from agentr_core.recipes.recipe import Recipe
from agentr_core.recipes.splicing import SpliceConfig
from agentr_core.runtime.place import Funnel, ReportPart, Stage, imported
from agentr_core.types import Instance


def _check_expert(recipe: Recipe, env: Environment, instances: Sequence[Instance]) -> None:
    """Check the expert, and have the recipe's method say what to do where there is none."""
    imported("agentr_core.stages.demonstrate:check_expert")(recipe, env, instances, method_of(recipe))


COLLECT = Stage(
    name="collect",
    about="Grow the trees of an iteration.",
    work=imported("agentr_core.methods.agent_r.stages.collect:collect"),
    check=imported("agentr_core.methods.agent_r.stages.collect:check_world"),
    reads=("environment", "model", "models.teacher", "teacher_iterations", "instances", "search", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor", "teacher"),
    spreads=True,
    gathers=True,
)
CRITIQUE = Stage(
    name="critique",
    about="Pair the paths of the trees and judge the bad ones.",
    work=imported("agentr_core.methods.agent_r.stages.critique:critique"),
    reads=("model", "models", "pairs", "critique"),
    needs=("gpu",),
    roles=("judge",),
)
SPLICE = Stage(
    name="splice",
    about="Make samples of the judged pairs and of the good paths.",
    work=imported("agentr_core.methods.agent_r.stages.splice:splice_pairs"),
    reads=("environment", "splice"),
    needs=("env",),
    check=imported("agentr_core.methods.agent_r.stages.splice:check_models"),
)
SPLICE_CONTINUED = replace(
    SPLICE,
    about="Make samples of the judged pairs, whose suffixes the policy plays, and of the good paths.",
    reads=(*SPLICE.reads, "model", "models.teacher", "teacher_iterations", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("actor", "teacher"),
    spreads=True,
)
GOOD_PATHS = replace(
    SPLICE,
    about="Make samples of the good paths.",
    work=imported("agentr_core.methods.agent_r.stages.splice:keep_good_paths"),
)
DEMONSTRATE = Stage(
    name="demonstrate",
    about="Play the expert on the training instances of an iteration.",
    work=imported("agentr_core.stages.demonstrate:demonstrate"),
    reads=("environment", "instances", "eto.expert"),
    needs=("env",),
    check=_check_expert,
    gathers=True,
)
CLONE = replace(
    DEMONSTRATE,
    about="Play the expert on the training instances of an iteration, and make samples of its episodes.",
    work=imported("agentr_core.stages.demonstrate:expert_samples"),
)
THINK = Stage(
    name="think",
    about="Have the editor write a thought before each bare action of the expert.",
    work=imported("agentr_core.stages.think:think"),
    reads=("environment", "model", "models.editor", "eto.expert.thoughts", "errors", "scale"),
    needs=("gpu", "env"),
    roles=("editor",),
    gathers=True,
)
THINK_AND_CLONE = replace(
    THINK,
    about="Have the editor write a thought before each bare action of the expert, and make samples of its episodes.",
    work=imported("agentr_core.stages.think:think_and_clone"),
)
EXPLORE = Stage(
    name="explore",
    about="Let the policy play the training instances of an iteration.",
    work=imported("agentr_core.methods.eto.stages.explore:explore"),
    reads=(
        "environment",
        "model",
        "models.teacher",
        "teacher_iterations",
        "instances",
        "eto.explore",
        "errors",
        "scale",
    ),
    needs=("gpu", "env"),
    roles=("actor", "teacher"),
    spreads=True,
    gathers=True,
    check=imported("agentr_core.methods.eto.stages.explore:check_state"),
)
EXPLORE_AND_KEEP = replace(
    EXPLORE,
    about="Let the policy play the training instances of an iteration, and make samples of its successes.",
    work=imported("agentr_core.methods.eto.stages.explore:explore_and_keep"),
)
PREFER = Stage(
    name="prefer",
    about="Make the preference pairs of an iteration.",
    work=imported("agentr_core.methods.eto.stages.prefer:prefer"),
    reads=("eto.preferences",),
    needs=("env",),
    check=imported("agentr_core.methods.eto.stages.prefer:check_pairs"),
)
DATASET = Stage(
    name="dataset",
    about="Build the dataset of an iteration.",
    work=imported("agentr_core.stages.dataset:dataset"),
    reads=("data",),
    makes="dataset",
)
TRAIN = Stage(
    name="train",
    about="Train on the dataset of an iteration.",
    work=imported("agentr_core.stages.train:train"),
    reads=("training",),
    needs=("gpu",),
    makes="checkpoint",
)
TRAIN_ON_PAIRS = replace(TRAIN, reads=("training", "eto.dpo"))
REINFORCE = Stage(
    name="reinforce",
    about="Sample groups of episodes and train on them, step by step.",
    work=imported("agentr_core.methods.grpo.train:reinforce"),
    check=imported("agentr_core.methods.grpo.rollouts:check_world"),
    reads=("environment", "model", "instances", "grpo", "training", "evaluation.development", "errors"),
    needs=("gpu", "env"),
    roles=("actor",),
    makes="checkpoint",
)
EVALUATE = Stage(
    name="evaluate",
    about="Evaluate the checkpoint of an iteration; 0 is the model the run began with.",
    work=imported("agentr_core.stages.evaluate:evaluate"),
    reads=("model", "evaluation", "scale"),
    needs=("gpu", "env"),
    roles=("actor",),
    spreads=True,
)
EVALUATE_BASE = replace(EVALUATE, reads=("model", "evaluation"))


def splice_stage(config: SpliceConfig) -> Stage:
    """Return the stage that makes samples from judged pairs."""
    return SPLICE_CONTINUED if config.mode == "continued" else SPLICE


def cloning(eto: EtoConfig) -> tuple[Stage, ...]:
    """Return the stages that make samples from the expert's episodes, with thoughts if wanted."""
    return (DEMONSTRATE, THINK_AND_CLONE) if eto.expert.thoughts.enabled else (CLONE,)


def demonstrating(eto: EtoConfig) -> tuple[Stage, ...]:
    """Return the stages that make the expert's episodes, with thoughts where wanted."""
    return (DEMONSTRATE, THINK) if eto.expert.thoughts.enabled else (DEMONSTRATE,)


FUNNEL_OF_TREES = Funnel(
    title="From trees to training rows", stages=imported("agentr_core.methods.agent_r.report:tree_funnel")
)
FUNNEL_OF_EXPERT = Funnel(
    title="From the expert's episodes to training rows",
    stages=imported("agentr_core.stages.report_funnels:expert_funnel"),
)
FUNNEL_OF_GROUPS = Funnel(
    title="From groups to trained episodes", stages=imported("agentr_core.methods.grpo.report:funnel")
)
REVISIONS = ReportPart(sections=imported("agentr_core.methods.agent_r.report:revision_sections"))
REVISION_SAMPLES = ReportPart(
    sections=imported("agentr_core.methods.agent_r.report:sample_sections"), position="samples"
)
STEPS_OF_GROUPS = ReportPart(sections=imported("agentr_core.methods.grpo.report:step_sections"))
PAIRS = ReportPart(sections=imported("agentr_core.methods.eto.report:pair_sections"))
GROUPS_OF_RUN = ReportPart(sections=imported("agentr_core.methods.grpo.report:run_sections"), position="run")
PAIRS_OF_RUN = ReportPart(sections=imported("agentr_core.methods.eto.report:run_sections"), position="run")
AUDIT_OF_RUN = ReportPart(sections=imported("agentr_core.methods.agent_r.report:run_sections"), position="run")
VOICED = imported("agentr_core.methods.agent_r.reflections:voiced")
IN_TREES = imported("agentr_core.methods.agent_r.prospect:acting")
IN_EXPLORATION = imported("agentr_core.methods.eto.prospect:acting")
PROSPECT_OF_TREES = imported("agentr_core.methods.agent_r.prospect:foresee")
PROSPECT_OF_EXPLORATION = imported("agentr_core.methods.eto.prospect:foresee")
