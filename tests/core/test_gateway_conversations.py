"""The conversations of an outside agent: known again however it spells them, and trained as they
were read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import Line, instance

from agentr_core.environments.gateway.conversations import (
    CallTurn,
    Conversations,
    OutsideTurns,
    Prompt,
    call_ids,
    prompts_of,
)
from agentr_core.episodes.transcript import call_text, turn_texts, whole_episode
from agentr_core.methods.agent_r.splice import path_provenance
from agentr_core.methods.eto.preferences import StoredTrajectory, pair_of_own
from agentr_core.recipes.eto import PreferencesConfig
from agentr_core.samples.dataset import prompt_of
from agentr_core.stages.dataset import whole_samples
from agentr_core.types import Message, Sample, Step, StopReason, Trajectory, TreePath

SYSTEM = CallTurn("system", "Play.")
TASK = CallTurn("user", "Build a bed.")
ON = CallTurn("user", "Go on.")
TOOLS = CallTurn("tools", json.dumps([{"type": "function", "function": {"name": "look"}}]))
LOOK = call_text("look", '{"at": "the door"}', before="I look.")


def assistant(text: str, *ids: str) -> CallTurn:
    return CallTurn("assistant", text, ids)


class Agent:
    """An agent whose calls are replied to: what it sent becomes an episode."""

    def __init__(self) -> None:
        self.conversations = Conversations()
        self.first = ""
        self.steps: list[Step] = []
        self.prompts: list[Prompt] = []
        self.ids: list[tuple[str, ...]] = []

    def call(self, *turns: CallTurn, reply: str = "") -> CallTurn:
        """Send a history and return the assistant's turn that comes back."""
        prompt, observation = self.conversations.match_call(turns)
        if self.steps:
            self.steps[-1] = replace(self.steps[-1], observation=observation)
        else:
            self.first = observation
        self.prompts.append(prompt)
        number = len(self.steps)
        text = reply or f"reply {number}"
        self.ids.append(self.conversations.add(prompt, text))
        self.steps.append(Step(reply=text, action=text, observation="", reward=0.0, token_ids=(number, 7)))
        return assistant(text, *self.ids[-1])

    def parts(self, **options: Any) -> list[list[str]]:
        """Return of each conversation the roles and texts of its turns, the trained ones in
        capitals, a side conversation after a mark.
        """
        return [
            [*(["side"] if part.side else []), *(m.text.upper() if m.train else m.text for m in part.messages)]
            for part in OutsideTurns(**options).parts(self.first, self.steps)
        ]


def test_a_history_that_goes_on_is_one_conversation_and_its_observations_are_plain() -> None:
    agent = Agent()
    reply_0 = agent.call(SYSTEM, TASK)
    reply_1 = agent.call(SYSTEM, TASK, reply_0, ON)
    agent.call(SYSTEM, TASK, assistant("\n reply\n0 "), ON, reply_1, ON)
    assert [step.observation for step in agent.steps] == ["Go on.", "Go on.", ""]
    assert agent.parts() == [["Play.", "Build a bed.", "REPLY 0", "Go on.", "REPLY 1", "Go on.", "REPLY 2"]]


def test_replies_are_known_by_the_ids_of_their_calls_whatever_becomes_of_their_texts() -> None:
    agent = Agent()
    opening = (TOOLS, TASK)
    call = agent.call(*opening, reply=LOOK)
    result = CallTurn("tool", "A door.", call.ids)
    # Its thought is lost, its arguments are written otherwise, and its text is gone.
    respelling = assistant(call_text("look", '{"at":"the door"}'), *call.ids)
    answer = agent.call(*opening, respelling, result)
    assert json.loads(agent.steps[0].observation) == [
        {"role": "anew", "after": 0, "turns": 3, "respelled": 1},
        {"role": "tool", "content": "A door."},
    ]
    # Its call is text now, with the id in it.
    agent.call(*opening, assistant(f"Calling tools: [{{'id': '{call.ids[0]}'}}]"), result, answer, ON)
    assert agent.prompts[1:] == [
        (*agent.prompts[0], 0, Message(role="tool", text="A door.")),
        (*agent.prompts[1], 1, Message(role="user", text="Go on.")),
    ]
    ((_, _, *turns),) = agent.parts()
    assert turns == [LOOK.upper(), "A door.", "REPLY 1", "Go on.", "REPLY 2"]


