"""Types, arguments and options that several commands share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import click
from click.core import ParameterSource


class IdPrefix(click.ParamType[str]):
    """The beginning of an id, of at least `least` characters.

    An empty one, such as from an unset shell variable, would match every id.
    """

    name = "id"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the prefix without surrounding space; fail if it is too short."""
        prefix = value.strip()
        if not prefix:
            self.fail(f"{value!r} names nothing; give an id, or the beginning of one", param, ctx)
        if len(prefix) < self._least:
            self.fail(f"{value!r} is too short; give at least {self._least} characters of the id", param, ctx)
        return prefix


class CountOrAll(click.ParamType[int]):
    """A whole number of at least 1, or `all`, which becomes 0."""

    name = "number"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail for any other text."""
        if value == "all":
            return 0
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is no number from 1, and not all", param, ctx)
        return int(value)


class NamedPath(click.Path):
    """A path that is not empty: an empty one, such as from an unset shell variable, is refused and
    not taken for the current folder.
    """

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Return the path; fail if it is empty."""
        if not os.fspath(value):
            self.fail("an empty path names nothing; give one, or . for the current folder", param, ctx)
        return super().convert(value, param, ctx)


def standard_input() -> TextIO:
    """Return the standard input; fail if it is closed."""
    if sys.stdin is None:
        raise click.UsageError("the standard input is closed; leave it open, or read a file with < FILE")
    return sys.stdin


def web_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return a URL without slashes at its end; fail if it does not begin with http:// or https://.
    None and an empty text are returned unchanged.
    """
    if value and not value.startswith(("http://", "https://")):
        raise click.BadParameter(f"{value!r} is no address of the web; begin it with http:// or https://", ctx, param)
    return value if value is None else value.rstrip("/")


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Return a number, or None if none was given; fail for NaN and infinity, which may pass Click's
    ranges.
    """
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no size; give a number", ctx, param)
    return value


def refuse_given(why: str, *parameters: str) -> None:
    """Fail if an option of the current command whose parameter is in `parameters` was given on the
    command line; `why` follows the option's name in the message.
    """
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in parameters and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[-1]} {why}")


def _note_workspace(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        # Not with the other imports: importing recipes takes a third of a second, which other
        # commands save.
        from agentr_core.recipes.parsing import yaml_quoted

        ctx.meta[_WORKSPACE_FIELD] = f"workspace={yaml_quoted(value)}"


def _with_workspace(ctx: click.Context, _: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    override = ctx.meta.get(_WORKSPACE_FIELD)
    return value if override is None else (*value, override)


_WORKSPACE_FIELD = f"{__name__}.workspace"
OVERRIDE = click.option(
    "-o",
    "--override",
    "overrides",
    multiple=True,
    metavar="A.B=VALUE",
    callback=_with_workspace,
    help="Change one field of the recipe.",
)


def of_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Add the parameters `recipe`, a path, and `overrides`, changes of its fields, to a command."""
    recipe = click.argument("recipe", type=NamedPath(path_type=Path))
    workspace = click.option(
        "-w",
        "--workspace",
        type=NamedPath(),
        expose_value=False,
        is_eager=True,  # before the overrides, which take it in
        callback=_note_workspace,
        help="Folder of the store, checkpoints and reports; the same as -o workspace=PATH.  "
        "[default: the recipe's, else that in AGENTR_WORKSPACE, else runs]",
    )
    return recipe(OVERRIDE(workspace(command)))


WORKSPACE = click.option(
    "-w",
    "--workspace",
    type=NamedPath(path_type=Path),
    default=Path("runs"),
    show_default=True,
    envvar="AGENTR_WORKSPACE",
    show_envvar=True,
    help="Folder of the store, checkpoints and reports.",
)
