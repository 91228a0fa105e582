"""A world on a remote server, whose episodes survive lost connections, restarts and unreadable
answers.

If the answer to a request is lost, the server may or may not have carried the request out. So a
request that acts is sent once. After a fault the episode is begun again in a fresh environment of
the server, its recorded actions are repeated with every answer compared, and then the action is
sent there.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from agentr_core.environment import Environment, Repeatability, is_repetition
from agentr_core.errors import ConfigError, EnvironmentFault, IllTypedAnswer, ReplayDiverged, ReplayDrifted
from agentr_core.recipes.models import url_fault
from agentr_core.texts import abbreviate
from agentr_core.types import Instance, Transition

T = TypeVar("T")
_log = logging.getLogger(__name__)


class StepOutcome(NamedTuple):
    """The outcome of a step. `reward` is in [0, 1], or negative for a disaster; `success` follows
    the rule of the world; `valid` says whether the action was accepted, None if the server does not
    tell.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    valid: bool | None = None

    @property
    def is_over(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


class RemoteWorld(Environment):
    """A world whose episodes are played on a server. A subclass says how an episode begins there
    (`_begin`), how it acts (`_act`), whether it is still open (`_is_open`), and how it is ended
    after a fault (`_give_up`) and otherwise (`_release`).

    Args:
        url: the address of the server.
        example: an address of the right form, for error messages.
        timeout_s: seconds that an answer may take.
        patience_s: seconds for which an absent or full server is tried again.
        retries: how often an episode is restored for one step before the fault is raised.
        answer_mib: the largest size of an answer, in MiB.

    Raises:
        ConfigError: the address is missing or malformed, or a number is out of its range.
    """

    blocking = True

    def __init__(
        self, *, url: str, example: str, timeout_s: float, patience_s: float, retries: int, answer_mib: int
    ) -> None:
        if not url:
            raise ConfigError(
                f"{self.name} needs the address of a server: set the option url, or the variable "
                f"{self.variables['url']}; {self.start_hint()}"
            )
        if fault := url_fault(url, example=example):
            raise ConfigError(f"{self.name}: option url: {fault}")
        if timeout_s <= 0 or patience_s < 0:
            raise ConfigError(f"{self.name}: timeout_s must be above 0, and patience_s at least 0")
        if answer_mib < 1:
            raise ConfigError(f"{self.name}: answer_mib must be at least 1")
        self._max_retries = retries
        self._instance: Instance | None = None
        self._first_observation = ""
        self._steps: list[tuple[str, StepOutcome]] = []
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_closed = False

    @abstractmethod
    def _begin(self, instance: Instance) -> str:
        """Begin an instance afresh on the server and return its first observation."""

    @abstractmethod
    def _act(self, action: str) -> StepOutcome:
        """Send an action once and return its outcome."""

    @abstractmethod
    def _is_open(self) -> bool:
        """Return whether the episode is, as far as is known, still open on the server."""

    @abstractmethod
    def _give_up(self, fault: EnvironmentFault) -> None:
        """Abandon the episode on the server after a fault."""

    @abstractmethod
    def _release(self) -> None:
        """End the episode on the server in the regular way."""

    def reset(self, instance: Instance) -> str:
        """Begin a fresh episode and return its first observation. Raises `EnvironmentFault` for an
        unknown instance, and after `close`.
        """
        if instance.split not in self.splits() or instance not in self.instances(instance.split):
            raise EnvironmentFault(f"{self.name} has no instance {instance.key}")
        with self._keep_open():
            self._instance, self._steps = None, []
            self._first_observation = self._retry_after_faults(lambda: self._begin(instance))
            self._instance = instance
        return self._first_observation

    def step(self, action: str) -> Transition:
        """Carry out an action and return the transition. Raises `EnvironmentFault` before a reset,
        and after the end of the episode or `close`.
        """
        instance = self._instance
        if instance is None or (self._steps and self._steps[-1][1].is_over):
            raise EnvironmentFault(f"{self.name}: a step {'after the end' if instance else 'before the reset'}")
        with self._keep_open():
            outcome = self._retry_after_faults(lambda: self._act_or_restore(instance, action))
            self._steps.append((action, outcome))
        info: dict[str, Any] = {"success": outcome.success}
        if outcome.valid is not None:
            info["valid"] = outcome.valid
        return Transition(outcome.observation, outcome.reward, outcome.terminated, outcome.truncated, info)

    def close(self) -> None:
        """Release the episode on the server for good; if a call is under way in a thread, do so as
        soon as the call ends.
        """
        with self._lock:
            self._is_closed = True
            if self._is_busy:
                return
        self._release()

    @contextmanager
    def _keep_open(self) -> Iterator[None]:
        """Keep `close` from releasing the episode during the block; if it was called, release it
        after the block.
        """
        with self._lock:
            if self._is_closed:
                raise EnvironmentFault(f"{self.name}: this environment is closed")
            self._is_busy = True
        try:
            yield
        finally:
            with self._lock:
                self._is_busy = False
                is_closed = self._is_closed
            if is_closed:
                self._release()

    # The servers know no idempotency key, so a step without an answer may have been carried out:
    # sending it once more could do it twice.
    def _retry_after_faults(self, attempt: Callable[[], T]) -> T:
        """Return the result of an attempt. After a fault, abandon the episode on the server and try
        again, up to `retries` times, unless a replay diverged or an answer had a wrong type.
        """
        num_retries_left = self._max_retries
        while True:
            try:
                return attempt()
            except EnvironmentFault as fault:
                self._give_up(fault)
                if not num_retries_left or self._is_closed or isinstance(fault, ReplayDiverged | IllTypedAnswer):
                    raise
                num_retries_left -= 1
                _log.info("%s goes on in a fresh environment after: %s", self.name, fault)

    def _act_or_restore(self, instance: Instance, action: str) -> StepOutcome:
        if not self._is_open():
            repeatability = self.repeatability
            error_class = ReplayDiverged if repeatability is Repeatability.EXACT else ReplayDrifted
            if not is_repetition(first_observation := self._begin(instance), self._first_observation, repeatability):
                raise error_class(
                    f"{instance.key} began with {abbreviate(self._first_observation)}, and in a fresh environment with "
                    f"{abbreviate(first_observation)}"
                )
            for position, (past_action, outcome) in enumerate(self._steps):
                replay = self._act(past_action)
                if replay[1:] != outcome[1:] or not is_repetition(
                    replay.observation, outcome.observation, repeatability
                ):
                    raise error_class(
                        f"{instance.key}: step {position}, {past_action!r}, gave {abbreviate(outcome)}, and in a fresh "
                        f"environment {abbreviate(replay)}"
                    )
        return self._act(action)
