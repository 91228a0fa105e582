"""Environments on the command line: which there are, whether they work, playing one by hand,
serving one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentr_core import answers
from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.errors import AgentrError, ConfigError, EnvironmentUnavailable, UserError
from agentr_core.recipes.yaml_text import read_yaml
from agentr_core.texts import visible
from tasks.wiring import named_environment

MAX_SERVED = 1_000_000
"""A split with more instances is served only where it is named."""


def names() -> tuple[str, ...]:
    """Return the names of the installed environments."""
    return registry.names()


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Return options of an environment from words like `url=http://127.0.0.1:36001`. Raises
    `ConfigError`.
    """
    options = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not (name and separator):
            raise ConfigError(f"option {pair!r} must look like name=value, with a value in YAML")
        try:
            options[name] = read_yaml(text)
        except ConfigError as error:
            raise ConfigError(f"option {name} must have a value in YAML: {error}") from None
    return options


def diagnose(name: str | None, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for one environment, or each, how it is: `name`, `ok`, `status`, `detail`.

    The status is `ok`, `missing` when something that it needs is not there, or `broken`; the detail
    says what. `options` are for one environment only. Raises `ConfigError` for an unknown name.
    """
    if name is None and options:
        raise ConfigError("options belong to one environment; name it")
    if name is not None and name not in registry.names():
        named_environment(name, options)
    return [_diagnose(each, options) for each in ([name] if name else registry.names())]


def play(
    name: str,
    options: Mapping[str, Any],
    split: str,
    index: int | None,
    *,
    read: Callable[[], str],
    write: Callable[[str], Any],
) -> None:
    """Let a person play one instance: `read` returns an action, the empty one ends it. Raises
    `ConfigError`.
    """
    env = named_environment(name, options)
    try:
        instances = env.instances(split)
        chosen = next((i for i in instances if index is None or i.index == index), None)
        if chosen is None:
            raise ConfigError(f"{name} has no instance {index} in split {split}; `agentr env doctor {name}` tries some")
        write(visible(f"{env.instruction}\n\n{answers.reset(env, chosen)}\n"))
        while action := read().strip():
            # Some worlds mark an action in another way than with a label; there it is typed with
            # its marks.
            found = answers.action_in(env, f"Action: {action}") or answers.action_in(env, action)
            observation, reward, terminated, truncated, info = answers.step(env, found)
            write(visible(observation))
            if terminated or truncated:
                write(f"The episode is over: reward {reward:g}, {'success' if info['success'] else 'no success'}.")
                return
    finally:
        env.close()


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
) -> None:
    """Serve an environment in AgentGym's contract until interrupted: in that of the world of its
    name, if there is one.

    Raises `ConfigError` for an unknown name, option or split, and for an address that cannot be
    listened at.
    """
    from agentr_core.environments.agentgym import server
    from agentr_core.environments.agentgym.wire import WIRES
    from agentr_core.http_server import listening

    env = named_environment(name, options)
    try:
        chosen = splits or [split for split in env.splits() if len(env.instances(split)) <= MAX_SERVED]
        numbers = server.numbered(env, chosen)
    finally:
        env.close()
    wire = WIRES.get(name, WIRES["textcraft"])
    made = server.app(lambda: named_environment(name, options), wire, numbers, idle_s=idle_s, most=most)
    listening.serve(
        made,
        host=host,
        port=port,
        listening=lambda where: say(
            f"{name} is served at {where}{wire.prefix}: {len(numbers)} instances of {', '.join(chosen)}"
        ),
    )


def serve_gateway(*, host: str, port: int, say: Callable[[str], Any]) -> None:
    """Serve a gateway for outside agents until interrupted.

    Raises `ConfigError` for an address that cannot be listened at.
    """
    from agentr_core.environments.gateway.server import app
    from agentr_core.http_server import listening

    listening.serve(
        app(),
        host=host,
        port=port,
        listening=lambda where: say(f"agents take episodes at {where}/episodes; runs need AGENTR_GATEWAY={where}"),
    )


def _diagnose(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        violations = check(lambda: named_environment(name, options))
    except (UserError, EnvironmentUnavailable) as error:
        return {"name": name, "ok": False, "status": "missing", "detail": str(error)}
    except AgentrError as error:
        return {"name": name, "ok": False, "status": "broken", "detail": str(error)}
    except (Exception, SystemExit) as error:
        # A third party's class may raise anything, also when it is imported.
        said = " ".join(str(error).split())
        return {"name": name, "ok": False, "status": "broken", "detail": f"{type(error).__name__}: {said}"}
    detail = "; ".join(f"{v.rule}: {v.detail}" for v in violations) or "keeps the contract"
    return {"name": name, "ok": not violations, "status": "broken" if violations else "ok", "detail": detail}
