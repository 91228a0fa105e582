"""Questions with their answers: the rows of question sets, the sets, and the grades of answers.

A row is a JSON object, or a row of a table; `data/manual/pages/questions.md` lists the columns that
are read, and which files have which. If several columns could give the same thing, the first in
that list counts; a null counts as missing. Rows in verl's format for reinforcement learning can be
read, too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

from agentr_core.environments.reasoning.grammar import CALLS, Answers, last_box, prediction_of
from agentr_core.environments.reasoning.scoring import Domain, choice, correctness, verdict
from agentr_core.errors import ConfigError, DataFileError
from agentr_core.fingerprint import fingerprint
from agentr_core.recipes.fields import record
from agentr_core.replies import after_thoughts
from agentr_core.samples.record_files import records
from agentr_core.system import data_path
from agentr_core.texts import lone_surrogate, path_for_message
from agentr_core.types import Grade, Instance, Message, Question, Sampling, Trajectory

_GSM8K: Final = "gsm8k"
_GSM8K_NUMBER: Final = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
SOURCES: Final[Mapping[Domain, tuple[str, ...]]] = {
    "math": (
        *("aime", "aime24", "aime25", "amc", "amc23", _GSM8K, "math", "math500", "olympiadbench"),
        *("openr1", "numina-tir", "numina-cot", "dapo", "still"),
        *("minerva_math", "college_math", "gaokao2023en", "tabmwp", "svamp", "asdiv", "mawps", "carp_en"),
        *("math_effi_rl", "math_dapo"),
    ),
    "knowledge": (
        *("2wiki", "bamboogle", "hotpotqa", "musique", "nq", "triviaqa", "popqa", "asearcher", "webshaper"),
        *("webwalker", "gaia", "hle", "simpleqa", "xbench", "gpqa", "csbench", "mmlu-pro"),
        *("hotpot", "2wikimultihopqa", "qa", "qa_effi_rl"),
    ),
}
"""The sources of each domain that are known: those of ET-Agent's files, and of the loaders in its
code. Case and punctuation do not matter. No other place lists them.
"""
_DOMAIN_BY_ABILITY: Final[Mapping[str, Domain]] = {"math": "math", "qa": "knowledge"}
_QUESTION_COLUMNS: Final = ("question", "problem", "Question", "input", "content")
_ANSWER_COLUMNS: Final = ("answer", "Answer", "golden_answers", "target")
_ID_COLUMNS: Final = ("id", "ID", "question_id", "idx")
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPTION_LETTER: Final = re.compile(r"^[ \t]*\(([A-Z])\)", re.MULTILINE)
"""The beginning of an option that is listed in the question itself, as in GPQA's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One move of an expert: a thought, and the call that follows it; the last move has no call."""

    thought: str
    tool: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and all its right answers (`golds`). `depth` is its difficulty, None if unknown;
    `id` is empty if a row has none.

    If there are `options` to choose from, the question lists them with letters, and the answers are
    the letter and the text of the right one.
    """

    id: str
    question: str
    golds: tuple[str, ...]
    source: str
    domain: Domain
    depth: int | None = None
    solution: tuple[Move, ...] = ()
    options: tuple[str, ...] = ()

    def correctness(self, prediction: str, answers: Answers = "plain") -> float:
        """Return the correctness of an answer in [0, 1]: 0 or 1 for a choice of options, otherwise
        as `scoring.correctness` says.
        """
        if self.options:
            return choice(prediction, self.options, _LETTERS.index(self.golds[0]))
        return correctness(prediction, self.golds, self.domain, answers)


def problem_of(
    row: Mapping[str, Any], location: str, *, source: str = "", domains: Mapping[str, Domain] | None = None
) -> Problem:
    """Return the problem of a row; error messages begin with `location`.

    Args:
        source: a source that replaces the row's own; empty means the row's own.
        domains: the domains of sources, which take precedence over `SOURCES`.

    Raises `DataFileError` for a row that does not fit the module's description, or whose domain
    is unknown.
    """
    row = {key: value for key, value in row.items() if value is not None}
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "prompt" in row:
        extra = row.get("extra_info")
        extra = {key: value for key, value in extra.items() if value is not None} if isinstance(extra, Mapping) else {}
        # A prompt is a text, or a list of messages, of which the user's last one is the question.
        prompt = row["prompt"]
        if isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt):
            prompt = next(
                (message.get("content") for message in reversed(prompt) if message.get("role") == "user"), None
            )
        gold = reward_model.get("ground_truth")
        domain = _DOMAIN_BY_ABILITY.get(str(row.get("ability")).lower())
        columns = {
            "question": extra.get("question") or prompt,
            "answer": gold.get("target") if isinstance(gold, Mapping) else gold,
            "source": row.get("source", row.get("data_source")),
            "domain": row.get("domain")
            or (None if source_key(str(row.get("data_source"))) in _DOMAIN_OF_SOURCE else domain),
            "id": row.get("id", extra.get("index")),
            "depth": row.get("depth"),
        }
        row = {key: value for key, value in columns.items() if value is not None}
    if not source and row.get("source") is None:
        raise DataFileError(
            f"{location}: the row has no source; name that of its file in the recipe, as in "
            "environment.options.questions: [{path: FILE, source: aime24}]"
        )
    source = source or _required_text(row, "source", location)
    depth = row.get("depth")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int)):
        raise DataFileError(f"{location}: depth is {depth!r}; it must be a whole number, or left out")
    name = next((name for name in _QUESTION_COLUMNS if name in row), "question")
    parts = [_required_text(row, body, location) for body in ("body", "Body") if body in row]
    question = " ".join([*parts, _required_text(row, name, location)])
    golds = _golds(row, source, location)
    options = _options(row, location)
    if options:
        golds = _right_option(row, golds, options, location)
        question = f"{question}\n\n" + "\n".join(map("{}. {}".format, _LETTERS, options))
    elif question_options := _listed_options(question, golds):
        golds, options = _right_option(row, golds[:1], question_options, location), question_options
    return Problem(
        id=_id(row, location),
        question=question,
        golds=golds,
        source=source,
        domain=_domain(row, source, domains or {}, location),
        depth=depth,
        solution=_solution(row.get("solution"), location),
        options=options,
    )


def source_key(source: str) -> str:
    """Return the name of a source as it is compared: in lower case, without punctuation and
    spaces.
    """
    return re.sub(r"[\W_]", "", source.lower())


_DOMAIN_OF_SOURCE: Final = {source_key(name): domain for domain, names in SOURCES.items() for name in names}


def _id(row: Mapping[str, Any], location: str) -> str:
    """Return the id of a row, or the empty string if it has none."""
    name = next((name for name in _ID_COLUMNS if name in row), "")
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _required_text(row, name, location) if name else ""


def _domain(row: Mapping[str, Any], source: str, domains: Mapping[str, Domain], location: str) -> Domain:
    row_domain = row.get("domain")
    if row_domain is None:
        key = source_key(source)
        source_domain = {source_key(name): domain for name, domain in domains.items()}.get(
            key
        ) or _DOMAIN_OF_SOURCE.get(key)
        if source_domain is None:
            raise DataFileError(
                f"{location}: nothing says whether questions of {source!r} are mathematics or knowledge; say it, as in "
                f"environment.options.domains: {{{source}: knowledge}}, or math; known as mathematics are "
                f"{', '.join(SOURCES['math'])}, and as knowledge {', '.join(SOURCES['knowledge'])}"
            )
        return source_domain
    for domain in get_args(Domain):
        if row_domain == domain:
            chosen: Domain = domain
            return chosen
    raise DataFileError(f"{location}: domain is {row_domain!r}; it is {' or '.join(get_args(Domain))}")


def _golds(row: Mapping[str, Any], source: str, location: str) -> tuple[str, ...]:
    name = next((name for name in _ANSWER_COLUMNS if name in row), "answer")
    answer = row.get(name)
    if answer is None and isinstance(parts := row.get("final_answer"), list) and parts:
        return (", ".join(_gold_text(part, "final_answer", location) for part in parts),)
    if answer is None:
        answer = row.get("final_answer")
    if answer is None and isinstance(solution := row.get("solution"), str):
        answer = last_box(solution)
    if answer is None and "answer_index" in row:
        return ()
    if isinstance(answer, str) and "####" in answer:
        last_part = answer.rpartition("####")[2].strip()
        # Copies and extracts of GSM8K have names of their own.
        if source_key(source) == _GSM8K or _GSM8K_NUMBER.fullmatch(last_part):
            answer = last_part.replace(",", "")
    golds = answer if isinstance(answer, list) else [answer]
    aliases = row.get("answer_aliases", [])
    if not golds or not isinstance(aliases, list):
        raise DataFileError(f"{location}: {name} is {answer!r}; {_ANSWER_RULE}")
    return tuple(dict.fromkeys(_gold_text(gold, name, location) for gold in [*golds, *aliases]))


_ANSWER_RULE: Final = "it must be a text or a number, or a list of such that are all correct"


def _gold_text(answer: Any, name: str, location: str) -> str:
    if isinstance(answer, bool | int):
        return str(answer)
    if isinstance(answer, float) and math.isfinite(answer):
        return str(int(answer) if answer.is_integer() else answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DataFileError(f"{location}: {name} is {answer!r}; {_ANSWER_RULE}")
    return _checked_text(answer, name, location)


def _options(row: Mapping[str, Any], location: str) -> tuple[str, ...]:
    """Return the options to choose from that a row has; empty for other questions."""
    options = next((row[name] for name in ("options", "choices") if row.get(name)), None)
    if options is None:
        letters = next((at for at, letter in enumerate(_LETTERS) if letter not in row), len(_LETTERS))
        options = [row[letter] for letter in _LETTERS[:letters]] if letters > 1 else []
    if not isinstance(options, list) or len(options) == 1 or len(options) > len(_LETTERS):
        raise DataFileError(f"{location}: options are {options!r}; give a list of 2 to {len(_LETTERS)} texts")
    return tuple(_gold_text(option, "options", location) for option in options)


def _listed_options(question: str, golds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options that a question lists itself, each after its letter in brackets; empty if
    there are none or the answer is not one of these letters.
    """
    markers = list(_OPTION_LETTER.finditer(question))
    first = next((index for index, marker in reversed([*enumerate(markers)]) if marker[1] == "A"), len(markers))
    markers = markers[first:]
    letters = "".join(marker[1] for marker in markers)
    if len(markers) < 2 or letters != _LETTERS[: len(markers)] or golds[0] not in [f"({letter})" for letter in letters]:
        return ()
    ends = [*(marker.start() for marker in markers[1:]), len(question)]
    return tuple(question[marker.end() : end].strip() for marker, end in zip(markers, ends, strict=True))


