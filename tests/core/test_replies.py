"""What each world reads in a reply: one table of cases a world, and beside them the rules of
AgentGym's clients.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core import replies
from agentr_core.environments import gymnasium_text, registry
from agentr_core.environments.agentgym import worlds
from agentr_core.environments.alfworld.world import AlfWorld
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.sciworld.world import SciWorld
from agentr_core.environments.webshop.world import WebShop
from agentr_core.errors import ConfigError
from agentr_core.methods.faults import parse
from tasks.wiring import make_environment

PUBLISHED = "Thought:\nI need a rod.\n\nAction:\n{}"
"""The form of AgentGym's own demonstrations."""

LINE = {
    "Thought: x\nAction: go to hall 1": "go to hall 1",
    PUBLISHED.format("go to hall 1"): "go to hall 1",
    "Action:\n\n \n  go to hall 1  \n": "go to hall 1",
    "Action: go to hall 1\nObservation: made up\nThought: y": "go to hall 1",
    "Action: go to hall 1.": "go to hall 1",
    "Action: look\nThought: z\nAction: go to hall 1": "go to hall 1",
    "Action: go to hall 1</s>": "go to hall 1",
    PUBLISHED.format("go to hall 1\n</s>"): "go to hall 1",
    "Action: go to hall 1 </s></s>\n": "go to hall 1",
    "Action:": "",
    "Action:\n\n": "",
    "go to hall 1": "",
    "</s>": "",
    "": "",
}
"""ScienceWorld, ALFWorld and worlds of Gymnasium. Without a label there is no action, as in
AgentGym's adapter.
"""

WORDS = {
    "Thought: x\nAction: Get 2 oak_logs, 1 stick!": "Get 2 oaklogs, 1 stick",
    PUBLISHED.format("get 1 blaze rod"): "get 1 blaze rod",
    "Action:\n\n\nget 1 blaze rod": "get 1 blaze rod",
    "Action: get 1 blaze rod.": "get 1 blaze rod",
    "Action: get 1 blaze rod</s>": "get 1 blaze rod",
    PUBLISHED.format("get 1 blaze rod</s>"): "get 1 blaze rod",
    "Action: get 1 a\nAction: get 2 b": "get 2 b",
    "Action: get  1\ta": "get 1a",
    "Action: `get 1 a`\nand then more": "get 1 a",
    "Action: l'été 1": "lt 1",
    "get 1 blaze rod": "",
    "Action:": "",
    "": "",
}
"""TextCraft, which takes them in lower case, and BabyAI."""

SHOP = {
    "Thought: x\nAction: search[red mug]": "search[red mug]",
    PUBLISHED.format("click[Buy Now]"): "click[Buy Now]",
    "Action:\n\n click[< Prev]": "click[< Prev]",
    "Action: click[a].": "click[a]",
    "Action: click[a]</s>": "click[a]",
    "Action: search[a]\nAction: click[b]": "click[b]",
    "Action 2: click[b]": "click[b]",
    "Action: click[a]\nObservation: made up": "click[a]",
    "search[mug]": "search[mug]",
    "click[a]</s>": "click[a]",
    "I would search[mug] now": "I would search[mug]",
    "Action: buy it": "buy it",
    "mug": "",
    "Action:": "",
    "": "",
}

MAZE = {
    PUBLISHED.format("move up"): "move up",
    "Action:\n\nmove left</s>": "move left",
    "Action: Up": "move up",
    "move down": "move down",
    "right</s>": "move right",
    "Action: move up.": "move up",
    "Action: move up\nAction: move down": "move down",
    "": "",
}

WORDLE = {
    PUBLISHED.format("c r a n e"): "c r a n e",
    "Action: Crane</s>": "c r a n e",
    "crane": "c r a n e",
    "Action:\n\ncrane\nsurely": "c r a n e",
    "Action: s l a t e\nAction: c r a n e": "c r a n e",
}

CALL = 'f with Action Input: {"a":\n 1}'
TOOLS = {
    f"Thought: x\n\nAction: {CALL}": CALL,
    f"Action:\n\n{CALL}</s>": CALL,
    f"Action: g with Action Input: {{}}\nAction: {CALL}": CALL,
    'finish with Action Input: {"answer": 1}': "",
    "": "",
}

