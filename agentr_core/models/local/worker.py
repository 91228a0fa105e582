"""A worker process: `python -m agentr_core.models.local.worker DESCRIPTOR`, started by `workers`.

It loads one model and answers the batches that come through the socket DESCRIPTOR, one after
another. While it computes, it sends signs that it is making progress. It ends when the process that
started it ends or closes the socket.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

from agentr_core.errors import AgentrError, ModelFault
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.models.local.workers import (
    BatchReplies,
    GenerateCommand,
    LoadCommand,
    LoadReport,
    PartialText,
    Progress,
    ReloadCommand,
)
from agentr_core.system import end_with_parent, gc_paused_for_imports, keep_freed_memory

_PROGRESS_SECONDS = 0.25
"""The least seconds between two signs of progress."""


def main(arguments: list[str]) -> int:
    """Serve a model; return the exit status: 0 when the socket was closed, 1 when the model could
    not be loaded.
    """
    end_with_parent()
    with gc_paused_for_imports():
        # This imports all that loading a model needs.
        import agentr_core.models.local.loading  # noqa: F401
    with Connection(int(arguments[0])) as connection:
        return asyncio.run(serve(connection))


async def serve(connection: Connection) -> int:
    """Load the model that the first message names, and answer batches until the socket is closed.
    Return the exit status.
    """
    load_command: LoadCommand = connection.recv()
    if load_command.device == "cpu":
        keep_freed_memory()
    try:
        model = load_command.load()
    except AgentrError as error:
        connection.send(error)
        return 1
    connection.send(LoadReport(name=model.name, fingerprint=model.fingerprint, context_length=model.context_length))
    while True:
        try:
            message: GenerateCommand | ReloadCommand = connection.recv()
        except EOFError:
            return 0
        try:
            connection.send(await _answer(model, message, connection))
        except AgentrError as error:
            connection.send(error)
        except Exception as error:
            # One request alone may be at fault; the batcher then sends the others of its batch
            # again.
            traceback.print_exc()
            connection.send(ModelFault(f"model {model.name} failed with {type(error).__name__}: {error}"))


async def _answer(
    model: TransformersModel, message: GenerateCommand | ReloadCommand, connection: Connection
) -> BatchReplies | None:
    if isinstance(message, ReloadCommand):
        await model.reload(message.weights)
        return None
    # The decoding thread sends texts, and this one signs of progress.
    send_lock = threading.Lock()

    def send(report: PartialText | Progress) -> None:
        with send_lock:
            connection.send(report)

    def text_sender(number: int) -> Callable[[str], None]:
        return lambda text: send(PartialText(number, text))

    requests = [
        replace(request, on_text=text_sender(number)) if number in message.streamed_indices else request
        for number, request in enumerate(message.requests)
    ]
    generation = asyncio.ensure_future(model.generate(requests))
    num_passes = model.passes()
    while not generation.done():
        await asyncio.wait({generation}, timeout=_PROGRESS_SECONDS)
        # Send no sign without a further forward pass: the computation may hang while this thread
        # goes on.
        if not generation.done() and model.passes() > num_passes:
            num_passes = model.passes()
            send(Progress(model.written()))
    return BatchReplies(
        replies=generation.result(), cached_share=model.cached_share(), num_sampled_tokens=model.written()
    )


if __name__ == "__main__":
    # Torch's remaining threads have nothing to clean up, but may take long to end.
    os._exit(main(sys.argv[1:]))
