"""A Hugging Face causal language model in this process, on CPU or CUDA."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentr_core.errors import DataFault, ModelFault, PromptTooLong
from agentr_core.fingerprint import fingerprint
from agentr_core.models.checkpoint_dir import behaviour_files_sha256, check_model_directory, weights_sha256
from agentr_core.models.local.waves import (
    MAX_WIDTH,
    StopDetector,
    make_generation,
    plan_batches,
    text_streamer,
    visible_text,
)
from agentr_core.types import Generation, Request

if TYPE_CHECKING:
    from agentr_core.models.local.decoding import Decoder, Reply
    from agentr_core.models.local.loading import LoadedModel

_CACHED_PROMPTS = 4096


class TransformersModel:
    """A ChatModel on any causal language model that Transformers can run with full or sliding
    attention.

    Reply i of a request is drawn from the random stream (seed, i), whatever else is in the batch.
    Only rounding, in the last bits of the logits, still depends on the batch and on the prefix
    cache. In float32 the tokens were the same in all tests. In bfloat16 a logit is accurate to
    0.4%, so two almost equally likely tokens can change places. Token probabilities are computed in
    float32 or wider, and summed in float64.

    Log-probabilities are the model's own, at temperature 1 and before any penalty or filter. Stop
    strings are looked for in the text without special tokens. All computing is done in one worker
    thread. Use `load`.
    """

    def __init__(
        self, loaded_model: LoadedModel, *, name: str, fingerprint: str, max_batch: int, prefix_cache_bytes: int
    ) -> None:
        from agentr_core.models.local.decoding import Decoder

        self.name = name
        self.fingerprint = fingerprint
        self.context_length = loaded_model.context_length
        self.renderer = loaded_model.renderer
        self._tokenizer = loaded_model.tokenizer
        self._device = loaded_model.shape.device
        self._end_ids = loaded_model.end_ids
        self._readable = int(loaded_model.model.get_input_embeddings().weight.shape[0])
        self._max_batch = max_batch
        self._max_width = MAX_WIDTH if loaded_model.shares_rows else 1
        self._stop_detector = StopDetector(self._text)
        self._prompt = lru_cache(_CACHED_PROMPTS)(lambda messages: tuple(self.renderer.render_prompt(messages)))
        self._decoder: Decoder | None = Decoder(
            loaded_model.model,
            loaded_model.shape,
            loaded_model.attention,
            vocabulary=loaded_model.vocabulary,
            context_length=loaded_model.context_length,
            is_end=self._ended,
            prefix_cache_bytes=prefix_cache_bytes,
            max_draft_tokens=loaded_model.max_draft_tokens,
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"model-{name}")

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str = "float32",
        device: str = "auto",
        max_batch: int = 128,
        context_length: int = 0,
        prefix_cache_bytes: int = 1 << 30,
        at: datetime | None = None,
    ) -> TransformersModel:
        """Return the model of a directory, named after the directory.

        Args:
            path: A Hugging Face model directory with safetensors, a tokenizer and a chat template.
            dtype: "float32" or "bfloat16".
            device: "cpu", "cuda", "cuda:1", ...; "auto" is CUDA if available.
            max_batch: The most replies decoded at once.
            context_length: The most tokens of a prompt and its reply; 0 means the limit in the
                model's configuration.
            prefix_cache_bytes: Memory for keys and values of prompt prefixes that may occur again;
                0 keeps none.
            at: When the run started, for chat templates that print the date.

        Raises:
            ModelDirectoryError: the directory is unsound, or its architecture cannot be decoded
                here.
            ConfigError: an unknown dtype or device, a context longer than the model's, or no
                context length here or in the model's configuration.
        """
        from agentr_core.models.local.loading import load_model

        check_model_directory(path)
        loaded_model = load_model(path, dtype=dtype, device=device, context_length=context_length, at=at)
        identity = fingerprint(weights_sha256(path), behaviour_files_sha256(path), dtype, loaded_model.context_length)
        return cls(
            loaded_model,
            name=path.name,
            fingerprint=identity,
            max_batch=max_batch,
            prefix_cache_bytes=prefix_cache_bytes,
        )

    async def generate(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return the replies to each request; requests with equal prompts share one prefill.

        Raises `PromptTooLong` before anything is computed, `DataFault` for a conversation that the
        chat template refuses or with a token that the model has no embedding for, and `ModelFault`
        after `close` or when the computation fails.
        """
        self._opened()
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._generate, tuple(requests))

    def count_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens, including the header of the reply."""
        return len(self._prompt(request.messages))

    def cached_share(self) -> float:
        """Return the share of all prompt tokens so far that came from the prefix cache, in [0, 1];
        equal prompts of a batch count once.
        """
        prefill = self._decoder.prefill if self._decoder else None
        return prefill.cached_tokens / prefill.prompt_tokens if prefill and prefill.prompt_tokens else 0.0

    async def reload(self, weights: Path) -> None:
        """Replace the weights in place with those of a safetensors file. Raises `ModelFault` when
        the file does not have the same parameters, or after `close`.
        """
        self._opened()
        await asyncio.get_running_loop().run_in_executor(self._worker, self._reload, weights)

    def passes(self) -> int:
        """Return the number of forward passes begun so far, from which another thread sees that
        work is progressing.
        """
        return self._decoder.num_passes if self._decoder else 0

    def written(self) -> int:
        """Return the number of tokens sampled so far, including those of replies in progress."""
        return self._decoder.num_sampled_tokens if self._decoder else 0

    def abandon(self) -> None:
        """Make the work in progress fail at its next forward pass (`ModelFault`), and all later
        work too. Any thread may call this.
        """
        if self._decoder is not None:
            self._decoder.is_aborted = True

    async def close(self) -> None:
        """Wait for the work in progress, then free the model; on CUDA, also release its memory to
        other processes.
        """
        await asyncio.to_thread(self._worker.shutdown)
        self._decoder = None
        if self._device.type == "cuda":
            import torch

            # PyTorch keeps freed memory for itself, and the trainer, which has its own process,
            # needs this GPU next. Reference cycles are only freed by the garbage collector.
            gc.collect()
            torch.cuda.empty_cache()

    def _opened(self) -> Decoder:
        if self._decoder is None:
            raise ModelFault(f"model {self.name} is closed; load it again")
        return self._decoder

    def _reload(self, weights: Path) -> None:
        from safetensors.torch import load_file

        self._opened().take_weights(load_file(weights))

    def _generate(self, requests: tuple[Request, ...]) -> list[list[Generation]]:
        decoder = self._opened()
        prompts, replies = self._asked_for(requests)
        replies_by_prompt: list[list[int]] = [[] for _ in prompts]
        for index, reply in enumerate(replies):
            replies_by_prompt[reply.prompt_index].append(index)
        batches = plan_batches(
            [len(prompt) for prompt in prompts], replies_by_prompt, max_batch=self._max_batch, max_width=self._max_width
        )
        try:
            for batch in batches:
                decoder.decode(batch, prompts, replies)
        except RuntimeError as error:
            raise ModelFault(
                f"model {self.name} failed on {len(replies)} replies: {error}; if memory ran out, lower model.max_batch"
            ) from error
        reply_iterator = iter(replies)
        return [
            [self._generation(next(reply_iterator), request, prompts) for _ in range(request.n)] for request in requests
        ]

    def _generation(self, reply: Reply, request: Request, prompts: Sequence[tuple[int, ...]]) -> Generation:
        logprobs = reply.token_logprobs if reply.logprobs else None
        prompt, tokens = prompts[reply.prompt_index], reply.tokens
        return make_generation(
            self.renderer,
            self._end_ids,
            prompt,
            tokens,
            request.sampling,
            ended_by_model=reply.ended_by_model,
            logprobs=logprobs,
        )

    def _asked_for(self, requests: tuple[Request, ...]) -> tuple[list[tuple[int, ...]], list[Reply]]:
        """Return the distinct prompts of requests as token ids, and all replies to draw, request by
        request.

        Raises `PromptTooLong`, and `DataFault` for a token that the model has no embedding for.
        """
        from agentr_core.models.local.decoding import Reply

        prompts: dict[tuple[int, ...], int] = {}
        replies: list[Reply] = []
        for request in requests:
            tokens = self._prompt(request.messages)
            # On a GPU, looking up a token without an embedding would break CUDA for the whole
            # process.
            if (highest := max(tokens)) >= self._readable:
                raise DataFault(
                    f"the tokenizer of model {self.name} reads {self._tokenizer.decode([highest])!r} as token "
                    f"{highest}, but the model has embeddings for {self._readable} tokens; resize them "
                    "(resize_token_embeddings), or take the token out of the tokenizer"
                )
            room = self.context_length - len(tokens)
            if room < 1:
                raise PromptTooLong.counted(len(tokens), self.context_length, self.name)
            sampling, in_thought = request.sampling, self.renderer.opens_thought(tokens)
            replies += [
                Reply(
                    prompt_index=prompts.setdefault(tokens, len(prompts)),
                    seed=request.seed,
                    number=number,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    limit=min(sampling.max_new_tokens, room),
                    logprobs=sampling.logprobs,
                    stops=sampling.stop,
                    # The prompt opened a thought, and text in a thought is not an action.
                    until="" if in_thought else sampling.until,
                    top_k=sampling.top_k,
                    min_p=sampling.min_p,
                    repetition_penalty=sampling.repetition_penalty,
                    on_tokens=request.on_text
                    and text_streamer(
                        request.on_text,
                        sampling,
                        partial(visible_text, self.renderer, self._end_ids, tokens),
                        in_thought=in_thought,
                    ),
                )
                for number in range(request.n)
            ]
        return list(prompts), replies

    def _ended(self, tokens: Sequence[int], stops: tuple[str, ...], until: str) -> bool:
        watched = bool(stops or until)
        return tokens[-1] in self._end_ids or (watched and self._stop_detector.is_completed(tokens, stops, until))

    def _text(self, tokens: Sequence[int]) -> str:
        return self.renderer.text(tokens, ())
