"""An evaluation in a world whose rewards a judge gives: what is kept while the judge is out, and
what a rerun asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from asked import run_id_of
from door import Door

from agentr_core.errors import ErrorBudgetSpent, ModelUnavailable
from agentr_core.methods.faults import parse
from agentr_core.methods.table import method_of
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ModelRole
from agentr_core.reports.iteration import sections
from agentr_core.runtime.context import RunContext
from agentr_core.runtime.start import start_run
from agentr_core.stages.evaluate import evaluate
from agentr_core.stages.report import build_report
from agentr_core.store.database import Store
from agentr_core.types import Generation, Grade, Message, Question, Request, Trajectory

pytestmark = pytest.mark.slow
CLOSED = next(word for word in map(str, range(99)) if Door().parse(word) == "wrong")


class Teacher:
    """Asks a judge about every episode."""

    asks = "judge"

    def rule(self, trajectory: Trajectory) -> Grade | None:
        return None

    def question(self, trajectory: Trajectory) -> Question:
        return Question(role="judge", messages=(Message(role="user", text=trajectory.first_observation),))

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        return Grade(reward=float(reply), success=reply == "1.0") if reply[:1].isdecimal() else None


class School(Door):
    grader = Teacher()


@dataclass
class Staff:
    """The models of a run: how often each was asked, and whether the judge is there."""

    away: bool = False
    asked: dict[str, int] = field(default_factory=lambda: {"actor": 0, "judge": 0})
    loaded: list[str] = field(default_factory=list)

    def model(self, role: ModelRole, path: Path) -> Member:
        self.loaded.append(role)
        return Member(self, role)


def mark(text: str) -> str:
    return "1.0" if text.startswith("Door 1 ") else "0.5"


class Member(ScriptedModel):
    def __init__(self, staff: Staff, role: ModelRole) -> None:
        super().__init__(lambda messages, seed, number: CLOSED if role == "actor" else mark(messages[0].text))
        self._staff = staff
        self._role = role

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        self._staff.asked[self._role] += len(requests)
        if self._role == "judge" and self._staff.away:
            raise ModelUnavailable("the judge is out")
        return await super().generate(requests)


@pytest.fixture
def ctx(tmp_path: Path, tiny_model_dir: Path, request: pytest.FixtureRequest) -> tuple[RunContext, Staff]:
    recipe = parse(
        {
            "name": "school",
            "environment": {"name": "door"},
            "model": {"path": str(tiny_model_dir)},
            "models": {"judge": {"path": str(tiny_model_dir)}},
            "evaluation": {"max_steps": 3, "revision_test": {"enabled": False}},
            "errors": {"budget": 0.4, "retries": 0},
        }
    )
    staff = Staff()
    root = tmp_path / "runs"
    return (
        RunContext(
            recipe=recipe,
            method=method_of(recipe),
            run_id=run_id_of(recipe),
            root=root,
            store=Store(root / "store.duckdb"),
            make_environment=lambda _: School(),
            load_model=staff.model,
            progress=lambda done, total, note: None,
        ),
        staff,
    )


async def test_a_judge_that_is_out_leaves_episodes_ungraded_and_a_rerun_asks_only_it(
    ctx: tuple[RunContext, Staff],
) -> None:
    run_ctx, staff = ctx
    await start_run(run_ctx)
    staff.away = True
    with pytest.raises(ErrorBudgetSpent, match="the judge is out"):
        await evaluate(run_ctx, 0)
    num_ungraded = run_ctx.store.rows("select count(*) from trajectory where source = 'ungraded'")[0][0]
    assert num_ungraded >= 3
    assert run_ctx.store.rows("select count(*) from episode") == [(0,)]
    assert set(run_ctx.store.rows("select class, phase, level from event")) == {("ModelUnavailable", "grade", "error")}
    assert run_ctx.store.rows("select * from grade") == []

    staff.away = False
    num_actor_calls = staff.asked["actor"]
    summary = await evaluate(run_ctx, 0)
    assert staff.asked["actor"] - num_actor_calls == 3 * (6 - num_ungraded)
    assert (summary["test"]["n"], summary["test"]["mean"]) == (6, pytest.approx(1 / 6))
    assert staff.loaded.count("judge") == 2
    rows = run_ctx.store.rows(
        "select t.reward, t.success, g.environment_reward, a.text, a.role from episode e "
        "join trajectory t using (trajectory_id) join grade g on g.owner_id = t.trajectory_id "
        "join answer a using (kind, owner_id, position) order by e.instance_id"
    )
    assert rows == [
        (0.5, False, 0.0, "0.5", "judge"),
        (1.0, True, 0.0, "1.0", "judge"),
        *[(0.5, False, 0.0, "0.5", "judge")] * 4,
    ]
    assert run_ctx.store.rows("select * from v_orphans") == []
    assert run_ctx.store.rows("select * from v_contradictions") == []
    # Replies have their seeds still, whether they were played in this run of the stage or before.
    assert run_ctx.store.rows(
        "select count(*) from generation g join episode e on e.trajectory_id = g.owner_id where g.seed is null"
    ) == [(0,)]

    counts = dict(staff.asked)
    assert await evaluate(run_ctx, 0) == summary
    assert staff.asked == counts


async def test_a_report_reads_the_stored_measures(ctx: tuple[RunContext, Staff]) -> None:
    run_ctx, _ = ctx
    await start_run(run_ctx)
    await evaluate(run_ctx, 0)
    (score,) = build_report(run_ctx, 0).scores
    metrics = dict(run_ctx.store.rows("select metric, value from v_metrics where iteration = 0 and depth is null"))
    assert (score.success.value, score.reward.value) == (metrics["success"], metrics["reward"])
    assert score.reward.value == pytest.approx((5 * 0.5 + 1.0) / 6)
    assert metrics["reward_within@1"] == metrics["reward_within@2"] == 0.0
    assert metrics["reward_within@3"] == pytest.approx(score.reward.value)
    assert metrics["instances"] == 6
    by_depth = run_ctx.store.rows(
        "select depth, value, n from v_metrics where metric = 'success' and depth is not null"
    )
    assert by_depth == [(part.depth, part.success.value, part.success.n) for part in score.by_depth]
    # The rows are what is shown; a store of an earlier version has none, and shows the same.
    run_ctx.store.update(
        "metric",
        {
            "scope": "evaluation",
            "scope_id": run_ctx.store.rows("select evaluation_id from evaluation")[0][0],
            "name": "success",
            "value": 0.75,
        },
    )
    assert build_report(run_ctx, 0).scores[0].success.value == 0.75
    with run_ctx.store.transaction() as con:
        con.execute("delete from metric")
    report = build_report(run_ctx, 0)
    assert report.scores == (score,)
    assert "scores" in {section.key for section in sections(report)}
