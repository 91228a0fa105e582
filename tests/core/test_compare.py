"""Comparisons without Prefect: what arms share, what each is trained on, one table, and what is
refused.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asked import run_id_of
from door import Door

from agentr_core.errors import ConfigError, DataFault
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.comparison import Arm, arms_of, pool_stages, sample_recipes, with_arms
from agentr_core.methods.comparison.report import build_comparison
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_named, method_of, plan_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.recipe import Recipe, resolved
from agentr_core.recipes.training import TrainingConfig
from agentr_core.reports.comparison import ArmReport, ComparisonReport, SeedMean, scores_table
from agentr_core.reports.html import render_comparison
from agentr_core.reports.markdown import render_comparison_markdown
from agentr_core.reports.model_card import table_text
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.instances import closed_stages
from agentr_core.runtime.start import begin_iteration, end_iteration, start_run
from agentr_core.stages.dataset import dataset
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.report import build_report
from agentr_core.store.codec.ledger import checkpoint_rows, training_step_rows
from agentr_core.store.database import Store
from agentr_core.store.database import read_consistently as at_once
from agentr_core.store.tables import merge
from agentr_core.types import Instance, Message

OPENING, CLOSED = (
    next(word for word in map(str, range(99)) if Door().parse(word) == said) for said in ("open", "wrong")
)
ARMS = {
    "good": ["data.use=good"],
    "revision": ["data.use=revision"],
    "both": ["data.use=both", "training.learning_rate=1e-4"],
    "cloning": ["data.use=expert"],
    "all": ["data.use=both+expert"],
    "rft": ["data.use=rft"],
    "own": ["data.use=successes"],
    "eto": ["data.use=preferences", "eto.dpo.beta=[0.3]"],
}
SOURCES = {
    "good": {"good"},
    "revision": {"revision"},
    "both": {"good", "revision"},
    "cloning": {"expert"},
    "all": {"good", "revision", "expert"},
    "rft": {"expert", "good"},
    "own": {"good"},
    "eto": {"chosen", "rejected"},
}


class House(Door):
    """Doors whose expert says one wrong word and then the right one."""

    def expert(self, instance: Instance) -> Sequence[str] | None:
        return [CLOSED, OPENING]


def recipe(*overrides: str, arms: dict[str, list[str]] = ARMS, model: Path = Path("m")) -> Recipe:
    return parse(
        {
            "name": "doors",
            "method": "compare",
            "environment": {"name": "door"},
            "model": {"path": str(model)},
            "instances": {"train_limit": 0},
            "search": {"dives": 2, "width": 2, "depth": 4},
            "critique": {"unparsable": "bad"},
            "eto": {"explore": {"samples": 4, "max_steps": 4}},
            "compare": {"arms": arms, "seeds": [5, 6]},
            "training": {"max_tokens": 700},
            "evaluation": {"max_steps": 3, "revision_test": {"max_steps": 3}},
        },
        overrides,
    )


class Site:
    """A comparison in a workspace, and how often its model was asked."""

    def __init__(self, folder: Path, wanted: Recipe) -> None:
        self.asked = 0
        self.root = folder
        self.id_of = run_id_of
        self.store = Store(folder / "store.duckdb")
        self.pool = self.ctx(wanted)

    def ctx(self, wanted: Recipe) -> RunContext:
        """Return the workplace of the pool, or of an arm."""

        def reply(messages: Sequence[Message], seed: int, number: int) -> str:
            self.asked += 1
            return f"word {fingerprint(seed, number)}"

        return RunContext(
            recipe=wanted,
            method=method_of(wanted),
            run_id=self.id_of(wanted),
            root=self.root,
            store=self.store,
            make_environment=lambda _: House(),
            load_model=lambda role, path: ScriptedModel(reply),
            progress=lambda done, total, note: None,
        )

    def ask(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return self.pool.store.rows(sql, *params)

    def report(self) -> ComparisonReport:
        """Return the report of the comparison, from one state of the store, as the flow does."""
        return at_once(self.pool.store, lambda state: build_comparison(changed(self.pool, store=state)))

    async def collected(self) -> Site:
        """Evaluate the base and make the pool, as the flow does."""
        with self.store.keep_open():
            await start_run(self.pool)
            await evaluate(self.pool, 0)
            await _run_stages(self.pool)
            await end_iteration(self.pool, 1)
        return self

    async def spliced(self, arm: Arm) -> RunContext:
        """Return the workplace of the run that made an arm's samples, as the flow does."""
        assert arm.samples_recipe is not None
        maker = self.ctx(arm.samples_recipe)
        with self.store.keep_open():
            await start_run(maker)
            await _run_stages(maker)
        return maker

    async def built(self, arm: Arm) -> tuple[RunContext, dict[str, Any]]:
        """Return the workplace of an arm with its dataset, and what that is made of."""
        ctx = self.ctx(arm.recipe)
        with self.store.keep_open():
            await start_run(ctx)
            await begin_iteration(ctx, 1)
            return ctx, await dataset(ctx, 1)

    async def learned(self, arm: Arm) -> RunContext:
        """Return the workplace of an arm that was evaluated; its training is only said to have
        been.
        """
        ctx, contents = await self.built(arm)
        key = fingerprint("checkpoint", ctx.run_id)
        row = self.ask("select dataset_id from dataset where hash = ?", contents["dataset_hash"])
        head = checkpoint_rows(
            key,
            path=ctx.recipe.model.path,
            weights_sha256=key,
            config={},
            parent_id=ctx.policy(1).id,
            dataset_id=row[0][0],
            iteration_id=ctx.iteration_id(1),
        )
        step = training_step_rows(key, 1, loss=0.1, trained_tokens=710, seconds=2.0, preference_measures={})
        ctx.store.write(merge([head, step]))
        ctx.store.update("iteration", {"iteration_id": ctx.iteration_id(1), "checkpoint_out": key})
        with self.store.keep_open():
            await evaluate(ctx, 1)
            await end_iteration(ctx, 1)
        return ctx


