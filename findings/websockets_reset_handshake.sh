#!/usr/bin/env bash
# `websockets.sync.client.connect` against a server that resets connections which it has not read from, as the kernel
# does for those that wait in the queue of a process that is killed.
#
# One would assume: an error that its documentation lists: InvalidURI, OSError (the TCP connection), InvalidHandshake
#   (the opening handshake), TimeoutError. A client that opens anew after these survives a restart of its server.
# What happens: if the reset comes at the moment at which the request is written, `connect` raises
#   ConnectionClosedError ("no close frame received or sent") of a connection that was never open, which is none of
#   these. Sooner, it is an OSError; later, an InvalidHandshake. A race decides: a server killed once seldom shows it.
# Versions: websockets 16.1.1, Python 3.11.
# Why it matters: clients of environments and tools over WebSockets (OpenEnv's servers are such) retry what is listed.
#   One rollout of hundreds then ends with an error of another family, which ends a run or counts as a failed episode.
#
# Needs python3.11 and a registry of packages. Takes seconds, a minute at most.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check websockets==16.1.1
cat > "$work/trial.py" <<'PY'
import collections
import socket
import struct
import threading
import time

from websockets.exceptions import InvalidHandshake, InvalidURI
from websockets.sync.client import connect

LISTED = (InvalidURI, InvalidHandshake, OSError, TimeoutError)
SECONDS = 60.0
RESET = struct.pack("ii", 1, 0)


def hang_up(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()


raised = collections.Counter()
with socket.create_server(("127.0.0.1", 0)) as listener:
    threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
    deadline = time.monotonic() + SECONDS
    while raised["ConnectionClosedError", False] < 3 and time.monotonic() < deadline:
        try:
            connect(f"ws://127.0.0.1:{listener.getsockname()[1]}", proxy=None)
        except Exception as error:
            raised[type(error).__name__, isinstance(error, LISTED)] += 1
for (name, listed), count in raised.most_common():
    print(f"{count:5} of {raised.total()}: {name}, {'listed' if listed else 'not listed'}")
assert raised["ConnectionClosedError", False] > 0, "this has changed"
PY
"$work/venv/bin/python" "$work/trial.py"
