"""The stages of ETO on a real store, without Prefect: what is made of what, what is turned away,
and resume.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from asked import run_id_of
from door import Door
from planned import perform

from agentr_core.errors import ConfigError, DataFault, DataFileError, EndpointError, EnvironmentFault
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.eto.preferences import prefer
from agentr_core.methods.eto.report import preference_record
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of, plan_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.recipe import Recipe
from agentr_core.reports.iteration import sections
from agentr_core.reports.markdown import render_markdown
from agentr_core.runtime.context import RunContext, Training
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.stages.dataset import dataset, dataset_file
from agentr_core.stages.demonstrate import best_expert_episodes, expert_samples
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.report import build_report
from agentr_core.store.codec.samples import load_planned_rollouts, load_preferences, load_samples
from agentr_core.store.codec.trajectories import instance_row
from agentr_core.store.database import Store
from agentr_core.types import Generation, Instance, Request, Transition

pytestmark = pytest.mark.slow
demonstrate, explore = partial(perform, "demonstrate"), partial(perform, "explore")

OPENING = next(word for word in map(str, range(99)) if Door().parse(word) == "open")
CLOSED = next(word for word in map(str, range(99)) if Door().parse(word) == "wrong")


class House(Door):
    """Doors whose expert says one wrong word and then the right one; `broken` doors cannot be
    opened by anybody.
    """

    def __init__(self, broken: Sequence[str], *, expert: bool) -> None:
        super().__init__()
        self._broken = broken
        self._knows = expert

    def reset(self, instance: Instance) -> str:
        observation = super().reset(instance)
        self._key = instance.key
        return observation

    def step(self, action: str) -> Transition:
        if self._key in self._broken:
            raise EnvironmentFault(f"door {self._key} fell out of its frame")
        return super().step(action)

    def expert(self, instance: Instance) -> Sequence[str] | None:
        return [CLOSED, OPENING] if self._knows else None


class Speaker(ScriptedModel):
    """Greedily says the wrong word all the time; drawn, another word each time. Counts what it was
    asked.
    """

    def __init__(self, asked: list[Request], strength: int) -> None:
        super().__init__(lambda messages, seed, number: f"word {fingerprint(seed, number)}")
        self._asked = asked
        self._strength = strength

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        greedy = [request for request in requests if request.sampling.temperature == 0]
        if self._strength and len(self._asked) + len(requests) > self._strength:
            raise EndpointError("the account ran out of words")
        self._asked += requests
        replies = await super().generate(requests)
        return [
            [with_text(g, CLOSED) for g in generations] if request in greedy else generations
            for request, generations in zip(requests, replies, strict=True)
        ]


def with_text(generation: Generation, text: str) -> Generation:
    return replace(generation, text=text, token_ids=())


@dataclass
class Site:
    """A workspace, and what its model was asked."""

    ctx: RunContext
    asked: list[Request]

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self.ctx.store.rows(sql)


Sites = Callable[..., Site]


@pytest.fixture
def site(tmp_path: Path, tiny_model_dir: Path, open_store: Callable[[Path], Store]) -> Sites:
    """Return a maker of workplaces, one store a folder; `strength` is how many requests the model
    answers (0: all).
    """

    def make(
        *overrides: str,
        broken: Sequence[str] = (),
        expert: bool = True,
        strength: int = 0,
        method: str = "eto",
        folder: str = "runs",
    ) -> Site:
        recipe = parse(
            {
                "name": "door",
                "method": method,
                "environment": {"name": "door"},
                "model": {"path": str(tiny_model_dir)},
                "instances": {"train_limit": 0},
                "data": {"max_length": 4096},
                "evaluation": {"max_steps": 5, "revision_test": {"enabled": False}},
                "errors": {"budget": 0.4},
            },
            ("eto.phases=[dpo]", "eto.explore.max_steps=4", *overrides) if method == "eto" else overrides,
        )
        requests: list[Request] = []
        ctx = RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / folder,
            store=open_store(tmp_path / folder / "store.duckdb"),
            make_environment=lambda _: House(broken, expert=expert),
            load_model=lambda role, path: Speaker(requests, strength),
            progress=lambda done, total, note: None,
        )
        return Site(ctx, requests)

    return make


async def prepare(one: Site) -> Site:
    await start_run(one.ctx)
    await begin_iteration(one.ctx, 1)
    return one


async def make_pairs(one: Site) -> dict[str, Any]:
    await prepare(one)
    await demonstrate(one.ctx, 1)
    await explore(one.ctx, 1)
    return await prefer(one.ctx, 1)


def demonstration(index: int, *words: str, **more: Any) -> dict[str, Any]:
    texts = ["You stand.", "Ok.", f"Door {index} of the train house."]
    for word in words:
        texts += [word, "Wrong."]
    roles = ("human", "gpt")
    return {
        "id": index,
        "conversations": [{"from": roles[at % 2], "value": text} for at, text in enumerate(texts[:-1])],
    } | more


def write(folder: Path, *records: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), "utf-8")
    return path


async def test_failures_become_pairs_with_the_expert_and_lead_back(site: Sites) -> None:
    run = site()
    assert await make_pairs(run) == {"lose": 6, "rejected": 0}
    counts = await dataset(run.ctx, 1)

    assert counts["samples"] == {"chosen": 6, "rejected": 6}
    assert dataset_file(run.ctx, 1).exists()
    (lineage, *_) = run.ask(
        "select c.source, r.source, p.chosen_reward, p.rejected_reward, p.used, c.num_steps, r.num_steps "
        "from v_preferences p join trajectory c on c.trajectory_id = p.chosen_trajectory_id "
        "join trajectory r on r.trajectory_id = p.rejected_trajectory_id"
    )
    assert lineage == ("expert", "rollout", 1.0, 0.0, True, 2, 4)
    assert run.ask("select * from v_orphans") == []
    record = preference_record(run.ctx, 1)
    assert record is not None
    assert (record.num_by_case, record.num_by_margin) == ({"lose": 6}, {0.9: 6})
    report = build_report(run.ctx, 1)
    keys = {section.key for section in sections(report)}
    assert "preferences" in keys
    assert keys.isdisjoint({"survival", "judge", "samples"})
    assert [(stage.name, stage.count) for stage in report.funnel] == [
        ("expert episodes", 6),
        ("explored episodes", 6),
        ("preference pairs", 6),
        ("samples", 12),
        ("trained rows", 12),
    ]


@pytest.mark.parametrize("odd", [{"success": "False"}, {"success": True, "valid": 1}])
async def test_an_ill_typed_answer_costs_its_episode_and_not_the_stage(site: Sites, odd: dict[str, Any]) -> None:
    class Odd(House):
        def step(self, action: str) -> Transition:
            transition = super().step(action)
            return transition._replace(info=odd) if self._key == "door/train/2" else transition

    run = await prepare(site())
    ctx = replace(run.ctx, make_environment=lambda _: Odd((), expert=True))
    assert await demonstrate(ctx, 1) == {"expert": 5, "rejected": 1}
    await explore(ctx, 1)
    assert run.ask("select subject, reason from rejection where stage = 'expert'") == [
        ("door/train/2", "ill-typed-answer")
    ]
    assert run.ask('select "class", phase, level from event') == [("IllTypedAnswer", "step", "error")]
    assert len(run.ask("select * from trajectory where source = 'rollout'")) == 5


async def test_a_second_run_finds_everything_done(site: Sites) -> None:
    run = site("eto.explore.samples=2")
    counts = await make_pairs(run)
    dataset_counts = await dataset(run.ctx, 1)
    file_bytes = dataset_file(run.ctx, 1).read_bytes()
    tables = ("trajectory", "step", "generation", "preference", "sample", "rejection", "dataset_row")
    before = {table: run.ask(f"select count(*) from {table}") for table in tables}

    rerun = site("eto.explore.samples=2")
    assert await make_pairs(rerun) == counts
    dataset_file(rerun.ctx, 1).unlink()
    assert await dataset(rerun.ctx, 1) == dataset_counts
    assert rerun.asked == []
    assert dataset_file(rerun.ctx, 1).read_bytes() == file_bytes
    assert {table: rerun.ask(f"select count(*) from {table}") for table in tables} == before


async def test_explored_episodes_end_where_they_repeat_themselves(site: Sites) -> None:
    class Telling(House):
        def state(self) -> str:
            return "the same"

    run = await prepare(site("eto.explore.repeats=2"))
    ctx = replace(run.ctx, make_environment=lambda _: Telling([], expert=True))
    await explore(ctx, 1)
    ends = "select stop, count(*) from trajectory where source = 'rollout' group by stop"
    assert run.ask(ends) == [("repeats", 6)]

    (stage,) = (stage for stage in plan_of(ctx.recipe, 1).stages if stage.name == "explore")
    stage.check(ctx.recipe, Telling([], expert=True), [])
    with pytest.raises(ConfigError, match=r"does not tell its state; leave eto\.explore\.repeats out"):
        stage.check(ctx.recipe, House([], expert=True), [])


async def test_an_interrupted_exploration_ends_with_the_same_dataset(site: Sites) -> None:
    first_run = await prepare(site("eto.explore.samples=3", strength=50))
    await demonstrate(first_run.ctx, 1)
    with pytest.raises(EndpointError):
        await explore(first_run.ctx, 1)
    num_stored = int(first_run.ask("select count(*) from trajectory where source = 'rollout'")[0][0])
    total = len(load_planned_rollouts(first_run.ctx.store, first_run.ctx.iteration_id(1)))
    assert 0 < num_stored < total

    rerun = site("eto.explore.samples=3")
    assert (await explore(rerun.ctx, 1))["new"] == total - num_stored
    num_requests = len(rerun.asked)
    assert (await explore(rerun.ctx, 1))["new"] == 0
    assert len(rerun.asked) == num_requests

    control_run = site("eto.explore.samples=3", folder="calm")
    assert await make_pairs(control_run) == await prefer(rerun.ctx, 1)
    assert await dataset(control_run.ctx, 1) == await dataset(rerun.ctx, 1)


async def test_exploration_in_goes_ends_with_the_same_dataset(site: Sites) -> None:
    slow_run = await prepare(site("eto.explore.samples=3"))
    await demonstrate(slow_run.ctx, 1)
    assert (await explore(replace(slow_run.ctx, limit=4), 1))["new"] == 4
    assert (await explore(slow_run.ctx, 1))["new"] > 0
    control_run = site("eto.explore.samples=3", folder="calm")
    assert await make_pairs(control_run) == await prefer(slow_run.ctx, 1)
    assert await dataset(control_run.ctx, 1) == await dataset(slow_run.ctx, 1)


async def test_a_second_pass_replaces_the_pairs_of_the_first(site: Sites) -> None:
    options = ("eto.explore.samples=6", "eto.preferences={against: own, per_instance: 1}")
    slow_run = await prepare(site(*options, expert=False))
    await explore(replace(slow_run.ctx, limit=18), 1)
    assert (await prefer(slow_run.ctx, 1))["own"] > 0
    await explore(slow_run.ctx, 1)
    last = await prefer(slow_run.ctx, 1)
    control_run = await prepare(site(*options, expert=False, folder="calm"))
    await explore(control_run.ctx, 1)

    assert await prefer(control_run.ctx, 1) == last
    assert await dataset(control_run.ctx, 1) == await dataset(slow_run.ctx, 1)
    for table in ("preference", "sample", "message", "rejection"):
        assert slow_run.ask(f"select count(*) from {table}") == control_run.ask(f"select count(*) from {table}")
    assert slow_run.ask("select * from v_orphans") == []


async def test_an_expert_that_has_played_does_not_play_again(site: Sites) -> None:
    run = await prepare(site())
    counts = await demonstrate(run.ctx, 1)

    class Tired(House):
        def step(self, action: str) -> Transition:
            raise AssertionError("it plays again")

    later_ctx = replace(run.ctx, make_environment=lambda _: Tired([], expert=True))
    assert await demonstrate(later_ctx, 1) == counts


async def test_a_broken_instance_costs_its_demonstration_and_not_the_stage(site: Sites) -> None:
    broken = ["door/train/2"]
    run = await prepare(site(broken=broken))
    assert await demonstrate(run.ctx, 1) == {"expert": 5, "rejected": 1}
    rejections = [("door/train/2", "environment-fault", "door door/train/2 fell out of its frame")]
    assert run.ask("select subject, reason, detail from rejection") == rejections
    strict_run = await prepare(site("errors.budget=0.1", broken=broken, folder="strict"))
    with pytest.raises(EnvironmentFault, match="fell out of its frame"):
        await demonstrate(strict_run.ctx, 1)


async def test_an_episode_without_a_reward_is_turned_away(site: Sites) -> None:
    run = site()
    await prepare(run)
    await demonstrate(run.ctx, 1)
    broken_run = site(broken=["door/train/2"])
    await explore(broken_run.ctx, 1)

    assert await prefer(broken_run.ctx, 1) == {"lose": 5, "rejected": 1}
    ((reason, detail),) = broken_run.ask("select reason, detail from rejection")
    assert reason == "no-reward"
    assert detail == "episode door/train/2#0 has no reward; table event has the error that ended it"


async def test_an_episode_that_was_not_begun_is_not_one_that_failed(site: Sites) -> None:
    run = await prepare(site("eto.explore.samples=3"))
    await demonstrate(run.ctx, 1)
    await explore(replace(run.ctx, limit=4), 1)
    await prefer(run.ctx, 1)
    reasons = run.ask("select reason, detail from rejection where reason in ('no-reward', 'not-played')")
    assert {reason for reason, _ in reasons} == {"not-played"}
    assert all("was not begun" in detail for _, detail in reasons)


async def test_without_an_expert_own_episodes_are_compared(site: Sites) -> None:
    run = site("eto.preferences.against=own", "eto.explore.samples=6", expert=False)
    await prepare(run)
    await explore(run.ctx, 1)
    counts = await prefer(run.ctx, 1)

    assert counts["own"] > 0
    assert counts["own"] + counts["rejected"] == 6
    assert set(run.ask("select chosen_reward, rejected_reward from preference")) == {(1.0, 0.0)}


async def test_a_missing_expert_is_told_in_one_sentence(site: Sites) -> None:
    run = await prepare(site(expert=False))
    with pytest.raises(ConfigError, match=r"^environment door has no expert; name a file of demonstrations"):
        await demonstrate(run.ctx, 1)


async def test_step_wise_the_policy_goes_on_from_the_experts_steps(site: Sites) -> None:
    run = site("eto.preferences.level=step", "eto.explore.samples=3")
    counts = await make_pairs(run)

    # Each instance is played from both forks of the expert, greedily and three times more.
    assert len(load_planned_rollouts(run.ctx.store, run.ctx.iteration_id(1))) == 48
    assert counts["step"] > 0
    pairs = load_preferences(run.ctx.store, run.ctx.iteration_id(1)).values()
    assert {p.chosen.provenance.split for p in pairs} == {0, 1}
    for pair in pairs:
        assert [m.text for m in pair.chosen.messages if m.train] == [
            (CLOSED, OPENING)[pair.chosen.provenance.split or 0]
        ]
        assert sum(m.train for m in pair.rejected.messages) == 1
    assert run.ask("select count(*) from rejection where reason = 'same-reply'") == [(6,)]


async def test_own_successes_are_the_samples_of_rejection_sampling(site: Sites) -> None:
    run = await prepare(site("eto.phases=[rft]", "eto.explore.samples=6"))
    counts = await explore(run.ctx, 1)

    samples = load_samples(run.ctx.store, iteration_id=run.ctx.iteration_id(1))
    assert len(samples) == counts["successes"] > 0
    assert {str(sample.kind) for sample in samples.values()} == {"good"}
    assert (await dataset(run.ctx, 1))["samples"]["good"] > 0
    assert run.ask("select * from v_orphans") == []


async def test_of_many_successes_of_an_instance_the_shortest_may_be_taken(site: Sites) -> None:
    run = await prepare(site("eto.phases=[rft]", "eto.explore.samples=6", "data.good_per_tree=1"))
    await explore(run.ctx, 1)
    successes = load_samples(run.ctx.store, iteration_id=run.ctx.iteration_id(1)).values()
    num_by_instance = Counter(sample.instance for sample in successes)
    assert max(num_by_instance.values()) > 1

    assert (await dataset(run.ctx, 1))["samples"]["good"] == len(num_by_instance)
    num_rejected = run.ask("select count(*) from rejection where reason = 'good-per-tree-cap'")
    assert num_rejected == [(len({tuple(sample.messages) for sample in successes}) - len(num_by_instance),)]


async def test_published_rejection_sampling_has_the_experts_episodes_too(site: Sites) -> None:
    run = await prepare(site("eto.phases=[rft]", "eto.rft=with_expert", "eto.explore.samples=6"))
    assert await demonstrate(run.ctx, 1) == {"expert": 6, "rejected": 0}
    successes = (await explore(run.ctx, 1))["successes"]

    samples = load_samples(run.ctx.store, iteration_id=run.ctx.iteration_id(1)).values()
    kinds = [str(sample.kind) for sample in samples]
    assert (kinds.count("expert"), kinds.count("good")) == (6, successes)
    counts = (await dataset(run.ctx, 1))["samples"]
    assert counts["expert"] > 0
    assert counts["good"] > 0
    funnel = [(stage.name, stage.count) for stage in build_report(run.ctx, 1).funnel]
    assert funnel[:3] == [("expert episodes", 6), ("explored episodes", 42), ("successes", successes)]


def test_published_rejection_sampling_begins_with_the_first_model(site: Sites) -> None:
    expert_recipe = site("eto.phases=[sft, rft, dpo]", "eto.rft=with_expert").ctx.recipe
    assert [training(expert_recipe, iteration).from_base for iteration in (1, 2, 3)] == [False, True, False]
    plain_recipe = site("eto.phases=[sft, rft, dpo]").ctx.recipe
    assert [training(plain_recipe, iteration).from_base for iteration in (1, 2, 3)] == [False, False, False]


async def test_episodes_that_fail_for_good_count_as_the_recipe_says(site: Sites) -> None:
    num_successes = {}
    for way in ("out", "zero"):
        plays = ("evaluation.episodes=3", "evaluation.temperature=1.0")
        run = await prepare(site(f"errors.count_as={way}", *plays, broken=["door/test/1"], folder=way))
        results = await evaluate(run.ctx, 0)
        total = len(run.ctx.make_environment("house").instances("test")) * 3
        (score,) = build_report(run.ctx, 0).scores
        ((num_episodes, num_lost, success, reward),) = run.ask(
            "select episodes, lost, success, reward from v_evaluations where evaluation = 'test'"
        )
        assert (score.num_lost, num_lost) == (3, 3)
        assert results["test"]["n"] == score.success.n == score.reward.n == num_episodes
        assert num_episodes == (total if way == "zero" else total - 3)
        assert score.success.value == pytest.approx(success)
        assert score.reward.value == pytest.approx(reward)
        num_successes[way] = round(success * num_episodes)
        text = render_markdown(build_report(run.ctx, 0))
        phrase = "left out of the means" if way == "out" else "counted as failures with reward 0"
        assert f"tiny: episodes that failed for good, {phrase}: 3." in text.replace("Base", "base")
        # It is no episode that anything else could go on from.
        assert run.ask("select count(*) from episode") == [(total - 3,)]

        whole_run = site(f"errors.count_as={way}", *plays, folder=way)
        whole_results = await evaluate(whole_run.ctx, 0)
        assert whole_results["test"]["n"] == total
        assert whole_run.ask("select lost from v_evaluations where evaluation = 'test'") == [(0,)]
        assert build_report(whole_run.ctx, 0).scores[0].num_lost == 0
    assert num_successes["out"] == num_successes["zero"]


async def test_pairs_from_the_trees_of_another_run(site: Sites) -> None:
    tree_run = site("search={dives: 3, width: 3, depth: 5, max_new_tokens: 8}", method="agent-r")
    await prepare(tree_run)
    await collect(tree_run.ctx, 1)
    source = ("eto.preferences.source=trees", f"eto.preferences.trees='{tree_run.ctx.run_id[:8]}'")
    run = await prepare(site(*source))
    with tree_run.ctx.store.transaction() as con:
        # What another tokenizer sampled, and what an earlier version stored of it.
        con.execute(
            "update node set step = struct_update(step, token_ids := [7, 8]::bigint[], "
            "tokenizer := case when node_index % 2 = 1 then 'another' end) where step is not null"
        )

    counts = await prefer(run.ctx, 1)

    assert counts["tree"] > 0
    tokenizers = run.ask("select distinct tokenizer, token_ids is null from message where role = 'assistant'")
    assert set(tokenizers) == {(None, True), ("another", False)}
    sql = "select count(*) from message where token_ids is not null and train"
    assert (await dataset(run.ctx, 1))["tokenised_anew"] == run.ask(sql)[0][0] > 0
    assert run.asked == []
    rows = run.ask("select tree_id, good_leaf, bad_leaf, chosen_reward - rejected_reward from v_preferences")
    nodes = set(tree_run.ask("select tree_id, node_index from node"))
    assert all({(tree, good), (tree, bad)} <= nodes and gap > 0 for tree, good, bad, gap in rows)
    assert (await dataset(run.ctx, 1))["samples"]["chosen"] == counts["tree"]
    assert run.ask("select * from v_orphans") == []
    sides = pq.read_table(dataset_file(run.ctx, 1))
    rows_of = [sides[name].to_pylist() for name in ("chosen_input_ids", "rejected_input_ids")]
    assert not any(row[at : at + 2] == [7, 8] for rows in rows_of for row in rows for at in range(len(row)))
    # The same trees serve the next iteration, as pairs of its own.
    await begin_next(run)
    assert await prefer(run.ctx, 2) == counts


async def begin_next(one: Site) -> None:
    one.ctx.store.update("iteration", {"iteration_id": one.ctx.iteration_id(1), "checkpoint_out": one.ctx.policy(1).id})
    await begin_iteration(one.ctx, 2)


async def test_a_run_without_trees_is_named(site: Sites) -> None:
    plain_run = await prepare(site())
    run = await prepare(site("eto.preferences.source=trees", f"eto.preferences.trees='{plain_run.ctx.run_id}'"))
    with pytest.raises(ConfigError, match=f"run {plain_run.ctx.run_id} has no finished tree"):
        await prefer(run.ctx, 1)
    wrong_run = await prepare(site("eto.preferences.source=trees", "eto.preferences.trees=nobody"))
    with pytest.raises(ConfigError, match=r"no run of .* begins with 'nobody'"):
        await prefer(wrong_run.ctx, 1)


async def test_demonstrations_come_from_a_file(site: Sites, tmp_path: Path) -> None:
    file = write(tmp_path, *(demonstration(index, OPENING) for index in range(5)))
    run = site(f"eto.expert.file={file}", expert=False)

    assert await make_pairs(run) == {"lose": 5, "rejected": 1}
    assert run.ask("select reason, count(*) from rejection group by all order by 1") == [
        ("no-demonstration", 1),
        ("no-expert", 1),
    ]
    assert run.ask("select distinct source, num_steps from trajectory where source = 'expert'") == [("expert", 1)]


async def test_an_instance_may_have_several_demonstrations(site: Sites, tmp_path: Path) -> None:
    """All are trained on; the shortest of the best ones is held against the policy's episodes."""
    file = write(
        tmp_path,
        demonstration(0, CLOSED, OPENING),
        demonstration(0, OPENING),
        demonstration(0, CLOSED, CLOSED, OPENING),
        *(demonstration(index, OPENING) for index in range(1, 6)),
    )
    run = await prepare(site(f"eto.expert.file={file}", expert=False))
    assert await expert_samples(run.ctx, 1) == {"expert": 8, "rejected": 0}
    sql = "select num_steps from trajectory where source = 'expert' and instance_id = 'door/train/0' order by 1"
    assert run.ask(sql) == [(1,), (2,), (3,)]
    assert run.ask("select count(*), count(distinct trajectory_id) from sample where kind = 'expert'") == [(8, 8)]

    assert await expert_samples(run.ctx, 1) == {"expert": 8, "rejected": 0}
    assert run.ask("select count(*) from sample") == [(8,)]
    assert len(best_expert_episodes(run.ctx, 1)["door/train/0"][1].steps) == 1


