"""All commands, and how their errors become messages and exit codes."""

from __future__ import annotations

import errno
import signal
import sys
from io import StringIO
from traceback import walk_tb
from types import FrameType
from typing import Any

import click
from click.exceptions import Abort

from agentr_core.errors import AgentrError, UserError
from agentr_core.system import DISTRIBUTION
from agentr_core.texts import escape_invisible
from flows.cli import (
    GO_ON,
    environments,
    exchange,
    interrupted,
    models,
    recipes,
    regrading,
    store,
    templates,
    tools,
    viewing,
    workspace,
)
from flows.cli.prefect_settings import PREFECT_DEFAULTS, set_defaults

__all__ = ["PREFECT_DEFAULTS", "cli", "run"]

_ABOUT_THE_SYSTEM = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Error numbers that are due to the system and not to this program; the message names the file."""
_NO_PLACE = "No usable temporary directory"
_NO_MEMORY = (
    *("failed to map segment", "annot allocate memory", "can't allocate memory", "not enough memory"),
    *("can't start new thread", "bad_alloc"),
)
"""Parts of the messages that libraries raise, in errors of any class, when memory runs out."""
_COMMANDS = [
    recipes.run,
    recipes.collect,
    recipes.improve,
    recipes.compare,
    recipes.plan,
    recipes.evaluate,
    recipes.headroom,
    regrading.regrade,
    recipes.shipped,
    templates.new,
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
    """The group of commands. When nobody reads a command's output any longer, it exits with 141, as
    a program killed by SIGPIPE does, instead of Click's 1.
    """

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
@click.version_option(package_name=DISTRIBUTION)
def cli() -> None:
    """The data flywheel that makes language agents correct their own mistakes."""
    set_defaults()


def run() -> None:
    """Run the command line and turn errors into one sentence and an exit code."""
    # Commands that can be continued may end at any moment until they begin a run, which handles
    # signals itself. Others must clean up, so for them a signal raises an exception.
    if sys.argv[1:2] and sys.argv[1] not in GO_ON:
        _mind_signals()
    try:
        cli.main(standalone_mode=False)
    except (Abort, KeyboardInterrupt):
        click.echo(interrupted(), err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        click.echo(f"agentr: {escape_invisible(str(error))}", err=True)
        sys.exit(2)
    except AgentrError as error:
        click.echo(f"agentr: {type(error).__name__}: {escape_invisible(str(error))}", err=True)
        sys.exit(1)
    except Exception as error:
        if _interruptions:
            # An interrupt in a library's callback is raised again as an error of another class.
            click.echo(interrupted(), err=True)
            sys.exit(130)
        message = _refused(error)
        if not message:
            raise
        click.echo(f"agentr: {message}", err=True)
        sys.exit(2)


_interruptions: list[int] = []
"""The numbers of the signals that were received."""


def _mind_signals() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        _interruptions.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def _refused(error: Exception) -> str:
    """Return a message for an error that is due to the machine, such as a full disk; the empty
    string for any other error.
    """
    message = escape_invisible(" ".join(str(error).split()))
    if isinstance(error, MemoryError) or any(words in message for words in _NO_MEMORY):
        return f"memory ran out ({message or type(error).__name__}); free some, or raise the limit (`ulimit -v`)"
    if not isinstance(error, OSError):
        return ""
    if _NO_PLACE in message:
        return f"temporary files find no place ({message}); free some space, or set TMPDIR to a folder that has some"
    if error.errno not in _ABOUT_THE_SYSTEM:
        return ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"too many files are open ({message}); raise the limit (`ulimit -n`)"
    problem = f"standard output: {error.strerror}" if _failed_to_print(error) else message
    return f"{problem}; free space or give access, and run the same command again"


def _failed_to_print(error: OSError) -> bool:
    """Return whether an error was raised while printing. If so, discard the buffered text: at exit,
    Python would try to print it again and fail with a message.
    """
    is_printing = any(frame.f_code is click.echo.__code__ for frame, _ in walk_tb(error.__traceback__))
    if is_printing:
        sys.stdout = StringIO()
    return is_printing