MARKED = {
    "SearchQA": {
        "x <search>a</search></s>": "<search>a</search>",
        "<search>a</search> then <answer>b</answer>.": "<answer>b</answer>",
        "Action: a": "",
    },
    "SqlGym": {"Action:\n\n```sql\nSELECT 1;\n```</s>": "SELECT 1;", "SELECT 1": ""},
    "WebArena": {"I shall ```click [3]```</s>": "click [3]", "click [3]": ""},
}

TABLES = {
    "SciWorld": LINE,
    "AlfWorld": LINE,
    "WebShop": SHOP,
    "TextCraft": {reply: action.lower() for reply, action in WORDS.items()} | {"Action: Look": "inventory"},
    "BabyAI": WORDS,
    "Maze": MAZE,
    "Wordle": WORDLE,
    **dict.fromkeys(("Weather", "Movie", "Academia", "Todo", "Sheet"), TOOLS),
    **MARKED,
}
FORMS = {
    "**Thought:** t\n**Action:** {}": "emphasis around the label and its colon",
    "**Thought**: t\n**Action**: {}": "emphasis around the label",
    "**Action: {}**": "emphasis around the line",
    "__Action__: {}": "the other emphasis",
    "*Action:* *{}*": "",
    "Thought: t\n\nAction: `{}`": "code",
    "`Action: {}`": "code around the line",
    "Action: **`{}`**.": "",
    'Thought: t\nAction: "{}"': "quotes",
    'Thought: t\n"Action: {}"': "a quote that begins before the label",
    "Action: \u201c{}\u201d": "",
    '"action": "{}",': "a line of JSON",
    "Thought: t\nAction: {}.": "a full stop",
    "Thought: t\nAction: {}\u3002": "",
    "Thought: t\nACTION: {}": "another case",
    "Thought: t. ACTION: {}": "",
    "Thought: t\naction: {}": "",
    "### Action:\n{}": "a heading",
    "## Action\u0020:\n\n{}": "",
    "Thought: t\nAction:\n```\n{}\n```": "a block of code",
    "Action: ```text\n{}\n```\nI hope so.": "",
    "Action: ```{}```": "",
    "Thought: t\nAction: [{}]": "brackets",
    "Action: <{}>": "",
    "Action: ({})": "",
    "Thought: t\nAction : {}": "a space before the colon",
    "Thought: t\nAction\uff1a{}": "a wide colon",
    "Action 1: {}": "a number",
    "**Action 2:** {}": "",
    "Action (3): {}": "",
    "2. Action: {}": "",
    "Action: 1. {}": "an entry of a list",
    "Action:\n- {}": "",
    "<think>Action: look</think>\nThought: t\nAction: {}": "a label in a thought",
    "Action: look</think>\nAction: {}": "",
    "<thinking>**Action:** look</thinking>**Action:** {}": "",
    "Thought: My next Action: is clear\nAction: {}<|im_end|>": "",
    "Thought: My next Action: is clear\n**Action**: {}": "",
    "Thought: My next Action: is clear\naction: {}": "",
    "Thought: t\nAction: {}</s>": "a mark at the end",
    "Action: {}<|im_end|>\n": "",
    "Action: {}<|eot_id|><|end_of_text|>": "",
    "Action: {}<|im_end|>\n<|im_start|>user\nYou see nothing.": "",
    "Action: {}<\uff5cend\u2581of\u2581sentence\uff5c>": "",
    "Thought: t\nAction: **{}**": "",
    "Thought: t\nAction: {} (to look at it)": "a remark",
    "Thought: t\nNext Action: {}": "a word before the label",
    "My next action: {}": "",
    "Thought: t\n- Action: {}": "",
    "> Action: {}": "",
}
"""Replies of chat models, with notes."""
MADE = {
    "SciWorld": "go to desk 1",
    "AlfWorld": "go to desk 1",
    "TextCraft": "get 1 oak log",
    "BabyAI": "go to red ball 1",
    "WebShop": "search[red mug (large)]",
    "Maze": "move up",
    "Wordle": "c r a n e",
}
NO_ACTIONS = (
    "<think>Action: go to desk 1</think>",
    "<think>Action: go to desk 1</think>\nI am done.",
    "<think>I could go.\nAction: go to desk 1",
    "<think>t</think><think>Action: go to desk 1",
    "I am in action: nothing to do.",
    "Transaction: go to desk 1",
)