def test_an_id_of_another_episode_names_nothing() -> None:
    (foreign,) = call_ids(0, call_text("look", '{"at": "the wall"}'))
    agent = Agent()
    call = agent.call(TOOLS, TASK, reply=LOOK)
    assert call.ids != (foreign,)
    agent.call(TOOLS, TASK, assistant("Something.", foreign), CallTurn("tool", "A wall.", (foreign,)))
    assert agent.prompts[1][2] == Message(role="assistant", text="Something.")


def test_a_person_reads_each_turn_apart() -> None:
    agent = Agent()
    call = agent.call(TOOLS, TASK, reply=LOOK)
    result = CallTurn("tool", "A door.", call.ids)
    agent.call(TOOLS, TASK, call, result)
    agent.call(TOOLS, SYSTEM, TASK, call, result)
    first, second, _ = (turn_texts(step.observation) for step in agent.steps)
    assert first == ("A door.",)
    assert second[:1] + second[3:] == (
        "Another conversation with the first 1 turns of that of reply 1.",
        "assistant: reply 0, as it was sampled",
        "A door.",
    )
    assert turn_texts("Got 1 oak log") == ("Got 1 oak log",)
    for broken in ('[{"role": ', '[{"role": 1}]', '[{"role": "user"}, 3]'):
        assert turn_texts(broken) == (broken,)


def test_two_threads_in_turn_are_two_conversations() -> None:
    agent = Agent()
    left: tuple[CallTurn, ...] = (SYSTEM, TASK)
    right: tuple[CallTurn, ...] = (SYSTEM, CallTurn("user", "Build a boat."))
    for _ in range(3):
        left = (*left, agent.call(*left), ON)
        right = (*right, agent.call(*right), ON)
    assert agent.parts() == [
        ["Play.", "Build a bed.", "REPLY 0", "Go on.", "REPLY 2", "Go on.", "REPLY 4"],
        ["Play.", "Build a boat.", "REPLY 1", "Go on.", "REPLY 3", "Go on.", "REPLY 5"],
    ]
    heads = [json.loads(step.observation)[0] for step in agent.steps[1:5]]
    assert [(head["after"], head["turns"]) for head in heads] == [(0, 3), (1, 3), (2, 5), (3, 5)]


def test_a_conversation_that_was_summed_up_goes_on_from_its_summary() -> None:
    agent = Agent()
    reply_0 = agent.call(SYSTEM, TASK)
    summary = agent.call(SYSTEM, TASK, reply_0, CallTurn("user", "Sum up."))
    agent.call(SYSTEM, CallTurn("user", f"So far: {summary.text}"))
    assert agent.parts() == [
        ["Play.", "Build a bed.", "REPLY 0", "Sum up.", "REPLY 1"],
        ["Play.", "So far: reply 1", "REPLY 2"],
    ]


def test_a_reply_that_was_dropped_is_trained_where_it_was_given() -> None:
    agent = Agent()
    agent.call(SYSTEM, TASK)
    reply_1 = agent.call(SYSTEM, TASK, CallTurn("user", "That was no call."))
    agent.call(SYSTEM, TASK, CallTurn("user", "That was no call."), reply_1, ON)
    assert agent.parts() == [
        ["Play.", "Build a bed.", "REPLY 0"],
        ["Play.", "Build a bed.", "That was no call.", "REPLY 1", "Go on.", "REPLY 2"],
    ]


def test_a_reply_from_which_two_conversations_go_on_is_trained_once() -> None:
    agent = Agent()
    reply_0 = agent.call(SYSTEM, TASK)
    for words in ("Left.", "Right."):
        agent.call(SYSTEM, TASK, reply_0, CallTurn("user", words))
    assert agent.parts() == [
        ["Play.", "Build a bed.", "REPLY 0", "Left.", "REPLY 1"],
        ["Play.", "Build a bed.", "reply 0", "Right.", "REPLY 2"],
    ]


def test_known_replies_after_changed_turns_are_read_as_they_were_sampled() -> None:
    """An agent that writes the time into its system turn has a new conversation in each call."""
    agent = Agent()
    reply_0 = agent.call(CallTurn("system", "It is 9."), TASK)
    reply_1 = agent.call(CallTurn("system", "It is 10."), TASK, assistant(" reply 0"), ON)
    agent.call(CallTurn("system", "It is 11."), TASK, reply_0, ON, reply_1, ON)
    assert agent.prompts[2][2::2] == (0, 1)
    assert [part[-1] for part in agent.parts()] == ["REPLY 0", "REPLY 1", "REPLY 2"]


