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
class RequestCounts:
    act: int = 0
    judge: int = 0


class Speaker(ScriptedModel):
    """Says and judges as the seed has it, so that a reply that is asked for with another seed is
    another one.
    """

    def __init__(self, asked: RequestCounts) -> None:
        super().__init__(_speak)
        self._asked = asked

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        for request in requests:
            judging = JUDGE_INSTRUCTION in request.messages[-1].text
            self._asked.judge += judging
            self._asked.act += not judging
        return await super().generate(requests)


def _speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
    word = fingerprint(seed, number)
    if JUDGE_INSTRUCTION in messages[-1].text:
        return f"Reason: {word}.\nJudgement: {'Bad' if int(word, 16) % 2 else 'Good'}"
    return f"word {word}"


@dataclass
class Site:
    ctx: RunContext
    asked: RequestCounts

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
        counts = RequestCounts()
        ctx = RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / workspace,
            store=open_store(tmp_path / workspace / "store.duckdb"),
            make_environment=lambda _: Door(),
            load_model=lambda role, path: Speaker(counts),
            progress=lambda done, total, note: None,
        )
        return Site(ctx, counts)

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
    num_trees = first.count("select count(*) from tree")

    second = site(RATE)
    assert second.ctx.run_id != first.ctx.run_id
    summary = await make_data(second)
    assert second.asked == RequestCounts()

    scratch = site(RATE, workspace="scratch")
    assert await make_data(scratch) == summary
    assert scratch.asked == first.asked
    assert summary["samples"]["revision"] > 0

    sound(first)
    funnel = "select trees, finished_trees, leaves, pairs, critiques, errors_found, samples, dataset_rows, rejected"
    rows = first.ctx.store.rows(f"{funnel} from v_funnel where iteration = 1 order by run_id")
    assert len(rows) == 2
    assert rows[0][:6] == rows[1][:6]
    assert scratch.ctx.store.rows(f"{funnel} from v_funnel where iteration = 1")[0] in rows
    copies = "select count(*) from tree where iteration_id = ? and copied_from is not null"
    assert first.count(copies, second.ctx.iteration_id(1)) == num_trees
    assert first.count(copies, first.ctx.iteration_id(1)) == 0
    report, plain = build_report(second.ctx, 1), build_report(scratch.ctx, 1)
    assert report.funnel == plain.funnel
    assert report.tokens is not None
    assert plain.tokens is not None
    assert report.tokens.cut_by_purpose == plain.tokens.cut_by_purpose
    assert report.tokens.completion == 0 < plain.tokens.completion


@pytest.mark.long
@pytest.mark.slow
async def test_what_was_gathered_in_goes_is_a_whole_collection_and_is_taken_over(site: Make) -> None:
    trees = "select count(*) from tree where iteration_id = ? and finished"
    limited_site = site()
    await start_run(limited_site.ctx, collects=True)
    await begin_iteration(limited_site.ctx, 1)
    for limit, num_trees in ((1, 1), (2, 3)):
        assert (await collect(dataclasses.replace(limited_site.ctx, limit=limit), 1))["new"] == limit
        assert limited_site.count(trees, limited_site.ctx.iteration_id(1)) == num_trees
    await collect(limited_site.ctx, 1)
    num_replies = limited_site.asked.act

    whole = site(workspace="whole")
    summary = await make_data(whole)
    assert whole.asked.act == num_replies
    assert await make_data(limited_site) == summary
    assert limited_site.asked == whole.asked

    later = site(RATE)
    await make_data(later)
    assert later.asked == RequestCounts(), "another run takes over what was gathered, and what was judged of it"
    sound(limited_site)