READ_AS_PUBLISHED = {
    "Thought 1: t\nAction 1: {}": "{}",
    "Action: 3. {}": "{}",
    "Action:\n{}": "{}",
    "Action: a\nAction 12: {}\n": "{}",
    "{}": "{}",
    "I think.\nI go.\n{}\n": "{}",
}
NATIVE = {"SciWorld": SciWorld, "AlfWorld": AlfWorld, "WebShop": WebShop, "TextCraft": TextCraft}
CASES = [(world, reply, action) for world, table in TABLES.items() for reply, action in table.items()]


def test_every_world_has_a_table() -> None:
    kinds = {name for name, kind in vars(worlds).items() if hasattr(kind, "wire")}
    assert set(TABLES) == kinds


@pytest.mark.parametrize(("world", "reply", "action"), CASES)
def test_worlds_on_servers(world: str, reply: str, action: str) -> None:
    env = getattr(worlds, world)(url="http://127.0.0.1:9", train="1", test="2")
    assert env.parse(reply) == action


@pytest.mark.parametrize(("world", "reply", "action"), [case for case in CASES if case[0] in NATIVE])
def test_worlds_in_process(world: str, reply: str, action: str) -> None:
    # A parser is pure: it needs no episode, and here not even an environment.
    kind = NATIVE[world]
    assert kind.parse(object.__new__(kind), reply) == action  # type: ignore[arg-type,attr-defined]


@pytest.mark.parametrize(("reply", "action"), LINE.items())
def test_gymnasium(reply: str, action: str) -> None:
    kind = gymnasium_text.GymnasiumText
    assert kind.parse(object.__new__(kind), reply) == action


def make_world(world: str) -> Any:
    return getattr(worlds, world)(url="http://127.0.0.1:9", train="1", test="2")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("world", "action"), MADE.items())
def test_labels_as_chat_models_write_them(world: str, action: str, form: str) -> None:
    """At 29f26ac such labels were no action, or spoiled it."""
    reply = form.replace("{}", action)
    assert make_world(world).parse(reply) == action
    if world in NATIVE:
        kind: Any = NATIVE[world]
        assert kind.parse(object.__new__(kind), reply) == action


@pytest.mark.parametrize("form", FORMS)
def test_labels_as_chat_models_write_them_in_gymnasium(form: str) -> None:
    kind = gymnasium_text.GymnasiumText
    assert kind.parse(object.__new__(kind), form.replace("{}", "go to desk 1")) == "go to desk 1"


@pytest.mark.parametrize(
    "form",
    [
        "**Action:** {}",
        "**Action**: {}<|im_end|>",
        "Action:\n```json\n{}\n```",
        "<think>Action: g with Action Input: {a}</think>\naction: {}",
    ],
)
def test_calls_of_several_lines_as_chat_models_write_them(form: str) -> None:
    assert make_world("Weather").parse(form.replace("{}", CALL)) == CALL


@pytest.mark.parametrize("reply", NO_ACTIONS)
@pytest.mark.parametrize("world", ["SciWorld", "AlfWorld", "TextCraft", "BabyAI", "WebShop"])
def test_what_a_model_only_thinks_is_no_action(world: str, reply: str) -> None:
    assert make_world(world).parse(reply) == ""


@pytest.mark.parametrize(
    "written", ["(+ 1 2)", "move (1, 2)", "f (x)", 'say "no" to "them"', "set [a] to [b]", "e2-e4"]
)
def test_marks_within_an_action_stay(written: str) -> None:
    inner = written.removeprefix("(").removesuffix(")") if written.startswith("(") else written
    assert replies.line_after_label(f"Action: {written}") == inner
    assert replies.line_after_label(f"Action: {written}", "published") == written


@pytest.mark.parametrize(("form", "text"), READ_AS_PUBLISHED.items())
@pytest.mark.parametrize("world", sorted(MADE))
def test_replies_are_read_as_the_authors_read_them(world: str, form: str, text: str) -> None:
    env = make_world(world)
    env.labels = "published"
    assert env.parse(form.replace("{}", MADE[world])) == MADE[world]
    if world in NATIVE:
        kind: Any = NATIVE[world]
        native = object.__new__(kind)
        native.labels = "published"
        assert native.parse(form.replace("{}", MADE[world])) == text.replace("{}", MADE[world])


def test_the_published_reading_leaves_an_action_as_it_is() -> None:
    extract = replies.after_label
    assert extract("Thought: t\nAction: `look`.\nObservation: made up", "published") == "`look`.\nObservation: made up"
    assert extract("**Action**: look", "published") == "**Action**: look"
    assert extract("action: look", "published") == "action: look"
    assert extract("Action: 12.look", "published") == "look"
    assert extract("3. look", "published") == "3. look", "a number is dropped after a label only"
    assert extract("", "published") == ""


