"""With `promote: best` a run goes on from its best checkpoint on a development set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from door import Door

from agentr_core.errors import ConfigError, DataFault
from agentr_core.methods.comparison.report import last_iterations
from agentr_core.methods.faults import parse
from agentr_core.models.scripted import ScriptedModel
from agentr_core.reports.html import render_html
from agentr_core.reports.model_card import summary_table
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, finish_run, start_run
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.report import build_report
from agentr_core.store.codec.ledger import checkpoint_rows, metric_rows
from agentr_core.store.queries.runs import find_checkpoints, last_promotion
from agentr_core.types import Message
from tasks.wiring import load_recipe, quiet_context, run_reference

OPENING, WRONG = (
    next(word for word in map(str, range(99)) if Door().parse(word) == action) for action in ("open", "wrong")
)
DEV = ("evaluation.sets.dev={split: dev}", "evaluation.development=dev")
BEST = ("promote=best", *DEV)


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., RunContext]:
    """Return a maker of workplaces whose models open as many doors as their path says: `opens-3`,
    those with the numbers 0 to 2."""

    def load_model(role: str, path: Path) -> ScriptedModel:
        opens = int(path.name.partition("-")[2] or 0)

        def speak(messages: Sequence[Message], seed: int, number: int) -> str:
            text = next(m.text for m in messages if "Door " in m.text and " of the " in m.text)
            return OPENING if int(text.partition("Door ")[2].partition(" ")[0]) < opens else WRONG

        return ScriptedModel(speak)

    def make_context(*overrides: str) -> RunContext:
        recipe = parse(
            {
                "name": "chosen",
                "workspace": str(tmp_path / "ws"),
                "environment": {"name": "door"},
                "model": {"path": str(tiny_model_dir), "device": "cpu"},
                "evaluation": {"max_steps": 4, "max_new_tokens": 6, "revision_test": {"enabled": False}},
            },
            overrides,
        )
        ctx = quiet_context(run_reference(recipe), recipe)
        return replace(ctx, load_model=load_model, make_environment=lambda _: Door())

    return make_context


async def run_iterations(ctx: RunContext, *opens: int) -> None:
    """Turn iterations whose trainings made models that open so many doors."""
    await start_run(ctx)
    await evaluate(ctx, 0)
    for iteration, number in enumerate(opens, start=1):
        await begin_iteration(ctx, iteration)
        key = f"made-{iteration}"
        weights = {"path": f"opens-{number}", "weights_sha256": key, "parent_id": ctx.policy(iteration).id}
        ctx.store.write(checkpoint_rows(key, **weights, config={}, iteration_id=ctx.iteration_id(iteration)))
        ctx.store.update("iteration", {"iteration_id": ctx.iteration_id(iteration), "checkpoint_out": key})
        await evaluate(ctx, iteration)


@pytest.mark.slow
async def test_each_iteration_goes_on_from_the_best_so_far(make: Callable[..., RunContext]) -> None:
    ctx = make(*BEST)
    await run_iterations(ctx, 0, 4, 2, 4, 5)
    base = ctx.trained_checkpoint(0).id
    rows = ctx.store.rows(
        "select iteration, checkpoint_in, promoted, promoted_iteration, success from iteration join v_promotions "
        "using (run_id, iteration, promoted) order by iteration"
    )
    assert rows == [
        (0, None, base, 0, 0.0),
        (1, base, base, 0, 0.0),
        (2, base, "made-2", 2, pytest.approx(4 / 6)),
        (3, "made-2", "made-2", 2, pytest.approx(4 / 6)),
        (4, "made-2", "made-2", 2, pytest.approx(4 / 6)),
        (5, "made-2", "made-5", 5, pytest.approx(5 / 6)),
    ]
    assert ctx.policy(6).path == Path("opens-5")
    assert ctx.store.query("select * from v_orphans").empty

    sentence = "Promoted: iteration 2, with 66.7% success on the development set dev the best so far."
    report = build_report(ctx, 3)
    assert sentence in render_html(report)
    assert sentence in summary_table([report])


@pytest.mark.slow
async def test_in_a_copied_workspace_its_own_weights_are_read(make: Callable[..., RunContext]) -> None:
    ctx = make(*BEST)
    await run_iterations(ctx, 3)
    await finish_run(ctx, "finished")
    assert ctx.trained_checkpoint(1).path == Path("opens-3")
    folder = ctx.root / "checkpoints/made-1"
    folder.mkdir(parents=True)
    assert [ctx.trained_checkpoint(1).path, ctx.policy(2).path] == [folder, folder]
    promotion, checkpoints = last_promotion(ctx.store, ctx.run_id), find_checkpoints(ctx.store, "made-1")
    assert promotion is not None
    assert [promotion.path, *(checkpoint.path for checkpoint in checkpoints)] == [str(folder), str(folder)]


@pytest.mark.slow
async def test_what_was_promoted_stays(make: Callable[..., RunContext]) -> None:
    ctx = make(*BEST)
    await run_iterations(ctx, 3)
    assert ctx.policy(2).id == "made-1"
    ((key,),) = ctx.store.rows("select evaluation_id from evaluation join iteration using (iteration_id) "
                                 "where name = 'dev' and iteration = 0")  # fmt: skip
    ctx.store.write(metric_rows("evaluation", key, "success", 1.0, n=6))
    await evaluate(ctx, 1)
    assert ctx.policy(2).id == "made-1"


@pytest.mark.slow
async def test_a_run_whose_first_model_is_promoted_goes_on_from_its_own_directory(
    make: Callable[..., RunContext], tmp_path: Path, tiny_model_dir: Path
) -> None:
    ctx = make(*BEST)
    await run_iterations(ctx, 0)
    assert last_iterations(ctx) == (1, 0), "comparisons of whole runs once took the model that was not promoted"
    await finish_run(ctx, "finished")
    link = tmp_path / "moved"
    link.symlink_to(tiny_model_dir)
    await start_run(make(*BEST, f"model.path={link}"))
    assert ctx.policy(2).path == tiny_model_dir
    file = tmp_path / "further.yaml"
    file.write_text(f"name: further\nworkspace: {tmp_path / 'ws'}\nmodel: {{from_run: '{ctx.run_id}'}}\n")
    assert load_recipe(file, []).model.path == str(tiny_model_dir)


@pytest.mark.slow
async def test_without_it_the_last_one_goes_on(make: Callable[..., RunContext]) -> None:
    ctx = make()
    await run_iterations(ctx, 4, 0)
    assert ctx.policy(3).id == "made-2"
    assert last_iterations(ctx) == (2, 2)
    assert ctx.store.rows("select promoted from iteration where promoted is not null") == []
    assert "Promoted" not in render_html(build_report(ctx, 2))


@pytest.mark.slow
async def test_a_policy_that_was_not_evaluated_is_missed(make: Callable[..., RunContext]) -> None:
    ctx = make(*BEST)
    await start_run(ctx)
    with pytest.raises(DataFault, match="has promoted no checkpoint in iteration 0 yet; evaluate it first"):
        ctx.policy(1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["promote=best"], "evaluation.development: promote needs a development set; name one of evaluation.sets"),
        (DEV, "evaluation.development: nothing is chosen by it; set promote to best, or leave it out"),
        (["promote=best", "evaluation.development=test"], "what is chosen by the test set is no longer tested"),
        ([*BEST, "evaluation.sets.dev.models=base"], "every model must play the development set"),
        ([*BEST, "evaluation.sets.dev.split=test"], "'test' is the split that is tested, and no development set"),
        (["promote=best", "method=compare", *DEV], "promote: method compare has no iterations that go on"),
    ],
)
def test_a_wrong_choice_is_told(make: Callable[..., RunContext], overrides: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(*overrides)
    assert said in str(caught.value)
