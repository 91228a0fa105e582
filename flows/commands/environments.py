"""Environments on the command line: listing, showing and diagnosing them, playing one by hand,
writing examples of its expert, serving one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentr_core.environment import Environment, Repeatability
from agentr_core.environments import registry
from agentr_core.environments.contract import ALL_INSTANCES, StatePairs, Violation, check
from agentr_core.environments.gold import read_gold
from agentr_core.environments.registry import AccessLog, recording_access, unlisted_access
from agentr_core.episodes.rollout import take_step
from agentr_core.episodes.transcript import whole_episode
from agentr_core.errors import AgentrError, ConfigError, DataFileError, EnvironmentUnavailable, MissingPart, UserError
from agentr_core.recipes.parsing import read_yaml, unstorable_faults
from agentr_core.stages.demonstrate import expert_trajectory
from agentr_core.system import processors, token_for, write_text
from agentr_core.texts import count_text, error_summary, escape_invisible
from agentr_core.types import Instance, Message
from flows.commands.playing import environment_errors_translated, instance_of, unanswered
from flows.commands.progress import progress_printer
from tasks.wiring import gateway_token, named_environment

if TYPE_CHECKING:
    from agentr_core.environments.gateway.launcher import Launcher

_LOOKED_AT = 60
"""The most instances whose expert episodes are played to choose examples from."""
_CHOICE = 4
"""Successful episodes that each example is chosen from."""
_COMPARED = {
    Repeatability.EXACT: "",
    Repeatability.UNORDERED: "; its texts were compared up to the order of what they list, as it promises",
    Repeatability.NEVER: "; its texts were not compared, since it does not promise to repeat them",
}
MAX_SERVED = 1_000_000
"""A split with more instances is served only if it is named."""


def names() -> tuple[str, ...]:
    """Return the names of the installed environments."""
    return registry.names()


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options of an environment from words like `url=http://127.0.0.1:36001`, whose
    values are YAML. Raises `ConfigError` for a word of another form.
    """
    options = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not (name and separator):
            raise ConfigError(f"option {pair!r} must look like name=value, with a value in YAML")
        try:
            options[name] = read_yaml(text)
            if unfit := unstorable_faults(options[name]):
                raise ConfigError(escape_invisible(unfit[0]))
        except ConfigError as error:
            raise ConfigError(f"option {name} must have a value in YAML: {error}") from None
    return options


def diagnose(
    name: str | None, options: Mapping[str, Any], *, count: int | None = None, gold: Path | None = None
) -> list[dict[str, Any]]:
    """Check one environment, or each. Return of each `name`, `ok`, `status`, `detail`, how many
    `instances` of each split were played, `states` (the numbers of a `contract.StatePairs`, or
    empty), and the `violations`, each with `rule` and `detail`.

    The status is `ok`, `missing` if something that the environment needs is not there, or `broken`;
    the detail says what, and which of the files that it read are not part of a run's id. Raises
    `ConfigError` for an unknown name and for options that the environment does not have or whose
    values it refuses, and `DataFileError` for gold answers that cannot be read.

    Args:
        options: for one environment only.
        count: how many instances of each split are played; 0: all; None: as `contract.check` does.
        gold: a file of gold answers, for one environment only.
    """
    if name is None and (options or gold):
        raise ConfigError(f"{'options' if options else 'gold answers'} belong to one environment; name it")
    if name is not None and name not in registry.names():
        registry.checked_factory(name, options)
    return [_diagnose(env_name, options, count, gold) for env_name in ([name] if name else registry.names())]


