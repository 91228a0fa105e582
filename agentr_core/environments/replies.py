"""The action in a model's reply: what follows its label, in the forms that AgentGym's clients
accept.

Each world's parser is one of these functions, sometimes with an additional rule of its own. They
accept all that the client of that world in AgentGym accepts (arXiv 2406.04151), and a little more,
each time for a reason:

- The text `</s>` at the end is removed. AgentGym's clients mean to do that, but remove one
  character too many.
- If there are several labels, the last one counts, as in AgentGym's clients of WebShop,
  ScienceWorld and ALFWorld; those of TextCraft and BabyAI answer such a reply with an error of
  their own, which would be a step that the world does not see.
- If an action is one line, the lines below it are removed: models go on with invented observations.
- What a reasoning model considers between `<think>` and `</think>` is no action.
- In the web shop the label may have a number, as in the transcripts published with the shop.
"""

from __future__ import annotations

import re

from agentr_core.texts import outside_thoughts

LABEL = "Action:"
_END = "</s>"
_NUMBERED_LABEL = re.compile(r"Action[ \t]*\d*[ \t]*:")
_SHOPPING = re.compile(r".+\[.+\]")
_FOREIGN = re.compile(r"[^A-Za-z0-9, ]+")


def without_end(reply: str) -> str:
    """Return a reply without its thoughts, without trailing white space and without the end-of-turn
    marks that some servers leave in the text.
    """
    reply = outside_thoughts(reply).rstrip()
    while reply.endswith(_END):
        reply = reply.removesuffix(_END).rstrip()
    return reply


def after_label(reply: str, *, unlabelled: bool = False) -> str:
    """Return the text after the last label of a reply, stripped; without a label, the empty string.

    With `unlabelled`, a reply without a label is taken as a whole.
    """
    _, label, text = without_end(reply).rpartition(LABEL)
    return text.strip() if label or unlabelled else ""


def line_after_label(reply: str, *, unlabelled: bool = False) -> str:
    """Return the first non-blank line of the result of `after_label`."""
    return after_label(reply, unlabelled=unlabelled).partition("\n")[0].strip()


def words_after_label(reply: str) -> str:
    """Return the line after the last label, reduced to letters, digits, commas and single
    spaces.
    """
    return " ".join(_FOREIGN.sub("", line_after_label(reply)).split())


def shopping_action(reply: str) -> str:
    """Return the `search[...]` or `click[...]` after the last label of a reply.

    Without a label, the whole reply is searched. What follows an action is dropped; a text that is
    not an action is returned unchanged.
    """
    reply = without_end(reply)
    labels = list(_NUMBERED_LABEL.finditer(reply))
    if not labels and "search[" not in reply and "click[" not in reply:
        return ""
    text = reply[labels[-1].end() :].strip() if labels else reply.strip()
    action = _SHOPPING.match(text)
    return action[0] if action else text
