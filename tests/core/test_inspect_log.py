"""Logs of Inspect: the form of a file, and a store's evaluations in it.

Inspect's own reader opens what `logged.evaluation` says in `make test-inspect`; the forms below are
those of inspect_ai 0.3.285.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner
from finished import after, finish, played
from logged import evaluation
from toy import Line

from agentr_core.environment import Environment, Instances
from agentr_core.environments import registry
from agentr_core.environments.graders import Pattern
from agentr_core.errors import ConfigError, DiskError
from agentr_core.exchange.inspect_log import log_of, notes, write_log
from agentr_core.recipes.environments import TEST
from agentr_core.runtime.context import RunContext
from agentr_core.stages.evaluate import counted_episodes, evaluation_id, measure, measure_rows
from agentr_core.stages.regrade import Scoring, regrade
from agentr_core.store.codec.ledger import evaluation_rows, rejection_rows
from agentr_core.store.codec.trajectories import episode_rows, instance_row
from agentr_core.store.tables import merge
from agentr_core.types import Instance, Rejection, StopReason, Transition
from flows.cli import cli
from flows.commands.logs import export_logs

RUN = "bbbb000000000001"
HEAD = ["version", "status", "eval", "plan", "results", "stats", "samples"]


class Toy(Environment):
    name = "toy"
    instruction = "Go there."

    def splits(self) -> tuple[str, ...]:
        return ("train", "test")

    def instances(self, split: str) -> Instances:
        return Instances(self.name, split, range(40))

    def reset(self, instance: Any) -> str:
        return "Start."

    def step(self, action: str) -> Transition:
        return Transition("there", 1.0, True, False, {"success": True})


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "toy", Toy)


def finished_run(folder: Path, **recipe: Any) -> RunContext:
    """Return a run whose first model wins 3 of 20 and whose second wins 9, with their measures."""
    ctx = finish(folder, RUN, [{1, 2, 3}, set(range(9))], **recipe)
    for number in (0, 1):
        key = evaluation_id(ctx, number, TEST)
        ctx.store.write(measure_rows(key, measure(counted_episodes(ctx, key))))
    return ctx


def logs(folder: Path) -> list[dict[str, Any]]:
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return sorted(contents, key=lambda log: log["eval"]["metadata"]["iteration"])


def test_a_log_has_the_form_that_is_read(tmp_path: Path) -> None:
    line_evaluation = evaluation(Line())
    assert write_log(line_evaluation, tmp_path) == "2026-01-02T03-04-05+00-00_toy-line-test_e1.json"
    (log,) = logs(tmp_path)
    assert list(log) == HEAD, "a head is read up to the samples"
    assert (log["version"], log["status"]) == (2, "success")
    assert log["eval"]["created"] == "2026-01-02T03:04:05.000600+00:00"
    assert log["eval"]["dataset"]["sample_ids"] == [f"line/test/{key}" for key in ("0", "1", "2", "2@1", "3")]
    assert log["eval"]["config"]["epochs"] == 2
    assert log["plan"]["config"] == {"temperature": 0.0, "top_p": 1.0, "max_tokens": 72}
    assert log["stats"]["model_usage"] == {
        "runs/checkpoints/c1": {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}
    }
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (6, 5)
    keys = [(sample["id"], sample["epoch"]) for sample in log["samples"]]
    assert len(set(keys)) == 6, "an id and an epoch name a sample"


def test_the_means_are_those_of_the_samples() -> None:
    log = log_of(evaluation(Line()))
    for score in log["results"]["scores"]:
        values = [sample["scores"][score["name"]]["value"] for sample in log["samples"] if "scores" in sample]
        assert score["metrics"]["mean"]["value"] == pytest.approx(fmean(values))
        assert score["scored_samples"] == len(values) == 5
    success, reward = (set(score["metrics"]) for score in log["results"]["scores"])
    assert (success, reward) == ({"mean", "ci95_low"}, {"mean"}), "a bound that is not there is left out"


def test_a_sample_has_the_conversation_and_how_it_ended() -> None:
    win, stop, fall, growth, call, fault = log_of(evaluation(Line()))["samples"]
    assert [turn["role"] for turn in win["messages"]] == ["user", "assistant", "user"] + ["assistant", "user"] * 2
    assert win["input"] == win["messages"][:3]
    assert win["messages"][-1]["content"] == "You are at 1. \u202e é", "the last observation, letter by letter"
    assert [turn.get("source") for turn in win["messages"]] == ["input"] * 3 + ["generate", None] * 2
    assert win["output"]["completion"] == "Thought: on\nAction: right"
    assert win["metadata"] | {"steps": []} == {"depth": 2, "stop_reason": "success", "num_steps": 2, "steps": []}
    assert win["metadata"]["steps"][0] == {"action": "right", "reward": 0.0, "valid": True}
    assert (win["total_time"], "limit" in win) == (1.5, False)

    assert (stop["epoch"], stop["limit"]) == (2, {"type": "custom", "limit": 20.0})
    assert stop["output"]["choices"][0]["stop_reason"] == "max_tokens"
    assert stop["scores"]["success"] == {"value": 0.0, "answer": "", "explanation": "The judge says no."}
    assert fall["scores"]["reward"]["value"] == -1.0

    assert growth["target"] == ["42", "forty-two"]
    spans = growth["messages"][-1]["metadata"]["spans"]
    assert [(span["text"], span["sampled"]) for span in spans] == [
        ("think", True),
        (" result", False),
        ("answer", True),
        ("", False),
    ]
    assert growth["output"]["completion"] == "answer"
    assert call["metadata"]["tools"] == [{"name": "look"}]
    assert [turn["role"] for turn in call["messages"]] == ["user", "assistant", "tool"]
    assert len(call["input"]) == 1
    assert fault["error"] == {"message": "OSError: gone", "traceback": "", "traceback_ansi": ""}
    assert "scores" not in fault, "a fault is no 0"


def test_what_a_log_cannot_hold_is_named() -> None:
    line_evaluation = evaluation(Line())
    text = " ".join(notes([line_evaluation]))
    for phrase in (
        "log-probabilities of the replies of 4 episodes",
        "1 episode was grown",
        "1 episode offer tools",
        "1 episode failed for good",
    ):
        assert phrase in text
    plain_evaluation = replace(
        line_evaluation, episodes=[replace(episode, messages=()) for episode in line_evaluation.episodes[2:3]]
    )
    assert notes([plain_evaluation]) == []


@pytest.mark.usefixtures("toy")
@pytest.mark.slow
def test_the_evaluations_of_a_run_are_written_with_their_scores(tmp_path: Path) -> None:
    ctx = finished_run(tmp_path)
    done = CliRunner().invoke(
        cli,
        ["export", RUN[:6], str(tmp_path / "out"), "--format", "inspect", "-w", str(tmp_path)],
        catch_exceptions=False,
    )
    assert done.output.startswith(f"40 episodes of 2 evaluations of run {RUN} in {tmp_path / 'out'}:\n")
    before, now = logs(tmp_path / "out")
    assert [log["results"]["scores"][0]["metrics"]["mean"]["value"] for log in (before, now)] == [0.15, 0.45]
    assert (before["eval"]["model"], now["eval"]["model"]) == ("m0", "m1")
    assert now["eval"]["task"] == "toy-agent-r-test"
    ids = {row[0] for row in ctx.store.rows("select trajectory_id from v_trajectories where iteration = 1")}
    assert {sample["metadata"]["trajectory_id"] for sample in now["samples"]} == ids
    assert [turn["content"] for turn in now["samples"][0]["messages"]] == ["Go there.", "Ok.", "Start.", "go", "there"]
    assert "read_eval_log" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="out already exists; name a new folder"):
        export_logs(tmp_path, RUN, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot be written"):
        export_logs(tmp_path, RUN, tmp_path / "file" / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
async def test_what_a_scoring_says_of_an_episode_is_a_score_beside_the_others(tmp_path: Path) -> None:
    ctx = finished_run(tmp_path)
    scoring = Scoring(name="regex", settings={}, grader=Pattern("there", where="observation"))
    await regrade(ctx, scoring, iteration=1)
    export_logs(tmp_path, RUN, tmp_path / "out")
    before, now = logs(tmp_path / "out")
    name = f"regex-{scoring.id[:8]}"
    assert [score["name"] for score in before["results"]["scores"]] == ["success", "reward"]
    means = {score["name"]: score["metrics"]["mean"]["value"] for score in now["results"]["scores"]}
    assert means == {"success": 0.45, "reward": 0.45, f"{name}-reward": 1.0, f"{name}-success": 1.0}
    assert {sample["scores"][f"{name}-reward"]["value"] for sample in now["samples"]} == {1.0}


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(("count_as", "n", "mean"), [("out", 20, 0.45), ("zero", 21, 9 / 21)])
def test_an_episode_that_failed_for_good_is_an_error(tmp_path: Path, count_as: str, n: int, mean: float) -> None:
    ctx = finish(tmp_path, RUN, [set(), set(range(9))], errors={"count_as": count_as})
    key = evaluation_id(ctx, 1, TEST)
    rejection = Rejection(stage="evaluate", reason="no-reward", subject=f"{key}:toy/test/20#0", detail="OSError: gone")
    rows = {"instance": [instance_row(Instance(environment="toy", split="test", index=20))]}
    ctx.store.write(merge([rows, rejection_rows([rejection], iteration_id=ctx.iteration_id(1))]))
    ctx.store.write(measure_rows(key, measure(counted_episodes(ctx, key))))
    message = export_logs(tmp_path, key, tmp_path / "out")
    (log,) = logs(tmp_path / "out")
    assert log["samples"][-1]["error"]["message"] == "OSError: gone"
    assert ("scores" in log["samples"][-1]) == (count_as == "zero")
    score = log["results"]["scores"][0]
    assert (score["scored_samples"], score["metrics"]["mean"]["value"]) == (n, pytest.approx(mean))
    values = [sample["scores"]["success"]["value"] for sample in log["samples"] if "scores" in sample]
    assert fmean(values) == pytest.approx(mean)
    assert "1 episode failed for good" in message


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_beginning_of_a_revision_test_is_a_sample_of_its_own_and_a_disaster_counts_as_in_the_report(
    tmp_path: Path,
) -> None:
    ctx = finished_run(tmp_path, evaluation={"disaster_counts": -1.0})
    key = "eeee000000000001"
    fell = replace(after("on", played(0, success=False)), stop=StopReason.DISASTER)
    head = evaluation_rows(
        key,
        iteration_id=ctx.iteration_id(1),
        checkpoint_id=f"{RUN}-c1",
        name="revision_test",
        split="test",
        config={},
        finished=True,
    )
    cases = (("a", after("on", played(0, success=True)), 0), ("b", fell, 1))
    rows = [
        episode_rows(name, trajectory, evaluation_id=key, iteration_id=ctx.iteration_id(1), cut=1, repeat=repeat)
        for name, trajectory, repeat in cases
    ]
    ctx.store.write(merge([head, *rows]))
    export_logs(tmp_path, key[:5], tmp_path / "out")
    (log,) = logs(tmp_path / "out")
    assert [(sample["id"], sample["epoch"]) for sample in log["samples"]] == [("toy/test/0@1", 1), ("toy/test/0@1", 2)]
    assert [sample["scores"]["reward"]["value"] for sample in log["samples"]] == [1.0, -1.0]


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_what_is_not_finished_is_named_or_refused(tmp_path: Path) -> None:
    ctx = finished_run(tmp_path)
    open_ = evaluation_rows(
        "eeee", iteration_id=ctx.iteration_id(1), checkpoint_id=f"{RUN}-c1", name="other", split="test", config={}
    )
    ctx.store.write(open_)
    message = export_logs(tmp_path, RUN, tmp_path / "out", iteration=1)
    assert message.endswith("left out, since it is not finished: other of iteration 1")
    with pytest.raises(ConfigError, match="has no finished evaluation; finished are iterations: none yet"):
        export_logs(tmp_path, "eeee", tmp_path / "none")
    with pytest.raises(ConfigError, match="has no finished evaluation of iteration 7; finished are iterations: 0, 1"):
        export_logs(tmp_path, RUN, tmp_path / "none", iteration=7)
    with pytest.raises(ConfigError, match=r"'f00' begins the id of no run in .* that has an evaluation"):
        export_logs(tmp_path, "f00", tmp_path / "none")
    words = ["export", RUN, str(tmp_path / "none"), "--format", "inspect", "--without-mask"]
    result = CliRunner().invoke(cli, [*words, "-w", str(tmp_path)])
    assert (result.exit_code, "--without-mask belongs to training sets" in result.output) == (2, True)
    assert not (tmp_path / "none").exists()
