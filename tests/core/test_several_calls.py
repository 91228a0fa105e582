"""Several native calls in one reply: how they are read, answered, trained and sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolboxes import Bench
from toy import Line, Policy, instance

from agentr_core.environments import registry
from agentr_core.environments.native import (
    ACT_TOOL,
    NOT_MADE_RESULT,
    actions_in,
    is_misread,
    join_actions,
    misread_action,
    native_class,
)
from agentr_core.environments.reasoning.problems import Problem
from agentr_core.environments.reasoning.world import TOOLS, ReasoningWorld, Rules
from agentr_core.episodes.rollout import act, play_replies, restore_state, roll_out_episode
from agentr_core.episodes.transcript import (
    CALL_END,
    CALL_START,
    NativeCall,
    UnreadableCall,
    call_reply,
    call_text,
    format_results,
    max_droppable,
    read_calls,
    read_results,
    transcript_of,
    without_exchanges,
)
from agentr_core.errors import ReplayDiverged
from agentr_core.methods.et_agent.evaluate import cost, is_well_formed
from agentr_core.samples.dataset import count_dropped, split_windowed
from agentr_core.samples.identity import IGNORE_INDEX
from agentr_core.samples.rendering import Renderer
from agentr_core.store.codec.trajectories import load_trajectories, trajectory_rows
from agentr_core.store.database import Store
from agentr_core.system import LOOPBACK, data_path
from agentr_core.types import (
    Answer,
    Instance,
    Message,
    Question,
    Request,
    Sample,
    SampleKind,
    Sampling,
    Step,
    StopReason,
    ToolCall,
    Trajectory,
    Transition,
    Verdict,
)
from agentr_core.viewer.server import app

HOSTILE = st.lists(
    st.sampled_from((CALL_START, CALL_END, "<think>", "</think>", "\n", '"', "{", "}", "\\"))
    | st.text(st.characters(codec="utf-8")),
    max_size=6,
).map("".join)
"""Texts with the marks of calls and thoughts in them."""
CALLS = st.lists(st.tuples(HOSTILE, st.dictionaries(HOSTILE, HOSTILE, max_size=3)), min_size=1, max_size=4)
LOOK, WAIT = call_text("act", '{"action": "look"}'), call_text("act", '{"action": "wait"}')


def make_reply(calls: Sequence[tuple[str, Mapping[str, object]]], beside: str) -> str:
    """The reply that makes calls after a text."""
    for name, arguments in calls:
        beside = call_text(name, json.dumps(arguments, ensure_ascii=False), before=beside)
    return beside


@pytest.mark.slow
@given(
    CALLS,
    st.sampled_from(("", "I look.", f"<think>{LOOK} or {CALL_START}?</think>\nYes.", f"Or {CALL_END}?</think>Yes.")),
)
def test_calls_are_read_as_they_were_written(calls: list[tuple[str, dict[str, str]]], beside: str) -> None:
    assert read_calls(make_reply(calls, beside)) == tuple(NativeCall(*call, beside) for call in calls)


@pytest.mark.slow
@given(HOSTILE)
def test_no_reply_is_too_odd_to_be_read(reply: str) -> None:
    read_calls(reply)
    read_calls(f"{LOOK}{reply}{WAIT}")


@pytest.mark.parametrize(
    ("reply", "beside"),
    [
        (f"{LOOK}{WAIT}", ""),
        (f"First this.\n{LOOK}\nThen that.\n{WAIT}\nSo.", "First this.\n\nThen that.\n\nSo."),
        (f"{LOOK}<think>Then {WAIT}?</think>{WAIT}<think>and {LOOK}", f"<think>Then {WAIT}?</think><think>and {LOOK}"),
    ],
)
def test_what_stands_around_calls_is_beside_each_of_them(reply: str, beside: str) -> None:
    calls = read_calls(reply)
    assert calls == (("act", {"action": "look"}, beside), ("act", {"action": "wait"}, beside))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (f"{LOOK}{CALL_START}wait{CALL_END}", "it is not valid JSON (call 2; none was made)"),
        (f"{CALL_START}look{CALL_END}{WAIT}", "it is not valid JSON (call 1; none was made)"),
        (f"{LOOK}{WAIT}{CALL_START}{{", "it does not end with </tool_call> (call 3; none was made)"),
        (f"{LOOK}{CALL_START}[]{CALL_END}", 'it is no JSON object with "name" and "arguments" (call 2; none was made)'),
        (f"{CALL_START}look{CALL_END}", "it is not valid JSON"),
        (f"look{CALL_END}", "a call ends that was not opened"),
    ],
)
def test_the_call_that_cannot_be_read_is_named(reply: str, why: str) -> None:
    assert read_calls(reply) == UnreadableCall(why)


RIGHT, LEFT, JUMP = (call_reply(ACT_TOOL, words) for words in ("right", "left", "jump"))
NativeLine = native_class(Line)


def line() -> Any:
    """The line at its first place; the goal is three to the right."""
    env = NativeLine()
    env.reset(instance(1))
    return env


@given(st.lists(HOSTILE | st.just("calls: ") | st.just('calls: ["a"]'), min_size=1, max_size=4))
def test_actions_are_joined_and_taken_apart(actions: list[str]) -> None:
    assert actions_in(join_actions(actions)) == actions


@pytest.mark.parametrize(
    "action", ["", "right", "calls: ", "calls: [", 'calls: ["a", 1]', "calls: []", 'calls: {"a": 1}']
)
def test_a_single_action_is_the_text_that_it_is(action: str) -> None:
    assert actions_in(action) == [action]


@given(st.lists(HOSTILE, min_size=2, max_size=4))
def test_results_are_read_as_they_were_written(results: list[str]) -> None:
    text = format_results(results)
    assert read_results(text, len(results)) == tuple(results)
    assert read_results(text, len(results) + 1) is None
    assert read_results(text, 1) == (text,)
    assert format_results(results[:1]) == results[0]


def test_the_calls_of_a_reply_are_made_in_their_order() -> None:
    env = line()
    first = act(env, f"Back and forth.\n{RIGHT}\n{LEFT}\n{RIGHT}").step
    assert first.action == 'calls: ["right", "left", "right"]'
    assert read_results(first.observation, 3) == ("You are at 1.", "You are at 0.", "You are at 1.")
    assert (first.reward, first.valid, first.terminated) == (0.0, True, False)
    second = act(env, f"{RIGHT}{call_text('fly', '{}')}{RIGHT}").step
    assert is_misread(second.action)
    places = ("You are at 2.", "The call could not be read: there is no such tool; there are act.", "You are at 3.")
    assert read_results(second.observation, 3) == places
    assert (second.reward, second.valid, second.success, second.terminated) == (1.0, False, True, True)


@pytest.mark.parametrize(
    ("calls", "reward", "stop"),
    [
        (RIGHT * 3 + LEFT, 1.0, StopReason.SUCCESS),
        (call_reply(ACT_TOOL, "stop") + RIGHT, 0.0, StopReason.FAILURE),
        (RIGHT + call_reply(ACT_TOOL, "stop") + RIGHT, 1 / 3, StopReason.FAILURE),
        (JUMP + RIGHT, 0.0, StopReason.DISASTER),
    ],
)
def test_a_call_after_the_end_is_not_made(calls: str, reward: float, stop: StopReason) -> None:
    env = line()
    outcome = act(env, calls)
    assert outcome.step.reward == pytest.approx(reward)
    assert outcome.stop == stop
    *_, last = read_results(outcome.step.observation, calls.count(CALL_START)) or ()
    assert last == NOT_MADE_RESULT
    assert env.steps == calls.count(CALL_START) - 1


def test_an_episode_with_several_calls_is_replayed() -> None:
    _, outcomes = play_replies(NativeLine(), instance(2), [RIGHT + LEFT, RIGHT + RIGHT])
    steps = [outcome.step for outcome in outcomes]
    env = NativeLine()
    restore_state(env, instance(2), steps)
    assert act(env, RIGHT + RIGHT).step.success
    false_step = replace(steps[0], observation=steps[0].observation.replace("at 0", "at 5"))
    with pytest.raises(ReplayDiverged, match="observation 0 after"):
        restore_state(NativeLine(), instance(2), [false_step, steps[1]])


@pytest.mark.slow
def test_a_world_with_verdicts_judges_a_step_by_its_worst_call() -> None:
    env = registry.make("textcraft", {}, transcript="native")
    plain = registry.make("textcraft", {})
    try:
        task = next(each for each in env.instances("train") if len(env.expert(each) or ()) > 2)
        actions = [plain.parse(reply) for reply in plain.expert(task) or ()]
        assert set(env.oracle(task, [join_actions(actions[:2]), *actions[2:]])) == {Verdict.GOOD}
        assert env.oracle(task, [join_actions([actions[0], "get 1 nothing"]), *actions[1:]])[0] == Verdict.BAD
    finally:
        env.close()
        plain.close()


class Resuming(Line):
    """A line that goes on from recorded steps without taking them."""

    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        observation = self.reset(instance)
        assert all(step.observation.startswith("You are at ") for step in steps)
        self._place = sum({"right": 1, "left": -1}.get(step.action, 0) for step in steps)
        return observation


def test_a_world_that_goes_on_from_recorded_steps_is_told_each_call() -> None:
    kind = native_class(Resuming)
    _, outcomes = play_replies(kind(), instance(2), [RIGHT + RIGHT + LEFT, RIGHT])
    restore_state(env := kind(), instance(2), [outcome.step for outcome in outcomes])
    assert env.steps == 0
    assert act(env, RIGHT + RIGHT).step.success


def test_a_step_that_was_stored_as_misread_stays_a_users_turn() -> None:
    """Until several calls were read, the reply with two was told so, in words."""
    message = "The call could not be read: there are several calls, and a reply may have one."
    step = Step(reply=RIGHT + LEFT, action=misread_action(UnreadableCall("several")), observation=message, reward=0.0)
    turns = transcript_of(NativeLine()).prompt(NativeLine(), "Go.", [step])
    assert turns[-1] == Message(role="user", text=message)
    list_of_one = Step(reply=RIGHT, action="right", observation='[{"role": "tool", "content": "x"}]', reward=0.0)
    turns = transcript_of(NativeLine()).prompt(NativeLine(), "Go.", [list_of_one])
    assert turns[-1] == Message(role="tool", text=list_of_one.observation)


class Saying(Policy):
    """Says these replies in turn."""

    def __init__(self, *replies: str) -> None:
        super().__init__()
        self.replies = iter(replies)

    def reply(self, request: Request, number: int) -> str:
        return next(self.replies)


class Asking(Line):
    """A line on which looking asks a model what there is to see."""

    def step(self, action: str) -> Transition:
        transition = super().step(action)
        question = Question(role="summariser", messages=(Message(role="user", text=transition.observation),))
        return transition._replace(info={**transition.info, "question": question}) if action == "look" else transition

    def answer(self, reply: str) -> Transition:
        call = ToolCall(tool="search", key="x", status="ok")
        return Transition(f"You see {reply}.", 0.0, False, False, {"success": False, "tool_calls": (call,)})


async def test_calls_ask_models_one_after_the_other() -> None:
    async def helper(question: Question, *, seed: int, session: str) -> Answer:
        assert question.messages[0].text == "You are at 0."
        counts: dict[str, Any] = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
        text = f"lamp {seed % 1000}"
        return Answer(role="summariser", model="m", prompt_hash="p", seed=seed, text=text, **counts)

    replies = Saying(LOOK + LOOK + RIGHT, RIGHT)
    env = native_class(Asking)()
    trajectory = await roll_out_episode(
        instance(1), env, replies, max_steps=2, sampling=Sampling(), seed=3, helper=helper
    )
    step = trajectory.steps[0]
    texts = [f"You see {answer.text}." for answer in step.answers]
    assert len(set(texts)) == 2
    assert read_results(step.observation, 3) == (*texts, "You are at 1.")
    assert len(step.tool_calls) == 2
    second_env = native_class(Asking)()
    assert restore_state(second_env, trajectory.instance, [step]) == trajectory.first_observation
    assert second_env.step("right").observation == "You are at 2."


MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
STEPS = tuple(
    Step(reply=reply, action="", observation=observation, reward=0.0, finish_reason="stop")
    for reply, observation in (
        (RIGHT + LEFT, format_results(["You are at 1.</tool_response><|im_end|>", "You are at 0."])),
        ("I rest.", "Call one."),
        (RIGHT, "You are at 1."),
        (f"<think>{RIGHT}?</think>{LEFT}{LEFT}{RIGHT}", format_results(["", "b", "c"])),
        (RIGHT, "You are at 2."),
    )
)
"""Replies with two calls, none, one, three and one."""
TOLD = [*("assistant", "tool", "tool"), *("assistant", "user"), *("assistant", "tool"), "assistant", *("tool",) * 3]


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen3", "qwen2.5"])
def test_each_prompt_is_a_prefix_of_the_sample_and_results_carry_no_loss(
    template: str, make_tiny_tokenizer: Callable[..., Any]
) -> None:
    text = data_path("chat_templates", f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tiny_tokenizer(template=text)
    tokenizer.add_tokens(MARKS)
    renderer, env = Renderer(tokenizer), NativeLine()
    kind = transcript_of(env)
    train = [True, True, False, True, True]
    messages = kind.sample(env, "Go.", STEPS, train)
    assert [message.role for message in messages] == ["tools", "system", "user", *TOLD, "assistant"]
    ids, labels = renderer.render_sample(messages)
    for k, step in enumerate(STEPS):
        prompt = renderer.render_prompt(kind.prompt(env, "Go.", STEPS[:k]))
        assert ids[: len(prompt)] == prompt
        reply = tokenizer(step.reply)["input_ids"]
        assert ids[len(prompt) : len(prompt) + len(reply)] == reply
        assert (labels[len(prompt)] == IGNORE_INDEX) is not train[k]
    trained = tokenizer.decode([label for label in labels if label != IGNORE_INDEX])
    assert trained == "".join(f"{step.reply}<|im_end|>" for step, flag in zip(STEPS, train, strict=True) if flag)
    text = tokenizer.decode(ids)
    assert "<|im_start|>user\n<tool_response>\n\n</tool_response>\n<tool_response>\nb\n</tool_response>" in text
    assert text.count("<|im_start|>user") == 5, "results of one reply are one turn"


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen3", "qwen2.5"])
def test_results_are_rendered_as_the_published_template_renders_them(
    template: str, make_tiny_tokenizer: Callable[..., Any]
) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    messages += [{"role": "tool", "content": text} for text in "abc"]
    file = f"chat_templates/{'qwen3' if template == 'qwen3' else 'qwen2_5'}.jinja"
    texts = [
        make_tiny_tokenizer(template=source.read_text(encoding="utf-8")).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        for source in (data_path("chat_templates", f"{template}.jinja"), files("trl").joinpath(file))
    ]
    ours, theirs = (text.replace("<think>\n\n</think>\n\n", "") for text in texts)
    assert ours == theirs


def test_a_window_leaves_out_whole_exchanges() -> None:
    env = NativeLine()
    kind = transcript_of(env)
    prompt = kind.prompt(env, "Go.", STEPS)
    assert max_droppable(prompt) == 4
    assert [max_droppable(kind.prompt(env, "Go.", STEPS[:k])) for k in range(5)] == [0, 0, 1, 2, 3]
    # The opening with the first reply, then what answers each reply, and the next one.
    ends = [len(kind.sample(env, "Go.", STEPS[:k], [False] * k)) for k in range(1, 6)]
    for num_dropped, end in enumerate(ends):
        assert without_exchanges(prompt, num_dropped) == prompt[: ends[0]] + prompt[end:]
    sample = Sample(kind=SampleKind.GOOD, messages=kind.sample(env, "Go.", STEPS, [True] * 5), instance=None)
    numbers = count_dropped(sample.messages, lambda messages: len(messages) < 12)
    assert numbers == (0, 0, 0, 0, 1)
    stretches = split_windowed(sample, numbers, "stretches", stage="s", subject="x")
    assert isinstance(stretches, tuple)
    assert [[turn.role for turn in each.messages[3:]] for each in stretches] == [
        TOLD[:8],
        ["assistant", *TOLD[4:], "assistant"],
    ]
    assert [sum(turn.train for turn in each.messages) for each in stretches] == [4, 1]


# Questions with tools.

FIND, SUM, BAD = (
    call_reply(TOOLS[tool], text)
    for tool, text in (("search", "Ostra"), ("python", "print(6 * 7)"), ("python", "</python>"))
)


def questions(**rules: Any) -> Any:
    problem = Problem(id="q", question="Which river?", golds=("Red River",), source="made", domain="knowledge")
    bench = Bench({"Ostra": "Ostra lies on the Red River."})
    return native_class(ReasoningWorld)({"train": (problem,), "test": (problem,)}, bench, Rules(**rules))


def test_several_calls_of_tools_are_run_and_counted() -> None:
    env = questions(search_calls=1, python_calls=2, spare_replies=3)
    task = env.instances("train")[0]
    replies = [f"Both, or \\boxed{{5}}.\n{FIND}\n{SUM}", FIND + SUM + SUM + BAD, "\\boxed{Red River}"]
    _, outcomes = play_replies(env, task, replies)
    first, second, third = (outcome.step for outcome in outcomes)
    passage, none_left = "Ostra\nOstra lies on the Red River.", "No such call is left. Answer with what you know."
    assert first.action == 'calls: ["<search>Ostra</search>", "<python>print(6 * 7)</python>"]'
    assert read_results(first.observation, 2) == (passage, "42")
    assert [(call.tool, call.key) for call in first.tool_calls] == [("search", "Ostra"), ("python", "print(6 * 7)")]
    unread = "The call could not be read: a python cannot hold its own tags."
    assert read_results(second.observation, 4) == (none_left, "42", none_left, unread)
    assert ([call.tool for call in second.tool_calls], first.valid, second.valid) == (["python"], True, False)
    assert third.success
    trajectory = Trajectory.ended(task, "Which river?", (first, second, third), StopReason.SUCCESS)
    assert (cost(trajectory, "calls"), cost(trajectory, "calls", refused=True)) == (3, 5)
    assert not is_well_formed(trajectory, "steps")
    # What was counted stands again, without a call of a tool.
    second_env = questions(search_calls=1, python_calls=2, spare_replies=3)
    restore_state(second_env, task, [first, second])
    assert second_env._toolbox.calls == []
    assert replace(second_env.snapshot(), is_resumed=False, text="") == replace(
        at(questions, replies[:2]), is_resumed=False
    )


def at(make: Callable[..., Any], replies: Sequence[str]) -> Any:
    """The state of an episode after replies."""
    env = make(search_calls=1, python_calls=2, spare_replies=3)
    play_replies(env, env.instances("train")[0], replies)
    return env.snapshot()


def test_calls_beyond_the_limits_use_up_spare_replies() -> None:
    env = questions(search_calls=1, spare_replies=1)
    env.reset(env.instances("train")[0])
    outcome = act(env, FIND * 4)
    none_left = "No such call is left. Answer with what you know."
    passage = "Ostra\nOstra lies on the Red River."
    assert read_results(outcome.step.observation, 4) == (passage, none_left, none_left, NOT_MADE_RESULT)
    assert outcome.stop == StopReason.FAILURE


@pytest.mark.slow
async def test_the_page_of_an_episode_shows_each_result(tmp_path: Path) -> None:
    observation, outcomes = play_replies(NativeLine(), instance(1), [RIGHT + LEFT, RIGHT])
    trajectory = Trajectory.ended(
        instance(1), observation, [outcome.step for outcome in outcomes], StopReason.STEP_LIMIT
    )
    store = Store(tmp_path / "store.duckdb")
    store.write(trajectory_rows("t" * 20, trajectory, source="rollout"))
    assert load_trajectories(store, ["t" * 20])["t" * 20] == trajectory
    viewer = app(store.path, index=tmp_path / "texts.sqlite", hosts=LOOPBACK)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(viewer), base_url="http://localhost:4280") as pages:
        page = (await pages.get(f"/trajectory/{'t' * 20}")).text
    texts = re.findall(r'<pre class="observation" dir="auto">(.*?)</pre>', page)
    assert [text for text in texts if text.startswith("You are")] == ["You are at 1.", "You are at 0.", "You are at 1."]
    assert "[{" not in page
