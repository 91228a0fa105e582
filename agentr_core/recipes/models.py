"""The sections of a recipe that say which models there are and how they are run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from itertools import pairwise
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from agentr_core.fingerprint import later_field
from agentr_core.recipes.fields import BeyondProtocol, Count, Natural, Positive, Unit, record

# Secrets in a recipe's data: given as names of environment variables, since recipes are stored and
# shown.

# To mask them in the store would not do: a resumed run would send the mask.
_REFERENCE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
"""A reference to an environment variable, which must be the whole text, such as `${SEARCH_KEY}`."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SECRET_WORDS = frozenset(
    (
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "pat",
        "secret",
        "secrets",
    )
)
_KINDS_OF_KEY = frozenset(("access", "account", "api", "auth", "encryption", "private", "secret", "service", "signing"))
_KINDS_OF_TOKEN = frozenset(("access", "api", "auth", "bearer", "id", "refresh", "secret", "session", "user"))
_SECRET_VALUE = re.compile(
    r"(?i:bearer|basic)\s+\S{8,}|([spr]k[-_]|hf_|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|eyJ)[-.\w]{12,}"
)
MASK = "***"


def references(data: Any) -> tuple[str, ...]:
    """Return the names of the environment variables that data refers to, sorted."""
    names = {match[1] for _, text in _walk_texts(data, ()) if (match := _REFERENCE.fullmatch(text))}
    return tuple(sorted(names))


def fill_references(data: Any, values: Mapping[str, str]) -> Any:
    """Return data with each reference replaced by the value of its variable. Raises `KeyError` if a
    variable is not set.
    """

    def fill(path: tuple[str, ...], text: str) -> str:
        match = _REFERENCE.fullmatch(text)
        return text if match is None else values[match[1]]

    return map_texts(data, fill)


def secret_names(data: Any) -> tuple[str, ...]:
    """Return the dotted names of texts in data that look like secrets, by name or by form."""
    return tuple(".".join(path) for path, text in _walk_texts(data, ()) if _is_secret(path, text))


def mask_secrets(data: Any) -> Any:
    """Return data in which everything that looks like a secret is replaced by `***`."""
    return map_texts(data, lambda path, text: MASK if _is_secret(path, text) else text)


def _is_secret(path: tuple[str, ...], text: str) -> bool:
    if not text or _REFERENCE.fullmatch(text):
        return False
    return bool(_SECRET_VALUE.fullmatch(text.strip())) or any(map(_is_secret_name, path))


