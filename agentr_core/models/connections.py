"""Connections to model servers: one for each request under way, and enough open files for them.

By default OpenAI's client allows a thousand connections, and treats a request that waits for one as
a server that does not answer.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from httpx2 import Limits

_OTHER_FILES = 512
"""Files that a process has open besides its connections: weights, logs, the store, pipes."""


def limits(most: int | None, *, idle_seconds: float) -> Limits:
    """Return the limits of a client: at most `most` connections (None: no limit), all kept for the
    next request.

    `idle_seconds` is how long an idle connection is kept. It must be shorter than the server's own
    limit, or the server closes a connection just as a request uses it.
    """
    from httpx2 import Limits

    return Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=idle_seconds)


def allow_connections(most: int) -> None:
    """Let this process open enough files for `most` connections, as far as the machine allows.

    The usual limit of 1,024 exists for programs that use `select`, and any program may raise its
    own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))
