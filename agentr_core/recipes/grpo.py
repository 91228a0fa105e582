"""The section `grpo` of a recipe: reinforcement learning on groups of episodes.

Names are TRL's where it has them. Section `training` has the learning rate, schedule, warm-up,
weight decay, limit on the gradient's norm, and the processes that share the updates (`launch`).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.data import DataConfig
from agentr_core.recipes.fields import (
    Count,
    EpisodeFields,
    Natural,
    Positive,
    Repeats,
    SamplingFields,
    Unit,
    record,
)
from agentr_core.recipes.training import TRAINER_FIELDS, TrainingConfig

ScaleRewards = Literal["group", "none"]
Credit = Literal["episode", "siblings", "states", "graph"]
StateKey = Literal["world", "observation"]
LossType = Literal["dapo", "grpo", "dr_grpo"]


@record
class BranchingConfig:
    """How the episodes of a group branch where the policy became less sure: `branching.chance`.
    Names and defaults are ARPO's (arXiv 2507.19849).
    """

    initial_rollouts: Count = 8
    """Episodes that a group begins with; the others are branches or, where these are too few, more
    episodes from the start.
    """
    branch_probability: Unit = 0.5
    """Chance of a branch after a reply that is as sure as the first one was."""
    entropy_weight: Annotated[float, Field(ge=0)] = 0.2
    """How much the chance rises with each unit of entropy above that of the first reply."""
    entropy_tokens: Count = 20
    """Tokens at the beginning of a reply over which its entropy is summed."""


@record
class StatesConfig:
    """How the steps of a group that were taken in one state are compared: `credit` `states` and
    `graph`. The advantage of a step is the weighted sum of its episode's and its own.
    """

    key: StateKey = "world"
    """What tells states apart: the world's own `state`, or the last observation, for a world that
    does not tell its state."""
    discount: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """How much less a reward counts for each step that it is away."""
    weight: Positive = 1.0
    """That of a step's own advantage."""
    episode_weight: Annotated[float, Field(ge=0)] = 1.0
    """That of the advantage of its episode."""


@record
class GraphConfig:
    """The graph of the states of an instance (`credit: graph`)."""

    reach: Literal["group", "run"] = "group"
    """Whose steps it has: those of the group, or also those that the run stored before, in its
    searches, earlier iterations and steps. The latter give credit and are not trained again."""


@record
class DistilConfig:
    """How a scorer's log-probabilities of the sampled tokens count in their advantages (on-policy
    distillation, arXiv 2609.37522). The scorer is `models.scorer` or, without one, the model that
    the run begins with.
    """

    weight: Positive = 1.0
    """Of the term that is added to the advantage of each sampled token: the scorer's
    log-probability of it minus that with which it was sampled."""
    advantage: Literal["group", "none"] = "group"
    """What the term is added to: the advantage in the group, or nothing, so that rewards do not
    count. Groups without contrast have this term, too."""
    context: Literal["none", "hindsight", "expert", "records"] = "none"
    """What the scorer reads beside what the policy read: nothing, the policy's whole episode with
    the step that is scored marked in it and its outcome, the expert's episode of the instance, or
    `hindsight` and up to two other episodes of the instance that the run stored, chosen by state.
    It stands at the end of the last turn before the reply, without the thoughts of its replies."""
    key: StateKey = "world"
    """With `context: records`: what tells states apart, as in `grpo.states`."""
    max_difference: Positive | None = None
    """The most that the two log-probabilities may differ by, in nats; None: no limit."""


