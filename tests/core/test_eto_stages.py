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
            [_said(g, CLOSED) for g in made] if request in greedy else made
            for request, made in zip(requests, replies, strict=True)
        ]


def _said(generation: Generation, text: str) -> Generation:
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
        asked: list[Request] = []
        ctx = RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=tmp_path / folder,
            store=open_store(tmp_path / folder / "store.duckdb"),
            make_environment=lambda _: House(broken, expert=expert),
            load_model=lambda role, path: Speaker(asked, strength),
            progress=lambda done, total, note: None,
        )
        return Site(ctx, asked)

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
    one = site()
    assert await make_pairs(one) == {"lose": 6, "rejected": 0}
    made = await dataset(one.ctx, 1)

    assert made["samples"] == {"chosen": 6, "rejected": 6}
    assert dataset_file(one.ctx, 1).exists()
    (lineage, *_) = one.ask(
        "select c.source, r.source, p.chosen_reward, p.rejected_reward, p.used, c.num_steps, r.num_steps "
        "from v_preferences p join trajectory c on c.trajectory_id = p.chosen_trajectory_id "
        "join trajectory r on r.trajectory_id = p.rejected_trajectory_id"
    )
    assert lineage == ("expert", "rollout", 1.0, 0.0, True, 2, 4)
    assert one.ask("select * from v_orphans") == []
    record = preference_record(one.ctx, 1)
    assert record is not None
    assert (record.num_by_case, record.num_by_margin) == ({"lose": 6}, {0.9: 6})
    report = build_report(one.ctx, 1)
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

    one = await prepare(site())
    ctx = replace(one.ctx, make_environment=lambda _: Odd((), expert=True))
    assert await demonstrate(ctx, 1) == {"expert": 5, "rejected": 1}
    await explore(ctx, 1)
    assert one.ask("select subject, reason from rejection where stage = 'expert'") == [
        ("door/train/2", "ill-typed-answer")
    ]
    assert one.ask('select "class", phase, level from event') == [("IllTypedAnswer", "step", "error")]
    assert len(one.ask("select * from trajectory where source = 'rollout'")) == 5


async def test_a_second_run_finds_everything_done(site: Sites) -> None:
    one = site("eto.explore.samples=2")
    made = await make_pairs(one)
    built = await dataset(one.ctx, 1)
    written = dataset_file(one.ctx, 1).read_bytes()
    tables = ("trajectory", "step", "generation", "preference", "sample", "rejection", "dataset_row")
    before = {table: one.ask(f"select count(*) from {table}") for table in tables}

    again = site("eto.explore.samples=2")
    assert await make_pairs(again) == made
    dataset_file(again.ctx, 1).unlink()
    assert await dataset(again.ctx, 1) == built
    assert again.asked == []
    assert dataset_file(again.ctx, 1).read_bytes() == written
    assert {table: again.ask(f"select count(*) from {table}") for table in tables} == before


async def test_explored_episodes_end_where_they_repeat_themselves(site: Sites) -> None:
    class Telling(House):
        def state(self) -> str:
            return "the same"

    one = await prepare(site("eto.explore.repeats=2"))
    ctx = replace(one.ctx, make_environment=lambda _: Telling([], expert=True))
    await explore(ctx, 1)
    ends = "select stop, count(*) from trajectory where source = 'rollout' group by stop"
    assert one.ask(ends) == [("repeats", 6)]

    (stage,) = (stage for stage in plan_of(ctx.recipe, 1).stages if stage.name == "explore")
    stage.check(ctx.recipe, Telling([], expert=True), [])
    with pytest.raises(ConfigError, match=r"does not tell its state; leave eto\.explore\.repeats out"):
        stage.check(ctx.recipe, House([], expert=True), [])


