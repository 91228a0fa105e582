"""What a summariser is asked, and what is read from its reply."""

from agentr_core.tools.search.tool import HEADING, NO_HELP, format_reasoning, read_summary, summary_question


def test_a_question_has_query_documents_and_reasoning() -> None:
    question = summary_question("who is Ada?", "Ada\nlives by the {sea}.", ["I look for Ada."])
    assert question.role == "summariser"
    (message,) = question.messages
    assert (message.role, message.train) == ("user", False)
    for part in ("who is Ada?", "lives by the {sea}.", "1. I look for Ada.", HEADING, NO_HELP):
        assert part in message.text


def test_a_question_is_bounded() -> None:
    short = summary_question("q", "", [])
    long = summary_question("q", "d" * 10**6, ["r" * 10**6])
    assert len(long.messages[0].text) - len(short.messages[0].text) <= 28_000


def test_of_many_entries_the_first_and_the_last_four_are_told() -> None:
    assert format_reasoning([]) == ""
    assert format_reasoning(list("abcde")) == "1. a\n2. b\n3. c\n4. d\n5. e"
    assert format_reasoning(list("abcdefg")) == "1. a\n[...]\n4. d\n5. e\n6. f\n7. g"
    assert format_reasoning(["x" * 100, "end"], 20).endswith("xx\n2. end")
    assert len(format_reasoning(["x" * 100, "end"], 20)) == 20


def test_what_follows_the_last_heading_is_the_summary() -> None:
    assert read_summary(f"Let me see. {HEADING} or so.\n{HEADING}\n Ada is 30. ") == "Ada is 30."
    assert read_summary(" Ada is 30. ") == "Ada is 30."
    assert read_summary(f"x {HEADING}") == read_summary("") == NO_HELP
    assert read_summary(f"{HEADING} {'x' * 100}", max_chars=10) == "x" * 7 + "..."
