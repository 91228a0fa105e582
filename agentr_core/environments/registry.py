"""Environments by name: the shipped ones and those that other packages add.

A package adds one with an entry point in the group `agentr.environments` that names a class derived
from `agentr_core.environment.Environment`, or a function that returns such an environment. It is
called with the recipe's `environment.options` as keyword arguments; each value must have the type
of its annotation. An option that the recipe leaves out comes from the environment variable that
`variables` or `variables_of` of the class names for it. A run's id includes what `version_of`
returns for the recipe's options, and the contents of the files that `files_of` names for these and
the options from variables.
"""

from __future__ import annotations

import inspect
import json
import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from agentr_core.environment import Environment, Repeatability, error_of_own_code
from agentr_core.environments.native import native_class
from agentr_core.episodes.transcript import ReplyEnd, transcript_of
from agentr_core.errors import AgentrError, ConfigError, EnvironmentFault
from agentr_core.recipes.parsing import quoted_value, value_fault
from agentr_core.replies import FIRST_LINE, ActionChoice, LabelStyle
from agentr_core.system import DATA_ROOTS
from agentr_core.texts import did_you_mean, error_summary, faults_message
from agentr_core.types import Sampling

# The types of an environment's options, as its constructor states them.


def option_faults(factory: Any, options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the types of options for an environment's class, one sentence for
    each option at fault. An option may have any value if it has no annotation, or one that pydantic
    does not know.
    """
    type_by_option = _option_types(factory)
    faults = []
    for name, value in options.items():
        if name not in type_by_option:
            continue
        try:
            # In strict JSON mode a list may become a tuple or a set, but a text is never read as a
            # number.
            type_by_option[name].validate_json(json.dumps(value), strict=True)
        except TypeError:
            # Not JSON, so not a value from a recipe.
            continue
        except ValidationError as error:
            reason = value_fault(error.errors(include_url=False, include_input=False))
            faults.append(f"environment.options.{name}: {reason} (got {quoted_value(value)})")
    return faults


@lru_cache(maxsize=32)
def _option_types(factory: Any) -> Mapping[str, TypeAdapter[Any]]:
    try:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError):
        return {}
    type_by_option: dict[str, TypeAdapter[Any]] = {}
    for name, hint in hints.items():
        with suppress(PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
            type_by_option[name] = TypeAdapter(hint)
    return type_by_option


ENTRY_POINT_GROUP = "agentr.environments"
_DEFAULT_CACHE = Path("runs", "cache")


def names() -> tuple[str, ...]:
    """Return the names of all installed environments, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}))


def make(
    name: str,
    options: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
    *,
    transcript: Literal["own", "native"] = "own",
    labels: LabelStyle = "lenient",
    take: ActionChoice = "last",
    cache: Path | None = None,
) -> Environment:
    """Return a new environment.

    Args:
        variables: the environment variables of the process.
        transcript: with `native`, actions are tool calls; see `environments.native`.
        labels: how labels of actions are read.
        take: with `first`, replies are sampled only up to their first action.
        cache: the folder that replaces `runs/cache` in the default of the option `cache_dir`.

    Raises:
        ConfigError: there is no environment of that name, it has no such option, an option has a
            value of a wrong type, `labels` or `take` need labels and it reads none, or a package or
            file that it needs is missing (`MissingPart`).
        EnvironmentFault: its class cannot be imported or instantiated, the result is not an
            `Environment`, or it has no instruction.
    """
    factory = checked_factory(name, options)
    defaults: dict[str, str] = {}
    cache_dir_parameter = inspect.signature(factory).parameters.get("cache_dir")
    if (
        cache is not None
        and cache_dir_parameter is not None
        and Path(str(cache_dir_parameter.default)).parent == _DEFAULT_CACHE
    ):
        defaults["cache_dir"] = str(cache / Path(cache_dir_parameter.default).name)
    with _convert_errors(name):
        used_factory = native_class(factory) if transcript == "native" else factory
        environment = used_factory(**{**defaults, **_options_from_variables(factory, options, variables), **options})
    if not isinstance(environment, Environment):
        raise _outdated_error(name, f"the class {type(environment).__name__} does not derive from Environment")
    if not hasattr(type(environment), "instruction") and "instruction" not in vars(environment):
        environment.close()
        raise EnvironmentFault(f"environment {name} has no instruction; give its class one, the first user turn")
    if labels != "lenient":
        if environment.labels is None:
            environment.close()
            raise ConfigError(f"environment.action.labels: {name} reads no labels; leave it out")
        environment.labels = labels
    # In a growing message, a reply ends at its first closing tag anyway.
    if take == "first" and not transcript_of(environment).sampling(Sampling()).include_stop:
        pattern = environment.first_action or ("" if environment.labels is None else FIRST_LINE)
        if not pattern:
            environment.close()
            raise ConfigError(
                f"environment.action.take: {name} reads no labels, so nothing tells where the first action of a reply "
                "ends; say last"
            )
        environment.until = ReplyEnd(pattern=pattern, stop=tuple(environment.stops))
    return environment


