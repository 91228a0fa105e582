"""Replies on a real gateway that an agent gets, does not get, or asks for twice: only what it got
is a step.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from asgi import running
from outside import HELLO, Agent, asked, played, said, sent

from agentr_core.environments.gateway.server import TrackedResponse, app
from agentr_core.episodes.transcript import conversations
from agentr_core.errors import EnvironmentUnavailable
from agentr_core.http_server import LOST_CALLBACK_KEY
from agentr_core.types import StopReason

LEFT = asked("You did not answer in time.")


@pytest.fixture
def url() -> Iterator[str]:
    with running(app()) as address:
        yield address


class Draws:
    """Numbered replies. Number `late` waits until it may go on."""

    def __init__(self, late: int = -1) -> None:
        self.number = 0
        self.late = late
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self, *_: Any) -> str:
        number, self.number = self.number, self.number + 1
        if number == self.late:
            self.begun.set()
            assert self.go.wait(60)
        return f"draw {number}"


def request(agent: Agent, *messages: Any, **more: Any) -> bytes:
    """Return a chat completion as it goes over the wire."""
    where = urlsplit(agent.told["base_url"])
    body = json.dumps({"model": "policy", "messages": messages, **more})
    head = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


@contextmanager
def connection(agent: Agent, *messages: Any, **more: Any) -> Iterator[socket.socket]:
    """Lend a connection over which a call was sent; it is closed in the end, whatever was read."""
    where = urlsplit(agent.told["base_url"])
    with socket.create_connection((where.hostname, where.port), timeout=60) as door:
        door.sendall(request(agent, *messages, **more))
        yield door


def dropped_while_pending(draws: Draws, agent: Agent, *messages: Any) -> None:
    with connection(agent, *messages):
        assert draws.begun.wait(60)
    # The gateway reads on: what comes now comes after the end of that connection.
    agent.client.models.list()
    draws.go.set()


def dropped_unread(draws: Draws, agent: Agent, *messages: Any) -> None:
    draws.go.set()
    with connection(agent, *messages) as door:
        door.recv(1, socket.MSG_PEEK)


def dropped_in_a_stream(draws: Draws, agent: Agent, *messages: Any) -> None:
    draws.go.set()
    with connection(agent, *messages, stream=True) as door:
        door.recv(20)


WAYS = [dropped_while_pending, dropped_unread, dropped_in_a_stream]
Drop = Callable[..., None]


@pytest.mark.parametrize("drop", WAYS)
async def test_the_same_call_after_a_lost_reply_is_the_same_call(url: str, drop: Drop) -> None:
    """Nothing marks it: some clients count their retries, some do not."""
    draws = Draws(late=0)

    def play(agent: Agent) -> Any:
        drop(draws, agent, HELLO)
        first, second = agent.ask(HELLO), agent.ask(HELLO)
        agent.end(reward=1)
        return first, second

    trajectory, (first, second), _ = await played(url, play, reply=draws)
    assert (first.choices[0].message.content, second.choices[0].message.content) == ("draw 0", "draw 1")
    assert first.id != second.id
    assert [step.reply for step in trajectory.steps] == ["draw 0", "draw 1"]


async def test_an_answer_that_is_lost_before_it_is_settled_is_lost_once() -> None:
    """It was counted as lost twice, so that a second client of the call had not got it either."""
    notes: list[Any] = []

    async def answer(scope: Any, receive: Any, send: Any) -> bool:
        asyncio.get_running_loop().call_soon(scope[LOST_CALLBACK_KEY])
        return True

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        notes.append(message)

    scope: dict[str, Any] = {}
    await TrackedResponse(answer, notes.append, lambda: notes.append("lost"))(scope, receive, send)
    assert notes == [False]
    notes.clear()

    async def whole(scope: Any, receive: Any, send: Any) -> bool:
        return True

    await TrackedResponse(whole, notes.append, lambda: notes.append("lost"))(scope, receive, send)
    scope[LOST_CALLBACK_KEY]()
    assert notes == [True, "lost"]


@pytest.mark.parametrize("drop", WAYS)
async def test_another_call_after_a_lost_reply_takes_its_place(url: str, drop: Drop) -> None:
    draws = Draws(late=1)

    def play(agent: Agent) -> list[str]:
        history = [HELLO, said(agent.says(HELLO)), asked("On.")]
        drop(draws, agent, *history)
        history += [LEFT, said(agent.says(*history, LEFT)), asked("And on.")]
        replies = [history[1]["content"], history[-2]["content"], agent.says(*history)]
        agent.end(reward=0.5)
        return replies

    trajectory, replies, env = await played(url, play, reply=draws)
    assert replies == ["draw 0", "draw 2", "draw 3"]
    assert [step.reply for step in trajectory.steps] == replies
    ((_, messages, _),) = conversations(env, trajectory)
    texts = ["Hello.", "draw 0", "On.", LEFT["content"], "draw 2", "And on.", "draw 3"]
    assert [message.text for message in messages] == texts


@pytest.mark.parametrize("drop", WAYS)
async def test_a_first_reply_that_is_lost_is_no_step_either(url: str, drop: Drop) -> None:
    draws = Draws(late=0)

    def play(agent: Agent) -> None:
        drop(draws, agent, HELLO)
        agent.says(LEFT)
        agent.end(reward=1)

    trajectory, _, _ = await played(url, play, reply=draws)
    assert (trajectory.first_observation, [step.reply for step in trajectory.steps]) == (LEFT["content"], ["draw 1"])


@pytest.mark.parametrize("drop", WAYS)
async def test_a_reward_is_for_the_replies_that_arrived(url: str, drop: Drop) -> None:
    draws = Draws(late=1)

    def play(agent: Agent) -> None:
        agent.says(HELLO)
        drop(draws, agent, HELLO, said("draw 0"), asked("On."))
        agent.end(reward=1)

    trajectory, _, _ = await played(url, play, reply=draws)
    assert [(step.reply, step.observation, step.reward, step.terminated) for step in trajectory.steps] == [
        ("draw 0", "", 1.0, True)
    ]
    assert (trajectory.reward, trajectory.success, trajectory.stop) == (1.0, True, StopReason.SUCCESS)


@pytest.mark.parametrize("drop", WAYS)
async def test_an_episode_without_an_answered_call_is_played_anew(url: str, drop: Drop) -> None:
    draws = Draws(late=0)

    def play(agent: Agent) -> None:
        drop(draws, agent, HELLO)
        agent.end(reward=1)

    with pytest.raises(
        EnvironmentUnavailable, match="a reply was not delivered, and the agent went on without a reply"
    ):
        await played(url, play, reply=draws)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_loses_patience_gets_the_reply_in_its_next_try(url: str, stream: bool) -> None:
    draws = Draws(late=0)

    def play(agent: Agent) -> Any:
        agent.client = agent.client.with_options(timeout=0.2, max_retries=1)
        with pytest.raises(openai.APITimeoutError):
            agent.ask(HELLO, stream=stream)
        draws.go.set()
        patient = agent.client.with_options(timeout=60)
        with patient.chat.completions.stream(
            model="policy", messages=[{"role": "user", "content": "Hello."}]
        ) as events:
            text = events.get_final_completion().choices[0].message.content
        agent.end(reward=1)
        return text

    trajectory, text, _ = await played(url, play, reply=draws)
    assert (text, [step.reply for step in trajectory.steps], draws.number) == ("draw 0", ["draw 0"], 1)


async def test_equal_calls_at_once_are_one_call(url: str) -> None:
    draws = Draws(late=0)

    def play(agent: Agent) -> Any:
        with ThreadPoolExecutor(4) as pool:
            first_call = pool.submit(agent.ask, HELLO)
            assert draws.begun.wait(60)
            repeats = [pool.submit(agent.ask, HELLO, stream=number == 1) for number in range(3)]
            while [call.running() for call in repeats] != [True] * 3:
                pass
            # It waits for its turn, as does the other thread's.
            agent.client.models.list()
            draws.go.set()
            stream = list(repeats[1].result())
            wholes = [call.result() for call in (first_call, repeats[0], repeats[2])]
        agent.end(reward=1)
        return {whole.id for whole in wholes} | {event.id for event in stream}, wholes

    trajectory, (ids, wholes), _ = await played(url, play, reply=draws)
    assert len(ids) == 1
    assert [whole.choices[0].message.content for whole in wholes] == ["draw 0"] * 3
    assert [step.reply for step in trajectory.steps] == ["draw 0"]


async def test_a_call_nobody_waits_for_any_more_is_not_asked(url: str) -> None:
    draws = Draws(late=0)

    def play(agent: Agent) -> None:
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(agent.says, HELLO)
            assert draws.begun.wait(60)
            with connection(agent, asked("Something else.")):
                agent.client.models.list()
            agent.client.models.list()
            draws.go.set()
            call.result()
        agent.end(reward=1)

    trajectory, _, _ = await played(url, play, reply=draws)
    assert ([step.reply for step in trajectory.steps], draws.number) == (["draw 0"], 1)


async def test_a_reward_voids_what_is_pending_and_its_caller_is_told(url: str) -> None:
    draws = Draws(late=1)

    def play(agent: Agent) -> list[str]:
        agent.says(HELLO)
        reasons = []
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(agent.says, HELLO, said("draw 0"), asked("On."))]
            assert draws.begun.wait(60)
            calls.append(pool.submit(agent.says, asked("Another thread.")))
            while not calls[1].running():
                pass
            agent.client.models.list()
            assert agent.end(reward=0.5).status_code == 200
            for call in calls:
                with pytest.raises(openai.APIStatusError) as error:
                    call.result()
                reasons.append(error.value.message)
            draws.go.set()
        return reasons

    trajectory, reasons, _ = await played(url, play, reply=draws)
    assert all("is over: its reward was reported" in reason for reason in reasons)
    assert ([step.reply for step in trajectory.steps], trajectory.reward, draws.number) == (["draw 0"], 0.5, 2)


async def test_a_reply_that_comes_back_did_arrive_whatever_became_of_its_connection(url: str) -> None:
    draws = Draws()

    def play(agent: Agent) -> None:
        with connection(agent, HELLO) as door:
            # All of it was seen, and none of it was taken off the connection.
            while b"draw 0" not in door.recv(2**16, socket.MSG_PEEK):
                pass
        agent.says(HELLO, said("draw 0"), asked("On."))
        agent.end(reward=1)

    trajectory, _, _ = await played(url, play, reply=draws)
    assert [step.reply for step in trajectory.steps] == ["draw 0", "draw 1"]


async def test_a_reward_whose_answer_was_lost_may_be_reported_again(url: str) -> None:
    def play(agent: Agent) -> list[int]:
        agent.says(HELLO)
        address = urlsplit(url)
        body = b'{"reward": 1}'
        path = f"/episodes/{agent.told['episode']}/reward"
        with socket.create_connection((address.hostname, address.port), timeout=60) as door:
            head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
            door.sendall(head.encode() + body)
            door.recv(1, socket.MSG_PEEK)
        return [agent.end(reward=reward).status_code for reward in (0, 1, 1)]

    trajectory, codes, _ = await played(url, play)
    assert (trajectory.reward, codes) == (1.0, [410, 200, 410])


def test_an_episode_whose_agent_did_not_get_it_is_offered_again_at_once(url: str) -> None:
    address = urlsplit(url)
    offer = {"environment": "gateway", "split": "train", "index": 0}
    with httpx.Client(base_url=url, timeout=60) as http:
        payload = http.post("/run/open", json=offer).json()
        with socket.create_connection((address.hostname, address.port), timeout=60) as door:
            door.sendall(f"POST /episodes HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 0\r\n\r\n".encode())
            door.recv(1, socket.MSG_PEEK)
        assert http.post("/episodes").json()["episode"] == payload["episode"]
        # Nobody is offered one that is played.
        assert http.post("/episodes", json={"wait": 0}).status_code == 204


def test_an_agent_of_a_run_that_was_killed_is_told_at_once(url: str) -> None:
    """It waited for a quarter of an hour, and the run that went on waited for agents."""
    offer = {"environment": "gateway", "split": "train", "index": 0}
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(1) as outside:
        with http.stream("POST", "/run/arrive") as presence:
            lines = presence.iter_lines()
            payload = http.post("/run/open", json={**offer, "run": next(lines)}).json()
            future = outside.submit(sent, url, lambda agent: agent.says(HELLO))
            assert http.post("/run/next", json={**payload, "wait": 60}).json()["event"] == "call"
        with pytest.raises(openai.APIStatusError, match="is over: the process of its run ended"):
            future.result()
        assert http.post("/run/open", json={**offer, "run": "gone"}).json() == {"episode": None}
