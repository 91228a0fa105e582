"""The text of a reply that is being written: what further tokens cannot take back."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from agentr_core.models.local.waves import cut_at_stop, stable_text
from agentr_core.types import Sampling

WORDS = st.text(alphabet="ab\n", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=2)


@given(WORDS, STOPS, st.booleans(), st.sampled_from(["", "b+a"]))
def test_each_beginning_that_was_safe_begins_the_whole(text: str, stops: list[str], kept: bool, until: str) -> None:
    sampling = Sampling(stop=tuple(stops), include_stop=kept, until=until)
    whole = cut_at_stop(text, sampling)
    safe = [stable_text(text[:size], sampling) for size in range(len(text) + 1)]
    # Where a pattern matches a longer text otherwise, sampling has ended before.
    end = next((size for size in range(len(text)) if until and re.search(until, text[:size])), len(text))
    assert all(whole.startswith(prefix) for prefix in safe[: end + 1])


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    sampling = Sampling(stop=("Observation:", "\n\n"))
    assert stable_text("Action: look\nObs", sampling) == "Action: look\n"
    assert stable_text("Action: look\n", sampling) == "Action: look"
    assert stable_text("Action: look", sampling) == "Action: look"
    assert stable_text("Action: \N{REPLACEMENT CHARACTER}", sampling) == "Action: "
