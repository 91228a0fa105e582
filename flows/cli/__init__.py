"""The command line: `agentr`. It parses, calls one function of the flows or tasks, and prints.

Exit codes: 0 done, 1 our fault, 2 the user's mistake (one sentence on stderr), 130 interrupted, 141
nobody reads the output any longer.
"""

from __future__ import annotations

import errno
import signal
import sys
from io import StringIO
from traceback import walk_tb
from typing import Any

import click

from agentr_core.errors import AgentrError, UserError
from agentr_core.texts import visible
from flows.cli import environments, exchange, models, recipes, store, tools, viewing, workspace
from flows.cli.prefect_settings import PREFECT_DEFAULTS, set_defaults

__all__ = ["PREFECT_DEFAULTS", "cli", "main"]

_ABOUT_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
"""Errors that cannot be the fault of our code; the sentence names the file."""
_GO_ON = ("run", "collect", "improve", "compare", "eval", "headroom")
"""Commands that, when repeated, go on where they were interrupted."""
_COMMANDS = [
    recipes.run,
    recipes.collect,
    recipes.improve,
    recipes.compare,
    recipes.plan,
    recipes.evaluate,
    recipes.headroom,
    recipes.serve,
    workspace.report,
    viewing.view,
    workspace.sql,
    workspace.trace,
    store.store,
    workspace.runs,
    exchange.export,
    exchange.import_records,
    workspace.preview,
    workspace.publish,
    environments.env,
    environments.gateway,
    models.models,
    tools.machine_doctor,
    tools.retrieve,
]


class _Commands(click.Group):
    """Commands that end as others do when nobody reads what they print; Click would say 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if _failed_to_print(error):
                sys.exit(141)
            raise


@click.group(
    cls=_Commands,
    commands=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="agentr")
def cli() -> None:
    """The data flywheel that makes language agents correct their own mistakes."""
    set_defaults()


def main() -> None:
    """Run the command line and turn errors into one sentence and an exit code."""
    # What ends a process from outside is told as Ctrl-C is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cli.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        goes_on = sys.argv[1:2] and sys.argv[1] in _GO_ON
        click.echo(f"interrupted{'; the same command goes on where it stopped' if goes_on else ''}", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        click.echo(f"agentr: {visible(str(error))}", err=True)
        sys.exit(2)
    except AgentrError as error:
        click.echo(f"agentr: {type(error).__name__}: {visible(str(error))}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _ABOUT_THE_SYSTEM:
            raise
        what = f"standard output: {error.strerror}" if _failed_to_print(error) else visible(str(error))
        click.echo(f"agentr: {what}; free space or give access, and run the same command again", err=True)
        sys.exit(1)


def _failed_to_print(error: OSError) -> bool:
    """Return whether an error came of printing. What was printed is then given up, or Python would
    try again at its end, and complain.
    """
    found = any(frame.f_code is click.echo.__code__ for frame, _ in walk_tb(error.__traceback__))
    if found:
        sys.stdout = StringIO()
    return found
