"""Outside agents on a real gateway: what they send and get, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from asgi import running
from outside import HELLO, Agent, asked, played, said, sent, world

from agentr_core.environment import Undelivered
from agentr_core.environments.gateway import broker
from agentr_core.environments.gateway.server import app
from agentr_core.episodes.rollout import restore_state
from agentr_core.episodes.transcript import conversations
from agentr_core.errors import ConfigError, EnvironmentTimeout, EnvironmentUnavailable, PromptTooLong
from agentr_core.types import Instance, Message, Step, StopReason

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
def url() -> Iterator[str]:
    with running(app()) as address:
        yield address


async def test_an_agents_calls_become_the_steps_of_an_episode_with_its_reward(url: str) -> None:
    def play(agent: Agent) -> Any:
        opening = [{"role": "system", "content": [{"type": "text", "text": "Be short."}]}, HELLO]
        completion = agent.ask(*opening)
        # White space at the ends of a reply is the agent's own affair.
        answer = agent.says(*opening, said(f" {completion.choices[0].message.content}\n"), asked("More."))
        agent.end(reward=0.5)
        return completion, answer, agent.told

    trajectory, (completion, answer, episode), env = await played(url, play)
    assert (episode["split"], episode["index"], episode["task"]) == ("train", 1, None)
    assert (answer, completion.usage.prompt_tokens, completion.usage.completion_tokens) == ("reply 4", 5, 2)
    assert [step.reply for step in trajectory.steps] == ["reply 2", "reply 4"]
    assert [step.observation for step in trajectory.steps] == ["More.", ""]
    assert (trajectory.reward, trajectory.success, trajectory.stop) == (0.5, False, StopReason.FAILURE)
    ((positions, messages, _),) = conversations(env, trajectory)
    assert positions == (0, 1)
    assert [(m.role, m.text, m.train) for m in messages] == [
        ("system", "Be short.", False),
        ("user", "Hello.", False),
        ("assistant", "reply 2", True),
        ("user", "More.", False),
        ("assistant", "reply 4", True),
    ]


async def test_a_history_that_was_changed_begins_another_conversation(url: str) -> None:
    def play(agent: Agent) -> None:
        agent.says(HELLO)
        agent.says(HELLO, said("something else"), asked("On."))
        agent.says(HELLO, said("something else"), asked("On."), said("reply 3"), asked("And on."))
        agent.end(reward=1)

    trajectory, _, env = await played(url, play)
    parts = conversations(env, trajectory)
    assert [part.positions for part in parts] == [(0,), (1, 2)]
    assert [[m.text for m in part.messages if m.train] for part in parts] == [["reply 1"], ["reply 3", "reply 5"]]
    assert [m.text for m in parts[1].messages][:3] == ["Hello.", "something else", "On."]
    assert (trajectory.reward, trajectory.success) == (1.0, True)


async def test_tools_are_offered_called_and_answered(url: str) -> None:
    def call(messages: tuple[Message, ...], seed: int, number: int) -> str:
        return (
            "Done." if messages[-1].role == "tool" else 'So.\n<tool_call>\n{"name":"look","arguments":{}}\n</tool_call>'
        )

    def play(agent: Agent) -> Any:
        choice = agent.ask(HELLO, tools=TOOLS).choices[0]
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "A door."}
        last = agent.says(HELLO, choice.message.model_dump(exclude_none=True), result, tools=TOOLS)
        agent.end(reward=0, success=True)
        return choice, last

    trajectory, (choice, last), env = await played(url, play, reply=call)
    assert (choice.finish_reason, choice.message.content, last) == ("tool_calls", "So.", "Done.")
    assert (choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments) == (
        "look",
        "{}",
    )
    ((_, messages, _),) = conversations(env, trajectory)
    assert [message.role for message in messages] == ["tools", "user", "assistant", "tool", "assistant"]
    assert json.loads(messages[0].text) == TOOLS
    assert (trajectory.success, trajectory.reward) == (True, 0.0)


async def test_an_answer_can_be_a_stream_and_several_calls_wait_for_each_other(url: str) -> None:
    def play(agent: Agent) -> Any:
        usage = {"include_usage": True}
        events = list(agent.ask(HELLO, stream=True, stream_options=usage))
        with ThreadPoolExecutor(3) as pool:
            answers = sorted(pool.map(lambda n: agent.says(asked(f"Number {n}.")), range(3)))
        agent.end(reward=1)
        return events, answers

    trajectory, (events, answers), env = await played(url, play)
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert (text, events[-1].usage.completion_tokens, answers) == ("reply 1", 2, ["reply 1"] * 3)
    assert len(conversations(env, trajectory)) == 4


async def test_what_cannot_be_answered_is_refused_in_a_sentence(url: str) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}

    def refusal(ask: Callable[[], Any]) -> str:
        with pytest.raises(openai.APIStatusError) as error:
            ask()
        return str(error.value.message)

    def play(agent: Agent) -> Any:
        names = [model.id for model in agent.client.models.list()]
        names.append(agent.ask(HELLO, model="gpt-4").model)
        refusals = [
            refusal(lambda: agent.says(HELLO, n=2)),
            refusal(lambda: agent.says(image)),
            refusal(lambda: agent.says()),
            refusal(lambda: agent.says(HELLO, said("I begin with"))),
        ]
        agent.says(HELLO)
        reward_error = agent.end(reward=2).json()["error"]["message"]
        agent.end(reward=1)
        return names, refusals, reward_error, refusal(lambda: agent.says(HELLO)), agent.end(reward=0).status_code

    _, (names, refusals, reward_error, late_refusal, status), _ = await played(url, play)
    assert names == ["policy", "gpt-4"]
    parts = (
        "n: Input should be 1",
        "messages.0.content: a part of type 'image_url' is no text; the gateway takes text",
        "messages: ",
        "the last turn is the assistant's; end with one of the user, a tool or the system",
    )
    for sentence, part in zip(refusals, parts, strict=True):
        assert part in sentence
    assert reward_error == "reward: Input should be less than or equal to 1"
    assert "is over: its reward was reported; take another one with POST /episodes" in late_refusal
    assert status == 410


@pytest.mark.parametrize(
    ("context", "max_steps", "stop", "sentence"),
    [
        (8, 9, StopReason.CONTEXT_LIMIT, "leaves no room for a reply in the context of 8"),
        (100, 2, StopReason.STEP_LIMIT, "it has had all its steps"),
    ],
)
async def test_an_agent_is_told_why_its_episode_ended(
    url: str, context: int, max_steps: int, stop: StopReason, sentence: str
) -> None:
    def play(agent: Agent) -> str:
        history = [HELLO]
        for _ in range(max_steps + 1):
            try:
                history += [said(agent.says(*history)), asked("Go on.")]
            except (openai.BadRequestError, openai.NotFoundError) as refusal:
                return refusal.message
        return "nothing"

    trajectory, reason, _ = await played(url, play, context=context, max_steps=max_steps, patience_s=2)
    assert trajectory.stop is stop
    assert sentence in reason


async def test_a_repeated_request_gets_the_reply_that_was_given(url: str) -> None:
    def play(agent: Agent) -> list[str]:
        retry = {"x-stainless-retry-count": "1"}
        replies = [agent.says(HELLO), agent.says(HELLO, extra_headers=retry), agent.says(HELLO)]
        agent.end(reward=1)
        return replies

    numbers = iter(range(10))
    trajectory, replies, _ = await played(url, play, reply=lambda *_: f"draw {next(numbers)}")
    assert replies == ["draw 0", "draw 0", "draw 1"]
    assert [step.reply for step in trajectory.steps] == ["draw 0", "draw 1"]


async def test_an_agent_that_gives_up_or_dies_is_a_fault_that_may_heal(url: str) -> None:
    with pytest.raises(EnvironmentUnavailable, match="the agent gave it up: no world"):
        await played(url, lambda agent: agent.end("failed", reason="no world"))
    with pytest.raises(EnvironmentTimeout, match=r"the agent of episode \w+ was silent"):
        # As long as an agent may take on a busy machine to come at all.
        await played(url, lambda agent: agent.says(HELLO), patience_s=3)
    with pytest.raises(EnvironmentTimeout, match="every agent was silent"):
        world(url, patience_s=0.1).reset(Instance(environment="gateway", split="test", index=0))


def test_an_episode_without_room_is_played_anew_if_the_gateway_went_away(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reply: Any, **_: Any) -> Any:
        raise EnvironmentUnavailable("the gateway cannot be reached")

    env = world(url)
    monkeypatch.setattr(env, "_next_event", fail)
    env._is_over = False
    with pytest.raises(EnvironmentUnavailable) as fault:
        env.decline(PromptTooLong.counted(9, 8, "m"))
    assert not isinstance(fault.value, Undelivered)
    # Its agent gave up.
    env._is_over = True
    with pytest.raises(Undelivered) as error:
        env.decline(PromptTooLong.counted(9, 8, "m"))
    assert error.value.stop is StopReason.CONTEXT_LIMIT


def test_a_run_is_told_why_the_gateway_ended_its_episode(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told that the gateway had been started anew."""
    monkeypatch.setattr(broker, "_REPLY_SECONDS", 0.5)
    env = world(url)
    with ThreadPoolExecutor(1) as outside:
        future = outside.submit(sent, url, lambda agent: agent.says(HELLO))
        env.reset(env.instances("train")[0])
        with pytest.raises(openai.APIStatusError, match="is over: the run gave no reply"):
            future.result()
    with pytest.raises(EnvironmentUnavailable, match=r"episode \w+ was lost: the run gave no reply within"):
        env.step("late")
    env.close()

    monkeypatch.setattr(broker, "_RUN_SECONDS", 0.0)
    with httpx.Client(base_url=url) as http:
        offer = {"environment": "gateway", "split": "train", "index": 0}
        episode = http.post("/run/open", json=offer).json()
        assert http.post("/episodes", json={"wait": 0}).status_code == 204
        event = http.post("/run/next", json=episode).json()
        assert event == {"event": "lost", "why": "its run did not ask about it for 0 s"}
        unknown = http.post("/run/next", json={"episode": "elsewhere"})
    assert unknown.status_code == 503
    assert unknown.json()["error"]["message"] == "episode elsewhere is gone: the gateway was started anew"


