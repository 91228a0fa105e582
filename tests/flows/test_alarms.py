"""Trainings and judges that really go wrong, and what each reaction makes of their runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import groups
import pytest
from wheel import agentr, write_recipe

from agentr_core.errors import AlarmRaised
from agentr_core.fingerprint import fingerprint
from agentr_core.methods.agent_r.collect import collect
from agentr_core.methods.agent_r.critique import JUDGE_INSTRUCTION, critique
from agentr_core.models.scripted import ScriptedModel
from agentr_core.runtime.alarms import check_stage
from agentr_core.runtime.start import begin_iteration, start_run
from agentr_core.store.database import Store
from agentr_core.store.tables import Alarm
from agentr_core.training.checkpoints import read_manifest
from agentr_core.types import Message
from tasks.wiring import load_recipe, quiet_context, run_reference

pytestmark = pytest.mark.slow
SOUND = """
alarms: {cut_replies: null}
grpo: {steps: 3, groups: 6, save_steps: 1}
training: {learning_rate: 1.0e-3, save_total_limit: null}
"""
"""More of a recipe whose model never ends a reply by itself."""
HOT = SOUND.replace("1.0e-3", "1.0e-1")


def rows(file: Path, query: str) -> list[tuple[object, ...]]:
    return Store(file.parent / "runs" / "store.duckdb").rows(query)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, door_model: Path, door_installed: None) -> Path:
    """The recipe of a training at a hundred times the rate that only tells."""
    file = groups.write(tmp_path_factory.mktemp("told"), door_model, more=HOT)
    asyncio.run(groups.trained(file))
    return file


def weights(file: Path) -> dict[object, object]:
    """Return the hashes of published weights by the end of their ids: `@` and a step, or none."""
    checkpoints = rows(file, "select checkpoint_id, weights_sha256 from checkpoint where parent_id is not null")
    return {str(name)[16:]: sha256 for name, sha256 in checkpoints}


@pytest.mark.usefixtures("door_installed")
def test_a_sound_training_raises_no_alarm(tmp_path: Path, door_model: Path) -> None:
    file = groups.write(tmp_path, door_model, more=SOUND)
    asyncio.run(groups.trained(file))
    assert rows(file, "select * from v_alarms") == []


def test_a_rate_a_hundred_times_too_large_is_noticed_at_once(told: Path) -> None:
    alarms = rows(told, "select name, stage, step, reaction from v_alarms where step = 2 order by name")
    assert alarms[:2] == [("clip_share", "reinforce", 2, "tell"), ("sampler_kl", "reinforce", 2, "tell")]
    assert rows(told, "select name, count(*) from alarm group by name having count(*) > 1") == []
    assert set(weights(told)) == {"", "@1", "@2"}, "it went on to its last step"


def test_a_training_that_is_stopped_goes_on_once_the_alarm_is_silent(
    told: Path, tmp_path: Path, door_model: Path
) -> None:
    file = groups.write(tmp_path, door_model, more=HOT)
    message = r"alarm clip_share in step 2: .*; alarms.reaction ends the run here, .* the same command trains on"
    query = "select count(*) from rl_rollout"
    for _ in range(2):
        with pytest.raises(AlarmRaised, match=message):
            asyncio.run(groups.trained(file, "alarms.reaction=stop"))
        assert set(weights(file)) == set()
        assert rows(file, "select max(step) from rl_step") == [(2,)]
    before = rows(file, query)
    with pytest.raises(AlarmRaised, match=r"alarm sampler_kl in step 2"):
        asyncio.run(groups.trained(file, "alarms.reaction=stop", "alarms.clip_share=null"))
    assert rows(file, query) == before, "nothing is sampled again"
    asyncio.run(groups.trained(file, "alarms.reaction=stop", "alarms.clip_share=null", "alarms.sampler_kl=null"))
    assert weights(file)[""] == weights(told)[""]
    assert rows(file, "select count(*) from run") == [(1,)]


def test_a_training_that_goes_back_publishes_what_was_saved_before(
    told: Path, tmp_path: Path, door_model: Path
) -> None:
    file = groups.write(tmp_path, door_model, more=HOT)
    with pytest.raises(AlarmRaised, match="alarm clip_share ended the training; the weights of step 1, the last"):
        asyncio.run(groups.trained(file, "alarms.reaction=back"))
    assert weights(file)[""] == weights(told)["@1"]
    ((folder,),) = rows(
        file, "select path from checkpoint join iteration on checkpoint_out = checkpoint_id where iteration = 1"
    )
    manifest = read_manifest(Path(str(folder)))
    assert (manifest.ended_by, manifest.steps) == ("alarms.clip_share", 1)
    asyncio.run(groups.trained(file, "alarms.reaction=back"))
    assert weights(file)[""] == weights(told)["@1"], "the same command goes on from them"


@pytest.mark.usefixtures("door_installed")
def test_without_saved_weights_a_training_cannot_go_back(tmp_path: Path, door_model: Path) -> None:
    file = groups.write(tmp_path, door_model, more=HOT.replace("save_steps: 1", "save_steps: 3"))
    with pytest.raises(AlarmRaised, match=r"alarm clip_share in step 2: .* command trains on"):
        asyncio.run(groups.trained(file, "alarms.reaction=back"))
    assert weights(file) == {}


@pytest.mark.usefixtures("door_installed")
@pytest.mark.parametrize("word", ["Good", "Bad"])
async def test_a_judge_that_always_says_the_same_is_noticed(tmp_path: Path, door_model: Path, word: str) -> None:
    recipe = load_recipe(write_recipe(tmp_path, door_model), ["search.width=4", "search.dives=4"])
    heard: list[Alarm] = []

    def speak(messages: tuple[Message, ...], seed: int, number: int) -> str:
        judging = JUDGE_INSTRUCTION in messages[-1].text
        return f"Reason: so it is.\nJudgement: {word}" if judging else f"word {fingerprint(seed, number)}"

    quiet = replace(quiet_context(run_reference(recipe), recipe), on_alarm=heard.append)
    ctx = replace(quiet, load_model=lambda role, path: ScriptedModel(speak))
    await start_run(ctx)
    await begin_iteration(ctx, 1)
    await collect(ctx, 1)
    await critique(ctx, 1)
    (stage,) = [stage for stage in ctx.plan(1).stages if stage.name == "critique"]
    check_stage(ctx, 1, stage)
    assert [alarm.name for alarm in heard] == ["judge_agreement"]


@pytest.mark.long
def test_a_run_of_the_command_line_ends_with_a_sentence_and_goes_on(
    tmp_path: Path, door_model: Path, process_env: dict[str, str]
) -> None:
    file = groups.write(tmp_path, door_model, more=HOT)
    result = agentr("run", file, "-o", "alarms.reaction=stop", env=process_env)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert any(line.startswith("alarm clip_share, reinforce of iteration 1 in step 2: ") for line in lines)
    assert lines[-1].startswith("agentr: AlarmRaised: alarm clip_share in step 2: ")
    assert rows(file, "select status from run") == [("failed",)]
    for is_finished in (False, True):
        back = agentr("run", file, "-o", "alarms.reaction=back", env=process_env)
        assert back.returncode == (0 if is_finished else 1), back.stderr
    assert rows(file, "select status from run") == [("finished",)]
    (page,) = (tmp_path / "runs" / "reports").glob("*/iteration-01.md")
    text = page.read_text(encoding="utf-8")
    assert "## Alarms" in text
    assert "share, reinforce, step 2: " in text