async def _run_stages(ctx: RunContext) -> None:
    await begin_iteration(ctx, 1)
    for stage in ctx.plan(1).stages:
        await stage.work(ctx, 1)


@pytest.fixture
def site(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Site]:
    return lambda *overrides, **more: Site(tmp_path / "runs", recipe(*overrides, model=tiny_model_dir, **more))


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Site]:
    """The pools of all arms and of one, made once for all tests; nobody writes there."""

    def make_site(arms: dict[str, list[str]]) -> Site:
        comparison = Site(tmp_path_factory.mktemp("pool"), recipe(arms=arms, model=tiny_model_dir))
        return asyncio.run(comparison.collected())

    return {"all": make_site(ARMS), "good": make_site({"good": ARMS["good"]})}


@pytest.fixture
def collected(pools: dict[str, Site], tmp_path: Path) -> Callable[..., Site]:
    """Return a maker of sites whose pool, of all arms or of `good`, is made: copies of their own.
    A comparison with other `arms` that need no more of the pool is the same one.
    """

    def copy_site(pool: str = "all", *, arms: dict[str, list[str]] | None = None) -> Site:
        source = pools[pool]
        shutil.copytree(source.root, tmp_path / "runs")
        pool_recipe = source.pool.recipe
        comparison = Site(
            tmp_path / "runs", pool_recipe if arms is None else recipe(arms=arms, model=Path(pool_recipe.model.path))
        )
        assert comparison.pool.run_id == source.pool.run_id
        comparison.asked = source.asked
        return comparison

    return copy_site


