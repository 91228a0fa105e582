"""A run whose training, or evaluation, was corrected takes over what it would ask for again, and
ends the same.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from asked import run_id_of
from door import Door

from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION, critique
from agentr_core.methods.agent_r.splice import splice_pairs
from agentr_core.methods.eto.preferences import explore
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.stages.dataset import dataset
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.report import build_report
from agentr_core.store.codec.ledger import checkpoint_rows
from agentr_core.store.database import Store
from agentr_core.types import Generation, Message, Request

SEARCHED = {
    "search": {"dives": 3, "width": 3, "depth": 5, "max_new_tokens": 8},
    "critique": {"temperature": 1.0, "votes": 3},
    "pairs": {"per_tree": 4},
}
RATE = "training.learning_rate=1.0e-3"


@dataclass
class Asked:
    act: int = 0
    judge: int = 0


class Speaker(ScriptedModel):
    """Says and judges as the seed has it, so that a reply that is asked for with another seed is
    another one.
    """

    def __init__(self, asked: Asked) -> None:
        super().__init__(_speak)
        self._asked = asked

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        for request in requests:
            judging = JUDGE_INSTRUCTION in request.messages[-1].text
            self._asked.judge += judging
            self._asked.act += not judging
        return await super().generate(requests)


def _speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
    drawn = fingerprint(seed, number)
    if JUDGE_INSTRUCTION in messages[-1].text:
        return f"Reason: {drawn}.\nJudgement: {'Bad' if int(drawn, 16) % 2 else 'Good'}"
    return f"word {drawn}"


@dataclass
class Site:
    ctx: RunContext
    asked: Asked

    def count(self, sql: str, *params: Any) -> int:
        return int(self.ctx.store.rows(sql, *params)[0][0])


Make = Callable[..., Site]


@pytest.fixture
def site(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Make:
    """Return a maker of runs in a workspace of a given name; words are overrides of the recipe."""

    def make(*overrides: str, workspace: str = "runs", method: str = "agent-r") -> Site:
        plain = {
            "name": "door",
            "method": method,
            "environment": {"name": "door"},
            "model": {"path": str(tiny_model_dir)},
            "data": {"max_length": 4096},
            **(SEARCHED if method == "agent-r" else {"eto": {"phases": ["rft"]}}),
        }
        recipe = parse(plain, overrides)
        asked = Asked()
        ctx = RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / workspace,
            store=open_store(tmp_path / workspace / "store.duckdb"),
            make_environment=lambda _: Door(),
            load_model=lambda role, path: Speaker(asked),
            progress=lambda done, total, note: None,
        )
        return Site(ctx, asked)

    return make


async def make_data(one: Site, iteration: int = 1) -> dict[str, Any]:
    await start_run(one.ctx)
    await begin_iteration(one.ctx, iteration)
    await collect(one.ctx, iteration)
    await critique(one.ctx, iteration)
    await splice_pairs(one.ctx, iteration)
    return await dataset(one.ctx, iteration)


def sound(one: Site) -> None:
    assert one.ctx.store.rows("from v_orphans") == []
    assert one.ctx.store.rows("from v_contradictions") == []


@pytest.mark.slow
async def test_a_corrected_training_asks_for_nothing_again_and_ends_with_the_same_dataset(site: Make) -> None:
    first = site()
    await make_data(first)
    assert min(first.asked.act, first.asked.judge) > 0
    own = first.count("select count(*) from tree")

    corrected = site(RATE)
    assert corrected.ctx.run_id != first.ctx.run_id
    made = await make_data(corrected)
    assert corrected.asked == Asked()

    scratch = site(RATE, workspace="scratch")
    assert await make_data(scratch) == made
    assert scratch.asked == first.asked
    assert made["samples"]["revision"] > 0

    sound(first)
    funnel = "select trees, finished_trees, leaves, pairs, critiques, errors_found, samples, dataset_rows, rejected"
    rows = first.ctx.store.rows(f"{funnel} from v_funnel where iteration = 1 order by run_id")
    assert len(rows) == 2
    assert rows[0][:6] == rows[1][:6]
    assert scratch.ctx.store.rows(f"{funnel} from v_funnel where iteration = 1")[0] in rows
    copies = "select count(*) from tree where iteration_id = ? and copied_from is not null"
    assert first.count(copies, corrected.ctx.iteration_id(1)) == own
    assert first.count(copies, first.ctx.iteration_id(1)) == 0
    report, plain = build_report(corrected.ctx, 1), build_report(scratch.ctx, 1)
    assert report.funnel == plain.funnel
    assert report.tokens is not None
    assert plain.tokens is not None
    assert report.tokens.cut_by_purpose == plain.tokens.cut_by_purpose
    assert report.tokens.completion == 0 < plain.tokens.completion


@pytest.mark.long
@pytest.mark.slow
async def test_what_was_gathered_in_goes_is_a_whole_collection_and_is_taken_over(site: Make) -> None:
    trees = "select count(*) from tree where iteration_id = ? and finished"
    gathered = site()
    await start_run(gathered.ctx, collects=True)
    await begin_iteration(gathered.ctx, 1)
    for limit, grown in ((1, 1), (2, 3)):
        assert (await collect(dataclasses.replace(gathered.ctx, limit=limit), 1))["new"] == limit
        assert gathered.count(trees, gathered.ctx.iteration_id(1)) == grown
    await collect(gathered.ctx, 1)
    acted = gathered.asked.act

    whole = site(workspace="whole")
    made = await make_data(whole)
    assert whole.asked.act == acted
    assert await make_data(gathered) == made
    assert gathered.asked == whole.asked

    later = site(RATE)
    await make_data(later)
    assert later.asked == Asked(), "another run takes over what was gathered, and what was judged of it"
    sound(gathered)


@pytest.mark.slow
async def test_the_lineage_of_each_run_leads_to_its_own_trees(site: Make) -> None:
    found = []
    for one in (site(), site(RATE)):
        await make_data(one)
        [(dataset_id,)] = one.ctx.store.rows(
            "select dataset_id from dataset where iteration_id = ?", one.ctx.iteration_id(1)
        )
        key = f"checkpoint of {one.ctx.run_id}"
        one.ctx.store.write(checkpoint_rows(key, path=key, weights_sha256="", config={}, dataset_id=dataset_id))
        lineage = one.ctx.store.rows(
            "select distinct run_id, tree_id from v_lineage where checkpoint_id = ? and tree_id is not null", key
        )
        assert {run for run, _ in lineage} == {one.ctx.run_id}
        trees = {tree for _, tree in lineage}
        of_run = one.ctx.store.rows("select tree_id from tree where iteration_id = ?", one.ctx.iteration_id(1))
        assert trees
        assert trees <= {tree for (tree,) in of_run}
        found.append(trees)
    assert not found[0] & found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "act", "judge"),
    [
        ("evaluation.max_steps=7", False, False),
        ("pairs.alpha=[0.6]", False, False),
        ("critique.votes=1", False, True),
        ("search.width=2", True, True),
        ("seed=3", True, True),
    ],
)
async def test_only_what_a_change_reaches_is_asked_for(site: Make, change: str, act: bool, judge: bool) -> None:
    await make_data(site())
    changed = site(change)
    await make_data(changed)
    assert (changed.asked.act > 0, changed.asked.judge > 0) == (act, judge)
    sound(changed)


@pytest.mark.slow
async def test_another_chat_template_is_another_search(site: Make, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    first = site(f"model.path={model}")
    await make_data(first)
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    (model / "chat_template.jinja").write_text(f"{{# another #}}{template}", encoding="utf-8")
    changed = site(f"model.path={model}")
    await make_data(changed)
    assert changed.asked == first.asked


@pytest.mark.long
@pytest.mark.slow
async def test_what_the_other_run_lost_is_grown_and_a_third_run_copies_the_first(site: Make) -> None:
    first = site()
    await make_data(first)
    lost = first.ctx.store.rows("select min(tree_id) from tree")[0][0]
    with first.ctx.store.transaction() as con:
        con.execute("update tree set finished = false where tree_id = ?", [lost])

    second = site(RATE)
    made = await make_data(second)
    assert 0 < second.asked.act < first.asked.act
    third = site("training.learning_rate=2.0e-3")
    assert (await make_data(third))["samples"] == made["samples"]
    assert third.asked == Asked()
    sound(third)
    originals = third.ctx.store.rows(
        "select distinct o.copied_from from tree t join tree o on o.tree_id = t.copied_from where t.iteration_id = ?",
        third.ctx.iteration_id(1),
    )
    assert originals == [(None,)], "a copy names the tree that was grown, and no copy of it"


@pytest.mark.long
@pytest.mark.slow
async def test_a_run_of_an_earlier_version_goes_on_with_its_seeds_and_shares_nothing(site: Make) -> None:
    old = site()
    await start_run(old.ctx)
    with old.ctx.store.transaction() as con:
        con.execute("delete from stage_input")
    await make_data(old)
    assert old.count("select count(*) from stage_input where stage <> 'files'") == 0
    pairs = old.ctx.store.rows("select tree_id, good_leaf, bad_leaf from pair order by all")

    new = site(RATE)
    await make_data(new)
    assert new.asked.act == old.asked.act
    await make_data(old)
    assert (
        old.ctx.store.rows(
            "select tree_id, good_leaf, bad_leaf from pair where iteration_id = ? order by all",
            old.ctx.iteration_id(1),
        )
        == pairs
    )


@pytest.mark.slow
async def test_exploration_is_taken_over_too(site: Make) -> None:
    async def explored(one: Site) -> list[tuple[Any, ...]]:
        await start_run(one.ctx)
        await begin_iteration(one.ctx, 1)
        await explore(one.ctx, 1)
        return one.ctx.store.rows(
            "select instance_id, s.reward, s.position, s.action from trajectory join step s using (trajectory_id) "
            "where iteration_id = ? order by all",
            one.ctx.iteration_id(1),
        )

    first = site("eto.explore.samples=2", method="eto")
    played = await explored(first)
    assert first.asked.act > 0
    assert played
    corrected = site("eto.explore.samples=2", RATE, method="eto")
    assert await explored(corrected) == played
    assert corrected.asked == Asked()
    sound(corrected)
    hotter = site("eto.explore.samples=2", "eto.explore.temperature=0.9", method="eto")
    await explored(hotter)
    assert hotter.asked.act > 0


@pytest.mark.slow
async def test_the_evaluation_of_equal_weights_is_taken_over(site: Make) -> None:
    further = "evaluation.sets={dev: {split: test, temperature: 0.5}}"

    async def evaluated(one: Site) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        await start_run(one.ctx)
        scores = await evaluate(one.ctx, 0)
        measures = one.ctx.store.rows(
            "select evaluation, metric, value, low, high, n from v_metrics where run_id = ? order by all",
            one.ctx.run_id,
        )
        return scores, measures

    first = site(further)
    scores, measures = await evaluated(first)
    assert first.asked.act > 0
    assert set(scores) == {"test", "dev", "revision_test"}
    assert measures

    corrected = site(further, RATE)
    assert await evaluated(corrected) == (scores, measures)
    assert corrected.asked == Asked(), "other training, same base: nothing is played again"
    own = "select count(*) from trajectory where iteration_id = ? and copied_from is {} null"
    assert corrected.count(own.format("not"), corrected.ctx.iteration_id(0)) > 0
    assert corrected.count(own.format(""), corrected.ctx.iteration_id(0)) == 0

    other = site("evaluation.sets={dev: {split: test, temperature: 0.6}}")
    await evaluated(other)
    assert 0 < other.asked.act < first.asked.act, "the other set alone is played"
    longer = site(further, "evaluation.max_new_tokens=9")
    await evaluated(longer)
    assert longer.asked.act == first.asked.act
    sound(first)


@pytest.mark.slow
async def test_episodes_that_the_other_run_lost_are_played(site: Make) -> None:
    first = site()
    await start_run(first.ctx)
    scores = await evaluate(first.ctx, 0)
    with first.ctx.store.transaction() as con:
        con.execute("delete from episode where instance_id = (select min(instance_id) from episode) and cut = 0")
    second = site(RATE)
    await start_run(second.ctx)
    assert await evaluate(second.ctx, 0) == scores
    assert 0 < second.asked.act < first.asked.act
