"""The chat template of a tokenizer, rendered in the same way on every day of a run.

Some templates, such as Llama 3.1's, print today's date. A prompt that was sampled on one day would
then be trained on with the date of another, so they get the date at which the run started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from agentr_core.errors import DataFault, ModelDirectoryError
from agentr_core.texts import error_summary

_RANDOM = re.compile(r"\|\s*random\b|\blipsum\s*\(")
"""Jinja's sources of randomness: a filter and a function that no caller can seed."""
DATE_FUNCTION = "strftime_now"
"""The function by which templates ask for the date."""
_DIRECTIVES = (
    *(f"%{sign}{letter}" for sign in ("-", "") for letter in "dmyYHIMSjUWGuVw"),
    *(f"%{letter}" for letter in "aAbBpfzZcxXDFTR"),
    "%%",
)
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{%- set date = namespace(text=format) -%}"
    "{%- for directive, value in agentr_date -%}{%- set date.text = date.text | replace(directive, value) -%}"
    "{%- endfor -%}{{- date.text -}}{%- endmacro %}{{ '' }}"
)
"""A macro `strftime_now` that is put before a template and replaces the function of that name."""


class ChatTemplate:
    """A chat template that renders conversations as text.

    Args:
        at: The moment whose date the template prints; None refuses templates that print one.

    A tokenizer may have several templates by name: `tool_use`, where it is there, renders
    conversations with tools, `default` the others, as in Transformers.

    Raises:
        ModelDirectoryError: there is no template, or none of several is named `default`, or one
            draws random values, or prints the date while `at` is None.
    """

    def __init__(self, tokenizer: Any, at: datetime | None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelDirectoryError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; add chat_template.jinja to its directory"
            )
        self._tokenizer = tokenizer
        templates = tokenizer.chat_template
        if not isinstance(templates, Mapping):
            templates = {"default": templates}
        if "default" not in templates:
            raise ModelDirectoryError(
                f"tokenizer {tokenizer.name_or_path!r} has the chat templates {', '.join(map(str, templates))}, and "
                "none is named default; put the one to use into its chat_template.jinja"
            )
        self._plain_options = _template_options(tokenizer, str(templates["default"]), at)
        self._tools_options = _template_options(tokenizer, str(templates.get("tool_use", templates["default"])), at)

    def render(
        self, turns: Sequence[Mapping[str, str]], *, prompt: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return a conversation as text, with the header of the next reply at its end if `prompt`.

        Args:
            turns: objects with `role` and `content`.
            tools: the definitions of the tools that may be called, as OpenAI's protocol has them.

        Raises `DataFault` when the template refuses the order of the turns, or fails;
        `ModelDirectoryError` when it has a syntax error.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
                **(self._tools_options if tools else self._plain_options),
            )
        except TemplateSyntaxError as error:
            raise ModelDirectoryError(
                f"the chat template of {self._tokenizer.name_or_path!r} is no template ({error.message}, on line "
                f"{error.lineno}); correct it"
            ) from error
        except TemplateError as error:
            raise DataFault(f"the chat template refuses this order of turns: {error}") from error
        # A template from elsewhere may raise any exception.
        except Exception as error:
            raise DataFault(
                f"the chat template cannot render these turns: {error_summary(error)}; correct it"
            ) from error
        return str(text)


def _template_options(tokenizer: Any, source: str, at: datetime | None) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` for the template `source`, with the date of
    `at` if it prints one. Raises `ModelDirectoryError` if it draws random values, or prints the
    date and `at` is None.
    """
    if match := _RANDOM.search(source):
        raise ModelDirectoryError(
            f"the chat template of {tokenizer.name_or_path!r} draws at random ({match[0]!r}), so nothing could be "
            "trained on as it was sampled; remove that from its chat_template.jinja"
        )
    if DATE_FUNCTION not in source:
        return {"chat_template": source}
    if at is None:
        raise ModelDirectoryError(
            f"the chat template of {tokenizer.name_or_path!r} prints the date, and no run says which; start the "
            "run first, or write a fixed date into its chat_template.jinja"
        )
    date = [[directive, at.strftime(directive)] for directive in _DIRECTIVES]
    return {"chat_template": _FIXED_DATE + source, "agentr_date": date}