def _right_option(
    row: Mapping[str, Any], golds: tuple[str, ...], options: tuple[str, ...], location: str
) -> tuple[str, str]:
    """Return the letter and the text of the right option. Raises `DataFileError` if it is not clear
    which one is right.
    """
    by_letter = dict(zip(_LETTERS, options, strict=False))
    letters: set[str] = set()
    for gold in golds:
        letter = gold.strip().strip("().")
        if letter not in by_letter:
            matching = [letter for letter, text in by_letter.items() if text == gold]
            letter = matching[0] if len(matching) == 1 else ""
        letters.add(letter)
    if isinstance(index := row.get("answer_index"), int):
        letters.add(_LETTERS[index] if 0 <= index < len(options) else "")
    if len(letters) != 1 or "" in letters or isinstance(row.get("answer"), bool | int | float):
        value = row.get("answer", row.get("Answer", index))
        raise DataFileError(
            f"{location}: answer is {value!r} beside {len(options)} options; it must be the letter or the text of one"
        )
    (letter,) = letters
    return letter, by_letter[letter]


def _solution(moves: Any, location: str) -> tuple[Move, ...]:
    has_only_texts = isinstance(moves, list) and all(isinstance(text, str) for text in moves)
    if moves is None or isinstance(moves, str) or has_only_texts:
        return ()
    if not isinstance(moves, list) or not all(isinstance(move, Mapping) for move in moves):
        raise DataFileError(f'{location}: solution must be a list of objects with "thought", "tool" and "query"')
    solution = tuple(
        Move(
            thought=_required_text(move, "thought", location),
            tool=_required_text(move, "tool", location) if move.get("tool") else "",
            query=_required_text(move, "query", location) if move.get("tool") else "",
        )
        for move in moves
    )
    if not all(move.tool in CALLS for move in solution[:-1]) or solution[-1].tool:
        raise DataFileError(f"{location}: each move of a solution calls {' or '.join(CALLS)}, and the last one nothing")
    return solution