@pytest.mark.slow
async def test_all_arms_are_made_of_one_pool_and_of_nothing_else(collected: Callable[..., Site]) -> None:
    comparison = collected()
    twice = ("good", "eto")
    num_requests, counts = (
        comparison.asked,
        comparison.ask("select (from (select count(*) from tree)), count(*) from trajectory"),
    )
    hashes: dict[str, set[str]] = {}
    for arm in arms_of(comparison.pool.recipe, comparison.pool.run_id):
        if arm.seed == 6 and arm.name not in twice:
            continue
        ctx, contents = await comparison.built(arm)
        hashes.setdefault(arm.name, set()).add(contents["dataset_hash"])
        samples = comparison.ask(
            "select distinct s.kind, t.source, s.tree_id is not null, s.iteration_id from dataset d "
            "join dataset_row using (dataset_id) join sample s using (sample_id) "
            "left join trajectory t using (trajectory_id) where d.iteration_id = ?",
            ctx.iteration_id(1),
        )
        assert {kind for kind, *_ in samples} == SOURCES[arm.name]
        assert {origin for *_, origin in samples} == {comparison.pool.iteration_id(1)}
        if arm.name in ("good", "own"):
            assert [(source, tree) for _, source, tree, _ in samples] == [
                ("tree", True) if arm.name == "good" else ("rollout", False)
            ]
        assert ctx.plan(1).has_pairs == (arm.name == "eto")

    assert comparison.asked == num_requests, "no arm asks the model for anything"
    assert comparison.ask("select (from (select count(*) from tree)), count(*) from trajectory") == counts
    assert [len(hashes[name]) for name in twice] == [2, 2], "each seed has its own order"
    assert len(set.union(*hashes.values())) == len(ARMS) + len(twice)
    assert comparison.ask("select * from v_orphans") == []
    assert comparison.ask("select distinct comparison, arm, trains_on from v_arms order by arm") == sorted(
        ("doors", name, changes[0].removeprefix("data.use=")) for name, changes in ARMS.items()
    )
    reasons = comparison.ask("select distinct reason from v_rejections where run_id <> ?", comparison.pool.run_id)
    assert {reason for (reason,) in reasons} - {"duplicate"} == {"not-taken"}
    # What an arm was offered is in its dataset or turned away, each sample with its reason.
    turned_away = "select count(*) from v_rejections where reason = 'not-taken'"
    assert comparison.ask(f"{turned_away} and subject not in (select sample_id from sample)") == [(0,)]


@pytest.mark.slow
async def test_a_control_has_the_prefixes_of_one_instance_and_the_suffixes_of_another(
    collected: Callable[..., Site],
) -> None:
    arms = {"revision": ["data.use=revision"], "control": ["data.use=revision", "data.suffixes=exchanged"]}
    comparison = collected(arms=arms)
    real, control = (arm for arm in arms_of(comparison.pool.recipe, comparison.pool.run_id) if arm.seed == 5)
    _, contents = await comparison.built(real)
    _, control_contents = await comparison.built(control)
    assert set(control_contents["samples"]) == {"revision"}
    assert control_contents["dataset_hash"] != contents["dataset_hash"]
    pairs = comparison.ask(
        "select p.instance_id, s.instance_id from sample c "
        "join sample p on p.sample_id = json_extract_string(c.provenance.extra, '$.prefix_of') "
        "join sample s on s.sample_id = json_extract_string(c.provenance.extra, '$.suffix_of')"
    )
    assert len(pairs) == contents["samples"]["revision"]
    assert all(prefix != suffix for prefix, suffix in pairs)
    assert comparison.ask("select * from v_orphans") == []


@pytest.mark.slow
async def test_the_pool_is_made_once(site: Callable[..., Site], collected: Callable[..., Site]) -> None:
    comparison = collected()
    counts = "select (from (select count(*) from node)), (from (select count(*) from trajectory)), count(*) from sample"
    num_requests, before = comparison.asked, comparison.ask(counts)
    variant = await site("compare.seeds=[9]", "training.max_tokens=20", "eto.dpo.beta=[0.2]").collected()
    assert (variant.asked, variant.ask(counts), variant.pool.run_id) == (0, before, comparison.pool.run_id)
    assert num_requests


@pytest.mark.slow
async def test_what_an_arm_was_trained_on_is_settled_in_the_pool(collected: Callable[..., Site]) -> None:
    """Units that were lost and played later would be in the samples of later arms alone."""

    def names() -> list[str]:
        return [stage.name for stage in closed_stages(comparison.pool, 1)]

    comparison = collected()
    assert names() == []
    arms = {arm.name: arm for arm in arms_of(comparison.pool.recipe, comparison.pool.run_id)}
    ctx, _ = await comparison.built(arms["own"])
    assert names() == ["explore"]
    assert closed_stages(ctx, 1) == []
    await comparison.built(arms["good"])
    assert names() == ["collect", "critique", "splice", "explore"]


