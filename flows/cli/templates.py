"""Commands that write a new world, method, recipe or skill from templates."""

from __future__ import annotations

from pathlib import Path

import click

from flows.cli.options import NamedPath

_INSTALL = "pip install --no-build-isolation -e"


@click.group()
def new() -> None:
    """Begin a world, a method, a recipe, or a coding agent's skill."""


@new.command("world")
@click.argument("name")
def new_world(name: str) -> None:
    """Write a folder NAME with a small world that works.

    It has a class to change, a test, and the pyproject.toml that names the world to agentr.
    """
    from flows.commands.templates import new_world as write

    folder = write(name)
    _show_steps("world", folder, f"agentr env doctor {name}")


@new.command("method")
@click.argument("name")
def new_method(name: str) -> None:
    """Write a folder NAME with a small method that works.

    It has a stage to change, a recipe, and the pyproject.toml that names the method to agentr.
    """
    from flows.commands.templates import new_method as write

    folder = write(name)
    _show_steps("method", folder, f"agentr plan {folder / name}.yaml")


def _show_steps(kind: str, folder: Path, command: str) -> None:
    click.echo(f"{folder} has a {kind}, for you to change. Install it once, where agentr is installed:")
    click.echo(f"{_INSTALL} {folder}")
    click.echo(command)


@new.command("recipe")
@click.argument("name")
@click.option("--world", default="textcraft", show_default=True, help="One that `agentr env list` has.")
@click.option("--method", default="agent-r", show_default=True, help="agent-r, eto, grpo or et-agent.")
def new_recipe(name: str, world: str, method: str) -> None:
    """Write NAME.yaml, a short recipe that can be run.

    It runs on a CPU, with a shipped model of 3.5 million parameters; its comments say what to
    change. Nothing is written if `agentr plan` would refuse it.
    """
    from flows.commands.templates import new_recipe as write

    file = write(name, world=world, method=method)
    click.echo(f"{file} can be run. See first what it would do:")
    click.echo(f"agentr plan {file}")


@new.command("skill")
@click.argument("folder", type=NamedPath(path_type=Path, file_okay=False), default=".agents/skills")
def new_skill(folder: Path) -> None:
    """Write the skill that tells coding agents how to use agentr.

    It is a new folder `agentr` with a SKILL.md in FOLDER, which is .agents/skills by default, or
    where else your agent looks for skills, such as .claude/skills.
    """
    from flows.commands.templates import new_skill as write

    click.echo(write(folder) / "SKILL.md")