def _is_secret_name(name: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if _SECRET_WORDS.intersection(words) or words in (["key"], ["token"]):
        return True
    return any(
        (second == "key" and first in _KINDS_OF_KEY) or (second == "token" and first in _KINDS_OF_TOKEN)
        for first, second in pairwise(words)
    )


def _walk_texts(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _walk_texts(value, (*path, str(key)))
    elif isinstance(data, list | tuple):
        for position, value in enumerate(data):
            yield from _walk_texts(value, (*path, str(position)))
    elif isinstance(data, str):
        yield path, data


def map_texts(data: Any, change: Callable[[tuple[str, ...], str], str], path: tuple[str, ...] = ()) -> Any:
    """Return data with each text changed, given the path of its keys."""
    if isinstance(data, Mapping):
        return {key: map_texts(value, change, (*path, str(key))) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [map_texts(value, change, (*path, str(position))) for position, value in enumerate(data)]
    return change(path, data) if isinstance(data, str) else data


_VARIABLE = r"^([A-Z][A-Z0-9_]*)?$"
"""The name of an environment variable, or none. Capitals only, so that a key put there by mistake
is refused.
"""
_RESERVED_FIELDS = frozenset(
    ("model", "messages", "n", "seed", "stop", "temperature", "top_p", "logprobs", "stream", "return_token_ids")
)

ModelRole = Literal["actor", "judge", "reflector", "editor", "summariser", "teacher", "scorer"]
Dtype = Literal["auto", "float32", "bfloat16"]


@record
class ServerConfig:
    """A model behind an OpenAI-compatible server, and how it is queried (backend `openai`)."""

    model: str = ""
    """The model's name on the server."""
    base_url: str = ""
    """The address up to and including `/v1`. Empty: the value of the environment variable that
    `base_url_env` names.
    """
    base_url_env: Annotated[str, Field(pattern=_VARIABLE)] = "OPENAI_BASE_URL"
    """The environment variable with the address. An address from there is not part of a run's
    identity: the run goes on when the server has moved.
    """
    api_key_env: Annotated[str, Field(pattern=_VARIABLE)] = "OPENAI_API_KEY"
    """The environment variable that holds the key; empty for a server that needs none."""
    tokenizer: str = ""
    """A directory with the model's tokenizer and chat template, to count prompt tokens. Without one
    they are estimated at three bytes per token."""
    concurrency: Count = 64
    """The most requests in flight at once."""
    connect_seconds: Positive = 10.0
    timeout_seconds: Positive = 600.0
    """The most seconds that one try of a request may take."""
    answer_mib: Count = later_field(64)
    """The most MiB of an answer, unpacked: larger ones are not read to their end. A token takes
    about 5 bytes, with its log-probability 100."""
    max_retries: Natural = 8
    """Further tries after a transient fault: 408, 409, 429, 5xx, a broken connection, a malformed
    reply.
    """
    retry_seconds: Positive = 300.0
    """No further try begins later than this many seconds after the first one."""
    n_per_request: Natural = 0
    """The most replies asked for in one request; 1 for a server that ignores `n`. 0: all that are
    wanted.
    """
    send_seed: bool = True
    """Whether each request carries its seed, of up to 63 bits; without seeds, replies are not
    reproducible.
    """
    token_ids: bool = False
    """Whether token ids are asked for, in vLLM's way (`return_token_ids`)."""
    continues: bool = later_field(False)
    """Whether the server can go on with an unfinished assistant turn and keep stop strings, in
    vLLM's way (`continue_final_message`, `include_stop_str_in_output`). Worlds of one growing turn
    need it."""
    sampling_fields: tuple[BeyondProtocol, ...] = later_field(())
    """Which sampling fields beyond OpenAI's protocol the server accepts, in vLLM's way. Every
    request then carries them, so that no default of the server replaces them; the others are never
    sent, since a server may refuse unknown fields."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as `chat_template_kwargs: {enable_thinking: false}`. A
    text that is exactly `${VARIABLE}` stands for the value of that environment variable: recipes
    are stored and shown, so secrets are written this way."""


@record
class PricesConfig:
    """The prices of a served model per million tokens, in any one currency."""

    prompt: Annotated[float, Field(ge=0)] = 0.0
    completion: Annotated[float, Field(ge=0)] = 0.0


@record
class VllmConfig:
    """The managed vLLM servers of backend `vllm`."""

    replicas: Count = 1
    """Servers of the same model; requests of one tree or episode go to the same one."""
    tensor_parallel_size: Count = 1
    """GPUs of each replica."""
    gpus: tuple[Natural, ...] = later_field(())
    """The GPUs of all replicas, by their numbers among those that the process sees; empty: as many
    as are needed, from the first one on. A second model needs other GPUs than the first, or part of
    the memory of the same ones. Not part of a run's identity."""
    gpu_memory_utilization: Unit = 0.9
    """Share of a GPU's memory that a replica takes; no effect on a CPU."""
    sleep: bool = later_field(False)
    """Whether group RL and its sampler take turns on their GPUs: vLLM gives its memory back while
    the policy is trained, which waits in main memory while vLLM samples. The weights are read again
    after each step in any case. Not part of a run's identity. Run on no GPU so far."""
    kv_cache_gib: Count = 1
    """Memory of each replica for keys and values on a CPU, in GiB."""
    num_threads: Count = 1
    """Threads of each replica on a CPU."""
    enforce_eager: bool | None = None
    """Whether the model is run without being compiled; by default on a CPU only, where compiling
    takes a minute.
    """
    seeds: bool = True
    """Whether each reply has a random stream of its own, so that it is reproducible; on a CPU
    prefill is then not chunked.
    """
    start_timeout: Positive = 900.0
    """Seconds in which a replica must answer after its start."""
    request_timeout: Positive = 600.0
    """Seconds in which a request must be answered."""
    answer_mib: Count = later_field(64)
    """The most MiB of an answer; a token takes about 10 bytes, with its log-probability 30."""
    restarts: Natural = 3
    """How often a replica that has died is restarted."""
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further options of the server under their own names, such as `max-num-seqs: 256`."""

    @property
    def gpu_numbers(self) -> tuple[int, ...]:
        """The GPUs of all replicas, by their numbers."""
        return self.gpus or tuple(range(self.replicas * self.tensor_parallel_size))


@record
class ModelConfig:
    """A model, and how it is run."""

    backend: Literal["transformers", "vllm", "openai"] = "transformers"
    path: str = ""
    """A Hugging Face model directory, relative to the working directory."""
    # A phase after another is a second run, not a recipe of two methods, which would read the same
    # sections in different ways. What an unfinished run promotes could still change.
    from_run: str = later_field("")
    """The id of a finished run in the same workspace, or the beginning of the id: when the recipe
    is loaded, the checkpoint that this run would go on from replaces `path`."""
    dtype: Dtype = "float32"
    """`auto` is bfloat16 where the GPU or processor computes it fast, otherwise float32. The type
    chosen is part of a run's identity."""
    device: str = "auto"
    max_batch: Count = 128
    """The most sequences decoded at once. With backend vllm only a hint for how many trees and
    episodes are kept in flight: its servers decode as many as `vllm.options: {max-num-seqs: ...}`
    allows."""
    prefix_cache_gib: Annotated[float, Field(ge=0)] = 1.0
    """Memory for keys and values of prompt beginnings that may occur again, in GiB (backend
    `transformers`). Hundreds of trees need room for the path of each: a 4B model takes 144 KiB per
    token, so 1 GiB holds 7,000 tokens. 0 keeps none. Not part of a run's identity."""
    workers: Count | Literal["auto"] = 1
    """Processes that share the work of backend `transformers`. `auto`: one for each processor, with
    one thread each, or one for each GPU. Small models gain from this, since threads of one process
    wait for each other at every operation. A model whose matrix products keep all processors busy
    does not, and each process holds all weights. Not part of a run's identity."""
    # No limit on batches, which may take an hour, and no heartbeat from another thread, which goes
    # on while the computation stands still.
    worker_timeout: Annotated[float, Field(ge=1)] = later_field(600.0)
    """Seconds after which a worker that begins no forward pass counts as hung. It is then replaced,
    as one that dies is, and what it was asked is asked again. Loading its weights must take less,
    too. Not part of a run's identity."""
    context_length: Natural = 0
    """0: as the model's own configuration, or its server, says. A server's context is never
    exceeded.
    """
    vllm: VllmConfig = VllmConfig()
    server: ServerConfig = ServerConfig()
    prices: PricesConfig = PricesConfig()

    @property
    def shares_gpus(self) -> bool:
        """Whether this model leaves its GPUs to group RL while that trains."""
        return self.backend == "vllm" and self.vllm.sleep

    @property
    def label(self) -> str:
        """The model's name in a report: its directory, or its name on the server."""
        return self.server.model if self.backend == "openai" else self.path

    def faults(self, section: str) -> list[str]:
        """Return what is wrong with the section of a model, one sentence each."""
        if self.backend != "vllm" and self.vllm != VllmConfig():
            return [f"{section}.vllm: only backend vllm has these settings; set {section}.backend"]
        faults = []
        if section == "models.scorer":
            unread = ("max_batch", "prefix_cache_gib", "workers", "worker_timeout")
            changed = [name for name in unread if getattr(self, name) != getattr(ModelConfig(), name)]
            faults += [f"{section}.{name}: a scorer samples nothing; leave it out" for name in changed]
            if self.backend != "transformers":
                faults.append(
                    f"{section}.backend: given tokens are scored in the process that trains; set transformers, and "
                    f"name a directory in {section}.path"
                )
        if section != "model":
            if self.from_run:
                faults.append(f"{section}.from_run: only the actor goes on from a run; give a path")
            if self.vllm.sleep:
                faults.append(f"{section}.vllm.sleep: only the actor sleeps while it is trained; leave it out")
        if self.backend != "transformers" and self.prefix_cache_gib != ModelConfig().prefix_cache_gib:
            faults.append(
                f"{section}.prefix_cache_gib: only backend transformers has this cache; leave it out, or set "
                f"{section}.backend"
            )
        if self.backend != "transformers" and self.workers not in (1, "auto"):
            faults.append(
                f"{section}.workers: only backend transformers has workers; leave it out, or set {section}.backend"
                + (" (vllm has vllm.replicas)" if self.backend == "vllm" else "")
            )
        if self.backend != "transformers" and self.worker_timeout != ModelConfig().worker_timeout:
            faults.append(
                f"{section}.worker_timeout: only backend transformers has workers; leave it out, or set "
                f"{section}.backend"
            )
        if self.backend != "openai":
            if not (self.path or self.from_run):
                faults.append(f"{section}.path: name the directory of the model")
            if self.server != ServerConfig():
                faults.append(f"{section}.server: only backend openai has a server; set {section}.backend")
            return faults
        if section == "models.teacher" and self.server.token_ids:
            faults.append(f"{section}.server.token_ids: the trained model has a tokenizer of its own; leave it out")
        if not self.server.model:
            faults.append(f"{section}.server.model: name the model as its server does")
        if self.from_run:
            faults.append(f"{section}.from_run: checkpoints of runs are not served by others; leave it out")
        if self.path:
            faults.append(f"{section}.path: a served model has none; {section}.server.tokenizer is for counting tokens")
        reserved_fields = _RESERVED_FIELDS | {self.server.max_tokens_field} | {*self.server.sampling_fields}
        if conflicts := sorted(reserved_fields & self.server.extra_body.keys()):
            faults.append(f"{section}.server.extra_body: {', '.join(conflicts)} is set by other fields of the recipe")
        if self.server.base_url and (address_fault := url_fault(self.server.base_url)):
            faults.append(f"{section}.server.base_url: {address_fault}")
        return faults

    def secret_faults(self, section: str) -> list[str]:
        """Return one sentence for each secret that is written out in a model's section; no sentence
        repeats the secret.
        """
        return [
            f"{section}.server.extra_body.{name}: this looks like a secret, and recipes are stored and shown; write "
            "${VARIABLE}, with the name of an environment variable that holds it, and begin a new run"
            for name in secret_names(self.server.extra_body)
        ]


@record
class ModelsConfig:
    """Models that take over a role from the actor. The actor fills each role without a model of its
    own.
    """

    judge: ModelConfig | None = None
    """Says which step of a bad path is the first error, or whether an answer means the right
    one."""
    reflector: ModelConfig | None = later_field(None)
    """Reviews a wrong trajectory and corrects a step of it (method et-agent)."""
    editor: ModelConfig | None = None
    """Finds steps of trajectories and rewrites them (method et-agent)."""
    summariser: ModelConfig | None = None
    """Says what the documents of a search say about its query (world reasoning, option
    `summarised`)."""
    teacher: ModelConfig | None = later_field(None)
    """Plays the training instances in the actor's place where experience is collected, and answers
    there for roles without a model of their own. The actor is trained on the text of the teacher's
    replies, in its own tokens, and it is the one that is evaluated. `teacher_iterations` says for
    how long."""
    scorer: ModelConfig | None = later_field(None)
    """Gives the log-probabilities of the tokens that the policy sampled (`grpo.distil`): a model
    directory with the policy's tokenizer. Without one, it is the model that the run begins with."""


# Users name the GPUs: which of them a training or another run takes is not known here.
def gpu_faults(models: Mapping[str, ModelConfig]) -> list[str]:
    """Return what is wrong with the GPUs of served models, given by their sections, one sentence
    each. Identical models share a server, except with the actor, whose weights change.
    """
    faults: list[str] = []
    by_section: dict[str, ModelConfig] = {}
    for section, model in models.items():
        vllm = model.vllm
        if vllm.gpus and len(set(vllm.gpus)) != vllm.replicas * vllm.tensor_parallel_size:
            num_gpus = vllm.replicas * vllm.tensor_parallel_size
            faults.append(f"{section}.vllm.gpus: name the {num_gpus} GPUs of all replicas, each once")
        if model in [other for name, other in by_section.items() if name != "model"]:
            continue
        for name, other in by_section.items():
            common = sorted(set(vllm.gpus) & set(other.vllm.gpus))
            if common and vllm.gpu_memory_utilization + other.vllm.gpu_memory_utilization > 1:
                faults.append(
                    f"{section}.vllm.gpus: GPU {common[0]} is that of {name}, too, and both want more than all of its "
                    f"memory; name another, or lower {section}.vllm.gpu_memory_utilization"
                )
        by_section[section] = model
    return faults


def url_fault(url: str, *, example: str = "http://localhost:8000/v1") -> str:
    """Return what is wrong with the address of a server, or the empty string; secrets in it are not
    repeated.
    """
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port != 0
    except ValueError:
        return f"this is not an address; it must look like {example}"
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return "an address holds no user, password or query, since it is stored; put the key in an environment variable"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        return f"{url!r} is not an address; it must look like {example}"
    return ""