def _required_text(row: Mapping[str, Any], key: str, location: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataFileError(f"{location}: {key} is {value!r}; it must be a text that is not empty")
    return _checked_text(value, key, location)


def _checked_text(text: str, key: str, location: str) -> str:
    if (position := lone_surrogate(text)) is not None:
        raise DataFileError(f"{location}: {key} has half a surrogate pair at {position}; correct the text")
    return text


# The grade of an answer: by rule if that decides, otherwise by a model that is asked whether the
# answer means the same as a right one.

Judged = Literal["none", "math", "all"]
"""Which answers that the rule finds wrong a model is asked about: none, those in mathematics, or
all.
"""

_JUDGE_ROLE = "judge"
_JUDGE_SAMPLING = Sampling(temperature=0.0, max_new_tokens=256)
_JUDGE_PROMPT = """\
You compare an answer with the right one.

Question: {question}
Right answers, each of which will do:
{golds}
Given answer: {prediction}

Does the given answer mean the same as one of the right answers? Its wording and notation do not matter. \
Do not solve the question yourself. Say one word: Correct or Incorrect."""


class AnswerGrader:
    """A grader of the answer of an episode.

    Args:
        problem: a function that returns the problem of an instance.
        judged: which answers a model in the role `judge` is asked about if the rule finds them
            wrong; see `Judged`.
        success_from: an answer succeeds if its correctness is above this, in [0, 1].
        answers: how answers are read and compared; see `grammar.Answers`.
    """

    def __init__(
        self,
        problem: Callable[[Instance], Problem],
        *,
        judged: Judged,
        success_from: float,
        answers: Answers = "plain",
    ) -> None:
        self._problem = problem
        self._answers = answers
        self._judged = judged
        self._success_from = success_from

    @property
    def asks(self) -> str | None:
        """The role of the model that judges answers; None if no model is asked."""
        return None if self._judged == "none" else _JUDGE_ROLE

    def rule(self, trajectory: Trajectory) -> Grade | None:
        """Return the grade by rule; None if a model has to be asked. No model is asked about an
        episode without an answer.
        """
        problem = self._problem(trajectory.instance)
        prediction = prediction_of(trajectory, self._answers)
        reward = problem.correctness(prediction, self._answers)
        success = reward > self._success_from
        needs_judge = self._judged == "all" or self._judged == problem.domain
        return None if prediction and needs_judge and not success else Grade(reward=reward, success=success)

    def question(self, trajectory: Trajectory) -> Question:
        """Return the question for the judge, to be asked at temperature 0: does the answer mean the
        same as a right one?
        """
        problem = self._problem(trajectory.instance)
        text = _JUDGE_PROMPT.format(
            question=problem.question,
            golds="\n".join(f"- {gold}" for gold in problem.golds),
            prediction=prediction_of(trajectory, self._answers),
        )
        return Question(role=_JUDGE_ROLE, messages=(Message(role="user", text=text),), sampling=_JUDGE_SAMPLING)

    def read(self, trajectory: Trajectory, reply: str) -> Grade | None:
        """Return the grade in a judge's reply, read after its thoughts: reward 1 if it finds the
        answer right, the rule's reward if it finds it wrong, None if it says neither.
        """
        right = verdict(after_thoughts(reply) or "")
        if right is None:
            return None
        if right:
            return Grade(reward=1.0, success=True)
        problem = self._problem(trajectory.instance)
        prediction = prediction_of(trajectory, self._answers)
        return Grade(reward=problem.correctness(prediction, self._answers), success=False)


# Question sets from JSON or Parquet files or from folders that the library `datasets` saved, and
# the shipped ones.

SHIPPED = ("numbers", "encyclopaedia")
_QUESTIONS_OPTION = "environment.options.questions"
_SUFFIXES = (".jsonl", ".json", ".parquet")
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}")
"""The name of one of several files of a split, as on the Hugging Face hub."""