async def test_an_interrupted_exploration_ends_with_the_same_dataset(site: Sites) -> None:
    rough = await prepare(site("eto.explore.samples=3", strength=50))
    await demonstrate(rough.ctx, 1)
    with pytest.raises(EndpointError):
        await explore(rough.ctx, 1)
    kept = int(rough.ask("select count(*) from trajectory where source = 'rollout'")[0][0])
    total = len(load_planned_rollouts(rough.ctx.store, rough.ctx.iteration_id(1)))
    assert 0 < kept < total

    mended = site("eto.explore.samples=3")
    assert (await explore(mended.ctx, 1))["new"] == total - kept
    asked = len(mended.asked)
    assert (await explore(mended.ctx, 1))["new"] == 0
    assert len(mended.asked) == asked

    calm = site("eto.explore.samples=3", folder="calm")
    assert await make_pairs(calm) == await prefer(mended.ctx, 1)
    assert await dataset(calm.ctx, 1) == await dataset(mended.ctx, 1)


async def test_exploration_in_goes_ends_with_the_same_dataset(site: Sites) -> None:
    slow = await prepare(site("eto.explore.samples=3"))
    await demonstrate(slow.ctx, 1)
    assert (await explore(replace(slow.ctx, limit=4), 1))["new"] == 4
    assert (await explore(slow.ctx, 1))["new"] > 0
    calm = site("eto.explore.samples=3", folder="calm")
    assert await make_pairs(calm) == await prefer(slow.ctx, 1)
    assert await dataset(calm.ctx, 1) == await dataset(slow.ctx, 1)


async def test_a_second_pass_replaces_the_pairs_of_the_first(site: Sites) -> None:
    options = ("eto.explore.samples=6", "eto.preferences={against: own, per_instance: 1}")
    slow = await prepare(site(*options, expert=False))
    await explore(replace(slow.ctx, limit=18), 1)
    assert (await prefer(slow.ctx, 1))["own"] > 0
    await explore(slow.ctx, 1)
    last = await prefer(slow.ctx, 1)
    calm = await prepare(site(*options, expert=False, folder="calm"))
    await explore(calm.ctx, 1)

    assert await prefer(calm.ctx, 1) == last
    assert await dataset(calm.ctx, 1) == await dataset(slow.ctx, 1)
    for table in ("preference", "sample", "message", "rejection"):
        assert slow.ask(f"select count(*) from {table}") == calm.ask(f"select count(*) from {table}")
    assert slow.ask("select * from v_orphans") == []


async def test_an_expert_that_has_played_does_not_play_again(site: Sites) -> None:
    one = await prepare(site())
    told = await demonstrate(one.ctx, 1)

    class Tired(House):
        def step(self, action: str) -> Transition:
            raise AssertionError("it plays again")

    later = replace(one.ctx, make_environment=lambda _: Tired([], expert=True))
    assert await demonstrate(later, 1) == told


async def test_a_broken_instance_costs_its_demonstration_and_not_the_stage(site: Sites) -> None:
    broken = ["door/train/2"]
    one = await prepare(site(broken=broken))
    assert await demonstrate(one.ctx, 1) == {"expert": 5, "rejected": 1}
    said = [("door/train/2", "environment-fault", "door door/train/2 fell out of its frame")]
    assert one.ask("select subject, reason, detail from rejection") == said
    strict = await prepare(site("errors.budget=0.1", broken=broken, folder="strict"))
    with pytest.raises(EnvironmentFault, match="fell out of its frame"):
        await demonstrate(strict.ctx, 1)


async def test_an_episode_without_a_reward_is_turned_away(site: Sites) -> None:
    one = site()
    await prepare(one)
    await demonstrate(one.ctx, 1)
    hurt = site(broken=["door/train/2"])
    await explore(hurt.ctx, 1)

    assert await prefer(hurt.ctx, 1) == {"lose": 5, "rejected": 1}
    ((reason, detail),) = hurt.ask("select reason, detail from rejection")
    assert reason == "no-reward"
    assert detail == "episode door/train/2#0 has no reward; table event has the error that ended it"


async def test_an_episode_that_was_not_begun_is_not_one_that_failed(site: Sites) -> None:
    one = await prepare(site("eto.explore.samples=3"))
    await demonstrate(one.ctx, 1)
    await explore(replace(one.ctx, limit=4), 1)
    await prefer(one.ctx, 1)
    reasons = one.ask("select reason, detail from rejection where reason in ('no-reward', 'not-played')")
    assert {reason for reason, _ in reasons} == {"not-played"}
    assert all("was not begun" in detail for _, detail in reasons)