async def test_a_demonstration_that_fails_is_named_or_turned_away(site: Sites, tmp_path: Path) -> None:
    file = write(tmp_path, demonstration(0, OPENING), demonstration(1, CLOSED))
    strict_run = await prepare(site(f"eto.expert.file={file}"))
    with pytest.raises(
        DataFileError, match=r"data.jsonl:2: played again, .* reaches reward 0 and not 1; .*'Wrong 1\.'"
    ):
        await demonstrate(strict_run.ctx, 1)
    lenient_run = await prepare(site(f"eto.expert.file={file}", "eto.expert.failed_replay=reject"))
    assert await demonstrate(lenient_run.ctx, 1) == {"expert": 1, "rejected": 5}
    reasons = lenient_run.ask("select reason, count(*) from rejection group by all order by 1")
    assert reasons == [("failed-replay", 1), ("no-demonstration", 4)]


async def test_a_file_with_nothing_of_use_stops_the_run(site: Sites, tmp_path: Path) -> None:
    file = write(tmp_path, demonstration(77, OPENING))
    run = await prepare(site(f"eto.expert.file={file}"))
    with pytest.raises(ConfigError, match=r"data.jsonl has no sound demonstration of any training instance"):
        await demonstrate(run.ctx, 1)


async def test_another_file_makes_another_run(site: Sites, tmp_path: Path) -> None:
    write(tmp_path, demonstration(0, OPENING))
    run = site(f"eto.expert.file={tmp_path / 'data.jsonl'}")
    write(tmp_path, demonstration(1, OPENING))
    assert site(f"eto.expert.file={tmp_path / 'data.jsonl'}").ctx.run_id != run.ctx.run_id
    with pytest.raises(DataFileError, match="cannot be read"):
        site("eto.expert.file=missing.jsonl")


