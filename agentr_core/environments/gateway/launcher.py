"""Copies of a command that play the episodes of a gateway, one process for each episode.

Each copy gets address, key and model in the variables that agents read, or in place of placeholders
in its command. Its result becomes the episode's reward, or its failure.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypedDict
from urllib.parse import urlsplit

import httpx

from agentr_core import guard
from agentr_core.errors import AgentrError, ConfigError, EnvironmentServerError
from agentr_core.system import LOOPBACK, Scratch, report_write_errors, run_in_thread
from agentr_core.texts import escape_invisible, quoted

RewardSource = Literal["report", "line", "exit"]
PLACEHOLDERS: Final = (
    *("task", "task_file", "base_url", "anthropic_url", "key", "model"),
    *("split", "index", "episode", "episode_url", "folder"),
)
"""The names that may stand in braces in a command; `{task.FIELD}` stands for a field of the
task.
"""

_TAKE_SECONDS = 20.0
_TIMEOUT_SECONDS = 60.0
_PATIENCE_SECONDS = 30.0
"""Seconds for which the launcher waits for a gateway that cannot be reached."""
_PAUSE_SECONDS = 1.0
_POLL_SECONDS = 2.0
"""Seconds between two checks whether a copy's episode is over."""
_LEAVE_SECONDS = 10.0
"""Seconds that a copy has to end by itself once its episode is over."""
_PROGRESS_SECONDS = 10.0
_MAX_FRUITLESS_COPIES = 10
_MAX_OUTPUT_BYTES = 2**20
"""The most bytes that are kept of a copy's output."""
_MAX_ARGUMENT_BYTES = 2**17 - 256
"""The most bytes of an argument, or of a variable with its name; a limit of Linux (MAX_ARG_STRLEN),
less a margin.
"""
_MAX_QUOTED_CHARS = 200

# `${name}` is left to the shell, and braces around anything but a name to the command.
_PLACEHOLDER = re.compile(
    r"\{\{(?P<literal>[a-z_]+(?:\.[\w-]+)?)\}\}|(?<!\$)\{(?P<name>[a-z_]+)(?:\.(?P<part>[\w-]+))?\}"
)
_HARNESS_VARIABLES: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "PI_OFFLINE": "1",
}
"""Variables that keep harnesses from using the network for anything but the model, and from asking
a user.
"""
_HOME_VARIABLES: Final = ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "MSWEA_GLOBAL_CONFIG_DIR")
"""Variables that name the folder in which a harness keeps its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher starts, and where the reward comes from.

    Args:
        command: the words of the command, with placeholders.
        num_copies: how many run at once.
        reward_source: the source of the reward: the agent posts it (`report`), it is the last line
            that the command prints (`line`), or it follows from its exit status (`exit`).
        score_command: the words of a second command, which runs after the first; its last line is
            the reward.
        directory: the working directory of all copies; by default, each has a temporary folder.
        log_folder: the folder for the output of each copy.
        time_limit_s: the most seconds that one command of a copy may run.
        idle_s: the seconds without an episode after which the launcher ends.
    """

    command: tuple[str, ...]
    num_copies: int
    reward_source: RewardSource = "report"
    score_command: tuple[str, ...] = ()
    directory: Path | None = None
    log_folder: Path | None = None
    time_limit_s: float | None = None
    idle_s: float | None = None


class Offer(TypedDict):
    """An episode as the gateway offers it: the fields that are read here."""

    episode: str
    base_url: str
    model: str
    split: str
    index: int
    task: dict[str, Any] | None


class _CopyFailed(Exception):
    """A copy ended without a reward for its episode, for the given reason."""


class _GatewayUnreachable(_CopyFailed):
    """The gateway cannot be reached."""


class _NoEpisodes(Exception):
    """No episode was offered for `Launch.idle_s` seconds."""


