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
from agentr_core.environments.agentgym.wire import check_disjoint, names_file, read_ids
from agentr_core.environments.native import is_misread, join_actions, misread_action, no_call_observation
from agentr_core.environments.openenv.connection import Server, Session, properties, shared_server
from agentr_core.environments.remote import RemoteWorld, StepOutcome
from agentr_core.episodes.transcript import NativeCall, NativeTurns, UnreadableCall, read_calls
from agentr_core.errors import (
    ConfigError,
    EnvironmentFault,
    EnvironmentRefusal,
    EnvironmentServerError,
    EnvironmentUnavailable,
    IllTypedAnswer,
    MalformedAnswer,
)
from agentr_core.replies import LabelStyle, block_after_label, line_after_label
from agentr_core.texts import abbreviate, lone_surrogate
from agentr_core.types import Instance, Transition

# How options describe observations, successes and resets.

_MISSING = object()
_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_THRESHOLD = re.compile(r"\s*reward\s*(>=|>)\s*(-?\d+(?:\.\d+)?)\s*")


def value_at_path(fields: Any, path: str) -> Any:
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


def as_text(value: Any) -> str:
    """Return a value of an observation as text: a text as it is, the contents of a list of messages
    on lines, anything else as JSON; empty for None and `_MISSING`.
    """
    if value is None or value is _MISSING:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(value_at_path(part, "content"), str) for part in value):
        return "\n".join(part["content"] for part in value)
    return json.dumps(value, ensure_ascii=False)


def fill_template(template: Any, split: str, index: int) -> Any:
    """Return a template of reset arguments with `{index}` and `{split}` replaced; a value that is
    just `{index}` becomes a number.
    """
    if isinstance(template, str):
        if template == "{index}":
            return index
        return template.replace("{index}", str(index)).replace("{split}", split)
    if isinstance(template, Mapping):
        return {key: fill_template(value, split, index) for key, value in template.items()}
    return [fill_template(value, split, index) for value in template] if isinstance(template, list) else template


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


