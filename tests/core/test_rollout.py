"""Episodes: endings, prefixes, restoring by replay, conversations."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from toy import Line, Policy, Script, generation, instance

from agentr_core.episodes.rollout import (
    EpisodeTimer,
    Reply,
    act,
    act_with_helper,
    play_replies,
    restore_state,
    roll_out_episode,
)
from agentr_core.episodes.transcript import AlternatingTurns, transcript_of, whole_episode
from agentr_core.episodes.units import phase_of
from agentr_core.errors import ConfigError, EnvironmentFault, ModelFault, ReplayDiverged
from agentr_core.methods.agent_r.pruning import needed_positions
from agentr_core.methods.faults import parse
from agentr_core.methods.table import plans_of
from agentr_core.types import (
    EpisodeLimits,
    Generation,
    Message,
    Request,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    Transition,
)

SAMPLING = Sampling()


async def run(*rounds: list[str], max_steps: int = 10, prefix: tuple[Step, ...] = (), env: Line | None = None):  # type: ignore[no-untyped-def]
    return await roll_out_episode(
        instance(1), env or Line(), Script(*rounds), max_steps=max_steps, sampling=SAMPLING, seed=3, prefix=prefix
    )


@pytest.mark.parametrize(
    ("rounds", "steps", "reward", "success", "stop"),
    [
        ([["right"]], 3, 1.0, True, StopReason.SUCCESS),
        ([["right"], ["stop"]], 2, 1 / 3, False, StopReason.FAILURE),
        ([["right"], ["jump"]], 2, 0.0, False, StopReason.DISASTER),
        ([["look"]], 10, 0.0, False, StopReason.STEP_LIMIT),
    ],
)
async def test_endings(rounds: list[list[str]], steps: int, reward: float, success: bool, stop: StopReason) -> None:
    trajectory = await run(*rounds)
    assert len(trajectory.steps) == steps
    assert (trajectory.reward, trajectory.success, trajectory.stop) == (pytest.approx(reward), success, stop)


class StatefulLine(Line):
    """The line, telling where one stands."""

    def state(self) -> str:
        return str(self.snapshot())


async def test_an_episode_ends_when_one_reply_came_back_in_one_state() -> None:
    async def played(*rounds: list[str], repeats: int, env: Line | None = None) -> Trajectory:
        return await roll_out_episode(
            instance(1),
            env or StatefulLine(),
            Script(*rounds),
            max_steps=10,
            max_repeats=repeats,
            sampling=SAMPLING,
            seed=3,
        )

    stuck = await played(["look"], repeats=3)
    assert (len(stuck.steps), stuck.stop, stuck.success, stuck.reward) == (3, StopReason.REPEATS, False, 0.0)
    # The same reply leads on from other states, and an episode that ends by itself has not come
    # back.
    assert (await played(["right"], repeats=2)).stop is StopReason.SUCCESS
    assert (await played(["look"], ["look"], ["right"], repeats=3)).stop is StopReason.SUCCESS
    assert (await played(["look"], repeats=0)).stop is StopReason.STEP_LIMIT
    with pytest.raises(ConfigError, match="line does not tell its state"):
        await played(["look"], repeats=3, env=Line())


@pytest.mark.parametrize("method", [{"method": "grpo"}, {"method": "et-agent", "et_agent": {"phases": ["rft", "rl"]}}])
def test_groups_that_should_end_where_they_repeat_themselves_need_a_world_with_states(method: dict[str, Any]) -> None:
    recipe = parse({"name": "r", "model": {"path": "m"}, "iterations": 2, "grpo": {"repeats": 3}, **method})
    (stage,) = {stage for plan in plans_of(recipe) for stage in plan.stages if stage.name == "reinforce"}
    stage.check(recipe, StatefulLine(), [])
    with pytest.raises(ConfigError, match=r"environment line does not tell its state; leave grpo\.repeats out"):
        stage.check(recipe, Line(), [])


def test_a_step_has_the_action_that_was_carried_out_where_the_world_tells() -> None:
    class Matching(Line):
        def step(self, action: str) -> Transition:
            transition = super().step("right")
            return transition._replace(info={**transition.info, "matched": "right"})

    steps = []
    for env in (Line(), Matching()):
        env.reset(instance())
        steps.append(act(env, "Action: go right").step)
    assert [(step.action, step.matched) for step in steps] == [("go right", None), ("go right", "right")]


async def test_a_full_context_ends_an_episode_with_its_present_reward() -> None:
    model = Policy(["look"], max_messages=7)
    trajectory = await roll_out_episode(instance(), Line(), model, max_steps=9, sampling=SAMPLING, seed=1)
    assert (len(trajectory.steps), trajectory.stop, trajectory.reward) == (3, StopReason.CONTEXT_LIMIT, 0.0)
    bare = await roll_out_episode(instance(), Line(), Policy(max_messages=1), max_steps=9, sampling=SAMPLING, seed=1)
    assert (bare.steps, bare.stop, bare.reward) == ((), StopReason.CONTEXT_LIMIT, 0.0)


def characters(messages: tuple[Message, ...]) -> int:
    """Count a character of a conversation as a token."""
    return sum(len(message.text) for message in messages)


class Writing(Policy):
    """A policy that looks on and on, and whose replies are cut where a request says."""

    async def __call__(self, request: Request) -> list[Generation]:
        self.requests.append(request)
        text = self.reply(request, 0)
        most = request.sampling.max_new_tokens
        whole = generation(text[:most])
        return [whole if len(text) <= most else replace(whole, finish_reason="length")]


async def test_a_limit_on_all_tokens_of_an_episode_counts_what_stands_between_replies() -> None:
    async def roll_out(
        tokens: int, model: Policy, *, prefix: tuple[Step, ...] = (), env: Line | None = None
    ) -> Trajectory:
        limits = EpisodeLimits(tokens=tokens)
        options: dict[str, Any] = {"max_steps": 9, "sampling": Sampling(max_new_tokens=500), "seed": 1}
        world = env or Line()
        return await roll_out_episode(
            instance(), world, model, prefix=prefix, limits=limits, count_tokens=characters, **options
        )

    model = Writing(["look"])
    cut = await roll_out(90, model)
    reply_chars, observation_chars = len(cut.steps[0].reply), len(cut.steps[0].observation)
    assert [request.sampling.max_new_tokens for request in model.requests] == [
        90 - done * (reply_chars + observation_chars) for done in range(len(model.requests))
    ]
    assert (cut.stop, cut.success, cut.steps[-1].finish_reason) == (StopReason.TOKEN_LIMIT, False, "length")
    assert sum(len(step.reply) for step in cut.steps) + observation_chars * (len(cut.steps) - 1) == 90
    # What is there before counts, and an episode that ends in time ends as ever.
    continuation = await roll_out(90, Writing(["look"]), prefix=cut.steps[:2])
    assert (len(continuation.steps), continuation.stop) == (len(cut.steps), StopReason.TOKEN_LIMIT)
    assert (await roll_out(90, Writing(["right"]))).stop is StopReason.SUCCESS
    # The result of a call may reach beyond the limit; then there is no further reply.
    over = await roll_out(reply_chars + 1, Writing(["look"]))
    assert (len(over.steps), over.stop) == (1, StopReason.TOKEN_LIMIT)

    class Strict(Line):
        def step(self, action: str) -> Transition:
            transition = super().step(action)
            return transition if action == "look" else transition._replace(terminated=True)

    strict = await roll_out(reply_chars + observation_chars + 5, Writing(["look"]), env=Strict())
    assert (len(strict.steps), strict.stop) == (2, StopReason.TOKEN_LIMIT)
    with pytest.raises(ConfigError, match="max_episode_tokens: nothing counts"):
        await roll_out_episode(
            instance(), Line(), model, max_steps=9, sampling=SAMPLING, seed=1, limits=EpisodeLimits(tokens=9)
        )


async def test_a_limit_on_the_time_of_an_episode_gives_up_a_reply_and_waits_for_the_world() -> None:
    async def roll_out(seconds: float, *, slow: float = 0.0, world: Line | None = None) -> Trajectory:
        async def sample(request: Request) -> list[Generation]:
            if len(request.messages) > 3:
                await asyncio.sleep(slow)
            return await Policy(["look"])(request)

        limits = EpisodeLimits(seconds=seconds)
        env = world or Line()
        return await roll_out_episode(instance(), env, sample, max_steps=3, sampling=SAMPLING, seed=1, limits=limits)

    assert (await roll_out(0.0, slow=0.01)).stop is StopReason.STEP_LIMIT
    assert (await roll_out(60.0)).stop is StopReason.STEP_LIMIT
    cut = await roll_out(0.1, slow=60.0)
    assert (len(cut.steps), cut.stop, cut.success, cut.reward) == (1, StopReason.TIME_LIMIT, False, 0.0)

    class Slow(Line):
        def step(self, action: str) -> Transition:
            time.sleep(0.2)
            return super().step(action)

    world = Slow(blocking=True)
    trajectory = await roll_out(0.1, world=world)
    assert (len(trajectory.steps), trajectory.stop, world.steps) == (1, StopReason.TIME_LIMIT, 1)


async def test_an_error_that_looks_like_the_end_of_the_time_stays_one() -> None:
    async def sample(request: Request) -> list[Generation]:
        raise TimeoutError("of the network")

    with pytest.raises(TimeoutError, match="of the network"):
        await roll_out_episode(
            instance(), Line(), sample, max_steps=3, sampling=SAMPLING, seed=1, limits=EpisodeLimits(seconds=60)
        )


async def test_a_prefix_is_replayed_and_the_model_goes_on() -> None:
    failure = await run(["left"], ["look"], ["stop"])
    recovery = await run(["right"], prefix=failure.steps[:2], max_steps=4)
    assert recovery.steps[:2] == failure.steps[:2]
    assert recovery.steps[2].observation == "You are at 0."
    assert [s.action for s in recovery.steps] == ["left", "look", "right", "right", "right", "right"]
    assert recovery.success
    cut = await run(["right"], prefix=failure.steps[:2], max_steps=3)
    assert (len(cut.steps), cut.stop) == (5, StopReason.STEP_LIMIT)


async def test_each_reply_is_reported_with_its_own_seed() -> None:
    replies: list[Reply] = []
    timer = EpisodeTimer()
    trajectory = await roll_out_episode(
        instance(),
        Line(blocking=True),
        Script(["right"]),
        max_steps=9,
        sampling=SAMPLING,
        seed=1,
        on_reply=replies.append,
        timer=timer,
    )
    assert [r.outcome.step for r in replies] == list(trajectory.steps)
    assert len({r.seed for r in replies}) == 2
    assert timer.environment_seconds > 0
    assert timer.sampling_seconds > 0


async def test_replay_checks_every_observation() -> None:
    trajectory = await run(["right"], ["look"], ["stop"])
    env = Line(can_snapshot=False)
    assert restore_state(env, instance(1), trajectory.steps[:2]) == trajectory.first_observation
    assert env.step("stop").observation == "You stopped."
    with pytest.raises(ReplayDiverged, match="ended at step 2"):
        restore_state(env, instance(1), trajectory.steps)
    with pytest.raises(ReplayDiverged, match="first observation was recorded as 'Another world"):
        restore_state(env, instance(1), (), first_observation="Another world")
    with pytest.raises(ReplayDiverged, match="observation 0 after 'right'"):
        restore_state(Line(drift=True), instance(1), trajectory.steps[:2])


def test_playing_replies_gives_live_outcomes_up_to_the_end() -> None:
    observation, outcomes = play_replies(Line(), instance(), ["Action: right", "Action: jump", "Action: right"])
    assert observation == "The goal is 2 to the right."
    assert [o.stop for o in outcomes] == [None, StopReason.DISASTER]
    assert [o.step.valid for o in outcomes] == [True, True]


async def test_a_reply_cut_within_its_thought_has_no_action_and_has_none_when_it_is_played_again() -> None:
    text = "I could say\nAction: right"
    cut = replace(generation(text), finish_reason="length", unfinished_thought=True)
    env = Line()
    env.reset(instance())
    step = act(env, cut).step
    assert (step.reply, step.action, step.valid) == (text, "", False)
    env.reset(instance())
    assert (await act_with_helper(env, EpisodeTimer(), cut)).step == step
    assert act(env, replace(cut, unfinished_thought=False)).step.action == "right"
    _, outcomes = play_replies(env, instance(), [step, "Action: right"])
    assert [outcome.step.action for outcome in outcomes] == ["", "right"]
    assert needed_positions(env, instance(), [step, "Action: right", "Action: right"]) == (1, 2)


@pytest.mark.parametrize("reward", [1.5, math.nan, math.inf])
def test_a_reward_out_of_scale_is_a_fault(reward: float) -> None:
    class Unscaled(Line):
        def step(self, action: str) -> Transition:
            return super().step(action)._replace(reward=reward)

    env = Unscaled()
    env.reset(instance())
    with pytest.raises(EnvironmentFault, match=r"scales its rewards to \[0, 1\]"):
        act(env, "Action: look")


def test_a_truncated_episode_is_at_its_step_limit() -> None:
    class Short(Line):
        def step(self, action: str) -> Transition:
            return super().step(action)._replace(truncated=True)

    env = Short()
    env.reset(instance())
    assert act(env, "Action: look").stop is StopReason.STEP_LIMIT


async def test_a_model_that_loses_a_reply_is_at_fault() -> None:
    async def silent(request):  # type: ignore[no-untyped-def]
        return []

    with pytest.raises(ModelFault, match="1 replies were asked for, 0 came") as caught:
        await roll_out_episode(instance(), Line(), silent, max_steps=1, sampling=SAMPLING, seed=1)
    assert phase_of(caught.value) == "generate"


async def test_conversations_of_a_trajectory() -> None:
    trajectory: Trajectory = await run(["right"], ["stop"])
    env = Line()
    observation = trajectory.first_observation
    messages = AlternatingTurns().prompt(env, observation, trajectory.steps)
    assert [m.text for m in messages[:3]] == [env.instruction, env.acknowledgement, observation]
    assert [m.role for m in messages[:3]] == ["user", "assistant", "user"]
    assert not any(m.train for m in messages)
    sample = whole_episode(env, trajectory)
    assert [(m.role, m.train) for m in sample[3:]] == [("assistant", True), ("user", False), ("assistant", True)]
    assert [m.text for m in sample] == [m.text for m in messages[:-1]]
    turns = transcript_of(env).sample(env, observation, trajectory.steps, [False, True])
    assert [m.train for m in turns] == [False, False, False, False, False, True]
    step = Step(reply="r", action="a", observation="o", reward=0.0)
    assert AlternatingTurns().prompt(env, observation, [step])[3].token_ids is None