async def test_without_an_expert_own_episodes_are_compared(site: Sites) -> None:
    one = site("eto.preferences.against=own", "eto.explore.samples=6", expert=False)
    await prepare(one)
    await explore(one.ctx, 1)
    made = await prefer(one.ctx, 1)

    assert made["own"] > 0
    assert made["own"] + made["rejected"] == 6
    assert set(one.ask("select chosen_reward, rejected_reward from preference")) == {(1.0, 0.0)}


async def test_a_missing_expert_is_told_in_one_sentence(site: Sites) -> None:
    one = await prepare(site(expert=False))
    with pytest.raises(ConfigError, match=r"^environment door has no expert; name a file of demonstrations"):
        await demonstrate(one.ctx, 1)


async def test_step_wise_the_policy_goes_on_from_the_experts_steps(site: Sites) -> None:
    one = site("eto.preferences.level=step", "eto.explore.samples=3")
    made = await make_pairs(one)

    # Each instance is played from both forks of the expert, greedily and three times more.
    assert len(load_planned_rollouts(one.ctx.store, one.ctx.iteration_id(1))) == 48
    assert made["step"] > 0
    pairs = load_preferences(one.ctx.store, one.ctx.iteration_id(1)).values()
    assert {p.chosen.provenance.split for p in pairs} == {0, 1}
    for pair in pairs:
        assert [m.text for m in pair.chosen.messages if m.train] == [
            (CLOSED, OPENING)[pair.chosen.provenance.split or 0]
        ]
        assert sum(m.train for m in pair.rejected.messages) == 1
    assert one.ask("select count(*) from rejection where reason = 'same-reply'") == [(6,)]


async def test_own_successes_are_the_samples_of_rejection_sampling(site: Sites) -> None:
    one = await prepare(site("eto.phases=[rft]", "eto.explore.samples=6"))
    made = await explore(one.ctx, 1)

    samples = load_samples(one.ctx.store, iteration_id=one.ctx.iteration_id(1))
    assert len(samples) == made["successes"] > 0
    assert {str(sample.kind) for sample in samples.values()} == {"good"}
    assert (await dataset(one.ctx, 1))["samples"]["good"] > 0
    assert one.ask("select * from v_orphans") == []


async def test_of_many_successes_of_an_instance_the_shortest_may_be_taken(site: Sites) -> None:
    one = await prepare(site("eto.phases=[rft]", "eto.explore.samples=6", "data.good_per_tree=1"))
    await explore(one.ctx, 1)
    successes = load_samples(one.ctx.store, iteration_id=one.ctx.iteration_id(1)).values()
    won = Counter(sample.instance for sample in successes)
    assert max(won.values()) > 1

    assert (await dataset(one.ctx, 1))["samples"]["good"] == len(won)
    lost = one.ask("select count(*) from rejection where reason = 'good-per-tree-cap'")
    assert lost == [(len({tuple(sample.messages) for sample in successes}) - len(won),)]


async def test_published_rejection_sampling_has_the_experts_episodes_too(site: Sites) -> None:
    one = await prepare(site("eto.phases=[rft]", "eto.rft=with_expert", "eto.explore.samples=6"))
    assert await demonstrate(one.ctx, 1) == {"expert": 6, "rejected": 0}
    successes = (await explore(one.ctx, 1))["successes"]

    samples = load_samples(one.ctx.store, iteration_id=one.ctx.iteration_id(1)).values()
    kinds = [str(sample.kind) for sample in samples]
    assert (kinds.count("expert"), kinds.count("good")) == (6, successes)
    made = (await dataset(one.ctx, 1))["samples"]
    assert made["expert"] > 0
    assert made["good"] > 0
    funnel = [(stage.name, stage.count) for stage in build_report(one.ctx, 1).funnel]
    assert funnel[:3] == [("expert episodes", 6), ("explored episodes", 42), ("successes", successes)]


def test_published_rejection_sampling_begins_with_the_first_model(site: Sites) -> None:
    published = site("eto.phases=[sft, rft, dpo]", "eto.rft=with_expert").ctx.recipe
    assert [training(published, iteration).from_base for iteration in (1, 2, 3)] == [False, True, False]
    own = site("eto.phases=[sft, rft, dpo]").ctx.recipe
    assert [training(own, iteration).from_base for iteration in (1, 2, 3)] == [False, False, False]


