"""A worker that loads nothing and echoes: `python -m stalling DESCRIPTOR`. It dies or hangs where
STALLING says, such as `hang load`: each process, or the first that makes the file STALLING_ONCE.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from agentr_core.models.local.workers import BatchReplies, LoadReport, ReloadCommand
from agentr_core.system import end_with_parent
from agentr_core.types import Generation


def main() -> None:
    """Answer what comes through the socket."""
    end_with_parent()
    with Connection(int(sys.argv[1])) as connection:
        connection.recv()
        _stall("load")
        connection.send(LoadReport(name="echo", fingerprint="echo", context_length=512))
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            if isinstance(message, ReloadCommand):
                _stall("reload")
                connection.send(None)
                continue
            _stall("ask")
            echo = Generation(text="echo", token_ids=(1,), finish_reason="stop", prompt_tokens=1, completion_tokens=1)
            replies = [[echo] * request.n for request in message.requests]
            connection.send(BatchReplies(replies=replies, cached_share=0.0, num_sampled_tokens=0))


def _stall(place: str) -> None:
    how, where = os.environ["STALLING"].split()
    once = os.environ["STALLING_ONCE"]
    if where != place:
        return
    if once:
        try:
            Path(once).touch(exist_ok=False)
        except FileExistsError:
            return
    if how == "die":
        os._exit(7)
    time.sleep(600)


if __name__ == "__main__":
    main()
