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
from agentr_core.system import LOOPBACK, Scratch, in_thread, writing
from agentr_core.texts import quoted, visible

Reward = Literal["report", "line", "exit"]
PLACEHOLDERS: Final = (
    *("task", "task_file", "base_url", "anthropic_url", "key", "model"),
    *("split", "index", "episode", "episode_url", "folder"),
)
"""The names that may stand in braces in a command; `{task.FIELD}` stands for a field of the
task.
"""

_TAKE_SECONDS = 20.0
_TIMEOUT = 60.0
_PATIENCE = 30.0
"""Seconds for which the launcher waits for a gateway that cannot be reached."""
_PAUSE = 1.0
_POLL_SECONDS = 2.0
"""Seconds between two checks whether a copy's episode is over."""
_LEAVE_SECONDS = 10.0
"""Seconds that a copy has to end by itself once its episode is over."""
_LINE_SECONDS = 10.0
_MOST_FRUITLESS = 10
_MOST_BYTES = 2**20
"""The most bytes that are kept of a copy's output."""
_MOST_IN_A_WORD = 2**17 - 256
"""The most bytes of an argument, or of a variable with its name; a limit of Linux (MAX_ARG_STRLEN),
less a margin.
"""
_QUOTED = 200

# `${name}` is left to the shell, and braces around anything but a name to the command.
_PLACEHOLDER = re.compile(
    r"\{\{(?P<literal>[a-z_]+(?:\.[\w-]+)?)\}\}|(?<!\$)\{(?P<name>[a-z_]+)(?:\.(?P<part>[\w-]+))?\}"
)
_SWITCHES: Final = {
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
_HOMES: Final = ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "MSWEA_GLOBAL_CONFIG_DIR")
"""Variables that name the folder in which a harness keeps its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher starts, and where the reward comes from.

    Args:
        command: the words of the command, with placeholders.
        copies: how many run at once.
        reward: the source of the reward: the agent posts it (`report`), it is the last line that
            the command prints (`line`), or it follows from its exit status (`exit`).
        score: the words of a second command, which runs after the first; its last line is the
            reward.
        directory: the working directory of all copies; by default, each has a temporary folder.
        logs: the folder for the output of each copy.
        time_limit: the most seconds that one command of a copy may run.
        idle: the seconds without an episode after which the launcher ends.
    """

    command: tuple[str, ...]
    copies: int
    reward: Reward = "report"
    score: tuple[str, ...] = ()
    directory: Path | None = None
    logs: Path | None = None
    time_limit: float | None = None
    idle: float | None = None


class Offer(TypedDict):
    """An episode as the gateway offers it: the fields that are read here."""

    episode: str
    base_url: str
    model: str
    split: str
    index: int
    task: dict[str, Any] | None


class _Failed(Exception):
    """A copy ended without a reward for its episode, for the given reason."""


class _Away(_Failed):
    """The gateway cannot be reached."""


class _Idle(Exception):
    """No episode was offered for `Launch.idle` seconds."""


