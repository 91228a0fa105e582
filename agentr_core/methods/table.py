"""Methods by name: the shipped ones and those that other packages add.

A package adds a method with an entry point in the group `agentr.methods` that names a `Method`. A
method is imported only when it is asked for, so a broken package affects only its own recipes.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name

from agentr_core.errors import ConfigError
from agentr_core.recipes.recipe import Recipe
from agentr_core.runtime.context import Method, Plan, Stage
from agentr_core.texts import did_you_mean, error_summary

GROUP = "agentr.methods"
SHIPPED = {
    "agent-r": "agentr_core.methods.agent_r:METHOD",
    "eto": "agentr_core.methods.eto:METHOD",
    "grpo": "agentr_core.methods.grpo:METHOD",
    "et-agent": "agentr_core.methods.et_agent:METHOD",
    "compare": "agentr_core.methods.comparison:METHOD",
    "compare-runs": "agentr_core.methods.comparison:WHOLE_RUNS_METHOD",
}


def method_names() -> tuple[str, ...]:
    """Return the names of all methods: the shipped ones, then the installed ones, sorted."""
    return tuple(dict.fromkeys([*SHIPPED, *sorted(entry.name for entry in entry_points(group=GROUP))]))


def method_named(name: str) -> Method:
    """Return the method with a given name. Raises `ConfigError` if there is none or it cannot be
    imported.
    """
    if name not in SHIPPED:
        return _installed_method(name)
    method: Method = resolve_name(SHIPPED[name])
    return method


def method_of(recipe: Recipe) -> Method:
    """Return the method of a recipe. Raises as `method_named`."""
    return method_named(recipe.method)


def plan_of(recipe: Recipe, iteration: int) -> Plan:
    """Return the plan of an iteration of a recipe; iteration 0 comes before the first one."""
    return method_of(recipe).plan_of(recipe, iteration)


def plans_of(recipe: Recipe) -> list[Plan]:
    """Return the plan of each of `recipe.distinct_iterations()`, in order."""
    return [plan_of(recipe, iteration) for iteration in recipe.distinct_iterations()]


def importable_methods() -> list[Method]:
    """Return the methods that can be imported, and leave out the others: a broken third-party
    package must not stop runs of other methods. `method_named` reports it.
    """
    methods: list[Method] = []
    for name in method_names():
        with suppress(ConfigError):
            methods.append(method_named(name))
    return methods


def all_stages() -> dict[str, Stage]:
    """Return the stages of all methods that can be imported, by name."""
    return {stage.name: stage for method in importable_methods() for stage in method.stages}


@cache
def _installed_method(name: str) -> Method:
    for entry in entry_points(group=GROUP, name=name):
        try:
            method = entry.load()
        except Exception as error:
            raise ConfigError(
                f"method {name} cannot be imported ({error_summary(error)}); fix or uninstall what provides it"
            ) from error
        if not isinstance(method, Method):
            raise ConfigError(
                f"method {name}: its entry point {entry.value} names a {type(method).__name__}, no Method; correct it "
                "in the package's pyproject.toml"
            )
        return method
    raise ConfigError(
        f"there is no method {name!r}{did_you_mean(name, method_names())}; installed are {', '.join(method_names())}"
    )
