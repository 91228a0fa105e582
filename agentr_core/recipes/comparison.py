"""The section `compare` of a recipe: arms that learn from one pool of trajectories on an equal
budget.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from agentr_core.fingerprint import later
from agentr_core.recipes.fields import Natural, record

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
    metrics: tuple[Metric, ...] = later(())
    """Further columns of the table of scores, by their names in view `v_metrics`, such as
    `efficiency`; metrics of a further set are written `set:name`, such as
    `renamed:success_clustered`."""
    pool: str = ""
    """The comparison that the run of an arm belongs to, and whose samples it is trained on.
    Comparisons set it; recipes do not.
    """
    samples: str = later("")
    """The run whose samples it is trained on instead, where it judges, pairs or splices unlike the
    comparison. Comparisons set it; recipes do not.
    """
    trees: str = later("")
    """The comparison whose trees such a run makes its samples of. Comparisons set it; recipes do
    not.
    """
