"""Commands on environments: list, show and check them, play one, write examples, serve one."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Literal

import click

from agentr_core.texts import count_text
from flows.cli import interrupted
from flows.cli.options import CountOrAll, NamedPath, finite, refuse_given, standard_input, web_address

_OF_A_MODEL = ("server", "temperature", "seed", "max_steps", "max_new_tokens", "context_length")


@click.group()
def env() -> None:
    """Environments: list them, check them, show, play or serve one."""


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
@click.option(
    "--instances",
    "count",
    type=CountOrAll(),
    metavar="N|all",
    help="Play so many instances of each split.  [default: 3, or 1 of a world that blocks; with --gold: its own]",
)
@click.option(
    "--gold",
    type=NamedPath(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Gold answers, which must win in place of the expert's.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def doctor(name: str | None, options: tuple[str, ...], count: int | None, gold: Path | None, form: str) -> None:
    """Check whether one environment, or each, keeps the contract.

    The expert must win, nonsense and doing nothing must not, rewards must be sound, and episodes
    must repeat as far as the world says. Says what is missing or broken. Exits with 1 if one is
    broken, or if the named one does not work.

    Each line of FILE is a JSON object with `id`, such as "textcraft/train/7", and with `answer`,
    which the last reply gives, or `replies`, a list of them as a model writes them, or both.
    """
    from flows.commands.environments import diagnose, options_of

    results = diagnose(name, options_of(options), count=count, gold=gold)
    if form == "json":
        click.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            click.echo(f"{result['name']}: {result['status']} - {result['detail']}")
    if any(result["status"] == "broken" or (name and not result["ok"]) for result in results):
        sys.exit(1)


@env.command("show")
@click.argument("name")
@_option
def env_show(name: str, options: tuple[str, ...]) -> None:
    """Show splits, options and an instance of an environment."""
    from flows.commands.environments import options_of, world_text

    click.echo(world_text(name, options_of(options)), nl=False)


@env.command()
@click.argument("name")
@_option
@click.option("--split", default="train", show_default=True)
@click.option("--index", type=int, help="The instance; by default, the first one of the split.")
@click.option("--model", metavar="MODEL", help="Watch a model play: a directory, a shipped model, or one on a server.")
@click.option(
    "--server", metavar="URL", callback=web_address, help="Where MODEL is served.  [env var: OPENAI_BASE_URL]"
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), callback=finite, default=0.0, help="0, the default: greedy."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the replies that are drawn.")
@click.option("--max-steps", type=click.IntRange(min=1), help="By default, the limit of the environment.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=500, show_default=True, help="Of each reply.")
@click.option("--context-length", type=click.IntRange(min=1), help="For a server that does not say how long it is.")
def play(
    name: str,
    options: tuple[str, ...],
    split: str,
    index: int | None,
    model: str | None,
    server: str | None,
    temperature: float,
    seed: int,
    max_steps: int | None,
    max_new_tokens: int,
    context_length: int | None,
) -> None:
    """Play an instance yourself, or watch a model play it.

    Type actions; an empty line, or the end of the input, ends the episode. With --model each step
    is shown as soon as it is done; nothing is stored.
    """
    from flows.commands.environments import options_of
    from flows.commands.environments import play as play_by_hand

    if model is not None:
        from flows.commands.playing import Player, play_and_show

        player = Player(
            name=model,
            server=server or "",
            context_length=context_length or 0,
            temperature=temperature,
            seed=seed,
            max_steps=max_steps or 0,
            max_new_tokens=max_new_tokens,
        )
        width = shutil.get_terminal_size().columns
        play_and_show(name, options_of(options), split, index, player, width=width, write=click.echo)
        return
    refuse_given("belongs to --model", *_OF_A_MODEL)

    def read() -> str:
        click.echo("Action: ", nl=False)
        line = standard_input().readline()
        if not line:
            click.echo()
        return line

    play_by_hand(name, options_of(options), split, index, read=read, write=click.echo)


@env.command("examples")
@click.argument("name")
@click.argument("file", type=NamedPath(dir_okay=False, path_type=Path))
@_option
@click.option("--split", default="train", show_default=True)
@click.option("--count", type=click.IntRange(min=1), default=3, show_default=True, help="How many examples.")
def env_examples(name: str, file: Path, options: tuple[str, ...], split: str, count: int) -> None:
    """Write episodes of the environment's expert to a new file.

    A recipe takes it as environment.prompt.examples_file.
    """
    from flows.commands.environments import examples, options_of

    click.echo(f"{count_text(examples(name, options_of(options), split, count, file), 'example')} in {file}")


@env.command("serve")
@click.argument("name")
@_option
@click.option(
    "--protocol",
    type=click.Choice(["agentgym", "openenv"]),
    default="agentgym",
    show_default=True,
    help="What clients speak.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=36001, show_default=True, help="0 means a free one.")
@click.option("--split", "splits", multiple=True, help="Serve this split; by default, all but endless ones.")
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
    help="The most environments that clients may have open at once.",
)
def env_serve(
    name: str,
    options: tuple[str, ...],
    protocol: Literal["agentgym", "openenv"],
    host: str,
    port: int,
    splits: tuple[str, ...],
    idle_minutes: float,
    max_environments: int,
) -> None:
    """Serve an environment over HTTP, until interrupted.

    The protocol is that of AgentGym's servers, or OpenEnv's.
    """
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
        protocol=protocol,
    )


_host = click.option(
    "--host", default="127.0.0.1", show_default=True, help="Beyond this machine, agents and runs need a token."
)
_port = click.option(
    "--port", type=click.IntRange(0, 65535), default=8170, show_default=True, help="0 means a free one."
)


@click.group(invoke_without_command=True)
@_host
@_port
@click.pass_context
def gateway(context: click.Context, host: str, port: int) -> None:
    """Let agents in their own processes play the episodes of runs.

    Serves until interrupted. An agent takes an episode with POST /episodes, uses the base_url from
    the reply as OpenAI's, and ends with POST /episodes/ID/reward. Runs reach it as environment
    `gateway`. A token is that in AGENTR_GATEWAY_TOKEN, or a new one, which is printed.
    """
    if context.invoked_subcommand is None:
        from flows.commands.environments import serve_gateway

        serve_gateway(host=host, port=port, say=click.echo)
        return
    # Options given before `run` are its defaults.
    context.default_map = {"run": {"host": host, "port": port}}


_seconds = click.FloatRange(min=0, min_open=True)


# Options after the first word of COMMAND belong to it, even without `--` before it.
@gateway.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--copies", type=click.IntRange(1, 1000), help="How many run at once.  [default: one for each processor]")
@click.option(
    "--reward",
    type=click.Choice(["report", "line", "exit"]),
    default="report",
    show_default=True,
    help="Posted by the agent, the last line that COMMAND prints, or 1 for exit status 0 and 0 for others.",
)
@click.option("--score", metavar="COMMAND", help="A command that runs after it, whose last line is the reward.")
@click.option("--time-limit", type=_seconds, callback=finite, metavar="SECONDS", help="Ends copies that take longer.")
@click.option(
    "--directory",
    type=NamedPath(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Where all copies work.  [default: a temporary folder for each]",
)
@click.option(
    "--logs", type=NamedPath(file_okay=False, path_type=Path), metavar="FOLDER", help="Keeps what each copy prints."
)
@click.option(
    "--idle", type=_seconds, callback=finite, metavar="SECONDS", help="Ends the launcher after so long without episode."
)
@click.option("--url", metavar="URL", callback=web_address, help="A gateway that runs already, perhaps elsewhere.")
@_host
@_port
def gateway_run(
    command: tuple[str, ...],
    copies: int | None,
    reward: Literal["report", "line", "exit"],
    score: str | None,
    time_limit: float | None,
    directory: Path | None,
    logs: Path | None,
    idle: float | None,
    url: str | None,
    host: str,
    port: int,
) -> None:
    """Start copies of COMMAND that play episodes, each its own.

    Serves a gateway, too, unless --url names one. A copy finds address, key and model in
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, or ANTHROPIC_..., and its episode in
    AGENTR_TASK, AGENTR_SPLIT, AGENTR_INDEX and AGENTR_EPISODE_URL, to which it posts its reward;
    {task}, {base_url} and other names in COMMAND are replaced. A copy that ends without a reward
    has failed, and its episode is offered again.

    \b
    agentr gateway run --copies 8 -- python my_agent.py
    """
    from flows.commands.environments import run_agents

    if score is not None:
        refuse_given("says who tells the reward, and --score names another; leave one of them out", "reward")
    if url:
        refuse_given(
            "is that of a gateway to serve, and --url names one that runs; leave one of them out", "host", "port"
        )
    try:
        score_words = shlex.split(score or "")
    except ValueError as error:
        raise click.BadParameter(f"{error}; quote it as for a shell", param_hint="--score") from error
    if score is not None and not score_words:
        raise click.BadParameter("it has no words", param_hint="--score")
    ended_by = run_agents(
        command,
        copies=copies,
        reward=reward,
        score=score_words,
        directory=directory,
        logs=logs,
        time_limit=time_limit,
        idle=idle,
        url=url,
        host=host,
        port=port,
        say=click.echo,
    )
    if ended_by is signal.SIGINT:
        raise KeyboardInterrupt
    if ended_by is signal.SIGTERM:
        click.echo(interrupted(), err=True)
        sys.exit(128 + ended_by)