async def test_ready_pairs_come_from_a_file(site: Sites, tmp_path: Path) -> None:
    turns = {"prompt": ["Door."], "chosen": [OPENING], "rejected": [CLOSED, "Wrong 1.", CLOSED]}

    def chat_of(key: str) -> list[dict[str, str]]:
        offset = 0 if key == "prompt" else 1
        return [
            {"role": ("user", "assistant")[(at + offset) % 2], "content": text} for at, text in enumerate(turns[key])
        ]

    pair = {"id": 0} | {key: chat_of(key) for key in turns}
    file = write(tmp_path, pair, pair | {"id": "door/train/1", "rejected": pair["chosen"]})
    run = await prepare(site("eto.preferences.source=file", f"eto.preferences.file={file}"))

    assert await prefer(run.ctx, 1) == {"file": 1, "rejected": 1}
    assert (await dataset(run.ctx, 1))["samples"] == {"chosen": 1, "rejected": 1}
    # Nothing was explored, so the report does not say that it brought nothing.
    funnel = [(stage.name, stage.count) for stage in build_report(run.ctx, 1).funnel]
    assert funnel == [("preference pairs", 1), ("samples", 2), ("trained rows", 2)]
    write(tmp_path, pair | {"id": "door/test/0"})
    leak = await prepare(site("eto.preferences.source=file", f"eto.preferences.file={file}"))
    await prefer(leak.ctx, 1)
    with pytest.raises(DataFault, match="made from 1 held-out instances, or variants of these: door/test/0"):
        await dataset(leak.ctx, 1)