async def test_episodes_that_fail_for_good_count_as_the_recipe_says(site: Sites) -> None:
    said = {}
    for way in ("out", "zero"):
        plays = ("evaluation.episodes=3", "evaluation.temperature=1.0")
        one = await prepare(site(f"errors.count_as={way}", *plays, broken=["door/test/1"], folder=way))
        found = await evaluate(one.ctx, 0)
        total = len(one.ctx.make_environment("house").instances("test")) * 3
        (score,) = build_report(one.ctx, 0).scores
        ((episodes, lost, success, reward),) = one.ask(
            "select episodes, lost, success, reward from v_evaluations where evaluation = 'test'"
        )
        assert (score.num_lost, lost) == (3, 3)
        assert found["test"]["n"] == score.success.n == score.reward.n == episodes
        assert episodes == (total if way == "zero" else total - 3)
        assert score.success.value == pytest.approx(success)
        assert score.reward.value == pytest.approx(reward)
        said[way] = round(success * episodes)
        text = render_markdown(build_report(one.ctx, 0))
        how = "left out of the means" if way == "out" else "counted as failures with reward 0"
        assert f"tiny: episodes that failed for good, {how}: 3." in text.replace("Base", "base")
        # It is no episode that anything else could go on from.
        assert one.ask("select count(*) from episode") == [(total - 3,)]

        whole = site(f"errors.count_as={way}", *plays, folder=way)
        mended = await evaluate(whole.ctx, 0)
        assert mended["test"]["n"] == total
        assert whole.ask("select lost from v_evaluations where evaluation = 'test'") == [(0,)]
        assert build_report(whole.ctx, 0).scores[0].num_lost == 0
    assert said["out"] == said["zero"]


async def test_pairs_from_the_trees_of_another_run(site: Sites) -> None:
    other = site("search={dives: 3, width: 3, depth: 5, max_new_tokens: 8}", method="agent-r")
    await prepare(other)
    await collect(other.ctx, 1)
    source = ("eto.preferences.source=trees", f"eto.preferences.trees='{other.ctx.run_id[:8]}'")
    one = await prepare(site(*source))
    with other.ctx.store.transaction() as con:
        # What another tokenizer sampled, and what an earlier version stored of it.
        con.execute(
            "update node set step = struct_update(step, token_ids := [7, 8]::bigint[], "
            "tokenizer := case when node_index % 2 = 1 then 'another' end) where step is not null"
        )

    made = await prefer(one.ctx, 1)

    assert made["tree"] > 0
    stored = one.ask("select distinct tokenizer, token_ids is null from message where role = 'assistant'")
    assert set(stored) == {(None, True), ("another", False)}
    trained = "select count(*) from message where token_ids is not null and train"
    assert (await dataset(one.ctx, 1))["tokenised_anew"] == one.ask(trained)[0][0] > 0
    assert one.asked == []
    rows = one.ask("select tree_id, good_leaf, bad_leaf, chosen_reward - rejected_reward from v_preferences")
    known = set(other.ask("select tree_id, node_index from node"))
    assert all({(tree, good), (tree, bad)} <= known and gap > 0 for tree, good, bad, gap in rows)
    assert (await dataset(one.ctx, 1))["samples"]["chosen"] == made["tree"]
    assert one.ask("select * from v_orphans") == []
    sides = pq.read_table(dataset_file(one.ctx, 1))
    rows_of = [sides[name].to_pylist() for name in ("chosen_input_ids", "rejected_input_ids")]
    assert not any(row[at : at + 2] == [7, 8] for rows in rows_of for row in rows for at in range(len(row)))
    # The same trees serve the next iteration, as pairs of its own.
    await begin_next(one)
    assert await prefer(one.ctx, 2) == made


async def begin_next(one: Site) -> None:
    one.ctx.store.update("iteration", {"iteration_id": one.ctx.iteration_id(1), "checkpoint_out": one.ctx.policy(1).id})
    await begin_iteration(one.ctx, 2)