def test_titles_and_summaries_are_left_out_unless_the_recipe_takes_them() -> None:
    agent = Agent()
    agent.call(CallTurn("user", "A title, please."))
    reply = agent.call(TOOLS, SYSTEM, TASK)
    agent.call(TOOLS, SYSTEM, TASK, reply, ON)
    main = ["Play.", "Build a bed.", "REPLY 1", "Go on.", "REPLY 2"]
    title = ["side", "A title, please."]
    assert agent.parts() == [[*title, "reply 0"], [TOOLS.text, *main]]
    assert agent.parts(side_calls="train")[0] == [*title, "REPLY 0"]
    plain = Agent()
    reply = plain.call(SYSTEM, TASK)
    plain.call(CallTurn("user", "A title, please."))
    plain.call(SYSTEM, TASK, reply, ON)
    assert [part[0] for part in plain.parts()] == ["Play.", "side"]
    single = Agent()
    for number in range(4):
        single.call(CallTurn("user", f"Notes: {number}"))
    assert [part[0] for part in single.parts()] == [f"Notes: {number}" for number in range(4)]
    single.call(CallTurn("user", "Notes: 3"), assistant("reply 3"), ON)
    assert "side" not in [part[0] for part in single.parts()]


def test_pairs_are_made_of_conversations_about_the_task_that_begin_alike() -> None:
    class Outside(Line):
        transcript = OutsideTurns()

    def episode(name: str, reward: float, *, title: bool = False, summary: str = "") -> StoredTrajectory:
        agent = Agent()
        reply = agent.call(SYSTEM, TASK)
        agent.call(SYSTEM, TASK, reply, ON, reply=f"reply of {name}")
        if title:
            agent.call(CallTurn("user", "A title, please."))
        if summary:
            agent.call(SYSTEM, CallTurn("user", summary))
        trajectory = Trajectory.ended(instance(0), agent.first, agent.steps, StopReason.FAILURE)
        return StoredTrajectory(name, replace(trajectory, reward=reward))

    def pair(*episodes: StoredTrajectory) -> tuple[list[str], list[tuple[str, str]]]:
        preferences, rejected = pair_of_own(episodes, Outside(), PreferencesConfig())
        assert all(prompt_of(preference.chosen) == prompt_of(preference.rejected) for preference in preferences)
        last = [
            side.messages[-1].text for preference in preferences for side in (preference.chosen, preference.rejected)
        ]
        return last, [(rejection.subject, rejection.reason) for rejection in rejected]

    winner = episode("won", 1.0)
    assert pair(winner, episode("lost", 0.0)) == (["reply of won", "reply of lost"], [])
    assert pair(winner, episode("named", 0.0, title=True)) == ([], [("named", "side-conversation")])
    assert pair(episode("named", 1.0, title=True), episode("lost", 0.0)) == ([], [("named", "side-conversation")])
    with_summary = episode("summed", 0.0, summary="So far: nothing.")
    assert pair(winner, with_summary) == ([], [("summed", "other-beginning")])


def test_agent_r_trains_the_conversations_about_the_task_not_the_one_of_the_last_reply() -> None:
    class Outside(Line):
        transcript = OutsideTurns()

    agent = Agent()
    reply = agent.call(TOOLS, SYSTEM, TASK)
    reply_on = agent.call(TOOLS, SYSTEM, TASK, reply, ON)
    agent.call(TOOLS, SYSTEM, CallTurn("user", "So far: nothing."))
    agent.call(CallTurn("user", "A title, please."))
    trajectory = Trajectory.ended(instance(0), agent.first, agent.steps, StopReason.SUCCESS)
    path = TreePath(tree_id="t", nodes=(1, 2, 3, 4), trajectory=trajectory)
    samples = [
        sample
        for sample in whole_samples(
            Outside(), "t:4", trajectory, "stretches", stage="splice", provenance=path_provenance(path)
        )
        if isinstance(sample, Sample)
    ]
    assert [[m.text for m in sample.messages if m.train] for sample in samples] == [
        [reply.text, reply_on.text],
        ["reply 2"],
    ]
    assert [(sample.provenance.good_leaf, sample.provenance.extra["conversation"]) for sample in samples] == [
        *((4, 0), (4, 2))
    ]
    # A try that goes on after the first reply.
    revised = whole_episode(Outside(), trajectory, train=[False, True, False, False])
    assert [m.text for m in revised if m.train] == [reply_on.text]
    revised = whole_episode(Outside(), trajectory, train=[False, True, True, True])
    assert [m.text for m in revised if m.train] == ["reply 2"]


