"""What worlds and models answer, at the door: one ill-typed answer costs its episode, and never the
stage.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import Line, Policy, generation, instance

from agentr_core.environments.agentgym.wire import WIRE_FORMATS
from agentr_core.environments.contract import check
from agentr_core.episodes.rollout import EnvironmentPool, act
from agentr_core.episodes.units import UnitError
from agentr_core.errors import (
    DataFault,
    EnvironmentUnavailable,
    IllTypedAnswer,
    MalformedAnswer,
    MalformedReply,
    ModelFault,
)
from agentr_core.evaluation.episodes import EpisodeResult, Player, episode_plans, play_all
from agentr_core.models.batching import Batcher
from agentr_core.models.openai.wire import read_completion, read_models
from agentr_core.models.samplers import DirectSampler
from agentr_core.models.vllm.model import read_choices
from agentr_core.recipes.recipe import ErrorsConfig
from agentr_core.runtime.instances import check_no_overlap
from agentr_core.types import Generation, Instance, Message, Request, Sampling, Transition

# Typed as what an environment may hand over, so that an ill-typed part can be put into it.
GOOD: Any = Transition("You are at 1.", 0.5, False, False, {"success": False, "valid": True})
ILL: dict[str, tuple[Any, str]] = {
    "observation None": (GOOD._replace(observation=None), "the observation is None"),
    "observation bytes": (GOOD._replace(observation=b"You"), "the observation is b'You'"),
    "observation with a surrogate": (GOOD._replace(observation="a\ud800"), "half a surrogate pair at 1"),
    "reward NaN": (GOOD._replace(reward=math.nan), "the reward is nan"),
    "reward infinite": (GOOD._replace(reward=math.inf), "the reward is inf"),
    "reward minus infinite": (GOOD._replace(reward=-math.inf), "the reward is -inf"),
    "reward a text": (GOOD._replace(reward="1.0"), "the reward is '1.0'"),
    "reward None": (GOOD._replace(reward=None), "the reward is None"),
    "reward a flag": (GOOD._replace(reward=True), "the reward is True"),
    "reward too large for a float": (GOOD._replace(reward=10**400), "must be a finite number"),
    "reward of 5,000 digits": (GOOD._replace(reward=10**5000), "a very long int"),
    "reward above 1": (GOOD._replace(reward=2.0), r"scales its rewards to \[0, 1\]"),
    "success a text": (GOOD._replace(info={"success": "False"}), "info\\[\"success\"\\] is 'False'"),
    "success a number": (GOOD._replace(info={"success": 1}), "is 1; it must be true or false"),
    "success missing": (GOOD._replace(info={}), 'a mapping with the flag "success"'),
    "info None": (GOOD._replace(info=None), "info is None"),
    "valid a number": (GOOD._replace(info={"success": False, "valid": 1}), "info\\[\"valid\"\\] is 1"),
    "matched a number": (GOOD._replace(info={"success": False, "matched": 3}), "info\\[\"matched\"\\] is 3"),
    "terminated a text": (GOOD._replace(terminated="no"), "terminated is 'no'"),
    "truncated None": (GOOD._replace(truncated=None), "truncated is None"),
    "four parts": (tuple(GOOD)[:4], "a step returns observation, reward"),
    "nothing": (None, "gave None"),
}  # fmt: skip


class Odd(Line):
    """Answers the first step in one instance with what it is told to."""

    def __init__(self, answer: Any, *, at: int = 1, first: Any = "") -> None:
        super().__init__()
        self._answer, self._at, self._first = answer, at, first
        self._index = 0

    def reset(self, instance: Instance) -> Any:
        self._index = instance.index
        observation = super().reset(instance)
        return self._first if self._first != "" and instance.index == self._at else observation

    def step(self, action: str) -> Any:
        return self._answer if self._index == self._at and self._first == "" else super().step(action)


@pytest.mark.parametrize("name", ILL)
def test_an_ill_typed_step_is_refused(name: str) -> None:
    env = Odd(ILL[name][0])
    env.reset(instance(1))
    with pytest.raises(IllTypedAnswer, match=ILL[name][1]) as caught:
        act(env, "Action: right")
    assert str(caught.value).isprintable()


def test_numbers_and_flags_of_numpy_are_taken_as_what_they_are() -> None:
    transition = GOOD._replace(
        reward=np.float32(0.5), terminated=np.bool_(True), info={"success": np.bool_(True), "valid": None}
    )
    env = Odd(transition)
    env.reset(instance(1))
    step = act(env, "Action: right").step
    assert (step.reward, step.terminated, step.success, step.valid) == (0.5, True, True, None)
    assert [type(step.reward), type(step.terminated), type(step.success)] == [float, bool, bool]


async def play_episodes(make: Any) -> tuple[dict[str, EpisodeResult], list[UnitError]]:
    errors: list[UnitError] = []
    player = Player(
        environments=EnvironmentPool(lambda _: make()), sample=Policy(["right"]), max_steps=9, sampling=Sampling()
    )
    results = await play_all(
        episode_plans([instance(i) for i in range(4)], episodes=1, seed=0),
        player,
        errors=ErrorsConfig(budget=0.25),
        concurrency=2,
        on_error=errors.append,
    )
    return results, errors


@pytest.mark.parametrize("name", ILL)
async def test_it_costs_its_episode_and_not_the_stage(name: str) -> None:
    results, errors = await play_episodes(lambda: Odd(ILL[name][0]))
    assert [key for key in results if results[key].trajectory.success] == list(results)
    assert len(results) == 3
    assert [(e.key, e.kind, e.phase, e.is_final) for e in errors] == [
        ("line/train/1#0", "IllTypedAnswer", "step", True)
    ]


@pytest.mark.parametrize("first", [None, 7, "a\udc00"])
async def test_a_first_observation_that_is_no_text_costs_its_episode(first: Any) -> None:
    results, errors = await play_episodes(lambda: Odd(None, first=first))
    assert (len(results), [e.phase for e in errors]) == (3, ["reset"])


def test_splits_are_compared_without_what_begins_ill_typed() -> None:
    """Two instances that both begin with None are not one."""
    env = Odd(None, at=1, first=None)
    check_no_overlap(env, (instance(1), instance(2)), (instance(3), instance(0)))


def test_an_instance_that_cannot_begin_is_left_to_its_episodes() -> None:
    """It once ended the whole run before any episode could be counted against the error budget."""
    broken, env = instance(5), Line()
    check_no_overlap(env, (broken, instance(1)), (instance(0), instance(6)))
    with pytest.raises(DataFault, match="training instance line/train/1 is held-out"):
        check_no_overlap(env, (broken, instance(1)), (instance(6), instance(1)))

    with pytest.raises(DataFault, match="training instance line/train/1 is held-out"):
        check_no_overlap(env, (instance(1),), (instance(1),), resets=False)

    class Away(Line):
        def reset(self, instance: Instance) -> str:
            raise EnvironmentUnavailable("the line is away")

    with pytest.raises(EnvironmentUnavailable):
        check_no_overlap(Away(), (broken,), ())
    check_no_overlap(Away(), (broken,), (instance(1),), resets=False)


def test_the_contract_catches_what_the_door_refuses() -> None:
    class Split(Line):
        def splits(self) -> tuple[str, ...]:
            return ("train", "test")

        def step(self, action: str) -> Transition:
            transition = super().step(action)
            return transition._replace(info={**transition.info, "success": str(transition.info["success"])})

    assert any("info[\"success\"] is 'False'" in v.detail for v in check(Split))


@pytest.mark.parametrize("given", [True, "3", 2.5, 10**30])
def test_a_depth_is_a_whole_number(given: Any) -> None:
    class Deep(Line):
        def depth(self, instance: Instance) -> Any:
            return given

    with pytest.raises(IllTypedAnswer, match="the depth of line/train/0"):
        Deep().depth(instance(0))


@pytest.mark.parametrize("given", ["Action: right", [None], 3])
def test_an_expert_speaks_in_texts(given: Any) -> None:
    class Strange(Line):
        def expert(self, instance: Instance) -> Any:
            return given

    with pytest.raises(IllTypedAnswer, match="the expert's replies to line/train/0"):
        Strange().expert(instance(0))


# ---- models

BAD_REPLIES: dict[str, tuple[dict[str, Any], str]] = {
    "a surrogate": ({"text": "a\ud800"}, "cannot be stored"),
    "no text": ({"text": None}, "has the text None"),
    "NaN": ({"logprobs": (math.nan,)}, "log-probabilities that are none"),
    "minus infinity": ({"logprobs": (-math.inf,)}, "log-probabilities that are none"),
    "above 0": ({"logprobs": (0.5,)}, "log-probabilities that are none"),
    "too few": ({"logprobs": ()}, "0 log-probabilities for 1 tokens"),
    "10^30 tokens": ({"prompt_tokens": 10**30}, "as prompt_tokens"),
    "negative tokens": ({"completion_tokens": -1}, "has -1 as completion_tokens"),
    "a token id of 10^30": ({"token_ids": (10**30,)}, "token ids that are none"),
    "a token id that is a text": ({"token_ids": ("3",)}, "token ids that are none"),
    "a reason of its own": ({"finish_reason": "abort"}, "finish reason 'abort'"),
}


class Giving:
    """Answers the request for "odd" with a reply that is changed, and others as they are."""

    name = fingerprint = "giving"
    context_length = 1000

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.asked = 0

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        self.asked += len(requests)
        plain = replace(generation("x"), logprobs=(-0.5,))
        return [[replace(plain, **self.changes) if r.messages[0].text == "odd" else plain] for r in requests]

    def count_tokens(self, request: Request) -> int:
        return 1

    async def close(self) -> None:
        """Nothing to close."""


def ask(text: str, **sampling: Any) -> Request:
    return Request(messages=(Message(role="user", text=text),), sampling=Sampling(**sampling), seed=0)


@pytest.mark.parametrize("sampler", ["batcher", "relay"])
@pytest.mark.parametrize("name", BAD_REPLIES)
async def test_an_ill_typed_reply_is_the_fault_of_its_request_alone(name: str, sampler: str) -> None:
    changes, message = BAD_REPLIES[name]
    model = Giving(**changes)
    sample = (Batcher(model, max_batch=8) if sampler == "batcher" else DirectSampler(model, concurrency=8)).sample
    first, odd, second = await asyncio.gather(*map(sample, (ask("a"), ask("odd"), ask("b"))), return_exceptions=True)
    assert type(odd) is ModelFault
    assert message in str(odd)
    assert str(odd).isprintable()
    assert first == second == [replace(generation("x"), logprobs=(-0.5,))]
    assert model.asked == 3, "nobody is asked again"


CHAT = (
    '{"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop", "token_ids": [3], '
    '"logprobs": {"content": [{"logprob": -0.5}]}}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}'
)
VLLM = '{"choices": [{"index": 0, "finish_reason": "stop", "token_ids": [3], "logprobs": {"token_logprobs": [-0.5]}}]}'


def read_reply(payload: str) -> Any:
    request = ask("a", logprobs=True)
    if "message" in payload:
        return read_completion(payload.encode(), request, n=1, max_tokens=9)
    return read_choices(payload.encode(), request)


@pytest.mark.parametrize("payload", [CHAT, VLLM])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-0.5", "NaN"), ("-0.5", "-Infinity"), ("-0.5", "0.7"), ("-0.5", '"-0.5"'), ("-0.5", "null"),
        ("[3]", f"[{10**30}]"), ("[3]", "[-3]"), ("[3]", "[true]"), ("[3]", '["3"]'), ('"index": 0', '"index": "0"'),
        ('"stop"', "1"),
    ],
)  # fmt: skip
def test_a_server_is_held_to_types_and_ranges(payload: str, old: str, new: str) -> None:
    read_reply(payload)
    with pytest.raises(MalformedReply):
        read_reply(payload.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"prompt_tokens": 5', f'"prompt_tokens": {10**30}'),
        ('"prompt_tokens": 5', '"prompt_tokens": -5'),
        ('"completion_tokens": 1', '"completion_tokens": "1"'),
        ('"hi"', '"\\ud800"'),
        ('"hi"', "7"),
    ],
)
def test_a_chat_server_is_held_to_its_usage_and_texts(old: str, new: str) -> None:
    with pytest.raises(MalformedReply):
        read_reply(CHAT.replace(old, new))


@pytest.mark.parametrize("length", ["-1", "0", '"4096"', str(10**30), "true"])
def test_a_context_length_is_one(length: str) -> None:
    with pytest.raises(MalformedReply):
        read_models(f'{{"data": [{{"id": "m", "max_model_len": {length}}}]}}'.encode())


@pytest.mark.parametrize("reward", [10**400, math.nan, math.inf, "1", None, True])
def test_a_world_behind_a_server_is_held_to_types_and_ranges(reward: Any) -> None:
    with pytest.raises(MalformedAnswer):
        WIRE_FORMATS["textcraft"].read_step({"observation": "a", "reward": reward, "done": False})
