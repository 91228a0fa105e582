"""Our end of the connection to a simulator's Java."""

from __future__ import annotations

from collections import deque
from typing import Any

from py4j.java_gateway import GatewayClient, GatewayParameters
from py4j.protocol import MEMORY_COMMAND_NAME, MEMORY_DEL_SUBCOMMAND_NAME


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

    def garbage_collect_object(self, target_id: str) -> None:
        """Note that Java may forget an object, which the next command tells it: an interrupt that
        came while Python collects an object would be lost.
        """
        self._garbage.append(target_id)