class NativeCallsMixin:
    """A mixin for native tool calls of the server's tools or, if it has none, of one tool with the
    fields of its action. An action is the call as JSON.
    """

    _server: Server
    _episode_reward: Callable[[], float]

    @property
    def transcript(self) -> NativeTurns:
        """The transcript, with the tools of the server."""
        return NativeTurns(tools=self._server.tools)

    def parse(self, reply: str) -> str:
        """Return the call of a reply as JSON, joined if there are several; empty if there is no
        call, and the action of `misread_action` for a call that cannot be read.
        """
        calls = read_calls(reply)
        if calls is None or isinstance(calls, UnreadableCall):
            return "" if calls is None else misread_action(calls)
        return join_actions([self._as_json(call) for call in calls])

    def _as_json(self, call: NativeCall) -> str:
        if call.name not in (tool_names := [tool.name for tool in self._server.tools]):
            return misread_action(UnreadableCall(f"there is no such tool; there are {', '.join(tool_names)}"))
        call_text = json.dumps({"tool_name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return (
            call_text
            if lone_surrogate(call_text) is None
            else misread_action(UnreadableCall("an argument has half a surrogate pair"))
        )

    def step(self, action: str) -> Transition:
        """Carry out a call; a reply without a readable call is answered without asking the
        server.
        """
        if not action or is_misread(action):
            return Transition(
                no_call_observation(action), self._episode_reward(), False, False, {"success": False, "valid": False}
            )
        transition: Transition = super().step(action)  # type: ignore[misc]
        return transition

    def _step_message(self, action: str) -> Mapping[str, Any] | str:
        call = json.loads(action)
        if self._server.takes_tool_calls:
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
    labels: LabelStyle | None = "lenient"
    native = NativeCallsMixin

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
        self._server = shared_server(url.rstrip("/"), float(timeout_s), float(patience_s), answer_mib)
        self._success_rule = success
        self.instruction = instruction
        self.step_limit = step_limit
        self._split_options = {"train": train, "test": test}
        self._reset_template = reset_arguments
        self._instances_differ = instances_differ
        self._text_template = observation
        self._action_option = action
        self._bad_action = bad_action
        self._reward_rule = rewards
        self._reward_low, self._reward_high = reward_low, reward_high
        self.repeatability = Repeatability(repeatability)
        self._session: Session | None = None
        self._raw_reward = 0.0
        self._num_steps = 0

    # The instances, and the arguments of a reset.

    @cached_property
    def _server_splits(self) -> Mapping[str, tuple[str, Sequence[int]]]:
        """The server's name of each split and the numbers of its instances, by our name of the
        split.
        """
        server_splits: Mapping[str, tuple[str, Sequence[int]]]
        if all(value and not names_file(value) for value in self._split_options.values()):
            server_splits = {split: (split, read_ids(value, self.name)) for split, value in self._split_options.items()}
        else:
            server_splits = self._task_api_splits()
        is_split_sent = "{split}" in json.dumps(self._reset_arguments)
        if not is_split_sent or server_splits["train"][0] == server_splits["test"][0]:
            check_disjoint(server_splits["train"][1], server_splits["test"][1], self.name)
        return server_splits

    def _task_api_splits(self) -> Mapping[str, tuple[str, Sequence[int]]]:
        """Return the splits of the Task API, with one as `train` and one as `test`. Raises
        `EnvironmentServerError` if it has none that fits.
        """
        task_splits, server_splits = self._server.task_splits, dict[str, tuple[str, Sequence[int]]]()
        if not task_splits:
            raise EnvironmentServerError(
                f"{self.name}: the server at {self._server.url} lists no splits, so say which numbers there are: "
                'train: "0-799", test: "800-999", and in reset_arguments what a reset is sent'
            )
        for split, types in (("train", ("train",)), ("test", ("test", "validation"))):
            value = self._split_options[split]
            names_of_type = [
                name for type_name in types for name, (type_, _) in task_splits.items() if type_ == type_name
            ]
            name = value if names_file(value) else split if split in task_splits else next(iter(names_of_type), "")
            if name not in task_splits:
                raise EnvironmentServerError(
                    f"{self.name}: the server at {self._server.url} has the splits {', '.join(task_splits)}, and none "
                    f"for option {split}; name one of them"
                )
            size = task_splits[name][1]
            ids = read_ids(value, self.name) if value and not names_file(value) else range(size)
            if ids and max(ids) >= size:
                raise EnvironmentServerError(
                    f"{self.name}: option {split} has the number {max(ids)}, and split {name} of the server has {size}"
                )
            server_splits[split] = (name, ids)
        used_names = {name for name, _ in server_splits.values()}
        return server_splits | {
            name: (name, range(size)) for name, (_, size) in task_splits.items() if name not in used_names
        }

    @property
    def _reset_arguments(self) -> Mapping[str, Any]:
        if self._reset_template is not None:
            return self._reset_template
        are_numbers_given = all(value and not names_file(value) for value in self._split_options.values())
        return {"seed": "{index}"} if are_numbers_given else {"split": "{split}", "index": "{index}"}

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits: `train`, `test`, and other splits of the Task API."""
        return tuple(self._server_splits)

    def instances(self, split: str) -> Sequence[Instance]:
        """Return the instances of a split; an instance's index is the number that the server
        gets.
        """
        return Instances(self.name, split, self._server_splits[split][1])

    def identity(self, instance: Instance) -> str:
        """Return the first observation of an instance, or its key with `instances_differ`."""
        return instance.key if self._instances_differ else self.reset(instance)

    # One episode.

    def parse(self, reply: str) -> str:
        """Return the line after the last "Action:" of a reply; if an action is a JSON object, all
        that follows the label.
        """
        extract = line_after_label if self._action_field else block_after_label
        return extract(reply, self.labels or "lenient")

    @cached_property
    def _action_field(self) -> str:
        """The field of an action for the agent's text; empty if an action is a JSON object."""
        schema = self._server.action_schema
        fields = properties(schema)
        if self._action_option and self._action_option not in fields:
            raise EnvironmentServerError(
                f"{self.name}: an action of the server at {self._server.url} has the fields {', '.join(fields)}, and "
                f"no {self._action_option}; correct the option action"
            )
        required_texts = [
            name for name in schema.get("required") or () if value_at_path(fields, f"{name}.type") == "string"
        ]
        only_required_text = required_texts[0] if len(schema.get("required") or ()) == len(required_texts) == 1 else ""
        return self._action_option or only_required_text

    def _step_message(self, action: str) -> Mapping[str, Any] | str:
        """Return the fields of an action for the server, or a text that says why it is not an
        action.
        """
        action_field = self._action_field
        if action_field and value_at_path(properties(self._server.action_schema), f"{action_field}.type") == "string":
            return {action_field: action}
        try:
            value = json.loads(action)
        except (ValueError, RecursionError):
            value = action
        if action_field:
            return {action_field: value}
        return value if isinstance(value, dict) else "An action is a JSON object."

    def _begin(self, instance: Instance) -> str:
        self._release()
        self._raw_reward, self._num_steps = 0.0, 0
        split = self._server_splits[instance.split][0]
        self._session, answer = self._server.open_session(
            "reset", fill_template(self._reset_arguments, split, instance.index)
        )
        if answer["type"] == "error":
            raise EnvironmentRefusal(
                f"{self._server.url} answered the reset of {instance.key} with {self._error_text(answer)}"
            )
        if answer["data"].get("done"):
            raise EnvironmentRefusal(f"{self._server.url}: {instance.key} is over as soon as it begins")
        return self._observation_text(self._observation_fields(answer))

    def _act(self, action: str) -> StepOutcome:
        if self._session is None:
            raise EnvironmentFault(f"{self.name}: there is no episode to act in")
        message = self._step_message(action)
        if isinstance(message, str):
            return self._step_outcome(message, {}, False, valid=False)
        answer = self._session.ask("step", message)
        if answer["type"] == "error":
            code = answer["data"].get("code")
            if code == "VALIDATION_ERROR" or (code == "EXECUTION_ERROR" and self._bad_action == "refused"):
                return self._step_outcome(self._error_text(answer), {}, False, valid=False)
            hint = "; if it means a bad action, set bad_action: refused" if code == "EXECUTION_ERROR" else ""
            raise EnvironmentRefusal(f"{self._server.url} answered a step with {self._error_text(answer)}{hint}")
        fields, reward, done = (
            self._observation_fields(answer),
            answer["data"].get("reward"),
            answer["data"].get("done", False),
        )
        if not isinstance(done, bool):
            raise MalformedAnswer(f"{self._server.url}: done is {abbreviate(done)}, not true or false")
        if reward is not None:
            number = checked_number(float(reward) if isinstance(reward, bool) else reward, f"{self.name}: the reward")
            self._raw_reward = number if self._reward_rule == "last" else self._raw_reward + number
        return self._step_outcome(
            self._observation_text(fields), fields, done, valid=False if fields.get("error") else None
        )

    def _step_outcome(self, text: str, fields: Mapping[str, Any], done: bool, *, valid: bool | None) -> StepOutcome:
        self._num_steps += 1
        truncated = not done and self._num_steps >= self.step_limit
        outcome = StepOutcome(text, self._episode_reward(), done, truncated, self._is_success(fields, done), valid)
        if outcome.is_over:
            # Released at once: this may be the server's only place.
            self._release()
        return outcome

    def _episode_reward(self) -> float:
        """Return the reward of the episode so far, scaled to [0, 1]. Raises `IllTypedAnswer` if it
        is outside `reward_low` to `reward_high`.
        """
        reward = (self._raw_reward - self._reward_low) / (self._reward_high - self._reward_low)
        if not -1e-6 <= reward <= 1 + 1e-6:
            raise IllTypedAnswer(
                f"{self.name}: the reward of an episode is {self._raw_reward:g} by now, which is not between "
                f"reward_low {self._reward_low:g} and reward_high {self._reward_high:g}; set these, or rewards: "
                f"{'last, if each step repeats the reward so far' if self._reward_rule == 'sum' else 'sum'}"
            )
        return min(max(reward, 0.0), 1.0)

    def _is_success(self, fields: Mapping[str, Any], done: bool) -> bool:
        if threshold := _THRESHOLD.fullmatch(self._success_rule):
            bound = float(threshold[2])
            return self._raw_reward > bound if threshold[1] == ">" else self._raw_reward >= bound - 1e-9
        value = value_at_path(fields, self._success_rule)
        if (value is _MISSING or value is None) and not done:
            return False
        if not isinstance(value, bool):
            description = "no such field" if value is _MISSING else abbreviate(value)
            raise IllTypedAnswer(
                f"{self.name}: option success: an episode ended with {description} at {self._success_rule}, not true "
                f"or false; the observation has {', '.join(fields)}"
            )
        return value

    def _observation_fields(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of an observation, and among them its metadata, which a server may send
        beside it.
        """
        fields = answer["data"].get("observation")
        if not isinstance(fields, dict):
            raise MalformedAnswer(f"{self._server.url}: an observation is {abbreviate(fields)}")
        return {"metadata": answer["data"].get("metadata")} | fields

    def _observation_text(self, fields: Mapping[str, Any]) -> str:
        """Return an observation as text: by the template of option `observation`, else the message
        of its error, the result of a tool, its only text, or all its fields as JSON.
        """
        if template := self._text_template:
            paths = _PLACEHOLDER.findall(template)
            values = {path: value_at_path(fields, path) for path in paths}
            if all(value is _MISSING for value in values.values()):
                raise IllTypedAnswer(
                    f"{self.name}: option observation: an observation has {', '.join(fields)}, and none of "
                    f"{', '.join(paths)}"
                )
            return _PLACEHOLDER.sub(lambda match: as_text(values[match[1]]), template).strip()
        if isinstance(error := fields.get("error"), dict):
            return as_text(error.get("message") or error)
        if isinstance(result := fields.get("result"), dict) and "tool_name" in fields:
            return as_text(result.get("data") or value_at_path(result, "content"))
        texts = [value for key, value in fields.items() if key != "metadata" and value and isinstance(value, str)]
        fields_without_metadata = {key: value for key, value in fields.items() if key != "metadata"}
        return texts[0] if len(texts) == 1 else json.dumps(fields_without_metadata, ensure_ascii=False)

    def _error_text(self, answer: Mapping[str, Any]) -> str:
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
        if self._server.takes_tool_calls and not isinstance(self, NativeCallsMixin):
            return [("actions", f"{self.name}: {url} takes calls of tools: set environment.transcript: native")]
        first, second = self._observe_beginning(train[0]), self._observe_beginning(train[0])
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
        arguments = {key: json.dumps(value) for key, value in self._reset_arguments.items()}
        placeholder_probes = [("{index}", (*train[1:2], test[0])[0])]
        placeholder_probes += [("{split}", test[0])] if any("{split}" in value for value in arguments.values()) else []
        ineffective = [
            placeholder
            for placeholder, instance in placeholder_probes
            if self._begins_alike(first, instance, varying_keys)
        ]
        if not ineffective:
            return []
        argument_names = [
            key for key, value in arguments.items() if any(placeholder in value for placeholder in ineffective)
        ]
        reason = (
            f"the reset argument {', '.join(argument_names)} has no effect"
            if argument_names
            else "a reset is sent no number"
        )
        return [
            (
                "arguments",
                f"{self.name}: {reason} at {url}: {train[0].key} and others begin alike, so train and test cannot be "
                "kept apart; set reset_arguments to what its reset takes, or instances_differ: true if they differ "
                "later",
            )
        ]

    def _observe_beginning(self, instance: Instance) -> Beginning:
        text = self.reset(instance)
        answer = {} if self._session is None else self._session.ask("state")
        self._release()
        state = answer["data"] if answer.get("type") == "state" else {}
        return Beginning(text, {key: value for key, value in state.items() if key not in ("episode_id", "step_count")})

    def _begins_alike(self, first: Beginning, instance: Instance, varying_keys: set[str]) -> bool:
        beginning = self._observe_beginning(instance)
        keys = (first.state.keys() | beginning.state.keys()) - varying_keys
        return beginning.text == first.text and all(first.state.get(key) == beginning.state.get(key) for key in keys)

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._server.url

    def start_hint(self) -> str:
        """Return how a server is started; see `Environment.start_hint`."""
        return "`agentr env serve textcraft --protocol openenv` starts one"
