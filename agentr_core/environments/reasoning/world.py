"""Questions that a model answers by thinking, searching and calculating, in one growing message or
by native tool calls.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentr_core.environment import Environment, Instances
from agentr_core.environments.native import actions_in, join_actions, misread_action, no_call_observation
from agentr_core.environments.reasoning.grammar import (
    CALLS,
    PYTHON,
    RESULT_OPENS,
    SEARCH,
    STOPS,
    Answers,
    Call,
    boxed,
    call_in,
    final_answer,
    shown_result,
    tags,
)
from agentr_core.environments.reasoning.grammar import steps as cut_steps
from agentr_core.environments.reasoning.problems import (
    SHIPPED,
    AnswerGrader,
    Judged,
    Move,
    Problem,
    QuestionFile,
    QuestionSet,
    load,
    place_of,
    question_file,
    source_key,
)
from agentr_core.environments.reasoning.scoring import Domain
from agentr_core.environments.reasoning.toolbox import OpenTools, Searched, SourceSearch, ToolSettings, open_tools
from agentr_core.episodes.transcript import (
    Continuation,
    NativeCall,
    NativeTurns,
    Tool,
    UnreadableCall,
    call_reply,
    read_calls,
    read_results,
    text_arguments,
)
from agentr_core.errors import ConfigError, EnvironmentFault
from agentr_core.protocols import AnswerStore, Toolbox
from agentr_core.system import data_path
from agentr_core.texts import blank_thoughts
from agentr_core.tools.search import tool
from agentr_core.tools.search.tool import Serper
from agentr_core.types import Instance, Step, StopReason, ToolCall, Trajectory, Transition

# What the world tells a model: one instruction for all stages, with the available tools.

_OPENING = "You answer questions. Think step by step inside <think> and </think>."
_TOOLS = {
    SEARCH: "To look up a fact, write <search>your query</search>; passages of an encyclopaedia come back.",
    PYTHON: "To calculate, write <python>your code</python>; what the code prints comes back. "
    "Each code starts anew: nothing is left of the ones before.",
}
_RESULTS = (
    "What comes back stands inside <result> and </result>, right after the call. Never write a result yourself. "
    "After a result, go on with <think>. Call a tool when you need it, and do not call it again for what you know."
)
_ANSWER = r"End with <answer> and </answer>, and in it the final answer in LaTeX: \boxed{your final answer}."
_EXAMPLE_BY_TOOL = {
    SEARCH: "<think>what is missing</think>\n<search>query</search>\n<result>\npassages\n</result>\n",
    PYTHON: "<think>what to calculate</think>\n<python>\nprint(6 * 7)\n</python>\n<result>\n42\n</result>\n",
}
_EXAMPLE_END = "<think>what follows</think>\n<answer>So it is \\boxed{42}.</answer>"

_NATIVE_INSTRUCTION = (
    "You answer questions. Think step by step.",
    "Call a tool when you need it, one in a reply, and do not call it again for what you know.",
    r"When you know the answer, give it without a call, in LaTeX: \boxed{your final answer}.",
)


def instruction(tools: Sequence[str]) -> str:
    """Return the instruction for a model that has the given tools, which may be none."""
    parts = [_OPENING, *(_TOOLS[tool] for tool in tools), *([_RESULTS] if tools else []), _ANSWER]
    return "\n".join(
        [*parts, "", "An example of the form:", "".join(_EXAMPLE_BY_TOOL[tool] for tool in tools) + _EXAMPLE_END]
    )


# The world with native tool calls: search and Python are tools, and a reply without a call answers.
#
# An action is the same text as in the world with tags, so budgets, rewards and statistics share its
# code.

TOOLS = {
    SEARCH: Tool(
        name=SEARCH,
        description="Look up a fact; passages of an encyclopaedia come back.",
        arguments=(("query", "What to look up."),),
    ),
    PYTHON: Tool(
        name=PYTHON,
        description="Run code and get what it prints. Nothing is left of the codes before.",
        arguments=(("code", "The code."),),
    ),
}
NEITHER = "In your reply there was neither a call nor an answer in a box. Call a tool, or answer."


class InCalls:
    """A mixin that adds native calls to `ReasoningWorld`."""

    _toolbox: Any
    problem: Any

    @property
    def transcript(self) -> NativeTurns:
        """The transcript, which offers the available tools."""
        return NativeTurns(tools=tuple(TOOLS[tool] for tool in TOOLS if tool in self._toolbox.tools))

    def parse(self, reply: str) -> str:
        """Return the call of a reply, or the box of its answer, written in tags; several calls are
        joined. Empty if it has neither, and the action of `misread_action` for a call that cannot
        be read.
        """
        calls = read_calls(reply)
        if isinstance(calls, UnreadableCall):
            return misread_action(calls)
        if calls is None:
            box = boxed(blank_thoughts(reply))
            if box is None:
                return ""
            action = f"<answer>\\boxed{{{box}}}</answer>"
            call = call_in(action)
            return (
                action
                if call and call.name == "answer"
                else misread_action(UnreadableCall("an answer cannot hold a call"))
            )
        return join_actions([self._tagged_call(call) for call in calls])

    def _tagged_call(self, call: NativeCall) -> str:
        """Return a call written in tags, or the action of `misread_action` if that would not give
        the same call.
        """
        texts = text_arguments(call, tuple(TOOLS.values()))
        if isinstance(texts, UnreadableCall):
            return misread_action(texts)
        (text,) = texts.values()
        action = f"<{call.name}>{text.strip()}</{call.name}>"
        if call_in(action) != (call.name, text.strip()):
            return misread_action(UnreadableCall(f"a {call.name} cannot hold its own tags"))
        return action

    def reply_with(self, answer: str) -> str:
        """Return a reply that gives an answer in a box."""
        return f"\\boxed{{{answer}}}"

    def facts(self, instance: Instance) -> Mapping[str, Any]:
        """Return the source of the question, cut to 100 characters, and its domain."""
        problem = self.problem(instance)
        return {"source": problem.source[:100], "domain": problem.domain}

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the question set's solution as replies with calls; None if it has none, or needs a
        tool that is missing.
        """
        problem: Problem = self.problem(instance)
        if not problem.solution or not {move.tool for move in problem.solution[:-1]} <= set(self._toolbox.tools):
            return None
        *moves, last = problem.solution
        calls = [call_reply(TOOLS[move.tool], move.query, before=move.thought) for move in moves]
        return [*calls, f"{last.thought}\nIt is \\boxed{{{problem.golds[0]}}}."]

    def _instruction(self, tools: Sequence[str]) -> str:
        return "\n".join(_NATIVE_INSTRUCTION)

    def _format_result(self, output: str, limit: int) -> str:
        return output.strip() if len(output) <= limit else f"{output[:limit].strip()}..."

    def _format_no_call(self, action: str) -> str:
        return no_call_observation(action) if action else NEITHER


