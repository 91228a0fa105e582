"""A model plays before the eyes of a person: each step in lines of the terminal's width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgi import running
from chat_server import chat_app
from click.testing import CliRunner

from agentr_core.environment import Environment, Instances
from agentr_core.environments import registry
from agentr_core.environments.native import ACT_TOOL, native_class
from agentr_core.episodes.transcript import call_reply
from agentr_core.errors import ConfigError, EndpointError, EnvironmentFault, ModelDirectoryError
from agentr_core.models.scripted import ScriptedModel
from agentr_core.recipes.models import ModelConfig
from agentr_core.types import Transition
from flows.cli import cli
from flows.commands import playing
from flows.commands.playing import Player, play_and_show

LONG = "word " * 40


class Hall(Environment):
    """Say `go` until the third step; `fall` is an error of the world's own code."""

    name = "hall"
    instruction = "Say go."
    step_limit = 4

    def splits(self) -> tuple[str, ...]:
        return ("train", "test")

    def instances(self, split: str) -> Instances:
        return Instances(self.name, split, range(3))

    def reset(self, instance: Any) -> str:
        self.count = 0
        return f"Goal: get out of hall {instance.index}.\n" + "\n".join(f"door {number}" for number in range(30))

    def step(self, action: str) -> Transition:
        if action == "fall":
            raise KeyError("floor")
        self.count += 1
        is_success = self.count == 3
        return Transition(
            f"\x1b[2J{LONG}", float(is_success), is_success, False, {"success": is_success, "valid": action == "go"}
        )


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Watch a model that says the given texts in turn, and return the lines."""
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "hall", Hall)

    def run(*texts: str, width: int = 80, kind: type[Environment] = Hall, **how: Any) -> list[str]:
        monkeypatch.setitem(registry._FACTORY_BY_NAME, "hall", kind)

        def reply(messages: Any, seed: int, number: int) -> str:
            replies = sum(message.role == "assistant" for message in messages) - 1
            return str(texts[min(replies, len(texts) - 1)].format(seed=seed))

        model = ScriptedModel(reply, name="m")
        monkeypatch.setattr(playing, "named_model", lambda *_, **__: (model, ModelConfig()))
        output: list[str] = []
        play_and_show("hall", {}, "test", 1, Player(name="m", **how), width=width, write=output.append)
        return "\n".join(output).splitlines()

    return run


def test_each_step_has_thought_action_observation_and_reward(play: Callable[..., list[str]]) -> None:
    lines = play("Thought: I see.\nAction: go", "Thought: On.\nNext action: stay", "Action: go")
    assert lines[0] == "hall/test/1, played by m, greedy"
    assert lines[2:5] == [
        "  goal         get out of hall 1.",
        "  observation  Goal: get out of hall 1.",
        "               door 0",
    ]
    assert "               ... 15 more lines" in lines
    first, second, third = (lines.index(f"step {number}") for number in (1, 2, 3))
    assert lines[first + 1 : first + 3] == ["  thought      I see.", "  action       go"]
    assert lines[first + 3].startswith("  observation  \\u001b[2Jword word")
    assert lines[second - 2] == "  reward       0"
    assert lines[second + 1 : second + 3] == ["  thought      On.", "  action       stay (refused)"]
    assert lines[third + 1] == "  action       go", "a reply that is nothing but its action has no thought"
    assert lines[-3] == "  reward       1"
    assert lines[-1].startswith("success after 3 steps: reward 1; ")
    assert " tokens in " in lines[-1]


def test_each_call_of_a_reply_is_shown_with_its_result(play: Callable[..., list[str]]) -> None:
    reply = f"So.\n{call_reply(ACT_TOOL, 'go')}{call_reply(ACT_TOOL, 'stay')}"
    lines = play(reply.replace("{", "{{").replace("}", "}}"), kind=native_class(Hall), max_steps=1)
    at = lines.index("step 1")
    assert lines[at + 1 : at + 4] == ["  thought      So.", "  action       go", "  action       stay (refused)"]
    assert sum(line.startswith("  observation  \\u001b[2Jword") for line in lines[at:]) == 2
    assert not any("tool_call" in line or "calls:" in line for line in lines)


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_longer_than_the_terminal_is_wide(play: Callable[..., list[str]], width: int) -> None:
    lines = play(f"Thought: {LONG}\nAction: go", width=width)
    assert max(map(len, lines)) <= width


def test_a_reply_without_an_action_and_one_that_was_cut_are_told(play: Callable[..., list[str]]) -> None:
    lines = play("I do not know what to do here.", max_new_tokens=5, max_steps=2)
    at = lines.index("step 1")
    assert lines[at + 1 : at + 3] == [
        "  thought      I do not know what",
        "  action       none (refused) (cut at its token limit)",
    ]
    assert lines[-1].startswith("no success (step limit) after 2 steps: reward 0; 10 tokens in ")


def test_a_seed_draws_other_replies_and_the_same_ones_again(play: Callable[..., list[str]]) -> None:
    lines_by_seed = {seed: play("{seed}", seed=seed, temperature=1.0)[:-1] for seed in (0, 1)}
    assert lines_by_seed[0][0].endswith("temperature 1, seed 0")
    assert lines_by_seed[0][3:] != lines_by_seed[1][3:]
    assert play("{seed}", seed=1, temperature=1.0)[:-1] == lines_by_seed[1]


def test_a_fault_of_the_world_is_one_sentence(play: Callable[..., list[str]]) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"environment hall broke \(KeyError: 'floor', test_playing.py line \d+\); correct"
    ):
        play("Action: fall")


def test_a_world_that_agents_outside_play_has_no_model(play: Callable[..., list[str]]) -> None:
    class Outside(Hall):
        def relay(self, generation: Any) -> None:
            """Take note."""

    with pytest.raises(ConfigError, match="hall is played by agents outside"):
        play("go", kind=Outside)


@pytest.mark.usefixtures("play")
@pytest.mark.slow
def test_a_model_is_a_directory_a_shipped_one_or_one_on_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def ask(*words: str) -> str:
        return CliRunner().invoke(cli, ["env", "play", "hall", *words], catch_exceptions=False).output

    model_names = "reasoning-tiny, textcraft-tiny, webshop-tiny"
    with pytest.raises(
        ModelDirectoryError, match=f"m is no model directory, and none of the shipped models .{model_names}.; for"
    ):
        ask("--model", "m")
    model = ScriptedModel(lambda messages, seed, number: "Action: go", name="m", context_length=9_999)
    with running(chat_app(model, max_batch=2)) as url:
        output = ask("--model", "m", "--server", f"{url}/v1")
        assert "success after 3 steps: reward 1; 6 tokens in " in output
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        assert ask("--model", "m").splitlines()[:-1] == output.splitlines()[:-1]
        with pytest.raises(EndpointError, match="has no model 'n'; it has m"):
            ask("--model", "n")
    result = CliRunner().invoke(cli, ["env", "play", "hall", "--seed", "3"])
    assert (result.exit_code, "--seed belongs to --model" in result.output) == (2, True)
