"""The command line: `agentr`. It parses, calls one function of the flows or tasks, and prints.

Exit codes: 0 done, 1 our fault, 2 the user's mistake (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from agentr_core.errors import AgentrError, UserError
from agentr_core.texts import visible
from agentr_core.writing import writing

_ABOUT_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
"""What no code of ours can be at fault for; the sentence names the file."""
P = ParamSpec("P")
R = TypeVar("R")

_recipe = click.argument("recipe", type=click.Path(path_type=Path))
_override = click.option(
    "-o", "--override", "overrides", multiple=True, metavar="A.B=VALUE", help="Change one field of the recipe."
)
_workspace = click.option(
    "-w",
    "--workspace",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    envvar="AGENTR_WORKSPACE",
    help="Folder of the store, checkpoints and reports.",
)


PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # A busy machine takes longer than Prefect's 20 s to start the server of a local run.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Written one by one, states of tasks meet other writes; SQLite refuses those, and the client
    # waits for two seconds.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}
"""Variables of Prefect's for a server that this process or the tests start."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="agentr")
def cli() -> None:
    """The data flywheel that makes language agents correct their own mistakes."""
    # Prefect reads these when it is first imported; a value the user has set stays.
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def _quiet_prefect() -> None:
    """Let a local run speak for itself: an error is one sentence here, and Prefect's database keeps
    the traceback.
    """
    if "PREFECT_LOGGING_LEVEL" not in os.environ:
        os.environ["PREFECT_LOGGING_LEVEL"] = "WARNING"
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")


@cli.command()
@_recipe
@_override
@click.option("--resume", "resume", metavar="RUN", default="", help="Go on with a run of this id, with its own recipe.")
def run(recipe: Path, overrides: tuple[str, ...], resume: str) -> None:
    """Run a recipe from start to end; the same command again goes on where it stopped."""
    _quiet_prefect()
    from flows.local import run_recipe

    click.echo(run_recipe(recipe, overrides, resume=resume))


