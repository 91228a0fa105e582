"""What a recipe puts before the first observation: read, trained without loss, part of what a run
is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asked import asked_for, run_id_of
from click.testing import CliRunner

from agentr_core.environments.alfworld.world import AlfWorld
from agentr_core.environments.crafting.textcraft import TextCraft
from agentr_core.environments.sciworld.world import SciWorld
from agentr_core.environments.webshop.world import WebShop
from agentr_core.episodes.transcript import (
    Opening,
    instruction_of,
    max_droppable,
    next_request,
    opening_length,
    set_opening,
    transcript_of,
    whole_episode,
    without_exchanges,
)
from agentr_core.errors import ConfigError, DataFault, DataFileError, UserError
from agentr_core.exchange.training_set import opening_turns
from agentr_core.methods.faults import parse
from agentr_core.models.local.waves import cut_at_stop
from agentr_core.recipes.parsing import restore_recipe
from agentr_core.recipes.recipe import Recipe, resolved
from agentr_core.runtime.start import opening_of
from agentr_core.samples.dataset import check_flags, count_dropped, split_windowed
from agentr_core.samples.identity import sample_id
from agentr_core.samples.rendering import Renderer, load_renderer
from agentr_core.stages.demonstrate import expert_trajectory
from agentr_core.store.codec.ledger import iteration_rows, run_rows
from agentr_core.store.codec.samples import load_samples, sample_rows
from agentr_core.store.codec.trajectories import trajectory_rows
from agentr_core.types import Message, Provenance, Sample, Sampling, Step
from flows.cli import cli
from flows.commands.environments import examples
from flows.commands.samples import preview_sample, preview_tokens
from flows.preflight.checks import check
from tasks.wiring import make_environment
from tasks.workspaces import open_store

PROMPT = "environment.prompt"
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "data" / "examples"


@pytest.fixture
def recipe(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(*overrides: str) -> Recipe:
        data: dict[str, Any] = {
            "name": "opened",
            "workspace": str(tmp_path / "runs"),
            "model": {"path": str(tiny_model_dir), "device": "cpu"},
            "instances": {"train_limit": 2, "test_limit": 2},
        }
        return parse(data, overrides)

    return make


def episode(recipe: Recipe) -> tuple[Message, ...]:
    env = make_environment(recipe)
    found = expert_trajectory(env, env.instances("train")[0])
    assert found is not None
    return whole_episode(env, found)


def test_an_example_as_text_and_a_system_turn_are_read_and_carry_no_loss(
    recipe: Callable[..., Recipe], make_tiny_tokenizer: Callable[..., Any]
) -> None:
    prompt = f"{PROMPT}={{examples: 1, examples_as: text, system: 'Be brief.'}}"
    plain, told = episode(recipe()), episode(recipe(prompt))
    assert told[0] == Message(role="system", text="Be brief.")
    assert told[2:] == plain[1:]
    assert told[1].text.startswith(f"{plain[0].text}\n\nHere is an example of an episode.\n\nCrafting commands:")
    assert "\n\nThought: " in told[1].text
    assert "\n\nObservation: Got " in told[1].text
    tokenizer = make_tiny_tokenizer()
    renderer = Renderer(tokenizer)
    trained = [[one for one in renderer.render_sample(each).labels if one >= 0] for each in (plain, told)]
    assert trained[0] == trained[1] != []


def test_two_examples_are_counted(recipe: Callable[..., Recipe]) -> None:
    said = episode(recipe(f"{PROMPT}={{examples: 2, examples_as: text}}"))[0].text
    assert "Here are 2 examples of episodes." in said
    assert said.count("Goal: ") == 2


def test_examples_are_turns_before_the_problem_and_carry_no_loss(
    recipe: Callable[..., Recipe], make_tiny_tokenizer: Callable[..., Any]
) -> None:
    plain, told = episode(recipe()), episode(recipe(f"{PROMPT}.examples=2"))
    shown = [(who, text) for turns in spoken("textcraft")[:2] for who, text in turns]
    examples = [message for message in told if message.example]
    assert [(message.role, message.text) for message in examples] == [
        ("user" if who == "human" else "assistant", text) for who, text in shown
    ]
    assert told == (*plain[:2], *examples, *plain[2:])
    assert [message.role for message in told] == ["user", "assistant"] * (len(told) // 2)
    renderer = Renderer(make_tiny_tokenizer())
    trained = [[one for one in renderer.render_sample(each).labels if one >= 0] for each in (plain, told)]
    assert trained[0] == trained[1] != []


def test_what_is_left_out_of_a_long_history_are_no_examples(recipe: Callable[..., Recipe]) -> None:
    plain, told = episode(recipe()), episode(recipe(f"{PROMPT}={{examples: 2, system: Act.}}"))
    begun = opening_length(told)
    assert begun == len(told) - len(plain) + 3
    assert opening_turns(told) == told[:begun]
    assert max_droppable(told[:begun]) == 0
    longer = (*told, *(Message(role=role, text="On.") for role in ("user", "assistant", "user", "assistant", "user")))
    assert max_droppable(longer) == max_droppable((*plain, *longer[len(told) :])) > 1
    assert without_exchanges(longer, 1) == longer[: begun + 1] + longer[begun + 3 :]


def test_an_example_of_a_grown_turn_is_an_assistant_turn_of_its_own(recipe: Callable[..., Recipe]) -> None:
    made = recipe("environment.name=reasoning", f"{PROMPT}.examples=3")
    env = make_environment(made)
    begun = transcript_of(env).prompt(env, "How many?", ())
    assert [message.role for message in begun] == ["system", *["user", "assistant"] * 3, "user"]
    assert begun[0].text == env.instruction
    assert [message.text for message in begun if message.role == "assistant"] == [
        turns[1][1] for turns in spoken("reasoning")[:3]
    ]
    assert max_droppable(begun) == 0
    step = Step(reply="<answer>3</answer>", action="", observation="", reward=0.0, terminated=True, success=False)
    sample = transcript_of(env).sample(env, "How many?", [step], [True])
    assert opening_turns(sample) == begun
    check_flags(Sample(kind="good", messages=sample, instance=None))
    assert not next_request(env, "How many?", (), Sampling(), seed=0, session="").sampling.until, "it ends with its tag"


def test_what_a_recipe_with_examples_does_not_say(recipe: Callable[..., Recipe]) -> None:
    plain, turns = recipe(), recipe(f"{PROMPT}.examples=1")
    assert (plain.environment.prompt.examples_as, plain.environment.action.take) == ("text", "last")
    assert (turns.environment.prompt.examples_as, turns.environment.action.take) == ("turns", "first")
    text = recipe(f"{PROMPT}={{examples: 1, examples_as: text}}")
    assert text.environment.action.take == "last"
    assert asked_for(text)["environment"]["prompt"].keys() == {
        "system",
        "instruction_file",
        "examples",
        "examples_file",
    }
    assert run_id_of(text) != run_id_of(turns), "what earlier versions showed is another run"
    assert recipe(f"{PROMPT}.examples=1", "environment.action.take=last").environment.action.take == "last"
    published = recipe(f"{PROMPT}.examples=1", "environment.action.labels=published")
    assert published.environment.action.take == "last"
    worlds = {"textcraft": {"prompt": {"examples": 2}}, "webshop": {}}
    several = parse({"name": "two", "model": {"path": "m"}, "environments": worlds})
    assert several.in_world("textcraft").environment.action.take == "first"
    assert several.in_world("webshop").environment.action.take == "last"
    stored = resolved(recipe())
    stored["environment"]["prompt"] = {"examples": 1}
    assert restore_recipe(stored, source="old").environment.prompt.examples_as == "text", "as when it ran"


def test_a_stored_sample_knows_its_examples(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    told = episode(recipe(f"{PROMPT}.examples=1"))
    train = [False] * opening_length(told) + [True, False] * len(told)
    spliced = tuple(replace(one, train=flag) for one, flag in zip(told, train[2:] + train[:2], strict=False))
    kept = Sample(kind="revision", messages=spliced, instance=None, provenance=Provenance(cut=1))
    sample = Sample(kind="good", messages=told, instance=None)
    store = open_store(tmp_path)
    store.write(sample_rows(sample_id(sample), sample, iteration_id="i"))
    (found,) = load_samples(store).values()
    assert found == sample
    assert sample_id(found) == sample_id(sample)
    shown = [text.partition("\n")[0] for text, _ in preview_sample(tmp_path, sample_id(sample))]
    first = opening_length(told)
    assert shown[2 : first - 1] == ["[user, example]", "[assistant, example]"] * ((first - 3) // 2)
    assert shown[first - 1 :] == ["[user]", "[assistant, trained]"] * ((len(told) - first + 1) // 2)
    with pytest.raises(DataFault, match="trains a turn of an example"):
        check_flags(kept)


@pytest.mark.slow
def test_every_token_of_a_sample_is_shown(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    made = recipe(f"{PROMPT}.examples=1")
    told = episode(made)
    sample = Sample(kind="good", messages=told, instance=None)
    key, where = sample_id(sample), ["-w", str(tmp_path)]
    store = open_store(tmp_path)
    store.write(
        run_rows("r", recipe="n", method="agent-r", config=resolved(made), versions={}, workspace=str(tmp_path))
    )
    store.write(iteration_rows("i", run_id="r", iteration=1))
    store.write(sample_rows(key, sample, iteration_id="i"))
    ids, labels = load_renderer(Path(made.model.path)).render_sample(told)
    shown = preview_tokens(tmp_path, key)
    assert [trained for _, trained in shown] == [label >= 0 for label in labels]
    assert [int(line.split()[1]) for line, _ in shown] == ids
    said = CliRunner().invoke(cli, ["preview", key, "--tokens", *where])
    assert said.output.splitlines() == [line for line, _ in shown]
    assert sum(line.endswith(" trained") for line in said.output.splitlines()) == sum(label >= 0 for label in labels)
    assert (
        CliRunner().invoke(cli, ["preview", key, "--tokens", "--model", made.model.path, *where]).output == said.output
    )
    refused = CliRunner().invoke(cli, ["preview", key, "--model", made.model.path, *where])
    assert (refused.exit_code, "--model goes with --tokens" in refused.output) == (2, True)


@pytest.mark.slow
def test_a_trajectory_and_general_data_are_shown_as_training_reads_them(
    recipe: Callable[..., Recipe], tmp_path: Path, tiny_model_dir: Path
) -> None:
    made = recipe(f"{PROMPT}.examples=1")
    env = make_environment(made)
    played = expert_trajectory(env, env.instances("train")[0])
    assert played is not None
    store = open_store(tmp_path)
    config = resolved(made)
    store.write(run_rows("r", recipe="n", method="agent-r", config=config, versions={}, workspace=str(tmp_path)))
    store.write(iteration_rows("i", run_id="r", iteration=1))
    store.write(trajectory_rows("t1", played, iteration_id="i", source="expert"))
    messages = whole_episode(env, played)
    ids, labels = load_renderer(tiny_model_dir).render_sample(messages)
    shown = preview_tokens(tmp_path, "t1")
    assert [int(line.split()[1]) for line, _ in shown] == ids
    assert [trained for _, trained in shown] == [label >= 0 for label in labels]
    assert "user, example" in " ".join(line for line, _ in shown)
    assert [text.partition("\n")[2][:-1] for text, _ in preview_sample(tmp_path, "t1")] == [m.text for m in messages]

    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ok."}]
    chat.write_text(f"{json.dumps({'messages': turns})}\n{json.dumps({'messages': turns[:1]})}\n", encoding="utf-8")
    assert preview_sample(tmp_path, f"{chat}:1") == [("[user]\nHi.\n", False), ("[assistant, trained]\nOk.\n", True)]
    assert preview_tokens(tmp_path, f"{chat}:1", tiny_model_dir)[-1][0].split()[-1] != "user"
    for named, model, said in (
        (f"{chat}:2", tiny_model_dir, "is not trained on: no-assistant-turn"),
        (f"{chat}:3", tiny_model_dir, "no conversation begins in line 3"),
        (f"{chat}:1", None, "name one with --model"),
        (f"{tmp_path}/none.jsonl:1", tiny_model_dir, "cannot be read: No such file"),
        ("t1", tmp_path / "none", "has no config.json"),
        ("x", None, "no sample or trajectory in .* begins with 'x'"),
    ):
        with pytest.raises(UserError, match=said):
            preview_tokens(tmp_path, named, model)
    gone = config | {"model": config["model"] | {"path": str(tmp_path / "gone")}}
    store.write(run_rows("q", recipe="n", method="agent-r", config=gone, versions={}, workspace=str(tmp_path)))
    store.write(iteration_rows("j", run_id="q", iteration=1))
    store.write(trajectory_rows("t2", played, iteration_id="j", source="expert"))
    with pytest.raises(ConfigError, match=r"the model of run q, .*gone, is no directory here"):
        preview_tokens(tmp_path, "t2")


def test_a_revision_after_examples_keeps_its_bad_steps(recipe: Callable[..., Recipe]) -> None:
    told = episode(recipe(f"{PROMPT}.examples=2"))
    first = opening_length(told)
    messages = tuple(replace(one, train=one.train and at > first) for at, one in enumerate(told))
    assert not messages[first].train
    assert messages[first + 2].train
    check_flags(Sample(kind="revision", messages=messages, instance=None, provenance=Provenance(cut=1)))
    with pytest.raises(DataFault, match="keeps 1 bad steps and trains one of them"):
        check_flags(Sample(kind="revision", messages=told, instance=None, provenance=Provenance(cut=1)))


def test_a_reply_may_end_at_its_first_action(recipe: Callable[..., Recipe]) -> None:
    env = make_environment(recipe(f"{PROMPT}.examples=1"))
    asked = next_request(env, "Goal.", (), Sampling(stop=("x",)), seed=0, session="").sampling
    assert asked.stop == ("x", "\nObservation:")
    said = "Thought: much.\nAction: get 1 stick\n\nObservation: Got 1 stick\n\nAction: get 2 planks"
    assert cut_at_stop(said, asked) == "Thought: much.\nAction: get 1 stick"
    last = make_environment(recipe(f"{PROMPT}.examples=1", "environment.action.take=last"))
    assert next_request(last, "Goal.", (), Sampling(), seed=0, session="").sampling == Sampling()


def test_a_file_takes_the_place_of_the_instruction(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    file = tmp_path / "instruction.txt"
    file.write_text("Make things.\n", encoding="utf-8")
    made = recipe(f"{PROMPT}.instruction_file={file}")
    assert episode(made)[0] == Message(role="user", text="Make things.")
    before = run_id_of(made)
    file.write_text("Make other things.\n", encoding="utf-8")
    assert run_id_of(made) != before, "what the file holds is part of the run"


def test_where_the_instruction_is_the_system_turn_the_system_text_begins_it(recipe: Callable[..., Recipe]) -> None:
    env = make_environment(
        recipe("environment.name=reasoning", f"{PROMPT}={{system: 'Be brief.', examples: 1, examples_as: text}}")
    )
    first, problem = transcript_of(env).prompt(env, "How many?", ())
    assert (first.role, problem.text) == ("system", "How many?")
    assert first.text.startswith(f"Be brief.\n\n{env.instruction}\n\nHere is an example")
    assert "</think>\n<python>" in first.text


def test_a_recipe_without_a_prompt_asks_for_what_it_did(recipe: Callable[..., Recipe]) -> None:
    assert "prompt" not in asked_for(recipe())["environment"]
    assert "action" not in asked_for(recipe())["environment"]
    assert "action" not in asked_for(recipe("environment.action.take=last"))["environment"]
    ids = {run_id_of(one) for one in (recipe(), recipe(f"{PROMPT}.examples=1"), recipe(f"{PROMPT}.system=Act."))}
    assert len(ids) == 3


def test_a_window_keeps_the_system_turn(recipe: Callable[..., Recipe]) -> None:
    made = recipe(f"{PROMPT}.system=Act.")
    messages = episode(made)
    assert opening_length(messages) == 4
    assert opening_turns(messages) == messages[:4]
    assert max_droppable(messages[:-1]) == max_droppable(episode(recipe())[:-1])
    assert without_exchanges(messages, 1)[:5] == messages[:5]
    short = count_dropped(messages, lambda prompt: len(prompt) <= 6)
    assert len(short) == sum(message.role == "assistant" for message in messages) - 1
    whole = Sample(kind="good", messages=messages, instance=None)
    read = split_windowed(whole, short, "stretches", stage="s", subject="x")
    assert isinstance(read, tuple)
    assert {one.messages[0] for one in read} == {messages[0]}


@pytest.mark.parametrize(
    ("overrides", "error", "said"),
    [
        ([f"{PROMPT}.examples=9"], ConfigError, r"examples is 9, and .*textcraft\.jsonl has 3; lower it"),
        ([f"{PROMPT}.examples_file=x"], ConfigError, "say how many of examples_file are shown"),
        (
            [f"{PROMPT}.examples=1", "environment.transcript=native"],
            ConfigError,
            "examples have labels and no calls",
        ),
        ([f"{PROMPT}.examples_as=turns"], ConfigError, "say how many are shown as turns"),
        (
            ["environment.action={labels: published, take: first}"],
            ConfigError,
            "published labels are read from the end of a reply",
        ),
        (["environment.action.take=first", "environment.transcript=native"], ConfigError, "native calls have no lab"),
        (
            ["environment={name: agentgym-sqlgym, options: {url: 'http://127.0.0.1:9'}, action: {take: first}}"],
            ConfigError,
            "take: agentgym-sqlgym reads no labels",
        ),
        ([f"{PROMPT}.instruction_file=nowhere"], DataFileError, "prompt: file nowhere in .* cannot be read"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_told(
    recipe: Callable[..., Recipe], overrides: list[str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        check(recipe(*overrides))


def test_an_example_that_does_not_alternate_is_no_turns(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    turns = [("human", "Goal."), ("gpt", "Action: a"), ("gpt", "Action: b")]
    file.write_text(json.dumps({"conversations": [{"from": who, "value": said} for who, said in turns]}))
    with pytest.raises(DataFileError, match=r"odd\.jsonl:1 has two turns of one role in a row"):
        opening_of(recipe(f"{PROMPT}={{examples: 1, examples_file: {file}}}"))
    assert opening_of(recipe(f"{PROMPT}={{examples: 1, examples_as: text, examples_file: {file}}}"))


@pytest.mark.parametrize(("split", "fine"), [("train", True), ("test", False)])
def test_an_example_does_not_solve_what_is_held_out(
    recipe: Callable[..., Recipe], tmp_path: Path, split: str, fine: bool
) -> None:
    file = tmp_path / "examples.jsonl"
    arguments = ["env", "examples", "textcraft", str(file), "--split", split, "--count", "2"]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    shown = (f"{PROMPT}.examples=2", f"{PROMPT}.examples_file={file}")
    made = recipe(*shown, "instances.test_limit=0", "model.path=data/models/textcraft-tiny")
    if fine:
        check(made)
        return
    with pytest.raises(ConfigError, match="its example textcraft/test/0 solves an instance that an evaluation plays"):
        check(made)


def test_a_world_without_examples_names_the_command_that_makes_some(recipe: Callable[..., Recipe]) -> None:
    made = recipe("environment.name=agentgym-maze", f"{PROMPT}.examples=1")
    with pytest.raises(
        ConfigError, match="no examples come along for agentgym-maze; make some with `agentr env examples"
    ):
        opening_of(made)


def test_the_command_makes_what_comes_along(tmp_path: Path) -> None:
    file = tmp_path / "made.jsonl"
    assert examples("textcraft", {}, "train", 3, file) == 3
    shipped = Path(__file__).parents[2] / "data" / "examples" / "textcraft.jsonl"
    assert file.read_bytes() == shipped.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        examples("textcraft", {}, "train", 3, file)


def spoken(world: str) -> list[list[tuple[str, str]]]:
    """Return the turns of each example that comes along for a world: who says it, and what."""
    lines = (EXAMPLES / f"{world}.jsonl").read_text(encoding="utf-8").splitlines()
    return [[(turn["from"], turn["value"]) for turn in json.loads(line)["conversations"]] for line in lines]


# What parses a reply needs no games, no simulator and no products.
@pytest.mark.parametrize("kind", [AlfWorld, SciWorld, TextCraft, WebShop], ids=lambda kind: str(kind.name))
def test_the_worlds_own_parser_reads_each_reply_of_the_examples(kind: type[Any]) -> None:
    read = object.__new__(kind).parse
    examples_of_world = spoken(kind.name)
    assert len(examples_of_world) >= 2
    for turns in examples_of_world:
        assert [who for who, _ in turns] == ["human", "gpt"] * (len(turns) // 2)
        for reply in (said for who, said in turns if who == "gpt"):
            thought, _, action = reply.partition("\nAction: ")
            assert thought.removeprefix("Thought: ").strip()
            assert read(reply) == action != ""


def test_the_examples_of_alfworld_are_what_its_engine_said() -> None:
    golden = (ROOT / "tests" / "golden" / "alfworld.txt").read_text(encoding="utf-8")
    for turns in spoken("alfworld"):
        assert turns[0][1] in golden
        said = [text for _, text in turns[1:]]
        for reply, observation in zip(said[::2], said[1::2], strict=False):
            assert f"> {reply.rpartition('Action: ')[2]}\n{observation}\nreward" in golden
        last = re.search(rf"> {re.escape(said[-1].rpartition('Action: ')[2])}\n.*\nreward 1\.0, done True", golden)
        assert last


def test_a_transcript_that_leaves_the_prompt_out_is_refused() -> None:
    from toy import Line

    from flows.preflight.checks import _check_opening

    class Own(Line):
        class transcript:
            @staticmethod
            def prompt(env: Any, first_observation: str, steps: Any) -> tuple[Message, ...]:
                return (Message(role="user", text=env.instruction),)

    env = Own()
    for told in (Opening(system="Act."), Opening(turns=(Message(role="user", text="Goal.", example=True),))):
        set_opening(env, told)
        assert instruction_of(env) == Line.instruction
        with pytest.raises(ConfigError, match="has a transcript of its own, which does not say"):
            _check_opening(env, told)