_NO_CALL = "There is no call that this could be the result of."
_NO_CALLS_LEFT = "No such call is left. Answer with what you know."
_NO_CALL_RESULT = f"\n{_NO_CALL}\n</result>\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The limits of an episode, and what counts as success.

    `python_calls` and `search_calls` limit the calls of each tool, `calls` those of both together
    (0: no further limit). `extra_calls` are added to each limit for an episode that continues
    recorded steps. `spare_replies` is the number of replies that may have neither an answer nor a
    call that can be made; one more ends the episode. A tool's output is cut to `python_chars` or
    `search_chars` characters. With `summarised`, a model in the role `summariser` is asked what the
    documents of a search say about its query, and its summary is shown instead of them. `judged`,
    `success_from` and `answers` are those of `AnswerGrader`.
    """

    python_calls: int = 6
    search_calls: int = 6
    calls: int = 0
    extra_calls: int = 0
    spare_replies: int = 1
    python_chars: int = 1000
    search_chars: int = 5000
    summarised: bool = False
    judged: Judged = "none"
    success_from: float = 0.8
    answers: Answers = "plain"

    def __post_init__(self) -> None:
        counts = (self.python_calls, self.search_calls, self.calls, self.extra_calls, self.spare_replies)
        if min(counts) < 0 or min(self.python_chars, self.search_chars) < 1:
            raise ConfigError(
                "environment.options: numbers of calls and replies must be at least 0, numbers of characters at least 1"
            )
        if not 0 <= self.success_from < 1:
            raise ConfigError(
                f"environment.options.success_from is {self.success_from}; it must be at least 0 and below 1"
            )
        if self.judged not in ("none", "math", "all"):
            raise ConfigError(f"environment.options.judged is {self.judged!r}; it is none, math or all")
        if self.answers not in ("plain", "published"):
            raise ConfigError(f"environment.options.answers is {self.answers!r}; it is plain or published")


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The state of an episode: the number of calls of each tool, the texts of the steps so far and
    of the present reply (`text`), the spare replies used, whether it continues recorded steps, and
    the search whose documents are being summarised.
    """

    problem: Problem
    calls: dict[str, int]
    step_texts: tuple[str, ...] = ()
    text: str = ""
    num_spare_replies: int = 0
    is_resumed: bool = False
    summarised: ToolCall | None = None


