"""Worlds on a server of OpenEnv's wire: the same transcripts, whatever breaks, and by name what
cannot be trained on.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from asgi import running
from openenv_server import Guessing
from servers import free_port

from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.environments.native import NOT_MADE_RESULT
from agentr_core.environments.openenv.client import OpenEnv
from agentr_core.episodes.rollout import act, restore_state
from agentr_core.episodes.transcript import read_results
from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentUnavailable,
    IllTypedAnswer,
    ReplayDiverged,
)
from agentr_core.types import Instance
from flows.commands.environments import diagnose

ACTIONS = ["9", "0", "what", "5", "7"]


@contextmanager
def serve(**settings: Any) -> Iterator[tuple[Guessing, str]]:
    guessing = Guessing(**settings)
    with running(guessing.app, sockets=True) as url:
        yield guessing, url


def client(url: str, **options: Any) -> OpenEnv:
    plain: dict[str, Any] = {"train": "0-8", "test": "9-12", "success": "reward >= 1", "patience_s": 60}
    return OpenEnv(url=url, **(plain | options))


def game(index: int = 1) -> Instance:
    return Instance(environment="openenv", split="train" if index < 9 else "test", index=index)


def transcript(env: OpenEnv, actions: list[str], index: int = 1) -> list[Any]:
    return [env.reset(game(index)), *(tuple(env.step(action)) for action in actions)]


RIGHT = [
    "Game 1: guess a number from 0 to 9.",
    ("Lower.", 0.0, False, False, {"success": False}),
    ("Higher.", 0.0, False, False, {"success": False}),
    ("Say a number.", 0.0, False, False, {"success": False}),
    ("Higher.", 0.0, False, False, {"success": False}),
    ("Right.", 1.0, True, False, {"success": True}),
]


def test_an_episode_is_one_connection_which_ends_with_it() -> None:
    with serve() as (guessing, url):
        env = client(url)
        assert transcript(env, ACTIONS) == RIGHT
        with pytest.raises(EnvironmentFault, match="a step after the end"):
            env.step("7")
        assert transcript(env, ACTIONS) == RIGHT
        assert [messages[0] for messages in guessing.seen] == [{"type": "reset", "data": {"seed": 1}}] * 2
        assert [message["data"] for message in guessing.seen[0][1:]] == [{"guess": action} for action in ACTIONS]
        env.close()


def test_an_episode_stops_at_the_step_limit() -> None:
    with serve() as (guessing, url):
        env = client(url, step_limit=2)
        assert transcript(env, ["9", "9"])[-1] == ("Lower.", 0.0, False, True, {"success": False})
        with pytest.raises(EnvironmentFault, match="a step after the end"):
            env.step("9")
        assert guessing.count("step") == 2


FAULTS = {
    "a connection that breaks": "drop",
    "a step that was done and not told": "lose",
    "garbage": "<html>",
    "another shape": {"type": "observation", "data": []},
    "no observation": {"type": "observation", "data": {"observation": "x", "reward": 1.0, "done": True}},
    "an exception": {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}},
    "a state": {"type": "state", "data": {"reward": 1.0}},
}


@pytest.mark.parametrize("at", [("step", 0), ("step", 3), ("reset", 0)])
@pytest.mark.parametrize("what", FAULTS)
def test_an_episode_goes_on_after_a_fault(what: str, at: tuple[str, int]) -> None:
    with serve(faults={at: FAULTS[what]}) as (guessing, url):
        env = client(url)
        assert transcript(env, ACTIONS) == RIGHT
        # Nothing is sent twice on one connection, and the fresh one repeats what was done.
        first, second = ([message.get("data") for message in messages] for messages in guessing.seen)
        assert second[: len(first)] == first
        assert [step and step["guess"] for step in second[1:]] == ACTIONS
        env.close()


def test_an_answer_that_comes_late_is_not_taken_for_the_next() -> None:
    with serve(faults={("step", 1): "hang"}) as (guessing, url):
        env = client(url, timeout_s=0.2)
        assert transcript(env, ACTIONS) == RIGHT
        assert len(guessing.seen) == 2


def test_a_fault_that_stays_is_told_and_no_reward() -> None:
    boom = FAULTS["an exception"]
    with serve(faults={("step", number): boom for number in range(9)}) as (_, url):
        env = client(url)
        env.reset(game())
        with pytest.raises(EnvironmentRefusal, match="EXECUTION_ERROR: boom; if it means a bad action, set bad_action"):
            env.step("9")
    with pytest.raises(EnvironmentUnavailable, match=r"cannot be reached .* start the server, or correct its address"):
        client(url, patience_s=0.1).reset(game())


def test_a_server_that_resets_the_handshake_is_absent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, over = listener.getsockname()[1], threading.Event()

        def hang_up() -> None:
            listener.settimeout(0.1)
            while not over.is_set():
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            for _ in range(5):
                with pytest.raises(EnvironmentUnavailable, match="cannot be reached"):
                    client(f"http://127.0.0.1:{port}", patience_s=0, retries=0).reset(game())
        finally:
            over.set()
            thread.join()


def test_too_large_an_answer_is_told_once() -> None:
    with serve(faults={("step", 0): "x" * 2**21}) as (guessing, url):
        env = client(url, answer_mib=1)
        env.reset(game())
        with pytest.raises(IllTypedAnswer, match=r"more than 1 MiB; raise environment\.options\.answer_mib"):
            env.step("9")
        assert len(guessing.seen) == 1


def test_a_full_server_is_waited_for() -> None:
    with serve(places=1) as (guessing, url):
        env, second_env = client(url), client(url)
        env.reset(game())
        timer = threading.Timer(0.3, env.close)
        timer.start()
        assert transcript(second_env, ACTIONS) == RIGHT
        timer.join()
        third_env, full = client(url), client(url, patience_s=0.1)
        third_env.reset(game())
        with pytest.raises(EnvironmentUnavailable, match=r"no place free \(Server at capacity\); lower scale\.concurr"):
            full.reset(game())
        third_env.close()
        assert guessing.count("reset") == 3


def test_another_world_after_a_restart_is_no_episode() -> None:
    guessing, port = Guessing(), free_port()
    env = client(f"http://127.0.0.1:{port}")
    with running(guessing.app, sockets=True, port=port):
        env.reset(game())
        env.step("6")
    with running(Guessing(restless=True, resets=-1).app, sockets=True, port=port), pytest.raises(ReplayDiverged):
        env.step("7")


def test_a_restart_is_waited_for_and_the_episode_restored() -> None:
    port = free_port()
    env = client(f"http://127.0.0.1:{port}")
    with running(Guessing().app, sockets=True, port=port):
        entries = [env.reset(game()), *(tuple(env.step(action)) for action in ACTIONS[:2])]

    def later() -> None:
        time.sleep(0.5)
        with running(Guessing().app, sockets=True, port=port):
            done.wait(60)

    done, thread = threading.Event(), threading.Thread(target=later)
    thread.start()
    try:
        assert [*entries, *(tuple(env.step(action)) for action in ACTIONS[2:])] == RIGHT
    finally:
        done.set()
        thread.join()


def test_what_a_bad_action_is_an_option_says() -> None:
    with serve(raises=True) as (_, url):
        env = client(url, bad_action="refused")
        entries = transcript(env, ACTIONS)
        assert entries[3] == ("EXECUTION_ERROR: what is not a valid guess", 0.0, False, False, REFUSED)
        assert entries[-1] == RIGHT[-1]
        env = client(url, action="metadata", bad_action="refused")
        entries = transcript(env, ["no object", '{"a": 1}'])
        assert all(
            step[4] == REFUSED and "VALIDATION_ERROR: Invalid message; guess:" in step[0] for step in entries[1:]
        )


REFUSED = {"success": False, "valid": False}


def test_rewards_are_summed_or_the_last_one_counts() -> None:
    with serve(standing=True) as (_, url):
        assert [step[1] for step in transcript(client(url, rewards="last"), ["0", "6", "8", "7"])[1:]] == [
            0,
            0.5,
            0.5,
            1,
        ]
        env = client(url, reward_high=2, success="reward > 1")
        assert [step[1:] for step in transcript(env, ["6", "7"])[1:]] == [
            (0.25, False, False, {"success": False}),
            (0.75, True, False, {"success": True}),
        ]
        env = client(url)
        env.reset(game())
        env.step("6")
        with pytest.raises(IllTypedAnswer, match=r"is 1\.5 by now, .* rewards: last, if each step repeats the reward"):
            env.step("7")


def test_a_success_is_what_the_recipe_says() -> None:
    with serve() as (_, url):
        assert transcript(client(url, success="metadata.won"), ACTIONS) == RIGHT
        env = client(url, success="metadata.one")
        env.reset(game())
        with pytest.raises(IllTypedAnswer, match=r"ended with no such field at metadata\.one, .* has metadata, prompt"):
            env.step("7")
        assert transcript(client(url, observation="{prompt}|{legal.-1}|{legal.5}"), [])[0] == f"{RIGHT[0]}|9|"
        with pytest.raises(IllTypedAnswer, match="has metadata, prompt, legal, and none of question"):
            client(url, observation="{question}").reset(game())


def test_splits_are_those_of_the_task_api() -> None:
    with serve(tasks={"practice": 5, "held-out": 3}) as (guessing, url):
        env = client(url, train="", test="")
        assert {split: len(env.instances(split)) for split in env.splits()} == {"train": 5, "test": 3}
        assert env.reset(env.instances("test")[2]) == "Game 1002: guess a number from 0 to 9."
        assert guessing.seen[-1][0]["data"] == {"split": "held-out", "index": 2}
        assert not env.flaws()
        env.close()
        assert len(client(url, train="practice", test="1-2").instances("test")) == 2
        for options, message in (
            ({"train": "attic"}, "has the splits practice, held-out, and none for option train"),
            ({"train": "held-out", "test": "held-out"}, "instance 0 is in both train and test"),
            ({"test": "1-3"}, "option test has the number 3, and split held-out of the server has 3"),
        ):
            with pytest.raises((EnvironmentServerError, ConfigError), match=message):
                client(url, **({"train": "", "test": ""} | options)).splits()
    with (
        serve() as (_, url),
        pytest.raises(EnvironmentServerError, match=r'lists no splits, so say .* train: "0-799"'),
    ):
        client(url, train="").splits()


def test_a_template_says_what_a_reset_is_sent() -> None:
    with serve() as (guessing, url):
        arguments = {"seed": "{index}", "name": "{split}-{index}", "deep": [{"n": "{index}"}], "size": 1}
        env = client(url, reset_arguments=arguments)
        env.reset(game(4))
        assert guessing.seen[0][0]["data"] == {"seed": 4, "name": "train-4", "deep": [{"n": 4}], "size": 1}
        env.close()


@pytest.mark.parametrize(
    ("settings", "options", "rule", "said"),
    [
        ({"heeds": False}, {}, "arguments", "the reset argument seed has no effect at .* cannot be kept apart"),
        ({}, {"reset_arguments": {}}, "arguments", "a reset is sent no number at"),
        ({"restless": True}, {}, "repeats", "began twice at .* with another text.* set repeatability: never"),
        ({"restless": True, "heeds": False}, {}, "repeats", "the second time with the state secret"),
        ({"tools": True}, {}, "actions", r"takes calls of tools: set environment\.transcript: native"),
    ],
)
def test_what_cannot_be_trained_on_is_named(
    settings: dict[str, Any], options: dict[str, Any], rule: str, said: str
) -> None:
    with serve(**settings) as (guessing, url):
        env = client(url, **options)
        ((flaw, sentence),) = env.flaws()
        assert flaw == rule
        with pytest.raises(EnvironmentServerError, match=said):
            env.reach()
        env.close()
        assert sentence in {violation.detail for violation in check(lambda: client(url, **options))}
        deadline = time.monotonic() + 60
        while guessing.open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not guessing.open


def test_a_sound_server_keeps_the_contract_and_promises_take_it_at_its_word() -> None:
    with serve() as (_, url):
        assert check(lambda: client(url)) == ()
        client(url).reach()
    with serve(heeds=False) as (_, url):
        assert not client(url, instances_differ=True).flaws()
    with serve(restless=True) as (_, url):
        assert not client(url, instances_differ=True, repeatability="never").flaws()
    with pytest.raises(EnvironmentServerError, match=r"cannot be reached.*`agentr env serve textcraft --protocol open"):
        client(url, patience_s=0.1).reach()


def test_the_doctor_says_it_of_a_server_at_hand() -> None:
    options = {"train": "0-8", "test": "9-12", "success": "reward >= 1"}
    with serve(heeds=False) as (_, url):
        (diagnosis,) = diagnose("openenv", options | {"url": url})
        assert diagnosis["status"] == "broken"
        assert "arguments: openenv: the reset argument seed has no effect" in diagnosis["detail"]
    with serve(raises=True) as (_, url):
        (diagnosis,) = diagnose("openenv", options | {"url": url})
        assert "EXECUTION_ERROR: florble the quux is not a valid guess; if it means a bad" in diagnosis["detail"]
        (diagnosis,) = diagnose("openenv", options | {"url": url, "bad_action": "refused"})
        assert diagnosis["ok"]
    with serve(places=1) as (_, url):
        (diagnosis,) = diagnose("openenv", options | {"url": url, "patience_s": 0.2})
        assert "has no place free" in diagnosis["detail"]


def test_tools_are_native_calls() -> None:
    with serve(tools=True) as (guessing, url):
        options = {"url": url, "train": "0-8", "test": "9", "success": "reward >= 1"}
        env = registry.make("openenv", options, transcript="native")
        assert env.transcript is not None
        (tool,) = env.transcript.tools  # type: ignore[attr-defined]
        assert tool.definition["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
        env.reset(game())
        replies = ["I wait.", "<tool_call>[]</tool_call>", call("guess", "{}"), call("ask", "{}")]
        results = [act(env, reply).step for reply in [*replies, call("guess", '{"number": 7}')]]
        assert [step.valid for step in results] == [False, False, False, False, None]
        assert results[2].observation == "number is missing"
        assert "there is no such tool; there are guess" in results[3].observation
        assert (results[4].observation, results[4].reward, results[4].success) == ("Right.", 1.0, True)
        steps = [message["data"] for message in guessing.seen[-1] if message["type"] == "step"]
        assert steps[-1] == {"type": "call_tool", "tool_name": "guess", "arguments": {"number": 7}}
    with serve() as (guessing, url):
        env = registry.make("openenv", options | {"url": url}, transcript="native")
        env.reset(game())
        assert act(env, call("act", '{"guess": "7"}')).step.success


def test_the_calls_of_a_reply_are_sent_one_after_the_other() -> None:
    with serve(tools=True) as (guessing, url):
        options = {"url": url, "train": "0-8", "test": "9", "success": "reward >= 1"}
        env = registry.make("openenv", options, transcript="native")
        env.reset(game())
        low, right = call("guess", '{"number": 3}'), call("guess", '{"number": 7}')
        step = act(env, low + call("ask", "{}") + right + low).step
        results = read_results(step.observation, 4) or ()
        assert "there is no such tool; there are guess" in results[1]
        assert results[2:] == ("Right.", NOT_MADE_RESULT)
        assert (step.valid, step.reward, step.success, step.terminated) == (False, 1.0, True, True)
        requests = [message["data"] for messages in guessing.seen for message in messages if message["type"] == "step"]
        arguments = [message["arguments"] for message in requests if message["type"] == "call_tool"]
        assert arguments == [{"number": 3}, {"number": 7}]
        env.reset(game())
        first_step = act(env, low + low).step
        fresh_env = registry.make("openenv", options, transcript="native")
        restore_state(fresh_env, game(), [first_step])
        assert act(fresh_env, right).step.success


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"success": ""}, "needs the option success, since OpenEnv has none"),
        ({"url": ""}, "set the option url, or the variable AGENTR_OPENENV; `agentr env serve"),
        ({"url": "nowhere"}, "'nowhere' is not an address"),
        ({"reward_low": 1}, "reward_low 1 is not below reward_high 1"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OpenEnv(**({"url": "http://127.0.0.1:9", "success": "reward > 0"} | options))


def test_an_address_of_something_else_is_told() -> None:
    with serve() as (_, url):
        with pytest.raises(EnvironmentServerError, match=r"answered 40.: this is no OpenEnv server"):
            client(f"{url}/elsewhere").reset(game())
        with pytest.raises(EnvironmentServerError, match="has the fields guess, metadata, and no word"):
            client(url, action="word").parse("Action: 1")
