"""The section `eto` of a recipe: learning from failures by contrast, and its baselines.

Defaults are the numbers of the ETO paper (arXiv 2403.02502, section 4 and appendix) unless a field
says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.fields import (
    Count,
    DrawingConfig,
    Natural,
    Positive,
    Repeats,
    SamplingFields,
    Temperature,
    TopP,
    Unit,
    record,
    spare_numbers,
)

Phase = Literal["sft", "rft", "dpo"]
"""What an iteration trains on: the expert's episodes, the policy's own successes (see
`EtoConfig.rft`), or preference pairs."""


LossType = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "sft"]


@record
class ThoughtsConfig(DrawingConfig):
    """How the model of role `editor` writes a thought before each action that the expert gave
    without one. Without `models.editor` it is the model that the run begins with.
    """

    enabled: bool = False
    tries: Count = 3
    """How often it is asked for a thought until one can be read from its reply; an episode for
    which this is not enough is rejected.
    """
    max_new_tokens: Count = 256


@record
class ExpertConfig:
    """Where the expert's trajectories come from."""

    file: str = ""
    """A file of conversations, JSON lines or one array, each with the `id` of its instance; an
    instance may have several. Empty: the environment's own expert.
    """
    opening: Natural = 2
    """Number of turns before the problem in a conversation: instruction and acknowledgement (as
    published).
    """
    failed_replay: Literal["error", "reject"] = "error"
    """What to do with a conversation in the file that, when replayed, does not reach the reward it
    claims.
    """
    thoughts: ThoughtsConfig = later_field(ThoughtsConfig())
    """Thoughts for bare actions, as ETO's authors had a large model write them."""


@record
class ExploreConfig(SamplingFields):
    """How the policy plays the training instances."""

    greedy: bool = True
    """One greedy episode of each instance (as published)."""
    samples: Natural = 0
    """Further episodes of each instance, drawn at `temperature`."""
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_steps: Count = 40
    max_new_tokens: Count = 512
    repeats: Repeats = later_field(0)
    """As `evaluation.repeats`: an episode that repeats itself ends early, and lost."""


@record
class PreferencesConfig:
    """The trajectories that are paired with each other. Source: ETO section 3.2, tables 4 and 5."""

    source: Literal["exploration", "trees", "file"] = "exploration"
    trees: str = ""
    """With source `trees`: the run in this workspace whose search trees are used, by its id or the
    beginning of it. A comparison uses its own trees if none is named."""
    file: str = ""
    """With source `file`: a file of ready pairs, JSON lines or one array, with `prompt`, `chosen`
    and `rejected`, each a list of turns.
    """
    against: Literal["expert", "own"] = "expert"
    """`own`: the best of the policy's episodes of an instance against the worst."""
    level: Literal["trajectory", "step", "mixture"] = "trajectory"
    """`step`: the policy goes on from the expert's first steps, and only the replies at the fork
    are compared.
    """
    forced_steps: Natural = 0
    """The most forks of an expert's episode, spread evenly over it; 0 means every step (as
    published).
    """
    margin: Unit = 0.0
    """How much higher the chosen side's reward must be."""
    extra_rounds: Natural = 5
    """How many more steps than the better trajectory a losing side keeps; the rest is cut off."""
    per_instance: Natural = 0
    """The most pairs kept for one instance, widest margin first; 0 means no cap."""


@record
class DpoConfig:
    """Preference training with TRL; the fields have TRL's names. All other settings of section
    `training` apply here, too.

    `beta`, `learning_rate` and `num_train_epochs` have one number per preference iteration; the
    last one counts for all later ones.
    """

    beta: tuple[Positive, ...] = (0.1,)
    learning_rate: tuple[Positive, ...] = (1e-6,)
    num_train_epochs: tuple[Positive, ...] = (3.0,)
    max_tokens: Natural = 0
    """As `training.max_tokens`; the trained tokens of both sides count."""
    per_device_train_batch_size: Count = 4
    """Pairs, not samples."""
    gradient_accumulation_steps: Count = 8
    lr_scheduler_type: str = "cosine"
    warmup_ratio: Unit = 0.03
    loss_type: tuple[LossType, ...] = ("sigmoid",)
    """`[sigmoid, sft]` adds the likelihood of the chosen side (RPO); `sigmoid_norm` and `ipo`
    divide by length.
    """
    loss_weights: tuple[Positive, ...] = ()
    """One for each loss type; all 1 if empty."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The chance that the sides of a pair are swapped; only the loss type `robust` reads it."""
    ld_alpha: Unit | None = None
    """Weight of the tokens of the longer side beyond the shorter one's length (LD-DPO); None is
    plain DPO.
    """


