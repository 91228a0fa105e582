"""Environments by name: the shipped ones and those that other packages add.

A package adds one with an entry point in the group `agentr.environments` that names a class; the
class takes the recipe's `environment.options` as keyword arguments, each with a value of the type
of its annotation. If a class has `variables`, a mapping of options to environment variables, an
option that the recipe leaves out comes from its variable; a static method `variables_of` instead
gives this mapping for some options. If it has a static method `version_of`, that method gives the
version of the environment's texts for some options, which is part of a run's id. If it has a static
method `files_of`, so are the contents of the files and folders that it names for some options;
options that come from variables are among these.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from agentr_core.data_files import ROOTS
from agentr_core.environments.native import native
from agentr_core.environments.option_types import option_faults
from agentr_core.environments.replies import FIRST_LINE, OBSERVATION
from agentr_core.episodes.transcript import Until, transcript_of
from agentr_core.errors import AgentrError, ConfigError, EnvironmentFault
from agentr_core.protocols.abilities import Labelled, Labels, Take
from agentr_core.protocols.environment import Environment
from agentr_core.texts import cause, closest, listed
from agentr_core.types import Sampling

GROUP = "agentr.environments"
_CACHE = Path("runs", "cache")


def names() -> tuple[str, ...]:
    """Return the names of all installed environments, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def make(
    name: str,
    options: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
    *,
    transcript: Literal["own", "native"] = "own",
    labels: Labels = "lenient",
    take: Take = "last",
    cache: Path | None = None,
) -> Environment:
    """Return a new environment; `variables` are those of the process. What it would keep below
    `runs/cache`, if its options do not say where, it keeps in the folder `cache`. With a `native`
    transcript its actions are tool calls; see `environments.native`. Labels of actions are read as
    `labels` says; with `take` first, replies to it are drawn up to their first action.

    Raises:
        ConfigError: there is no environment with that name, it has no such option, an option has a
            value of another type, or it reads no labels and they are to be read in another way, or
            to end a reply.
        EnvironmentFault: its class cannot be imported or instantiated, for a reason of its own.
    """
    kind = checked(name, options)
    kept: dict[str, str] = {}
    usual = inspect.signature(kind).parameters.get("cache_dir")
    if cache is not None and usual is not None and Path(str(usual.default)).parent == _CACHE:
        kept["cache_dir"] = str(cache / Path(usual.default).name)
    with _told(name):
        chosen = native(kind) if transcript == "native" else kind
        environment: Environment = chosen(**{**kept, **_told_options(kind, options, variables), **options})
    if labels != "lenient":
        if not isinstance(environment, Labelled):
            environment.close()
            raise ConfigError(f"environment.action.labels: {name} reads no labels; leave it out")
        environment.labels = labels
    if take == "first":
        _end_at_first_action(environment, name)
    return environment


def _end_at_first_action(environment: Any, name: str) -> None:
    """Let the replies to an environment end at their first action. Raises `ConfigError` if nothing
    tells where that is.
    """
    if transcript_of(environment).sampling(Sampling()).include_stop:
        # A reply within a grown turn always ends with the first closing tag.
        return
    pattern = getattr(environment, "first_action", FIRST_LINE if isinstance(environment, Labelled) else "")
    if not pattern:
        environment.close()
        raise ConfigError(
            f"environment.action.take: {name} reads no labels, so nothing tells where the first action of a reply "
            "ends; say last"
        )
    environment.until = Until(pattern=pattern, stop=tuple(getattr(environment, "stops", (OBSERVATION,))))


def checked(name: str, options: Mapping[str, Any]) -> Any:
    """Return the class of an environment, whose constructor has these options.

    Raises `ConfigError` as `make` does, and `EnvironmentFault` if the class cannot be imported.
    """
    kind = _kind(name)
    if kind is None:
        raise ConfigError(
            f"there is no environment {name!r}{closest(name, names())}; installed are {', '.join(names())}"
        )
    known = inspect.signature(kind).parameters
    if unknown := sorted(options.keys() - known.keys()):
        wrong = ", ".join(f"{option}{closest(option, known)}" for option in unknown)
        raise ConfigError(f"environment {name} has no option {wrong}; it has {', '.join(known) or 'no options'}")
    if faults := option_faults(kind, options):
        raise ConfigError(listed(faults))
    return kind


def _variables_of(kind: Any, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the environment variables that stand in for options of a class, by option."""
    told = getattr(kind, "variables_of", None)
    named: Mapping[str, str] = told(options) if told else getattr(kind, "variables", {})
    return named


def _told_options(kind: Any, options: Mapping[str, Any], variables: Mapping[str, str] | None) -> dict[str, str]:
    """Return the options of a class that are left out and that environment variables give."""
    named = _variables_of(kind, options)
    told = {option: (variables or {}).get(variable, "") for option, variable in named.items() if option not in options}
    return {option: value for option, value in told.items() if value}


def version_of(name: str, options: Mapping[str, Any]) -> int:
    """Return the version of an environment's texts for some options: 1 if it gives none, or is not
    installed.

    The version grows when stored episodes would no longer replay, so that a run with the new texts
    is a different run.
    """
    told = getattr(_kind(name), "version_of", None)
    return int(told(options)) if told else 1


def files_of(name: str, options: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the files and folders that an environment plays from, for some options, by the names
    that they have in a run's id.

    Such a name is the path itself. Shipped files, and those in a folder that an environment
    variable names, are named by their place in that folder, since it may lie elsewhere tomorrow.
    """
    kind = _kind(name)
    named = getattr(kind, "files_of", None)
    if not named:
        return {}
    told, known = _told_options(kind, options, variables), _variables_of(kind, options)
    places = {path: f"${known[option]}" for option, path in told.items()}
    places |= {str(root): "data" for root in ROOTS}
    return {_named_in(places, path): path for path in map(str, named({**told, **options}))}


def _named_in(places: Mapping[str, str], path: str) -> str:
    """Return a path, or its place in the first of some folders that it lies in, below the folder's
    name.
    """
    for folder, name in places.items():
        if Path(path).is_relative_to(folder):
            return str(name / Path(path).relative_to(folder))
    return path


def asks_models(name: str) -> bool:
    """Return whether an environment has a grader, or steps that ask models of other roles."""
    kind = _kind(name)
    return any(hasattr(kind, attribute) for attribute in ("grader", "answer"))


def runs_code(name: str) -> bool:
    """Return whether an environment may run code of a model, in a sandbox."""
    return hasattr(_kind(name), "sandbox")


_KINDS: dict[str, Any] = {}


def _kind(name: str) -> Any:
    """Return the class of an environment, or None if none has that name."""
    # Looking through all installed packages takes a tenth of a second, and hundreds of environments
    # are opened at once.
    if name not in _KINDS and (found := entry_points(group=GROUP, name=name)):
        with _told(name):
            kind = next(iter(found)).load()
        if not callable(kind):
            raise EnvironmentFault(
                f"environment {name} cannot be made: its entry point {next(iter(found)).value} names a "
                f"{type(kind).__name__}, no class; correct it in the package's pyproject.toml"
            )
        _KINDS[name] = kind
    return _KINDS.get(name)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn an error that is not ours into an `EnvironmentFault` that names the environment."""
    try:
        yield
    except AgentrError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(
            f"environment {name} cannot be made ({cause(error)}); fix or uninstall what provides it"
        ) from error
