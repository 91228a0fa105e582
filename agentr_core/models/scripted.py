"""A chat model whose replies are computed by a function: for examples, and for tests that prescribe
the model's choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentr_core.errors import ModelFault, PromptTooLong
from agentr_core.fingerprint import fingerprint
from agentr_core.models.local.waves import cut_at_stop
from agentr_core.types import Generation, Message, Request

ReplyFunction = Callable[[tuple[Message, ...], int, int], str]
"""(messages, seed, reply number) -> the reply's text. It must be a pure function."""

_WORD = re.compile(r"\S+\s*")


class ScriptedModel:
    """A ChatModel that answers with `reply(messages, seed, number)`.

    Its tokens are words (a run of non-space characters and the space after it): `max_new_tokens`
    and the context limit count them. Generations carry no token ids, since no tokenizer made them,
    so training renders their text; if log-probabilities are asked for, they are an empty tuple. Of
    the other sampling settings only `stop`, `include_stop` and `until` have an effect; the function
    decides what a seed does. `script` names the function's behaviour in the fingerprint.
    """

    def __init__(
        self, reply: ReplyFunction, *, name: str = "scripted", script: str = "", context_length: int = 1_000_000
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint("scripted", name, script)
        self.context_length = context_length
        self._reply = reply
        self._closed = False

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies of the function, `request.n` for each request. `finish_reason` is
        "length" for a reply that was cut by `max_new_tokens` or the context, else "stop".

        Raises `PromptTooLong` when a prompt fills the context, `ModelFault` after `close`.
        """
        if self._closed:
            raise ModelFault(f"model {self.name} is closed; make a new one")
        prompt_sizes = [self.count_tokens(request) for request in requests]
        for prompt_size in prompt_sizes:
            if prompt_size >= self.context_length:
                raise PromptTooLong.counted(prompt_size, self.context_length, self.name)
        generations: list[list[Generation]] = []
        for request, prompt_size in zip(requests, prompt_sizes, strict=True):
            limit = min(request.sampling.max_new_tokens, self.context_length - prompt_size)
            replies = []
            for number in range(request.n):
                text = cut_at_stop(self._reply(request.messages, request.seed, number), request.sampling)
                words = list(_WORD.finditer(text))
                is_cut = len(words) > limit
                if request.on_text is not None:
                    for word in words[:limit]:
                        request.on_text(text[: word.end()])
                reply = Generation(
                    text=text[: words[limit].start()] if is_cut else text,
                    token_ids=(),
                    finish_reason="length" if is_cut else "stop",
                    prompt_tokens=prompt_size,
                    completion_tokens=min(len(words), limit),
                    logprobs=() if request.sampling.logprobs else None,
                )
                replies.append(reply)
            generations.append(replies)
        return generations

    def count_tokens(self, request: Request) -> int:
        """Return the number of words in all messages, and one more for each message's role."""
        return sum(1 + len(_WORD.findall(message.text)) for message in request.messages)

    async def close(self) -> None:
        """Refuse further requests."""
        self._closed = True