def world_text(name: str, options: Mapping[str, Any]) -> str:
    """Return a description of an environment in lines: its splits with their sizes, its options
    with their defaults, and of its first training instance the facts and the text that an agent
    reads.

    Raises `ConfigError` for an unknown name or option, and `EnvironmentUnavailable` when something
    that it needs is not there.
    """
    parameters = inspect.signature(registry.checked_factory(name, options)).parameters.values()
    env = named_environment(name, options)
    try:
        with environment_errors_translated(env):
            sizes = {split: len(env.instances(split)) for split in env.splits()}
            first = env.instances("train")[0]
            start, replies, facts = env.reset(first), env.expert(first), env.facts(first)
        expert = f"an expert wins {first.key} in {count_text(len(replies), 'step')}" if replies else "no expert"
        lines = [
            f"{name}: episodes of at most {count_text(env.step_limit, 'step')}, {expert}",
            "",
            "splits",
            *(f"  {split}: {count_text(size, 'instance')}" for split, size in sizes.items()),
            "",
            "options",
            *(f"  {parameter.name}{_default(parameter)}" for parameter in parameters),
            *(["  none"] if not parameters else []),
            "",
            *(["facts of an instance, which lists have as columns"] if facts else []),
            *(f"  {name}: {value}" for name, value in facts.items()),
            *([""] if facts else []),
            f"the agent reads, in {first.key}",
            *(f"  {line}" for line in f"{env.instruction}\n\n{start}".splitlines()),
        ]
    finally:
        env.close()
    return escape_invisible("".join(f"{line}".rstrip() + "\n" for line in lines))


def _default(parameter: inspect.Parameter) -> str:
    return ", needed" if parameter.default is parameter.empty else f" = {parameter.default!r}"


def play(
    name: str,
    options: Mapping[str, Any],
    split: str,
    index: int | None,
    *,
    read: Callable[[], str],
    write: Callable[[str], Any],
) -> None:
    """Let a person play one instance. `read` returns the next action, and an empty one ends the
    episode; `write` shows a text. Raises `ConfigError` if there is no such environment, option or
    instance.
    """
    env = named_environment(name, options)
    try:
        with environment_errors_translated(env):
            start = env.reset(instance_of(env, name, split, index))
        write(escape_invisible(f"{env.instruction}\n\n{start}\n"))
        reward = 0.0
        while line := read().strip():
            # Some worlds mark actions in another way than with a label; there the action is typed
            # with its marks.
            action = env.parse(f"Action: {line}") or env.parse(line)
            with environment_errors_translated(env):
                observation, reward, terminated, truncated, info = take_step(env, action)
            write(escape_invisible(observation))
            if terminated or truncated:
                write(f"The episode is over: reward {reward:g}, {'success' if info['success'] else 'no success'}.")
                return
        write(f"You ended the episode: reward {reward:g}, no success.")
    finally:
        env.close()


