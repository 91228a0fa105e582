"""The Python side of the connection to a simulator's Java process."""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

from py4j.java_gateway import GatewayClient, GatewayConnection, GatewayParameters
from py4j.protocol import MEMORY_COMMAND_NAME, MEMORY_DEL_SUBCOMMAND_NAME


class _AnswerStream:
    """Java's answers on a connection, one on each line.

    Java sends the part of an answer beyond its first 8,192 characters only once the first part is
    acknowledged. Linux delays this by 40 ms unless `TCP_QUICKACK` is set before each read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readline(self) -> bytes:
        """Return the next answer with its line break or, if the connection ends before that, what
        has come so far. Nothing comes after an answer before the next command is sent.
        """
        answer = bytearray()
        while not answer.endswith(b"\n"):
            if hasattr(socket, "TCP_QUICKACK"):
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            chunk = self._connection.recv(65_536)
            if not chunk:
                break
            answer += chunk
        return bytes(answer)

    def close(self) -> None:
        """Do nothing: the owner of the connection closes it."""


class Client(GatewayClient):  # type: ignore[misc]
    """py4j's client, except that each command is sent once, and an exception is raised as it is.

    py4j's own `send_command` sends some commands again, which the simulator would then carry out
    twice, logs tracebacks, and turns an interrupt into an `AttributeError`, since it calls a method
    that connections lack.
    """

    def __init__(self, parameters: GatewayParameters) -> None:
        super().__init__(gateway_parameters=parameters)
        self._garbage: deque[str] = deque()

    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        """Send a command and return Java's answer. Raises `Py4JNetworkError` if there is none."""
        connection = self._get_connection()
        try:
            while self._garbage:
                delete_command = f"{MEMORY_COMMAND_NAME}{MEMORY_DEL_SUBCOMMAND_NAME}{self._garbage.popleft()}\ne\n"
                connection.send_command(delete_command)
            answer = connection.send_command(command)
        except BaseException:
            connection.close()
            raise
        self._give_back_connection(connection)
        return answer

    def _create_connection(self) -> GatewayConnection:
        connection = super()._create_connection()
        connection.stream.close()
        connection.stream = _AnswerStream(connection.socket)
        return connection

    def garbage_collect_object(self, target_id: str) -> None:
        """Record that Java may forget an object; the next command tells it. Telling it at once
        would lose an interrupt that comes while Python collects the object.
        """
        self._garbage.append(target_id)
