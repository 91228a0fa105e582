"""End a server as soon as the process that started it is gone, for whatever reason:
`server_guard.py OWNER SERVER`.

Both are open process descriptors (pidfd): unlike a process id, each always means the same process.
The guard ends with the server. It imports only the standard library, to start quickly.
"""

from __future__ import annotations

import select
import signal
import sys
from contextlib import suppress

GRACE = 5.0
"""Seconds for an orderly end before the server is killed."""


def main(owner: int, server: int) -> None:
    """Wait until the process `owner` or `server` ends. If the owner does, send the server SIGTERM
    and, if it still runs `GRACE` seconds later, SIGKILL.
    """
    ended_fds, _, _ = select.select([owner, server], [], [])
    for number in (signal.SIGTERM, signal.SIGKILL):
        if server in ended_fds:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(server, number)
        ended_fds, _, _ = select.select([server], [], [], GRACE)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
