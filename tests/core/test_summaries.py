"""Histories that the policy sums up: what is read, what is trained on, and how an episode goes on
from a summary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from toy import Line, Policy, instance
from toy_paths import renderer, sampled_ids

from agentr_core.environment import Environment
from agentr_core.episodes.grading import regrade_episode
from agentr_core.episodes.rollout import Reply, roll_out_episode
from agentr_core.episodes.transcript import (
    Continuation,
    NativeTurns,
    SummaryLimits,
    Tool,
    call_reply,
    conversations,
    summarisable_transcript,
)
from agentr_core.errors import ConfigError, PromptTooLong
from agentr_core.evaluation.episodes import count_invalid
from agentr_core.methods.catalogue import group_demands
from agentr_core.methods.eto.preferences import StoredTrajectory, pair_of_own
from agentr_core.methods.faults import parse
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.samples.dataset import cap_good_per_tree, check_flags, token_row
from agentr_core.stages.dataset import whole_samples
from agentr_core.training.group.advantages import group_advantages
from agentr_core.training.group.policy import policy_row
from agentr_core.types import (
    NO_LIMITS,
    EpisodeLimits,
    FinishReason,
    Generation,
    Instance,
    Message,
    Request,
    Sample,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)

PROMPT = "Sum it up."
GOAL = 60
FULL = 9
"""Turns after which a history is full: the opening and three exchanges."""
TOOL = Tool(name="act", description="Acts.", arguments=(("action", "What to do."),))
Text = tuple[str, str]


class Far(Line):
    """A goal that is sixty steps away."""

    step_limit = 100
    summary_prompt = PROMPT

    def reset(self, instance: Instance) -> str:
        first_observation = super().reset(instance)
        self._goal = GOAL
        return first_observation


class Walk(Policy):
    """Walks right, and sums up when it is asked to; its tokens are those of the toy's tokenizer."""

    def __init__(
        self, *, summary: str = "I go right.", finish: FinishReason = "stop", max_messages: int = 1000
    ) -> None:
        super().__init__(max_messages=max_messages)
        self.summary, self.finish = summary, finish

    async def __call__(self, request: Request) -> list[Generation]:
        self.requests.append(request)
        if len(request.messages) > self.max_messages:
            raise PromptTooLong(f"{len(request.messages)} messages; {self.max_messages} fit")
        is_summary = request.messages[-1].text.endswith(PROMPT)
        text = (
            f"{self.summary}{request.seed % 7}"
            if is_summary and self.summary
            else ""
            if is_summary
            else "Action: right"
        )
        ids = sampled_ids(text)
        finish: FinishReason = self.finish if is_summary else "stop"
        return [
            Generation(
                text=text,
                token_ids=ids[:-1] if finish == "length" else ids,
                finish_reason=finish,
                prompt_tokens=1,
                completion_tokens=len(ids),
                logprobs=tuple(-0.1 * at for at in range(len(ids) - (finish == "length"))),
            )
        ]


def summaries(room: int = FULL + 2) -> SummaryLimits:
    return SummaryLimits(
        fits_summary_and_reply=lambda messages: len(messages) <= FULL,
        fits_summary=lambda messages: len(messages) <= room,
        max_new_tokens=7,
    )


async def play(
    policy: Policy,
    *,
    room: int = FULL + 2,
    env: Environment | None = None,
    prefix: Sequence[Step] = (),
    max_steps: int = 300,
    limits: EpisodeLimits = NO_LIMITS,
    repeats: int = 0,
    on_reply: Callable[[Reply], None] | None = None,
) -> Trajectory:
    return await roll_out_episode(
        instance(0),
        env or Far(),
        policy,
        max_steps=max_steps,
        sampling=Sampling(max_new_tokens=5, stop=("Observation:",), logprobs=True),
        seed=1,
        prefix=prefix,
        summaries=summaries(room),
        max_repeats=repeats,
        on_reply=on_reply,
        limits=limits,
        count_tokens=lambda messages: sum(len(message.text) for message in messages),
    )


