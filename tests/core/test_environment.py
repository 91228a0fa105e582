"""The base class of worlds: its defaults, its checks, and what is said of a class without it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from combination_lock import CombinationLock
from door import Door
from toy import Line, instance

from agentr_core.environment import Environment, Repeatability
from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.environments.native import native_class
from agentr_core.episodes.rollout import repeat_step, steps_may_ask, take_step
from agentr_core.episodes.transcript import AlternatingTurns, transcript_of
from agentr_core.errors import ConfigError, EnvironmentFault, IllTypedAnswer
from agentr_core.types import Answer, Instance, Question, Transition, Verdict
from flows.commands import environments


class Coin(Environment):
    """No more than a world needs."""

    instruction = "Guess."

    def splits(self) -> tuple[str, ...]:
        return ("train", "test")

    def instances(self, split: str) -> Sequence[Instance]:
        return [Instance(environment="coin", split=split, index=index) for index in range(2)]

    def reset(self, instance: Instance) -> str:
        return f"Coin {instance.index} of {instance.split}."

    def step(self, action: str) -> Transition:
        success = action == "heads"
        return Transition("Seen.", float(success), True, False, {"success": success})


HEADS = Instance(environment="coin", split="train", index=0)


def test_a_world_needs_four_methods_and_an_instruction() -> None:
    coin = Coin()
    assert (coin.name, coin.acknowledgement, coin.step_limit, coin.can_snapshot, coin.blocking) == (
        "coin", "Ok.", 20, False, False
    )  # fmt: skip
    assert (coin.labels, coin.repeatability, coin.grader, coin.time_limit) == (
        "lenient", Repeatability.EXACT, None, None
    )  # fmt: skip
    assert coin.parse("Thought: so be it.\nAction: heads") == "heads"
    assert (coin.depth(HEADS), coin.expert(HEADS), coin.origin(HEADS)) == (None, None, HEADS)
    assert coin.identity(HEADS) == "Coin 0 of train."
    assert (coin.called("Action: heads"), coin.sandbox()) == ("Action: heads", "")
    assert isinstance(transcript_of(coin), AlternatingTurns)
    assert not steps_may_ask(coin)
    coin.hear("heads")
    coin.reach()
    coin.release()
    coin.close()
    coin.close()
    assert check(Coin) == ()


@pytest.mark.parametrize(
    "act",
    [
        lambda coin: coin.snapshot(), lambda coin: coin.restore(None), lambda coin: coin.state(),
        lambda coin: coin.resume(HEADS, ()), lambda coin: coin.recall(HEADS, ""), lambda coin: coin.oracle(HEADS, ()),
        lambda coin: coin.decline("it is too long"),
    ],
)  # fmt: skip
def test_what_a_world_does_not_do_is_refused_by_name(act: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"^[Cc]oin "):
        act(Coin())


@pytest.mark.parametrize("lacking", ["splits", "instances", "reset", "step"])
def test_a_class_without_a_needed_method_is_not_made(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {name: member for name, member in vars(Coin).items() if name != lacking and not name.startswith("_")}
    kind = type("Lacking", (Environment,), members)
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "lacking", kind)
    with pytest.raises(EnvironmentFault, match=rf"environment lacking cannot be made .*{lacking}"):
        registry.make("lacking", {})


def test_a_class_without_an_instruction_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {name: vars(Coin)[name] for name in ("splits", "instances", "reset", "step")}
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "mute", type("Mute", (Environment,), members))
    with pytest.raises(EnvironmentFault, match="environment mute has no instruction"):
        registry.make("mute", {})


def test_a_class_has_what_it_or_a_mixin_of_it_defines() -> None:
    class Judging:
        def oracle(self, instance: Instance, actions: Sequence[str]) -> Sequence[Verdict]:
            return [Verdict.GOOD for _ in actions]

    class Judged(Judging, Coin):
        @staticmethod
        def files_of(options: Mapping[str, Any]) -> Sequence[str]:
            return ("coins",)

        @classmethod
        def variables_of(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
            return {}

    methods: list[Any] = [Environment.oracle, Environment.files_of, Environment.variables_of]
    assert not any(map(Coin.has, methods))
    for kind in (Judged, native_class(Judged)):
        assert all(map(kind.has, methods))
        assert kind().has(Environment.oracle)
        assert not kind.has(Environment.state)
    assert native_class(Coin).has(Environment.called)
    assert not native_class(Coin).has(Environment.resume)


def test_labels_are_read_by_the_default_and_by_who_says_so() -> None:
    class Loud(CombinationLock):
        def parse(self, reply: str) -> str:
            return reply.upper()

    assert (Coin.labels, Loud.labels, native_class(Coin).labels) == ("lenient", "lenient", "lenient")
    assert (Door.labels, native_class(Door).labels) == (None, None)


def test_a_state_can_be_copied_by_who_copies_it() -> None:
    class Careful(CombinationLock):
        can_snapshot = False

    class Again(Careful):
        def snapshot(self) -> Any:
            return super().snapshot()

    class Copying:
        def snapshot(self) -> Any:
            return None

    class Mixed(Copying, Coin):
        """A class that copies its state as a mixin does."""

    kinds: list[type[Environment]] = [Coin, CombinationLock, Careful, Again, Mixed]
    assert [kind.can_snapshot for kind in kinds] == [False, True, False, True, True]
    assert [native_class(kind).can_snapshot for kind in kinds] == [False, True, False, True, True]


WRONG: dict[str, tuple[Any, tuple[Any, ...], type[Exception], str]] = {
    "instances": ({"a": 1}, ("train",), IllTypedAnswer, "the instances of split train are"),
    "reset": (None, (HEADS,), IllTypedAnswer, "the first observation of coin/train/0 is None"),
    "resume": (None, (HEADS, ()), IllTypedAnswer, "the first observation of coin/train/0 is None"),
    "step": (
        Transition("", math.nan, True, False, {"success": True}), ("a",), IllTypedAnswer, "'a': the reward is nan"
    ),
    "answer": ("yes", ("no",), IllTypedAnswer, "the step that asked a model of role  gave 'yes'"),
    "parse": (3, ("a",), IllTypedAnswer, "the action that was found in a reply is 3"),
    "identity": (b"", (HEADS,), IllTypedAnswer, "the identity of coin/train/0 is b''"),
    "depth": (1.5, (HEADS,), IllTypedAnswer, "the depth of coin/train/0 is 1.5"),
    "expert": ("heads", (HEADS,), IllTypedAnswer, "the expert's replies to coin/train/0 are 'heads'"),
}  # fmt: skip


@pytest.mark.parametrize("how", ["subclass", "grandchild", "mixin", "static"])
@pytest.mark.parametrize("name", WRONG)
def test_what_a_method_returns_is_checked_wherever_it_is_defined(name: str, how: str) -> None:
    value, arguments, kind, message = WRONG[name]

    def method(self: Any, *_: Any) -> Any:
        return value

    cls: type[Any]
    if how == "subclass":
        cls = type("Odd", (Coin,), {name: method})
    elif how == "grandchild":
        cls = type("Odder", (type("Odd", (Coin,), {name: method}),), {})
    elif how == "mixin":
        cls = type("Odd", (type("Mixin", (), {name: method}), Coin), {})
    else:
        cls = type("Odd", (Coin,), {name: staticmethod(lambda *_: value)})
    with pytest.raises(kind, match=message):
        getattr(cls(), name)(*arguments)


def test_a_checked_method_keeps_its_name_its_words_and_its_signature() -> None:
    class Terse(Coin):
        def step(self, action: str, /) -> Transition:
            """Guess."""
            return super().step(action)

        @staticmethod
        def parse(reply: str) -> str:
            return reply

    assert (Terse.step.__name__, Terse.step.__doc__, Terse().step.__doc__) == ("step", "Guess.", "Guess.")
    assert str(inspect.signature(Terse().step)) == "(action: 'str', /) -> 'Transition'"
    assert Terse.parse("heads") == Terse().parse("heads") == "heads"
    assert Terse().step("heads") == ("Seen.", 1.0, True, False, {"success": True})


def test_exceptions_beside_an_episode_say_whose_they_are() -> None:
    class Broken(Coin):
        def expert(self, instance: Instance) -> Sequence[str]:
            raise ZeroDivisionError

        def reset(self, instance: Instance) -> str:
            raise ZeroDivisionError

    with pytest.raises(EnvironmentFault, match="environment coin cannot tell the expert's replies to coin/train/0"):
        Broken().expert(HEADS)
    with pytest.raises(EnvironmentFault, match="cannot tell the beginning of coin/train/0"):
        Broken().identity(HEADS)
    # An exception within an episode becomes an event of it.
    with pytest.raises(ZeroDivisionError):
        Broken().reset(HEADS)


class AskingCoin(Coin):
    """Asks in each step, and once more when it is told to."""

    def step(self, action: str) -> Transition:
        question = Question(role="summariser", messages=())
        return Transition("", 0.0, False, False, {"success": False, "question": question})


class AnsweringCoin(AskingCoin):
    def answer(self, reply: str) -> Transition:
        return self.step(reply) if reply == "again" else Coin.step(self, reply)


def answer(text: str) -> Answer:
    return Answer(
        role="summariser", model="", prompt_hash="", seed=0, text=text, finish_reason="stop", prompt_tokens=1,
        completion_tokens=1,
    )  # fmt: skip


def test_a_step_that_asks_is_done_once_it_asks_no_more() -> None:
    env = AnsweringCoin()
    assert steps_may_ask(env)
    assert take_step(env, "a", [answer("again"), answer("heads")]).reward == 1.0
    assert repeat_step(env, "a", [answer("again")]).info["question"].role == "summariser"
    with pytest.raises(ConfigError, match="coin asks a model in its steps, but no model can be asked here"):
        take_step(env, "a", [answer("again")])


def test_a_world_that_asks_takes_the_answer() -> None:
    with pytest.raises(IllTypedAnswer, match=r"of role summariser cannot go on; .* needs a method answer"):
        take_step(AskingCoin(), "a", [answer("heads")])


class Former:
    """A world as it was before there was a base class."""

    name = "former"
    instruction = "Guess."
    acknowledgement = "Ok."
    step_limit = 1
    can_snapshot = False
    blocking = False
    variables: ClassVar[Mapping[str, str]] = {}

    splits, instances, reset, step = Coin.splits, Coin.instances, Coin.reset, Coin.step


def function() -> Any:
    return Former()


@pytest.mark.parametrize("made", [Former, function])
def test_a_class_of_the_former_protocol_is_told_what_to_change(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._FACTORY_BY_NAME, "former", made)
    monkeypatch.setattr(registry, "names", lambda: ("former",))
    # What a recipe asks before the world is made.
    assert (registry.version_of("former", {}), registry.files_of("former", {})) == (1, {})
    assert not registry.asks_models("former")
    assert not registry.runs_code("former")
    expected = (
        "environment former is written for an earlier version of agentr (the class Former does not derive from "
        "Environment): derive its class from agentr_core.environment.Environment, where Instances and Repeatability "
        "are too, take Labels and line_after_label from agentr_core.replies, and leave out the members whose defaults "
        "will do, which are all but instruction, splits, instances, reset and step"
    )
    with pytest.raises(EnvironmentFault) as caught:
        registry.make("former", {})
    assert str(caught.value) == expected
    (diagnosis,) = environments.diagnose("former", {})
    assert (diagnosis["status"], diagnosis["detail"]) == ("broken", expected)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from agentr_core.protocols import Labels", "cannot import name 'Labels'"),
        (
            "import agentr_core.environments.replies",
            "No module named 'agentr_core.environments.replies'",
        ),
    ],
)
def test_imports_of_a_former_world_are_told_what_to_change(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = SimpleNamespace(value="worlds:World", load=lambda: exec(line), name="world")
    monkeypatch.setattr(registry, "_FACTORY_BY_NAME", {})
    monkeypatch.setattr(registry, "entry_points", lambda **_: [entry])
    with pytest.raises(EnvironmentFault, match="environment world is written for an earlier version") as caught:
        registry.make("world", {})
    assert said in str(caught.value)


def test_a_function_that_makes_a_world_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def coin() -> Environment:
        return Coin()

    monkeypatch.setitem(registry._FACTORY_BY_NAME, "coin", coin)
    assert isinstance(registry.make("coin", {}), Coin)
    assert registry.version_of("coin", {}) == 1


def test_a_world_may_call_its_own_methods() -> None:
    env = Line()
    assert env.identity(instance(1)) == env.reset(instance(1))
    assert env.has(Environment.snapshot)
