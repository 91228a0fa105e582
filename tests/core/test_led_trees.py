"""Trees that go on after the expert's first steps: their search, samples and report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from asked import run_id_of
from door import Door
from splicing_runs import spliced

from agentr_core.errors import ConfigError
from agentr_core.methods.agent_r.collect import check_world
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION
from agentr_core.methods.agent_r.report import tree_funnel
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.database import Store
from agentr_core.types import Message

DOOR = Door(knows=True)
HINT, OPEN = DOOR.expert(DOOR.instances("train")[0]) or ("", "")
WRONG = next(word for word in map(str, range(99)) if DOOR.parse(word) == "wrong" and word != HINT)


def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
    """Says the right word only after the expert's first one."""
    if JUDGE_INSTRUCTION in messages[-1].text:
        return "Reason: so it is.\nJudgement: Bad"
    return OPEN if any(message.text == HINT for message in messages) else WRONG


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Callable[..., RunContext]:
    def made(*overrides: str, knows: bool = True) -> RunContext:
        recipe = parse(
            {
                "name": "door",
                "environment": {"name": "door"},
                "model": {"path": str(tiny_model_dir)},
                "search": {"dives": 3, "width": 2, "depth": 5, "give_up": 1, "expert_start": True},
                "instances": {"train_limit": 0},
                "data": {"max_length": 4096},
            },
            overrides,
        )
        return RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / "runs",
            store=open_store(tmp_path / "runs" / "store.duckdb"),
            make_environment=lambda _: Door(knows=knows),
            load_model=lambda role, path: ScriptedModel(speak),
            progress=lambda done, total, note: None,
        )

    return made


@pytest.mark.slow
async def test_samples_and_report_tell_of_the_experts_steps(make: Callable[..., RunContext]) -> None:
    ctx = make()
    counts = await spliced(ctx)
    assert counts["good"] == 6
    assert counts["revision"] > 0
    of_expert = ctx.store.rows("select count(*), count(asked) from node where duplicates = 0 and node_index > 0")
    assert of_expert == [(6, 0)]
    samples = load_samples(ctx.store, iteration_id=ctx.iteration_id(1)).values()
    for sample in samples:
        if str(sample.kind) == "good":
            assert [message.text for message in sample.messages if message.train] == [HINT, OPEN]
    funnel = {stage.name: stage.count for stage in tree_funnel(ctx, 1)}
    assert (funnel["trees"], funnel["after the expert's steps"]) == (6, 6)
    assert ctx.store.rows("select * from v_orphans") == []


@pytest.mark.slow
async def test_a_search_without_the_setting_earns_nothing_and_says_nothing_of_an_expert(
    make: Callable[..., RunContext],
) -> None:
    ctx = make("search.expert_start=false")
    await spliced(ctx)
    assert ctx.store.rows("select * from sample") == []
    assert "after the expert's steps" not in {stage.name for stage in tree_funnel(ctx, 1)}


def test_a_world_without_an_expert_is_refused(make: Callable[..., RunContext]) -> None:
    recipe = make().recipe
    check_world(recipe, DOOR, DOOR.instances("train"))
    with pytest.raises(ConfigError, match=r"^search.expert_start: environment door has no expert; leave it out$"):
        check_world(recipe, Door(), DOOR.instances("train"))
    check_world(make("search.expert_start=false").recipe, Door(), DOOR.instances("train"))


def test_the_plan_says_when_the_expert_leads(make: Callable[..., RunContext]) -> None:
    def told(*overrides: str) -> list[str]:
        recipe = make(*overrides).recipe
        return [line for line in method_of(recipe).describe(recipe, 6, 6) if "the expert's first steps" in line]

    assert told() == ["a tree that earns nothing in its first dive goes on after the expert's first steps"]
    assert told("search.give_up=2") == ["a tree that earns nothing in 2 dives goes on after the expert's first steps"]
    assert told("search.expert_start=false") == []
