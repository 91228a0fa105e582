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
    trajectory = expert_trajectory(env, env.instances("train")[0])
    assert trajectory is not None
    return whole_episode(env, trajectory)


def test_an_example_as_text_and_a_system_turn_are_read_and_carry_no_loss(
    recipe: Callable[..., Recipe], make_tiny_tokenizer: Callable[..., Any]
) -> None:
    prompt = f"{PROMPT}={{examples: 1, examples_as: text, system: 'Be brief.'}}"
    plain, messages = episode(recipe()), episode(recipe(prompt))
    assert messages[0] == Message(role="system", text="Be brief.")
    assert messages[2:] == plain[1:]
    assert messages[1].text.startswith(f"{plain[0].text}\n\nHere is an example of an episode.\n\nCrafting commands:")
    assert "\n\nThought: " in messages[1].text
    assert "\n\nObservation: Got " in messages[1].text
    tokenizer = make_tiny_tokenizer()
    renderer = Renderer(tokenizer)
    trained = [[label for label in renderer.render_sample(each).labels if label >= 0] for each in (plain, messages)]
    assert trained[0] == trained[1] != []


def test_two_examples_are_counted(recipe: Callable[..., Recipe]) -> None:
    text = episode(recipe(f"{PROMPT}={{examples: 2, examples_as: text}}"))[0].text
    assert "Here are 2 examples of episodes." in text
    assert text.count("Goal: ") == 2