def test_recorded_steps_are_played_again_without_a_model(url: str) -> None:
    def play(agent: Agent) -> list[str]:
        answer = agent.says(HELLO)
        return [answer, agent.says(HELLO, said(answer), asked("More."))]

    env = world(url)
    instance = env.instances("train")[0]
    with ThreadPoolExecutor(1) as outside:
        future = outside.submit(sent, url, play)
        first_observation = env.reset(instance)
        observation = env.step("one").observation
        assert (first_observation, observation) == ("Hello.", "More.")
        env.release()
        with pytest.raises(openai.NotFoundError):
            future.result()
        next_future = outside.submit(sent, url, play)
        assert (
            restore_state(env, instance, [Step(reply="one", action="one", observation="More.", reward=0.0)]) == "Hello."
        )
        env.close()
        with pytest.raises(openai.NotFoundError, match="is over"):
            next_future.result()


def test_options_that_cannot_be_used_are_told(url: str, tmp_path: Any) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"url": ""}, "AGENTR_GATEWAY"),
        ({"url": "nowhere"}, "must look like"),
        ({"splits": {}}, "splits"),
        ({"splits": {"train": 0}}, "splits.train"),
        ({"repeatability": "often"}, "repeatability"),
    )
    for options, sentence in wrong:
        with pytest.raises(ConfigError, match=sentence):
            world(**{"url": url, **options})
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"goal": "a bed"}\n{"goal": "a chair"}\n')
    env = world(url, splits={"train": str(file), "test": 1})
    assert [env.identity(instance) for instance in env.instances("train")] == ['{"goal":"a bed"}', '{"goal":"a chair"}']
    env.reach()
