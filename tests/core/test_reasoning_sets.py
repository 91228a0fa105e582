"""Question sets: those that are made, and those of files."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from authors_files import FORMS, LISTED, REINFORCED, in_parquet, write_rows
from datasets import Dataset, DatasetDict
from generators import RELATIONS, articles, encyclopaedia_problems, number_problems, universe
from readme import ROOT
from toolboxes import ran

from agentr_core.environments.reasoning.problems import SHIPPED, SOURCES, Problem, QuestionFile, load, problem_of
from agentr_core.environments.reasoning.scoring import same_answer
from agentr_core.errors import ConfigError, DataFileError

ROW = {"id": "a", "question": "2 + 2?", "answer": "4", "source": "aime"}
FOLDER = ROOT / "data" / "reasoning"


def make() -> Any:
    spec = importlib.util.spec_from_file_location("reasoning_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_makes_the_shipped_files_byte_for_byte() -> None:
    script = make()
    for name, text in script.files(script.arguments([])).items():
        assert text.encode() == (FOLDER / name).read_bytes(), name


def test_shipped_sets_have_splits_that_share_no_question() -> None:
    sets = load(SHIPPED)
    assert {split: len(problems) for split, problems in sets.items()} == {"test": 500, "train": 600}
    questions = [problem.question for problems in sets.values() for problem in problems]
    assert len(set(questions)) == len(questions)


def test_the_experts_code_prints_the_answer_that_was_derived_otherwise() -> None:
    for problem in islice(number_problems(5, "n"), 60):
        status, output = ran(problem.solution[0].query)
        assert status == "ok"
        assert same_answer(output, problem.golds[0]), problem


def read_facts(articles: list[dict[str, str]]) -> dict[tuple[str, str], str]:
    """Return what the articles say, read back by the wording alone."""
    patterns = {
        name: re.compile(
            re.escape(relation.sentence).replace(r"\{subject\}", "(?P<s>.+?)").replace(r"\{object\}", "(?P<o>.+?)")
        )
        for name, relation in RELATIONS.items()
    }
    facts: dict[tuple[str, str], str] = {}
    for article in articles:
        for sentence in re.findall(r"[^.]+\.", article["contents"]):
            ((name, match),) = [(n, m) for n, p in patterns.items() if (m := p.fullmatch(sentence.strip()))]
            assert article["title"] == match["s"]
            assert facts.setdefault((match["s"], name), match["o"]) == match["o"]
    return facts


def derive_answer(question: str, facts: dict[tuple[str, str], str]) -> str:
    """Return the answer to a question, unwrapped phrase by phrase from what the articles say."""
    phrase = question.removeprefix("Who is ").removeprefix("What is ").removesuffix("?")
    for name, relation in RELATIONS.items():
        head, tail = relation.phrase.split("{subject}")
        if phrase.startswith(head) and phrase.endswith(tail):
            return facts[derive_answer(phrase[len(head) : len(phrase) - len(tail)], facts), name]
    return phrase


def test_answers_follow_from_the_articles_alone() -> None:
    entities = universe(3, people=60, towns=14)
    facts = read_facts(articles(entities))
    people = [entity.name for entity in entities.values() if entity.kind == "person"]
    problems = encyclopaedia_problems(entities, people, hops=[1, 2, 3, 4], seed=3, prefix="q")
    for problem in islice(problems, 200):
        assert derive_answer(problem.question, facts) == problem.golds[0]
        assert len(problem.solution) == (problem.depth or 0) + 1


def test_a_universe_is_that_of_its_seed_and_has_no_name_twice() -> None:
    entities = universe(1, people=50, towns=12)
    assert entities == universe(1, people=50, towns=12)
    assert entities.keys().isdisjoint(universe(2, people=50, towns=12).keys() - entities.keys())
    firsts = [name.split()[0] for name, entity in entities.items() if entity.kind == "person"]
    assert len(set(firsts)) == len(firsts)
    with pytest.raises(ConfigError, match="20 people"):
        universe(1, people=5, towns=12)
    with pytest.raises(ConfigError, match="no further question of 1 hops"):
        list(islice(encyclopaedia_problems(entities, list(entities)[:1], hops=[1], seed=1, prefix="q"), 50))


def make_row(**changes: object) -> dict[str, Any]:
    return {**ROW, **changes}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_sets_are_read_from_files_and_folders(tmp_path: Path, suffix: str) -> None:
    alone = write_rows(
        tmp_path, f"alone{suffix}", [make_row(split="train"), make_row(id="b", split="test", answer="5")]
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    write_rows(folder, f"train{suffix}", [make_row(id="c", source="hotpot", answer=["x", "y"], depth=2)])
    write_rows(folder, f"dev{suffix}", [make_row(id="d")])
    sets = load((str(alone), str(folder)))
    assert {split: [problem.id for problem in problems] for split, problems in sets.items()} == {
        "train": ["a", "c"],
        "test": ["b"],
        "dev": ["d"],
    }
    assert sets["train"] == (
        Problem(id="a", question="2 + 2?", golds=("4",), source="aime", domain="math"),
        Problem(id="c", question="2 + 2?", golds=("x", "y"), source="hotpot", domain="knowledge", depth=2),
    )


def test_sets_are_read_from_what_datasets_saved(tmp_path: Path) -> None:
    solution = [{"thought": "I run it.", "tool": "python", "query": "print(4)"}, {"thought": "So 4."}]
    parts = {"train": Dataset.from_list([make_row(solution=solution)]), "test": Dataset.from_list([make_row(id="b")])}
    DatasetDict(parts).save_to_disk(tmp_path / "both")
    sets = load((str(tmp_path / "both"),))
    assert [move.tool for move in sets["train"][0].solution] == ["python", ""]
    assert sets["test"][0].solution == ()
    Dataset.from_list([make_row(split="train")]).save_to_disk(tmp_path / "one")
    assert set(load((str(tmp_path / "one"),))) == {"train"}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (make_row(answer=[]), "answer is \\[\\]"),
        (make_row(answer=float("nan")), "answer is nan"),
        (make_row(answer=["4", None]), "answer is None"),
        (make_row(answer={"value": "4"}), "answer is {'value': '4'}"),
        (make_row(id=" "), "id is ' '"),
        (make_row(question=" "), "question is ' '"),
        (make_row(domain="physics"), "domain is 'physics'"),
        (make_row(depth="2"), "depth is '2'"),
        (make_row(source=None), "the row has no source; name that of its file in the recipe"),
        (make_row(source=" "), "source is ' '"),
        (make_row(source="mine"), "whether questions of 'mine' are mathematics or knowledge; .*: {mine: knowledge}"),
        (make_row(options=["3"]), "options are \\['3'\\]; give a list of 2 to 26 texts"),
        (make_row(options=["3", "5"]), "answer is '4' beside 2 options"),
        (make_row(options=["3", "4"], answer=1), "answer is 1 beside 2 options"),
        (make_row(options=["3", "4"], answer="A", answer_index=1), "answer is 'A' beside 2 options"),
        (make_row(options=["4", "4"]), "answer is '4' beside 2 options"),
        (make_row(solution=[{"thought": "x", "tool": "python", "query": "1"}]), "the last one nothing"),
        (
            make_row(solution=[{"thought": "x", "tool": "saw", "query": "1"}, {"thought": "y"}]),
            "calls search or python",
        ),
        (make_row(solution=[{"thought": "x"}, "y"]), "solution must be a list"),
        (make_row(question="\ud800"), "half a surrogate pair"),
    ],
)
def test_a_malformed_row_is_named(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(DataFileError, match=f"here: .*{fault}"):
        problem_of(row, "here")


def test_a_set_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no set"):
        load(())
    with pytest.raises(ConfigError, match="no questions at nowhere"):
        load(("nowhere",))
    with pytest.raises(ConfigError, match=r"type '\.csv'"):
        load((str(write_rows(tmp_path, "x.csv", [ROW])),))
    with pytest.raises(DataFileError, match="the row has no split"):
        load((str(write_rows(tmp_path, "x.jsonl", [ROW])),))
    with pytest.raises(DataFileError, match="id 'a' stands at"):
        load((str(write_rows(tmp_path, "y.jsonl", [make_row(split="train"), make_row(split="train")])),))
    with pytest.raises(ConfigError, match="names numbers twice"):
        load(("numbers", "numbers"))
    with pytest.raises(ConfigError, match="domains: no question has the source hops; leave it out"):
        load(("numbers",), (("hops", "math"),))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataFileError, match=r"empty\.jsonl has no question"):
        load((str(empty),))
    tmp_path.joinpath("z.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataFileError, match="cannot be read"):
        load((str(tmp_path / "z.parquet"),))


def test_the_domain_follows_from_the_source_where_a_row_tells_none() -> None:
    for domain, names in SOURCES.items():
        assert {problem_of(make_row(source=name), "").domain for name in names} == {domain}, domain
    domains = {
        name: problem_of(make_row(source=name), "").domain for name in ("DAPO", "Numina_CoT", "MATH-500", "HotpotQA")
    }
    assert domains == {"DAPO": "math", "Numina_CoT": "math", "MATH-500": "math", "HotpotQA": "knowledge"}
    assert problem_of(make_row(source="2wiki", domain="math"), "").domain == "math"
    assert problem_of(make_row(source="Mine"), "", domains={"mine": "knowledge"}).domain == "knowledge"
    # A recipe may also see a known source otherwise.
    assert problem_of(make_row(source="hle"), "", domains={"hle": "math"}).domain == "math"


@pytest.mark.parametrize(("source", "row", "golds", "own"), FORMS)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_the_files_of_the_authors_are_read(
    tmp_path: Path, source: str, row: dict[str, Any], golds: tuple[str, ...], own: str, suffix: str
) -> None:
    file = write_rows(tmp_path, f"test{suffix}", [in_parquet(row) if suffix == ".parquet" else row])
    ((problem,),) = load((QuestionFile(path=str(file), source=source, split="test"),)).values()
    assert (problem.golds, problem.source) == (golds, source)
    assert problem.domain == ("math" if source in SOURCES["math"] else "knowledge")
    assert problem.id == own or (not own and problem.id.startswith(f"{source}-"))


def test_a_folder_is_a_set_as_the_authors_lay_theirs_out(tmp_path: Path) -> None:
    for source in ("aime24", "amc23", "2wiki", "shards"):
        (tmp_path / source).mkdir()
    write_rows(tmp_path / "aime24", "test.jsonl", [{"id": 0, "question": "1?", "answer": "1"}])
    (tmp_path / "amc23" / "test.json").write_text(json.dumps([{"id": 0, "question": "2?", "answer": 2}], indent=4))
    write_rows(tmp_path / "2wiki", "test.jsonl", [{"question": "3?", "answer": ["3"]}] * 2)
    for part in range(2):
        write_rows(tmp_path / "shards", f"test-0000{part}-of-00002.parquet", [{"question": f"{part}?", "answer": "5"}])
    sets = [QuestionFile(path=str(tmp_path / name), source=name) for name in ("aime24", "amc23", "2wiki")]
    problems = load((*sets, QuestionFile(path=str(tmp_path / "shards"), source="simpleqa", split="other")))
    assert [problem.id[:8] for problem in problems["test"]] == ["0", "0", *["2wiki-" + problems["test"][2].id[6:8]] * 2]
    assert problems["test"][3].id == f"{problems['test'][2].id}-2"
    assert len(problems["other"]) == 2
    write_rows(tmp_path / "amc23", "test.jsonl", [{"id": 0, "question": "2?", "answer": 2}])
    with pytest.raises(ConfigError, match=r"amc23 has test\.json and test\.jsonl, all of split test; name one of them"):
        load((sets[1],))


def test_an_id_that_is_made_stays_when_a_file_is_cut_or_reordered(tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "answer": str(number)} for number in range(3)]

    def ids(name: str, rows: list[dict[str, Any]]) -> list[str]:
        file = QuestionFile(path=str(write_rows(tmp_path, name, rows)), source="nq", split="test")
        return [problem.id for problem in load((file,))["test"]]

    whole = ids("whole.jsonl", rows)
    assert len(set(whole)) == 3
    assert ids("part.jsonl", rows[:0:-1]) == whole[:0:-1]


def test_rows_of_reinforcement_learning_name_their_split(tmp_path: Path) -> None:
    file = write_rows(tmp_path, "valid.parquet", [REINFORCED])
    assert list(load((str(file),))) == ["valid"]
    unknown = {**REINFORCED, "data_source": "ours", "ability": "math"}
    (problem,) = load((str(write_rows(tmp_path, "train.parquet", [unknown])),))["valid"]
    assert (problem.domain, problem.question) == ("math", "Who built it?")
    unknown = {**unknown, "extra_info": {"index": 3}}
    assert problem_of(unknown, "").question == "Who built it?"


def test_a_copy_of_gsm8k_with_another_name_has_its_numbers() -> None:
    row = make_row(answer="Tina sells 9 * 2 = <<9*2=18>>18 a day.\n#### 1,018", source="openai/gsm8k")
    assert problem_of(row, "", domains={"openai/gsm8k": "math"}).golds == ("1018",)
    header_row = make_row(answer="Issue #### of 1018 pages", source="nq")
    assert problem_of(header_row, "").golds == ("Issue #### of 1018 pages",)


def test_options_are_shown_and_a_letter_or_a_text_is_right() -> None:
    problem = problem_of(make_row(options=["1/2", "0.25", "a third", "both A and B"], answer="0.25", source="hle"), "")
    assert problem.question == "2 + 2?\n\nA. 1/2\nB. 0.25\nC. a third\nD. both A and B"
    right = [
        "B",
        "b",
        "(B)",
        "B.",
        "[B]",
        "B. 0.25",
        "(B) 0.25",
        "Option B",
        "The answer is B",
        "0.25",
        r"\frac14",
        "B) 1/4",
    ]
    assert {reply: problem.correctness(reply) for reply in right} == dict.fromkeys(right, 1.0)
    wrong = ["A", "B. 1/2", "A, B", "AB", "E", "", "a third", "both A and B", "0.5", "beta", "not B", "the half"]
    assert {reply: problem.correctness(reply) for reply in wrong} == dict.fromkeys(wrong, 0.0)
    letter_problem = problem_of(make_row(options=["E. coli", "c", "B"], answer="c", source="hle"), "")
    assert [letter_problem.correctness(reply) for reply in ("c", "B", "C", "E. coli")] == [1, 1, 0, 0]
    # Its letter is the article in front of another option's text.
    cities = problem_of(make_row(options=["Rome", "Paris", "Oslo"], answer="Paris", source="hle"), "")
    replies = [
        "The correct answer is B",
        "Final answer: (B)",
        "\uff08B\uff09",
        "{B}",
        "A. Paris",
        "A. Rome",
        "C. Paris",
    ]
    assert [cities.correctness(reply) for reply in replies] == [1, 1, 1, 1, 0, 0, 0]
    # Options with one text are one option.
    twins = problem_of(make_row(options=["7", "5", "5"], answer="B", source="hle"), "")
    assert [twins.correctness(reply) for reply in ("B", "C", "C. 5", "5", "A")] == [1, 1, 1, 1, 0]
    # Options that the question lists itself are not shown twice.
    assert problem_of({"question": LISTED, "answer": ["(B)", "10 eV"], "source": "gpqa"}, "").question == LISTED
