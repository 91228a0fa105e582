"""What each world reads in a reply: one table of cases a world, and beside them the rules of
AgentGym's clients.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr_core.environments import gymnasium_text, replies
from agentr_core.environments.agentgym import worlds
from agentr_core.environments.alfworld import AlfWorld
from agentr_core.environments.crafting import TextCraft
from agentr_core.environments.sciworld import SciWorld
from agentr_core.environments.webshop import WebShop

PUBLISHED = "Thought:\nI need a rod.\n\nAction:\n{}"
"""The form of AgentGym's own demonstrations."""

LINE = {
    "Thought: x\nAction: go to hall 1": "go to hall 1",
    PUBLISHED.format("go to hall 1"): "go to hall 1",
    "Action:\n\n \n  go to hall 1  \n": "go to hall 1",
    "Action: go to hall 1\nObservation: made up\nThought: y": "go to hall 1",
    "Action: go to hall 1.": "go to hall 1.",
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
    "Action: move up.": "move up.",
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
    assert kind.parse(object.__new__(kind), reply) == action  # type: ignore[attr-defined]


@pytest.mark.parametrize(("reply", "action"), LINE.items())
def test_gymnasium(reply: str, action: str) -> None:
    kind = gymnasium_text.GymnasiumText
    assert kind.parse(object.__new__(kind), reply) == action


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
        sent = " ".join(re.sub(r"[^A-Za-z0-9, ]+", "", lines[0] if lines else "").split())
        assert replies.words_after_label(reply) == sent
    _, label, rest = reply.rpartition("Action:")
    assert replies.after_label(reply) == (rest.strip() if label else "")
    whole = rest if label else reply if "search[" in reply or "click[" in reply else ""
    understood = re.match(r"(.+)\[(.+)\]", whole.strip())
    assert not understood or replies.shopping_action(reply) == understood[0]


@pytest.mark.parametrize(("world", "reply", "action"), CASES)
def test_what_a_thought_considers_is_no_action(world: str, reply: str, action: str) -> None:
    env = getattr(worlds, world)(url="http://127.0.0.1:9", train="1", test="2")
    draft = "Action: search[x]\n<search>x</search> ```sql SELECT``` ```x```"
    assert env.parse(f"<think>{draft}</think>\n{reply}") == action
    assert env.parse(f"{draft}</think>\n{reply}") == action, "its template opened the thought"
    assert env.parse(f"{reply}\n<think>{draft}") == action, "the thought was cut"


def test_ten_thousand_digits_are_a_text_for_a_parser() -> None:
    reply = f"Action: get {'9' * 10_000} sticks"
    assert replies.words_after_label(reply) == reply.removeprefix("Action: ")