@record
class GrpoConfig(SamplingFields, EpisodeFields):
    """Group-relative policy optimisation. Sources: arXiv 2402.03300 (GRPO), 2503.14476 (DAPO:
    groups drawn again, token mean, higher clip), 2503.20783 (Dr. GRPO: mean only, constant).
    """

    steps: Count = 100
    """Steps of an iteration: each samples groups, and trains on them."""
    groups: Count = 32
    """Groups of a step, each of one instance."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Episodes of a group, all of one instance, sampled at temperature 1."""
    resample: Natural = 1
    """How often a step draws other instances in place of groups whose rewards are all the same."""
    curriculum: Literal["uniform", "contrast"] = "contrast"
    """How instances are drawn: all with the same chance, or first those whose groups are likely to
    have contrast, judging by their last episodes (Thompson sampling)."""
    memory: Unit = 0.5
    """With `contrast`: how much an instance's earlier episodes count compared with those of its
    last group or search.
    """
    revision_share: Unit = later_field(0.0)
    """Share of a step's groups whose episodes continue from a prefix of a failed episode, one for
    each group, as in the revision test: the policy learns to recover from its own mistakes. The
    prefix is not trained. At least one group begins at the start."""
    revision_cut: Literal["random", "verdict", "value"] = later_field("random")
    """Where such an episode is cut. `verdict` (PivoARL, arXiv 2607.03702): before the first step
    that the judge (`models.judge`, otherwise the policy) calls bad, asked as section `critique`
    says. `value`: before the step at which the mean reward of those episodes of its group falls
    most that share its actions and observations. Where no step is bad, or the mean falls nowhere,
    the cut is drawn; where it is the first step, the group begins at the start."""
    expert_share: Unit = later_field(0.0)
    """Share of a step's groups whose episodes continue from the first steps of the expert's
    episode, in instances that never earned any reward: the end of a long task is learned before its
    beginning (reverse curriculum, arXiv 2402.05808). These steps are not trained. `revision_share`
    counts the other groups."""
    max_steps: Count = 40
    max_new_tokens: Count = 512
    repeats: Repeats = 0
    """As `evaluation.repeats`: an episode ends once a reply has been given this many times in one
    state.
    """
    staleness: Literal[0, 1] = later_field(0)
    """How many steps the weights that sample a step are behind. 1: the next step is sampled, with
    the weights before this step's updates, while this one is trained, so that training fills the
    time in which the last episodes of a step are waited for. The ratio of each token is to the
    weights that sampled it."""
    scale_rewards: ScaleRewards = "group"
    """The divisor of an advantage: the standard deviation of its group, or nothing."""
    credit: Credit = later_field("episode")
    """Which advantage a step has: that of its episode in the group; its own, compared with the
    other actions after the same history, as in a tree of the group's episodes (`siblings`); or
    both, compared with the other steps in the same state of the world: by the discounted reward of
    their episodes (`states`: GiGPO, arXiv 2505.10978), or by how far from a reward they led
    (`graph`: GraphGPO, arXiv 2605.26684)."""
    states: StatesConfig = later_field(default_factory=StatesConfig)
    graph: GraphConfig = later_field(default_factory=GraphConfig)
    loss_type: LossType = "dapo"
    """What the loss is a mean over: all tokens (`dapo`), each episode's tokens and then the
    episodes (`grpo`), or the episodes, each divided by the most tokens that an episode may have
    (`dr_grpo`)."""
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    """Upper limit of the clipped ratio, minus 1; None: as `epsilon`."""
    delta: Positive | None = later_field(None)
    """Upper limit of the ratio of a token with a negative advantage: the dual clip, 3 in ET-Agent's
    code; None: no limit."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the model that an iteration starts from."""
    num_iterations: Count = 1
    """Passes over the episodes of a step."""
    minibatches: Count = 1
    """Optimizer steps of a pass."""
    micro_batch_tokens: Count = 512
    """Tokens of a forward pass, which has at least one packed row. This changes memory and speed,
    and only the rounding of the gradient."""
    learning_rate: Positive | None = later_field(None)
    """This field and the two below replace those of section `training`; None: as there."""
    lr_scheduler_type: str | None = later_field(None)
    warmup_ratio: Unit | None = later_field(None)
    branching: BranchingConfig | None = later_field(None)
    """Whether episodes of a group branch off from others, and how."""
    distil: DistilConfig | None = later_field(None)
    """Whether a scorer tells the tokens' worth, and how."""
    eval_steps: Natural = later_field(0)
    """Steps between two validations, in which the policy plays each instance of
    `evaluation.development` once, greedily. 0: no validation before the iteration's evaluation."""
    save_steps: Count = 10
    """Steps between two checkpoints of an unfinished training; the last one is kept to go on from.
    `training.save_total_limit` keeps more, as models."""


SCHEDULE = ("learning_rate", "lr_scheduler_type", "warmup_ratio")
"""Fields that replace those of section `training`."""


