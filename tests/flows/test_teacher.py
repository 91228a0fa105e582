"""A teacher collects and another model is trained: over HTTP as from a directory, mask for mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from asked import run_id_of
from served import Served, serving

from agentr_core.errors import ConfigError
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.splice import keep_good_paths
from agentr_core.methods.faults import parse
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.samples.rendering import load_tokenizer
from agentr_core.stages.dataset import dataset, dataset_file
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.report import build_report
from agentr_core.stages.train import train
from agentr_core.store.queries.listings import ancestry
from flows.preflight.checks import check
from tasks import wiring

TEACHER = Path(__file__).parents[2] / "data" / "models" / "textcraft-tiny"


@pytest.fixture(scope="module")
def teacher() -> Iterator[Served]:
    with serving(lambda: TransformersModel.load(TEACHER, device="cpu")) as server:
        yield server


@pytest.fixture(scope="module")
def student(save_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with another tokenizer than the teacher's."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "student", context=4096)


@pytest.fixture
def recipe(teacher: Served, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    monkeypatch.setenv("TEACHER_KEY", "none")
    teacher.forget()
    settings = {"model": TEACHER.name, "base_url": teacher.url, "api_key_env": "TEACHER_KEY", "connect_seconds": 600.0}

    def make(*overrides: str, taught: bool = True, eto: bool = False) -> Recipe:
        data: dict[str, Any] = {
            "name": "distilled",
            "workspace": str(tmp_path / "runs"),
            "iterations": 2,
            "model": {"path": str(student), "device": "cpu", "max_batch": 16},
            "models": {"teacher": {"backend": "openai", "server": settings}} if taught else {},
            "instances": {"train_limit": 2, "test_limit": 1},
            "search": {"dives": 2, "width": 2, "depth": 6, "max_new_tokens": 48},
            "pairs": {"alpha": [0.5]},
            "data": {"use": "good", "max_length": 0},
            "training": {"per_device_train_batch_size": 4},
            "evaluation": {"max_steps": 2, "max_new_tokens": 8, "revision_test": {"enabled": False}},
        }
        for section in ("search", "pairs") if eto else ():
            del data[section]
        if eto:
            data["data"]["use"] = "both"
        return parse(data, overrides)

    return make


async def collect_run(made: Recipe) -> RunContext:
    ctx = wiring.quiet_context(wiring.run_reference(made), made)
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await collect(ctx, 1)
    await keep_good_paths(ctx, 1)
    await dataset(ctx, 1)
    return ctx


def rows(ctx: RunContext) -> list[dict[str, list[int]]]:
    table = pq.read_table(dataset_file(ctx, 1)).select(["input_ids", "labels"])
    return sorted(table.to_pylist(), key=str)


def trained_texts(ctx: RunContext, tokenizer: Any) -> list[str]:
    return [tokenizer.decode([label for label in row["labels"] if label != IGNORE_INDEX]) for row in rows(ctx)]


async def test_a_served_teacher_gives_the_masks_of_the_same_model_in_a_directory(
    recipe: Callable[..., Recipe], teacher: Served, student: Path
) -> None:
    """And the student is trained on them and evaluated, and the store says who collected."""
    teacher_recipe = recipe("teacher_iterations=1", "models.teacher.prices.completion=1")
    check(teacher_recipe)
    ctx = await collect_run(teacher_recipe)
    assert teacher.bodies
    assert not any("return_token_ids" in body for body in teacher.bodies)
    local_ctx = await collect_run(recipe("teacher_iterations=1", f"models.teacher={{path: '{TEACHER}', device: cpu}}"))
    assert rows(ctx) == rows(local_ctx) != []
    tokenizer = load_tokenizer(student)
    replies = {row for (row,) in ctx.store.rows("select distinct reply from v_nodes where reply <> ''")}
    for text in trained_texts(ctx, tokenizer):
        parts = [part for part in text.split("<|im_end|>") if part]
        assert parts
        assert replies.issuperset(parts)
    await tell_of(ctx, teacher, student)


async def tell_of(ctx: RunContext, teacher: Served, student: Path) -> None:
    """Train the student and evaluate it; fail unless store and report tell of both models."""
    num_requests = len(teacher.bodies)
    ((path, policy),) = ctx.store.rows(
        "select c.path, p.path from iteration i join checkpoint c on c.checkpoint_id = i.collected_by "
        "join checkpoint p on p.checkpoint_id = i.checkpoint_in where i.iteration = 1 and i.run_id = ?",
        ctx.run_id,
    )
    assert (path, policy) == (TEACHER.name, str(student))
    result = await train(ctx, 1)
    await evaluate(ctx, 1)
    assert len(teacher.bodies) == num_requests, "the trained model is the one that is evaluated"
    lines = ancestry(ctx.store, result["checkpoint"], "checkpoint")
    assert [line.facts["model"] for line in lines if line.relation == "collected by"] == [TEACHER.name]
    assert {line.facts["model"] for line in lines if line.relation == "grown by"} <= {TEACHER.name}
    report = build_report(ctx, 1)
    assert report.tokens is not None
    (bill,) = report.tokens.usages
    assert (bill.role, bill.model, bill.requests) == ("teacher", TEACHER.name, num_requests)
    assert bill.cost is not None
    assert not ctx.store.rows("select * from v_orphans")
    assert ctx.collector(2) == ctx.policy(2), "from the second iteration on the trained model collects"


@pytest.mark.long
async def test_a_student_with_the_teachers_tokenizer_learns_what_it_would_have_sampled_itself(
    recipe: Callable[..., Recipe],
) -> None:
    override = f"model.path={TEACHER}"
    teacher_ctx, actor_ctx = await collect_run(recipe(override)), await collect_run(recipe(override, taught=False))
    assert rows(teacher_ctx) == rows(actor_ctx) != []


async def explore_run(made: Recipe) -> RunContext:
    """Do what an iteration of ETO does up to its dataset: exploration, and the samples or pairs of
    it.
    """
    ctx = wiring.quiet_context(wiring.run_reference(made), made)
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    for stage in ctx.plan(1).stages[:-2]:
        await stage.work(ctx, 1)
    return ctx


@pytest.mark.long
async def test_a_served_teacher_explores_for_eto_and_the_masks_are_those_of_one_in_a_directory(
    recipe: Callable[..., Recipe], teacher: Served, student: Path
) -> None:
    """Its episodes become samples of rejection sampling. The test of Agent-R has the main of it."""
    explore = "{greedy: true, samples: 1, max_steps: 6, max_new_tokens: 48}"
    plain = ("method=eto", "eto.phases=[rft]", f"eto.explore={explore}")
    teacher_recipe = recipe(*plain, eto=True)
    check(teacher_recipe)
    ctx = await explore_run(teacher_recipe)
    assert [stage.name for stage in ctx.plan(1).stages] == ["explore", "dataset", "train", "evaluate"]
    assert ctx.collector(1).role == "teacher"
    num_requests = len(teacher.bodies)
    assert num_requests > 0
    local_ctx = await explore_run(recipe(*plain, f"models.teacher={{path: '{TEACHER}', device: cpu}}", eto=True))
    assert len(teacher.bodies) == num_requests
    assert rows(ctx) == rows(local_ctx) != []
    replies = {row for (row,) in ctx.store.rows("select distinct reply from v_steps where source = 'rollout'")}
    for text in trained_texts(ctx, load_tokenizer(student)):
        parts = [part for part in text.split("<|im_end|>") if part]
        assert parts
        assert replies.issuperset(parts)


def test_a_teacher_is_part_of_a_runs_identity(recipe: Callable[..., Recipe]) -> None:
    ids = [
        run_id_of(variant)
        for variant in (recipe(), recipe("teacher_iterations=1"), recipe("models.teacher.server.model=other"))
    ]
    assert len({*ids, run_id_of(recipe(taught=False))}) == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["agent_r.phases=[rl]", "training={}", "data={}"],
            r"models\.teacher: reinforcement learning trains on what the trained model samples",
        ),
        (["data.use=expert"], r"models\.teacher: no stage of method agent-r with these settings collects"),
        (["models={}", "teacher_iterations=1"], r"teacher_iterations: name models\.teacher"),
        (["models.teacher.server.token_ids=true"], r"models\.teacher\.server\.token_ids: the trained model has a"),
        (["search.top_k=3"], r"search\.top_k: .* models\.teacher\.server\.sampling_fields"),
    ],
)
def test_where_a_teacher_cannot_help_a_recipe_says_so(
    recipe: Callable[..., Recipe], overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(*overrides)


async def test_a_teacher_that_is_not_there_is_told_before_the_run(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(Exception, match="has no model 'nix'; it has textcraft-tiny"):
        check(recipe("models.teacher.server.model=nix"))