def replies(solution: Sequence[Move], answer: str) -> list[str]:
    """Return the replies of an expert: one for each move of a solution, the last of which gives the
    answer.
    """
    *moves, last = solution
    calls = [f"<think>{move.thought}</think>\n<{move.tool}>{move.query}</{move.tool}>" for move in moves]
    return [*calls, f"<think>{last.thought}</think>\n<answer>It is \\boxed{{{answer}}}.</answer>"]


class ReasoningWorld(Environment):
    """Questions with tools. The reward is the correctness of the answer, by rule; see `scoring`.

    `by_source` has other toolboxes for the questions of some sources, keyed by
    `problems.source_key`; they have the same tools as `toolbox`.

    A call of a tool that is missing or has no calls left is answered with a sentence. It uses up a
    spare reply, as does a reply without a call or an answer.
    """

    name = "reasoning"
    acknowledgement = ""
    transcript = Continuation(stop=STOPS)
    native = InCalls

    def __init__(
        self,
        questions: QuestionSet,
        toolbox: Toolbox,
        rules: Rules,
        by_source: Mapping[str, Toolbox] | None = None,
    ) -> None:
        self._questions = questions
        self._toolbox = toolbox
        self._toolbox_by_source = by_source or {}
        self._rules = rules
        self._state: _State | None = None
        self._reply = ""
        self._grader = AnswerGrader(
            self.problem, judged=rules.judged, success_from=rules.success_from, answers=rules.answers
        )
        self.blocking = toolbox.blocking
        self.instruction = self._instruction(self.tools)
        max_calls = rules.calls or rules.python_calls + rules.search_calls
        self.step_limit = max_calls + 2 * rules.extra_calls + rules.spare_replies + 1

    @property
    def answers(self) -> Answers:
        """How answers are read and compared."""
        return self._rules.answers

    @property
    def grader(self) -> AnswerGrader:  # type: ignore[override]
        """The grader of answers: by rule and, if `judged` says so, by a model."""
        return self._grader

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the available tools."""
        return tuple(tool for tool in CALLS if tool in self._toolbox.tools)

    @property
    def asks_in_steps(self) -> bool:  # type: ignore[override]
        """Whether steps ask a model to summarise the documents that a search found."""
        return self._rules.summarised and SEARCH in self._toolbox.tools

    def splits(self) -> tuple[str, ...]:
        """Return the splits of the question set."""
        return tuple(self._questions)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return an instance for each question of a split, in the order of the set."""
        if split not in self._questions:
            raise ConfigError(f"{self.name} has no split {split!r}; it has {', '.join(self._questions)}")
        return Instances(self.name, split, range(len(self._questions[split])))

    def problem(self, instance: Instance) -> Problem:
        """Return the question of an instance with its answers. Raises `EnvironmentFault` for an
        unknown instance.
        """
        problems = self._questions.get(instance.split, ())
        if instance.environment != self.name or not 0 <= instance.index < len(problems):
            raise EnvironmentFault(f"{self.name} has no instance {instance.key}; its question set has changed")
        return problems[instance.index]

    def reset(self, instance: Instance) -> str:
        """Begin an episode and return the question."""
        problem = self.problem(instance)
        self._state = _State(problem=problem, calls=dict.fromkeys(CALLS, 0))
        self._reply = ""
        return problem.question

    # A tool that is called again might give another result: code prints the time, the web changes.
    def resume(self, instance: Instance, steps: Sequence[Step]) -> str:
        """Put the episode into the state after recorded steps, without calling tools, and return
        the question. A step without a recorded validity was written into the message and never
        carried out, so it uses up no call and no spare reply.
        """
        question = self.reset(instance)
        texts: list[str] = []
        for step in steps:
            actions = actions_in(step.action)
            results = read_results(step.observation, len(actions)) or (step.observation,)
            # The first call of several is heard with its reply.
            texts += map(operator.add, (step.reply, *actions[1:]), results)
            tool_names = [call.tool for call in step.tool_calls]
            for call in map(call_in, actions if step.valid is not None else ()):
                was_executed = call is not None and tool_names[:1] == [call.name]
                self._count_reply(call, was_executed=was_executed)
                del tool_names[:was_executed]
        self._state = replace(self._current, is_resumed=bool(steps), step_texts=tuple(texts))
        return question

    def recall(self, instance: Instance, text: str, reward: float | None = None) -> Trajectory:
        """Return the trajectory of an episode from its whole text, which is cut into steps after
        every result; no tools are called. See `Environment.recall`.
        """
        problem, answers = self.problem(instance), self._rules.answers
        parts: list[tuple[str, str]] = []
        for part in cut_steps(text):
            # The result of a step is at its end, if it has one.
            result_starts = [tag.start for tag in tags(part) if tag.name == "result" and tag.opens]
            reply = part[: result_starts[-1]].rstrip() if result_starts and part.endswith("</result>") else part
            parts.append((reply, part[len(reply) :]))
        parts = parts or [(text, "")]
        actions = [self.parse(reply) for reply, _ in parts]
        call = call_in(actions[-1])
        is_answer = call is not None and call.name == "answer"
        if reward is None:
            # As in `prediction_of`: without an answer tag, the last box counts.
            answer_text = actions[-1] if is_answer else "".join(reply for reply, _ in parts)
            reward = problem.correctness(final_answer(answer_text, answers), answers)
        success, last = reward > self._rules.success_from, len(parts) - 1
        steps = tuple(
            Step(
                reply=reply,
                action=action,
                observation=observation,
                reward=reward if position == last else 0.0,
                terminated=is_answer and position == last,
                success=success and position == last,
                tool_calls=_outside_tool_calls(action, observation),
            )
            for position, ((reply, observation), action) in enumerate(zip(parts, actions, strict=True))
        )
        stop = StopReason.SUCCESS if success else StopReason.FAILURE if is_answer else StopReason.STEP_LIMIT
        return Trajectory.ended(instance, problem.question, steps, stop)

    def parse(self, reply: str) -> str:
        """Return the first call or answer of a reply in its tags. If there is none, return
        `<result>` for a reply that opens a result itself, else the empty string.
        """
        if (call := call_in(reply)) is not None:
            return f"<{call.name}>{call.content}</{call.name}>"
        return RESULT_OPENS if reply.endswith(RESULT_OPENS) else ""

    def reply_with(self, answer: str) -> str:
        """Return a reply that gives an answer in its tags."""
        return f"<answer>\\boxed{{{answer}}}</answer>"

    def hear(self, reply: str) -> None:
        """Keep the whole reply, whose thoughts a summariser is shown; see `Environment.hear`."""
        self._reply = reply

    def step(self, action: str) -> Transition:
        """Carry out a call and return its result, or end the episode with an answer. The
        observation is appended to the growing message as it is.
        """
        self._state = replace(self._current, text=self._reply or action)
        self._reply = ""
        return self._record_step(self._execute(action))

    def answer(self, reply: str) -> Transition:
        """Return the transition of the search whose documents the reply summarises; see
        `Environment.answer`. Raises `EnvironmentFault` if no summary was asked for.
        """
        call = self._current.summarised
        if call is None:
            raise EnvironmentFault(f"{self.name} asked for no summary")
        self._state = replace(self._current, summarised=None)
        return self._record_step(self._result_transition(call, tool.read_summary(reply)))

    def snapshot(self) -> Any:
        """Return the state, which is immutable."""
        return self._current

    def restore(self, snapshot: Any) -> None:
        """Put the episode back into a state that `snapshot` returned."""
        self._state = snapshot

    def depth(self, instance: Instance) -> int | None:
        """Return the depth that the question set gives, such as the number of hops, or None."""
        return self.problem(instance).depth

    def expert(self, instance: Instance) -> Sequence[str] | None:
        """Return the question set's solution as replies; None if it has none, or needs a tool that
        is missing.
        """
        problem = self.problem(instance)
        tools = {move.tool for move in problem.solution[:-1]}
        if not problem.solution or not tools <= set(self._toolbox.tools):
            return None
        return replies(problem.solution, problem.golds[0])

    def _instruction(self, tools: Sequence[str]) -> str:
        return instruction(tools)

    def _format_result(self, output: str, limit: int) -> str:
        """Return a tool's output in the form that follows its call, cut to `limit` characters."""
        return shown_result(output, limit)

    def _format_no_call(self, action: str) -> str:
        """Return the observation after a reply that has neither a call nor an answer."""
        return _NO_CALL_RESULT if action == RESULT_OPENS else ""

    @property
    def _current(self) -> _State:
        if self._state is None:
            raise EnvironmentFault(f"{self.name} has no episode; reset it first")
        return self._state

    def _execute(self, action: str) -> Transition:
        tagged_call = call_in(action)
        if tagged_call is not None and tagged_call.name == "answer":
            problem = self._current.problem
            answers = self._rules.answers
            reward = problem.correctness(final_answer(action, answers), answers)
            success = reward > self._rules.success_from
            return Transition("", reward, True, False, {"success": success, "valid": True})
        if tagged_call is not None and self._has_calls_left(tagged_call.name):
            toolbox = self._toolbox_by_source.get(source_key(self._current.problem.source), self._toolbox)
            content = tagged_call.content
            call = (
                toolbox.call(tagged_call.name, content) if content else ToolCall(tool=tagged_call.name, status="empty")
            )
            self._count_reply(tagged_call, was_executed=True)
            if self._rules.summarised and call.tool == SEARCH and call.status == "ok":
                self._state = replace(self._current, summarised=call)
                # What was written and found since the question, one entry for each step.
                state = self._current
                reasoning = [f"The question: {state.problem.question}", *state.step_texts, state.text]
                question = tool.summary_question(tagged_call.content, call.output, reasoning)
                return Transition("", 0.0, False, False, {"success": False, "question": question})
            return self._result_transition(call, call.output)
        self._count_reply(tagged_call, was_executed=False)
        text = self._format_result(_NO_CALLS_LEFT, len(_NO_CALLS_LEFT)) if tagged_call else self._format_no_call(action)
        is_over = self._current.num_spare_replies > self._rules.spare_replies
        return Transition(text, 0.0, is_over, False, {"success": False, "valid": False})

    def _record_step(self, transition: Transition) -> Transition:
        """Return the transition of a step; keep the text of the step once it is done."""
        state = self._current
        if state.summarised is None:
            self._state = replace(state, step_texts=(*state.step_texts, state.text + transition.observation), text="")
        return transition

    def _result_transition(self, call: ToolCall, output: str) -> Transition:
        text = self._format_result(
            output, {PYTHON: self._rules.python_chars, SEARCH: self._rules.search_chars}[call.tool]
        )
        return Transition(text, 0.0, False, False, {"success": False, "valid": True, "tool_calls": (call,)})

    def _count_reply(self, call: Call | None, *, was_executed: bool) -> None:
        """Count a reply that is not an answer: as a call if it was executed, else as a spare
        reply.
        """
        state = self._current
        if was_executed and call is not None:
            self._state = replace(state, calls={**state.calls, call.name: state.calls[call.name] + 1})
        else:
            self._state = replace(state, num_spare_replies=state.num_spare_replies + 1)

    def _has_calls_left(self, tool: str) -> bool:
        """Return whether a tool is available and has a call left."""
        rules, state = self._rules, self._current
        extra = rules.extra_calls if state.is_resumed else 0
        num_calls = sum(state.calls.values())
        is_within_total = not rules.calls or num_calls < rules.calls + extra
        limits = {PYTHON: rules.python_calls, SEARCH: rules.search_calls}
        return tool in self._toolbox.tools and state.calls[tool] < limits[tool] + extra and is_within_total