def test_examples_are_turns_before_the_problem_and_carry_no_loss(
    recipe: Callable[..., Recipe], make_tiny_tokenizer: Callable[..., Any]
) -> None:
    plain, messages = episode(recipe()), episode(recipe(f"{PROMPT}.examples=2"))
    expected_turns = [(sender, text) for turns in example_turns("textcraft")[:2] for sender, text in turns]
    examples = [message for message in messages if message.example]
    assert [(message.role, message.text) for message in examples] == [
        ("user" if sender == "human" else "assistant", text) for sender, text in expected_turns
    ]
    assert messages == (*plain[:2], *examples, *plain[2:])
    assert [message.role for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    renderer = Renderer(make_tiny_tokenizer())
    trained = [[label for label in renderer.render_sample(each).labels if label >= 0] for each in (plain, messages)]
    assert trained[0] == trained[1] != []


def test_what_is_left_out_of_a_long_history_are_no_examples(recipe: Callable[..., Recipe]) -> None:
    plain, messages = episode(recipe()), episode(recipe(f"{PROMPT}={{examples: 2, system: Act.}}"))
    num_opening = opening_length(messages)
    assert num_opening == len(messages) - len(plain) + 3
    assert opening_turns(messages) == messages[:num_opening]
    assert max_droppable(messages[:num_opening]) == 0
    longer = (
        *messages,
        *(Message(role=role, text="On.") for role in ("user", "assistant", "user", "assistant", "user")),
    )
    assert max_droppable(longer) == max_droppable((*plain, *longer[len(messages) :])) > 1
    assert without_exchanges(longer, 1) == longer[: num_opening + 1] + longer[num_opening + 3 :]


def test_an_example_of_a_grown_turn_is_an_assistant_turn_of_its_own(recipe: Callable[..., Recipe]) -> None:
    reasoning_recipe = recipe("environment.name=reasoning", f"{PROMPT}.examples=3")
    env = make_environment(reasoning_recipe)
    prompt_messages = transcript_of(env).prompt(env, "How many?", ())
    assert [message.role for message in prompt_messages] == ["system", *["user", "assistant"] * 3, "user"]
    assert prompt_messages[0].text == env.instruction
    assert [message.text for message in prompt_messages if message.role == "assistant"] == [
        turns[1][1] for turns in example_turns("reasoning")[:3]
    ]
    assert max_droppable(prompt_messages) == 0
    step = Step(reply="<answer>3</answer>", action="", observation="", reward=0.0, terminated=True, success=False)
    sample = transcript_of(env).sample(env, "How many?", [step], [True])
    assert opening_turns(sample) == prompt_messages
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
    labels_recipe = recipe(f"{PROMPT}.examples=1", "environment.action.labels=published")
    assert labels_recipe.environment.action.take == "last"
    worlds = {"textcraft": {"prompt": {"examples": 2}}, "webshop": {}}
    several = parse({"name": "two", "model": {"path": "m"}, "environments": worlds})
    assert several.in_world("textcraft").environment.action.take == "first"
    assert several.in_world("webshop").environment.action.take == "last"
    config = resolved(recipe())
    config["environment"]["prompt"] = {"examples": 1}
    assert restore_recipe(config, source="old").environment.prompt.examples_as == "text", "as when it ran"


def test_a_stored_sample_knows_its_examples(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    messages = episode(recipe(f"{PROMPT}.examples=1"))
    train = [False] * opening_length(messages) + [True, False] * len(messages)
    revision_messages = tuple(
        replace(message, train=flag) for message, flag in zip(messages, train[2:] + train[:2], strict=False)
    )
    revision = Sample(kind="revision", messages=revision_messages, instance=None, provenance=Provenance(cut=1))
    sample = Sample(kind="good", messages=messages, instance=None)
    store = open_store(tmp_path)
    store.write(sample_rows(sample_id(sample), sample, iteration_id="i"))
    (stored_sample,) = load_samples(store).values()
    assert stored_sample == sample
    assert sample_id(stored_sample) == sample_id(sample)
    headings = [text.partition("\n")[0] for text, _ in preview_sample(tmp_path, sample_id(sample))]
    length = opening_length(messages)
    assert headings[2 : length - 1] == ["[user, example]", "[assistant, example]"] * ((length - 3) // 2)
    assert headings[length - 1 :] == ["[user]", "[assistant, trained]"] * ((len(messages) - length + 1) // 2)
    with pytest.raises(DataFault, match="trains a turn of an example"):
        check_flags(revision)


@pytest.mark.slow
def test_every_token_of_a_sample_is_shown(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    example_recipe = recipe(f"{PROMPT}.examples=1")
    messages = episode(example_recipe)
    sample = Sample(kind="good", messages=messages, instance=None)
    key, workspace_options = sample_id(sample), ["-w", str(tmp_path)]
    store = open_store(tmp_path)
    store.write(
        run_rows(
            "r", recipe="n", method="agent-r", config=resolved(example_recipe), versions={}, workspace=str(tmp_path)
        )
    )
    store.write(iteration_rows("i", run_id="r", iteration=1))
    store.write(sample_rows(key, sample, iteration_id="i"))
    ids, labels = load_renderer(Path(example_recipe.model.path)).render_sample(messages)
    token_lines = preview_tokens(tmp_path, key)
    assert [trained for _, trained in token_lines] == [label >= 0 for label in labels]
    assert [int(line.split()[1]) for line, _ in token_lines] == ids
    result = CliRunner().invoke(cli, ["preview", key, "--tokens", *workspace_options])
    assert result.output.splitlines() == [line for line, _ in token_lines]
    assert sum(line.endswith(" trained") for line in result.output.splitlines()) == sum(label >= 0 for label in labels)
    assert (
        CliRunner()
        .invoke(cli, ["preview", key, "--tokens", "--model", example_recipe.model.path, *workspace_options])
        .output
        == result.output
    )
    refusal = CliRunner().invoke(cli, ["preview", key, "--model", example_recipe.model.path, *workspace_options])
    assert (refusal.exit_code, "--model goes with --tokens" in refusal.output) == (2, True)


@pytest.mark.slow
def test_a_trajectory_and_general_data_are_shown_as_training_reads_them(
    recipe: Callable[..., Recipe], tmp_path: Path, tiny_model_dir: Path
) -> None:
    example_recipe = recipe(f"{PROMPT}.examples=1")
    env = make_environment(example_recipe)
    trajectory = expert_trajectory(env, env.instances("train")[0])
    assert trajectory is not None
    store = open_store(tmp_path)
    config = resolved(example_recipe)
    store.write(run_rows("r", recipe="n", method="agent-r", config=config, versions={}, workspace=str(tmp_path)))
    store.write(iteration_rows("i", run_id="r", iteration=1))
    store.write(trajectory_rows("t1", trajectory, iteration_id="i", source="expert"))
    messages = whole_episode(env, trajectory)
    ids, labels = load_renderer(tiny_model_dir).render_sample(messages)
    token_lines = preview_tokens(tmp_path, "t1")
    assert [int(line.split()[1]) for line, _ in token_lines] == ids
    assert [trained for _, trained in token_lines] == [label >= 0 for label in labels]
    assert "user, example" in " ".join(line for line, _ in token_lines)
    assert [text.partition("\n")[2][:-1] for text, _ in preview_sample(tmp_path, "t1")] == [m.text for m in messages]

    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ok."}]
    chat.write_text(f"{json.dumps({'messages': turns})}\n{json.dumps({'messages': turns[:1]})}\n", encoding="utf-8")
    assert preview_sample(tmp_path, f"{chat}:1") == [("[user]\nHi.\n", False), ("[assistant, trained]\nOk.\n", True)]
    assert preview_tokens(tmp_path, f"{chat}:1", tiny_model_dir)[-1][0].split()[-1] != "user"
    for name, model, sentence in (
        (f"{chat}:2", tiny_model_dir, "is not trained on: no-assistant-turn"),
        (f"{chat}:3", tiny_model_dir, "no conversation begins in line 3"),
        (f"{chat}:1", None, "name one with --model"),
        (f"{tmp_path}/none.jsonl:1", tiny_model_dir, "cannot be read: No such file"),
        ("t1", tmp_path / "none", "has no config.json"),
        ("x", None, "no sample or trajectory in .* begins with 'x'"),
    ):
        with pytest.raises(UserError, match=sentence):
            preview_tokens(tmp_path, name, model)
    missing_config = config | {"model": config["model"] | {"path": str(tmp_path / "gone")}}
    store.write(
        run_rows("q", recipe="n", method="agent-r", config=missing_config, versions={}, workspace=str(tmp_path))
    )
    store.write(iteration_rows("j", run_id="q", iteration=1))
    store.write(trajectory_rows("t2", trajectory, iteration_id="j", source="expert"))
    with pytest.raises(ConfigError, match=r"the model of run q, .*gone, is no directory here"):
        preview_tokens(tmp_path, "t2")


def test_a_revision_after_examples_keeps_its_bad_steps(recipe: Callable[..., Recipe]) -> None:
    episode_messages = episode(recipe(f"{PROMPT}.examples=2"))
    length = opening_length(episode_messages)
    messages = tuple(
        replace(message, train=message.train and at > length) for at, message in enumerate(episode_messages)
    )
    assert not messages[length].train
    assert messages[length + 2].train
    check_flags(Sample(kind="revision", messages=messages, instance=None, provenance=Provenance(cut=1)))
    with pytest.raises(DataFault, match="keeps 1 bad steps and trains one of them"):
        check_flags(Sample(kind="revision", messages=episode_messages, instance=None, provenance=Provenance(cut=1)))


def test_a_reply_may_end_at_its_first_action(recipe: Callable[..., Recipe]) -> None:
    env = make_environment(recipe(f"{PROMPT}.examples=1"))
    sampling = next_request(env, "Goal.", (), Sampling(stop=("x",)), seed=0, session="").sampling
    assert sampling.stop == ("x", "\nObservation:")
    reply = "Thought: much.\nAction: get 1 stick\n\nObservation: Got 1 stick\n\nAction: get 2 planks"
    assert cut_at_stop(reply, sampling) == "Thought: much.\nAction: get 1 stick"
    last = make_environment(recipe(f"{PROMPT}.examples=1", "environment.action.take=last"))
    assert next_request(last, "Goal.", (), Sampling(), seed=0, session="").sampling == Sampling()


def test_a_file_takes_the_place_of_the_instruction(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    file = tmp_path / "instruction.txt"
    file.write_text("Make things.\n", encoding="utf-8")
    file_recipe = recipe(f"{PROMPT}.instruction_file={file}")
    assert episode(file_recipe)[0] == Message(role="user", text="Make things.")
    before = run_id_of(file_recipe)
    file.write_text("Make other things.\n", encoding="utf-8")
    assert run_id_of(file_recipe) != before, "what the file holds is part of the run"


def test_where_the_instruction_is_the_system_turn_the_system_text_begins_it(recipe: Callable[..., Recipe]) -> None:
    env = make_environment(
        recipe("environment.name=reasoning", f"{PROMPT}={{system: 'Be brief.', examples: 1, examples_as: text}}")
    )
    system, problem = transcript_of(env).prompt(env, "How many?", ())
    assert (system.role, problem.text) == ("system", "How many?")
    assert system.text.startswith(f"Be brief.\n\n{env.instruction}\n\nHere is an example")
    assert "</think>\n<python>" in system.text


def test_a_recipe_without_a_prompt_asks_for_what_it_did(recipe: Callable[..., Recipe]) -> None:
    assert "prompt" not in asked_for(recipe())["environment"]
    assert "action" not in asked_for(recipe())["environment"]
    assert "action" not in asked_for(recipe("environment.action.take=last"))["environment"]
    ids = {
        run_id_of(variant) for variant in (recipe(), recipe(f"{PROMPT}.examples=1"), recipe(f"{PROMPT}.system=Act."))
    }
    assert len(ids) == 3


def test_a_window_keeps_the_system_turn(recipe: Callable[..., Recipe]) -> None:
    system_recipe = recipe(f"{PROMPT}.system=Act.")
    messages = episode(system_recipe)
    assert opening_length(messages) == 4
    assert opening_turns(messages) == messages[:4]
    assert max_droppable(messages[:-1]) == max_droppable(episode(recipe())[:-1])
    assert without_exchanges(messages, 1)[:5] == messages[:5]
    short = count_dropped(messages, lambda prompt: len(prompt) <= 6)
    assert len(short) == sum(message.role == "assistant" for message in messages) - 1
    whole = Sample(kind="good", messages=messages, instance=None)
    samples = split_windowed(whole, short, "stretches", stage="s", subject="x")
    assert isinstance(samples, tuple)
    assert {sample.messages[0] for sample in samples} == {messages[0]}


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
    file.write_text(json.dumps({"conversations": [{"from": sender, "value": text} for sender, text in turns]}))
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
    overrides = (f"{PROMPT}.examples=2", f"{PROMPT}.examples_file={file}")
    example_recipe = recipe(*overrides, "instances.test_limit=0", "model.path=data/models/textcraft-tiny")
    if fine:
        check(example_recipe)
        return
    with pytest.raises(ConfigError, match="its example textcraft/test/0 solves an instance that an evaluation plays"):
        check(example_recipe)


def test_a_world_without_examples_names_the_command_that_makes_some(recipe: Callable[..., Recipe]) -> None:
    maze_recipe = recipe("environment.name=agentgym-maze", f"{PROMPT}.examples=1")
    with pytest.raises(
        ConfigError, match="no examples come along for agentgym-maze; make some with `agentr env examples"
    ):
        opening_of(maze_recipe)


def test_the_command_makes_what_comes_along(tmp_path: Path) -> None:
    file = tmp_path / "made.jsonl"
    assert examples("textcraft", {}, "train", 3, file) == 3
    shipped_file = Path(__file__).parents[2] / "data" / "examples" / "textcraft.jsonl"
    assert file.read_bytes() == shipped_file.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        examples("textcraft", {}, "train", 3, file)


def example_turns(world: str) -> list[list[tuple[str, str]]]:
    """Return the turns of each example that comes along for a world: who says it, and what."""
    lines = (EXAMPLES / f"{world}.jsonl").read_text(encoding="utf-8").splitlines()
    return [[(turn["from"], turn["value"]) for turn in json.loads(line)["conversations"]] for line in lines]


# What parses a reply needs no games, no simulator and no products.
@pytest.mark.parametrize("kind", [AlfWorld, SciWorld, TextCraft, WebShop], ids=lambda kind: str(kind.name))
def test_the_worlds_own_parser_reads_each_reply_of_the_examples(kind: type[Any]) -> None:
    parser = object.__new__(kind).parse
    examples_of_world = example_turns(kind.name)
    assert len(examples_of_world) >= 2
    for turns in examples_of_world:
        assert [sender for sender, _ in turns] == ["human", "gpt"] * (len(turns) // 2)
        for reply in (text for sender, text in turns if sender == "gpt"):
            thought, _, action = reply.partition("\nAction: ")
            assert thought.removeprefix("Thought: ").strip()
            assert parser(reply) == action != ""


def test_the_examples_of_alfworld_are_what_its_engine_said() -> None:
    golden = (ROOT / "tests" / "golden" / "alfworld.txt").read_text(encoding="utf-8")
    for turns in example_turns("alfworld"):
        assert turns[0][1] in golden
        texts = [text for _, text in turns[1:]]
        for reply, observation in zip(texts[::2], texts[1::2], strict=False):
            assert f"> {reply.rpartition('Action: ')[2]}\n{observation}\nreward" in golden
        last = re.search(rf"> {re.escape(texts[-1].rpartition('Action: ')[2])}\n.*\nreward 1\.0, done True", golden)
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
    for opening in (Opening(system="Act."), Opening(turns=(Message(role="user", text="Goal.", example=True),))):
        set_opening(env, opening)
        assert instruction_of(env) == Line.instruction
        with pytest.raises(ConfigError, match="has a transcript of its own, which does not say"):
            _check_opening(env, opening)
