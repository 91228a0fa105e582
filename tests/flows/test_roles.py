"""A judge of its own behind a real server: asked, stored, priced and reported; and what is told
before a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked import run_id_of
from served import Served, refuse, serving

from agentr_core.errors import ConfigError, EndpointError, ModelDirectoryError, UserError
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION, critique
from agentr_core.methods.faults import parse
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.openai.chat import OpenAIModel
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.recipe import Recipe
from agentr_core.reports.markdown import render_markdown
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.report import build_report
from agentr_core.types import Message
from flows.preflight.checks import check
from tasks import wiring

KEY = "sk-roles-51d0"


def verdict(messages: tuple[Message, ...], seed: int, number: int) -> str:
    return f"Reason {number}.\nJudgement: {'Bad' if number else 'Good'}"


@pytest.fixture(scope="module")
def judge() -> Iterator[Served]:
    with serving(lambda: ScriptedModel(verdict, name="wise", context_length=4096)) as server:
        yield server


@pytest.fixture(autouse=True)
def _key(judge: Served, monkeypatch: pytest.MonkeyPatch, door_installed: None) -> None:
    judge.forget()
    monkeypatch.setenv("JUDGE_KEY", KEY)


@pytest.fixture
def recipe(judge: Served, door_model: Path, tmp_path: Path) -> Any:
    """Return a maker of recipes in which the judge is served; options are overrides."""

    def make(*overrides: str) -> Recipe:
        settings = {"model": "wise", "base_url": judge.url, "api_key_env": "JUDGE_KEY", "max_retries": 1}
        settings |= {"connect_seconds": 600.0}
        data = {
            "name": "door",
            "workspace": str(tmp_path / "runs"),
            "environment": {"name": "door"},
            "model": {"path": str(door_model), "device": "cpu", "max_batch": 16},
            "models": {
                "judge": {"backend": "openai", "server": settings, "prices": {"prompt": 2.0, "completion": 10.0}}
            },
            "search": {"dives": 2, "width": 3, "depth": 4, "max_new_tokens": 6},
            "critique": {"max_new_tokens": 20, "votes": 3, "temperature": 1.0},
            "pairs": {"alpha": [0.5]},
            "evaluation": {"max_steps": 3, "max_new_tokens": 20, "revision_test": {"enabled": False}},
        }
        return parse(data, overrides)

    return make


async def test_a_served_judge_judges_is_paid_and_named(recipe: Any, judge: Served) -> None:
    door_recipe: Recipe = recipe()
    check(door_recipe)
    run = wiring.run_reference(door_recipe)
    ctx = wiring.quiet_context(run, door_recipe)
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await collect(ctx, 1)
    assert not judge.bodies, "the actor acts"
    # The judge is out for a moment: no verdict is lost, none is invented.
    judge.faults.append(refuse(503))
    counts = await critique(ctx, 1)

    assert counts["judged"] > 0
    assert set(judge.keys) == {f"Bearer {KEY}"}
    judgements = ctx.store.rows("select verdict, votes from judgement")
    assert set(map(str, judgements)) == {str(("bad", ["good", "bad", "bad"]))}
    assert len(judge.bodies) == len(judgements) + 1
    assert all(JUDGE_INSTRUCTION in body["messages"][0]["content"] for body in judge.bodies)
    assert ctx.store.rows("select count(*) from generation where kind = 'judgement'") == [(3 * len(judgements),)]
    assert not ctx.store.rows("select * from event")

    report = build_report(ctx, 1)
    assert report.roles == {"judge": "wise"}
    assert report.tokens is not None
    (bill,) = report.tokens.usages
    ((prompt, completion),) = ctx.store.rows(
        "select sum(prompt_tokens) // 3, sum(completion_tokens) from generation where kind = 'judgement'"
    )
    assert (bill.role, bill.model, bill.requests) == ("judge", "wise", len(judgements))
    assert (bill.prompt, bill.completion) == (prompt, completion)
    assert bill.cost == pytest.approx((2.0 * prompt + 10.0 * completion) / 1e6)
    text = render_markdown(report)
    assert "Verdicts of wise on the steps of bad paths" in text
    assert "· judge: wise ·" in text

    new_counts = await critique(wiring.quiet_context(run), 1)
    assert new_counts["judged"] == 0
    workspace = Path(door_recipe.workspace)
    assert not [file for file in workspace.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert not ctx.store.rows("select 1 from run where config::varchar like '%' || ? || '%'", KEY)


async def test_a_served_model_is_evaluated_and_not_trained(recipe: Any, judge: Served) -> None:
    url = f"model={{backend: openai, server: {{model: wise, base_url: '{judge.url}', api_key_env: JUDGE_KEY}}}}"
    door_recipe = recipe(url, "models={}")
    with pytest.raises(ConfigError, match="model wise is served, and a run trains its actor; name a model directory"):
        check(door_recipe)
    check(door_recipe, trains=False)
    ctx = wiring.quiet_context(wiring.run_reference(door_recipe), door_recipe)
    await start_run(ctx)
    scores = await evaluate(ctx, 0)
    assert scores["test"]["n"] == 6
    assert len(judge.bodies) >= 6
    report = build_report(ctx, 0)
    assert report.model == "wise"
    assert report.tokens is not None
    assert [(bill.role, bill.cost) for bill in report.tokens.usages] == [("actor", None)]


def test_a_run_is_another_one_with_another_judge(recipe: Any, save_tiny_model: Any, tmp_path: Path) -> None:
    run_id = run_id_of(recipe())
    assert run_id_of(recipe("models.judge.server.model=other")) != run_id
    assert run_id_of(recipe("models.judge.server.base_url=http://elsewhere/v1")) != run_id
    assert run_id_of(recipe("models.judge.prices.prompt=9")) == run_id, "a price is no part of what is asked for"
    path = tmp_path / "judge"
    save_tiny_model(path)
    local_recipe = recipe(f"models.judge={{path: '{path}'}}")
    before = run_id_of(local_recipe)
    assert before != run_id_of(recipe("models={}"))
    save_tiny_model(path, hidden_size=32)
    assert run_id_of(local_recipe) != before, "the same directory with other weights is another judge"


async def test_each_role_has_its_model(recipe: Any, door_model: Path) -> None:
    door_recipe = recipe()
    roles = {
        role: wiring.load_model(door_recipe, role, door_model) for role in ("actor", "judge", "editor", "summariser")
    }
    try:
        assert {role: type(model) for role, model in roles.items()} == {
            "actor": TransformersModel, "judge": OpenAIModel, "editor": TransformersModel,
            "summariser": TransformersModel,
        }  # fmt: skip
        assert roles["editor"].fingerprint == roles["actor"].fingerprint
    finally:
        for model in roles.values():
            await model.close()


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("server.base_url=http://127.0.0.1:9/v1", EndpointError, "cannot be reached .*start the server, or correct"),
        ("server.api_key_env=NO_SUCH_KEY", EndpointError, "environment variable NO_SUCH_KEY with the key"),
        ("server.model=nix", EndpointError, "has no model 'nix'; it has wise"),
        ("server.base_url=wise:80", ConfigError, r"models\.judge\.server\.base_url: .* must look like"),
        ("server.base_url=http://a:b@h/v1", ConfigError, "holds no user, password or query"),
        (f"server.api_key_env={KEY}", ConfigError, "give the name of an environment variable, in capitals"),
        ("server.model=''", ConfigError, r"models\.judge\.server\.model: name the model as its server does"),
        ("server.extra_body={n: 3, top_k: 2}", ConfigError, "extra_body: n is set by other fields"),
        ("path=somewhere", ConfigError, r"models\.judge\.path: a served model has none"),
        ("backend=transformers", ConfigError, r"models\.judge\.path: name the directory"),
        ("server.retry=1", ConfigError, r"models\.judge\.server\.retry: unknown field"),
    ],
)
def test_what_is_wrong_with_a_judge_is_told_before_the_run(
    recipe: Any, override: str, error: type[UserError], said: str
) -> None:
    with pytest.raises(error, match=said) as failure:
        check(recipe(f"models.judge.{override}"))
    assert KEY not in str(failure.value)


def test_a_judge_in_a_directory_is_checked_too(recipe: Any) -> None:
    with pytest.raises(ModelDirectoryError, match="model directory nowhere in "):
        check(recipe("models.judge={path: nowhere}"))


@pytest.mark.parametrize("gib", [0.0, 0.25, 1.0])
def test_a_model_is_loaded_with_the_prefix_cache_of_its_section(gib: float, tiny_model_dir: Path) -> None:
    section = parse({"name": "r", "model": {"path": "m"}}, [f"model.prefix_cache_gib={gib}", "model.device=cpu"]).model
    model = wiring.make_model(section, tiny_model_dir, logs=tiny_model_dir)
    assert isinstance(model, TransformersModel)
    assert model._decoder is not None
    assert model._decoder._prefix_cache.max_bytes == gib * 2**30
    asyncio.run(model.close())
