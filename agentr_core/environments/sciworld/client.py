"""Our end of the connection to a simulator's Java."""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

from py4j.java_gateway import GatewayClient, GatewayConnection, GatewayParameters
from py4j.protocol import MEMORY_COMMAND_NAME, MEMORY_DEL_SUBCOMMAND_NAME


class _Answers:
    """Java's answers on a connection, a line each.

    Java sends what is beyond the first 8,192 characters of an answer only once the first part is
    acknowledged, which Linux puts off for 40 ms unless it is told not to before each read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readline(self) -> bytes:
        """Return the next answer with its line break; without one, all that came before the end of
        the connection. Nothing comes after an answer before the next command.
        """
        answer = bytearray()
        while not answer.endswith(b"\n"):
            if hasattr(socket, "TCP_QUICKACK"):
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            part = self._connection.recv(65_536)
            if not part:
                break
            answer += part
        return bytes(answer)

    def close(self) -> None:
        """Do nothing: the connection is closed by whom it belongs to."""


class Client(GatewayClient):  # type: ignore[misc]
    """py4j's client, except that each command is sent once and whatever ends it is raised as it is.

    Its own `send_command` sends some commands again, which the simulator would then do twice, logs
    tracebacks, and makes an interrupt an `AttributeError`: it calls a method that connections lack.
    """

    def __init__(self, parameters: GatewayParameters) -> None:
        super().__init__(gateway_parameters=parameters)
        self._garbage: deque[str] = deque()

    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        """Return Java's answer to a command. Raises `Py4JNetworkError` when there is none."""
        connection = self._get_connection()
        try:
            while self._garbage:
                forget = f"{MEMORY_COMMAND_NAME}{MEMORY_DEL_SUBCOMMAND_NAME}{self._garbage.popleft()}\ne\n"
                connection.send_command(forget)
            answer = connection.send_command(command)
        except BaseException:
            connection.close()
            raise
        self._give_back_connection(connection)
        return answer

    def _create_connection(self) -> GatewayConnection:
        connection = super()._create_connection()
        connection.stream.close()
        connection.stream = _Answers(connection.socket)
        return connection

    def garbage_collect_object(self, target_id: str) -> None:
        """Note that Java may forget an object, which the next command tells it: an interrupt that
        came while Python collects an object would be lost.
        """
        self._garbage.append(target_id)