def resolved_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command, with those that name a file here made absolute paths, since
    copies work in another directory.

    Raises `ConfigError` if the program does not exist, or a placeholder is unknown.
    """
    for match in (match for word in words for match in _PLACEHOLDER.finditer(word)):
        name, task_field = match["name"], match["part"]
        if name is not None and (name not in PLACEHOLDERS or (task_field is not None and name != "task")):
            raise ConfigError(
                f"{match[0]} is no placeholder of a command; there are {', '.join(PLACEHOLDERS)} and task.FIELD; for "
                f"braces as they are, write {{{match[0]}}}"
            )
    program = _absolute_path(words[0]) if "/" in words[0] else words[0]
    if not _PLACEHOLDER.search(program) and shutil.which(program) is None:
        raise ConfigError(f"there is no program {quoted(program, _MAX_QUOTED_CHARS)}; name one that can be run")
    return (program, *map(_absolute_path, words[1:]))


def _absolute_path(word: str) -> str:
    path = Path(word)
    # A folder may have the name of a split, or of anything.
    is_path = path.is_file() or ("/" in word and path.exists())
    return str(path.absolute()) if len(word) < 1000 and is_path else word


def read_reward(line: str) -> dict[str, Any]:
    """Return the reward in a line, as the body of the gateway's reward request. The line is a
    number from 0 to 1, or a JSON object with `reward` and, optionally, `success`. Raises
    `ValueError` for any other line; its message is the end of a sentence that begins with the line.
    """
    value: Any
    try:
        value = float(line)
    except ValueError:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
    body = value if isinstance(value, dict) else {"reward": value}
    reward, success = body.get("reward"), body.get("success")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise ValueError('is no number from 0 to 1, and no JSON such as {"reward": 0.5}')
    if not isinstance(success, bool | None):
        raise ValueError("has a success that is not true or false")
    return {"reward": float(reward)} | ({} if success is None else {"success": success})


class _OutputWriter(Protocol):
    def write(self, data: bytes) -> None: ...


class _OutputTail:
    """A stream whose last bytes are kept, at least 1 MiB."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> None:
        self._bytes += data
        if len(self._bytes) > 2 * _MAX_OUTPUT_BYTES:
            del self._bytes[:-_MAX_OUTPUT_BYTES]

    def clear(self) -> None:
        self._bytes.clear()

    def text(self) -> str:
        return self._bytes[-_MAX_OUTPUT_BYTES:].decode("utf-8", "replace")

    def last_line(self) -> str:
        """Return the last line that is not blank, or the empty string."""
        return next((line.strip() for line in reversed(self.text().splitlines()) if line.strip()), "")


