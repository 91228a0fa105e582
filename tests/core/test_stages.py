"""The stages of a run on a real store, without Prefect: resume, tolerated losses, and what must not
be lost.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from asked import run_id_of
from door import Door

from agentr_core.environment import Repeatability
from agentr_core.errors import (
    ConfigError,
    DataFault,
    EnvironmentFault,
    EnvironmentUnavailable,
    ErrorBudgetSpent,
    ModelFault,
    StoreError,
    TrainingFault,
)
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect, finished_trees
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION, critique
from agentr_core.methods.agent_r.report import judge_record, revision_sections
from agentr_core.methods.agent_r.splice import keep_good_paths, splice_pairs
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.environments import REVISION, TEST
from agentr_core.reports.document import Counts, Paragraph
from agentr_core.reports.markdown import render_markdown
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.instances import chosen_instances
from agentr_core.runtime.start import begin_iteration, check_files, start_run
from agentr_core.stages import train as training
from agentr_core.stages.dataset import check_dataset, dataset, dataset_file, load_token_rows
from agentr_core.stages.demonstrate import expert_samples
from agentr_core.stages.evaluate import evaluate, evaluation_id
from agentr_core.stages.report import Scoreboard, build_report
from agentr_core.stages.train import train
from agentr_core.store import database
from agentr_core.store.codec.ledger import iteration_rows
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.codec.trajectories import load_episodes
from agentr_core.store.connection import open_connection
from agentr_core.store.database import Store
from agentr_core.store.queries.listings import ancestry
from agentr_core.store.queries.runs import stage_seconds
from agentr_core.training.job import TrainingStep
from agentr_core.types import Generation, Instance, Message, Request, SampleKind, Transition


class House(Door):
    """Doors with an expert; `broken` doors cannot be opened by anybody, and `flaky` counts down to
    a passing fault.
    """

    def __init__(self, broken: Sequence[str] = (), flaky: list[int] | None = None) -> None:
        super().__init__()
        self._broken = broken
        self._flaky = flaky if flaky is not None else []

    def reset(self, instance: Instance) -> str:
        observation = super().reset(instance)
        self._key = instance.key
        return observation

    def step(self, action: str) -> Transition:
        if self._key in self._broken:
            raise EnvironmentFault(f"door {self._key} fell out of its frame")
        if self._flaky:
            self._flaky[0] -= 1
            if self._flaky[0] == 0:
                raise EnvironmentUnavailable("the house is out for a moment")
        return super().step(action)

    def expert(self, instance: Instance) -> Sequence[str]:
        return [next(word for word in map(str, range(99)) if self.parse(word) == "open")]


@dataclass
class RequestCounts:
    """What a model was asked, by purpose."""

    act: int = 0
    judge: int = 0
    told: int = 0
    """How often it acted after a diagnosis."""
    roles: Counter[str] = field(default_factory=Counter)


class Speaker(ScriptedModel):
    """Says another word each time it acts, calls every step bad when it judges, and remembers what
    it was asked.
    """

    def __init__(self, asked: RequestCounts, mute_about: str = "", role: str = "actor") -> None:
        super().__init__(self._speak)
        self._asked = asked
        self._role = role
        self._mute_about = mute_about

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        for request in requests:
            judging = JUDGE_INSTRUCTION in request.messages[-1].text
            self._asked.judge += judging
            self._asked.act += not judging
            self._asked.told += not judging and any("mistake" in message.text for message in request.messages)
            self._asked.roles[self._role] += 1
            if judging and self._mute_about and self._mute_about in request.messages[-1].text:
                raise ModelFault("no word about this one")
        return await super().generate(requests)

    @staticmethod
    def _speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
        if JUDGE_INSTRUCTION in messages[-1].text:
            return "Reason: so it is.\nJudgement: Bad"
        return f"word {fingerprint(seed, number)}"


@dataclass
class Site:
    """A workspace, and what its model was asked."""

    ctx: RunContext
    asked: RequestCounts


@pytest.fixture
def site(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Callable[..., Site]:
    """Return a maker of workplaces on one store; options are overrides of the recipe and faults of
    the world.
    """

    def make(
        *overrides: str, broken: Sequence[str] = (), flaky: list[int] | None = None, mute: str = "", model: str = ""
    ) -> Site:
        recipe = parse(
            {
                "name": "door",
                "environment": {"name": "door"},
                "model": {"path": model or str(tiny_model_dir)},
                "search": {"dives": 3, "width": 3, "depth": 5, "max_new_tokens": 8},
                "instances": {"train_limit": 0},
                "data": {"max_length": 4096},
                "evaluation": {"max_steps": 5, "revision_test": {"cuts": 2, "max_steps": 5}},
                "errors": {"budget": 0.4},
            },
            overrides,
        )
        counts = RequestCounts()
        ctx = RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / "runs",
            store=open_store(tmp_path / "runs" / "store.duckdb"),
            make_environment=lambda _: House(broken, flaky),
            load_model=lambda role, path: Speaker(counts, mute, role),
            progress=lambda done, total, note: None,
        )
        return Site(ctx, counts)

    return make


async def prepare(ctx: RunContext) -> None:
    await start_run(ctx)
    await begin_iteration(ctx, 1)


async def make_data(ctx: RunContext) -> dict[str, Any]:
    await prepare(ctx)
    await collect(ctx, 1)
    await critique(ctx, 1)
    await splice_pairs(ctx, 1)
    return await dataset(ctx, 1)


def count(ctx: RunContext, sql: str) -> int:
    return int(ctx.store.rows(sql)[0][0])


@pytest.mark.slow
async def test_a_second_run_of_all_stages_finds_everything_done(site: Callable[..., Site]) -> None:
    run = site()
    data = await make_data(run.ctx)
    await evaluate(run.ctx, 0)
    assert data["rows"] > 0
    assert {"revision", "good"} <= set(data["samples"])
    assert run.asked.act > 0
    assert run.asked.judge > 0
    tables = ("tree", "node", "pair", "critique", "verdict", "sample", "dataset_row", "rejection", "episode", "event")
    before = {table: count(run.ctx, f"select count(*) from {table}") for table in tables}
    content = dataset_file(run.ctx, 1).read_bytes()

    rerun = site()
    assert await make_data(rerun.ctx) == data
    await evaluate(rerun.ctx, 0)
    assert rerun.asked == RequestCounts()
    assert {table: count(rerun.ctx, f"select count(*) from {table}") for table in tables} == before
    assert dataset_file(rerun.ctx, 1).read_bytes() == content


def count_tries(ctx: RunContext) -> tuple[int, int, int]:
    """Return how many tries a splice stage has stored, how many pairs it had tried, and how many of
    these no try cleared alpha for.
    """
    num_by_reason = dict(ctx.store.rows("select reason, count(*) from rejection where stage = 'splice' group by all"))
    num_hopeless = num_by_reason.pop("no-try-cleared-alpha", 0)
    num_tries = count(ctx, "select count(*) from trajectory where source = 'rollout'")
    return num_tries, count(ctx, "select count(*) from critique") - sum(num_by_reason.values()), num_hopeless


@pytest.mark.slow
async def test_the_policy_goes_on_from_turns_of_revision_and_only_once(site: Callable[..., Site]) -> None:
    overrides = ("splice.mode=continued", "splice.continuation={samples: 6, max_steps: 5, max_new_tokens: 8}")
    run = site(*overrides)
    data = await make_data(run.ctx)
    num_tries, num_splices, num_hopeless = count_tries(run.ctx)
    assert num_tries == 6 * num_splices
    sql = """
        select count(*), count(distinct pair_id) from sample join trajectory t using (trajectory_id)
        where kind = 'revision' and t.success and t.source = 'rollout'
    """
    [(samples, pairs)] = run.ctx.store.rows(sql)
    assert samples == pairs == data["samples"]["revision"] > 0
    assert samples + num_hopeless == num_splices
    rerun = site(*overrides)
    assert await make_data(rerun.ctx) == data
    assert rerun.asked == RequestCounts()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["actor", "teacher"])
async def test_a_model_goes_on_after_a_rollback_and_is_trained_without_what_it_was_told(
    site: Callable[..., Site], tiny_model_dir: Path, by: str
) -> None:
    rollback = (
        f"splice={{mode: rollback, continuation: {{by: {by}, samples: 3, max_steps: 5, max_new_tokens: 8}}}}",
        "pairs.per_tree=1",
        *([f"models.teacher.path={tiny_model_dir}"] if by == "teacher" else []),
    )
    run = site(*rollback)
    data = await make_data(run.ctx)
    num_tries, num_splices, num_hopeless = count_tries(run.ctx)
    assert num_tries == 3 * num_splices
    assert 0 < run.asked.told <= num_tries * 5
    ids = [key for (key,) in run.ctx.store.rows("select sample_id from sample where kind = 'revision'")]
    samples = load_samples(run.ctx.store, ids).values()
    assert len(samples) == data["samples"]["revision"] == num_splices - num_hopeless > 0
    for sample in samples:
        assert not any("mistake" in message.text for message in sample.messages)
        assert "so it is." in sample.provenance.extra["diagnosis"]
        assert sample.provenance.extra.get("by", "actor") == by
    roles = {role for role, num_requests in run.asked.roles.items() if num_requests}
    assert roles == {"actor", "judge"} | ({"teacher"} if by == "teacher" else set())
    [(num_wins,)] = run.ctx.store.rows("select count(*) from trajectory where source = 'rollout' and success")
    survival = revision_sections(run.ctx, 1)[0]
    (text,) = [block.text for block in survival.blocks if isinstance(block, Paragraph)]
    author = f" by the teacher, {tiny_model_dir}," if by == "teacher" else ""
    assert f"Of {num_tries:,} continuations{author} {num_wins:,} (" in text
    [(key,)] = run.ctx.store.rows("select min(trajectory_id) from trajectory where source = 'rollout'")
    (line, *_) = ancestry(run.ctx.store, key, "trajectory")
    assert line.facts.get("continued by") == ("teacher" if by == "teacher" else None)
    assert not run.ctx.store.rows("select * from v_orphans")
    rerun = site(*rollback)
    assert await make_data(rerun.ctx) == data
    assert rerun.asked == RequestCounts()


@pytest.mark.slow
@pytest.mark.parametrize("shared_cut", ["reject", "keep"])
async def test_revision_length_counts_from_the_split_over_spliced_pairs_alone(
    site: Callable[..., Site], shared_cut: str
) -> None:
    cut_rule = f"splice.shared_cut={shared_cut}"
    root = ("critique.scan_from=root", "splice.mode=blind", "splice.impossible=keep", cut_rule, "pairs.order=published")
    run = site(*root)
    await make_data(run.ctx)
    record = judge_record(run.ctx, 1)
    assert record is not None
    lengths = record.num_pairs_by_length
    # The judge calls every step bad, so the first error is the first step: where paths part at
    # once, or before.
    [(num_at_once, num_shared)] = run.ctx.store.rows(
        "select count(*) filter (shared_steps = 0), count(*) filter (shared_steps > 0) from pair"
    )
    assert num_shared > 0
    assert lengths == ({1: num_at_once, 0: num_shared} if shared_cut == "keep" else {1: num_at_once})
    num_rejections = count(run.ctx, "select count(*) from rejection where reason = 'cut-in-shared-prefix'")
    assert num_rejections == (0 if shared_cut == "keep" else num_shared)
    num_pairs = count(run.ctx, "select count(distinct pair_id) from sample where kind = 'revision'")
    assert sum(lengths.values()) == num_pairs


@pytest.mark.slow
async def test_rows_that_the_model_cannot_take_are_left_out_however_long_they_may_be(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = site("data.max_length=0")
    data = await make_data(run.ctx)
    lengths = sorted(len(ids) for ids, _ in load_token_rows(run.ctx, 1))
    monkeypatch.setattr("agentr_core.stages.dataset.own_context_length", lambda path: lengths[-1] - 1)
    rerun = site("data.max_length=8192")
    rerun_data = await make_data(rerun.ctx)
    assert 0 < rerun_data["rows"] < data["rows"]
    assert count(rerun.ctx, "select count(*) from rejection where reason = 'too-long'") > 0


@pytest.mark.slow
async def test_a_lost_dataset_file_is_made_anew_and_is_the_same(site: Callable[..., Site]) -> None:
    run = site()
    data = await make_data(run.ctx)
    content = dataset_file(run.ctx, 1).read_bytes()
    dataset_file(run.ctx, 1).unlink()
    assert await dataset(run.ctx, 1) == data
    assert dataset_file(run.ctx, 1).read_bytes() == content


@pytest.mark.slow
async def test_a_dataset_is_not_changed_behind_its_hash(site: Callable[..., Site]) -> None:
    run = site(broken=["door/train/3"])
    data = await make_data(run.ctx)
    rows = count(run.ctx, "select count(*) from dataset_row")

    rerun = site()
    assert await make_data(rerun.ctx) == data, "trees that were lost then do not change a dataset that was made"
    assert count(rerun.ctx, "select count(*) from dataset_row") == rows
    dataset_file(rerun.ctx, 1).unlink()
    with pytest.raises(DataFault, match="is gone; bring the file back"):
        await dataset(rerun.ctx, 1)


@pytest.mark.slow
async def test_a_file_of_other_rows_is_not_taken_for_the_dataset(site: Callable[..., Site]) -> None:
    run = site()
    data = await make_data(run.ctx)
    file = dataset_file(run.ctx, 1)
    content, key = file.read_bytes(), data["dataset_hash"]
    check_dataset(run.ctx, 1, key)
    # As an earlier version wrote it, without its hash.
    pq.write_table(pq.read_table(file).replace_schema_metadata(), file)
    check_dataset(run.ctx, 1, key)

    pq.write_table(pq.read_table(file).slice(1), file)
    with pytest.raises(DataFault, match="is not the dataset that is stored"):
        check_dataset(run.ctx, 1, key)
    assert await dataset(run.ctx, 1) == data
    assert file.read_bytes() == content

    with run.ctx.store.transaction() as con:
        con.execute("delete from sample where sample_id = (select min(sample_id) from dataset_row)")
        con.execute("delete from dataset_row where position = 0")
    with pytest.raises(StoreError, match=r"lacks rows of the dataset of iteration 1 of run .* put back a store"):
        await train(run.ctx, 1)


@pytest.mark.slow
async def test_a_training_counts_once_however_often_it_is_begun(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = site()
    await make_data(run.ctx)
    complete: list[bool] = []
    result = SimpleNamespace(seconds=1000.0, trained_tokens=7, final_loss=0.5, ended_by="", check_ending=lambda: None)

    async def attempt(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0.05)
        if not complete:
            raise TrainingFault("killed")
        return result

    monkeypatch.setattr(training, "fine_tune", attempt)
    monkeypatch.setattr(training, "store_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(training, "is_complete", lambda _: len(complete) > 1)
    monkeypatch.setattr(training, "check_weights", lambda *_, **__: None)
    with pytest.raises(TrainingFault):
        await train(run.ctx, 1)
    for _ in range(3):
        # Goes on to its end; then the run is begun anew, and finds the checkpoint.
        complete.append(True)
        await train(run.ctx, 1)
    assert stage_seconds(run.ctx.store, run.ctx.run_id)[1, "train"] == pytest.approx(1000, abs=1)
    assert run.ctx.store.rows("select sum(tokens) from timing where stage = 'train'") == [(7,)]


@pytest.mark.slow
@pytest.mark.parametrize(("rates", "is_idle"), [([0.0], True), ([0.0, 1e-3], False), ([1e-3], False)])
async def test_a_training_that_only_warmed_up_says_that_nothing_was_trained(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, rates: list[float], is_idle: bool
) -> None:
    run = site()
    await make_data(run.ctx)

    async def attempt(_: Any, *, on_progress: Callable[[Any], None]) -> Any:
        for number, rate in enumerate(rates, start=1):
            step = TrainingStep(
                step=number, total_steps=2, loss=0.5, trained_tokens=7, seconds=1.0, learning_rate=rate, grad_norm=1.0
            )
            on_progress(step)
        return SimpleNamespace(
            seconds=1.0, trained_tokens=7, final_loss=0.5, steps=len(rates), ended_by="", check_ending=lambda: None
        )

    monkeypatch.setattr(training, "fine_tune", attempt)
    monkeypatch.setattr(training, "store_checkpoint", lambda *_, **__: None)
    note = (await train(run.ctx, 1)).get("note", "")
    assert note.endswith("set training.warmup_ratio=0, or train for more steps") == is_idle
    assert note.startswith("nothing was trained") == is_idle


@pytest.mark.slow
async def test_general_data_that_changed_under_a_run_are_told(site: Callable[..., Site], tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n')
    run = site(f"data.general.file={file}", "data.general.share=0.5")
    await start_run(run.ctx, evaluates=True)
    content = file.read_text()
    file.write_text(content * 2)
    # Nothing was trained on what was there before.
    await start_run(run.ctx)
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"chat.jsonl is not what it was when run .* began to train; bring its"):
        await start_run(run.ctx)
    await start_run(run.ctx, evaluates=True)
    file.write_text(content * 2)
    await start_run(run.ctx)


@pytest.mark.slow
async def test_no_stage_goes_on_with_files_that_changed(site: Callable[..., Site], tmp_path: Path) -> None:
    demonstrations, chats = tmp_path / "expert.jsonl", tmp_path / "chat.jsonl"
    turns = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n'
    for file in (demonstrations, chats):
        file.write_text(turns)
    overrides = (f"data.general.file={chats}", "data.general.share=0.5")
    run = site("method=eto", "search={}", f"eto.expert.file={demonstrations}", *overrides)
    ctx, (playing, training) = run.ctx, (run.ctx.plan(1).stage(name) for name in ("demonstrate", "dataset"))
    check_files(ctx, playing)
    await start_run(ctx)
    check_files(ctx, playing)
    check_files(ctx, training)

    chats.write_text(turns * 2)
    check_files(ctx, playing)
    with pytest.raises(ConfigError, match=r"^data.general.file: .*chat.jsonl is not what it was"):
        check_files(ctx, training)
    demonstrations.write_text(turns * 2)
    with pytest.raises(ConfigError, match=rf"^run {ctx.run_id} cannot go on: {demonstrations} are not what they"):
        check_files(ctx, playing)
    demonstrations.write_text(turns)
    check_files(ctx, playing)


@pytest.mark.slow
async def test_a_tree_that_was_lost_is_left_out_and_grown_next_time(site: Callable[..., Site]) -> None:
    run = site(broken=["door/train/2"])
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    trees = finished_trees(run.ctx, 1)
    assert len(trees) == 5
    assert len(await chosen_instances(run.ctx, 1)) == 6
    assert "door/train/2" not in {tree.instance.key for tree in trees.values()}
    assert run.ctx.store.rows('select subject, "class", level from event') == [
        ("door/train/2", "EnvironmentFault", "error")
    ]

    rerun = site()
    assert (await collect(rerun.ctx, 1))["new"] == 1
    assert len(finished_trees(rerun.ctx, 1)) == 6


@pytest.mark.slow
async def test_later_stages_take_the_instances_that_the_first_ones_stored(site: Callable[..., Site]) -> None:
    run = site()
    await prepare(run.ctx)
    await evaluate(run.ctx, 0)
    await collect(run.ctx, 1)

    class Unlisted(House):
        def instances(self, split: str) -> Sequence[Instance]:
            raise AssertionError(f"{split} is listed again")

    later = replace(run.ctx, make_environment=lambda _: Unlisted([], None))
    await critique(later, 1)
    await splice_pairs(later, 1)
    assert (await dataset(later, 1))["rows"] > 0
    assert (await collect(later, 1))["new"] == 0
    await evaluate(later, 0)


@pytest.mark.slow
async def test_an_evaluation_opens_the_store_as_often_for_many_sets_as_for_one(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[Path] = []

    def open_and_note(path: Path, *args: Any, **options: Any) -> Any:
        paths.append(path)
        return open_connection(path, *args, **options)

    async def num_openings(*sets: str) -> int:
        ctx = site("evaluation.revision_test.enabled=false", *sets).ctx
        await start_run(ctx)
        await evaluate(ctx, 0)
        paths.clear()
        await evaluate(ctx, 0)
        return len(paths)

    monkeypatch.setattr(database, "open_connection", open_and_note)
    assert await num_openings("evaluation.sets={dev: {split: dev}, again: {split: test}}") == await num_openings()


@pytest.mark.slow
async def test_a_loss_that_was_tolerated_is_tolerated_when_the_stage_runs_again(site: Callable[..., Site]) -> None:
    broken = ["door/test/1", "door/train/1"]
    run = site("errors.budget=0.2", broken=broken)
    await prepare(run.ctx)
    for _ in range(2):
        await collect(run.ctx, 1)
        await critique(run.ctx, 1)
        # One of six episodes is one of one when only it is left to play.
        scores = await evaluate(run.ctx, 0)
        assert scores[TEST]["n"] == 5
    strict = site("errors.budget=0.1", broken=broken)
    await prepare(strict.ctx)
    with pytest.raises(ErrorBudgetSpent):
        await evaluate(strict.ctx, 0)


@pytest.mark.slow
async def test_a_further_try_of_a_tree_goes_on_where_the_last_one_was(site: Callable[..., Site]) -> None:
    run = site("instances.train_limit=1")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    (whole,) = finished_trees(run.ctx, 1).values()
    # Without what tells that both runs ask for the same, the second one searches for itself.
    with run.ctx.store.transaction() as con:
        con.execute("delete from stage_input")

    flaky_run = site("instances.train_limit=1", flaky=[len(whole.nodes) - 2])
    flaky_run = Site(replace(flaky_run.ctx, run_id="another"), flaky_run.asked)
    await prepare(flaky_run.ctx)
    await collect(flaky_run.ctx, 1)
    (tree,) = finished_trees(flaky_run.ctx, 1).values()
    assert tree == whole
    assert flaky_run.ctx.store.rows('select "class", level from event') == [("EnvironmentUnavailable", "warning")]
    assert flaky_run.asked.act == run.asked.act + 1, "only the expansion that failed is sampled again"


@pytest.mark.slow
async def test_pairs_whose_judge_failed_are_rejected_with_a_reason(site: Callable[..., Site]) -> None:
    run = site(mute="Door 0 of the train")
    data = await make_data(run.ctx)
    assert data["samples"]["revision"] > 0
    num_rejections = count(run.ctx, "select count(*) from rejection where stage = 'splice' and reason = 'not-judged'")
    num_without_critique = count(run.ctx, "select count(*) from pair anti join critique using (pair_id)")
    assert num_rejections == num_without_critique > 0


@pytest.mark.slow
async def test_a_pair_that_is_judged_later_is_no_longer_rejected(site: Callable[..., Site]) -> None:
    run = site(mute="Door 0 of the train")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    await critique(run.ctx, 1)
    first = await splice_pairs(run.ctx, 1)
    rerun = site()
    await critique(rerun.ctx, 1)
    last = await splice_pairs(rerun.ctx, 1)
    assert last["revision"] > first["revision"]
    assert count(rerun.ctx, "select count(*) from rejection where stage = 'splice'") == last["rejected"]
    assert count(rerun.ctx, "select count(*) from sample") == last["revision"] + last["good"]
    assert await dataset(rerun.ctx, 1) == await make_data(rerun.ctx)


class Thinker(ScriptedModel):
    """Judges after a thought that quotes its options, which `endless` seeds never end."""

    def __init__(self, endless: Callable[[int], bool]) -> None:
        def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
            thought = "<think> I end with Judgement: Good or Judgement: Bad, if it harms"
            return f"{thought}{' and so on' * 9 if endless(seed + number) else ' </think> Judgement: Bad'}"

        super().__init__(speak)


@pytest.mark.slow
async def test_a_judge_that_is_cut_within_its_thoughts_stops_the_stage(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    run = site("critique.max_new_tokens=20", "critique.votes=5", "critique.temperature=1")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    ctx = replace(run.ctx, load_model=lambda role, path: Thinker(lambda seed: True))
    cut = r"of the judge \(scripted\) were cut at their token limit before their thought had ended"
    with pytest.raises(ConfigError, match=rf"^20 of 20 replies {cut}.*more tokens.*a reasoning parser"):
        await critique(ctx, 1)
    assert "replies of the judge (scripted) were cut" in caplog.text
    assert count(ctx, "select count(*) from critique where first_error is not null") == 0


@pytest.mark.slow
async def test_replies_cut_within_a_thought_are_counted_and_are_no_errors(
    site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    run = site("critique.max_new_tokens=20", "critique.unparsable=bad")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    ctx = replace(run.ctx, load_model=lambda role, path: Thinker(lambda seed: seed % 4 == 0))
    await critique(ctx, 1)
    record = judge_record(ctx, 1)
    assert record is not None
    assert record.num_steps_by_verdict == {
        "bad": record.num_replies - record.num_unreadable,
        "unparsable": record.num_unreadable,
    }
    assert 0 < record.num_unreadable < record.num_replies / 2
    assert f"{record.num_unreadable} of {record.num_replies} replies of the judge" in caplog.text
    assert not count(
        ctx,
        "select count(*) from critique c join verdict v using (pair_id) "
        "where c.first_error = v.position and v.verdict <> 'bad'",
    )
    page = render_markdown(build_report(ctx, 1))
    rate = f"| {record.num_unreadable} | {record.num_replies} replies |"
    assert any("Cut within a thought" in line and line.endswith(rate) for line in page.splitlines())
    assert f"| judge | {record.num_replies} | {record.num_unreadable} |" in page


@pytest.mark.slow
async def test_an_ill_typed_answer_costs_its_pair_or_path_and_not_the_stage(site: Callable[..., Site]) -> None:
    """The world answers as it should while trees grow, and in one instance no longer when paths are
    played again.
    """
    run = site("splice.mode=verified", "splice.prune=true")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    await critique(run.ctx, 1)

    class Odd(House):
        def step(self, action: str) -> Transition:
            transition = super().step(action)
            odd = self._key == "door/train/1"
            return transition._replace(info={**transition.info, "success": "False"}) if odd else transition

    await splice_pairs(replace(run.ctx, make_environment=lambda _: Odd()), 1)
    rejections = run.ctx.store.rows("select subject, detail from rejection where reason = 'ill-typed-answer'")
    assert rejections
    assert all("is 'False'; it must be true or false" in detail for _, detail in rejections)
    instance_ids = run.ctx.store.rows("select distinct instance_id from sample order by 1")
    assert len(instance_ids) == 5
    assert ("door/train/1",) not in instance_ids


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["verified", "continued"])
async def test_a_pair_whose_replay_leads_elsewhere_is_lost_where_nothing_else_was_promised(
    site: Callable[..., Site], mode: str
) -> None:
    run = site(f"splice.mode={mode}")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    await critique(run.ctx, 1)

    class Restarted(House):
        repeatability = Repeatability.NEVER

        def step(self, action: str) -> Transition:
            transition = super().step(action)
            return transition._replace(observation=f"{transition.observation} It is late.")

    await splice_pairs(replace(run.ctx, make_environment=lambda _: Restarted()), 1)
    rejections = run.ctx.store.rows("select detail from rejection where reason = 'replay-drifted'")
    assert rejections
    assert all("does not promise to repeat itself" in detail for (detail,) in rejections)
    assert run.ctx.store.rows("select distinct kind from sample") == [("good",)]


@pytest.mark.slow
async def test_every_cut_of_a_failed_episode_is_an_episode_of_its_own(site: Callable[..., Site]) -> None:
    run = site()
    await prepare(run.ctx)
    scores = await evaluate(run.ctx, 0)
    failures = [e for e in load_episodes(run.ctx.store, evaluation_id(run.ctx, 0, TEST)) if not e.trajectory.success]
    recoveries = load_episodes(run.ctx.store, evaluation_id(run.ctx, 0, REVISION))
    assert scores[REVISION]["n"] == len(recoveries) == 2 * len(failures) > 0
    for episode in failures:
        cuts = {e.cut for e in recoveries if e.instance == episode.instance}
        assert len(cuts) == 2
        assert cuts <= set(range(1, len(episode.trajectory.steps)))
    assert {e.cut for e in load_episodes(run.ctx.store, evaluation_id(run.ctx, 0, TEST))} == {0}


@pytest.mark.slow
async def test_a_checkpoint_is_not_tested_before_the_first_model(site: Callable[..., Site]) -> None:
    run = site()
    await prepare(run.ctx)
    run.ctx.store.write(
        iteration_rows(
            run.ctx.iteration_id(1),
            run_id=run.ctx.run_id,
            iteration=1,
            checkpoint_out=run.ctx.trained_checkpoint(0).id,
        )
    )
    with pytest.raises(DataFault, match="evaluate iteration 0 first"):
        await evaluate(run.ctx, 1)


@pytest.mark.slow
async def test_a_cancelled_stage_finishes_the_instance_it_is_at_and_no_more(site: Callable[..., Site]) -> None:
    run = site("data.use=expert")
    await prepare(run.ctx)
    at_work = threading.Event()
    instances: list[Instance] = []

    class Slow(House):
        def expert(self, instance: Instance) -> Sequence[str]:
            instances.append(instance)
            at_work.set()
            time.sleep(0.2)
            return super().expert(instance)

    task = asyncio.create_task(expert_samples(replace(run.ctx, make_environment=lambda _: Slow()), 1))
    await asyncio.to_thread(at_work.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(1)
    assert len(instances) < 3
    assert count(run.ctx, "select count(*) from sample") == 0


@pytest.mark.slow
async def test_revisions_good_paths_and_the_experts_episodes_make_one_dataset(site: Callable[..., Site]) -> None:
    run = site("data.use=both+expert")
    recipe = run.ctx.recipe
    stages = [stage.name for stage in run.ctx.plan(1).stages]
    assert stages == ["collect", "critique", "splice", "demonstrate", "dataset", "train", "evaluate"]
    (line, *_) = method_of(recipe).describe(recipe, 6, 4)
    assert line == "each iteration: 6 trees and the expert's episodes, then 4 held-out episodes"
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    await critique(run.ctx, 1)
    await splice_pairs(run.ctx, 1)
    await expert_samples(run.ctx, 1)
    num_by_kind = (await dataset(run.ctx, 1))["samples"]
    assert set(num_by_kind) == {"revision", "good", "expert"}
    assert num_by_kind["expert"] == 6
    rows = sum(num_by_kind.values())
    funnel = [(stage.name, stage.count) for stage in build_report(run.ctx, 1).funnel]
    assert (funnel[-3], funnel[-1]) == (("expert episodes", 6), ("trained rows", rows))


@pytest.mark.slow
async def test_the_expert_is_cloned_in_every_iteration_and_nothing_is_searched(site: Callable[..., Site]) -> None:
    run = site("data.use=expert")
    await prepare(run.ctx)
    await expert_samples(run.ctx, 1)
    data = await dataset(run.ctx, 1)
    assert data["samples"] == {"expert": 6}
    lengths = "select sum(num_tokens)::bigint, sum(num_trained_tokens)::bigint from v_samples where used"
    assert run.ctx.store.rows(lengths) == [(data["tokens"], sum(data["trained_tokens"].values()))]
    assert run.asked == RequestCounts()
    assert count(run.ctx, "select count(*) from tree") == 0
    funnel = build_report(run.ctx, 1).funnel
    assert [(stage.name, stage.count) for stage in funnel] == [
        ("expert episodes", 6),
        ("samples", 6),
        ("trained rows", 6),
    ]
    assert run.ctx.store.rows("select seconds > 0 from timing where (stage, part) = ('expert', 'environment')") == [
        (True,)
    ]
    run.ctx.store.write(
        iteration_rows(
            run.ctx.iteration_id(1),
            run_id=run.ctx.run_id,
            iteration=1,
            checkpoint_out=run.ctx.trained_checkpoint(0).id,
        )
    )
    await begin_iteration(run.ctx, 2)
    await expert_samples(run.ctx, 2)
    for iteration in (1, 2):
        samples = load_samples(run.ctx.store, iteration_id=run.ctx.iteration_id(iteration)).values()
        assert [sample.kind for sample in samples] == [SampleKind.EXPERT] * 6


@pytest.mark.slow
async def test_with_good_paths_only_nobody_is_judged(site: Callable[..., Site]) -> None:
    run = site("data.use=good")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    await keep_good_paths(run.ctx, 1)
    data = await dataset(run.ctx, 1)
    assert set(data["samples"]) == {"good"}
    assert run.asked.judge == 0


@pytest.mark.slow
async def test_the_same_weights_in_another_place_are_found_there(
    site: Callable[..., Site], tiny_model_dir: Path, tmp_path: Path
) -> None:
    link = tmp_path / "moved"
    first = site()
    await prepare(first.ctx)
    link.symlink_to(tiny_model_dir)
    second = site(model=str(link))
    await prepare(second.ctx)
    assert second.ctx.trained_checkpoint(0).id == first.ctx.trained_checkpoint(0).id
    assert second.ctx.trained_checkpoint(0).path == link
    assert first.ctx.trained_checkpoint(0).path == tiny_model_dir, (
        "the run under way keeps the directory of its own recipe"
    )
    assert first.ctx.policy(1).path == tiny_model_dir


@pytest.mark.slow
async def test_a_report_counts_the_tokens_of_search_and_judge(site: Callable[..., Site]) -> None:
    run = site()
    await make_data(run.ctx)
    await evaluate(run.ctx, 0)
    tokens = build_report(run.ctx, 1).tokens
    assert tokens is not None
    kinds = "select sum(completion_tokens) from generation where kind in ('node', 'judgement')"
    assert tokens.completion == count(run.ctx, kinds)
    assert count(run.ctx, "select count(*) from generation where kind = 'judgement'") > 0
    base = build_report(run.ctx, 0).tokens
    assert base is not None
    assert base.completion == count(run.ctx, "select sum(completion_tokens) from generation where kind = 'step'")


@pytest.mark.slow
async def test_a_report_has_the_share_of_replies_that_their_limit_cut(site: Callable[..., Site]) -> None:
    run = site("search.max_new_tokens=1", "instances.train_limit=2", "evaluation.revision_test.enabled=false")
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    await evaluate(run.ctx, 0)
    tokens = build_report(run.ctx, 1).tokens
    num_nodes = count(run.ctx, "select count(*) from generation where kind = 'node'")
    assert tokens is not None
    assert tokens.cut_by_purpose == {"collected": (num_nodes, num_nodes)}, "each word of two is cut to one"
    base = build_report(run.ctx, 0).tokens
    assert base is not None
    assert {purpose: cut for purpose, (_, cut) in base.cut_by_purpose.items()} == {"evaluated": 0}
    cut = [n.step for tree in finished_trees(run.ctx, 1).values() for n in tree.nodes if n.step]
    assert {step.finish_reason for step in cut} == {"length"}


@pytest.mark.slow
async def test_a_report_counts_refused_actions_by_the_words_of_the_world(site: Callable[..., Site]) -> None:
    run = site()
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    assert errors(run.ctx) == {}, "a door takes every word"
    with run.ctx.store.transaction() as con:
        con.execute("update node set step = struct_update(step, valid := false) where step.observation = 'Wrong 1.'")
    wrong = count(run.ctx, "select count(*) from v_nodes where observation = 'Wrong 1.'")
    assert wrong > 0
    assert errors(run.ctx) == {"Wrong 1.": wrong}


def errors(ctx: RunContext) -> Counts:
    error_counts = build_report(ctx, 1).errors
    assert error_counts is not None
    return error_counts.refusals_by_message


@pytest.mark.slow
async def test_what_a_killed_stage_left_is_grown_to_the_same_trees(site: Callable[..., Site]) -> None:
    run = site()
    await prepare(run.ctx)
    await collect(run.ctx, 1)
    whole = finished_trees(run.ctx, 1)

    # What a process that was killed right away has stored at most.
    with run.ctx.store.transaction() as con:
        con.execute("delete from node where node_index > 0")
        con.execute("update node set visits = 0, value_sum = 0, terminal = false, stop = null")
        con.execute("update tree set finished = false, dives_done = 0")
    rerun = site()
    assert (await collect(rerun.ctx, 1))["new"] == len(whole)
    assert finished_trees(rerun.ctx, 1) == whole


@pytest.mark.slow
async def test_a_run_is_known_again_by_its_stored_recipe(site: Callable[..., Site]) -> None:
    run = site("pairs.beta=0.1", "training.learning_rate=3e-4")
    await prepare(run.ctx)
    (config,) = run.ctx.store.rows("select config from run")[0]
    recipe = parse(json.loads(config))
    assert recipe == run.ctx.recipe
    assert run_id_of(recipe) == run.ctx.run_id
    assert run_id_of(parse(json.loads(config), ["iterations=9", "workspace=elsewhere"])) == run.ctx.run_id
    assert run_id_of(parse(json.loads(config), ["seed=1"])) != run.ctx.run_id


class Terrace(House):
    """Houses in rows: the doors of split `row` are those of `test` again, three times over."""

    def splits(self) -> tuple[str, ...]:
        return (*super().splits(), "row")

    def instances(self, split: str) -> Sequence[Instance]:
        if split != "row":
            return super().instances(split)
        return [Instance(environment="door", split="row", index=index) for index in range(18)]

    def origin(self, instance: Instance) -> Instance:
        split = "test" if instance.split == "row" else instance.split
        return Instance(environment="door", split=split, index=instance.index % 6)


@pytest.mark.slow
async def test_further_sets_are_played_scored_and_paired_with_the_base(site: Callable[..., Site]) -> None:
    run = site(
        "evaluation.sets.row={split: row, limit: 12, spread: false}",
        "evaluation.sets.tried={split: test, episodes: 4, temperature: 1, models: base}",
    )
    ctx = replace(run.ctx, make_environment=lambda _: Terrace())
    await prepare(ctx)
    base = await evaluate(ctx, 0)
    assert {name: score["n"] for name, score in base.items()} == {
        "test": 6, "row": 12, "tried": 24, "revision_test": base["revision_test"]["n"]
    }  # fmt: skip
    rows = iteration_rows(
        ctx.iteration_id(1), run_id=ctx.run_id, iteration=1, checkpoint_out=ctx.trained_checkpoint(0).id
    )
    ctx.store.write(rows)
    assert list(await evaluate(ctx, 1)) == ["test", "row", "revision_test"]
    num_requests = run.asked.act
    await evaluate(ctx, 1)
    assert run.asked.act == num_requests

    first, second = Scoreboard(ctx).up_to(1)
    assert [part.name for part in first.sets] == ["test", "row", "tried"]
    assert [part.name for part in second.sets] == ["test", "row"]
    row = second.score_of_set("row")
    assert row is not None
    assert row.versus_base is not None
    assert first.sets[0].versus_base is None
    assert row.versus_base.value == pytest.approx(row.success.value - first.sets[1].success.value)
    assert (row.instances, row.versus_base.n) == (12, 12)
    assert {part.depth for part in row.by_depth} == {1, 2}
    origins = ctx.store.rows("select distinct origin_id from instance where split = 'row' and instance_index in (0, 6)")
    assert origins == [("door/test/0",)]

    tries = first.score_of_set("tried")
    assert tries is not None
    assert [at.k for at in tries.pass_at] == [1, 2, 4]
    assert tries.pass_at[0].success.value == pytest.approx(tries.success.value)
    metrics = dict(ctx.store.rows("select name, value from metric where name like 'pass@%'"))
    assert metrics == {f"pass@{at.k}": pytest.approx(at.success.value) for at in tries.pass_at}
    assert sorted(metrics.values()) == [metrics[f"pass@{k}"] for k in (1, 2, 4)]


@pytest.mark.slow
async def test_the_states_of_the_revision_test_are_chosen_once_and_can_be_given_to_another_model(
    site: Callable[..., Site], tmp_path: Path, tiny_model_dir: Path
) -> None:
    lossy = site(broken=["door/test/1", "door/test/4"])
    await prepare(lossy.ctx)
    await evaluate(lossy.ctx, 0)
    state_rows = lossy.ctx.store.rows("select trajectory_id, repeat, cut from revision_state order by position")
    assert state_rows
    # What was lost is played now, but the states stay those of every model before.
    ctx = site().ctx
    rows = iteration_rows(
        ctx.iteration_id(1), run_id=ctx.run_id, iteration=1, checkpoint_out=ctx.trained_checkpoint(0).id
    )
    ctx.store.write(rows)
    before = len(load_episodes(ctx.store, evaluation_id(ctx, 0, TEST)))
    await evaluate(ctx, 0)
    await evaluate(ctx, 1)
    assert len(load_episodes(ctx.store, evaluation_id(ctx, 0, TEST))) > before
    assert ctx.store.rows("select trajectory_id, repeat, cut from revision_state order by position") == state_rows
    states = [
        [(e.instance.key, e.repeat, e.cut) for e in load_episodes(ctx.store, evaluation_id(ctx, i, REVISION))]
        for i in (0, 1)
    ]
    assert states[0] == states[1]
    assert len(states[0]) == len(state_rows)

    other_model = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other_model)
    (other_model / "generation_config.json").write_text("{}")
    transfer_ctx = site(f"evaluation.revision_test.states='{ctx.run_id}'", "seed=9", model=str(other_model)).ctx
    assert transfer_ctx.run_id != ctx.run_id
    await start_run(transfer_ctx)
    await evaluate(transfer_ctx, 0)
    episodes = load_episodes(transfer_ctx.store, evaluation_id(transfer_ctx, 0, REVISION))
    assert [(e.instance.key, e.repeat, e.cut) for e in episodes] == states[0]
    assert Scoreboard(transfer_ctx).up_to(0)[0].revision_reward is not None
    # A recipe may know a world by another name than its instances do.
    house_ctx = site(f"evaluation.revision_test.states='{ctx.run_id}'", "seed=11", "environment.name=house").ctx
    await start_run(house_ctx)
    await evaluate(house_ctx, 0)
    assert len(load_episodes(house_ctx.store, evaluation_id(house_ctx, 0, REVISION))) == len(states[0])
    nobody = site("evaluation.revision_test.states=nobody", "seed=10").ctx
    await start_run(nobody)
    with pytest.raises(DataFault, match="run nobody has no states of a revision test"):
        await evaluate(nobody, 0)


async def test_an_instance_is_not_trained_on_and_held_out_under_another_name(site: Callable[..., Site]) -> None:
    run = site("instances.train=row", "instances.test=test")
    ctx = replace(run.ctx, make_environment=lambda _: Terrace())
    await prepare(ctx)
    with pytest.raises(DataFault, match="training instance door/row/0 is held-out instance door/test/0, or a variant"):
        await collect(ctx, 1)
