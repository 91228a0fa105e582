"""Models of roles other than the actor, which are asked on the side of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import get_args

from agentr_core.errors import IllTypedAnswer
from agentr_core.fingerprint import fingerprint
from agentr_core.models.samplers import Sampler
from agentr_core.recipes.models import ModelRole
from agentr_core.runtime.equipment import Equipment, Sink
from agentr_core.runtime.readings import Readings, readings_of
from agentr_core.runtime.shards import Effort, spent
from agentr_core.types import Answer, Question, Request


async def answer(sampler: Sampler, question: Question, *, seed: int, session: str) -> Answer:
    """Return what a model says to a question. Raises as `ChatModel.generate`."""
    request = Request(messages=question.messages, sampling=question.sampling, seed=seed, session=session, helper=True)
    (said,) = await sampler.sample(request)
    return Answer(
        role=question.role,
        model=sampler.model.fingerprint,
        prompt_hash=fingerprint([(message.role, message.text) for message in question.messages]),
        seed=seed,
        text=said.text,
        finish_reason=said.finish_reason,
        prompt_tokens=said.prompt_tokens,
        completion_tokens=said.completion_tokens,
        thinks=said.thinks,
    )


class Helpers:
    """The models of a recipe that are asked by role; each is loaded when it is first asked.

    A role without a model of its own is taken by the actor, with the actor's sampler. Roles with
    the same model share one sampler.
    """

    def __init__(self, equipment: Equipment, path: Path, actor: Sampler, sink: Sink, opened: AsyncExitStack) -> None:
        self._equipment = equipment
        self._path = path
        self._actor = actor
        self._sink = sink
        self._opened = opened
        self._samplers: dict[ModelRole, Sampler] = {}
        self._readings: dict[str, Readings] = {}
        self._loading = asyncio.Lock()

    async def ask(self, question: Question, *, seed: int, session: str) -> Answer:
        """Return what the model of a role says to a question.

        Raises `IllTypedAnswer` for an unknown role, else as `ChatModel.generate` and
        `Readings.count`.
        """
        sampler = await self._sampler(question.role)
        await self._sink.room()
        said = await answer(sampler, question, seed=seed, session=session)
        if question.role not in self._readings:
            counting = readings_of(question.role, sampler.model.name)
            self._readings[question.role] = self._opened.enter_context(counting)
        self._readings[question.role].count(said)
        return said

    def effort(self) -> Effort:
        """Return the effort of the models that were loaded here."""
        return spent(*self._samplers.values())

    async def _sampler(self, name: str) -> Sampler:
        role = next((role for role in get_args(ModelRole) if role == name), None)
        if role is None:
            raise IllTypedAnswer(
                f"an environment asks a model of role {name!r}; the roles are {', '.join(get_args(ModelRole))}"
            )
        if role == "actor" or role not in self._equipment.recipe.own_models():
            return self._actor
        own, wanted = self._equipment.recipe.own_models(), self._equipment.recipe.model_of(role)
        first = next(other for other, model in own.items() if other != "actor" and model == wanted)
        async with self._loading:
            if first not in self._samplers:
                lent = self._equipment.sampling(self._path, first)
                self._samplers[first] = await self._opened.enter_async_context(lent)
        return self._samplers[first]


@asynccontextmanager
async def helpers(equipment: Equipment, path: Path, actor: Sampler, sink: Sink) -> AsyncIterator[Helpers]:
    """Yield the helpers that ask models of other roles, which are closed after the block.

    `path` is that of the acting policy, whose sampler is `actor`.
    """
    async with AsyncExitStack() as opened:
        yield Helpers(equipment, path, actor, sink, opened)