class _LogFile:
    """A file with the end of a copy's output: all of it, or the last half MiB at least."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with report_write_errors(path):
            self._file = path.open("w+b", buffering=0)

    def write(self, data: bytes) -> None:
        with report_write_errors(self.path):
            self._file.write(data)
            if self._file.tell() > _MAX_OUTPUT_BYTES:
                self._file.seek(-_MAX_OUTPUT_BYTES // 2, os.SEEK_END)
                tail = self._file.read()
                self._file.seek(0)
                self._file.truncate()
                self._file.write(b"[what came before is left out]\n" + tail)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """An episode, and the process that plays it. `episode_url` is the address of the episode,
    `temp_folder` the folder that is removed when the copy ends, and `values` has the values of
    placeholders.
    """

    offer: Offer
    episode_url: str
    temp_folder: Path
    values: Mapping[str, str]
    variables: Mapping[str, str]
    log: _LogFile | None
    stdout: _OutputTail = field(default_factory=_OutputTail)
    stderr: _OutputTail = field(default_factory=_OutputTail)

    @property
    def instance(self) -> str:
        return f"{self.offer['split']}/{self.offer['index']}"

    def fill_placeholders(self, words: Sequence[str]) -> list[str]:
        """Return a command with its placeholders replaced. Raises `_CopyFailed` if a word is too
        long for an argument, and `ConfigError` if the task lacks a field that the command names.
        """
        command = [_PLACEHOLDER.sub(self._placeholder_value, word) for word in words]
        if not all(map(_fits_argument, command)):
            raise _CopyFailed("its task is too long for an argument, or cannot be one; use {task_file} in its place")
        return command

    def _placeholder_value(self, match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return f"{{{match['literal']}}}"
        if match["part"] is None:
            return self.values[match["name"]]
        task = self.offer["task"] or {}
        if match["part"] not in task:
            field_names = ", ".join(task) or "none"
            raise ConfigError(f"the task of {self.instance} has no field {match['part']!r}; it has {field_names}")
        return _as_text(task[match["part"]])

    def describe_exit(self, status: int) -> str:
        """Return in words how the process ended, with its last line on standard error, else on
        standard output.
        """
        signal_number = -status if status < 0 else status - 128
        ending = f"ended with status {status}"
        with suppress(ValueError):
            ending = f"was ended by {signal.Signals(signal_number).name}"
        line = self.stderr.last_line() or self.stdout.last_line()
        return f"{ending}: {escape_invisible(line)[:_MAX_QUOTED_CHARS]}" if line else ending


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fits_argument(text: str) -> bool:
    try:
        return len(content := os.fsencode(text)) <= _MAX_ARGUMENT_BYTES and b"\0" not in content
    except UnicodeEncodeError:
        return False


def placeholder_values(offer: Offer, *, token: str, temp_folder: Path) -> dict[str, str]:
    """Return the value of each placeholder, by name; `task_file` is the path for a file with the
    task, which is not written here, and is empty if there is no task.
    """
    folder, task = temp_folder / "work", offer["task"]
    task_file = "" if task is None else str(folder / ("task.txt" if isinstance(task, str) else "task.json"))
    url = offer["base_url"].removesuffix("/v1")
    fields: dict[str, Any] = {"anthropic_url": url, "key": token or offer["episode"], **offer}
    names = ("base_url", "anthropic_url", "key", "model", "split", "index", "episode")
    return {name: str(fields[name]) for name in names} | {
        "task": "" if task is None else _as_text(task),
        "task_file": task_file,
        "episode_url": url,
        "folder": str(folder),
    }


def copy_variables(
    values: Mapping[str, str], inherited: Mapping[str, str], *, home: Path, directory: Path
) -> dict[str, str]:
    """Return the environment variables of a copy, given the values of its placeholders. A task that
    is too long for a variable is left out.

    Args:
        inherited: the variables of this process, which are passed on; they take precedence over the
            defaults for harnesses, but not over what the copy needs.
        home: a folder for the state of harnesses.
        directory: the copy's working directory.
    """
    openai = {name: values["base_url"] for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE")}
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    variables = {
        **openai,
        "ANTHROPIC_BASE_URL": values["anthropic_url"],
        **dict.fromkeys(keys, values["key"]),
        **dict.fromkeys(("OPENAI_MODEL", "ANTHROPIC_MODEL"), values["model"]),
        **{
            f"AGENTR_{name.upper()}": values[name] for name in ("episode", "episode_url", "split", "index", "task_file")
        },
        "AGENTR_FOLDER": values["folder"],
        # Some harnesses work in the folder that this names.
        "PWD": str(directory),
    }
    if _fits_argument(values["task"]):
        variables["AGENTR_TASK"] = values["task"]
    host = urlsplit(values["base_url"]).hostname
    if host in LOOPBACK:
        # Otherwise clients would use a proxy for this machine.
        no_proxy = inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""
        variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, (no_proxy, host))))
    defaults = _HARNESS_VARIABLES | {name: str(home) for name in _HOME_VARIABLES}
    # The task of an outer launcher must not be taken for that of this copy.
    inherited = {name: value for name, value in inherited.items() if name != "AGENTR_TASK"}
    return {**defaults, **inherited, **variables}


class Launcher:
    """Plays the episodes of a gateway with copies of a command."""

    def __init__(self, launch: Launch, *, url: str, token: str, print_line: Callable[[str], Any]) -> None:
        """Check the commands; nothing is started yet.

        Args:
            url: the address of the gateway.
            token: the gateway's token; empty if it has none.
            print_line: is called with each line for the user.

        Raises `ConfigError` if a program does not exist, or a placeholder is unknown.
        """
        self._command = resolved_command(launch.command)
        self._score_command = resolved_command(launch.score_command) if launch.score_command else ()
        self._launch = launch
        self._url = url.rstrip("/")
        self._token = token
        self._print_line = print_line
        self._num_by_ending = {"rewarded": 0, "closed by their run": 0, "failed": 0}
        self._num_at_work = 0
        self._num_fruitless = 0
        self._last_work_time = 0.0
        self._is_unreachable = False

    async def run(self) -> None:
        """Play episodes until cancelled, or until none was offered for `idle_s` seconds (it then
        returns). Copies that still run are then ended, and their episodes reported as failed.

        Raises `EnvironmentServerError` if the address has no gateway, or it wants another token,
        `ConfigError` if ten copies in a row ended before they asked the policy anything, and
        `DiskError` if a log cannot be written.
        """
        if self._launch.log_folder is not None:
            with report_write_errors(self._launch.log_folder):
                self._launch.log_folder.mkdir(parents=True, exist_ok=True)
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=_TIMEOUT_SECONDS,
            limits=httpx.Limits(max_connections=None),
            trust_env=urlsplit(self._url).hostname not in LOOPBACK,
        )
        async with self._http:
            await self._check_gateway()
            scratch, self._last_work_time = Scratch("copies"), time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._launch.num_copies):
                        group.create_task(self._play_episodes(Path(scratch.path)))
                    group.create_task(self._monitor())
            except BaseExceptionGroup as errors:
                # The first error ends all copies.
                if not isinstance(errors.exceptions[0], _NoEpisodes):
                    raise errors.exceptions[0] from None
            finally:
                self._print_line(self.summary())
                scratch.close()

    async def _check_gateway(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS + _PAUSE_SECONDS):
                response = await self._request("GET", "/", reports_outage=False)
        except (_GatewayUnreachable, TimeoutError) as fault:
            reason = str(fault) or f"{self._url} gives no answer"
            raise EnvironmentServerError(f"{reason}; `agentr gateway` starts one") from None
        if response.status_code != httpx.codes.OK or "gateway" not in response.text:
            raise self._wrong_server_error("/", response)

    async def _monitor(self) -> None:
        """Report progress from time to time, and raise `_NoEpisodes` once there has been no work
        for `idle_s` seconds.
        """
        idle_s, summary, last_report_time = self._launch.idle_s, self.summary(), time.monotonic()
        while True:
            await asyncio.sleep(min(_PAUSE_SECONDS, idle_s or _PAUSE_SECONDS))
            now = time.monotonic()
            if now - last_report_time >= _PROGRESS_SECONDS and summary != self.summary():
                summary, last_report_time = self.summary(), now
                self._print_line(f"{time.strftime('%H:%M:%S')}  {summary}")
            if idle_s is not None and not self._num_at_work and now - self._last_work_time >= idle_s:
                raise _NoEpisodes

    def summary(self) -> str:
        """Return in words how many copies are at work, and how the finished episodes ended."""
        counts = ", ".join(f"{count:,} {ending}" for ending, count in self._num_by_ending.items() if count)
        num_episodes = sum(self._num_by_ending.values())
        return f"{self._num_at_work} at work; {num_episodes:,} episodes over{': ' if counts else ''}{counts}"

    async def _play_episodes(self, folder: Path) -> None:
        while True:
            offer = await self._take_episode()
            self._num_at_work += 1
            temp_folder = folder / offer["episode"]
            try:
                await self._play_episode(offer, temp_folder)
            finally:
                self._num_at_work -= 1
                self._last_work_time = time.monotonic()
                await run_in_thread(partial(shutil.rmtree, temp_folder, ignore_errors=True))

    async def _take_episode(self) -> Offer:
        while True:
            response = await self._request("POST", "/episodes", {"wait": _TAKE_SECONDS}, patience_s=float("inf"))
            if response.status_code == httpx.codes.OK:
                offer: Offer = response.json()
                return offer
            if response.status_code != httpx.codes.NO_CONTENT:
                raise self._wrong_server_error("/episodes", response)

    async def _play_episode(self, offer: Offer, temp_folder: Path) -> None:
        copy = self._prepare(offer, temp_folder)
        try:
            reward = await self._run_copy(copy)
            if reward is not None:
                response = await self._request("POST", f"{copy.episode_url}/reward", reward)
                if response.status_code not in (httpx.codes.OK, httpx.codes.GONE):
                    raise _CopyFailed(f"the gateway refused its reward: {response.text[:_MAX_QUOTED_CHARS]}")
            state = await self._episode_state(copy)
            if "over" not in state:
                raise _CopyFailed(f"{copy.describe_exit(0)}, and no reward was reported")
            self._count_ending(state)
        except _CopyFailed as failure:
            await self._report_failure(copy, failure)
        except BaseException as error:
            reason = "the launcher was ended" if isinstance(error, asyncio.CancelledError) else "the launcher broke"
            with suppress(httpx.HTTPError):
                await self._http.post(f"{copy.episode_url}/failed", json={"reason": reason}, timeout=_PAUSE_SECONDS)
            raise
        finally:
            if copy.log is not None:
                copy.log.close()

    def _prepare(self, offer: Offer, temp_folder: Path) -> _Copy:
        home, folder = temp_folder / "home", temp_folder / "work"
        values = placeholder_values(offer, token=self._token, temp_folder=temp_folder)
        with report_write_errors(temp_folder):
            home.mkdir(parents=True)
            folder.mkdir()
            if values["task_file"]:
                Path(values["task_file"]).write_text(values["task"], encoding="utf-8", errors="surrogatepass")
        log = None
        if self._launch.log_folder is not None:
            split = re.sub(r"[^\w-]", "_", offer["split"])
            log = _LogFile(self._launch.log_folder / f"{split}-{offer['index']}-{offer['episode']}.log")
        variables = copy_variables(values, os.environ, home=home, directory=self._launch.directory or folder)
        episode_url = values["episode_url"]
        return _Copy(
            offer=offer, episode_url=episode_url, temp_folder=temp_folder, values=values, variables=variables, log=log
        )

    async def _run_copy(self, copy: _Copy) -> dict[str, Any] | None:
        """Run a copy and return its reward; None if the agent reports it itself, or its episode was
        over first. Raises `_CopyFailed` if there is no valid reward.
        """
        status, is_over = await self._run_command(copy, self._command, copy.variables)
        if is_over:
            return None
        launch = self._launch
        if launch.reward_source == "exit" and not launch.score_command:
            # A program that was killed or could not be started has not judged the episode.
            if status < 0 or status == guard.NOT_STARTED or status - 128 in range(1, signal.NSIG):
                raise _CopyFailed(copy.describe_exit(status))
            return {"reward": float(status == 0)}
        if launch.reward_source == "report" and not launch.score_command:
            if status and "over" not in await self._episode_state(copy):
                raise _CopyFailed(f"{copy.describe_exit(status)}, and no reward was reported")
            return None
        if status:
            raise _CopyFailed(copy.describe_exit(status))
        if launch.score_command:
            output_file = copy.temp_folder / "output.txt"
            output_file.write_text(copy.stdout.text(), encoding="utf-8")
            copy.stdout.clear()
            status, is_over = await self._run_command(
                copy, self._score_command, {**copy.variables, "AGENTR_OUTPUT": str(output_file)}
            )
            if is_over:
                return None
            if status:
                raise _CopyFailed(f"the score command {copy.describe_exit(status)}")
        line = copy.stdout.last_line()
        try:
            return read_reward(line)
        except ValueError as error:
            subject = "the score command printed" if launch.score_command else "it printed"
            raise _CopyFailed(f"the last line that {subject}, {quoted(line, _MAX_QUOTED_CHARS)}, {error}") from None

    async def _run_command(self, copy: _Copy, words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, bool]:
        """Run a command to its end. Return its exit status, and whether its episode was over first:
        it then has a few seconds to end by itself. Raises `_CopyFailed` if it takes too long.
        """
        command = [sys.executable, "-I", "-S", guard.__file__, *copy.fill_placeholders(words)]
        process = await asyncio.create_subprocess_exec(
            *command,
            # When this pipe closes, the guard knows that this process is gone.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._launch.directory or copy.values["folder"],
            env=variables,
            # An interrupt at the terminal must reach this process only.
            start_new_session=True,
        )
        log_files = (copy.log,) if copy.log is not None else ()
        assert process.stdout is not None
        assert process.stderr is not None
        streams = (process.stdout, copy.stdout), (process.stderr, copy.stderr)
        reading_task = asyncio.gather(*(_read_stream(stream, tail, *log_files) for stream, tail in streams))
        exit_task = asyncio.ensure_future(process.wait())
        over_task = asyncio.ensure_future(self._wait_until_over(copy))
        # A copy whose output can no longer be written would wait for ever.
        reading_task.add_done_callback(
            lambda task: over_task.cancel() if not task.cancelled() and task.exception() else None
        )
        try:
            await asyncio.wait(
                (exit_task, over_task), timeout=self._launch.time_limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            is_over = over_task.done() and not exit_task.done()
            if is_over:
                await asyncio.wait((exit_task,), timeout=_LEAVE_SECONDS)
            elif not exit_task.done():
                raise _CopyFailed(f"it took more than {self._launch.time_limit_s:g} s")
        finally:
            over_task.cancel()
            await _end_process(process, exit_task)
            # The pipes are closed by now, unless the guard was killed.
            await asyncio.wait((reading_task,), timeout=_PAUSE_SECONDS)
            reading_task.cancel()
        if reading_task.done() and not reading_task.cancelled():
            reading_task.result()
        return (exit_task.result() if exit_task.done() else -signal.SIGKILL), is_over

    async def _wait_until_over(self, copy: _Copy) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(_GatewayUnreachable):
                if "over" in await self._episode_state(copy):
                    return

    async def _episode_state(self, copy: _Copy) -> dict[str, Any]:
        """Return what the gateway knows of an episode; it has the key `over` if the episode is over
        or unknown. Raises `_GatewayUnreachable`.
        """
        response = await self._request("GET", copy.episode_url)
        state: dict[str, Any] = response.json() if response.status_code == httpx.codes.OK else {"over": "it is unknown"}
        return state

    async def _report_failure(self, copy: _Copy, failure: _CopyFailed) -> None:
        """Report a copy's failure, unless its episode is over. Raises `ConfigError` if this was the
        tenth copy in a row to fail before it asked the policy anything.
        """
        has_asked = True
        if not isinstance(failure, _GatewayUnreachable):
            with suppress(_GatewayUnreachable):
                state = await self._episode_state(copy)
                if "over" in state:
                    self._count_ending(state)
                    return
                has_asked = state["asked"]
                await self._request("POST", f"{copy.episode_url}/failed", {"reason": str(failure)})
        self._num_by_ending["failed"] += 1
        self._print_line(f"{copy.instance} failed: {failure}")
        if copy.log is not None:
            self._print_line(f"  {copy.log.path}")
        self._num_fruitless = 0 if has_asked else self._num_fruitless + 1
        if self._num_fruitless >= _MAX_FRUITLESS_COPIES:
            raise ConfigError(
                f"{_MAX_FRUITLESS_COPIES} copies in a row ended before they asked the policy anything; the last one: "
                f"{failure}"
            )

    def _count_ending(self, state: Mapping[str, Any]) -> None:
        self._num_fruitless = 0
        self._num_by_ending["closed by their run" if state.get("reward") is None else "rewarded"] += 1

    async def _request(
        self, method: str, path: str, body: Any = None, *, patience_s: float | None = None, reports_outage: bool = True
    ) -> httpx.Response:
        """Return the gateway's answer, waiting up to `patience_s` seconds for a gateway that cannot
        be reached, by default 30. Raises `_GatewayUnreachable` after that.
        """
        deadline = time.monotonic() + (_PATIENCE_SECONDS if patience_s is None else patience_s)
        while True:
            try:
                response = await self._http.request(method, path, json=body)
                reason = f"it answered {response.status_code}"
                if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    if self._is_unreachable:
                        self._print_line(f"the gateway at {self._url} is back")
                    self._is_unreachable = False
                    return response
            except httpx.RequestError as error:
                reason = str(error) or type(error).__name__
            message = f"the gateway at {self._url} cannot be reached ({reason})"
            if time.monotonic() >= deadline:
                raise _GatewayUnreachable(message)
            if reports_outage and not self._is_unreachable:
                self._is_unreachable = True
                self._print_line(f"{message}; it is waited for")
            await asyncio.sleep(_PAUSE_SECONDS)

    def _wrong_server_error(self, path: str, response: httpx.Response) -> AgentrError:
        return EnvironmentServerError(
            f"{self._url}{path} answered {response.status_code} ({response.text[:_MAX_QUOTED_CHARS]}): this is not "
            "a gateway of agentr of this version, or it wants another token; correct the address, or set "
            "AGENTR_GATEWAY_TOKEN"
        )


async def _read_stream(stream: asyncio.StreamReader, *outputs: _OutputWriter) -> None:
    """Read a stream to its end, whatever its length: a process blocks if nobody reads its
    output.
    """
    while data := await stream.read(2**16):
        for output in outputs:
            output.write(data)


async def _end_process(process: asyncio.subprocess.Process, exit_task: asyncio.Future[int]) -> None:
    """Have the guard end its program, and wait; kill the guard if it does not end in time."""
    if exit_task.done():
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait((exit_task,), timeout=guard.GRACE + 5)
    finally:
        if not exit_task.done():
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait((exit_task,), timeout=_PAUSE_SECONDS)