def checked(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command, with those that name a file here made absolute paths, since
    copies work in another directory.

    Raises `ConfigError` if the program does not exist, or a placeholder is unknown.
    """
    for match in (match for word in words for match in _PLACEHOLDER.finditer(word)):
        name, part = match["name"], match["part"]
        if name is not None and (name not in PLACEHOLDERS or (part is not None and name != "task")):
            raise ConfigError(
                f"{match[0]} is no placeholder of a command; there are {', '.join(PLACEHOLDERS)} and task.FIELD; for "
                f"braces as they are, write {{{match[0]}}}"
            )
    program = _absolute(words[0]) if "/" in words[0] else words[0]
    if not _PLACEHOLDER.search(program) and shutil.which(program) is None:
        raise ConfigError(f"there is no program {quoted(program, _QUOTED)}; name one that can be run")
    return (program, *map(_absolute, words[1:]))


def _absolute(word: str) -> str:
    path = Path(word)
    # A folder may have the name of a split, or of anything.
    names_a_path = path.is_file() or ("/" in word and path.exists())
    return str(path.absolute()) if len(word) < 1000 and names_a_path else word


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


class _Output(Protocol):
    def write(self, data: bytes) -> None: ...


class _Tail:
    """A stream whose last bytes are kept, at least 1 MiB."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> None:
        self._bytes += data
        if len(self._bytes) > 2 * _MOST_BYTES:
            del self._bytes[:-_MOST_BYTES]

    def clear(self) -> None:
        self._bytes.clear()

    def text(self) -> str:
        return self._bytes[-_MOST_BYTES:].decode("utf-8", "replace")

    def last_line(self) -> str:
        """Return the last line that is not blank, or the empty string."""
        return next((line.strip() for line in reversed(self.text().splitlines()) if line.strip()), "")


class _Log:
    """A file with the end of a copy's output: all of it, or the last half MiB at least."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file = path.open("w+b", buffering=0)

    def write(self, data: bytes) -> None:
        with writing(self.path):
            self._file.write(data)
            if self._file.tell() > _MOST_BYTES:
                self._file.seek(-_MOST_BYTES // 2, os.SEEK_END)
                rest = self._file.read()
                self._file.seek(0)
                self._file.truncate()
                self._file.write(b"[what came before is left out]\n" + rest)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """An episode, and the process that plays it. `url` is the address of the episode, `private` the
    folder that is removed when the copy ends, and `values` has the values of placeholders.
    """

    offer: Offer
    url: str
    private: Path
    values: Mapping[str, str]
    variables: Mapping[str, str]
    log: _Log | None
    output: _Tail = field(default_factory=_Tail)
    errors: _Tail = field(default_factory=_Tail)

    @property
    def instance(self) -> str:
        return f"{self.offer['split']}/{self.offer['index']}"

    def fill(self, words: Sequence[str]) -> list[str]:
        """Return a command with its placeholders replaced. Raises `_Failed` if a word is too long
        for an argument, and `ConfigError` if the task lacks a field that the command names.
        """
        command = [_PLACEHOLDER.sub(self._value, word) for word in words]
        if not all(map(_fits, command)):
            raise _Failed("its task is too long for an argument, or cannot be one; use {task_file} in its place")
        return command

    def _value(self, match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return f"{{{match['literal']}}}"
        if match["part"] is None:
            return self.values[match["name"]]
        task = self.offer["task"] or {}
        if match["part"] not in task:
            fields = ", ".join(task) or "none"
            raise ConfigError(f"the task of {self.instance} has no field {match['part']!r}; it has {fields}")
        return _text(task[match["part"]])

    def ended(self, status: int) -> str:
        """Return in words how the process ended, with its last line on standard error, else on
        standard output.
        """
        number = -status if status < 0 else status - 128
        how = f"ended with status {status}"
        with suppress(ValueError):
            how = f"was ended by {signal.Signals(number).name}"
        line = self.errors.last_line() or self.output.last_line()
        return f"{how}: {visible(line)[:_QUOTED]}" if line else how


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fits(text: str) -> bool:
    try:
        return len(content := os.fsencode(text)) <= _MOST_IN_A_WORD and b"\0" not in content
    except UnicodeEncodeError:
        return False


def copy_values(offer: Offer, *, token: str, private: Path) -> dict[str, str]:
    """Return the value of each placeholder, by name; `task_file` is the path for a file with the
    task, which is not written here, and is empty if there is no task.
    """
    folder, task = private / "work", offer["task"]
    file = "" if task is None else str(folder / ("task.txt" if isinstance(task, str) else "task.json"))
    url = offer["base_url"].removesuffix("/v1")
    fields: dict[str, Any] = {"anthropic_url": url, "key": token or offer["episode"], **offer}
    names = ("base_url", "anthropic_url", "key", "model", "split", "index", "episode")
    return {name: str(fields[name]) for name in names} | {
        "task": "" if task is None else _text(task),
        "task_file": file,
        "episode_url": url,
        "folder": str(folder),
    }


def copy_variables(
    values: Mapping[str, str], outer: Mapping[str, str], *, home: Path, directory: Path
) -> dict[str, str]:
    """Return the environment variables of a copy, given the values of its placeholders. A task that
    is too long for a variable is left out.

    Args:
        outer: the variables of this process, which are passed on; they take precedence over the
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
    if _fits(values["task"]):
        variables["AGENTR_TASK"] = values["task"]
    host = urlsplit(values["base_url"]).hostname
    if host in LOOPBACK:
        # Otherwise clients would use a proxy for this machine.
        no_proxy = outer.get("no_proxy") or outer.get("NO_PROXY") or ""
        variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, (no_proxy, host))))
    defaults = _SWITCHES | {name: str(home) for name in _HOMES}
    # The task of an outer launcher must not be taken for that of this copy.
    outer = {name: value for name, value in outer.items() if name != "AGENTR_TASK"}
    return {**defaults, **outer, **variables}