async def test_nothing_to_compare_is_told_in_one_sentence(site: Sites) -> None:
    run = site("eto.preferences.margin=1.0")
    await make_pairs(run)
    with pytest.raises(DataFault, match=r"^iteration 1 of run \w+ has no sample to train on; `select"):
        await dataset(run.ctx, 1)


async def test_the_best_of_several_episodes_is_a_metric(site: Sites) -> None:
    run = await prepare(site("evaluation.episodes=4", "evaluation.temperature=1.0"))
    await evaluate(run.ctx, 0)

    metrics = dict(run.ask("select metric, value from v_metrics where evaluation = 'test' and depth is null"))
    ((mean,),) = run.ask("select success from v_evaluations")
    assert {name for name in metrics if re.search(r"^(best|pass|mean)", name)} == {
        "best_of_4_success", "best_of_4_reward", "pass@1", "pass@2", "pass@4", "mean@4", "mean_reward@4"
    }  # fmt: skip
    assert metrics["mean@4"] == metrics["mean_reward@4"] == pytest.approx(metrics["success"]) == pytest.approx(mean)
    assert metrics["best_of_4_success"] == metrics["best_of_4_reward"] > mean
    assert metrics["pass@4"] == pytest.approx(metrics["best_of_4_success"])
    assert metrics["pass@1"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["eto.phases=[]"], "eto.phases: name at least one of sft, rft and dpo"),
        (["eto.phases=[ppo]"], "eto.phases.0: "),
        (["eto.rft=with_expert"], "eto.rft: has no use without an iteration rft in eto.phases"),
        (["eto.explore.greedy=false"], "without greedy and samples nothing is explored"),
        (["eto.explore.repeats=1"], "eto.explore.repeats: 1 would end every episode at its first reply"),
        (["eto.explore.samples=2", "eto.explore.temperature=0"], "at temperature 0 all samples are the greedy episode"),
        (["eto.preferences.source=trees"], "eto.preferences.trees: source trees needs it"),
        (["eto.preferences.file=x"], "eto.preferences.file: has no use with source exploration"),
        (
            ["eto.preferences.source=file", "eto.preferences.file=x", "eto.preferences.margin=0.3"],
            "eto.preferences.margin: has no use with source file",
        ),
        (
            ["eto.preferences.source=file", "eto.preferences.file=x", "eto.preferences.extra_rounds=2"],
            "eto.preferences.extra_rounds: has no use with source file",
        ),
        (
            ["eto.preferences.level=step", "eto.preferences.extra_rounds=2"],
            "eto.preferences.extra_rounds: has no use with level step",
        ),
        (["eto.preferences.forced_steps=2"], "eto.preferences.forced_steps: has no use with level trajectory"),
        (["eto.preferences.against=own"], "pairs of the policy's own episodes need at least two of each instance"),
        (
            ["eto.preferences.against=own", "eto.explore.samples=2", "eto.preferences.level=step"],
            "step follows the expert's steps, so against must be expert",
        ),
        (["eto.dpo.beta=[]"], "eto.dpo.beta: give at least one"),
        (["eto.dpo.loss_weights=[1.0, 2.0]"], "2 weights for 1 loss types"),
        (["eto.dpo.label_smoothing=0.1"], "label_smoothing: only loss type robust reads it"),
        (["eto.dpo.loss_type=[best]"], "eto.dpo.loss_type.0: "),
        (["splice.mode=direct"], "splice: belongs to another method than eto"),
        (["data.use=expert"], "data.use: belongs to method agent-r"),
        (["data.good_per_tree=1"], "data.good_per_tree: belongs to method agent-r"),
        (["method=agent-r", "eto.phases=[sft]"], "eto: belongs to another method than agent-r"),
    ],
)
def test_a_wrong_recipe_is_told(overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"name": "x", "method": "eto", "model": {"path": "m"}}, overrides)
    assert fault in str(error.value)


