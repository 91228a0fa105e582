"""The table of defects of ET-Agent's published code, and the acceptance checks of the method.

The checks, and the tests that make them:

the numbers of the reward and of the advantages
  test_efficiency_reward.py::test_the_numbers_of_the_method
Pareto fronts, and what is picked without and with the filter of mixed groups
  test_pareto_selection.py::test_the_example_of_the_method
  test_pareto_selection.py::test_the_filter_of_mixed_groups_comes_before_the_choice
chances of a branch
  test_branching.py::test_the_chances_of_the_method
tags: an unclosed call, a result without a call, two answers, a box outside the answer
  test_reasoning_grammar.py::test_a_broken_format_is_named
text after the answer
  test_reasoning_grammar.py::test_the_strict_format_asks_for_more
nested braces in a box
  test_reasoning_grammar.py::test_the_final_answer
a run that was killed ends with the tables of one that was not: flywheel and fine-tuning's selection
  test_et_agent.py::test_killed_it_goes_on_from_what_is_stored
rollouts, selection and reinforcement learning
  test_curriculum.py::test_killed_before_its_training_and_in_it_a_stage_ends_as_if_it_had_not_been
evaluation
  test_curriculum.py::test_two_stages_run_from_their_plan_to_their_report
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "agentr_core" / "methods" / "et_agent" / "DEFECTS.md"
NAMED = re.compile(r"[\w/]*test_\w+\.py::test_\w+")


def exists(name: str) -> bool:
    file, _, test = name.partition("::")
    files = [TESTS / file] if "/" in file else list(TESTS.rglob(file))
    return any(
        path.is_file() and re.search(rf"^(async )?def {test}\(", path.read_text(encoding="utf-8"), re.M)
        for path in files
    )


def test_every_defect_has_a_test_that_is_there() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]
    assert [int(number) for number, *_ in rows] == list(range(1, 26))
    for number, _, _, tests in rows:
        names = NAMED.findall(tests)
        assert names, number
        assert len(names) == tests.count("`") // 2, f"row {number} names something else"


def test_what_is_named_is_there() -> None:
    names = {*NAMED.findall(PAGE.read_text(encoding="utf-8")), *NAMED.findall(__doc__ or "")}
    assert len(names) > 40
    assert not [name for name in names if not exists(name)]