async def test_a_run_without_trees_is_named(site: Sites) -> None:
    plain = await prepare(site())
    one = await prepare(site("eto.preferences.source=trees", f"eto.preferences.trees='{plain.ctx.run_id}'"))
    with pytest.raises(ConfigError, match=f"run {plain.ctx.run_id} has no finished tree"):
        await prefer(one.ctx, 1)
    lost = await prepare(site("eto.preferences.source=trees", "eto.preferences.trees=nobody"))
    with pytest.raises(ConfigError, match=r"no run of .* begins with 'nobody'"):
        await prefer(lost.ctx, 1)


async def test_demonstrations_come_from_a_file(site: Sites, tmp_path: Path) -> None:
    file = write(tmp_path, *(demonstration(index, OPENING) for index in range(5)))
    one = site(f"eto.expert.file={file}", expert=False)

    assert await make_pairs(one) == {"lose": 5, "rejected": 1}
    assert one.ask("select reason, count(*) from rejection group by all order by 1") == [
        ("no-demonstration", 1),
        ("no-expert", 1),
    ]
    assert one.ask("select distinct source, num_steps from trajectory where source = 'expert'") == [("expert", 1)]


async def test_an_instance_may_have_several_demonstrations(site: Sites, tmp_path: Path) -> None:
    """All are trained on; the shortest of the best ones is held against the policy's episodes."""
    file = write(
        tmp_path,
        demonstration(0, CLOSED, OPENING),
        demonstration(0, OPENING),
        demonstration(0, CLOSED, CLOSED, OPENING),
        *(demonstration(index, OPENING) for index in range(1, 6)),
    )
    one = await prepare(site(f"eto.expert.file={file}", expert=False))
    assert await expert_samples(one.ctx, 1) == {"expert": 8, "rejected": 0}
    asked = "select num_steps from trajectory where source = 'expert' and instance_id = 'door/train/0' order by 1"
    assert one.ask(asked) == [(1,), (2,), (3,)]
    assert one.ask("select count(*), count(distinct trajectory_id) from sample where kind = 'expert'") == [(8, 8)]

    assert await expert_samples(one.ctx, 1) == {"expert": 8, "rejected": 0}
    assert one.ask("select count(*) from sample") == [(8,)]
    assert len(best_expert_episodes(one.ctx, 1)["door/train/0"][1].steps) == 1


async def test_a_demonstration_that_fails_is_named_or_turned_away(site: Sites, tmp_path: Path) -> None:
    file = write(tmp_path, demonstration(0, OPENING), demonstration(1, CLOSED))
    strict = await prepare(site(f"eto.expert.file={file}"))
    with pytest.raises(
        DataFileError, match=r"data.jsonl:2: played again, .* reaches reward 0 and not 1; .*'Wrong 1\.'"
    ):
        await demonstrate(strict.ctx, 1)
    lenient = await prepare(site(f"eto.expert.file={file}", "eto.expert.failed_replay=reject"))
    assert await demonstrate(lenient.ctx, 1) == {"expert": 1, "rejected": 5}
    reasons = lenient.ask("select reason, count(*) from rejection group by all order by 1")
    assert reasons == [("failed-replay", 1), ("no-demonstration", 4)]


async def test_a_file_with_nothing_of_use_stops_the_run(site: Sites, tmp_path: Path) -> None:
    file = write(tmp_path, demonstration(77, OPENING))
    one = await prepare(site(f"eto.expert.file={file}"))
    with pytest.raises(ConfigError, match=r"data.jsonl has no sound demonstration of any training instance"):
        await demonstrate(one.ctx, 1)


async def test_another_file_makes_another_run(site: Sites, tmp_path: Path) -> None:
    write(tmp_path, demonstration(0, OPENING))
    one = site(f"eto.expert.file={tmp_path / 'data.jsonl'}")
    write(tmp_path, demonstration(1, OPENING))
    assert site(f"eto.expert.file={tmp_path / 'data.jsonl'}").ctx.run_id != one.ctx.run_id
    with pytest.raises(DataFileError, match="cannot be read"):
        site("eto.expert.file=missing.jsonl")


