"""`agentr env serve` against web pages, bodies without end, and clients that open and never
close.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from door import Door

from agentr_core.environments.agentgym.server import SlotPool, app, number_instances
from agentr_core.environments.agentgym.wire import WIRE_FORMATS
from agentr_core.errors import EnvironmentUnavailable, IllTypedAnswer
from agentr_core.http_server import MAX_BODY_BYTES
from agentr_core.types import Transition


def make_client(make: Any = Door, **options: Any) -> httpx.AsyncClient:
    server = app(make, WIRE_FORMATS["textcraft"], number_instances(Door(), ["train"]), **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://testserver")


async def test_clients_of_agentgym_are_let_in() -> None:
    async with make_client() as client:
        slot = (await client.post("/create", json={})).json()
        assert (await client.post("/step", json={"id": slot["id"], "action": "open"})).json()["done"] is True


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://testserver", "Content-Type": "text/plain"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_a_post_of_a_web_page_is_refused(headers: dict[str, str]) -> None:
    async with make_client() as client:
        assert (await client.post("/create", content=b"{}", headers=headers)).status_code == 403
        assert (await client.get("/list_envs")).json() == []


async def test_a_body_is_bounded_by_what_it_says_and_by_what_it_is() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 2**16

    async with make_client() as client:
        assert (await client.post("/create", content=b" " * (MAX_BODY_BYTES + 1))).status_code == 413
        assert (await client.post("/create", content=endless())).status_code == 413
        assert (await client.post("/create", content=b"{}", headers={"Content-Length": "-1"})).status_code == 400
        assert (await client.post("/create", content=b"{}", headers={"Content-Length": "9" * 5000})).status_code == 413
        assert (await client.post("/create", content=b"{}")).status_code == 200


async def test_environments_are_bounded_also_while_they_open() -> None:
    async with make_client(max_slots=3) as client:
        answers = await asyncio.gather(*(client.post("/create", json={}) for _ in range(12)))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 9
        full = next(answer for answer in answers if answer.status_code == 503)
        assert "3 environments are open" in full.json()["error"]
        ids = (await client.get("/list_envs")).json()
        assert len(ids) == 3
        await client.post("/close", json={"id": ids[0]})
        assert (await client.post("/create", json={})).status_code == 200


def test_one_that_cannot_be_opened_takes_no_place_and_is_closed() -> None:
    closed_envs = []

    class Silent(Door):
        def reset(self, instance: Any) -> Any:
            return None

        def close(self) -> None:
            closed_envs.append(self)

    numbers = number_instances(Door(), ["train"])
    pool = SlotPool(Silent, WIRE_FORMATS["textcraft"], numbers, idle_s=60, max_slots=1)
    for _ in range(3):
        with pytest.raises(IllTypedAnswer):
            pool.create({})
    assert len(closed_envs) == 3
    pool = SlotPool(Door, WIRE_FORMATS["textcraft"], numbers, idle_s=60, max_slots=1)
    pool.create({})
    with pytest.raises(EnvironmentUnavailable):
        pool.create({})


async def test_an_ill_typed_answer_is_an_error_of_the_contract() -> None:
    class Odd(Door):
        def step(self, action: str) -> Transition:
            return super().step(action)._replace(reward=float("nan"))

    async with make_client(Odd) as client:
        slot = (await client.post("/create", json={})).json()
        answer = await client.post("/step", json={"id": slot["id"], "action": "open"})
        assert (answer.status_code, "the reward is nan" in answer.json()["error"]) == (200, True)
