"""Distillation on the policy's own episodes, from what is scored to the weights, and killed on the
way.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import groups
import pytest
from wheel import PATIENCE, launched

from agentr_core.methods.grpo.distil import Scoring
from agentr_core.store.database import Store
from flows.commands.samples import preview_scored

pytestmark = pytest.mark.slow
SMALL = "{steps: 2, groups: 2, num_generations: 3, resample: 0, save_steps: 1, distil: %s}"
TOKENS = "select r.trajectory_id, s.position, len(s.token_ids) n from rl_rollout r join step s using (trajectory_id)"


def recipe(folder: Path, model: Path, distil: str, more: str = "") -> Path:
    return groups.write(folder, model, more=f"grpo: {SMALL % distil}\n{more}")


def store_of(file: Path) -> Store:
    return Store(file.parent / "runs" / "store.duckdb")


@pytest.mark.usefixtures("door_installed")
@pytest.mark.parametrize(
    ("context", "told"), [("expert", "an expert's whole episode"), ("records, key: observation", "this whole episode")]
)
def test_killed_before_and_after_it_scored_it_trains_to_the_same_weights(
    tmp_path: Path,
    door_model: Path,
    process_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    context: str,
    told: str,
) -> None:
    knows = "environment: {options: {knows: true}}"
    whole, cut = (
        recipe(tmp_path / name, door_model, f"{{context: {context}, weight: 0.5}}", knows) for name in ("whole", "cut")
    )
    asyncio.run(groups.trained(whole))

    scores = Scoring.scores
    calls: list[int] = []

    async def interrupt(self: Scoring, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return await scores(self, *args)

    monkeypatch.setattr(Scoring, "scores", interrupt)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(groups.trained(cut))
    monkeypatch.undo()
    steps_sql = "select distinct step from rl_score join rl_rollout using (trajectory_id)"
    assert store_of(cut).rows(steps_sql) == [(1,)]
    # Scored and not trained.
    command = [sys.executable, "-m", "groups", str(cut), "2"]
    with launched(command, env=process_env | {"HF_HUB_OFFLINE": "1"}) as process:
        output = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL, output
    assert {step for (step,) in store_of(cut).rows(steps_sql)} == {1, 2}
    asyncio.run(groups.trained(cut))

    weights_sql = "select weights_sha256 from checkpoint where parent_id is not null"
    scores_sql = "select * exclude (created_at) from rl_score order by all"
    for question in (weights_sql, scores_sql):
        assert store_of(cut).rows(question) == store_of(whole).rows(question)
    store = store_of(whole)
    assert store.query("select * from v_orphans").empty
    unlike = (
        f"select count(*) n from ({TOKENS}) left join rl_score using (trajectory_id, position) where n != len(logprobs)"
    )
    assert store.rows(unlike) == [(0,)]
    assert all(store.query("select contrast from rl_group")["contrast"]), "all groups teach"
    steps = store.query("select scorer_kl, trained_tokens, sampled_tokens from rl_step")
    assert steps["scorer_kl"].notna().all()
    assert steps["trained_tokens"].tolist() == steps["sampled_tokens"].tolist()

    ((key,),) = store.rows("select trajectory_id from rl_score limit 1")
    turns = preview_scored(whole.parent / "runs", key, 1)
    assert [is_scored for _, is_scored in turns] == [False] * (len(turns) - 1) + [True]
    assert told in turns[-2][0]
    if context == "expert":
        assert "The end: a success" in turns[-2][0]
    else:
        keys = [key for (key,) in store.rows("select distinct trajectory_id from rl_score order by all")]
        texts = [preview_scored(whole.parent / "runs", key, 1)[-2][0] for key in keys]
        assert any("another episode of this task" in text for text in texts)


@pytest.mark.usefixtures("door_installed")
def test_the_base_scores_its_own_tokens_as_it_sampled_them(tmp_path: Path, door_model: Path) -> None:
    file = recipe(tmp_path, door_model, "{advantage: none}")
    asyncio.run(groups.trained(file))
    rows = store_of(file).rows(
        "select s.logprobs, c.logprobs, r.advantage from rl_score c join step s using (trajectory_id, position) "
        "join rl_rollout r using (trajectory_id) where r.step = 1"
    )
    assert len(rows) > 5
    for logprobs, scores, advantage in rows:
        assert scores == pytest.approx(logprobs, abs=1e-4)
        assert advantage == 0
    first, second = store_of(file).rows("select scorer_kl, loss from rl_step order by step")
    assert first == pytest.approx((0, 0), abs=1e-5)
    assert second[0] is not None
