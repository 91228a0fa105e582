"""The card of a published checkpoint."""

from dataclasses import replace

from agentr_core.reports.model_card import Card, render_card

CARD = Card(
    name="door",
    method="compare",
    iteration=1,
    worlds=("door",),
    parent="",
    licence="",
    weights_sha256="aa",
    trained_tokens=1,
    num_steps=1,
    dataset_hash="bb",
    scores=(),
    recipe={"name": "toy.both", "compare": {"pool": "cccc"}},
    comparison_run_id="cccc",
    versions={},
    ancestry=(),
)


def test_the_recipe_of_an_arm_says_that_it_does_not_load_alone() -> None:
    before, _, after = render_card(CARD).partition("```yaml")
    assert "an arm of comparison cccc" in before
    assert "does not load by itself" in before
    assert after.startswith("\nname: toy.both\n")
    assert "comparison" not in render_card(replace(CARD, comparison_run_id=""))