@cli.command()
@_recipe
@_override
@click.option("--arm", "arms", multiple=True, metavar="NAME", help="Only this arm of the recipe; may be repeated.")
@click.option("--seed", "seeds", type=click.IntRange(min=0), multiple=True, help="Instead of the recipe's seeds.")
def compare(recipe: Path, overrides: tuple[str, ...], arms: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """Train each arm of a recipe on one pool with an equal budget, over several seeds, and show one
    table.

    The same command again goes on where it stopped; other arms, seeds and budgets use the same
    pool.
    """
    _quiet_prefect()
    from flows.local import compare_recipe

    click.echo(compare_recipe(recipe, overrides, arms, seeds))


@cli.command()
@_recipe
@_override
@click.option(
    "--gpu-gib", type=click.FloatRange(min=1), default=80.0, show_default=True, help="Memory of a GPU, in GiB."
)
def plan(recipe: Path, overrides: tuple[str, ...], gpu_gib: float) -> None:
    """Show what a recipe would run, the tokens and memory it needs, and which field reaches which
    stage.
    """
    from flows.commands.plan import describe

    click.echo(describe(recipe, overrides, gpu_gib=gpu_gib))


@cli.command("eval")
@_recipe
@_override
@click.option("--model", "model", type=click.Path(path_type=Path), help="Evaluate this model directory instead.")
@click.option("--states", default="", help="A run: take the revision test's states from its first model's failures.")
def evaluate(recipe: Path, overrides: tuple[str, ...], model: Path | None, states: str) -> None:
    """Evaluate the model of a recipe, or another one, on the held-out instances."""
    _quiet_prefect()
    from flows.local import evaluate_recipe

    changes = (*overrides, f"model.path={model}") if model else overrides
    click.echo(evaluate_recipe(recipe, changes, states))


@cli.command()
@click.argument("run")
@_workspace
def report(run: str, workspace: Path) -> None:
    """Write the reports of a run anew and print where they are."""
    from tasks.reporting import write_reports

    for path in write_reports(workspace, run):
        click.echo(path)


@cli.command()
@click.argument("query")
@_workspace
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--files", is_flag=True, help="Let the query read and write files: COPY ... TO, read_csv(...), ATTACH.")
def sql(query: str, workspace: Path, form: str, files: bool) -> None:
    """Ask the store a question in SQL; it answers while a run is writing.

    Nothing in the store can be changed. Numbers are shown with all their digits, bytes as
    hexadecimal digits.
    """
    from flows.commands.questions import answer

    click.echo(answer(workspace, query, form, files=files), nl=False)


@cli.group()
def store() -> None:
    """The store of a workspace: back it up, check it."""


@store.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_workspace
def backup(file: Path, workspace: Path) -> None:
    """Write the whole store to one sound FILE, also while a run is writing; a store is opened by
    its path.
    """
    from flows.commands.questions import back_up

    click.echo(back_up(workspace, file))


@store.command("check")
@_workspace
def store_check(workspace: Path) -> None:
    """Look for rows that point nowhere or contradict each other, such as trees that two processes
    wrote.

    Exits with 1 if there are any.
    """
    from flows.commands.questions import faults

    found = faults(workspace)
    for line in found:
        click.echo(line)
    if found:
        sys.exit(1)
    click.echo(f"the store of {workspace} is sound")


@cli.command()
@_workspace
def runs(workspace: Path) -> None:
    """List the runs of a workspace."""
    from flows.commands.questions import runs_of

    click.echo(runs_of(workspace), nl=False)


@cli.command()
@click.argument("run")
@click.option("--format", "form", type=click.Choice(["trl", "sharegpt", "llamafactory"]), required=True)
@click.option("--iteration", type=click.IntRange(min=1), help="Only this iteration; otherwise the last one.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A file; otherwise standard output.")
@_workspace
def export(run: str, form: str, iteration: int | None, out: Path | None, workspace: Path) -> None:
    """Write the training set of a run as JSON lines for another trainer.

    Some turns must not be trained, and each trainer has its own way to be told. trl: the lines have
    input_ids and labels in the tokens of the run's model, which TRL takes as they are; give it a
    max_length that holds them. sharegpt: each turn has a flag; Axolotl needs
    `message_field_training: train`. llamafactory: a line for each trained turn, its last;
    LLaMA-Factory needs `mask_history: true`.

    An iteration on preference pairs is written as prompt, chosen and rejected, in trl or sharegpt.
    Stock DPO trainers mask the prompt alone, so that observations within a side carry loss.
    """
    from flows.commands.samples import export_lines

    lines = export_lines(workspace, run, form, iteration)
    if out is None:
        for line in lines:
            click.echo(line)
        return
    with writing(out):
        out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    click.echo(f"{len(lines)} samples in {out}")


@cli.command()
@click.argument("sample")
@_workspace
def preview(sample: str, workspace: Path) -> None:
    """Show one training sample turn by turn; trained text is marked."""
    from flows.commands.samples import preview_sample

    for text, trained in preview_sample(workspace, sample):
        click.secho(text, fg="green" if trained else None, bold=trained)


@cli.group()
def env() -> None:
    """Environments: list them, check them, play one, serve one."""


_option = click.option(
    "-o", "--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the environment."
)


@env.command("list")
def env_list() -> None:
    """List the environments that are installed."""
    from flows.commands.environments import names

    for name in names():
        click.echo(name)


@env.command()
@click.argument("name", required=False)
@_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def doctor(name: str | None, options: tuple[str, ...], form: str) -> None:
    """Say of one environment, or each, whether it works: in the contract, what is missing, or what
    is broken.

    Exits with 1 if one is broken, or if the one that is named is not in order.
    """
    from flows.commands.environments import diagnose, options_of

    results = diagnose(name, options_of(options))
    if form == "json":
        click.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            click.echo(f"{result['name']}: {result['status']} - {result['detail']}")
    if any(result["status"] == "broken" or (name and not result["ok"]) for result in results):
        sys.exit(1)


@env.command()
@click.argument("name")
@_option
@click.option("--split", default="train", show_default=True)
@click.option("--index", type=int, help="The instance; the first one of the split if not given.")
def play(name: str, options: tuple[str, ...], split: str, index: int | None) -> None:
    """Play an instance yourself: type actions, an empty line ends it."""
    from flows.commands.environments import options_of
    from flows.commands.environments import play as play_by_hand

    def read() -> str:
        return str(click.prompt("Action", default="", show_default=False))

    play_by_hand(name, options_of(options), split, index, read=read, write=click.echo)


@env.command("serve")
@click.argument("name")
@_option
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=36001, show_default=True, help="0 means a free one.")
@click.option("--split", "splits", multiple=True, help="Serve this split; otherwise all but endless ones.")
@click.option(
    "--idle-minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Close an environment that nobody has used for this long.",
)
@click.option(
    "--max-environments",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="The most environments that clients have open at once.",
)
def env_serve(
    name: str,
    options: tuple[str, ...],
    host: str,
    port: int,
    splits: tuple[str, ...],
    idle_minutes: float,
    max_environments: int,
) -> None:
    """Serve an environment over HTTP, in the contract of AgentGym's servers, until interrupted."""
    from flows.commands.environments import options_of
    from flows.commands.environments import serve as serve_environment

    serve_environment(
        name,
        options_of(options),
        host=host,
        port=port,
        splits=splits,
        idle_s=idle_minutes * 60,
        most=max_environments,
        say=click.echo,
    )