def texts(messages: Sequence[Message]) -> list[Text]:
    return [(message.role, message.text) for message in messages]


def expected_prompts(made: Trajectory) -> list[list[Text]]:
    """What is read before each step, written down independently: everything up to a summary, then
    the opening with the request, the summary, and what was not summed up.
    """
    task: list[Text] = [("user", Far.instruction), ("assistant", "Ok.")]
    opening = [*task, ("user", made.first_observation)]
    answer: Text | None = None
    turns: list[tuple[int, Text, Text]] = []
    prompts = []

    def conversation(upto: int) -> list[Text]:
        later_turns = [turn for at, reply, result in turns if at < upto for turn in (reply, result)]
        return [*opening, *([answer] if answer else []), *later_turns]

    for at, step in enumerate(made.steps):
        if step.summary_of is None:
            prompts.append(conversation(at))
            turns.append((at, ("assistant", step.reply), ("user", step.observation)))
            continue
        *before, (role, text) = conversation(step.summary_of)
        prompts.append([*before, (role, f"{text}\n\n{PROMPT}")])
        opening = [*task, ("user", f"{made.first_observation}\n\n{PROMPT}"), ("assistant", step.reply)]
        answer = next(result for position, _, result in turns if position == step.summary_of - 1)
        turns = [turn for turn in turns if turn[0] >= step.summary_of]
    return prompts


def samples_of(made: Trajectory) -> list[Sample]:
    results = list(whole_samples(Far(), "t", made, "stretches", stage="explore"))
    assert all(isinstance(sample, Sample) for sample in results)
    return [sample for sample in results if isinstance(sample, Sample)]


@pytest.mark.parametrize(("room", "whole"), [(FULL + 2, True), (FULL, False), (FULL - 2, False)])
async def test_an_episode_goes_on_from_its_summaries_and_is_trained_as_it_was_read(room: int, whole: bool) -> None:
    policy = Walk()
    trajectory = await play(policy, room=room)
    assert (trajectory.stop, trajectory.reward) == (StopReason.SUCCESS, 1.0)
    summary_steps = [(at, step) for at, step in enumerate(trajectory.steps) if step.summary_of is not None]
    assert len(trajectory.steps) - len(summary_steps) == GOAL
    assert len(summary_steps) >= 10
    assert all(at == step.summary_of for at, step in summary_steps) is whole
    for _, step in summary_steps:
        assert (step.action, step.observation, step.reward, step.valid) == ("", "", 0.0, None)

    prompts = [texts(request.messages) for request in policy.requests]
    assert prompts == expected_prompts(trajectory)
    requests = [request for request in policy.requests if request.messages[-1].text.endswith(PROMPT)]
    assert {(r.sampling.max_new_tokens, r.sampling.stop, r.sampling.logprobs) for r in requests} == {(7, (), True)}

    samples = samples_of(trajectory)
    targets = [
        ([*texts(sample.messages[:at]), ("assistant", message.text)], message.token_ids)
        for sample in samples
        for at, message in enumerate(sample.messages)
        if message.train
    ]
    replies: list[Text] = [("assistant", step.reply) for step in trajectory.steps]
    tokens = [step.token_ids for step in trajectory.steps]
    assert targets == list(
        zip(([*prompt, reply] for prompt, reply in zip(prompts, replies, strict=True)), tokens, strict=True)
    )
    if whole:
        # The summary is the last reply of what it sums up, and there is one sample more.
        assert len(samples) == len(summary_steps) + 1
    for sample in samples:
        check_flags(sample)
        token_row(sample, renderer())