@pytest.mark.slow
async def test_arms_with_other_splices_take_them_from_the_same_trees(collected: Callable[..., Site]) -> None:
    arms = {
        "revision": ["data.use=revision"],
        "direct": ["data.use=revision", "splice.mode=direct", "splice.impossible=keep"],
    }
    comparison = collected(arms=arms)
    revision, direct = (arm for arm in arms_of(comparison.pool.recipe, comparison.pool.run_id) if arm.seed == 5)
    assert revision.samples_recipe is None
    num_requests = comparison.asked
    with pytest.raises(DataFault, match=rf"iteration 1 of run {direct.recipe.compare.samples} has no sample"):
        await comparison.built(direct)

    maker = await comparison.spliced(direct)
    assert maker.run_id == direct.recipe.compare.samples
    assert comparison.asked == num_requests, "trees are taken over, and in mode direct nothing is judged"
    query = "select distinct s.iteration_id, c.pair_id is not null from dataset d join dataset_row using (dataset_id) "
    query += "join sample s using (sample_id) left join critique c using (pair_id) where d.iteration_id = ?"
    for arm, origin, has_pair in ((revision, comparison.pool, True), (direct, maker, False)):
        ctx, contents = await comparison.built(arm)
        assert set(contents["samples"]) == {"revision"}
        assert comparison.ask(query, ctx.iteration_id(1)) == [(origin.iteration_id(1), has_pair)]
    assert comparison.ask("select distinct comparison_id, arm from v_arms order by arm") == [
        (comparison.pool.run_id, "direct"),
        (comparison.pool.run_id, "revision"),
    ]
    assert [stage.name for stage in closed_stages(maker, 1)] == ["collect", "critique", "splice"]
    assert comparison.ask("select recipe from v_runs order by recipe") == [
        (name,) for name in ("doors", "doors.direct", "doors.revision", "doors.samples")
    ]
    assert comparison.ask("select * from v_orphans") == []