class Launcher:
    """Plays the episodes of a gateway with copies of a command."""

    def __init__(self, launch: Launch, *, url: str, token: str, say: Callable[[str], Any]) -> None:
        """Check the commands; nothing is started yet.

        Args:
            url: the address of the gateway.
            token: the gateway's token; empty if it has none.
            say: is called with each line for the user.

        Raises `ConfigError` if a program does not exist, or a placeholder is unknown.
        """
        self._command = checked(launch.command)
        self._score = checked(launch.score) if launch.score else ()
        self._launch = launch
        self._url = url.rstrip("/")
        self._token = token
        self._say = say
        self._counts = {"rewarded": 0, "closed by their run": 0, "failed": 0}
        self._at_work = 0
        self._fruitless = 0
        self._last_work = 0.0
        self._away = False

    async def run(self) -> None:
        """Play episodes until cancelled, or until none was offered for `idle` seconds (it then
        returns). Copies that still run are then ended, and their episodes reported as failed.

        Raises `EnvironmentServerError` if the address has no gateway, or it wants another token,
        `ConfigError` if ten copies in a row ended before they asked the policy anything, and
        `DiskError` if a log cannot be written.
        """
        if self._launch.logs is not None:
            with writing(self._launch.logs):
                self._launch.logs.mkdir(parents=True, exist_ok=True)
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None),
            trust_env=urlsplit(self._url).hostname not in LOOPBACK,
        )
        async with self._http:
            await self._reach()
            scratch, self._last_work = Scratch("copies"), time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._launch.copies):
                        group.create_task(self._play_on(Path(scratch.path)))
                    group.create_task(self._watch())
            except BaseExceptionGroup as faults:
                # The first error ends all copies.
                if not isinstance(faults.exceptions[0], _Idle):
                    raise faults.exceptions[0] from None
            finally:
                self._say(self.summary())
                scratch.close()

    async def _reach(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE + _PAUSE):
                answer = await self._request("GET", "/", say=False)
        except (_Away, TimeoutError) as fault:
            reason = str(fault) or f"{self._url} gives no answer"
            raise EnvironmentServerError(f"{reason}; `agentr gateway` starts one") from None
        if answer.status_code != httpx.codes.OK or "gateway" not in answer.text:
            raise self._no_gateway("/", answer)

    async def _watch(self) -> None:
        """Report progress from time to time, and raise `_Idle` once there has been no work for
        `idle` seconds.
        """
        idle, summary, last_line = self._launch.idle, self.summary(), time.monotonic()
        while True:
            await asyncio.sleep(min(_PAUSE, idle or _PAUSE))
            now = time.monotonic()
            if now - last_line >= _LINE_SECONDS and summary != self.summary():
                summary, last_line = self.summary(), now
                self._say(f"{time.strftime('%H:%M:%S')}  {summary}")
            if idle is not None and not self._at_work and now - self._last_work >= idle:
                raise _Idle

    def summary(self) -> str:
        """Return in words how many copies are at work, and how the finished episodes ended."""
        counts = ", ".join(f"{count:,} {how}" for how, count in self._counts.items() if count)
        total = sum(self._counts.values())
        return f"{self._at_work} at work; {total:,} episodes over{': ' if counts else ''}{counts}"

    async def _play_on(self, folder: Path) -> None:
        while True:
            offer = await self._take()
            self._at_work += 1
            private = folder / offer["episode"]
            try:
                await self._play(offer, private)
            finally:
                self._at_work -= 1
                self._last_work = time.monotonic()
                await in_thread(partial(shutil.rmtree, private, ignore_errors=True))

    async def _take(self) -> Offer:
        while True:
            answer = await self._request("POST", "/episodes", {"wait": _TAKE_SECONDS}, patience=float("inf"))
            if answer.status_code == httpx.codes.OK:
                offer: Offer = answer.json()
                return offer
            if answer.status_code != httpx.codes.NO_CONTENT:
                raise self._no_gateway("/episodes", answer)

    async def _play(self, offer: Offer, private: Path) -> None:
        copy = self._prepare(offer, private)
        try:
            reward = await self._outcome(copy)
            if reward is not None:
                answer = await self._request("POST", f"{copy.url}/reward", reward)
                if answer.status_code not in (httpx.codes.OK, httpx.codes.GONE):
                    raise _Failed(f"the gateway refused its reward: {answer.text[:_QUOTED]}")
            state = await self._state(copy)
            if "over" not in state:
                raise _Failed(f"{copy.ended(0)}, and no reward was reported")
            self._count(state)
        except _Failed as failure:
            await self._fail(copy, failure)
        except BaseException as error:
            why = "the launcher was ended" if isinstance(error, asyncio.CancelledError) else "the launcher broke"
            with suppress(httpx.HTTPError):
                await self._http.post(f"{copy.url}/failed", json={"reason": why}, timeout=_PAUSE)
            raise
        finally:
            if copy.log is not None:
                copy.log.close()

    def _prepare(self, offer: Offer, private: Path) -> _Copy:
        home, folder = private / "home", private / "work"
        values = copy_values(offer, token=self._token, private=private)
        with writing(private):
            home.mkdir(parents=True)
            folder.mkdir()
            if values["task_file"]:
                Path(values["task_file"]).write_text(values["task"], encoding="utf-8", errors="surrogatepass")
        log = None
        if self._launch.logs is not None:
            split = re.sub(r"[^\w-]", "_", offer["split"])
            log = _Log(self._launch.logs / f"{split}-{offer['index']}-{offer['episode']}.log")
        variables = copy_variables(values, os.environ, home=home, directory=self._launch.directory or folder)
        url = values["episode_url"]
        return _Copy(offer=offer, url=url, private=private, values=values, variables=variables, log=log)

    async def _outcome(self, copy: _Copy) -> dict[str, Any] | None:
        """Run a copy and return its reward; None if the agent reports it itself, or its episode was
        over first. Raises `_Failed` if there is no valid reward.
        """
        status, over = await self._execute(copy, self._command, copy.variables)
        if over:
            return None
        launch = self._launch
        if launch.reward == "exit" and not launch.score:
            # A program that was killed or could not be started has not judged the episode.
            if status < 0 or status == guard.NOT_STARTED or status - 128 in range(1, signal.NSIG):
                raise _Failed(copy.ended(status))
            return {"reward": float(status == 0)}
        if launch.reward == "report" and not launch.score:
            if status and "over" not in await self._state(copy):
                raise _Failed(f"{copy.ended(status)}, and no reward was reported")
            return None
        if status:
            raise _Failed(copy.ended(status))
        if launch.score:
            output = copy.private / "output.txt"
            output.write_text(copy.output.text(), encoding="utf-8")
            copy.output.clear()
            status, over = await self._execute(copy, self._score, {**copy.variables, "AGENTR_OUTPUT": str(output)})
            if over:
                return None
            if status:
                raise _Failed(f"the score command {copy.ended(status)}")
        line = copy.output.last_line()
        try:
            return read_reward(line)
        except ValueError as error:
            whose = "the score command printed" if launch.score else "it printed"
            raise _Failed(f"the last line that {whose}, {quoted(line, _QUOTED)}, {error}") from None

    async def _execute(self, copy: _Copy, words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, bool]:
        """Run a command to its end. Return its exit status, and whether its episode was over first:
        it then has a few seconds to end by itself. Raises `_Failed` if it takes too long.
        """
        command = [sys.executable, "-I", "-S", guard.__file__, *copy.fill(words)]
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
        logs = (copy.log,) if copy.log is not None else ()
        assert process.stdout is not None
        assert process.stderr is not None
        streams = (process.stdout, copy.output), (process.stderr, copy.errors)
        reading = asyncio.gather(*(_read(stream, tail, *logs) for stream, tail in streams))
        exit_task = asyncio.ensure_future(process.wait())
        over = asyncio.ensure_future(self._until_over(copy))
        # A copy whose output can no longer be written would wait for ever.
        reading.add_done_callback(lambda task: over.cancel() if not task.cancelled() and task.exception() else None)
        try:
            await asyncio.wait((exit_task, over), timeout=self._launch.time_limit, return_when=asyncio.FIRST_COMPLETED)
            is_over = over.done() and not exit_task.done()
            if is_over:
                await asyncio.wait((exit_task,), timeout=_LEAVE_SECONDS)
            elif not exit_task.done():
                raise _Failed(f"it took more than {self._launch.time_limit:g} s")
        finally:
            over.cancel()
            await _end(process, exit_task)
            # The pipes are closed by now, unless the guard was killed.
            await asyncio.wait((reading,), timeout=_PAUSE)
            reading.cancel()
        if reading.done() and not reading.cancelled():
            reading.result()
        return (exit_task.result() if exit_task.done() else -signal.SIGKILL), is_over

    async def _until_over(self, copy: _Copy) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(_Away):
                if "over" in await self._state(copy):
                    return

    async def _state(self, copy: _Copy) -> dict[str, Any]:
        """Return what the gateway knows of an episode; it has the key `over` if the episode is over
        or unknown. Raises `_Away`.
        """
        answer = await self._request("GET", copy.url)
        state: dict[str, Any] = answer.json() if answer.status_code == httpx.codes.OK else {"over": "it is unknown"}
        return state

    async def _fail(self, copy: _Copy, failure: _Failed) -> None:
        """Report a copy's failure, unless its episode is over. Raises `ConfigError` if this was the
        tenth copy in a row to fail before it asked the policy anything.
        """
        asked = True
        if not isinstance(failure, _Away):
            with suppress(_Away):
                state = await self._state(copy)
                if "over" in state:
                    self._count(state)
                    return
                asked = state["asked"]
                await self._request("POST", f"{copy.url}/failed", {"reason": str(failure)})
        self._counts["failed"] += 1
        self._say(f"{copy.instance} failed: {failure}")
        if copy.log is not None:
            self._say(f"  {copy.log.path}")
        self._fruitless = 0 if asked else self._fruitless + 1
        if self._fruitless >= _MOST_FRUITLESS:
            raise ConfigError(
                f"{_MOST_FRUITLESS} copies in a row ended before they asked the policy anything; the last one: "
                f"{failure}"
            )

    def _count(self, state: Mapping[str, Any]) -> None:
        self._fruitless = 0
        self._counts["closed by their run" if state.get("reward") is None else "rewarded"] += 1

    async def _request(
        self, method: str, path: str, body: Any = None, *, patience: float | None = None, say: bool = True
    ) -> httpx.Response:
        """Return the gateway's answer, waiting up to `patience` seconds for a gateway that cannot
        be reached, by default 30. Raises `_Away` after that.
        """
        deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
        while True:
            try:
                answer = await self._http.request(method, path, json=body)
                reason = f"it answered {answer.status_code}"
                if answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    if self._away:
                        self._say(f"the gateway at {self._url} is back")
                    self._away = False
                    return answer
            except httpx.RequestError as error:
                reason = str(error) or type(error).__name__
            message = f"the gateway at {self._url} cannot be reached ({reason})"
            if time.monotonic() >= deadline:
                raise _Away(message)
            if say and not self._away:
                self._away = True
                self._say(f"{message}; it is waited for")
            await asyncio.sleep(_PAUSE)

    def _no_gateway(self, path: str, answer: httpx.Response) -> AgentrError:
        return EnvironmentServerError(
            f"{self._url}{path} answered {answer.status_code} ({answer.text[:_QUOTED]}): this is not a gateway of "
            "agentr of this version, or it wants another token; correct the address, or set AGENTR_GATEWAY_TOKEN"
        )


async def _read(stream: asyncio.StreamReader, *outputs: _Output) -> None:
    """Read a stream to its end, whatever its length: a process blocks if nobody reads its
    output.
    """
    while data := await stream.read(2**16):
        for output in outputs:
            output.write(data)


async def _end(process: asyncio.subprocess.Process, exit_task: asyncio.Future[int]) -> None:
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
            await asyncio.wait((exit_task,), timeout=_PAUSE)
