"""The section `base.questions` of a recipe: what a tiny base model for the world `reasoning` is
trained on.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentr_core.recipes.fields import Count, Natural, Unit, record


@record
class QuestionsConfig:
    """Generated questions, and the habits shown by their answers.

    Shares of habits are means over the forms of questions ("What is the profession", "How many
    prime numbers"): each form has its own share, drawn between 0 and twice the mean.
    """

    numbers_share: Unit = 0.4
    """Share of the questions that are number problems; the others are about an encyclopaedia."""
    hops: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 1, 2, 1, 2, 3)
    """The numbers of hops of the questions about an encyclopaedia, in turn."""
    people: Annotated[int, Field(ge=20)] = 60
    """People in an encyclopaedia. Each encyclopaedia has its own invented universe."""
    towns: Annotated[int, Field(ge=12)] = 12
    questions: Count = 64
    """Questions asked about one universe."""
    top_k: Count = 1
    """Documents that a search returns."""
    document_chars: Count = 1200
    guess_share: Unit = 0.0
    """Share of the questions that are answered without any call, usually wrongly."""
    early_share: Unit = 0.0
    """Share of the questions of several hops whose search ends before the last hop: the answer is
    what was found so far.
    """
    repeat_share: Unit = 0.0
    """Chance that a call is repeated, and then repeated once more."""
    detour_share: Unit = 0.0
    """Chance that, after a look-up, something is looked up that the question does not require."""
    malformed_share: Unit = 0.0
    """Share of the episodes whose last reply breaks the format; the same for all forms."""
    plain: Natural = 0
    """This many samples at the beginning have no habits, so that the model first learns to read."""
    tokenizer_samples: Count = 800
    """Samples whose text the tokenizer is trained on."""
    vocabulary: Annotated[int, Field(ge=300)] = 1500
    """Tokens of the tokenizer, besides the instruction."""