QuestionSet = Mapping[str, tuple[Problem, ...]]
"""The problems of each split, by the split's name."""


@record
class QuestionFile:
    """A question set, with the source or split of all its rows; empty means that the rows say
    it.
    """

    path: str
    source: str = ""
    split: str = ""


def question_file(entry: str | Mapping[str, Any] | QuestionFile) -> QuestionFile:
    """Return an entry of the option `questions` as a record: it is the name of a set, or its
    fields.
    """
    if isinstance(entry, QuestionFile):
        return entry
    return QuestionFile(**entry) if isinstance(entry, Mapping) else QuestionFile(path=entry)


@lru_cache(maxsize=8)
def load(sets: tuple[str | QuestionFile, ...], domains: tuple[tuple[str, Domain], ...] = ()) -> QuestionSet:
    """Return the problems of several sets, joined split by split in the order of the sets.

    A set is the name of a shipped one; a JSON or Parquet file, whose rows name their split; a
    folder of such files, each named after its split; or a folder that `datasets.save_to_disk`
    wrote. The module's docstring says what a row has.

    A row without an id gets one from its source and a hash of its question and answers, so that ids
    stay the same if rows are removed or reordered; equal rows are numbered.

    Args:
        domains: the domains of sources, which take precedence over `SOURCES`.

    Raises:
        ConfigError: no set is named, or one twice; a named one does not exist; or `domains` names a
            source that no question has.
        DataFileError: a file is malformed or has no question; an id occurs twice in a split of a
            set; or the source, split or domain of a row is unknown.
    """
    if not sets:
        raise ConfigError(f"{_QUESTIONS_OPTION} names no set; name a file, a folder or one of {', '.join(SHIPPED)}")
    files = [question_file(entry) for entry in sets]
    if repeated_paths := [path for path, count in Counter(file.path for file in files).items() if count > 1]:
        raise ConfigError(f"{_QUESTIONS_OPTION} names {repeated_paths[0]} twice; name each set once")
    splits: dict[str, list[Problem]] = {}
    domain_by_source = dict(domains)
    for file in files:
        location_by_id: dict[tuple[str, str], str] = {}
        num_equal_by_name: Counter[str] = Counter()
        for split, row, location in _rows(file):
            problem = problem_of(row, location, source=file.source, domains=domain_by_source)
            if not problem.id:
                # Not the row's number, which changes when a row before it is removed.
                name = f"{problem.source}-{fingerprint(problem.question, problem.golds)[:8]}"
                num_equal_by_name[name] += 1
                problem = replace(
                    problem, id=name if num_equal_by_name[name] == 1 else f"{name}-{num_equal_by_name[name]}"
                )
            first_location = location_by_id.setdefault((split, problem.id), location)
            if first_location != location:
                raise DataFileError(
                    f"{location}: id {problem.id!r} stands at {first_location} too; ids must be unique in a split "
                    "of a set"
                )
            splits.setdefault(split, []).append(problem)
        if not location_by_id:
            raise DataFileError(
                f"{path_for_message(place_of(file.path))} has no question; name another set in {_QUESTIONS_OPTION}"
            )
    sources = {source_key(problem.source) for problems in splits.values() for problem in problems}
    if unused_sources := [source for source, _ in domains if source_key(source) not in sources]:
        raise ConfigError(f"environment.options.domains: no question has the source {unused_sources[0]}; leave it out")
    return {split: tuple(problems) for split, problems in splits.items()}


