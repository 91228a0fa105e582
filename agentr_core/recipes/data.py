"""The section of a recipe that says what a training set is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later
from agentr_core.recipes.comparison import Use
from agentr_core.recipes.fields import CutReplies, Natural, record


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
    suffixes: Literal["own", "exchanged"] = later("own")
    """`exchanged`: each revision goes on with the good suffix of another instance. This is the
    control in a comparison, and should bring no gain."""
    good_per_tree: Natural = 0
    """The most good trajectories taken from one tree (in a comparison also from one explored
    instance), shortest first; 0 means no cap (as published)."""
    replay: bool = False
    """Whether the samples of earlier iterations are trained on again."""
    max_length: Natural = 8192
    """Samples with more tokens are rejected; never cut."""
    windowed: Literal["stretches", "reject"] = later("stretches")
    """What becomes of a path that was read through a window (`context: window`): a sample for each
    stretch between two drops, with the text that was read as its prompt; or no sample, with the
    reason `windowed`. The sides of a preference pair share one prompt, so they are always rejected.
    """
    cut_replies: CutReplies = later("keep")
    """What becomes of samples and pairs with a trained reply that was cut off at its token limit:
    kept, without a trained end of turn, or rejected. A limit that cuts off many replies is too low;
    the report shows their share."""
    duplicates: Literal["drop", "keep"] = later("drop")
    """What becomes of a sample whose conversation another one has, too: texts, roles and train
    flags are the same. `keep` (as published): a sample counts as often as it was made. Bad paths
    that part after their first error make equal revisions with one good path, if their reflections
    are equal, too; they are a quarter of the authors' records."""
    general: GeneralDataConfig = GeneralDataConfig()


def tree_faults(data: DataConfig) -> list[str]:
    """Return a sentence for each field that is set but has no use where no trees are grown."""
    plain = DataConfig()
    return [
        f"data.{name}: belongs to method agent-r; leave it out"
        for name in ("use", "suffixes", "good_per_tree")
        if getattr(data, name) != getattr(plain, name)
    ]