def training(recipe: Recipe, iteration: int) -> Training:
    settings = plan_of(recipe, iteration).training
    assert settings is not None
    return settings


def test_settings_go_by_preference_iteration() -> None:
    recipe = parse(
        {
            "name": "x",
            "method": "eto",
            "model": {"path": "m"},
            "training": {"learning_rate": 1.0, "lora_r": 4},
            "eto": {"phases": ["sft", "dpo"], "dpo": {"beta": [0.1, 0.5], "learning_rate": [1e-6, 5e-7]}},
        }
    )

    trainings = [training(recipe, iteration) for iteration in (1, 2, 3, 4)]

    assert [phase.config.learning_rate for phase in trainings] == [1.0, 1e-6, 5e-7, 5e-7]
    losses = [phase.objective.settings.get("preference") for phase in trainings]
    assert [loss and loss.beta for loss in losses] == [None, 0.1, 0.5, 0.5]
    assert {phase.config.lora_r for phase in trainings} == {4}


@pytest.mark.parametrize("leaks", ["door/dev/0", "door/train/1"])
async def test_ready_pairs_may_not_be_of_any_held_out_set_nor_of_variants(
    site: Sites, tmp_path: Path, leaks: str
) -> None:
    turns = [{"role": "user", "content": "Door."}], [{"role": "assistant", "content": OPENING}]
    wrong = [{"role": "assistant", "content": CLOSED}]
    file = write(tmp_path, {"id": leaks, "prompt": turns[0], "chosen": turns[1], "rejected": wrong})
    sets = "evaluation.sets={dev: {split: dev}}"
    run = await prepare(site("eto.preferences.source=file", f"eto.preferences.file={file}", sets))
    variant, original = (Instance(environment="door", split=split, index=1) for split in ("train", "test"))
    run.ctx.store.write({"instance": [instance_row(variant, 1, original)]})
    await prefer(run.ctx, 1)
    with pytest.raises(DataFault, match=f"1 held-out instances, or variants of these: {leaks}"):
        await dataset(run.ctx, 1)
