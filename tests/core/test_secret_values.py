"""Secrets in `extra_body`: sent, but neither stored nor shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentr_core.errors import ConfigError, EndpointError
from agentr_core.methods.faults import parse
from agentr_core.models.openai.chat import OpenAIModel, make_endpoint
from agentr_core.models.openai.wire import request_bodies
from agentr_core.recipes.models import fill_references, mask_secrets, references, secret_names
from agentr_core.recipes.recipe import display_data, resolved
from agentr_core.types import Message, Request, Sampling

SECRET = "tok-7b1e99c2d0f4"


def recipe(extra: Any, **options: Any) -> Any:
    server = {"model": "m", "base_url": "http://localhost:1/v1", "api_key_env": "", "extra_body": extra}
    return parse({"name": "n", "model": {"backend": "openai", "server": server}}, **options)


@pytest.mark.parametrize(
    "extra",
    [
        {"api_key": SECRET}, {"apiKey": SECRET}, {"search": {"access_token": SECRET}}, {"token": SECRET},
        {"headers": [{"Authorization": SECRET}]}, {"password": SECRET}, {"note": f"Bearer {SECRET}"},
        {"x": f"sk-{SECRET}"}, {"hook": {"clientSecret": SECRET}},
    ],
)  # fmt: skip
def test_a_secret_that_is_written_out_is_refused_and_not_repeated(extra: dict[str, Any]) -> None:
    (name,) = secret_names(extra)
    with pytest.raises(ConfigError, match=r"model\.server\.extra_body\.\S+: this looks like a secret") as caught:
        recipe(extra)
    assert name in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET not in json.dumps(mask_secrets(extra))


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template_kwargs": {"enable_thinking": False}}, {"min_tokens": 1, "stop_token_ids": [3]},
        {"user": "me"}, {"prompt_cache_key": "run-1"}, {"style": "skipping_long_words"}, {"eos_token": "<|end|>"},
        {"guided_regex": "hello there"}, {"repetition_penalty": 1.1}, {"api_key": "${SEARCH_KEY}"}, {"api_key": ""},
    ],
)  # fmt: skip
def test_other_fields_are_let_be(extra: dict[str, Any]) -> None:
    assert recipe(extra).model.server.extra_body == extra
    assert mask_secrets(extra) == extra


@pytest.mark.slow
def test_a_variable_is_sent_and_neither_stored_nor_shown() -> None:
    extra = {"search": {"api_key": "${SEARCH_KEY}", "hits": 3}, "tags": ["${TAG}", "x"]}
    secret_recipe = recipe(extra)
    endpoint = make_endpoint(secret_recipe.model.server, {"SEARCH_KEY": SECRET, "TAG": "t"})
    model = OpenAIModel(endpoint, secret_recipe.model.server, context_length=100)
    request = Request(messages=(Message(role="user", text="hi"),), sampling=Sampling(), seed=0)
    (body,) = request_bodies(request, model._server, 9)
    assert body["search"] == {"api_key": SECRET, "hits": 3}
    assert body["tags"] == ["t", "x"]
    assert SECRET not in json.dumps([resolved(secret_recipe), display_data(secret_recipe)]) + repr(endpoint)
    assert endpoint.redact(f"you sent {SECRET}") == "you sent ***"
    second_model = OpenAIModel(
        make_endpoint(secret_recipe.model.server, {"SEARCH_KEY": "k", "TAG": "t"}),
        secret_recipe.model.server,
        context_length=9,
    )
    assert second_model.fingerprint == model.fingerprint


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(EndpointError, match="refers to the environment variable SEARCH_KEY, which is not set"):
        make_endpoint(recipe({"q": "${SEARCH_KEY}"}).model.server, {})
    assert references({"a": ["${B}", "${A}", "no ${C}", "${small}"]}) == ("A", "B")
    with pytest.raises(KeyError):
        fill_references("${A}", {})


def test_a_recipe_that_was_stored_with_a_secret_still_opens_and_is_shown_masked() -> None:
    old = recipe({"api_key": SECRET}, stored=True)
    assert display_data(old)["model"]["server"]["extra_body"] == {"api_key": "***"}
    assert resolved(old)["model"]["server"]["extra_body"] == {"api_key": SECRET}, "its id stays"


def test_no_error_about_extra_body_repeats_it() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(SECRET)
    assert "extra_body" in str(caught.value)
    assert SECRET not in str(caught.value)
    for override in (f"model.server.extra_body.api_key=[{SECRET}", f"model.server.extra_body={{api_key: {SECRET}}}"):
        with pytest.raises(ConfigError) as caught:
            recipe({}, overrides=[override])
        assert SECRET not in str(caught.value)