def examples(name: str, options: Mapping[str, Any], split: str, count: int, file: Path) -> int:
    """Write `count` successful episodes of an environment's expert, of two steps or more, as
    conversations to a new file, and return how many there are.

    They are the shortest among the first such episodes of the split. Raises `ConfigError` if the
    file exists or there are fewer, and `DiskError` if it cannot be written.
    """
    if file.exists():
        raise ConfigError(f"{file} exists already; name a new file")
    env = named_environment(name, options)
    try:
        trajectories = (expert_trajectory(env, instance) for instance in env.instances(split)[:_LOOKED_AT])
        multi_step = (
            trajectory for trajectory in trajectories if trajectory and trajectory.success and len(trajectory.steps) > 1
        )
        shortest = sorted(islice(multi_step, _CHOICE * count), key=lambda trajectory: len(trajectory.steps))
        if len(shortest) < count:
            raise ConfigError(
                f"the expert of {name} wins {len(shortest)} of the first {_LOOKED_AT} instances of split {split} in "
                f"two steps or more, and {count} are wanted; lower --count, or write examples by hand"
            )
        records = [
            {"id": trajectory.instance.key, "conversations": _turns(_after_instruction(whole_episode(env, trajectory)))}
            for trajectory in shortest[:count]
        ]
    finally:
        env.close()
    write_text(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return len(records)


def _after_instruction(messages: Sequence[Message]) -> Sequence[Message]:
    """Return a conversation from the turn with the problem on: without the system turn or, if there
    is none, without the instruction and its acknowledgement.
    """
    return messages[1:] if messages[0].role == "system" else messages[2:]


def _turns(messages: Sequence[Message]) -> list[dict[str, str]]:
    names = {"assistant": "gpt"}
    return [{"from": names.get(message.role, "human"), "value": message.text} for message in messages]


def serve(
    name: str,
    options: Mapping[str, Any],
    *,
    host: str,
    port: int,
    splits: Sequence[str],
    idle_s: float,
    most: int,
    say: Callable[[str], Any],
    protocol: Literal["agentgym", "openenv"] = "agentgym",
) -> None:
    """Serve an environment until interrupted, to clients of OpenEnv or AgentGym. For AgentGym, the
    wire format is that of its world of the same name or, if it has none, of TextCraft.

    Raises `ConfigError` for an unknown name, option or split, for an address that cannot be
    listened on, and if AgentGym's clients would take the numbers of instances for another split's.
    """
    from agentr_core import http_server
    from agentr_core.environments.agentgym import server, worlds
    from agentr_core.environments.agentgym.wire import WIRE_FORMATS
    from agentr_core.environments.openenv.server import app

    env = named_environment(name, options)
    try:
        all_splits = [split for split in env.splits() if len(env.instances(split)) <= MAX_SERVED]
        split_names = [*dict.fromkeys(splits)] or all_splits
        instances = {split: env.instances(split) for split in split_names}
        numbers = server.number_instances(env, split_names) if protocol == "agentgym" else {}
        worlds.check_numbers(name, numbers)
    finally:
        env.close()
    prefix, size = "", sum(map(len, instances.values()))
    if protocol == "openenv":
        application = app(lambda: named_environment(name, options), name, instances, idle_s=idle_s, max_slots=most)
    else:
        wire, size = WIRE_FORMATS.get(name, WIRE_FORMATS["textcraft"]), len(numbers)
        application = server.app(lambda: named_environment(name, options), wire, numbers, idle_s=idle_s, max_slots=most)
        prefix = wire.prefix
    http_server.serve(
        application,
        host=host,
        port=port,
        websockets=protocol == "openenv",
        on_listening=lambda address: say(
            f"{name} is served at {address}{prefix}: {size} instances of {', '.join(split_names)}"
        ),
    )


def serve_gateway(*, host: str, port: int, say: Callable[[str], Any]) -> None:
    """Serve a gateway, at which outside agents take episodes, until interrupted.

    Agents and runs need the token in the variable AGENTR_GATEWAY_TOKEN or, if other machines reach
    the gateway and the variable is not set, a new one, which is printed.

    Raises `ConfigError` for an address that cannot be listened on.
    """
    from agentr_core import http_server
    from agentr_core.environments.gateway.server import app

    token, describe = _gateway_key(host)
    http_server.serve(app(token), host=host, port=port, on_listening=lambda address: say(describe(address)))


def run_agents(
    command: Sequence[str],
    *,
    copies: int | None,
    reward: Literal["report", "line", "exit"],
    score: Sequence[str],
    directory: Path | None,
    logs: Path | None,
    time_limit: float | None,
    idle: float | None,
    url: str | None,
    host: str,
    port: int,
    say: Callable[[str], Any],
) -> signal.Signals | None:
    """Start copies of a command that play the episodes of the gateway at `url`, or, without one, of
    a gateway that is served here; see `Launch` for the settings. Return the signal that ended them,
    or None if there were no more episodes.

    Raises `ConfigError` for a command that cannot be started, or ends at once again and again, and
    for an address that cannot be listened on, `EnvironmentServerError` for one without a gateway,
    and `DiskError` for a log that cannot be written.
    """
    from agentr_core import http_server
    from agentr_core.environments.gateway.launcher import Launch, Launcher
    from agentr_core.environments.gateway.server import app

    launch = Launch(
        command=tuple(command),
        num_copies=copies or processors(),
        reward_source=reward,
        score_command=tuple(score),
        directory=directory,
        log_folder=None if logs is None else logs.absolute(),
        time_limit_s=time_limit,
        idle_s=idle,
    )
    if url:
        return asyncio.run(_until_signal(Launcher(launch, url=url, token=gateway_token(), print_line=say)))
    token, describe = _gateway_key(host)
    # Raises for a command that cannot be started before the gateway is there for a run to find.
    Launcher(launch, url="", token="", print_line=say)
    with http_server.serve_in_thread(app(token), host=host, port=port) as address:
        say(describe(address))
        local_url = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        return asyncio.run(_until_signal(Launcher(launch, url=local_url, token=token or "", print_line=say)))


async def _until_signal(launcher: Launcher) -> signal.Signals | None:
    """Run a launcher until it ends or SIGINT or SIGTERM stops it in an orderly way; a second signal
    ends the process at once. Return the signal, or None.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(launcher.run())
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    signals = list[signal.Signals]()

    def end(number: signal.Signals) -> None:
        signals.append(number)
        for signal_number in numbers:
            loop.remove_signal_handler(signal_number)
            signal.signal(signal_number, signal.SIG_DFL)
        task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError:
        if not signals:
            raise
    return signals[0] if signals else None


def _gateway_key(host: str) -> tuple[str | None, Callable[[str], str]]:
    """Return the token of a gateway on a host, None if it needs none, and a function from its
    address to the line that tells users about it.
    """
    configured_token = gateway_token()
    token = configured_token or token_for(host)
    secret = f" AGENTR_GATEWAY_TOKEN={token}" if token and not configured_token else ""
    key = ", with the token as API key" if token else ""
    return (
        token,
        lambda address: f"agents take episodes at {address}/episodes{key}; runs need AGENTR_GATEWAY={address}{secret}",
    )


def _diagnose(name: str, options: Mapping[str, Any], count: int | None, gold: Path | None) -> dict[str, Any]:
    promises, hints = list[Repeatability](), [""]

    def make() -> Environment:
        env = named_environment(name, options)
        promises.append(Repeatability(env.repeatability))
        hints.append(env.start_hint())
        return env

    reads, instances, states = AccessLog(), list[Instance](), list[StatePairs]()
    explicit = bool(options or gold or count is not None)
    diagnosis: dict[str, Any] = {
        "name": name,
        "ok": False,
        "status": "missing",
        "detail": "",
        "instances": {},
        "states": {},
        "violations": [],
    }
    try:
        answers = None if gold is None else _gold_replies(name, options, gold)
        with recording_access(reads):
            violations = check(
                make,
                instances_per_split=ALL_INSTANCES if count == 0 else count,
                gold=answers,
                on_instance=instances.append,
                on_states=states.append,
                # A plain check plays only a few instances, so it shows no progress.
                **({"progress": progress_printer()} if explicit else {}),
            )
        outside = unlisted_access(name, options, os.environ, reads)
    except (UserError, EnvironmentUnavailable) as error:
        wrong = (explicit and isinstance(error, ConfigError)) or (gold and isinstance(error, DataFileError))
        if wrong and not isinstance(error, MissingPart):
            raise
        return diagnosis | {
            "detail": unanswered(error, hints[-1]) if isinstance(error, EnvironmentUnavailable) else str(error)
        }
    except AgentrError as error:
        return diagnosis | {"status": "broken", "detail": str(error)}
    except (Exception, SystemExit) as error:
        # A third party's class may raise anything, even when it is imported.
        return diagnosis | {"status": "broken", "detail": error_summary(error)}
    sizes = Counter(instance.split for instance in instances)
    counts = " and ".join(f"{size:,} of {split}" for split, size in sizes.items())
    scope = f" on {counts}" if gold or count is not None else ""
    counted_states = "".join(f"; {pairs}" for pairs in states)
    detail = "; ".join(_lines(violations)) or f"keeps the contract{scope}{_COMPARED[promises[0]]}{counted_states}"
    return diagnosis | {
        "ok": not violations,
        "status": "broken" if violations else "ok",
        "detail": "; ".join([detail, *outside]),
        "instances": dict(sizes),
        "states": {"pairs": states[0].pairs, "elsewhere": states[0].elsewhere} if states else {},
        "violations": [asdict(violation) for violation in violations],
    }


def _gold_replies(name: str, options: Mapping[str, Any], file: Path) -> dict[Instance, Sequence[str]]:
    """Return, by instance, the replies in a file of gold answers, followed by a reply with the
    first answer, if there is one. Raises `UserError` if the file cannot be read.
    """
    env = named_environment(name, options)
    try:
        return {
            instance: [*gold.replies, *map(env.reply_with, gold.answers[:1])]
            for instance, gold in read_gold(file, world=env.name).items()
        }
    finally:
        env.close()


def _lines(violations: Sequence[Violation]) -> Iterator[str]:
    """Yield a sentence for each broken rule: its first violation, and how many more there are."""
    rules = Counter(violation.rule for violation in violations)
    for rule, count in rules.items():
        first = next(violation.detail for violation in violations if violation.rule == rule)
        yield f"{rule}: {first}" + (f" (and {count - 1} more)" if count > 1 else "")
