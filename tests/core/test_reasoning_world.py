"""Episodes of the reasoning world: calls, budgets, answers, going on from a prefix, judging."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from toolboxes import Bench

from agentr_core.environments.contract import check
from agentr_core.environments.reasoning.grammar import format_fault, strict_fault
from agentr_core.environments.reasoning.problems import Move, Problem
from agentr_core.environments.reasoning.world import ReasoningWorld, Rules
from agentr_core.episodes.grading import grade_episode
from agentr_core.episodes.rollout import (
    EpisodeTimer,
    act_with_helper,
    play_replies,
    restore_state,
    roll_out_episode,
    steps_may_ask,
)
from agentr_core.episodes.transcript import whole_episode
from agentr_core.errors import ConfigError, EnvironmentFault, ModelFault
from agentr_core.types import (
    Answer,
    FinishReason,
    Generation,
    Grade,
    Instance,
    Question,
    Request,
    Sampling,
    Step,
    StopReason,
    ToolCall,
    Trajectory,
)

PASSAGES = {"Ostra": "Ostra lies on the Red River.", "Red River": "The Red River is 90 km long."}
KNOWLEDGE = Problem(
    id="k",
    question="On which river does Ostra lie?",
    golds=("Red River", "the Roja"),
    source="made",
    domain="knowledge",
    depth=1,
    solution=(Move(thought="I look up Ostra.", tool="search", query="Ostra"), Move(thought="It says so.")),
)
MATH = Problem(
    id="m",
    question="What is 6 times 7, halved?",
    golds=("21",),
    source="made",
    domain="math",
    solution=(Move(thought="I calculate.", tool="python", query="print(6 * 7 // 2)"), Move(thought="So 21.")),
)
QUESTIONS = {"train": (KNOWLEDGE, MATH), "test": (replace(MATH, id="t", question="What is 7 times 3?"),)}
SEARCH = "<think>a</think>\n<search>Ostra</search>"
PYTHON = "<think>b</think>\n<python>print(42 // 2)</python>"
RIVER = "<think>c</think>\n<answer>\\boxed{Red River}</answer>"


def world(tools: tuple[str, ...] = ("search", "python"), **rules: object) -> ReasoningWorld:
    return ReasoningWorld(QUESTIONS, Bench(PASSAGES, tools), Rules(**rules))  # type: ignore[arg-type]


def instance(index: int = 0, split: str = "train") -> Instance:
    return Instance(environment="reasoning", split=split, index=index)


def steps_of(env: ReasoningWorld, replies: Sequence[str], index: int = 0) -> list[Step]:
    return [outcome.step for outcome in play_replies(env, instance(index), replies)[1]]


def episode_text(steps: Sequence[Step]) -> str:
    return "".join(step.reply + step.observation for step in steps)


def trajectory(env: ReasoningWorld, replies: Sequence[str], index: int = 0) -> Trajectory:
    steps = steps_of(env, replies, index)
    last = steps[-1]
    stop = StopReason.SUCCESS if last.success else StopReason.FAILURE if last.terminated else StopReason.STEP_LIMIT
    return Trajectory(
        instance=instance(index),
        first_observation=env.problem(instance(index)).question,
        steps=tuple(steps),
        reward=last.reward,
        success=last.success,
        stop=stop,
    )


def test_the_world_keeps_the_contract() -> None:
    assert check(world) == ()


def test_it_can_ask_a_judge_and_says_so_by_its_class() -> None:
    assert hasattr(ReasoningWorld, "grader")


@pytest.mark.parametrize("index", [0, 1])
def test_the_expert_succeeds_in_the_strict_format(index: int) -> None:
    env = world()
    steps = steps_of(env, env.expert(instance(index)) or [], index)
    assert steps[-1].success
    assert steps[-1].reward == 1
    assert strict_fault(episode_text(steps)) == ""
    assert [call.status for step in steps for call in step.tool_calls] == ["ok"]
    assert world(tools=()).expert(instance(index)) is None


def test_results_are_appended_and_carry_no_loss() -> None:
    env = world(search_chars=20)
    steps = steps_of(env, [SEARCH, RIVER])
    assert steps[0].observation == "\n<result>\nOstra\nOstra lies on ...\n</result>\n"
    assert steps[0].tool_calls[0].output.endswith("Red River.")
    (_, _, turn) = whole_episode(env, trajectory(env, [SEARCH, RIVER]))
    assert [(span.train, span.text) for span in turn.spans] == [
        (True, SEARCH),
        (False, steps[0].observation),
        (True, RIVER),
    ]


@pytest.mark.parametrize(
    ("answer", "reward", "success"),
    [("Red River", 1, True), ("the roja", 1, True), ("Red", 2 / 3, False), ("Blue Lake", 0, False)],
)
def test_the_reward_is_the_correctness_of_the_answer(answer: str, reward: float, success: bool) -> None:
    (step,) = steps_of(world(), [f"<think>x</think><answer>It is \\boxed{{{answer}}}</answer>"])
    assert step.reward == pytest.approx(reward)
    assert step.success is success
    assert step.terminated


def test_each_tool_has_its_own_budget_and_a_spent_one_is_answered() -> None:
    env = world(search_calls=1, python_calls=1)
    steps = steps_of(env, [SEARCH, PYTHON, SEARCH, RIVER])
    assert [len(step.tool_calls) for step in steps] == [1, 1, 0, 0]
    assert "No such call is left" in steps[2].observation
    assert steps[2].valid is False
    assert steps[-1].success
    assert format_fault(episode_text(steps)) == "", "a refused call has a result, too"


def test_a_common_budget_counts_both_tools() -> None:
    steps = steps_of(world(calls=2), [SEARCH, PYTHON, PYTHON, RIVER])
    assert [len(step.tool_calls) for step in steps] == [1, 1, 0, 0]


def test_calls_beyond_every_budget_end_the_episode() -> None:
    steps = steps_of(world(search_calls=1, spare_replies=1), [SEARCH] * 9)
    assert [step.terminated for step in steps] == [False, False, True]
    assert not steps[-1].success
    assert steps_of(world(tools=("python",), spare_replies=0), [SEARCH])[0].terminated


def test_a_reply_without_a_call_may_be_continued_once() -> None:
    steps = steps_of(world(), ["<think>hm", "so</think>\n<answer>\\boxed{Red River}</answer>"])
    assert steps[0].observation == ""
    assert steps[-1].success
    assert [step.terminated for step in steps_of(world(), ["hm", "", "x"])] == [False, True]


def test_a_model_cannot_write_a_result() -> None:
    env = world()
    steps = steps_of(env, ["<think>a</think>\n<result>", RIVER])
    assert "no call" in steps[0].observation
    assert steps[0].valid is False
    assert format_fault(episode_text(steps)) == "a result follows no call"


def test_an_empty_call_is_counted_and_not_carried_out() -> None:
    env = world(search_calls=1)
    steps = steps_of(env, ["<search> </search>", SEARCH])
    assert [call.status for step in steps for call in step.tool_calls] == ["empty"]
    assert env._toolbox.calls == []  # type: ignore[attr-defined]


def test_an_episode_goes_on_from_a_prefix_without_calling_a_tool_again() -> None:
    env = world(search_calls=1, python_calls=1, extra_calls=1)
    prefix = steps_of(env, [SEARCH, PYTHON])
    second_env = world(search_calls=1, python_calls=1, extra_calls=1)
    assert restore_state(second_env, instance(), prefix, first_observation=KNOWLEDGE.question) == KNOWLEDGE.question
    assert second_env._toolbox.calls == []  # type: ignore[attr-defined]
    assert len(second_env.step("<search>Ostra</search>").info["tool_calls"]) == 1, "one more than the budget"
    assert "tool_calls" not in second_env.step("<search>Ostra</search>").info
    second_env.reset(instance())
    second_env.step("<search>Ostra</search>")
    assert "tool_calls" not in second_env.step("<search>Ostra</search>").info, "a fresh episode has no extra calls"


async def test_a_rollout_from_a_prefix_is_as_if_it_had_not_been_cut() -> None:
    replies = iter([PYTHON, RIVER])

    async def model(request: Request) -> list[Generation]:
        text = next(replies)
        return [Generation(text=text, token_ids=(), finish_reason="stop", prompt_tokens=1, completion_tokens=1)]

    prefix = steps_of(world(), [SEARCH])
    episode = await roll_out_episode(
        instance(), world(), model, max_steps=9, sampling=Sampling(), seed=1, prefix=prefix
    )
    assert episode.success
    assert [step.action for step in episode.steps] == [
        step.action for step in steps_of(world(), [SEARCH, PYTHON, RIVER])
    ]


async def test_slow_searches_hold_up_no_other_question() -> None:
    others_done = threading.Event()

    class Slow(Bench):
        blocking = True

        def call(self, tool: str, query: str) -> ToolCall:
            assert others_done.wait(60)
            return super().call(tool, query)

    def model(*said: str) -> Callable[[Request], Awaitable[list[Generation]]]:
        replies = iter(said)

        async def reply(request: Request) -> list[Generation]:
            text = next(replies)
            return [Generation(text=text, token_ids=(), finish_reason="stop", prompt_tokens=1, completion_tokens=1)]

        return reply

    async def play(env: ReasoningWorld, *said: str) -> Trajectory:
        return await roll_out_episode(instance(), env, model(*said), max_steps=4, sampling=Sampling(), seed=0)

    class Quick(Bench):
        blocking = True

    async def play_quick() -> None:
        env = ReasoningWorld(QUESTIONS, Quick(PASSAGES), Rules())
        assert (await play(env, PYTHON, RIVER)).success
        others_done.set()

    # More than asyncio has threads to share.
    slow = [ReasoningWorld(QUESTIONS, Slow(PASSAGES), Rules()) for _ in range(40)]
    *episodes, _ = await asyncio.gather(*(play(env, SEARCH, RIVER) for env in slow), play_quick())
    assert all(episode is not None and episode.success for episode in episodes)


async def test_a_summary_of_the_documents_is_shown_in_their_place() -> None:
    questions: list[Question] = []

    async def model(request: Request) -> list[Generation]:
        text = next(replies)
        return [Generation(text=text, token_ids=(), finish_reason="stop", prompt_tokens=1, completion_tokens=1)]

    async def helper(question: Question, *, seed: int, session: str) -> Answer:
        questions.append(question)
        return Answer(
            role=question.role, model="m", prompt_hash="h", seed=seed, text="Findings:\nIt is the Red River.",
            finish_reason="stop", prompt_tokens=1, completion_tokens=1,
        )  # fmt: skip

    replies = iter([SEARCH, "<search>nowhere</search>", PYTHON, RIVER])
    env = world(summarised=True)
    episode = await roll_out_episode(instance(), env, model, max_steps=9, sampling=Sampling(), seed=0, helper=helper)
    assert episode.success
    search, *later_steps = episode.steps
    assert search.observation == "\n<result>\nIt is the Red River.\n</result>\n"
    assert [call.output for call in search.tool_calls] == [f"Ostra\n{PASSAGES['Ostra']}"], "the call has the documents"
    assert not any(step.answers for step in later_steps), "only documents are summarised"
    (question,) = questions
    assert question.role == "summariser"
    assert PASSAGES["Ostra"] in question.messages[0].text
    assert KNOWLEDGE.question in question.messages[0].text
    second_env = world(summarised=True)
    restore_state(second_env, instance(), episode.steps[:1], first_observation=KNOWLEDGE.question)
    assert second_env.step(PYTHON).info["tool_calls"][0].tool == "python", "nothing waits for a summary"
    assert steps_may_ask(env)
    assert not steps_may_ask(world())
    assert not steps_may_ask(world(("python",), summarised=True)), "nothing is searched"


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_summariser_is_told_what_was_reasoned_and_found_so_far(resumed: bool) -> None:
    questions: list[Question] = []

    async def helper(question: Question, *, seed: int, session: str) -> Answer:
        questions.append(question)
        return Answer(
            role=question.role, model="m", prompt_hash="h", seed=seed, text="Findings:\nA river.",
            finish_reason="stop", prompt_tokens=1, completion_tokens=1,
        )  # fmt: skip

    env = world(summarised=True)
    search_reply = "<think>The river, then.</think>\n<search>Red River</search>"
    env.reset(instance())
    before = [(await act_with_helper(env, EpisodeTimer(), reply, helper)).step for reply in (PYTHON, SEARCH)]
    if resumed:
        env = world(summarised=True)
        restore_state(env, instance(), before, first_observation=KNOWLEDGE.question)
    await act_with_helper(env, EpisodeTimer(), search_reply, helper)
    history = questions[-1].messages[0].text.partition("reasoned so far:\n")[2].partition("\n\nWhat they searched")[0]
    entries = [f"The question: {KNOWLEDGE.question}", *(step.reply + step.observation for step in before), search_reply]
    assert history == "\n".join(f"{number}. {entry.strip()}" for number, entry in enumerate(entries, start=1))
    assert all(text in history for text in ("<think>a</think>", "21", "A river.", "The river, then."))


def test_a_box_outside_an_answer_is_the_answer_of_an_episode_that_gives_none() -> None:
    env = world(judged="all")
    reply = "<think>The document says \\boxed{Oder}. I think it is \\boxed{Red River}.</think>"
    grade = env.grader.rule(trajectory(env, [SEARCH, reply, reply]))
    assert grade is not None
    assert (grade.reward, grade.success) == (1.0, True)
    silent = trajectory(env, [SEARCH, "I do not know.", "I do not know."])
    assert env.grader.rule(silent) == Grade(reward=0.0, success=False)


def test_unknown_splits_instances_and_options_are_named() -> None:
    with pytest.raises(ConfigError, match="no split 'dev'; it has train, test"):
        world().instances("dev")
    with pytest.raises(EnvironmentFault, match="no instance reasoning/train/2"):
        world().reset(instance(2))
    with pytest.raises(EnvironmentFault, match="reset it first"):
        world().step(SEARCH)
    with pytest.raises(ConfigError, match="success_from"):
        Rules(success_from=1.0)
    with pytest.raises(ConfigError, match="judged"):
        Rules(judged="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 0"):
        Rules(python_calls=-1)


def test_the_instruction_names_the_tools_that_are_there() -> None:
    assert "<python>" not in world(tools=("search",)).instruction
    assert "<result>" not in world(tools=()).instruction
    assert all(word in world().instruction for word in ("<search>", "<python>", "\\boxed"))


class Judge:
    """Says the same to everything, and counts."""

    def __init__(self, words: str, finish_reason: FinishReason = "stop") -> None:
        self.words = words
        self.finish_reason: FinishReason = finish_reason
        self.asked: list[Question] = []

    async def __call__(self, question: Question, *, seed: int, session: str) -> Answer:
        self.asked.append(question)
        return Answer(
            role=question.role,
            model="m",
            prompt_hash="p",
            seed=seed,
            text=self.words,
            finish_reason=self.finish_reason,
            prompt_tokens=1,
            completion_tokens=1,
        )


WRONG = "<think>x</think><answer>\\boxed{a score plus one}</answer>"


@pytest.mark.parametrize(
    ("judged", "replies", "words", "reward", "asked"),
    [
        ("math", [WRONG], "Correct.", 1, 1),
        ("math", [WRONG], "It is not correct", 0, 1),
        ("math", [WRONG], "The right one is correct. So: Incorrect", 0, 1),
        ("math", [WRONG], "Incorrect. The correct answer is 21.", 0, 1),
        ("math", [WRONG], "**Incorrect** - 20 does not match the correct answer.", 0, 1),
        ("math", [WRONG], "The answer isn't correct.", 0, 1),
        ("math", [WRONG], "The answer isn\u2019t quite correct.", 0, 1),
        ("math", [WRONG], "It is not the **correct** one.", 0, 1),
        ("math", [WRONG], "Wrong; 21 would be correct.", 0, 1),
        ("math", [WRONG], "It does not mean the same as the correct answer.", 0, 1),
        ("math", [WRONG], "This differs from the correct answer, which is 21.", 0, 1),
        ("math", [WRONG], "In-correct", 0, 1),
        ("math", [WRONG], "It's not written in the same form, but it is correct.", 1, 1),
        ("math", [WRONG], "**Correct**: the notation does not matter.", 1, 1),
        ("math", [WRONG], "<think>Is it incorrect? No.</think>Correct", 1, 1),
        ("none", [WRONG], "Correct", 0, 0),
        ("math", ["<think>x</think><answer>\\boxed{42/2}</answer>"], "Incorrect", 1, 0),
        ("math", ["<think>x</think><answer></answer>"], "Correct", 0, 0),
        ("math", [SEARCH], "Correct", 0, 0),
    ],
)
async def test_the_rule_comes_first_and_a_judge_after_it(
    judged: str, replies: list[str], words: str, reward: float, asked: int
) -> None:
    env = world(judged=judged)
    judge = Judge(words)
    episode, grading = await grade_episode(env, trajectory(env, replies, index=1), judge, seed=3)
    assert episode.reward == reward
    assert episode.success is (reward == 1)
    assert len(judge.asked) == asked
    assert grading is not None
    for question in judge.asked:
        assert question.sampling.temperature == 0
        assert "- 21" in question.messages[0].text
        assert "a score plus one" in question.messages[0].text


async def test_a_judge_without_a_word_gives_no_grade() -> None:
    env = world(judged="all")
    with pytest.raises(ModelFault, match="no grade can be read"):
        await grade_episode(env, trajectory(env, [WRONG]), Judge("Perhaps."), seed=3)


async def test_what_a_judge_says_before_it_is_cut_is_no_grade() -> None:
    env = world(judged="all")
    with pytest.raises(ModelFault, match="'Correct would be' was cut at the token limit, so it is no grade"):
        await grade_episode(env, trajectory(env, [WRONG]), Judge("Correct would be", "length"), seed=3)


def test_the_parts_of_an_episode_that_was_played_elsewhere_are_its_text() -> None:
    bench = Bench(PASSAGES)
    env = ReasoningWorld(QUESTIONS, bench, Rules())
    instance = env.instances("train")[1]
    text = (
        "<think>Hm.</think>\n<search>x </search> <result>\n<answer>9</answer>\n</result>\n<think>So.</think>"
        "<python>42/2</python><result></result><answer>\\boxed{21}</answer>\n"
    )
    episode = env.recall(instance, text)
    assert "".join(step.reply + step.observation for step in episode.steps) == text
    assert [step.action for step in episode.steps] == [
        "<search>x</search>",
        "<python>42/2</python>",
        "<answer>\\boxed{21}</answer>",
    ]
    calls = [(call.tool, call.key, call.status) for step in episode.steps for call in step.tool_calls]
    assert calls == [("search", "x", "ok"), ("python", "42/2", "empty")]
    assert not bench.calls, "nothing is called again"
    assert (episode.reward, episode.success, episode.stop) == (1.0, True, StopReason.SUCCESS)
    assert not env.recall(instance, text, 0.5).success
    for cut in ("<think>", "", "<search>x</search><result>y"):
        result = env.recall(instance, cut)
        assert (result.reward, result.stop, result.steps[0].reply) == (0.0, StopReason.STEP_LIMIT, cut)
    # A box without an answer tag is worth what it is worth in an episode of our own.
    for text in ("So it is \\boxed{21}.", "<search>x</search><result>\\boxed{21}</result>", "\\boxed{9}"):
        result = env.recall(instance, text)
        grade = env.grader.rule(result)
        assert grade is not None
        assert (result.reward, result.success) == (grade.reward, grade.success) == (float(text.startswith("So")),) * 2
