"""Episodes as token rows: the loss applies to the tokens that the sampler returned, and to no
others.

A reply that was cut by its token limit is followed by an end of turn that was not sampled, and a
server may not return the end of turn: neither has a log-probability, so neither is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agentr_core.errors import DataFault
from agentr_core.samples.labels import IGNORED
from agentr_core.samples.rendering import Renderer
from agentr_core.training.packing import TokenRow
from agentr_core.types import Message, Span, Step


class PolicyRow(NamedTuple):
    """One episode, or a part of one that is a conversation of its own: its token ids, the positions
    of the sampled ones, the natural log-probabilities with which they were sampled, and the
    advantage of each. `episode_tokens` is the number of sampled tokens of the whole episode.
    """

    input_ids: tuple[int, ...]
    positions: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    episode_tokens: int


def policy_row(
    messages: Sequence[Message],
    steps: Sequence[Step],
    renderer: Renderer,
    advantages: Sequence[float],
    *,
    given: int = 0,
) -> PolicyRow:
    """Return the row of a whole episode.

    Args:
        messages: its conversation, in which the replies of `steps` carry loss, in order. An empty
            reply in the middle of a growing turn carries none, and is not trained.
        advantages: the advantages of the steps.
        given: the number of first steps that the episode continued from; they are not trained, and
            need no log-probabilities.

    Raises `DataFault` if replies lack the log-probabilities of their tokens, or if the rendered
    conversation does not contain the sampled tokens.
    """
    rendered = renderer.render_sample(messages)
    replies = list(_replies(messages))
    if len(replies) != len(steps):
        raise DataFault(f"an episode of {len(steps)} replies has a conversation of {len(replies)}")
    trained = [position for position, label in enumerate(rendered.labels) if label != IGNORED]
    positions: list[int] = []
    logprobs: list[float] = []
    worth: list[float] = []
    for number, ((span, ends), step, advantage) in enumerate(zip(replies, steps, advantages, strict=True)):
        if not span.train:
            continue
        sampled = step.logprobs is not None and len(step.logprobs) == len(step.token_ids)
        if number >= given and not sampled:
            raise DataFault(f"the reply {step.reply[:60]!r} has no log-probability for each of its tokens")
        # If the turn continues after this reply, the end of turn that was sampled is left out.
        before = rendered.input_ids[trained[0] - 1] if trained else None
        ids = step.token_ids if ends and not span.written else renderer.inner_ids(span, before)
        found, trained = trained[: len(ids)], trained[len(ids) :]
        if tuple(rendered.input_ids[position] for position in found) != ids:
            raise DataFault(f"the reply {step.reply[:60]!r} is not rendered as the tokens that were sampled")
        if ends and found and trained[:1] == [found[-1] + 1]:
            # This end of turn was not sampled.
            trained = trained[1:]
        if number < given:
            continue
        positions += found
        logprobs += (step.logprobs or ())[: len(ids)]
        worth += [advantage] * len(ids)
    if trained:
        raise DataFault(f"an episode of {len(steps)} replies is rendered with loss on {len(trained)} further tokens")
    return PolicyRow(tuple(rendered.input_ids), tuple(positions), tuple(logprobs), tuple(worth), len(positions))


def _replies(messages: Sequence[Message]) -> Iterator[tuple[Span, bool]]:
    """Yield the replies of a whole episode's conversation, each with a flag that says whether it
    ends its turn. In a growing turn, replies and observations alternate.
    """
    for message in messages:
        if message.spans:
            last = len(message.spans) - 1
            yield from ((span, place == last) for place, span in enumerate(message.spans) if place % 2 == 0)
        elif message.train:
            yield message.parts[0], True


def numbered(rows: Sequence[PolicyRow]) -> list[TokenRow]:
    """Return rows for `packing.forward_passes` whose labels number the sampled tokens of all rows,
    from 0.
    """
    made, number = [], 0
    for row in rows:
        labels = [IGNORED] * len(row.input_ids)
        for position in row.positions:
            labels[position] = number
            number += 1
        made.append(TokenRow(row.input_ids, tuple(labels)))
    return made
