"""The formats of exports: what each writes, and whether it can express which turns carry loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from agentr_core.errors import ConfigError
from agentr_core.exchange import atif, chat, parquet, verl
from agentr_core.exchange.card import card
from agentr_core.exchange.column_types import column_types
from agentr_core.exchange.training_set import TrainingSet, cut_replies, cut_turns, rows_told, spared_turns
from agentr_core.writing import writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of exports.

    `write` puts files into a folder and returns their paths, by the name of the set that a reader
    asks for. `unmasked` returns what the format cannot express about the loss mask of a training
    set; empty if nothing. `impossible` returns why a set cannot be written at all. `told` returns
    how many rows are written, and of what. Each of `notes` returns what a reader has to know, such
    as what is left out; empty if nothing.
    """

    write: Callable[[TrainingSet, Path], Mapping[str, str]]
    read_with: str
    unmasked: Callable[[TrainingSet], str] = lambda _: ""
    impossible: Callable[[TrainingSet], str] = lambda _: ""
    told: Callable[[TrainingSet], str] = rows_told
    notes: Sequence[Callable[[TrainingSet], str]] = (cut_replies,)

    def notes_on(self, training_set: TrainingSet) -> list[str]:
        """Return what a reader of a training set has to know."""
        return [note for notes in self.notes if (note := notes(training_set))]


def export(training_set: TrainingSet, folder: Path, name: str, *, without_mask: bool = False) -> tuple[str, ...]:
    """Write a training set into a new folder in a format, and return the paths of its files in it.

    The folder appears once it is complete.

    Args:
        without_mask: write the set even if the format cannot express which turns carry loss.

    Raises:
        ConfigError: there is no such format, the folder already exists, or the format cannot hold
            the set or its loss mask.
        DiskError: the folder cannot be written; nothing is left of it.
    """
    chosen = FORMATS.get(name)
    if chosen is None:
        raise ConfigError(f"there is no export format {name!r}; choose one of {', '.join(FORMATS)}")
    if folder.exists():
        raise ConfigError(f"{folder} is there already; name a new folder")
    if why := chosen.impossible(training_set):
        raise ConfigError(f"{training_set.name} cannot be written as {name}: {why}")
    unmasked = chosen.unmasked(training_set)
    if unmasked and not without_mask:
        raise ConfigError(
            f"{name} cannot say which turns of {training_set.name} carry loss: {unmasked}; choose another format, or "
            "give --without-mask to write it all the same"
        )
    draft = folder.with_name(f".{folder.name}.new")
    with writing(folder):
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            files = chosen.write(training_set, draft)
            told = chosen.told(training_set)
            text = card(
                training_set,
                files,
                types=column_types(draft, files),
                told=told,
                read_with=chosen.read_with,
                unmasked=unmasked,
                notes=chosen.notes_on(training_set),
            )
            (draft / "README.md").write_text(text, encoding="utf-8")
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return tuple(sorted(str(path.relative_to(folder)) for path in _files(folder)))


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _in_part(training_set: TrainingSet) -> str:
    count = cut_turns(training_set)
    return f"{count} turns carry loss in a part of them, and its flags are for whole turns" if count else ""


def _within_a_side(training_set: TrainingSet) -> str:
    count = spared_turns(training_set)
    return f"{count} turns within the sides of pairs carry none, and a trainer masks the prompt alone" if count else ""


def _first(*reasons: Callable[[TrainingSet], str]) -> Callable[[TrainingSet], str]:
    return lambda training_set: next(filter(None, (reason(training_set) for reason in reasons)), "")


def _cut_in_pairs(training_set: TrainingSet) -> str:
    return cut_replies(training_set) if training_set.pairs else ""


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "parquet": Format(
            write=parquet.write,
            read_with="`datasets.load_dataset(FOLDER)` reads it; `train` of a turn, and `labels`, say what carries "
            "loss.",
            # The labels of a sample end where its reply was cut.
            notes=(_cut_in_pairs,),
        ),
        "trl": Format(
            write=chat.write_trl,
            read_with="For TRL 1.16. Rows of `messages` have the token ids and labels of the model of the run, which "
            "its SFT trainer takes as they are: give it a `max_length` that holds them. Rows of `prompt_completion` "
            "have each trained turn with all that comes before it, for any model.",
            unmasked=_within_a_side,
        ),
        "sharegpt": Format(
            write=chat.write_sharegpt,
            read_with="The flag `train` of a turn says whether it carries loss; Axolotl reads it when it is told "
            "`message_field_training: train`.",
            unmasked=_first(_in_part, _within_a_side),
        ),
        "llama-factory": Format(
            write=chat.write_llama_factory,
            read_with="Name the folder as `dataset_dir`. The last turn of each line is what is trained: LLaMA-Factory "
            "needs `mask_history: true`, and a `cutoff_len` that holds the lines.",
            impossible=chat.not_for_llama_factory,
            notes=(chat.cutoff, chat.lacks_rewards, cut_replies),
        ),
        "agenttraj": Format(
            write=chat.write_agenttraj,
            read_with="`loss` of a turn says whether it carries loss, as in AgentTraj-L of AgentGym.",
            unmasked=_in_part,
            impossible=chat.not_for_agenttraj,
            notes=(chat.systems_beside, cut_replies),
        ),
        "atif": Format(
            write=atif.write,
            read_with=f"A file for each trajectory, in the agent trajectory interchange format, {atif.VERSION}.",
            unmasked=atif.unmasked,
            impossible=atif.impossible,
            notes=(atif.sides_apart, cut_replies),
        ),
        "verl": Format(
            write=verl.write,
            told=verl.told,
            read_with="Rows of verl's RLHFDataset: the prompt of each instance once. Replies are sampled anew, so "
            "there is no loss mask; give verl a reward function or an interaction that plays `extra_info`, and a "
            "`data.max_prompt_length` that holds the prompts: longer ones are left out.",
            notes=(verl.tools_elsewhere,),
        ),
    }
)
"""The formats by the name that `--format` takes."""