@cli.command()
@click.argument("recipes", nargs=-1, type=click.Path(path_type=Path))
def serve(recipes: tuple[Path, ...]) -> None:
    """Serve a Prefect deployment for each recipe (all that come along if none is named) until
    interrupted.
    """
    from flows.serving import serve_recipes

    serve_recipes(recipes)


@cli.group()
def models() -> None:
    """Model servers: install vLLM, serve a model with it."""


_vllm_env = click.option(
    "--env",
    "environment",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of vLLM's own environment; otherwise AGENTR_VLLM_ENV, or .venv-vllm.",
)
_device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)


def _use_environment(folder: Path | None) -> None:
    if folder is not None:
        os.environ["AGENTR_VLLM_ENV"] = str(folder)


@models.command("install")
@_vllm_env
@_device
def models_install(environment: Path | None, device: str) -> None:
    """Make the environment that vLLM lives in; nothing is done where it is complete."""
    from flows.commands.models import install

    _use_environment(environment)
    click.echo(install(device, say=lambda line: click.echo(line, err=True)))


@models.command("serve")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="A Hugging Face model directory.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--port", type=click.IntRange(0, 65000), default=8100, show_default=True, help="0 means a free one.")
@click.option("--logs", type=click.Path(path_type=Path), default=Path("runs/logs/vllm"), show_default=True)
@_vllm_env
@_device
@_override
def models_serve(
    model: Path,
    replicas: int,
    port: int,
    logs: Path,
    environment: Path | None,
    device: str,
    overrides: tuple[str, ...],
) -> None:
    """Serve a model with vLLM until interrupted; runs replace its weights between iterations.

    Settings of a recipe are changed with -o, such as -o model.vllm.kv_cache_gib=4.
    """
    from flows.commands.models import serve as serve_model
    from flows.commands.models import settings

    _use_environment(environment)
    serve_model(settings(model, replicas, device, overrides), port=port, logs=logs, say=click.echo)


def main() -> None:
    """Run the command line and turn errors into one sentence and an exit code."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted; the same command goes on where it stopped", err=True)
        sys.exit(130)
    except KeyboardInterrupt:
        click.echo("interrupted; the same command goes on where it stopped", err=True)
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
        click.echo(
            f"agentr: {visible(str(error))}; free space or give access, and run the same command again", err=True
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