def test_worlds_say_whether_they_read_labels() -> None:
    options = {"url": "http://127.0.0.1:9", "train": "1", "test": "2"}
    env = registry.make("agentgym-sciworld", options, labels="published")
    assert env.parse("Action 1: look") == "look"
    assert registry.make("textcraft", {}, labels="published").parse("get 1 oak log") == "get 1 oak log"
    assert registry.make("textcraft", {}).parse("get 1 oak log") == ""
    for world in ("agentgym-sqlgym", "reasoning"):
        given_options = options if world.startswith("agentgym") else {}
        with pytest.raises(ConfigError, match=f"environment.action.labels: {world} reads no labels"):
            registry.make(world, given_options, labels="published")


@pytest.mark.parametrize("section", ["environment", "environments.textcraft"])
def test_a_recipe_sets_how_labels_are_read(section: str) -> None:
    config: dict[str, Any] = {"name": "a", "model": {"path": "m"}}
    world: dict[str, Any] = {"action": {"labels": "published"}}
    if section == "environment":
        config |= {"environment": {"name": "textcraft", **world}}
    else:
        config |= {"environments": {"textcraft": world}}
    env = make_environment(parse(config).in_world("textcraft"))
    assert env.parse("inventory") == "inventory"
    world["transcript"] = "native"
    with pytest.raises(ConfigError, match=rf"{section}\.action\.labels: native calls have no labels"):
        parse(config if section != "environment" else config | {"environment": {"name": "textcraft", **world}})


REPLY = st.lists(
    st.sampled_from(["Action:", "Thought:", "\n", "\n\n", " ", "get 1 oak log", "search[a b]", "click[c]", "go.", "é"]),
    max_size=8,
).map("".join)


@given(REPLY)
def test_what_the_clients_of_agentgym_take_is_taken(reply: str) -> None:
    """The rules of those clients, from their description: all that they send to a server, the
    parsers here find.
    """
    lines = re.findall(r"Action:\s*(.*?)(?=\n|$)", reply, re.DOTALL)
    if reply.count("Action:") <= 1:
        expected = " ".join(re.sub(r"[^A-Za-z0-9, ]+", "", lines[0] if lines else "").split())
        assert replies.words_after_label(reply) == expected
    _, label, rest = reply.rpartition("Action:")
    assert replies.after_label(reply) == (rest.strip() if label else "")
    whole = rest if label else reply if "search[" in reply or "click[" in reply else ""
    match = re.match(r"(.+)\[(.+)\]", whole.strip())
    assert not match or replies.shopping_action(reply) == match[0]


@pytest.mark.parametrize(("world", "reply", "action"), CASES)
def test_what_a_thought_considers_is_no_action(world: str, reply: str, action: str) -> None:
    env = getattr(worlds, world)(url="http://127.0.0.1:9", train="1", test="2")
    draft = "Action: search[x]\n<search>x</search> ```sql SELECT``` ```x```"
    assert env.parse(f"<think>{draft}</think>\n{reply}") == action
    assert env.parse(f"{draft}</think>\n{reply}") == action, "its template opened the thought"
    assert env.parse(f"{reply}\n<think>{draft}") == action, "the thought was cut"


@given(st.lists(st.sampled_from([*"[]()<>*_`\"'.- 1a\n", "Action", ":", "<think>", "</think>", "<|x|>"])).map("".join))
def test_any_reply_is_read(reply: str) -> None:
    line = replies.line_after_label(reply)
    assert line == line.strip()
    assert "\n" not in line


@pytest.mark.parametrize("mark", ["[", "*", "(", '"', "`", "<|a|>", "- ", "Action ", "<think>", " ", "\n", "a (b"])
def test_a_long_reply_is_read_in_no_time(mark: str) -> None:
    began = time.perf_counter()
    for reply in (mark * 5_000, f"Action: {mark * 5_000}", f"Action: {mark * 5_000}x"):
        replies.line_after_label(reply)
        replies.shopping_action(reply)
    assert time.perf_counter() - began < 2


def test_ten_thousand_digits_are_a_text_for_a_parser() -> None:
    reply = f"Action: get {'9' * 10_000} sticks"
    assert replies.words_after_label(reply) == reply.removeprefix("Action: ")
