"""A base model for questions is made from nothing, and the world can be played with it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from base_settings import SETTINGS, BaseConfig, QuestionsConfig, load
from pretrain import main, make_tokenizer
from readme import ROOT
from safetensors.torch import load_file

from agentr_core.environments.reasoning.world import instruction
from agentr_core.errors import ConfigError
from agentr_core.models.local.transformers import TransformersModel
from agentr_core.samples.rendering import load_renderer
from agentr_core.types import Message, Request, Sampling

MAKE = ROOT / "data" / "models" / "make"
TINY = BaseConfig(
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    intermediate_size=64,
    tokens=20 * 1024,
    batch_tokens=1024,
    warmup_steps=2,
    bf16=False,
    num_threads=1,
    questions=QuestionsConfig(guess_share=0.3, repeat_share=0.3, questions=8, tokenizer_samples=60, vocabulary=500),
)


@pytest.mark.slow
def test_a_name_has_the_same_tokens_wherever_it_stands() -> None:
    tokenizer = make_tokenizer(TINY, 0)

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([number]) for number in tokenizer(text, add_special_tokens=False)["input_ids"]]

    for name in ("Skalck Ragen", "Flialaeck Wiath", "Dohaven"):
        name_pieces = pieces(name)
        for around in ("<search>{}</search>", "I look up {}.", "{} was taught by {}.", "It is \\boxed{{{}}}."):
            text_pieces = pieces(around.format(*[name] * around.count("{}")))
            assert "\0".join(name_pieces) in "\0".join(text_pieces), text_pieces
    assert pieces("12 ** 34") == ["1", "2", *pieces(" ** "), "3", "4"]
    tools = instruction(("search", "python"))
    assert pieces(tools) == [tools]
    for text in ("Naïve café, 東京\n\n<think>x </think>", "print(sum(map(int, str(16 ** 30))))", "a < b </b> <résult>"):
        assert "".join(pieces(text)) == text or not text.isascii()
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a base that was made without interruption, and what the script said."""
    target = tmp_path_factory.mktemp("made") / "model"
    done = subprocess.run(command(target), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target, done.stdout


def command(target: Path) -> list[str]:
    """Return the command that makes the tiny model in a directory, with its settings beside it."""
    settings = target.with_suffix(".yaml")
    settings.write_text(yaml.safe_dump(SETTINGS.dump_python(TINY, mode="json")), encoding="utf-8")
    return [sys.executable, str(MAKE / "pretrain.py"), str(settings), str(target)]


@pytest.mark.slow
def test_one_command_makes_a_model_that_the_program_can_sample_from(made: tuple[Path, str]) -> None:
    folder, output = made
    loss = re.fullmatch(rf"step 20 of 20, loss (.*)\n{folder} is complete\n", output)
    assert loss is not None, output
    assert 0 < float(loss[1]) < 10
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (501, 32)
    assert '"guess_share": 0.3' in (folder / "recipe.json").read_text(encoding="utf-8")
    model = TransformersModel.load(folder, dtype="float32", device="cpu")
    messages = (
        Message(role="system", text=instruction(("search", "python"))),
        Message(role="user", text="How many positive divisors does 12 have?"),
    )
    assert len(load_renderer(folder).render_prompt(messages)) < 40
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    ((reply,),) = asyncio.run(model.generate([Request(messages=messages, sampling=sampling, seed=0)]))
    assert 1 <= len(reply.token_ids) <= 8
    # What is there is not made again, and not by other settings either.
    settings = str(folder.with_suffix(".yaml"))
    assert main([settings, str(folder)]) == 0
    assert str(main([settings, str(folder), "--seed", "1"])).startswith(f"{folder} is there already, and was made")


@pytest.mark.long
@pytest.mark.slow
def test_a_training_that_is_stopped_keeps_a_checkpoint_and_goes_on_to_the_same_weights(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    target = tmp_path / "model"
    work = tmp_path / "model.work"
    training = subprocess.Popen(command(target))
    while not work.joinpath("recipe.json").exists() and training.poll() is None:
        time.sleep(0.05)
    training.send_signal(signal.SIGINT)
    assert training.wait() == 1
    assert any(work.joinpath("checkpoints").glob("checkpoint-*"))
    assert not target.exists()

    settings = str(target.with_suffix(".yaml"))
    assert str(main([settings, str(target), "--seed", "1"])).startswith(f"{work} has the unfinished work of other")
    subprocess.run(command(target), check=True)
    assert (target / "model.safetensors").read_bytes() == (made[0] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden_size: 40\nhead_dim: 16", "hidden_size: 40 is no multiple of head_dim, 16"),
        ("num_key_value_heads: 3", "num_key_value_heads: 4 query heads cannot share 3 evenly; take a divisor of 4"),
        ("questions: {guess_share: 0.5}\ndrills: 7000", "drills: only samples of TextCraft have it"),
        ("questions: {hops: []}", "questions.hops: give a list of at least 1"),
        ("questions: {repeat_share: 1.5}", "questions.repeat_share: give 1 or less"),
        ("output: o", "output: there is no field output"),
        ("[1]", "give a section of fields"),
    ],
)
def test_wrong_settings_are_told_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: {said}")
    assert main([str(file), str(tmp_path / "model")]) == str(caught.value)
    with pytest.raises(ConfigError, match=r"^settings none\.yaml cannot be read: No such file"):
        load(Path("none.yaml"))


@pytest.mark.parametrize("name", ["textcraft-tiny", "reasoning-tiny"])
def test_the_shipped_models_were_made_with_the_settings_that_are_here(name: str) -> None:
    record = json.loads((ROOT / "data" / "models" / name / "recipe.json").read_text(encoding="utf-8"))
    settings = SETTINGS.dump_python(load(MAKE / f"{name}.yaml"), mode="json")
    # Both were in the recipe of a method that is no more, and bfloat16 is that of the machine.
    fields = {key: value for key, value in record["base"].items() if key not in ("output", "bf16")}
    assert record["seed"] == 0
    assert {key: settings[key] for key in fields} == fields
