"""Requests to models, and their replies."""

from __future__ import annotations

from dataclasses import dataclass

from agentr_core.fingerprint import later
from agentr_core.types.conversation import FinishReason, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for drawing replies. `temperature` 0 means greedy; `stop` strings end a reply and
    are not part of it, unless `include_stop` keeps the one that ended it.

    The token ids of a reply include those of its stop string in both cases. The last token may
    reach beyond the stop string; the text does not.

    `until` is a regular expression, looked for outside thoughts after each line break and colon: a
    reply ends where its first match does. With it, the token ids end with the text, whatever cut
    it: no token is kept that only tells how the model would have gone on.

    `repetition_penalty` changes the logits of tokens in the prompt and the reply so far (1: no
    change), `temperature` those of all tokens; `top_k` (0: all), `top_p` and `min_p` then filter,
    in this order, with the semantics of Transformers' logits processors. Log-probabilities are
    those of the model alone, before all of these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 500
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    include_stop: bool = later(False)
    top_k: int = later(0)
    min_p: float = later(0.0)
    repetition_penalty: float = later(1.0)
    until: str = later("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how many replies are wanted.

    Reply i of a request is drawn from the random stream (`seed`, i): it does not depend on `n` or
    on what else is in the batch. `session` groups requests that share a prefix (one tree, one
    episode). `helper` says that it is a question beside an episode: a thought that was cut, and
    that the server keeps apart from the text, is then an empty reply that `thinks`; of a model that
    acts it is a fault.
    """

    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int
    n: int = 1
    session: str = ""
    helper: bool = later(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One reply of a model.

    `token_ids` includes the end-of-turn token when the model ended its turn (`finish_reason`
    "stop"); it is empty for a backend that does not report them. `logprobs` has one natural-log
    probability per token id when they were asked for; from a server that gives no ids, one for each
    token that it reports. `prompt_tokens` counts the whole prompt, even for a reply that shared its
    prefill with others. `tokenizer` is the fingerprint of the tokenizer that made the ids, None if
    the backend does not know it. `thinks` says that the model is known to think before it replies:
    its prompt opened a thought, so that `text` begins within one, or the server returned the
    thought apart from it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[float, ...] | None = None
    tokenizer: str | None = None
    thinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to a model of another role, asked alongside an episode."""

    role: str
    """A role of the recipe: judge, reflector, editor, summariser, or actor."""
    messages: tuple[Message, ...]
    sampling: Sampling = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A model's answer to a `Question`.

    `model` is the model's fingerprint, `prompt_hash` the hash of the messages, `seed` that of the
    request. `thinks` is that of the `Generation`. What of the text counts says `answers.readable`.
    """

    role: str
    model: str
    prompt_hash: str
    seed: int
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    thinks: bool = False
