"""Commands on a recipe: run it, compare its arms, plan it, evaluate its model, serve it."""

from __future__ import annotations

from pathlib import Path

import click

from agentr_core.system import gc_paused_for_imports
from flows.cli.options import IdPrefix, NamedPath, finite, of_recipe, refuse_given
from flows.cli.prefect_settings import quiet_prefect


@click.command()
@of_recipe
@click.option(
    "--resume", metavar="RUN", type=IdPrefix(), help="Go on with the run of this id, with RECIPE as it was then."
)
@click.option(
    "--more", type=click.IntRange(1, 10_000), metavar="N", help="Add N iterations to those that the run has finished."
)
def run(recipe: Path, overrides: tuple[str, ...], resume: str | None, more: int | None) -> None:
    """Run a recipe from start to end.

    The same command again goes on where it stopped.
    """
    quiet_prefect()
    with gc_paused_for_imports():
        from flows.local import run_recipe

    click.echo(run_recipe(recipe, overrides, resume=resume, more=more))


@click.command()
@of_recipe
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Begin at most N trees, episodes or questions; by default, all.",
)
@click.option(
    "--enough",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Trajectories that are enough for a training.",
)
def collect(recipe: Path, overrides: tuple[str, ...], limit: int | None, enough: int) -> None:
    """Gather experience for a run's next iteration; train nothing.

    The policy of the recipe's run gathers it. The same command again goes on where the last one
    stopped. `agentr improve` trains on what was gathered; `agentr run` gathers what is missing
    first.
    """
    quiet_prefect()
    with gc_paused_for_imports():
        from flows.local import collect_recipe

    click.echo(collect_recipe(recipe, overrides, limit=limit, enough=enough))


@click.command()
@of_recipe
@click.option(
    "--enough",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Do nothing unless this many trajectories were gathered since the last training.",
)
def improve(recipe: Path, overrides: tuple[str, ...], enough: int) -> None:
    """Train a run's next iteration on what was gathered for it.

    It is evaluated and reported, too. Nothing is gathered.
    """
    quiet_prefect()
    with gc_paused_for_imports():
        from flows.local import improve_recipe

    click.echo(improve_recipe(recipe, overrides, enough=enough))


@click.command()
@of_recipe
@click.option("--arm", "arms", multiple=True, metavar="NAME", help="Only this arm of the recipe; may be repeated.")
@click.option(
    "--seed",
    "seeds",
    type=click.IntRange(min=0),
    multiple=True,
    help="Use this seed instead of the recipe's; may be repeated.",
)
def compare(recipe: Path, overrides: tuple[str, ...], arms: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """Train each arm of a recipe on one pool with an equal budget.

    One table shows the arms over several seeds. The same command again goes on where it stopped;
    other arms, seeds and budgets use the same pool.
    """
    quiet_prefect()
    with gc_paused_for_imports():
        from flows.local import compare_recipe

    click.echo(compare_recipe(recipe, overrides, arms, seeds))


@click.command()
@of_recipe
@click.option(
    "--gpu-gib",
    type=click.FloatRange(min=1),
    callback=finite,
    help="Plan for a machine whose GPUs have this memory, in GiB, instead of for this one.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def plan(recipe: Path, overrides: tuple[str, ...], gpu_gib: float | None, form: str) -> None:
    """Show what a recipe would run, and what it needs.

    This covers every field that the run reads, which stage reads it, the tokens and the memory.
    Nothing is run.
    """
    from flows.commands.plan import describe

    click.echo(describe(recipe, overrides, gpu_gib=gpu_gib, form=form))


@click.command("eval")
@of_recipe
@click.option("--model", "model", type=NamedPath(path_type=Path), help="Evaluate this model directory instead.")
@click.option("--states", type=IdPrefix(), help="The run whose first model's failures the revision test starts from.")
@click.option(
    "--answers",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Score another system's episodes instead: a file of the kinds that `agentr import` reads for experts.",
)
@click.option(
    "--opening",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="With --answers: turns before the problem.",
)
def evaluate(
    recipe: Path, overrides: tuple[str, ...], model: Path | None, states: str | None, answers: Path | None, opening: int
) -> None:
    """Evaluate a recipe's model, or another, on held-out instances.

    With --answers no model is asked: the replies in the file are played in the environment, and
    their scores stand beside those of the recipe's run on the same instances.
    """
    if answers is not None:
        from flows.commands.answering import score_answers

        refuse_given("names a model, and --answers asks none; leave it out", "model", "states")
        click.echo(score_answers(recipe, overrides, answers, opening=opening), nl=False)
        return
    refuse_given("belongs to --answers", "opening")
    quiet_prefect()
    with gc_paused_for_imports():
        from agentr_core.recipes.parsing import yaml_quoted
        from flows.local import evaluate_recipe

    # Quoted, since a path of digits would be read as a number. The recipe's `from_run` would
    # replace the path, so it is emptied.
    this = () if model is None else (f"model.path={yaml_quoted(str(model))}", "model.from_run=''")
    click.echo(evaluate_recipe(recipe, (*overrides, *this), states))


@click.command()
@of_recipe
@click.option(
    "--episodes", type=click.IntRange(min=2), default=8, show_default=True, help="Sampled episodes of each instance."
)
@click.option(
    "--instances",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Instances of each set, training and held-out; 0 means all.",
)
@click.option(
    "--judged",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Lost episodes that the recipe's judge, if it has one, is asked about.",
)
@click.option(
    "--judge",
    "judges",
    type=NamedPath(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    help="The directory of another model that judges the same episodes; may be repeated.",
)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def headroom(
    recipe: Path,
    overrides: tuple[str, ...],
    episodes: int,
    instances: int,
    judged: int,
    judges: tuple[Path, ...],
    form: str,
) -> None:
    """Say what a recipe's model can learn from its own experience.

    Nothing is trained. Samples episodes of training and held-out instances: pass@k and greedy
    success by difficulty, the share of instances always, sometimes and never won, how many pairs,
    good paths and mixed groups an iteration would make, which method can learn from that, and
    whether the judge of an Agent-R recipe knows a bad step. A later call for more episodes or
    instances adds to those already played.
    """
    quiet_prefect()
    from flows.commands.headroom import render

    with gc_paused_for_imports():
        from flows.local import measure_headroom

    result = measure_headroom(recipe, overrides, episodes=episodes, instances=instances, judged=judged, judges=judges)
    click.echo(render(result, form), nl=False)


@click.command("recipes")
def shipped() -> None:
    """List the shipped recipes.

    Other commands find each by its name, in any folder.
    """
    from agentr_core.recipes.parsing import read_yaml
    from agentr_core.system import shipped_recipes

    texts = {name: read_yaml(file.read_text(encoding="utf-8")) for name, file in shipped_recipes().items()}
    page = click.HelpFormatter()
    page.write_dl([(name, f"{recipe['method']}: {recipe['description']}") for name, recipe in texts.items()])
    click.echo(page.getvalue(), nl=False)


@click.command()
@click.argument("recipes", nargs=-1, type=NamedPath(path_type=Path))
def serve(recipes: tuple[Path, ...]) -> None:
    """Serve a Prefect deployment for each recipe, until interrupted.

    Without RECIPES, all shipped ones are served. A server must run: `prefect server
    start`.
    """
    from flows.serving import serve_recipes

    serve_recipes(recipes)