def checked_factory(name: str, options: Mapping[str, Any]) -> Any:
    """Return the class of an environment, or the function that makes it, after checking that it
    takes these options.

    Raises `ConfigError` for an unknown name or option, a value of a wrong type and a missing
    package, and `EnvironmentFault` if the class cannot be imported or does not derive from
    `Environment`.
    """
    factory = _load_factory(name)
    if factory is None:
        raise ConfigError(
            f"there is no environment {name!r}{did_you_mean(name, names())}; installed are {', '.join(names())}"
        )
    if inspect.isclass(factory) and not issubclass(factory, Environment):
        raise _outdated_error(name, f"the class {factory.__name__} does not derive from Environment")
    parameters = inspect.signature(factory).parameters
    if unknown := sorted(options.keys() - parameters.keys()):
        unknown_options = ", ".join(f"{option}{did_you_mean(option, parameters)}" for option in unknown)
        raise ConfigError(
            f"environment {name} has no option {unknown_options}; it has {', '.join(parameters) or 'no options'}"
        )
    if faults := option_faults(factory, options):
        raise ConfigError(faults_message(faults))
    return factory


def _variables_of(factory: Any, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the name of the environment variable of each option of a class, keyed by option."""
    return _class_of(factory).variables_of(options)


def _options_from_variables(
    factory: Any, options: Mapping[str, Any], variables: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the options of a class that are left out and that environment variables set."""
    variable_names = _variables_of(factory, options)
    from_variables = {
        option: (variables or {}).get(variable, "")
        for option, variable in variable_names.items()
        if option not in options
    }
    return {option: value for option, value in from_variables.items() if value}


def version_of(name: str, options: Mapping[str, Any]) -> int:
    """Return the version of an environment's texts under some options: 1 if its class does not say,
    or if it is not installed.

    The version grows when stored episodes would no longer replay, so that a run with the new texts
    is a different run.
    """
    return int(_class_of(_load_factory(name)).version_of(options))


def files_of(name: str, options: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the paths of the files and folders that an environment reads under some options, keyed
    by their names in a run's id.

    Such a name is usually the path itself. Shipped files, and those in a folder that an environment
    variable names, have a name relative to that folder, since the folder may be moved.
    """
    factory = _load_factory(name)
    from_variables, variable_names = (
        _options_from_variables(factory, options, variables),
        _variables_of(factory, options),
    )
    name_by_folder = {path: f"${variable_names[option]}" for option, path in from_variables.items()}
    name_by_folder |= {str(root): "data" for root in DATA_ROOTS}
    return {
        _relative_name(name_by_folder, path): path
        for path in map(str, _class_of(factory).files_of({**from_variables, **options}))
    }


def _relative_name(name_by_folder: Mapping[str, str], path: str) -> str:
    """Return the name of a path: its place below the first of `name_by_folder` that
    contains it, after that folder's name, or else the path itself.
    """
    for folder, name in name_by_folder.items():
        if Path(path).is_relative_to(folder):
            return str(name / Path(path).relative_to(folder))
    return path


def asks_models(name: str) -> bool:
    """Return whether an environment has a grader, or steps that may ask models in other roles."""
    world_class = _class_of(_load_factory(name))
    return world_class.grader is not None or world_class.has(Environment.answer)


def is_deterministic(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether an episode of an environment is determined by its instance and its replies: no
    model is asked, no outside agent acts, and the environment promises exact repetition.
    """
    repeatability = options.get("repeatability", _class_of(_load_factory(name)).repeatability)
    return (
        not asks_models(name)
        and not _class_of(_load_factory(name)).has(Environment.relay)
        and repeatability == Repeatability.EXACT
    )


def licence_of(name: str) -> str:
    """Return the licence that an environment states for its texts; empty if it states none."""
    return _class_of(_load_factory(name)).licence


def runs_code(name: str) -> bool:
    """Return whether an environment may run code written by a model, in a sandbox."""
    return _class_of(_load_factory(name)).has(Environment.sandbox)


_FACTORY_BY_NAME: dict[str, Any] = {}


def _load_factory(name: str) -> Any:
    """Return the class of an environment, or the function that makes it; None if none has that
    name. Raises `EnvironmentFault` if the entry point cannot be loaded or is not callable.
    """
    # Looking through all installed packages takes a tenth of a second, and hundreds of environments
    # are opened at once.
    if name not in _FACTORY_BY_NAME and (entries := entry_points(group=ENTRY_POINT_GROUP, name=name)):
        with _convert_errors(name):
            try:
                factory = next(iter(entries)).load()
            except ImportError as error:
                if (error.name or "").startswith("agentr_core."):
                    raise _outdated_error(name, error_summary(error)) from error
                entry = next(iter(entries))
                if isinstance(error, ModuleNotFoundError) and f"{entry.module}.".startswith(f"{error.name}."):
                    raise EnvironmentFault(
                        f"environment {name} cannot be made: its entry point {entry.value} names a module that is not "
                        "there; install its package again"
                    ) from error
                raise
        if not callable(factory):
            raise EnvironmentFault(
                f"environment {name} cannot be made: its entry point {next(iter(entries)).value} names a "
                f"{type(factory).__name__}, no class; correct it in the package's pyproject.toml"
            )
        _FACTORY_BY_NAME[name] = factory
    return _FACTORY_BY_NAME.get(name)


def _class_of(factory: Any) -> type[Environment]:
    """Return the class that describes an environment before one is made: the class itself, or the
    base class if a function makes the environment or no environment has its name (None).
    """
    return factory if inspect.isclass(factory) and issubclass(factory, Environment) else Environment


def _outdated_error(name: str, reason: str) -> EnvironmentFault:
    """Return the error for an environment that was written for an earlier version."""
    return EnvironmentFault(
        f"environment {name} is written for an earlier version of agentr ({reason}): derive its class from "
        "agentr_core.environment.Environment, where Instances and Repeatability are too, take Labels and "
        "line_after_label from agentr_core.replies, and leave out the members whose defaults will do, which are all "
        "but instruction, splits, instances, reset and step"
    )


@contextmanager
def _convert_errors(name: str) -> Iterator[None]:
    """Turn an error of third-party code into a fault that names the environment; see
    `error_of_own_code`.
    """
    try:
        yield
    except AgentrError:
        raise
    except (Exception, SystemExit) as error:
        message = f"environment {name} cannot be made ({error_summary(error)}); fix or uninstall what provides it"
        raise error_of_own_code(name, error, message) from error


# The files that a world opens while it is played, recorded from Python's audit events: an
# environment should name them in `files_of`.
#
# The events cover what Python opens, not what compiled code or another program reads.

_SYSTEM_FOLDERS = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64")
_CODE_SUFFIXES = (".py", ".pyc", ".so", ".pth")
_PROGRAM_EVENTS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")


@dataclass(slots=True)
class AccessLog:
    """What was opened: files for reading, files for writing, programs by name, and network
    addresses.
    """

    read_files: set[str] = field(default_factory=set)
    written_files: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    addresses: set[str] = field(default_factory=set)

    def record(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an audit event if it opens something."""
        if event == "open" and isinstance(args[0], str | bytes):
            path = str(Path(os.fsdecode(args[0])).absolute())
            mode, flags = args[1:3]
            if isinstance(mode, str):
                is_write = any(letter in mode for letter in "wax")
            else:
                is_write = flags & os.O_ACCMODE == os.O_WRONLY or bool(flags & os.O_CREAT)
            (self.written_files if is_write else self.read_files).add(path)
        elif event == "sqlite3.connect" and isinstance(args[0], str | bytes):
            self.read_files.add(str(Path(os.fsdecode(args[0])).absolute()))
        elif event in _PROGRAM_EVENTS and args[0]:
            self.programs.add(Path(os.fsdecode(args[0])).name)
        elif event == "socket.connect":
            address = args[1]
            self.addresses.add(":".join(map(str, address[:2])) if isinstance(address, tuple) else os.fsdecode(address))


_active_logs: list[AccessLog] = []


def _audit_hook(access_logs: Sequence[AccessLog], event: str, args: tuple[Any, ...]) -> None:
    for access_log in access_logs:
        access_log.record(event, args)


_is_hook_added = False


@contextmanager
def recording_access(access_log: AccessLog) -> Iterator[None]:
    """Record in `access_log` what this process opens during the block, in any of its threads."""
    global _is_hook_added
    if not _is_hook_added:
        # An audit hook cannot be removed, so it is only added once it is needed. It is called until
        # the interpreter ends, when this module has no globals any more.
        sys.addaudithook(partial(_audit_hook, _active_logs))
        _is_hook_added = True
    _active_logs.append(access_log)
    try:
        yield
    finally:
        _active_logs.remove(access_log)


def unlisted_access(
    name: str, options: Mapping[str, Any], variables: Mapping[str, str], access_log: AccessLog
) -> list[str]:
    """Return, as sentences, which of an environment's reads are not part of a run's id: files that
    `files_of` does not name and, if its class has no `files_of`, also programs and addresses.

    Not reported are files that belong to Python, to installed packages or to the system, temporary
    files, and the folder of the option `cache_dir`.
    """
    factory = checked_factory(name, options)
    own_files = files_of(name, options, variables).values()
    # Folders whose files are not the user's.
    known_folders = [*_SYSTEM_FOLDERS, tempfile.gettempdir(), *map(str, DATA_ROOTS)]
    known_folders += [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), site.getusersitepackages()]
    for module in list(sys.modules.values()):
        # Packages in editable mode lie outside site-packages. A package without __init__ may be any
        # folder.
        folders = getattr(module, "__path__", None)
        if getattr(module, "__file__", None) and isinstance(folders, list):
            known_folders += folders
    parameter = inspect.signature(factory).parameters.get("cache_dir")
    if parameter is not None:
        known_folders.append(str(options.get("cache_dir") or parameter.default))
    known_paths = [Path(path).resolve() for path in (*own_files, *known_folders)]
    read_paths = (Path(path).resolve() for path in sorted(access_log.read_files - access_log.written_files))
    unlisted_files = [
        path
        for path in read_paths
        if path.is_file()
        and path.suffix not in _CODE_SUFFIXES
        and not any(path.is_relative_to(folder) for folder in known_paths)
    ]
    sentences = []
    if unlisted_files:
        others_text = f" and {len(unlisted_files) - 1} more" if len(unlisted_files) > 1 else ""
        sentences.append(
            f"it read {unlisted_files[0]}{others_text}, which files_of does not name: with another content there, "
            "a run would go on"
        )
    if not _class_of(factory).has(Environment.files_of):
        sentences += [
            f"it {verb} {', '.join(sorted(names))}, and what is read there cannot be seen"
            for verb, names in (("started", access_log.programs), ("asked", access_log.addresses))
            if names
        ]
    return sentences
