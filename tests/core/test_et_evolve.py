"""The flywheel as a stage: what it leaves in the store, what a fault or a kill costs, and which
samples come of it.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import FAMILY, MATH, PASSAGES, RIVER, Staff, answers_of, begun, cast
from toolboxes import Bench
from wheel import all_rows

from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.errors import ErrorBudgetSpent, ModelUnavailable
from agentr_core.methods.et_agent.evolve import evolve
from agentr_core.methods.et_agent.report import family_sections, funnel
from agentr_core.methods.et_agent.selection import select_rft
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.equipment import Shard, ShardResult, shard_result
from agentr_core.stages.report import bills, build_report
from agentr_core.store.codec.samples import load_samples
from agentr_core.store.queries.listings import ancestry
from agentr_core.store.queries.runs import request_use, token_use
from agentr_core.types import Instance, Request

pytestmark = pytest.mark.slow
BOTH = (MATH, RIVER)


async def whole(root: Path, model: Path, staff: Staff, **flywheel: Any) -> Any:
    """Return a workplace with flywheel and selection done."""
    # One family at a time: a fault cancels what the others have under way.
    ctx = await begun(root, model, staff, FAMILY | flywheel, problems=BOTH, scale={"concurrency": 1})
    await evolve(ctx, 1)
    await select_rft(ctx, 1)
    return ctx


@pytest.mark.parametrize("policy", ["best-one", "expand-all"])
async def test_each_operator_has_its_children_and_what_is_fit_becomes_samples(
    tmp_path: Path, tiny_model_dir: Path, policy: str
) -> None:
    staff = cast()
    ctx = await whole(tmp_path, tiny_model_dir, staff, policy=policy, most_members=20)
    store = ctx.store
    counts = dict(store.rows("select operator, count(*) from v_families group by all"))
    assert counts.keys() == {"fresh", "C0", "C1", "C2", "I1", "I2", "I3", "I4"}
    assert store.query("select * from v_orphans").empty
    parents = "select count(*) from derivation d join trajectory t on t.trajectory_id = d.parent_id "
    wrong = store.rows(f"{parents} where t.success <> (operator like 'C%')")
    assert wrong == [(0,)], "right parents have operators C, wrong ones I"
    assert store.rows("select sum(members) from family") == [(sum(counts.values()),)]
    endings = {"best-one": {(3, "rounds")}, "expand-all": {(2, "members")}}
    assert set(store.rows("select rounds, ended_by from family")) == endings[policy]
    assert store.rows("select max(n) from (select count(*) n from v_families group by instance_id)")[0][0] <= 20

    samples = load_samples(store, iteration_id=ctx.iteration_id(1))
    assert samples
    for sample in samples.values():
        (_, _, turn) = sample.messages
        trained = [span.text for span in turn.spans if span.train]
        assert trained == [text for span in turn.spans if (text := span.text) and not text.startswith("\n<result>")]
    ((sample_id, grandparent),) = store.rows(
        "select s.sample_id, d.parent_id from sample s join derivation c on c.child_id = s.trajectory_id "
        "join derivation d on d.child_id = c.parent_id order by all limit 1"
    )
    ancestors = [line.entity.key for line in ancestry(store, sample_id, "sample")]
    assert grandparent in ancestors, "a sample leads back through its family"
    reasons = dict(store.rows("select reason, count(*) from rejection where stage = 'rft' group by all"))
    assert reasons["wrong-answer"] > 0
    assert reasons["duplicate"] > 0
    assert len(samples) + sum(reasons.values()) == sum(counts.values())

    (section,) = family_sections(ctx, 1)
    assert len(section.blocks[0].rows) == 8  # type: ignore[union-attr]
    assert [stage.name for stage in funnel(ctx, 1)][:2] == ["trajectories", "right answers"]
    num_requests = len(staff.requests("editor")) + len(staff.requests("reflector"))
    uses = [
        request_use(store, ctx.iteration_id(1), role=role, max_replies_per_request=0)
        for role in ("editor", "reflector")
    ]
    assert sum(use.requests for use in uses) == num_requests == store.rows("select count(*) from edit")[0][0]
    sampled_tokens = store.rows("select sum(completion_tokens) from generation where seed is not null")[0][0]
    edit_tokens = store.rows("select sum(completion_tokens) from edit")[0][0]
    assert token_use(store, ctx.iteration_id(1)).completion == sampled_tokens + edit_tokens


async def test_a_corrected_training_asks_nothing_again_and_has_the_same_families_and_samples(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    first_staff, second_staff, third_staff = cast(), cast(), cast()
    first = await whole(tmp_path, tiny_model_dir, first_staff)
    # One family was lost there: it is grown here.
    family_id = first.store.rows("select min(family_id) from family")[0][0]
    with first.store.transaction() as con:
        con.execute("delete from family where family_id = ?", [family_id])

    async def evolve_with(staff: Staff, rate: float) -> RunContext:
        ctx = await begun(tmp_path, tiny_model_dir, staff, FAMILY, problems=BOTH, training={"learning_rate": rate})
        await evolve(ctx, 1)
        await select_rft(ctx, 1)
        return ctx

    second = await evolve_with(second_staff, 1e-3)
    assert 0 < len(second_staff.asked) < len(first_staff.asked)
    third = await evolve_with(third_staff, 2e-3)
    assert third_staff.asked == []
    assert third.store.rows("from v_orphans") == third.store.rows("from v_contradictions") == []
    assert token_use(third.store, third.iteration_id(1)).completion == 0, "what was copied was not asked for"
    assert made_of(second) == made_of(third)
    (section,) = family_sections(third, 1)
    assert section == family_sections(second, 1)[0]
    sources = "select distinct copied_from is null from trajectory where source = 'flywheel' and iteration_id = ?"
    assert third.store.rows(sources, third.iteration_id(1)) == [(False,)]
    hotter = await begun(tmp_path, tiny_model_dir, staff := cast(), FAMILY | {"temperature": 0.7}, problems=BOTH)
    await evolve(hotter, 1)
    assert staff.asked


def made_of(ctx: RunContext) -> tuple[Sequence[Any], ...]:
    """Return what a flywheel and its selection made, without ids: trajectories, what they were made
    of, the ends of families, what was turned away, and the samples.
    """
    iteration = ctx.iteration_id(1)
    samples = load_samples(ctx.store, iteration_id=iteration)
    return (
        ctx.store.rows(
            "select t.instance_id, t.success, string_agg(s.reply, '|' order by s.position) from trajectory t "
            "join step s using (trajectory_id) where t.iteration_id = ? "
            "group by t.trajectory_id, t.instance_id, t.success order by all",
            iteration,
        ),
        ctx.store.rows(
            "select c.instance_id, d.operator, d.position, d.prompt_hash, d.seed, d.round, p.reward, c.reward "
            "from derivation d join trajectory c on c.trajectory_id = d.child_id "
            "join trajectory p on p.trajectory_id = d.parent_id where d.iteration_id = ? order by all",
            iteration,
        ),
        ctx.store.rows(
            "select instance_id, members, rounds, ended_by from family where iteration_id = ? order by all", iteration
        ),
        ctx.store.rows(
            "select stage, reason, if(stage = 'evolve', subject || detail, '') from rejection "
            "where iteration_id = ? order by all",
            iteration,
        ),
        sorted(str((sample.instance, sample.messages)) for sample in samples.values()),
    )


async def test_calls_of_a_beginning_that_was_taken_over_are_not_made_again_and_not_counted_again(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    bench = Bench(PASSAGES)
    ctx = await begun(tmp_path, tiny_model_dir, cast(), FAMILY, problems=BOTH, tools=bench)
    await evolve(ctx, 1)
    num_calls = ctx.store.count("select sum(calls) from v_tool_calls")
    assert num_calls == len(bench.calls)
    assert num_calls == ctx.store.count("select sum(calls_made) from v_families")
    assert build_report(ctx, 1).versions["tool python"] == "bench"
    rows = ctx.store.count("select count(*) from tool_call")
    assert rows == ctx.store.count("select sum(calls) from v_families") > num_calls, "what a trajectory costs"
    by_operator = dict(ctx.store.rows("select operator, sum(calls_made) from v_families group by all"))
    assert by_operator["C2"] == 0, "thoughts alone are written anew"


async def test_no_more_episodes_than_are_allowed_are_played_at_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    worlds = set[int]()

    class World(ReasoningWorld):
        def reset(self, instance: Instance) -> str:
            worlds.add(id(self))
            return super().reset(instance)

    def world() -> World:
        held_out = (replace(MATH, id="t", question="What is 1 + 1?", golds=("2",)),)
        return World({"train": BOTH, "test": held_out}, Bench(PASSAGES), Rules(extra_calls=2))

    ctx = await begun(
        tmp_path,
        tiny_model_dir,
        cast(),
        FAMILY | {"fresh": 6, "rounds": 1},
        problems=BOTH,
        make_environment=world,
        scale={"concurrency": 2},
    )
    await evolve(ctx, 1)
    # One more is lent for a moment to look at.
    assert len(worlds) <= 3


async def test_what_is_there_is_not_made_again(tmp_path: Path, tiny_model_dir: Path) -> None:
    staff = cast()
    ctx = await whole(tmp_path, tiny_model_dir, staff)
    before, num_requests = all_rows(ctx.store), len(staff.asked)
    summary = await evolve(ctx, 1)
    await select_rft(ctx, 1)
    assert (summary["questions"], summary["new"], len(staff.asked)) == (2, 0, num_requests)
    assert {row for row in before if row[0] != "timing"} <= all_rows(ctx.store)


@pytest.mark.parametrize(
    ("bounds", "faults"),
    [({}, (1, 4, 9)), ({"policy": "expand-all", "most_members": 64, "most_tokens": 200}, (40, 80))],
)
async def test_a_fault_costs_nothing_that_was_made(
    tmp_path: Path, tiny_model_dir: Path, bounds: dict[str, Any], faults: tuple[int, ...]
) -> None:
    calm = await whole(tmp_path / "calm", tiny_model_dir, (plain := cast()), **bounds)
    answers, ends = answers_of(calm), "select instance_id, members, rounds, ended_by from family order by all"
    families = calm.store.rows(ends)
    assert {why for *_, why in families} == ({"tokens"} if bounds else {"rounds"})
    for number in faults:
        staff, countdown = cast(), [number]

        def out(role: str, request: Request, left: list[int] = countdown) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise ModelUnavailable(f"{role} is out")

        staff.before = out
        with pytest.raises(ErrorBudgetSpent):
            await whole(tmp_path / str(number), tiny_model_dir, staff, **bounds)
        staff.before = lambda role, request: None
        ctx = await whole(tmp_path / str(number), tiny_model_dir, staff, **bounds)
        assert answers_of(ctx) == answers
        assert ctx.store.rows(ends) == families

        for role in ("editor", "reflector"):
            seeds, once = ([request.seed for request in of.requests(role)] for of in (staff, plain))
            assert sorted(seeds) == sorted(once), "each was asked once"
        actor_seeds, calm_seeds = ({request.seed for request in of.requests("actor")} for of in (staff, plain))
        assert actor_seeds == calm_seeds


async def test_a_family_that_fails_leaves_what_it_has(tmp_path: Path, tiny_model_dir: Path) -> None:
    staff = cast()

    def out(role: str, request: Request) -> None:
        if role == "reflector":
            raise ModelUnavailable("the reflector is out")

    staff.before = out
    ctx = await begun(tmp_path, tiny_model_dir, staff, FAMILY, errors={"retries": 0, "budget": 1.0})
    await evolve(ctx, 1)
    rows = ctx.store.rows("select operator, success from v_families order by all")
    assert rows == [("I2", True), ("I3", True), ("fresh", False)]
    assert ctx.store.rows("select count(*) from family") == [(0,)]
    assert ctx.store.rows("select distinct class, subject from event") == [("ModelUnavailable", "reasoning/train/0")]
    await select_rft(ctx, 1)
    assert len(load_samples(ctx.store, iteration_id=ctx.iteration_id(1))) >= 1


async def test_a_judge_that_is_out_is_asked_later_and_nobody_else(tmp_path: Path, tiny_model_dir: Path) -> None:
    staff = cast()
    staff.scripts = {**staff.scripts, "judge": lambda asked, seed: "Incorrect"}
    away = True

    def out(role: str, request: Request) -> None:
        if role == "judge":
            assert request.sampling.temperature == 0
            if away:
                raise ModelUnavailable("the judge is out")

    staff.before = out

    def make_world() -> ReasoningWorld:
        return ReasoningWorld({"train": (MATH,), "test": (RIVER,)}, Bench({}), Rules(judged="all"))

    models = {role: {"path": str(tiny_model_dir)} for role in ("judge", "editor", "reflector")}
    ctx = await begun(tmp_path, tiny_model_dir, staff, {"rounds": 0}, make_environment=make_world, models=models)
    with pytest.raises(ErrorBudgetSpent, match="the judge is out"):
        await evolve(ctx, 1)
    assert ctx.store.rows("select source from trajectory") == [("ungraded",)]
    away, num_requests = False, len(staff.requests("actor"))
    await evolve(ctx, 1)
    assert len(staff.requests("actor")) == num_requests
    assert ctx.store.rows("select given_by, success from grade") == [("model", False)]
    draws = "select count(*) from generation join trajectory on owner_id = trajectory_id where source = 'flywheel'"
    assert ctx.store.rows(draws) == [(2,)]


async def test_roles_of_one_model_share_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    staff, roles = cast(), list[str]()
    make = staff.model

    def load(role: Any, path: Path) -> Any:
        roles.append(role)
        return make(role, path)

    config = {"path": str(tiny_model_dir)}
    staff.scripts = {**staff.scripts, "reflector": lambda asked, seed: "nothing"}
    ctx = await begun(tmp_path, tiny_model_dir, staff, FAMILY, models={"reflector": config, "editor": config})
    await evolve(replace(ctx, load_model=load), 1)
    assert roles == ["actor", "reflector"]
    assert set(ctx.store.rows("select role from edit")) == {("editor",), ("reflector",)}


async def test_workers_grow_the_same_families(tmp_path: Path, tiny_model_dir: Path) -> None:
    calm = await whole(tmp_path / "calm", tiny_model_dir, cast())
    ctx = await begun(tmp_path / "spread", tiny_model_dir, cast(), FAMILY, problems=BOTH, scale={"shard_size": 1})
    sizes: list[int] = []

    async def workers(shards: Sequence[Shard]) -> AsyncGenerator[ShardResult, None]:
        for shard in shards:
            sizes.append(len(shard))
            yield await shard_result(pickle.loads(pickle.dumps(shard)), ctx)

    await evolve(replace(ctx, distribute=workers), 1)
    await select_rft(ctx, 1)
    assert sizes == [1, 1]
    assert answers_of(ctx) == answers_of(calm)


async def test_a_teacher_that_answers_for_roles_without_a_model_is_billed_for_it(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    def teacher(asked: str, seed: int) -> str:
        role = "editor" if "Step: " in asked or "thoughts" in asked else "reflector" if "again." in asked else "actor"
        return scripts[role](asked, seed)

    scripts = cast().scripts
    staff = Staff({"teacher": teacher})
    server = {"model": "large", "continues": True}
    teacher_config = {"backend": "openai", "server": server, "prices": {"completion": 2.0}, "context_length": 4096}
    ctx = await begun(tmp_path, tiny_model_dir, staff, FAMILY, problems=BOTH, models={"teacher": teacher_config})
    await evolve(ctx, 1)
    assert ctx.store.count("select count(*) from edit"), "editor and reflector were asked"
    (bill,) = bills(ctx, 1)
    assert (bill.role, bill.requests) == ("teacher", len(staff.requests("teacher")))
    assert bill.cost == token_use(ctx.store, ctx.iteration_id(1)).completion * 2 / 1e6


async def test_a_teacher_answers_and_is_varied_and_the_policy_is_asked_for_nothing(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    staff = cast()
    staff = Staff({**staff.scripts, "teacher": staff.scripts["actor"]})
    models = {"reflector": {"path": str(tiny_model_dir)}, "editor": {"path": str(tiny_model_dir), "max_batch": 7}}
    models["teacher"] = {"path": str(tiny_model_dir), "max_batch": 5}
    teacher_ctx = await begun(tmp_path / "taught", tiny_model_dir, staff, FAMILY, problems=BOTH, models=models)
    await evolve(teacher_ctx, 1)
    await select_rft(teacher_ctx, 1)
    assert teacher_ctx.collector(1).role == "teacher"
    assert staff.requests("teacher")
    assert not staff.requests("actor")
    own_ctx = await whole(tmp_path / "own", tiny_model_dir, cast())
    texts = [
        sorted(
            str([m.text for m in sample.messages]) for sample in load_samples(ctx.store, iteration_id=ctx_id).values()
        )
        for ctx in (teacher_ctx, own_ctx)
        for ctx_id in (ctx.iteration_id(1),)
    ]
    assert texts[0] == texts[1] != []
    assert not teacher_ctx.store.rows("select * from v_orphans")
    ((collected_by,),) = teacher_ctx.store.rows("select collected_by from iteration where iteration = 1")
    assert collected_by == teacher_ctx.collector(1).id