@pytest.mark.slow
async def test_the_lineage_of_each_run_leads_to_its_own_trees(site: Make) -> None:
    tree_sets = []
    for run_site in (site(), site(RATE)):
        await make_data(run_site)
        [(dataset_id,)] = run_site.ctx.store.rows(
            "select dataset_id from dataset where iteration_id = ?", run_site.ctx.iteration_id(1)
        )
        key = f"checkpoint of {run_site.ctx.run_id}"
        run_site.ctx.store.write(checkpoint_rows(key, path=key, weights_sha256="", config={}, dataset_id=dataset_id))
        lineage = run_site.ctx.store.rows(
            "select distinct run_id, tree_id from v_lineage where checkpoint_id = ? and tree_id is not null", key
        )
        assert {run for run, _ in lineage} == {run_site.ctx.run_id}
        trees = {tree for _, tree in lineage}
        of_run = run_site.ctx.store.rows(
            "select tree_id from tree where iteration_id = ?", run_site.ctx.iteration_id(1)
        )
        assert trees
        assert trees <= {tree for (tree,) in of_run}
        tree_sets.append(trees)
    assert not tree_sets[0] & tree_sets[1]


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
    new_run = site(change)
    await make_data(new_run)
    assert (new_run.asked.act > 0, new_run.asked.judge > 0) == (act, judge)
    sound(new_run)


@pytest.mark.slow
async def test_another_chat_template_is_another_search(site: Make, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    first = site(f"model.path={model}")
    await make_data(first)
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    (model / "chat_template.jinja").write_text(f"{{# another #}}{template}", encoding="utf-8")
    second = site(f"model.path={model}")
    await make_data(second)
    assert second.asked == first.asked


@pytest.mark.long
@pytest.mark.slow
async def test_what_the_other_run_lost_is_grown_and_a_third_run_copies_the_first(site: Make) -> None:
    first = site()
    await make_data(first)
    tree_id = first.ctx.store.rows("select min(tree_id) from tree")[0][0]
    with first.ctx.store.transaction() as con:
        con.execute("update tree set finished = false where tree_id = ?", [tree_id])

    second = site(RATE)
    summary = await make_data(second)
    assert 0 < second.asked.act < first.asked.act
    third = site("training.learning_rate=2.0e-3")
    assert (await make_data(third))["samples"] == summary["samples"]
    assert third.asked == RequestCounts()
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
    async def run_exploration(one: Site) -> list[tuple[Any, ...]]:
        await start_run(one.ctx)
        await begin_iteration(one.ctx, 1)
        await explore(one.ctx, 1)
        return one.ctx.store.rows(
            "select instance_id, s.reward, s.position, s.action from trajectory join step s using (trajectory_id) "
            "where iteration_id = ? order by all",
            one.ctx.iteration_id(1),
        )

    first = site("eto.explore.samples=2", method="eto")
    rows = await run_exploration(first)
    assert first.asked.act > 0
    assert rows
    second = site("eto.explore.samples=2", RATE, method="eto")
    assert await run_exploration(second) == rows
    assert second.asked == RequestCounts()
    sound(second)
    hotter = site("eto.explore.samples=2", "eto.explore.temperature=0.9", method="eto")
    await run_exploration(hotter)
    assert hotter.asked.act > 0


@pytest.mark.slow
async def test_the_evaluation_of_equal_weights_is_taken_over(site: Make) -> None:
    further = "evaluation.sets={dev: {split: test, temperature: 0.5}}"

    async def run_evaluation(one: Site) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        await start_run(one.ctx)
        scores = await evaluate(one.ctx, 0)
        measures = one.ctx.store.rows(
            "select evaluation, metric, value, low, high, n from v_metrics where run_id = ? order by all",
            one.ctx.run_id,
        )
        return scores, measures

    first = site(further)
    scores, measures = await run_evaluation(first)
    assert first.asked.act > 0
    assert set(scores) == {"test", "dev", "revision_test"}
    assert measures

    second = site(further, RATE)
    assert await run_evaluation(second) == (scores, measures)
    assert second.asked == RequestCounts(), "other training, same base: nothing is played again"
    query = "select count(*) from trajectory where iteration_id = ? and copied_from is {} null"
    assert second.count(query.format("not"), second.ctx.iteration_id(0)) > 0
    assert second.count(query.format(""), second.ctx.iteration_id(0)) == 0

    third = site("evaluation.sets={dev: {split: test, temperature: 0.6}}")
    await run_evaluation(third)
    assert 0 < third.asked.act < first.asked.act, "the other set alone is played"
    longer = site(further, "evaluation.max_new_tokens=9")
    await run_evaluation(longer)
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