@record
class EtoConfig:
    """Exploration-based trajectory optimisation: what each iteration does, and how."""

    phases: tuple[Phase, ...] = ("sft", "dpo")
    """What each iteration trains on; the last entry counts for all later iterations. Baselines of
    the paper are `[sft]`, and `[sft, rft]` with `rft: with_expert`; `[rft, dpo]` needs no expert.
    """
    rft: Literal["own", "with_expert"] = later_field("own")
    """What an `rft` iteration trains on: the policy's successes alone, starting as
    `training.start_from` says; or the expert's episodes and the policy's successes together,
    starting from the model that the run began with (as published)."""
    expert: ExpertConfig = ExpertConfig()
    explore: ExploreConfig = ExploreConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    dpo: DpoConfig = DpoConfig()


def eto_faults(eto: EtoConfig, *, own_trees: bool = False) -> list[str]:
    """Return what is wrong with the section `eto` of a recipe, one sentence each.

    With `own_trees` the run grows trees itself, so the recipe need not name a run that has them.
    """
    faults = []
    if not eto.phases:
        faults.append("eto.phases: name at least one of sft, rft and dpo")
    if eto.rft == "with_expert" and "rft" not in eto.phases:
        faults.append("eto.rft: has no use without an iteration rft in eto.phases")
    if eto.explore.samples + eto.explore.greedy == 0:
        faults.append("eto.explore: without greedy and samples nothing is explored; set one of them")
    if eto.explore.samples and eto.explore.temperature == 0:
        faults.append("eto.explore.samples: at temperature 0 all samples are the greedy episode; raise the temperature")
    if not eto.expert.thoughts.enabled and eto.expert.thoughts != ThoughtsConfig():
        faults.append("eto.expert.thoughts: has no use unless enabled; enable it, or leave it out")
    numbers = ("beta", "learning_rate", "num_train_epochs")
    faults += [
        f"eto.dpo.{name}: it has more numbers than eto.phases has iterations dpo; leave the last out"
        for name in spare_numbers(eto.dpo, DpoConfig(), numbers, eto.phases, "dpo")
    ]
    preferences = eto.preferences
    for source, name in (("trees", preferences.trees), ("file", preferences.file)):
        if preferences.source == source and not name and not (source == "trees" and own_trees):
            faults.append(f"eto.preferences.{source}: source {source} needs it")
        if preferences.source != source and name:
            faults.append(f"eto.preferences.{source}: has no use with source {preferences.source}")
    if preferences.source != "exploration" and (preferences.against, preferences.level) != ("expert", "trajectory"):
        faults.append(f"eto.preferences: against and level have no use with source {preferences.source}")
    is_file, level = preferences.source == "file", preferences.level
    # By field, the setting with which nothing reads it.
    unread_with = {
        "margin": "source file" if is_file else "",
        "extra_rounds": "source file" if is_file else "level step" if level == "step" else "",
        "forced_steps": "level trajectory" if level == "trajectory" else "",
    }
    faults += [
        f"eto.preferences.{name}: has no use with {setting}; leave it out"
        for name, setting in unread_with.items()
        if setting and getattr(preferences, name) != getattr(PreferencesConfig(), name)
    ]
    if preferences.against == "own" and preferences.level != "trajectory":
        faults.append(
            f"eto.preferences.level: {preferences.level} follows the expert's steps, so against must be expert"
        )
    if preferences.against == "own" and eto.explore.samples + eto.explore.greedy < 2:
        faults.append("eto.explore.samples: pairs of the policy's own episodes need at least two of each instance")
    faults += [
        f"eto.dpo.{name}: give at least one"
        for name in ("beta", "learning_rate", "num_train_epochs", "loss_type")
        if not getattr(eto.dpo, name)
    ]
    if eto.dpo.label_smoothing and "robust" not in eto.dpo.loss_type:
        faults.append(
            "eto.dpo.label_smoothing: only loss type robust reads it; name robust in eto.dpo.loss_type, or leave it out"
        )
    if eto.dpo.loss_weights and len(eto.dpo.loss_weights) != len(eto.dpo.loss_type):
        faults.append(
            f"eto.dpo.loss_weights: {len(eto.dpo.loss_weights)} weights for {len(eto.dpo.loss_type)} loss types"
        )
    return faults
