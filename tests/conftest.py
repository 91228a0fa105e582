"""Fixtures shared by all tests: a tiny random model directory, built once a session from real
files.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agentr_core.store.database import Store

# Torch reads it when it is imported. Tests run in several processes, each of which would take a
# thread for every core; threads wait for each other at each operation, and spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What tests import stays: the garbage collector need not look through it, now or later.
gc.disable()

# A machine with a GPU that runs tests/gpu alone need not have it.
with suppress(ModuleNotFoundError):
    from hypothesis import settings

    # The same examples each time, and as long as a busy machine takes for them.
    settings.register_profile("repeatable", max_examples=30, deadline=None, derandomize=True)
    # `make test-all`: others each time.
    settings.register_profile("thorough", max_examples=300, deadline=None, print_blob=True)
    settings.load_profile("repeatable")

UNIT_FOLDERS = {"core", "golden", "properties"}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "Craft a wooden table. Thought: I need four oak planks first.\nAction: get 2 oak log",
    "Action: craft 4 oak planks using 1 oak log\nObservation: Got 2 oak log. Could not find stick.",
    "Judge the last step. Good, bad or uncertain? The naïve agent — café, 東京 — repeats itself.",
)


def make_tokenizer(vocabulary: int = 384, template: str | None = CHATML) -> Any:
    """Return a byte-level BPE tokenizer with ChatML's special tokens, trained on three lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = template
    return fast


def make_model_dir(path: Path, *, context: int = 512, template: str | None = CHATML, **options: int) -> Path:
    """Save a tiny random Llama with its tokenizer; `options` are fields of `LlamaConfig`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(template=template)
    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": len(tokenizer),
    }
    config = LlamaConfig(
        **(fields | options),
        max_position_embeddings=context,
        # Wide weights make a random model prefer some tokens clearly, as a trained one does.
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_windowed_model(path: Path, *, architecture: str = "Qwen3", **options: Any) -> Path:
    """Save a tiny random model whose layers, or some of them, see the last five tokens only."""
    import torch
    import transformers

    tokenizer = make_tokenizer()
    config = getattr(transformers, f"{architecture}Config")(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        head_dim=16,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **({"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 5} | options),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def save_windowed_model() -> Callable[..., Path]:
    """Return `make_windowed_model`, for tests that need a window of another size."""
    return make_windowed_model


@pytest.fixture(scope="session")
def all_windowed_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory in which every layer sees the last five tokens only."""
    return make_windowed_model(tmp_path_factory.mktemp("models") / "all-windowed", architecture="Mistral")


@pytest.fixture(scope="session")
def windowed_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory in which a layer that sees the last five tokens precedes one that sees
    all.
    """
    kinds = ["sliding_attention", "full_attention"]
    path = tmp_path_factory.mktemp("models") / "windowed"
    return make_windowed_model(path, use_sliding_window=True, layer_types=kinds)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with ChatML template: two layers, hidden size 64, context of 512 tokens."""
    return make_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def save_tiny_model() -> Callable[..., Path]:
    """Return `make_model_dir`, for tests that need a model of another shape."""
    return make_model_dir


@pytest.fixture(scope="session")
def door_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package of the door, the world of `tests/support/door.py`."""
    import door

    return door.install(tmp_path_factory.mktemp("packages") / "site")


@pytest.fixture(scope="session")
def door_installed(door_site: Path) -> Iterator[None]:
    """The door among the environments of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(door_site))
        yield


@pytest.fixture(scope="session")
def door_model(save_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for long prompts."""
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "door", context=4096, hidden_size=32, intermediate_size=64
    )


@pytest.fixture(scope="session")
def make_tiny_tokenizer() -> Callable[..., Any]:
    """Return `make_tokenizer`, for tests that need another chat template."""
    return make_tokenizer


@pytest.fixture
def open_store() -> Iterator[Callable[[Path], Store]]:
    """Return a maker of stores whose file stays open between bursts until the test ends, as in a
    flow.
    """
    from agentr_core.store.database import Store

    with ExitStack() as stack:

        def make(path: Path) -> Store:
            store = Store(path)
            stack.enter_context(store.keep_open())
            return store

        yield make


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On this machine no level of the Python tool keeps code from files, and none is known yet."""
    from agentr_core.environments.reasoning import toolbox
    from agentr_core.errors import SandboxError
    from agentr_core.tools.python.confinement import Level
    from agentr_core.tools.python.tool import ForkServerProcess

    start = ForkServerProcess.start

    async def weak(level: Level, *others: Any) -> ForkServerProcess:
        if level.includes(Level.LANDLOCK):
            raise SandboxError(f"level {level} is not here")
        return await start(level, *others)

    monkeypatch.setattr(ForkServerProcess, "start", weak)
    toolbox._shared_python.cache_clear()
    yield
    toolbox._shared_python.cache_clear()


def tier_of(item: pytest.Item) -> str:
    """Return what a test costs: `unit` milliseconds, `process` a program, a server, a training or a
    quarter of a second and more, `flow` a whole run.
    """
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    if folder == "flows":
        return "flow"
    return "unit" if folder in UNIT_FOLDERS and item.get_closest_marker("slow") is None else "process"


def pytest_configure(config: pytest.Config) -> None:
    """Start the warm process (`support/warm`), once for all processes of the tests. On a machine
    with a GPU there is none, for CUDA does not survive a fork, nor on one without Linux.
    """
    if hasattr(config, "workerinput") or Path("/dev/nvidiactl").exists() or not Path("/proc/self/ns/mnt").exists():
        return
    folder = Path(__file__).parent / "support" / "warm"
    paths = [str(folder), str(folder.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    socket = Path(tempfile.mkdtemp(prefix="warm-")) / "socket"
    command = [sys.executable, str(folder / "warm_server.py"), str(socket)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    os.environ |= {"WARM_PROCESS": str(socket), "WARM_MOUNTS": str(Path("/proc/self/ns/mnt").readlink())}

    def end() -> None:
        process.communicate()
        socket.parent.rmdir()

    config.add_cleanup(end)


def pytest_collection_finish() -> None:
    """Let the garbage collector work from here on, on what tests make."""
    gc.freeze()
    gc.enable()


# Before pytest itself leaves out what `-m` does not ask for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and put whole flows first: they take longest, and workers that
    get them last do not end together.
    """
    for item in items:
        item.add_marker(tier_of(item))
    items.sort(key=lambda item: item.get_closest_marker("flow") is None)