@pytest.mark.slow
async def test_samples_made_another_day_are_of_the_same_trees(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a chat template prints the date, trees of another day would be others."""
    monkeypatch.setattr("agentr_core.runtime.start.prints_date", lambda path: True)
    comparison = site(arms={"best": ["data.use=good", "pairs.alpha=[1.0]"]})
    with monkeypatch.context() as earlier:
        new_year = SimpleNamespace(now=lambda zone: datetime(2026, 1, 1, tzinfo=zone))
        earlier.setattr("agentr_core.runtime.start.datetime", new_year)
        await comparison.collected()
    num_requests = comparison.asked
    await comparison.spliced(arms_of(comparison.pool.recipe, comparison.pool.run_id)[0])
    assert comparison.asked == num_requests > 0


@pytest.mark.slow
async def test_samples_are_made_of_no_tree_that_the_pool_has_lost(site: Callable[..., Site]) -> None:
    comparison = site(arms={"best": ["data.use=good", "pairs.alpha=[1.0]"]})
    arm, _ = arms_of(comparison.pool.recipe, comparison.pool.run_id)
    await start_run(comparison.pool)
    with pytest.raises(
        DataFault, match=f"comparison {comparison.pool.run_id} has no tree that was grown with the inputs"
    ):
        await comparison.spliced(arm)
    await begin_iteration(comparison.pool, 1)
    await collect(changed(comparison.pool, limit=2), 1)
    maker = await comparison.spliced(arm)
    trees = "select count(*) from tree where iteration_id = ?"
    assert (
        comparison.ask(trees, maker.iteration_id(1)) == comparison.ask(trees, comparison.pool.iteration_id(1)) == [(2,)]
    )


@pytest.mark.slow
async def test_trees_that_an_arm_spliced_anew_are_settled(collected: Callable[..., Site]) -> None:
    arms = {"best": ["data.use=good", "pairs.alpha=[1.0]"]}
    comparison = collected("good", arms=arms)
    assert [stage.name for stage in comparison.pool.plan(1).stages] == ["collect"]
    arm, _ = arms_of(comparison.pool.recipe, comparison.pool.run_id)
    await comparison.spliced(arm)
    assert closed_stages(comparison.pool, 1) == []
    await comparison.learned(arm)
    assert [stage.name for stage in closed_stages(comparison.pool, 1)] == ["collect"]
    assert comparison.report().arms[0].trains_on == "good, pairs.alpha=[1.0]"


@pytest.mark.long
@pytest.mark.slow
async def test_every_model_goes_on_from_the_same_failures(collected: Callable[..., Site]) -> None:
    comparison = collected("good")
    cuts = (
        "select e.instance_id, e.cut from episode e join evaluation v using (evaluation_id) "
        "where v.name = 'revision_test' and v.iteration_id = ? order by all"
    )
    base = comparison.ask(cuts, comparison.pool.iteration_id(0))
    assert base
    for arm in arms_of(comparison.pool.recipe, comparison.pool.run_id):
        ctx = await comparison.learned(arm)
        assert comparison.ask(cuts, ctx.iteration_id(1)) == base
        assert comparison.ask("select count(*) from evaluation where iteration_id = ?", ctx.iteration_id(0)) == [(0,)]
        base_score = comparison.report().base
        assert base_score is not None
        # The pool's run trains nothing, so its report calls the base by its name.
        assert build_report(ctx, 1).score(0) == changed(base_score, name="")
        funnel = {stage.name: stage.count for stage in build_report(ctx, 1).funnel}
        assert [funnel["trees"]] == [number for (number,) in comparison.ask("select count(*) from tree")]
        assert funnel["samples of the pool"] >= funnel["trained rows"] > 0


@pytest.mark.slow
async def test_arms_stay_in_the_order_of_the_recipe(site: Callable[..., Site]) -> None:
    comparison = site()
    await start_run(comparison.pool)
    for arm in reversed(arms_of(comparison.pool.recipe, comparison.pool.run_id)):
        await start_run(comparison.ctx(arm.recipe))
    ((config,),) = comparison.ask("select config from run where run_id = ?", comparison.pool.run_id)
    report = build_comparison(changed(comparison.pool, recipe=parse(json.loads(config))))

    assert list(ARMS) != sorted(ARMS)
    assert [arm.name for arm in report.arms] == list(ARMS)
    assert [line.split()[0] for line in table_text(scores_table(report)).splitlines()] == ["Arm", *ARMS]
    assert comparison.ask("select arm, seed from v_arms") == [(name, seed) for name in ARMS for seed in (5, 6)]


@pytest.mark.slow
async def test_the_report_has_every_arm_and_seed_that_is_evaluated(collected: Callable[..., Site]) -> None:
    comparison = collected(arms={"good": ["data.use=good"], "eto": ["data.use=preferences"]})
    await start_run(comparison.pool)
    good, second_good, eto, _ = arms_of(comparison.pool.recipe, comparison.pool.run_id)
    assert [arm.runs for arm in comparison.report().arms] == [(), ()]
    for arm in (good, second_good, eto):
        await comparison.learned(arm)
    report = comparison.report()
    first, second = report.arms

    assert (report.max_tokens, report.max_seconds, report.seeds) == (700, 0, (5, 6))
    assert [run.seed for run in first.runs] == [5, 6]
    assert first.success is not None
    assert first.success.n == 2
    assert first.success.value == pytest.approx(sum(run.score.success.value for run in first.runs) / 2)
    assert first.success.low is not None
    assert 0 <= first.success.low <= first.success.value
    assert {run.trained_tokens for run in (*first.runs, *second.runs)} == {710}
    assert second.success is not None
    assert (second.success.low, second.success.n) == (None, 1)
    assert second.versus_first is not None
    assert second.versus_first.value == second.runs[0].score.success.value - first.runs[0].score.success.value
    assert comparison.ask("select arm, seed, success, steps_to_success from v_arms order by arm, seed") == [
        (arm, run.seed, run.score.success.value, run.score.steps_to_success)
        for arm, runs in (("eto", second.runs), ("good", first.runs))
        for run in runs
    ]
    assert [(difference.arm, difference.reference) for difference in report.differences] == [
        ("good", "base"),
        ("eto", "base"),
        ("eto", "good"),
    ]
    assert report.base is not None
    seeds = [run.score.success.value - report.base.success.value for run in first.runs]
    against_base, _, of_arms = (difference.estimate_by_set["test"] for difference in report.differences)
    assert against_base.value == pytest.approx(sum(seeds) / 2)
    assert against_base.n == 2 * first.runs[0].score.success.n
    assert of_arms.n == first.runs[0].score.success.n, "only the seed that both have counts"
    assert of_arms.value == pytest.approx(second.versus_first.value)
    page = render_comparison_markdown(report)
    assert "## Differences" in page
    for run in (*first.runs, *second.runs):
        assert f"`{run.run_id}` | `{run.checkpoint_id}` | `{run.dataset_hash}`" in page


@pytest.mark.slow
async def test_arms_of_an_earlier_version_are_in_the_report(collected: Callable[..., Site]) -> None:
    comparison = collected("good")
    arm, _ = arms_of(comparison.pool.recipe, comparison.pool.run_id)
    comparison.id_of = lambda recipe: "earlier"
    await comparison.learned(arm)
    fewer = resolved(arm.recipe)
    del fewer["training"]["max_seconds"]
    comparison.pool.store.update("run", {"run_id": "earlier", "config": json.dumps(fewer)})

    assert [run.run_id for run in comparison.report().arms[0].runs] == ["earlier"]


@pytest.mark.slow
async def test_an_arm_without_a_sample_says_which(site: Callable[..., Site]) -> None:
    comparison = site(arms={"rft": ["data.use=successes"]})
    await start_run(comparison.pool)
    with pytest.raises(DataFault, match=r"has no sample to train on for doors\.rft \(data\.use successes\)"):
        await comparison.built(arms_of(comparison.pool.recipe, comparison.pool.run_id)[0])


@pytest.mark.slow
async def test_pairs_may_come_from_the_trees_of_the_pool(site: Callable[..., Site]) -> None:
    comparison = site("eto.preferences.source=trees", arms={"eto": ["data.use=preferences"]})
    assert [stage.name for stage in comparison.pool.plan(1).stages] == ["collect", "prefer"]
    _, contents = await (await comparison.collected()).built(arms_of(comparison.pool.recipe, comparison.pool.run_id)[0])
    assert set(contents["samples"]) == {"chosen", "rejected"}
    assert comparison.ask("select distinct kind from preference") == [("tree",)]


def settings(arm: Arm) -> TrainingConfig:
    """Return what an arm is trained with."""
    training = plan_of(arm.recipe, 1).training
    assert training is not None
    return training.config


def test_arms_differ_in_what_they_change_and_in_their_seed() -> None:
    arms = arms_of(recipe(), "pool")
    assert [(arm.name, arm.seed) for arm in arms] == [(name, seed) for name in ARMS for seed in (5, 6)]
    for arm in arms:
        assert settings(arm).max_tokens == 700
        assert arm.recipe.compare.pool == "pool"
        assert parse(resolved(arm.recipe)) == arm.recipe, "it can be read back from the store"
        plain, fields = resolved(recipe()), resolved(arm.recipe)
        same = set(plain) - {"name", "seed", "compare", "data", "training", "eto"}
        assert {field: fields[field] for field in same} == {field: plain[field] for field in same}
    assert {arm.recipe.training.learning_rate for arm in arms if arm.name == "both"} == {1e-4}
    assert {arm.recipe.eto.dpo.beta for arm in arms if arm.name == "eto"} == {(0.3,)}


def test_the_budget_may_be_time() -> None:
    overrides = ("training.max_tokens=0", "training.max_seconds=90")
    for arm in arms_of(recipe(*overrides), "pool"):
        config = settings(arm)
        assert (config.max_tokens, config.max_seconds) == (0, 90)
    with pytest.raises(ConfigError) as caught:
        recipe("training.max_seconds=90")
    assert str(caught.value) == (
        "recipe: training.max_seconds: training.max_tokens is a budget already; leave one of the two out"
    )


@pytest.mark.slow
def test_a_run_is_another_one_for_each_arm_seed_and_pool(tiny_model_dir: Path) -> None:
    base_recipe = recipe(model=tiny_model_dir)
    pool = run_id_of(base_recipe)
    ids = [run_id_of(arm.recipe) for name in (pool, "other") for arm in arms_of(base_recipe, name)]
    assert len({pool, *ids}) == 33
    assert run_id_of(recipe("data.windowed=reject", model=tiny_model_dir)) != pool, "its splices are others"
    scoring_ids = {run_id_of(recipe(f"data.scoring={name}", model=tiny_model_dir)) for name in ("abc", "bcd")}
    assert len(scoring_ids | {pool}) == 3, "its pairs and good paths are others"
    assert run_id_of(recipe("data.windowed=stretches", model=tiny_model_dir)) == pool
    assert run_id_of(recipe("data.good_per_tree=2", arms={}, model=tiny_model_dir)) == pool
    for change in ("search.width=3", "data.use=good", "eto.explore.samples=1", "seed=1", "evaluation.max_steps=9"):
        assert run_id_of(recipe(change, model=tiny_model_dir)) != pool


def test_a_pool_has_what_its_arms_need() -> None:
    def stages(*uses: str, overrides: Sequence[str] = ()) -> tuple[str, ...]:
        plan = pool_stages(
            recipe(*overrides, arms={f"arm-{number}": [f"data.use={use}"] for number, use in enumerate(uses)})
        )
        return tuple(stage.name for stage in plan)

    assert stages("revision", "expert") == ("collect", "critique", "splice", "demonstrate")
    assert stages("both+expert") == ("collect", "critique", "splice", "demonstrate")
    assert stages("successes") == ("explore",)
    assert stages("rft") == ("demonstrate", "explore")
    assert stages("preferences") == ("demonstrate", "explore", "prefer")
    assert stages("preferences", overrides=["eto.preferences.against=own"]) == ("explore", "prefer")
    assert stages("preferences", overrides=["eto.preferences.source=file", "eto.preferences.file=f"]) == ("prefer",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["compare.arms={}"], "compare.arms: name at least one"),
        (["compare.arms.base=[data.use=good]"], "compare.arms.base: reports call the model so"),
        (["compare.seeds=[]"], "compare.seeds: name at least one"),
        (["compare.seeds=[1, 1]"], "compare.seeds: a seed comes twice"),
        (["training.max_tokens=0"], "training.max_tokens: give the number of trained tokens that every arm gets"),
        (["compare.arms.rft=[training.max_seconds=9]"], "compare.arms.rft: 'training.max_seconds=9' is the same"),
        (["data.use=expert"], "data.use: expert is for an arm"),
        (["data.use=good"], "compare.arms.revision: trains on revisions, and with data.use good the pool has none"),
        (["eto.phases=[dpo]"], "eto.phases: has no use in a comparison"),
        (["eto.preferences.level=step"], "eto.preferences.level: a comparison takes trajectory"),
        (["compare.pool=abc"], "compare.pool: comparisons set it"),
        (["compare.samples=abc"], "compare.samples: comparisons set it"),
        (["compare.trees=abc"], "compare.trees: comparisons set it"),
        (
            ["compare.arms.rft=[data.use=rft, pairs.beta=0.1]"],
            "'pairs.beta=0.1' is about samples of trees",
        ),
        (["compare.arms.good=[data.use=good, splice.prune=true]"], "compare.arms.good: splice.prune: works only in"),
        (["compare.arms.rft=[search.width=9]"], "compare.arms.rft: 'search.width=9' is the same for all arms"),
        (["compare.arms.rft=[data.windowed=reject]"], "compare.arms.rft: 'data.windowed=reject' is the same for all"),
        (["compare.arms.rft=[training.max_tokens=9]"], "compare.arms.rft: 'training.max_tokens=9' is the same"),
        (["compare.arms.rft=[data.use=rft, data.suffixes=exchanged]"], "data.suffixes: exchanges those of revisions"),
        (["compare.arms.rft=[data.use=dagger]"], "compare.arms.rft: data.use: "),
        (["compare.arms.rft=[training.lr=1]"], "compare.arms.rft: training.lr: unknown field"),
    ],
)
def test_a_comparison_that_would_not_be_one_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        method_named("compare").check_recipe(recipe(*overrides))
    assert str(caught.value).startswith("recipe doors: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"method": "agent-r", "compare": {"seeds": [1]}}, "compare: belongs to another method than agent-r"),
        ({"method": "agent-r", "data": {"use": "successes"}}, "data.use: successes is for the arms of method compare"),
        ({"method": "compare", "iterations": 2}, "iterations: belongs to another method than compare"),
        ({"method": "compare", "data": {"replay": True}}, "data.replay: a comparison has no earlier iterations"),
        ({"method": "compare", "compare": {"arms": {"A B": []}}}, "compare.arms.A B"),
    ],
)
def test_fields_that_belong_elsewhere_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({"name": "r", "model": {"path": "m"}, **data})


def test_samples_are_made_once_for_all_arms_that_splice_alike(tiny_model_dir: Path) -> None:
    arms = {
        "as-it-is": ["splice.mode=blind"],
        "direct": ["data.use=revision", "splice.mode=direct"],
        "direct-both": ["splice.mode=direct"],
        "best": ["data.use=good", "pairs.alpha=[1.0]"],
    }
    base_recipe = recipe(arms=arms, model=tiny_model_dir)
    recipes = {arm.name: arm.samples_recipe for arm in arms_of(base_recipe)}
    assert recipes["as-it-is"] is None
    assert [(variant.splice.mode, variant.pairs.alpha) for variant in sample_recipes(base_recipe)] == [
        ("direct", base_recipe.pairs.alpha),
        (base_recipe.splice.mode, (1.0,)),
    ]
    assert len({arm.recipe.compare.samples for arm in arms_of(base_recipe, "pool")}) == 3, "and for all seeds"


def test_only_arms_that_are_there_can_be_chosen() -> None:
    assert list(with_arms(recipe(), ["eto", "good"]).compare.arms) == ["good", "eto"]
    with pytest.raises(
        ConfigError, match="recipe doors has no arm 'dagger'; it has good, revision, both, cloning, all, rft, own, eto"
    ):
        with_arms(recipe(), ["good", "dagger"])


def test_the_table_shows_intervals_where_there_are_some() -> None:
    several = SeedMean(value=0.5, low=0.25, high=0.75, n=3)
    alone = SeedMean(value=0.25, low=None, high=None, n=1)
    report = ComparisonReport(
        recipe_name="doors",
        run_id="r",
        date="2026-11-21",
        environment="door",
        model="m",
        max_tokens=700,
        max_seconds=0.0,
        seeds=(0, 1, 2),
        base=None,
        arms=(
            ArmReport(name="good", trains_on="good", runs=(), success=several, steps=changed(several, value=2.5)),
            ArmReport(
                name="eto", trains_on="preferences", runs=(), success=alone, versus_first=changed(alone, value=-0.25)
            ),
        ),
    )
    first, second = table_text(scores_table(report)).splitlines()[1:]
    assert first.split("  ")[0] == "good"
    assert "50.0 (25.0 to 75.0)" in first
    assert " 25.0 " in second
    assert "(" not in second, "one seed has no interval"
    assert "\N{MINUS SIGN}25.0" in second
    assert second.endswith("0 of 3")
    page = render_comparison(report)
    assert page.count("<h2>") == 4
    assert "50.0 <small>25.0 to 75.0</small>" in page
    assert "50.0 (25.0 to 75.0)" in render_comparison_markdown(report)
    assert "have not ended: good with seed 0, good with seed 1, good with seed 2, eto with seed 0" in page
