"""The section of a recipe that says what a training set is made of."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.fields import CutReplies, Natural, record

# The section `compare` of a recipe: arms that learn from one pool of trajectories on an equal
# budget.

Use = Literal["revision", "good", "both", "both+expert", "expert", "successes", "rft", "preferences"]
"""What a dataset is made of. The last three are for the arms of a comparison: `successes` are the
successful explored episodes, `rft` the expert's episodes and these successes together (as
published), `preferences` the pairs that section `eto` asks for.
"""

Metric = Annotated[str, Field(pattern=r"^\S+$")]
ArmName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


@record
class CompareConfig:
    """The ways of learning that are compared. Each starts from the recipe's model and is evaluated
    on the same instances. The arms of method `compare` are trained on `training.max_tokens` trained
    tokens or for `training.max_seconds`."""

    arms: dict[ArmName, tuple[str, ...]] = field(default_factory=dict)
    """What each arm changes, as `section.field=value`: fields of `data`, `training` and `eto.dpo`;
    where it is trained on samples of trees, also of `critique`, `pairs` and `splice`, with which
    the same trees make samples of its own. Its `data.use` says what it is trained on. With method
    `compare-runs` an arm is a whole run: it names its `method` and may change any field that
    collects or trains."""
    seeds: tuple[Natural, ...] = (0, 1, 2)
    """Each arm is trained once with each of these seeds; the pool is collected with the recipe's
    own seed, a whole run with that of its arm.
    """
    metrics: tuple[Metric, ...] = later_field(())
    """Further columns of the table of scores, by their names in view `v_metrics`, such as
    `efficiency`; metrics of a further set are written `set:name`, such as
    `renamed:success_clustered`."""
    pool: str = ""
    """The comparison that the run of an arm belongs to, and whose samples it is trained on.
    Comparisons set it; recipes do not.
    """
    samples: str = later_field("")
    """The run whose samples it is trained on instead, where it judges, pairs or splices unlike the
    comparison. Comparisons set it; recipes do not.
    """
    trees: str = later_field("")
    """The comparison whose trees such a run makes its samples of. Comparisons set it; recipes do
    not.
    """


@record
class GeneralDataConfig:
    """General chat data mixed in. `share` is the share of training samples that are general (0.8 in
    the paper). A run goes on only with the contents of `file` with which it began to train.
    """

    file: str = ""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0


@record
class DataConfig:
    """The make-up of an iteration's training set."""

    use: Use = "both"
    """`both` are revisions and good paths. `expert` is behaviour cloning: the environment's expert
    on the training instances, without a search. `both+expert` are all of these: searches find few
    good paths for the hardest instances, and the expert never shows how to recover.
    """
    suffixes: Literal["own", "exchanged"] = later_field("own")
    """`exchanged`: each revision goes on with the good suffix of another instance. This is the
    control in a comparison, and should bring no gain."""
    scoring: str = later_field("")
    """The id of the scoring by which episodes and paths of trees are paired and kept, as `agentr
    regrade` prints it; empty: the rewards that they were played with. All of them must have a score
    of it. Trees stay as they grew, by the rewards of then. Group RL, pairs of a file, and splices
    that are played go by the world's rewards, so they take none."""
    good_per_tree: Natural = 0
    """The most good trajectories taken from one tree, or in an iteration `rft` of ETO from one
    explored instance, shortest first; 0 means no cap (as published). Without one, rejection
    fine-tuning trains mostly on what the policy can do already: easy instances are won most often.
    """
    replay: bool = False
    """Whether the samples of earlier iterations are trained on again."""
    max_length: Natural = 8192
    """Samples with more tokens are rejected; never cut."""
    windowed: Literal["stretches", "reject"] = later_field("stretches")
    """What becomes of a path that was read through a window (`context: window`): a sample for each
    stretch between two drops, with the text that was read as its prompt; or no sample, with the
    reason `windowed`. The sides of a preference pair share one prompt, so they are always rejected.
    """
    cut_replies: CutReplies = later_field("keep")
    """What becomes of samples and pairs with a trained reply that was cut off at its token limit:
    kept, without a trained end of turn, or rejected. A limit that cuts off many replies is too low;
    the report shows their share."""
    duplicates: Literal["drop", "keep"] = later_field("drop")
    """What becomes of a sample whose conversation another one has, too: texts, roles and train
    flags are the same. `keep` (as published): a sample counts as often as it was made. Bad paths
    that part after their first error make equal revisions with one good path, if their reflections
    are equal, too; they are a quarter of the authors' records."""
    general: GeneralDataConfig = GeneralDataConfig()


def tree_faults(data: DataConfig, *, successes: bool = False) -> list[str]:
    """Return a sentence for each field that is set but has no use where no trees are grown; with
    `successes`, a policy's own ones are trained on, of which an instance may have many.
    """
    defaults = DataConfig()
    names = ("use", "suffixes") if successes else ("use", "suffixes", "good_per_tree")
    return [
        f"data.{name}: belongs to method agent-r; leave it out"
        for name in names
        if getattr(data, name) != getattr(defaults, name)
    ]
