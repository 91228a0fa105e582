"""The stages of a run whose model reads through a window: what is kept of it in the store, and what
is trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from asked import run_id_of
from door import Door
from splicing_runs import spliced

from agentr_core.episodes.transcript import summary_positions
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION
from agentr_core.methods.eto.preferences import explore_and_keep
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.samples.dataset import check_flags
from agentr_core.samples.rendering import load_renderer
from agentr_core.stages.dataset import dataset
from agentr_core.stages.evaluate import evaluate
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.codec.trajectories import load_trajectories
from agentr_core.store.database import Store
from agentr_core.system import LOOPBACK
from agentr_core.types import Message
from agentr_core.viewer.server import app
from flows.commands.lineage import traced

pytestmark = pytest.mark.slow
CONTEXT, ROOM = 32, 2
"""Words: room for three exchanges less one, and for a reply of two words."""
TOKENS = 150
"""What the policy's own tokenizer may need for a prompt and a reply: so much less than a whole
splice takes.
"""

Make = Callable[..., RunContext]


def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
    if JUDGE_INSTRUCTION in messages[-1].text:
        return "Reason: so it is.\nJudgement: Bad"
    return f"word {fingerprint(seed, number)}"


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Make:
    def made(*overrides: str, method: str = "agent-r", context: int = CONTEXT) -> RunContext:
        plain: dict[str, Any] = {
            "name": "door",
            "method": method,
            "environment": {"name": "door"},
            "model": {"path": str(tiny_model_dir), "context_length": TOKENS},
            "context": "window",
            "instances": {"train_limit": 0},
            "data": {"max_length": 4096},
            "evaluation": {"max_steps": 5, "max_new_tokens": ROOM, "revision_test": {"enabled": False}},
        }
        recipe = parse(plain, overrides)

        def make_environment(_: str) -> Door:
            door = Door()
            door.summary_prompt = recipe.summary.prompt
            return door

        return RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / "runs",
            store=open_store(tmp_path / "runs" / "store.duckdb"),
            make_environment=make_environment,
            load_model=lambda role, path: ScriptedModel(speak, context_length=context if role == "actor" else 9999),
            progress=lambda done, total, note: None,
        )

    return made


SEARCH = "search={dives: 3, width: 3, depth: 5, max_new_tokens: 2}"


async def test_paths_and_splices_become_stretches_that_fit(make: Make) -> None:
    ctx = make(SEARCH, "splice.mode=blind", "critique.unparsable=bad")
    counts = await spliced(ctx)
    assert ctx.store.rows("select count(*) from node where stop = 'context_limit'") == [(0,)]
    assert ctx.store.rows("select distinct step.dropped from node where depth > 0 order by 1") == [(0,), (1,)]

    renderer = load_renderer(ctx.policy(1).path)
    samples = load_samples(ctx.store, iteration_id=ctx.iteration_id(1)).values()
    stretches = [sample for sample in samples if "stretch" in sample.provenance.extra]
    assert {str(sample.kind) for sample in stretches} == {"revision", "good"}
    for sample in samples:
        check_flags(sample)
        if str(sample.kind) != "revision":
            continue
        for position, message in enumerate(sample.messages):
            if message.train and position > 4:
                assert len(renderer.render_prompt(sample.messages[:position])) + ROOM <= TOKENS
    assert counts["revision"] == sum(str(sample.kind) == "revision" for sample in samples)
    assert (await dataset(ctx, 1))["rows"] > 0
    assert ctx.store.rows("select * from v_orphans") == []


async def test_a_template_that_prints_the_date_is_spliced_with_that_of_the_run(
    make: Make, tmp_path: Path, tiny_model_dir: Path
) -> None:
    model_dir = tmp_path / "dated"
    shutil.copytree(tiny_model_dir, model_dir)
    template = model_dir / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    ctx = make(SEARCH, "splice.mode=blind", "critique.unparsable=bad", f"model.path={model_dir}")
    assert (await spliced(ctx))["revision"] > 0


async def test_windowed_paths_are_turned_away_with_their_reason(make: Make) -> None:
    ctx = make(SEARCH, "splice.mode=blind", "critique.unparsable=bad", "data.windowed=reject")
    await spliced(ctx)
    samples = load_samples(ctx.store, iteration_id=ctx.iteration_id(1)).values()
    assert not any("stretch" in sample.provenance.extra for sample in samples)
    ((count,),) = ctx.store.rows("select count(*) from rejection where stage = 'splice' and reason = 'windowed'")
    assert count > 0


@pytest.mark.parametrize("way", ["stretches", "reject"])
async def test_explored_episodes_are_read_through_the_window_too(make: Make, way: str) -> None:
    overrides = ("eto.phases=[rft]", "eto.explore={samples: 12, max_steps: 5, max_new_tokens: 2}")
    ctx = make(*overrides, f"data.windowed={way}", method="eto")
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    counts = await explore_and_keep(ctx, 1)
    samples = load_samples(ctx.store, iteration_id=ctx.iteration_id(1)).values()
    ((num_rejected,),) = ctx.store.rows("select count(*) from rejection where reason = 'windowed'")
    ((num_windowed,),) = ctx.store.rows(
        "select count(distinct trajectory_id) from step join trajectory t using (trajectory_id) "
        "where dropped > 0 and t.success"
    )
    assert num_windowed > 0
    if way == "reject":
        assert (num_rejected, len(samples)) == (num_windowed, counts["successes"] - num_windowed)
    else:
        assert (num_rejected, len(samples)) == (0, counts["successes"] + num_windowed)


async def test_an_evaluation_goes_on_where_it_would_have_ended(make: Make) -> None:
    stops = "select count(*) from trajectory where stop = 'context_limit'"
    window = make()
    await start_run(window)
    await evaluate(window, 0)
    assert window.store.rows(stops) == [(0,)]
    stop = make("context=stop", "evaluation.max_new_tokens=3")
    await start_run(stop)
    await evaluate(stop, 0)
    assert stop.store.rows(stops)[0][0] > 0


async def test_explored_episodes_are_summed_up_stored_shown_and_played_again_alike(make: Make) -> None:
    ctx = make(
        "context=summary",
        "summary={prompt: Sum up., max_new_tokens: 4}",
        "eto.phases=[rft]",
        "eto.explore={samples: 12, max_steps: 5, max_new_tokens: 2}",
        method="eto",
        context=42,
    )
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await explore_and_keep(ctx, 1)

    def state() -> tuple[object, ...]:
        items = sorted(load_trajectories(ctx.store).items())
        return items, sorted(load_samples(ctx.store, iteration_id=ctx.iteration_id(1)))

    before = state()
    trajectories = {
        key: trajectory
        for key, trajectory in load_trajectories(ctx.store).items()
        if summary_positions(trajectory.steps)
    }
    wins = {key for key, trajectory in trajectories.items() if trajectory.success}
    assert 0 < len(wins) < len(trajectories)
    ((rows, cut),) = ctx.store.rows(
        "select count(*), count_if(completion_tokens > 4) from v_steps where summary_of is not null"
    )
    assert (rows, cut) == (sum(len(summary_positions(trajectory.steps)) for trajectory in trajectories.values()), 0)
    samples = load_samples(ctx.store, iteration_id=ctx.iteration_id(1)).values()
    parts = [sample for sample in samples if sample.provenance.extra["trajectory"] in wins]
    assert len(parts) == sum(1 + len(summary_positions(trajectories[key].steps)) for key in wins)
    assert ctx.store.rows("select * from v_orphans") == []

    # Episodes that were under way when a run was killed are played from their beginning.
    with ctx.store.transaction() as con:
        con.execute("delete from sample")
        con.execute("delete from trajectory where trajectory_id < '8'")
    assert state() != before
    await explore_and_keep(ctx, 1)
    assert state() == before

    key = min(wins)
    assert f"[summary up to reply 2, reply 3]\n{trajectories[key].steps[3].reply}" in traced(ctx.root, key, "text")
    viewer = app(ctx.store.path, index=ctx.root / "texts.sqlite", hosts=LOOPBACK)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(viewer), base_url="http://localhost:4280") as http:
        page = (await http.get(f"/trajectory/{key}")).text
    assert "summary of what was read up to the answer to step 2, which it replaces from here on" in page
    assert "<code>summary</code>" in page