def test_results_stand_in_the_order_of_their_calls() -> None:
    agent = Agent()
    calls = call_text("look", '{"at": "b"}', before=call_text("look", '{"at": "a"}'))
    call = agent.call(TOOLS, TASK, reply=calls)
    results = [CallTurn("tool", key, (key,)) for key in call.ids]
    agent.call(TOOLS, TASK, call, *reversed(results), ON)
    assert [turn.text for turn in agent.prompts[1][3:] if isinstance(turn, Message)] == [*call.ids, "Go on."]


def test_a_reply_that_did_not_arrive_is_forgotten() -> None:
    agent = Agent()
    conversations = agent.conversations
    prompt, _ = conversations.match_call((SYSTEM, TASK))
    conversations.add(prompt, "lost")
    assert not conversations.has_last_reply((SYSTEM, TASK, ON))
    assert conversations.has_last_reply((SYSTEM, TASK, assistant("lost"), ON))
    conversations.drop_last()
    agent.call(SYSTEM, TASK, ON)
    agent.call(SYSTEM, TASK, ON, assistant("lost"), ON)
    assert agent.prompts[1][3] == Message(role="assistant", text="lost")


TURNS = st.builds(CallTurn, st.sampled_from(["user", "system", "tool"]), st.sampled_from(["a", "b", '[{"role": "x"}]']))
WAYS = st.sampled_from(["on", "thread", "respell", "drop", "foreign", "again"])


@pytest.mark.slow
@given(st.lists(st.tuples(WAYS, st.lists(TURNS, min_size=1, max_size=2), st.booleans()), min_size=1, max_size=12))
def test_each_reply_is_read_and_trained_once_under_the_prompt_it_answered(
    calls: list[tuple[str, list[CallTurn], bool]],
) -> None:
    agent = Agent()
    threads: list[tuple[CallTurn, ...]] = [(TASK,)]
    for way, turns, is_call in calls:
        history = threads[-1]
        if way == "thread":
            history = threads[0]
        elif way == "respell":
            history = tuple(t._replace(text=f" {t.text}") if t.role == "assistant" else t for t in history)
        elif way == "drop":
            history = (*history[:1], *history[3:])
        elif way == "foreign":
            history = (*history, assistant("reply 1"))
        new_turns = () if way == "again" else turns
        history = (*history, *new_turns) if (*history, *new_turns)[-1].role != "assistant" else (*history, ON)
        reply = LOOK if is_call else ""
        threads.append((*history, agent.call(*history, reply=reply)))
    assert prompts_of(agent.first, agent.steps)[:-1] == agent.prompts
    parts = OutsideTurns(side_calls="train").parts(agent.first, agent.steps)
    assert sorted(step for part in parts for step in part.positions) == list(range(len(agent.steps)))
    transcript: Any = OutsideTurns()
    for part in parts:
        trained = [number for number, message in enumerate(part.messages) if message.train]
        assert [part.messages[number].token_ids for number in trained] == [(step, 7) for step in part.positions]
        for number, step in zip(trained, part.positions, strict=True):
            prompt = transcript.sample(None, agent.first, agent.steps[: step + 1], [False] * (step + 1))[:-1]
            assert [(m.role, m.text, m.token_ids) for m in part.messages[:number]] == [
                (m.role, m.text, m.token_ids) for m in prompt
            ]


def test_observations_of_earlier_versions_read_as_before() -> None:
    anew = json.dumps([{"role": "anew"}, {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}])
    steps = [Step(reply=f"r{n}", action="", observation=text, reward=0.0) for n, text in enumerate(["On.", anew, "."])]
    assert prompts_of("Hello.", steps) == [
        (Message(role="user", text="Hello."),),
        (Message(role="user", text="Hello."), 0, Message(role="user", text="On.")),
        (Message(role="user", text="Hi."), Message(role="assistant", text="Yes.")),
        (
            Message(role="user", text="Hi."),
            Message(role="assistant", text="Yes."),
            2,
            Message(role="user", text="."),
        ),
    ]