def _outside_tool_calls(action: str, observation: str) -> tuple[ToolCall, ...]:
    """Return the tool call of a step that another program carried out; none without a result."""
    call = call_in(action)
    if call is None or call.name == "answer" or not observation:
        return ()
    output = observation.strip().removeprefix(RESULT_OPENS).removesuffix("</result>").strip()
    status = "ok" if output else "empty"
    return (ToolCall(tool=call.name, provider="outside", key=call.content, status=status, output=output),)


# The world as recipes use it: it takes their options, and opens tools and questions.


class Reasoning(ReasoningWorld):
    """Questions from sets, answered by thinking, searching and calculating.

    Args:
        questions, domains: the question sets, and the domains of sources; see `problems.load`.
        tools, searched, search_url, corpus, cache_dir, web_url, search_api_key, top_k,
            document_chars, search_timeout_s, search_answer_mib, sandbox, python_timeout_s: see
            `ToolSettings`.
        search_by_source: what is searched for the questions of some sources instead, by source.
        python_calls, search_calls, calls, extra_calls, spare_replies, python_chars, search_chars,
            summarised, judged, success_from, answers: see `Rules`.

    Raises what `problems.load`, `open_tools` and `Rules` raise, and `ConfigError` where
    `search_by_source` names a source that no question has.
    """

    @staticmethod
    def version_of(options: Mapping[str, Any]) -> int:
        """Return 5. Since version 2, code that failed is reported in another way; since version 3,
        answers are compared by what they mean, and search finds documents in any script; since
        version 4, a yes or no is right or wrong as a whole; since version 5, letters after a space
        may be variables, words may have commands of LaTeX, and code may be indented as a whole.
        """
        return 5

    # The signature is long because the registry reads a recipe's options from it: grouping them
    # into records would nest the options of every recipe.
    def __init__(
        self,
        *,
        questions: Sequence[str | QuestionFile] = SHIPPED,
        domains: Mapping[str, Domain] | None = None,
        tools: Sequence[str] = ("search", "python"),
        searched: Searched = "corpus",
        search_url: str = "",
        corpus: str = "",
        cache_dir: str = "runs/cache/retrieval",
        web_url: str = Serper.URL,
        search_api_key: str = "",
        top_k: int = 4,
        document_chars: int = 1200,
        search_timeout_s: float = 60.0,
        search_answer_mib: int = 16,
        search_by_source: Mapping[str, SourceSearch] | None = None,
        sandbox: str = "strictest",
        python_timeout_s: float = 30.0,
        python_calls: int = 6,
        search_calls: int = 6,
        calls: int = 0,
        extra_calls: int = 0,
        spare_replies: int = 1,
        python_chars: int = 1000,
        search_chars: int = 5000,
        summarised: bool = False,
        judged: Judged = "none",
        success_from: float = 0.8,
        answers: Answers = "plain",
    ) -> None:
        settings = ToolSettings(
            tools=tuple(tools),
            searched=searched,
            search_url=search_url,
            corpus=corpus,
            cache_dir=cache_dir,
            web_url=web_url,
            search_api_key=search_api_key,
            top_k=top_k,
            document_chars=document_chars,
            search_timeout_s=search_timeout_s,
            search_answer_mib=search_answer_mib,
            sandbox=sandbox,
            python_timeout_s=python_timeout_s,
        )
        rules = Rules(
            python_calls=python_calls,
            search_calls=search_calls,
            calls=calls,
            extra_calls=extra_calls,
            spare_replies=spare_replies,
            python_chars=python_chars,
            search_chars=search_chars,
            summarised=summarised,
            judged=judged,
            success_from=success_from,
            answers=answers,
        )
        files = tuple(map(question_file, questions))
        problems = load(files, tuple((domains or {}).items()))
        self._settings = _settings_of_sources(settings, search_by_source or {}, problems)
        self._open_tools = _open_all(self._settings)
        toolbox, by_source = _toolboxes(self._open_tools)
        super().__init__(problems, toolbox, rules, by_source)

    @staticmethod
    def variables_of(options: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables that stand in for options. The address of a server comes from a
        variable only if the recipe does not say what is searched, since the value of a variable is
        not part of a run's id.
        """
        is_local = options.get("corpus") or options.get("searched") == "web"
        return {"search_api_key": "SERPER_API_KEY"} | ({} if is_local else {"search_url": "AGENTR_SEARCH_URL"})

    @staticmethod
    def files_of(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the question sets, and each corpus that is searched in this process."""
        names = [question_file(entry).path for entry in options.get("questions", SHIPPED)]
        sets = [str(place_of(name)) if name in SHIPPED else name for name in names]
        has_search = "search" in options.get("tools", ("search",))
        is_remote = options.get("search_url") or options.get("searched") == "web"
        corpus = options.get("corpus", "")
        uses_shipped_corpus = has_search and not corpus and not is_remote
        source_corpora = [fields.get("corpus") for fields in (options.get("search_by_source") or {}).values()]
        corpora = [
            corpus or (str(data_path("reasoning", "corpus.jsonl")) if uses_shipped_corpus else ""),
            *source_corpora,
        ]
        return (*sets, *dict.fromkeys(corpus for corpus in corpora if corpus))

    def keep_answers(self, kept: AnswerStore) -> None:
        """Look up and store the answers of search servers in `kept`; see
        `Environment.keep_answers`.
        """
        self._toolbox, self._toolbox_by_source = _toolboxes(_open_all(self._settings, kept))

    def reach(self) -> None:
        """Wait until every search answers. Raises `EnvironmentFault` or `UserError` if one does
        not.
        """
        for tools in self._open_tools.values():
            tools.reach()

    def start_hint(self) -> str:
        """Return how a server of documents is started; see `Environment.start_hint`."""
        return "`agentr retrieve serve CORPUS` starts one for documents of yours"

    def sandbox(self) -> str:
        """Start the Python tool and return the level at which it confines code; see
        `Environment.sandbox`.
        """
        return next(iter(self._open_tools.values())).sandbox()


def _settings_of_sources(
    settings: ToolSettings, searches: Mapping[str, Any], questions: QuestionSet
) -> dict[str, ToolSettings]:
    """Return the tool settings of each source with its own, by `source_key`; under the empty
    string, those of all other sources, if there are any. Raises `ConfigError` for an unknown or
    repeated source.
    """
    setting = "environment.options.search_by_source"
    if searches and SEARCH not in settings.tools:
        raise ConfigError(f"{setting}: {SEARCH} is not among environment.options.tools; add it, or leave this out")
    sources = {source_key(problem.source): problem.source for problems in questions.values() for problem in problems}
    by_source: dict[str, ToolSettings] = {}
    for source, fields in searches.items():
        key = source_key(source)
        if key not in sources:
            raise ConfigError(
                f"{setting}: no question has the source {source}; there are {', '.join(sources.values())}"
            )
        if key in by_source:
            raise ConfigError(f"{setting} names {sources[key]} twice; name each source once")
        by_source[key] = settings.for_source(SourceSearch(**fields) if isinstance(fields, Mapping) else fields)
    return ({"": settings} if sources.keys() - by_source.keys() else {}) | by_source


def _open_all(settings: Mapping[str, ToolSettings], answers: AnswerStore | None = None) -> dict[str, OpenTools]:
    open_by_source: dict[str, OpenTools] = {}
    for source, tools in settings.items():
        try:
            open_by_source[source] = open_tools(tools, answers)
        except ConfigError as error:
            if not source:
                raise
            raise ConfigError(f"environment.options.search_by_source.{source}: {error}") from None
    return open_by_source


def _toolboxes(open_by_source: Mapping[str, OpenTools]) -> tuple[Toolbox, Mapping[str, Toolbox]]:
    """Return the toolbox of most questions, and all toolboxes by source key."""
    toolboxes = {source: tools.toolbox for source, tools in open_by_source.items()}
    return toolboxes.get("") or next(iter(toolboxes.values())), toolboxes