async def test_the_conversations_of_an_episode_count_once_under_the_cap() -> None:
    longer = await play(Walk())
    shorter = replace(longer, steps=longer.steps[:-3])
    samples = [
        sample
        for key, episode in (("longer", longer), ("shorter", shorter))
        for sample in whole_samples(Far(), key, episode, "stretches", stage="explore")
        if isinstance(sample, Sample)
    ]
    kept_samples, rejections = cap_good_per_tree(samples, 1)
    assert [sample.provenance.extra["trajectory"] for sample in kept_samples] == ["shorter"] * len(kept_samples)
    assert len(kept_samples) == len(conversations(Far(), shorter)) > 1
    assert len(kept_samples) + len(rejections) == len(samples)


async def test_the_reward_reaches_each_token_of_a_summary() -> None:
    win, loss = await play(Walk()), await play(Walk(), max_steps=20)
    assert (win.success, loss.success) == (True, False)
    for trajectory, advantage in zip((win, loss), group_advantages([1.0, 0.0], scale="none"), strict=True):
        worth = [advantage] * len(trajectory.steps)
        ids: list[int] = []
        logprobs: list[float] = []
        for part in conversations(Far(), trajectory):
            steps = [trajectory.steps[at] for at in part.positions]
            row = policy_row(part.messages, steps, renderer(), [worth[at] for at in part.positions])
            ids += [row.input_ids[at] for at in row.positions]
            logprobs += row.logprobs
            assert set(row.advantages) == {0.5 if trajectory.success else -0.5}
        assert ids == [token for step in trajectory.steps for token in step.token_ids]
        assert logprobs == [number for step in trajectory.steps for number in step.logprobs or ()]


@pytest.mark.parametrize("room", [FULL + 2, FULL])
async def test_an_episode_that_goes_on_from_recorded_steps_is_the_same(room: int) -> None:
    trajectory = await play(Walk(), room=room)
    first_summary = next(at for at, step in enumerate(trajectory.steps) if step.summary_of is not None)
    for cut in (1, first_summary, first_summary + 1, first_summary + 2, len(trajectory.steps) - 1):
        env = Far()
        assert await play(Walk(), room=room, prefix=trajectory.steps[:cut], env=env) == trajectory
        assert env.steps == GOAL, "the world is told of no summary"
    result = await regrade_episode(Far(), trajectory, helper=None, seed=0)  # type: ignore[arg-type]
    assert (result.grade.reward, result.grade.success) == (1.0, True)


async def test_a_summary_that_was_cut_is_gone_on_from_and_an_empty_one_ends_the_episode() -> None:
    cut = await play(Walk(finish="length"))
    assert cut.success
    ends = [m for sample in samples_of(cut) for m in sample.messages if m.finish_reason == "length"]
    assert ends
    assert all(message.text.startswith("I go right.") for message in ends)

    empty = await play(Walk(summary=""))
    assert (empty.stop, empty.reward, len(empty.steps)) == (StopReason.CONTEXT_LIMIT, 0.0, 5)
    assert empty.steps[-1].summary_of == 4
    (sample,) = samples_of(empty)
    assert sample.messages[-1].train

    thought = await play(Walk(summary="<think>I am on my way", finish="length"))
    assert (thought.stop, len(thought.steps)) == (StopReason.CONTEXT_LIMIT, 5)


async def test_without_room_for_a_summary_the_episode_ends_where_the_context_does() -> None:
    trajectory = await play(Walk(max_messages=FULL), room=3)
    assert (trajectory.stop, len(trajectory.steps)) == (StopReason.CONTEXT_LIMIT, 4)
    assert all(step.summary_of is None for step in trajectory.steps)


async def test_a_model_that_counts_more_than_we_do_sums_less_up() -> None:
    trajectory = await play(Walk(max_messages=FULL - 2))
    assert trajectory.success
    summary_step = next(step for step in trajectory.steps if step.summary_of is not None)
    assert summary_step.summary_of == 2


async def test_the_last_reply_that_an_episode_may_have_is_no_summary() -> None:
    assert [step.summary_of for step in (await play(Walk(), max_steps=5)).steps] == [None] * 5
    assert [step.summary_of for step in (await play(Walk(), max_steps=6)).steps] == [None] * 4 + [4, None]