def group_faults(grpo: GrpoConfig) -> list[str]:
    """Return what is wrong with the section `grpo` of a recipe, one sentence each."""
    faults = filter_faults("grpo", grpo)
    if grpo.curriculum == "uniform" and grpo.memory != GrpoConfig().memory:
        faults.append("grpo.memory: a uniform curriculum remembers no episodes; leave it out, or set contrast")
    if grpo.curriculum == "uniform" and grpo.expert_share:
        faults.append("grpo.expert_share: a uniform curriculum does not know what was always lost; set contrast")
    if grpo.expert_share and not grpo.memory:
        faults.append("grpo.memory: at 0 what was won before the last group counts as always lost; raise it")
    faults += [
        f"grpo.{name}: {share:g} of {grpo.groups} groups is less than one; raise it or grpo.groups, or leave it out"
        for name, share in (("revision_share", grpo.revision_share), ("expert_share", grpo.expert_share))
        if share and not min(round(share * grpo.groups), grpo.groups - 1)
    ]
    if grpo.credit not in ("states", "graph") and grpo.states != StatesConfig():
        faults.append(f"grpo.states: credit {grpo.credit} compares no states; set states or graph, or leave it out")
    if grpo.credit != "graph" and grpo.graph != GraphConfig():
        faults.append(f"grpo.graph: credit {grpo.credit} makes no graph; set graph, or leave it out")
    if grpo.revision_cut != "random" and not grpo.revision_share:
        faults.append(
            "grpo.revision_cut: cuts the failed episodes that groups go on from, and grpo.revision_share lets none do "
            "so; raise it, or leave the cut out"
        )
    if grpo.eval_steps > grpo.steps:
        faults.append(f"grpo.eval_steps: an iteration has {grpo.steps} steps, so none is validated; lower it")
    if grpo.delta is not None and grpo.delta <= 1 + (grpo.epsilon_high or grpo.epsilon):
        faults.append("grpo.delta: it must be above 1 + epsilon_high, which limits the ratio already; give 3 or so")
    if grpo.branching is not None and grpo.branching.initial_rollouts >= grpo.num_generations:
        faults.append(
            f"grpo.branching.initial_rollouts: a group has {grpo.num_generations} episodes, so none is left to branch; "
            "begin with fewer"
        )
    if grpo.distil is not None and grpo.distil.context != "records" and grpo.distil.key != "world":
        faults.append(f"grpo.distil.key: context {grpo.distil.context} compares no states; leave it out")
    if grpo.distil is not None and grpo.distil.advantage == "none":
        # Nothing is compared within a group then.
        defaults = GrpoConfig()
        unread = [name for name in ("scale_rewards", "credit") if getattr(grpo, name) != getattr(defaults, name)]
        faults += [f"grpo.{name}: has no use with distil.advantage: none; leave it out" for name in unread]
        if grpo.resample:
            faults.append("grpo.resample: with distil.advantage: none, groups without contrast teach as well; set 0")
    return faults


def online_faults(training: TrainingConfig) -> list[str]:
    """Return one sentence for each setting of section `training` that group RL does not support.
    Its adapters are plain LoRA, added to the weights that samplers get.
    """
    defaults = TrainingConfig()
    reasons = {
        "lora_dropout": "group RL trains what sampled, without dropout",
        "lora_modules_to_save": "group RL trains adapters alone, or all weights",
        "use_dora": "group RL trains plain LoRA adapters",
        "load_in_4bit": "samplers get whole weights after each step",
    }
    return [
        f"training.{name}: {reason}; leave it out"
        for name, reason in reasons.items()
        if getattr(training, name) != getattr(defaults, name)
    ]


def unread_online(training: TrainingConfig) -> list[str]:
    """Return the settings of section `training` that a recipe with supervised training may have and
    that its group RL does not read.
    """
    defaults = TrainingConfig()
    names = [f"training.{name}" for name in TRAINER_FIELDS if getattr(training, name) != getattr(defaults, name)]
    if training.launch is not None and training.launch.num_machines > 1:
        names.append("training.launch.num_machines (it trains on one machine, with its share of the processes)")
    return names


def on_one_machine(training: TrainingConfig) -> TrainingConfig:
    """Return settings with the processes of one machine, for that is where group RL trains."""
    launch = training.launch
    if launch is None or launch.num_machines == 1:
        return training
    local_processes = training.num_processes // launch.num_machines
    single_machine = dataclasses.replace(
        launch, num_processes=local_processes, num_machines=1, main_process_ip="", main_process_port=0
    )
    return dataclasses.replace(training, launch=single_machine)


def grpo_faults(grpo: GrpoConfig, training: TrainingConfig, data: DataConfig) -> list[str]:
    """Return what is wrong with the section `grpo` of a recipe, and which other sections have no
    use with it, one sentence each.
    """
    faults = group_faults(grpo)
    if training.launch is not None and training.launch.num_machines > 1:
        faults.append(
            "training.launch.num_machines: group RL trains on one machine, beside its sampler; leave it out, with "
            "main_process_ip and main_process_port"
        )
    if data != DataConfig():
        faults.append("data: group RL makes no dataset; leave it out")
    return faults


def filter_faults(path: str, section: SamplingFields) -> list[str]:
    """Return one sentence for each setting of a section that changes the distribution of its
    replies, which group RL does not allow; `path` is the section's name.
    """
    defaults = SamplingFields()
    return [
        f"{path}.{name}: group RL needs the probabilities that replies were drawn with, and models tell those before "
        "penalty and filters; leave it out"
        for name in ("repetition_penalty", "top_k", "top_p", "min_p")
        if getattr(section, name) != getattr(defaults, name)
    ]