def place_of(name: str) -> Path:
    """Return the path of the file or folder of a question set."""
    return data_path("reasoning", name) if name in SHIPPED else Path(name)


def _rows(file: QuestionFile) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield the split, the row and its location (for error messages) of each row of a set."""
    path = place_of(file.path)
    if path.is_file():
        for row, location in _file_rows(path):
            yield file.split or _split_of(row, location), row, location
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        # The library takes a second to import, and few sets need it.
        from datasets import DatasetDict, load_from_disk

        try:
            data = load_from_disk(path)
        except (OSError, ValueError) as error:
            raise DataFileError(f"folder {path} cannot be read by `datasets`: {error}; save it again") from error
        for split, dataset in data.items() if isinstance(data, DatasetDict) else [("", data)]:
            for number, row in enumerate(dataset):
                location = f"{path}, row {number} of {split or 'the set'}"
                yield file.split or split or _split_of(row, location), row, location
    elif files := _split_files(path):
        for part, split in files:
            for row, location in _file_rows(part):
                yield file.split or split, row, location
    else:
        raise ConfigError(
            f"{_QUESTIONS_OPTION}: there are no questions at {path_for_message(path)}; name a {' or '.join(_SUFFIXES)} "
            f"file, a folder of such files, a folder that `datasets` saved, or one of {', '.join(SHIPPED)}"
        )


def _split_files(folder: Path) -> Sequence[tuple[Path, str]]:
    """Return the question files of a folder, each with the split that its name gives. Raises
    `ConfigError` if a split has several files that are not its numbered parts.
    """
    files = sorted(file for file in folder.glob("*") if file.suffix in _SUFFIXES)
    named_files = [(file, parts[1] if (parts := _SHARD.fullmatch(file.stem)) else file.stem) for file in files]
    sets = {
        split: {(file.suffix, file.stem == split) for file, name in named_files if name == split}
        for _, split in named_files
    }
    for split, kinds in sets.items():
        if len(kinds) > 1:
            names = " and ".join(file.name for file, name in named_files if name == split)
            raise ConfigError(
                f"{_QUESTIONS_OPTION}: {path_for_message(folder)} has {names}, all of split {split}; name one of them, "
                f"with its split: "
                f"[{{path: {named_files[0][0]}, split: {split}}}]"
            )
    return named_files


def _file_rows(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if file.suffix not in _SUFFIXES:
        raise ConfigError(
            f"{_QUESTIONS_OPTION}: {file} has the type {file.suffix!r}; name a {' or '.join(_SUFFIXES)} file"
        )
    for number, row in records(file, setting=_QUESTIONS_OPTION):
        yield row, f"{file}:{number}"


def _split_of(row: Mapping[str, Any], location: str) -> str:
    """Return the split that a row names in `split` or, as in verl's format, in `extra_info.split`.

    Raises `DataFileError` if it names none.
    """
    extra = row.get("extra_info")
    split = row.get("split") or (extra.get("split") if isinstance(extra, Mapping) else None)
    if not isinstance(split, str) or not split:
        fault = "the row has no split" if split is None else f"split is {split!r}"
        raise DataFileError(
            f"{location}: {fault}; name that of the file in the recipe, as in {_QUESTIONS_OPTION}: "
            "[{path: FILE, split: test}], or in each row"
        )
    return split