async def test_what_was_summed_up_has_had_its_tokens() -> None:
    trajectory = await play(Walk(), limits=EpisodeLimits(tokens=400))
    assert trajectory.stop is StopReason.TOKEN_LIMIT
    spent = sum(len(step.reply) + len(step.observation) for step in trajectory.steps)
    assert 380 <= spent <= 420


async def test_no_count_of_invalid_actions_or_repeats_knows_of_a_summary() -> None:
    class Still(Far):
        def state(self) -> str:
            return "here"

    trajectory = await play(Walk(), env=Still(), repeats=6)
    assert (trajectory.stop, len(trajectory.steps)) == (StopReason.REPEATS, 7)
    replies: list[Reply] = []
    await play(Walk(), max_steps=20, on_reply=replies.append)
    assert count_invalid(replies) == 0


async def test_tool_results_are_summed_up_after_a_request_in_a_turn_of_its_own() -> None:
    class NativeFar(Far):
        transcript = NativeTurns(tools=(TOOL,))

    class CallingWalk(Walk):
        async def __call__(self, request: Request) -> list[Generation]:
            (generation,) = await super().__call__(request)
            if generation.text == "Action: right":
                generation = replace(generation, text=call_reply(TOOL, "right"))
            return [generation]

    policy = CallingWalk()
    trajectory = await play(policy, env=NativeFar(), max_steps=8, room=FULL + 3)
    # The request takes a turn, too.
    assert [step.summary_of for step in trajectory.steps] == [None, None, None, 3, None, None, 6, None]
    summary_prompt, next_prompt = policy.requests[3].messages, policy.requests[4].messages
    assert texts(summary_prompt)[-2:] == [("tool", "You are at 0."), ("user", PROMPT)]
    assert [message.role for message in next_prompt] == ["tools", "system", "user", "assistant", "tool"]
    assert next_prompt[2].text == f"{trajectory.first_observation}\n\n{PROMPT}"


async def test_pairs_of_summed_up_episodes_are_turned_away() -> None:
    win, loss = await play(Walk()), await play(Walk(), max_steps=20)
    sides = [StoredTrajectory(id=name, trajectory=trajectory) for name, trajectory in (("won", win), ("lost", loss))]
    _, rejections = pair_of_own(sides, Far(), PreferencesConfig())
    assert [rejection.reason for rejection in rejections] == ["summed-up"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["method=agent-r"], "context: method agent-r puts parts of different episodes together"),
        (["method=et-agent"], "context: method et-agent puts parts of different episodes together"),
        (["method=grpo", "grpo.credit=siblings"], "grpo.credit: siblings compares what was done in one state"),
        (["method=grpo", "context=stop", "summary.max_new_tokens=9"], "summary: has no use without context: summary"),
        (["method=grpo", "context=window"], "set summary, or leave it out"),
    ],
)
def test_a_recipe_in_which_a_summary_makes_no_sense_is_refused(overrides: list[str], sentence: str) -> None:
    plain = {"name": "far", "environment": {"name": "textcraft"}, "model": {"path": "m"}, "context": "summary"}
    with pytest.raises(ConfigError, match=sentence):
        parse(plain, overrides)


def test_a_plan_counts_summaries() -> None:
    plain = {"name": "far", "method": "grpo", "environment": {"name": "textcraft"}, "model": {"path": "m"}}
    bounds = [
        group_demands(parse(plain, ["grpo.max_new_tokens=100", f"context={context}"]), 0)["groups"]
        for context in ("stop", "summary")
    ]
    assert [bound.tokens // bound.replies for bound in bounds] == [100, 256]


def test_a_world_without_a_history_in_turns_is_refused() -> None:
    class Grows(Far):
        transcript = Continuation(stop=("</act>",))

    class Once(Far):
        step_limit = 1

    with pytest.raises(ConfigError, match="replies and answers to them in turns, which line does not have"):
        summarisable_transcript(Grows())
    with pytest.raises(ConfigError, match="an episode of line has a single step"):
        summarisable_transcript(Once())
