"""The stages of a run whose model reads through a window: what is kept of it in the store, and what
is trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked import run_id_of
from door import Door

from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION, critique
from agentr_core.methods.agent_r.splice import splice_pairs
from agentr_core.methods.eto.preferences import explore_and_keep
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.place import Workplace
from agentr_core.runtime.start import begin, start
from agentr_core.samples.dataset import check_flags
from agentr_core.samples.rendering import load_renderer
from agentr_core.stages.dataset import dataset
from agentr_core.stages.evaluate import evaluate
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.database import Store
from agentr_core.types import Message

pytestmark = pytest.mark.slow
CONTEXT, ROOM = 32, 2
"""Words: room for three exchanges less one, and for a reply of two words."""
TOKENS = 150
"""What the policy's own tokenizer may need for a prompt and a reply: so much less than a whole
splice takes.
"""

Make = Callable[..., Workplace]


def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
    if JUDGE_INSTRUCTION in messages[-1].text:
        return "Reason: so it is.\nJudgement: Bad"
    return f"word {fingerprint(seed, number)}"


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Make:
    def made(*overrides: str, method: str = "agent-r") -> Workplace:
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
        return Workplace(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / "runs",
            store=open_store(tmp_path / "runs" / "store.duckdb"),
            make_environment=lambda _: Door(),
            load_model=lambda role, path: ScriptedModel(speak, context_length=CONTEXT if role == "actor" else 9999),
            progress=lambda done, total, note: None,
        )

    return made


SEARCH = "search={dives: 3, width: 3, depth: 5, max_new_tokens: 2}"


async def spliced(place: Workplace) -> dict[str, int]:
    await start(place)
    await begin(place, 1)
    await collect(place, 1)
    await critique(place, 1)
    made: dict[str, int] = await splice_pairs(place, 1)
    return made


async def test_paths_and_splices_become_stretches_that_fit(make: Make) -> None:
    place = make(SEARCH, "splice.mode=blind", "critique.unparsable=bad")
    made = await spliced(place)
    assert place.store.rows("select count(*) from node where stop = 'context_limit'") == [(0,)]
    assert place.store.rows("select distinct step.dropped from node where depth > 0 order by 1") == [(0,), (1,)]

    renderer = load_renderer(place.policy(1).path)
    samples = load_samples(place.store, iteration_id=place.iteration_id(1)).values()
    stretched = [sample for sample in samples if "stretch" in sample.provenance.extra]
    assert {str(sample.kind) for sample in stretched} == {"revision", "good"}
    for sample in samples:
        check_flags(sample)
        if str(sample.kind) != "revision":
            continue
        for position, message in enumerate(sample.messages):
            if message.train and position > 4:
                assert len(renderer.render_prompt(sample.messages[:position])) + ROOM <= TOKENS
    assert made["revision"] == sum(str(sample.kind) == "revision" for sample in samples)
    assert (await dataset(place, 1))["rows"] > 0
    assert place.store.rows("select * from v_orphans") == []


async def test_a_template_that_prints_the_date_is_spliced_with_that_of_the_run(
    make: Make, tmp_path: Path, tiny_model_dir: Path
) -> None:
    dated = tmp_path / "dated"
    shutil.copytree(tiny_model_dir, dated)
    template = dated / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    place = make(SEARCH, "splice.mode=blind", "critique.unparsable=bad", f"model.path={dated}")
    assert (await spliced(place))["revision"] > 0


async def test_windowed_paths_are_turned_away_with_their_reason(make: Make) -> None:
    place = make(SEARCH, "splice.mode=blind", "critique.unparsable=bad", "data.windowed=reject")
    await spliced(place)
    samples = load_samples(place.store, iteration_id=place.iteration_id(1)).values()
    assert not any("stretch" in sample.provenance.extra for sample in samples)
    ((count,),) = place.store.rows("select count(*) from rejection where stage = 'splice' and reason = 'windowed'")
    assert count > 0


@pytest.mark.parametrize("way", ["stretches", "reject"])
async def test_explored_episodes_are_read_through_the_window_too(make: Make, way: str) -> None:
    explored = ("eto.phases=[rft]", "eto.explore={samples: 12, max_steps: 5, max_new_tokens: 2}")
    place = make(*explored, f"data.windowed={way}", method="eto")
    await start(place)
    await begin(place, 1)
    found = await explore_and_keep(place, 1)
    samples = load_samples(place.store, iteration_id=place.iteration_id(1)).values()
    ((rejected,),) = place.store.rows("select count(*) from rejection where reason = 'windowed'")
    ((windowed,),) = place.store.rows(
        "select count(distinct trajectory_id) from step join trajectory t using (trajectory_id) "
        "where dropped > 0 and t.success"
    )
    assert windowed > 0
    if way == "reject":
        assert (rejected, len(samples)) == (windowed, found["successes"] - windowed)
    else:
        assert (rejected, len(samples)) == (0, found["successes"] + windowed)


async def test_an_evaluation_goes_on_where_it_would_have_ended(make: Make) -> None:
    stops = "select count(*) from trajectory where stop = 'context_limit'"
    window = make()
    await start(window)
    await evaluate(window, 0)
    assert window.store.rows(stops) == [(0,)]
    stop = make("context=stop", "evaluation.max_new_tokens=3")
    await start(stop)
    await evaluate(stop, 0)
    assert stop.store.rows(stops)[0][0] > 0
