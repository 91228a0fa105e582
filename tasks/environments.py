"""Environments as a person meets them: which there are, whether they work, and playing one by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentr_core.environments import registry
from agentr_core.environments.contract import check
from agentr_core.errors import AgentrError, ConfigError


def names() -> tuple[str, ...]:
    """Return the names of the installed environments."""
    return registry.names()


def diagnose(name: str | None) -> list[dict[str, Any]]:
    """Return for one environment, or each, whether it keeps the contract: `name`, `ok`, `detail`."""
    if name is not None and name not in registry.names():
        registry.make(name, {})
    return [_diagnose(each) for each in ([name] if name else registry.names())]


def play(name: str, split: str, index: int | None, *, read: Callable[[], str], write: Callable[[str], Any]) -> None:
    """Let a person play one instance: `read` returns an action, the empty one ends it. Raises `ConfigError`."""
    env = registry.make(name, {})
    try:
        instances = env.instances(split)
        chosen = next((i for i in instances if index is None or i.index == index), None)
        if chosen is None:
            raise ConfigError(f"{name} has no instance {index} in split {split}; `agentr env doctor {name}` tries some")
        write(f"{env.instruction}\n\n{env.reset(chosen)}\n")
        while action := read().strip():
            observation, reward, terminated, truncated, info = env.step(env.parse(f"Action: {action}"))
            write(observation)
            if terminated or truncated:
                write(f"The episode is over: reward {reward:g}, {'success' if info['success'] else 'no success'}.")
                return
    finally:
        env.close()


def _diagnose(name: str) -> dict[str, Any]:
    try:
        violations = check(lambda: registry.make(name, {}))
    except AgentrError as error:
        return {"name": name, "ok": False, "detail": str(error)}
    detail = "; ".join(f"{v.rule}: {v.detail}" for v in violations) or "keeps the contract"
    return {"name": name, "ok": not violations, "detail": detail}