async def test_ready_pairs_come_from_a_file(site: Sites, tmp_path: Path) -> None:
    turns = {"prompt": ["Door."], "chosen": [OPENING], "rejected": [CLOSED, "Wrong 1.", CLOSED]}

    def listed(key: str) -> list[dict[str, str]]:
        first = 0 if key == "prompt" else 1
        return [
            {"role": ("user", "assistant")[(at + first) % 2], "content": text} for at, text in enumerate(turns[key])
        ]

    pair = {"id": 0} | {key: listed(key) for key in turns}
    file = write(tmp_path, pair, pair | {"id": "door/train/1", "rejected": pair["chosen"]})
    one = await prepare(site("eto.preferences.source=file", f"eto.preferences.file={file}"))

    assert await prefer(one.ctx, 1) == {"file": 1, "rejected": 1}
    assert (await dataset(one.ctx, 1))["samples"] == {"chosen": 1, "rejected": 1}
    # Nothing was explored, so the report does not say that it brought nothing.
    funnel = [(stage.name, stage.count) for stage in build_report(one.ctx, 1).funnel]
    assert funnel == [("preference pairs", 1), ("samples", 2), ("trained rows", 2)]
    write(tmp_path, pair | {"id": "door/test/0"})
    leak = await prepare(site("eto.preferences.source=file", f"eto.preferences.file={file}"))
    await prefer(leak.ctx, 1)
    with pytest.raises(DataFault, match="made from 1 held-out instances, or variants of these: door/test/0"):
        await dataset(leak.ctx, 1)


async def test_nothing_to_compare_is_told_in_one_sentence(site: Sites) -> None:
    one = site("eto.preferences.margin=1.0")
    await make_pairs(one)
    with pytest.raises(DataFault, match=r"^iteration 1 of run \w+ has no sample to train on; `select"):
        await dataset(one.ctx, 1)


async def test_the_best_of_several_episodes_is_a_metric(site: Sites) -> None:
    one = await prepare(site("evaluation.episodes=4", "evaluation.temperature=1.0"))
    await evaluate(one.ctx, 0)

    found = dict(one.ask("select metric, value from v_metrics where evaluation = 'test' and depth is null"))
    ((mean,),) = one.ask("select success from v_evaluations")
    assert {name for name in found if re.search(r"^(best|pass|mean)", name)} == {
        "best_of_4_success", "best_of_4_reward", "pass@1", "pass@2", "pass@4", "mean@4", "mean_reward@4"
    }  # fmt: skip
    assert found["mean@4"] == found["mean_reward@4"] == pytest.approx(found["success"]) == pytest.approx(mean)
    assert found["best_of_4_success"] == found["best_of_4_reward"] > mean
    assert found["pass@4"] == pytest.approx(found["best_of_4_success"])
    assert found["pass@1"] == pytest.approx(mean)


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
    with pytest.raises(ConfigError) as caught:
        parse({"name": "x", "method": "eto", "model": {"path": "m"}}, overrides)
    assert fault in str(caught.value)


def training(recipe: Recipe, iteration: int) -> Training:
    found = plan_of(recipe, iteration).training
    assert found is not None
    return found


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

    made = [training(recipe, iteration) for iteration in (1, 2, 3, 4)]

    assert [one.config.learning_rate for one in made] == [1.0, 1e-6, 5e-7, 5e-7]
    losses = [one.objective.settings.get("preference") for one in made]
    assert [loss and loss.beta for loss in losses] == [None, 0.1, 0.5, 0.5]
    assert {one.config.lora_r for one in made} == {4}


@pytest.mark.parametrize("leaks", ["door/dev/0", "door/train/1"])
async def test_ready_pairs_may_not_be_of_any_held_out_set_nor_of_variants(
    site: Sites, tmp_path: Path, leaks: str
) -> None:
    turns = [{"role": "user", "content": "Door."}], [{"role": "assistant", "content": OPENING}]
    wrong = [{"role": "assistant", "content": CLOSED}]
    file = write(tmp_path, {"id": leaks, "prompt": turns[0], "chosen": turns[1], "rejected": wrong})
    sets = "evaluation.sets={dev: {split: dev}}"
    one = await prepare(site("eto.preferences.source=file", f"eto.preferences.file={file}", sets))
    variant, original = (Instance(environment="door", split=split, index=1) for split in ("train", "test"))
    one.ctx.store.write({"instance": [instance_row(variant, 1, original)]})
    await prefer(one.ctx, 1)
    with pytest.raises(DataFault, match=f"1 held-out instances, or variants of these: {leaks}"):
        await dataset(one.ctx, 1)
