"""A world on an OpenEnv server: one WebSocket for each episode, and options for what the protocol
leaves open.

OpenEnv has no success, no step limit and no scale of rewards. It does not say which field of an
observation is its text, nor which arguments a reset takes, and servers silently ignore unknown
arguments. The recipe must say what cannot be known; what can be observed at a server is checked
before a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from agentr_core.environment import Instances, Repeatability, checked_number
from agentr_core.environments.agentgym.wire import check_apart, names_file, read_ids
from agentr_core.environments.native import feedback, is_misread, join_actions, misread
from agentr_core.environments.openenv.connection import Server, Session, properties, server_at
from agentr_core.environments.remote import RemoteWorld, Turn
from agentr_core.episodes.transcript import Misread, NativeCall, NativeTurns, read_calls
from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentUnavailable,
    IllTypedAnswer,
    MalformedAnswer,
)
from agentr_core.replies import Labels, block_after_label, line_after_label
from agentr_core.texts import abbreviate, lone_surrogate
from agentr_core.types import Instance, Transition

# How options describe observations, successes and resets.

_MISSING = object()
_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_THRESHOLD = re.compile(r"\s*reward\s*(>=|>)\s*(-?\d+(?:\.\d+)?)\s*")


def at_path(fields: Any, path: str) -> Any:
    """Return the value at a dotted path in mappings and lists, such as `metadata.board` or
    `messages.-1.content`; `_MISSING` if there is none.
    """
    for key in path.split("."):
        if isinstance(fields, list) and re.fullmatch(r"-?\d+", key) and -len(fields) <= int(key) < len(fields):
            fields = fields[int(key)]
        elif isinstance(fields, Mapping) and key in fields:
            fields = fields[key]
        else:
            return _MISSING
    return fields


def in_words(value: Any) -> str:
    """Return a value of an observation as text: a text as it is, the contents of a list of messages
    on lines, anything else as JSON; empty for None and `_MISSING`.
    """
    if value is None or value is _MISSING:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(at_path(part, "content"), str) for part in value):
        return "\n".join(part["content"] for part in value)
    return json.dumps(value, ensure_ascii=False)


def filled(template: Any, split: str, index: int) -> Any:
    """Return a template of reset arguments with `{index}` and `{split}` replaced; a value that is
    just `{index}` becomes a number.
    """
    if isinstance(template, str):
        if template == "{index}":
            return index
        return template.replace("{index}", str(index)).replace("{split}", split)
    if isinstance(template, Mapping):
        return {key: filled(value, split, index) for key, value in template.items()}
    return [filled(value, split, index) for value in template] if isinstance(template, list) else template


_INSTRUCTION = """\
You act in a text world. Reply with one line of thought and one action, nothing else:
Thought: why this action
Action: the action"""


class Beginning(NamedTuple):
    """The beginning of an instance: its first observation, and the state that the server reports,
    empty if none.
    """

    text: str
    state: Mapping[str, Any]


class Calls:
    """A mixin for native tool calls of the server's tools or, if it has none, of one tool with the
    fields of its action. An action is the call as JSON.
    """

    _server: Server
    _standing: Callable[[], float]

    @property
    def transcript(self) -> NativeTurns:
        """The transcript, with the tools of the server."""
        return NativeTurns(tools=self._server.tools)

    def parse(self, reply: str) -> str:
        """Return the call of a reply as JSON, joined if there are several; empty if there is no
        call, and the action of `misread` for a call that cannot be read.
        """
        calls = read_calls(reply)
        if calls is None or isinstance(calls, Misread):
            return "" if calls is None else misread(calls)
        return join_actions([self._as_json(call) for call in calls])

    def _as_json(self, call: NativeCall) -> str:
        if call.name not in (names := [tool.name for tool in self._server.tools]):
            return misread(Misread(f"there is no such tool; there are {', '.join(names)}"))
        text = json.dumps({"tool_name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return text if lone_surrogate(text) is None else misread(Misread("an argument has half a surrogate pair"))

    def step(self, action: str) -> Transition:
        """Carry out a call; a reply without a readable call is answered without asking the
        server.
        """
        if not action or is_misread(action):
            return Transition(feedback(action), self._standing(), False, False, {"success": False, "valid": False})
        transition: Transition = super().step(action)  # type: ignore[misc]
        return transition

    def _message(self, action: str) -> Mapping[str, Any] | str:
        call = json.loads(action)
        if self._server.calls:
            return {"type": "call_tool", **call}
        arguments: Mapping[str, Any] = call["arguments"]
        return arguments


class OpenEnv(RemoteWorld):
    """A world on an OpenEnv server at `url`, with native calls or an action in words.

    Args:
        url: the address of the server, such as http://127.0.0.1:8000; by default the value of the
            variable AGENTR_OPENENV.
        success: what counts as a success, since OpenEnv has none: `reward >= 1`, on the server's
            own scale of an episode's reward, or the path of a field that is true or false, such as
            `metadata.won`.
        instruction: the first message of the conversation; it must name the actions.
        step_limit: the number of steps after which an episode is cut.
        train: the instances of the split: numbers and ranges such as "0-99,120", or the name of a
            split of the server's Task API; by default its split of that name or type.
        test: the same for the test split.
        reset_arguments: the arguments of a reset, with `{index}` and `{split}` for those of the
            instance; by default `{seed: "{index}"}` if numbers are given for both splits, else
            `{split: "{split}", index: "{index}"}`.
        instances_differ: whether each instance is a different problem, even if they begin alike or
            the server takes no arguments at all.
        observation: a template for the text of an observation, with paths of fields in braces, such
            as `{prompt}\\n{messages}`; by default the one field that is a text, else JSON.
        action: the field of an action for the agent's text; by default the only required field, if
            it is a text. If there is neither, an action is a JSON object.
        bad_action: what an error of the server at a step means: the action was bad, and the agent
            is told so (`refused`), or the world broke (`fault`).
        rewards: whether an episode's reward is the `sum` of its steps' rewards or the `last` one.
        reward_low, reward_high: the range of an episode's reward, which is scaled to [0, 1].
        repeatability: how exactly an instance repeats itself: exact, unordered or never.
        timeout_s: seconds that an answer may take.
        patience_s: seconds for which a server that is absent or full is tried again.
        retries: how often an episode is restored for one step before the fault is raised.
        answer_mib: the largest size of an answer, in MiB.
    """

    name = "openenv"
    variables: ClassVar[Mapping[str, str]] = {"url": "AGENTR_OPENENV"}
    labels: Labels | None = "lenient"
    native = Calls

    def __init__(
        self,
        *,
        url: str = "",
        success: str = "",
        instruction: str = _INSTRUCTION,
        step_limit: int = 20,
        train: str = "",
        test: str = "",
        reset_arguments: Mapping[str, Any] | None = None,
        instances_differ: bool = False,
        observation: str = "",
        action: str = "",
        bad_action: Literal["fault", "refused"] = "fault",
        rewards: Literal["sum", "last"] = "sum",
        reward_low: float = 0.0,
        reward_high: float = 1.0,
        repeatability: Literal["exact", "unordered", "never"] = "exact",
        timeout_s: float = 60.0,
        patience_s: float = 30.0,
        retries: int = 2,
        answer_mib: int = 16,
    ) -> None:
        super().__init__(
            url=url,
            example="http://127.0.0.1:8000",
            timeout_s=timeout_s,
            patience_s=patience_s,
            retries=retries,
            answer_mib=answer_mib,
        )
        if not success:
            raise ConfigError(
                f"{self.name} needs the option success, since OpenEnv has none: `reward >= 1`, or the path of a field "
                "that is true or false, such as metadata.won"
            )
        if step_limit < 1:
            raise ConfigError(f"{self.name}: step_limit must be at least 1")
        if not reward_low < reward_high:
            raise ConfigError(f"{self.name}: reward_low {reward_low:g} is not below reward_high {reward_high:g}")
        self._server = server_at(url.rstrip("/"), float(timeout_s), float(patience_s), answer_mib)
        self._success = success
        self.instruction = instruction
        self.step_limit = step_limit
        self._given = {"train": train, "test": test}
        self._reset_template = reset_arguments
        self._instances_differ = instances_differ
        self._text_template = observation
        self._action = action
        self._bad_action = bad_action
        self._rewards = rewards
        self._low, self._high = reward_low, reward_high
        self.repeatability = Repeatability(repeatability)
        self._session: Session | None = None
        self._reward = 0.0
        self._count = 0

    # The instances, and the arguments of a reset.

    @cached_property
    def _numbers(self) -> Mapping[str, tuple[str, Sequence[int]]]:
        """The server's name of each split and the numbers of its instances, by our name of the
        split.
        """
        numbers: Mapping[str, tuple[str, Sequence[int]]]
        if all(value and not names_file(value) for value in self._given.values()):
            numbers = {split: (split, read_ids(value, self.name)) for split, value in self._given.items()}
        else:
            numbers = self._listed()
        by_split = "{split}" in json.dumps(self._arguments)
        if not by_split or numbers["train"][0] == numbers["test"][0]:
            check_apart(numbers["train"][1], numbers["test"][1], self.name)
        return numbers

    def _listed(self) -> Mapping[str, tuple[str, Sequence[int]]]:
        """Return the splits of the Task API, with one as `train` and one as `test`. Raises
        `EnvironmentServerError` if it has none that fits.
        """
        tasks, numbers = self._server.tasks, dict[str, tuple[str, Sequence[int]]]()
        if not tasks:
            raise EnvironmentServerError(
                f"{self.name}: the server at {self._server.url} lists no splits, so say which numbers there are: "
                'train: "0-799", test: "800-999", and in reset_arguments what a reset is sent'
            )
        for split, kinds in (("train", ("train",)), ("test", ("test", "validation"))):
            value = self._given[split]
            of_type = [name for kind in kinds for name, (type_, _) in tasks.items() if type_ == kind]
            name = value if names_file(value) else split if split in tasks else next(iter(of_type), "")
            if name not in tasks:
                raise EnvironmentServerError(
                    f"{self.name}: the server at {self._server.url} has the splits {', '.join(tasks)}, and none for "
                    f"option {split}; name one of them"
                )
            size = tasks[name][1]
            ids = read_ids(value, self.name) if value and not names_file(value) else range(size)
            if ids and max(ids) >= size:
                raise EnvironmentServerError(
                    f"{self.name}: option {split} has the number {max(ids)}, and split {name} of the server has {size}"
                )
            numbers[split] = (name, ids)
        used_names = {name for name, _ in numbers.values()}
        return numbers | {name: (name, range(size)) for name, (_, size) in tasks.items() if name not in used_names}

    @property
    def _arguments(self) -> Mapping[str, Any]:
        if self._reset_template is not None:
            return self._reset_template
        numbered = all(value and not names_file(value) for value in self._given.values())
        return {"seed": "{index}"} if numbered else {"split": "{split}", "index": "{index}"}

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits: `train`, `test`, and other splits of the Task API."""
        return tuple(self._numbers)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split; an instance's index is the number that the server
        gets.
        """
        return Instances(self.name, split, self._numbers[split][1])

    def identity(self, instance: Instance) -> str:
        """Return the first observation of an instance, or its key with `instances_differ`."""
        return instance.key if self._instances_differ else self.reset(instance)

    # One episode.

    def parse(self, reply: str) -> str:
        """Return the line after the last "Action:" of a reply; if an action is a JSON object, all
        that follows the label.
        """
        extract = line_after_label if self._field else block_after_label
        return extract(reply, self.labels or "lenient")

    @cached_property
    def _field(self) -> str:
        """The field of an action for the agent's text; empty if an action is a JSON object."""
        schema = self._server.action
        fields = properties(schema)
        if self._action and self._action not in fields:
            raise EnvironmentServerError(
                f"{self.name}: an action of the server at {self._server.url} has the fields {', '.join(fields)}, and "
                f"no {self._action}; correct the option action"
            )
        required_texts = [name for name in schema.get("required") or () if at_path(fields, f"{name}.type") == "string"]
        words = required_texts[0] if len(schema.get("required") or ()) == len(required_texts) == 1 else ""
        return self._action or words

    def _message(self, action: str) -> Mapping[str, Any] | str:
        """Return the fields of an action for the server, or a text that says why it is not an
        action.
        """
        field = self._field
        if field and at_path(properties(self._server.action), f"{field}.type") == "string":
            return {field: action}
        try:
            value = json.loads(action)
        except (ValueError, RecursionError):
            value = action
        if field:
            return {field: value}
        return value if isinstance(value, dict) else "An action is a JSON object."

    def _begin(self, instance: Instance) -> str:
        self._release()
        self._reward, self._count = 0.0, 0
        split = self._numbers[instance.split][0]
        self._session, answer = self._server.begin("reset", filled(self._arguments, split, instance.index))
        if answer["type"] == "error":
            raise EnvironmentRefusal(
                f"{self._server.url} answered the reset of {instance.key} with {self._error(answer)}"
            )
        if answer["data"].get("done"):
            raise EnvironmentRefusal(f"{self._server.url}: {instance.key} is over as soon as it begins")
        return self._text(self._fields(answer))

    def _act(self, action: str) -> Turn:
        if self._session is None:
            raise EnvironmentFault(f"{self.name}: there is no episode to act in")
        message = self._message(action)
        if isinstance(message, str):
            return self._turn(message, {}, False, valid=False)
        answer = self._session.ask("step", message)
        if answer["type"] == "error":
            code = answer["data"].get("code")
            if code == "VALIDATION_ERROR" or (code == "EXECUTION_ERROR" and self._bad_action == "refused"):
                return self._turn(self._error(answer), {}, False, valid=False)
            hint = "; if it means a bad action, set bad_action: refused" if code == "EXECUTION_ERROR" else ""
            raise EnvironmentRefusal(f"{self._server.url} answered a step with {self._error(answer)}{hint}")
        fields, reward, done = self._fields(answer), answer["data"].get("reward"), answer["data"].get("done", False)
        if not isinstance(done, bool):
            raise MalformedAnswer(f"{self._server.url}: done is {abbreviate(done)}, not true or false")
        if reward is not None:
            number = checked_number(float(reward) if isinstance(reward, bool) else reward, f"{self.name}: the reward")
            self._reward = number if self._rewards == "last" else self._reward + number
        return self._turn(self._text(fields), fields, done, valid=False if fields.get("error") else None)

    def _turn(self, text: str, fields: Mapping[str, Any], done: bool, *, valid: bool | None) -> Turn:
        self._count += 1
        truncated = not done and self._count >= self.step_limit
        turn = Turn(text, self._standing(), done, truncated, self._succeeds(fields, done), valid)
        if turn.ended:
            # Released at once: this may be the server's only place.
            self._release()
        return turn

    def _standing(self) -> float:
        """Return the reward of the episode so far, scaled to [0, 1]. Raises `IllTypedAnswer` if it
        is outside `reward_low` to `reward_high`.
        """
        reward = (self._reward - self._low) / (self._high - self._low)
        if not -1e-6 <= reward <= 1 + 1e-6:
            raise IllTypedAnswer(
                f"{self.name}: the reward of an episode is {self._reward:g} by now, which is not between reward_low "
                f"{self._low:g} and reward_high {self._high:g}; set these, or rewards: "
                f"{'last, if each step repeats the reward so far' if self._rewards == 'sum' else 'sum'}"
            )
        return min(max(reward, 0.0), 1.0)

    def _succeeds(self, fields: Mapping[str, Any], done: bool) -> bool:
        if threshold := _THRESHOLD.fullmatch(self._success):
            bound = float(threshold[2])
            return self._reward > bound if threshold[1] == ">" else self._reward >= bound - 1e-9
        value = at_path(fields, self._success)
        if (value is _MISSING or value is None) and not done:
            return False
        if not isinstance(value, bool):
            description = "no such field" if value is _MISSING else abbreviate(value)
            raise IllTypedAnswer(
                f"{self.name}: option success: an episode ended with {description} at {self._success}, not true or "
                f"false; the observation has {', '.join(fields)}"
            )
        return value

    def _fields(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of an observation, and among them its metadata, which a server may send
        beside it.
        """
        fields = answer["data"].get("observation")
        if not isinstance(fields, dict):
            raise MalformedAnswer(f"{self._server.url}: an observation is {abbreviate(fields)}")
        return {"metadata": answer["data"].get("metadata")} | fields

    def _text(self, fields: Mapping[str, Any]) -> str:
        """Return an observation as text: by the template of option `observation`, else the message
        of its error, the result of a tool, its only text, or all its fields as JSON.
        """
        if template := self._text_template:
            paths = _PLACEHOLDER.findall(template)
            values = {path: at_path(fields, path) for path in paths}
            if all(value is _MISSING for value in values.values()):
                raise IllTypedAnswer(
                    f"{self.name}: option observation: an observation has {', '.join(fields)}, and none of "
                    f"{', '.join(paths)}"
                )
            return _PLACEHOLDER.sub(lambda match: in_words(values[match[1]]), template).strip()
        if isinstance(error := fields.get("error"), dict):
            return in_words(error.get("message") or error)
        if isinstance(result := fields.get("result"), dict) and "tool_name" in fields:
            return in_words(result.get("data") or at_path(result, "content"))
        texts = [value for key, value in fields.items() if key != "metadata" and value and isinstance(value, str)]
        plain = {key: value for key, value in fields.items() if key != "metadata"}
        return texts[0] if len(texts) == 1 else json.dumps(plain, ensure_ascii=False)

    def _error(self, answer: Mapping[str, Any]) -> str:
        data = answer["data"]
        details = [
            f"{'.'.join(map(str, detail.get('loc') or ()))}: {detail.get('msg')}"
            for detail in data.get("errors") or ()
            if isinstance(detail, dict)
        ]
        return " ".join(f"{data.get('code')}: {'; '.join([str(data.get('message')), *details])}".split())[:600]

    def _is_open(self) -> bool:
        return self._session is not None

    def _give_up(self, fault: EnvironmentFault) -> None:
        self._release()

    def _release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # The checks before a run.

    def reach(self) -> None:
        """Wait until the server answers, and check it. Raises `EnvironmentServerError` with the
        first flaw, or if it does not answer.
        """
        try:
            for _, sentence in self.flaws():
                raise EnvironmentServerError(sentence)
        except EnvironmentUnavailable as fault:
            raise EnvironmentServerError(f"{self.name}: {fault}; {self.start_hint()}") from fault

    def flaws(self) -> Sequence[tuple[str, str]]:
        """Return why the server cannot be trained on with these options, as pairs of rule and
        sentence; empty if it can. For this, one instance is begun twice, and up to two others once.
        """
        train, test, url = self.instances("train"), self.instances("test"), self._server.url
        if self._server.calls and not isinstance(self, Calls):
            return [("actions", f"{self.name}: {url} takes calls of tools: set environment.transcript: native")]
        first, second = self._look(train[0]), self._look(train[0])
        # Values that differ between two beginnings of one instance, such as a time, say nothing
        # about others.
        varying_keys = {key for key in first.state if first.state[key] != second.state.get(key)}
        if self.repeatability is Repeatability.EXACT and (first.text != second.text or varying_keys):
            difference = f"the state {', '.join(sorted(varying_keys))}" if first.text == second.text else "another text"
            return [
                (
                    "repeats",
                    f"{self.name}: {train[0].key} began twice at {url}, the second time with {difference}: what was "
                    "won once can be lost by the same actions, and after a fault an episode cannot be restored; "
                    "correct reset_arguments, or set repeatability: never",
                )
            ]
        if self._instances_differ:
            return []
        arguments = {key: json.dumps(value) for key, value in self._arguments.items()}
        probes = [("{index}", (*train[1:2], test[0])[0])]
        probes += [("{split}", test[0])] if any("{split}" in value for value in arguments.values()) else []
        without = [placeholder for placeholder, instance in probes if self._alike(first, instance, varying_keys)]
        if not without:
            return []
        names = [key for key, value in arguments.items() if any(placeholder in value for placeholder in without)]
        reason = f"the reset argument {', '.join(names)} has no effect" if names else "a reset is sent no number"
        return [
            (
                "arguments",
                f"{self.name}: {reason} at {url}: {train[0].key} and others begin alike, so train and test cannot be "
                "kept apart; set reset_arguments to what its reset takes, or instances_differ: true if they differ "
                "later",
            )
        ]

    def _look(self, instance: Instance) -> Beginning:
        text = self.reset(instance)
        answer = {} if self._session is None else self._session.ask("state")
        self._release()
        state = answer["data"] if answer.get("type") == "state" else {}
        return Beginning(text, {key: value for key, value in state.items() if key not in ("episode_id", "step_count")})

    def _alike(self, first: Beginning, instance: Instance, varying_keys: set[str]) -> bool:
        beginning = self._look(instance)
        keys = (first.state.keys() | beginning.state.keys()) - varying_keys
        return beginning.text == first.text and all(first.state.get(k) == beginning.state.get(k) for k in keys)

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._server.url

    def start_hint(self) -> str:
        """Return how a server is started; see `Environment.start_hint`."""
        return "`agentr env serve textcraft --protocol openenv` starts one"
