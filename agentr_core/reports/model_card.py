"""The card of a published checkpoint: what it is, how it was made, and how well it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from agentr_core.reports import wording
from agentr_core.reports.records import Estimate
from agentr_core.reports.score_tables import gain


@dataclass(frozen=True, slots=True, kw_only=True)
class CardScore:
    """Success of a checkpoint on one evaluation set, and its gain over the base on the same
    episodes.
    """

    name: str
    split: str
    success: Estimate
    gain: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The contents of a card.

    `parent` and `licence` are as the user gives them, empty if not given. `recipe` is the resolved
    recipe of the run, and `ancestry` the lines of `agentr trace`.
    """

    name: str
    method: str
    iteration: int
    worlds: tuple[str, ...]
    parent: str
    licence: str
    weights_sha256: str
    trained_tokens: int
    steps: int
    dataset_hash: str
    scores: tuple[CardScore, ...]
    recipe: Mapping[str, Any]
    arm_of: str
    """The run of the comparison whose arm it is; empty if it is none."""
    versions: Mapping[str, str]
    ancestry: tuple[str, ...]


def render_card(card: Card) -> str:
    """Return the card as the README.md of a model directory: YAML that the hub reads, then text."""
    parent = f"`{card.parent}`" if card.parent else "a model that its maker did not name"
    return f"""---
{_front_matter(card)}
---

# {card.name}

A language agent for {", ".join(card.worlds)}, made from {parent} by iteration {card.iteration} of
method {card.method}.

## Scores on held-out instances

{_scores(card.scores)}

Success is the environment's own flag, with its 95% interval (Wilson's, or clustered where several
episodes are of one instance); the gain is over the model that the run began with, paired by
instance.

## Training

| | |
|---|---|
{_facts(card)}

<details><summary>The resolved recipe</summary>
{_ARM.format(card.arm_of) if card.arm_of else ""}
```yaml
{yaml.safe_dump(dict(card.recipe), sort_keys=False, allow_unicode=True).rstrip()}
```

</details>

## Lineage

```text
{chr(10).join(card.ancestry)}
```
"""


_ARM = """
It is that of an arm of comparison {}: `agentr compare` makes it of the recipe of the comparison,
and it does not load by itself.
"""


def _front_matter(card: Card) -> str:
    data = ModelCardData(
        base_model=card.parent or None,
        license=card.licence or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["agentr", card.method, *card.worlds],
    )
    return str(data.to_yaml())


def _scores(scores: tuple[CardScore, ...]) -> str:
    if not scores:
        return "It was not evaluated."
    rows = [
        f"| {score.name} ({score.split}) | {wording.measured(score.success)} | {gain(score.gain)} | {score.success.n} |"
        for score in scores
    ]
    return "\n".join(["| set | success % | gain over base | episodes |", "|---|---|---|---|", *rows])


def _facts(card: Card) -> str:
    facts = {
        "trained tokens": f"{card.trained_tokens:,}",
        "optimizer steps": f"{card.steps:,}",
        "dataset hash": card.dataset_hash or "none: it was trained on episodes of its own",
        "SHA-256 of the weights": card.weights_sha256,
        **card.versions,
    }
    return "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
