#!/usr/bin/env bash
# A model on torch's meta device gets LoRA adapters by `get_peft_model`, to count what would be
# trained or to see whether the names of its target modules match. All parameters of the result are
# on the meta device, too.
#
# One would assume: nothing is drawn, since nothing has memory; so it takes no time, and torch's
#   generator stands where it stood.
# What happens: each adapter is first made on the CPU, with Kaiming's random numbers, and only then
#   moved to the meta device, which throws them away. It takes about ten times as long as with
#   `low_cpu_mem_usage=True` (for rank 64 on all layers of a model of 72 billion parameters 842
#   million numbers: 16 seconds in place of 1.5), and the generator has moved: what is drawn after
#   it from the same seed differs.
# Versions: peft 0.21.2, torch 2.13.0, transformers 5.24.0, Python 3.11.
# Why it matters: a plan or a check of a configuration, which reads no weight, is slow by a step
#   that looks free, and grows with the rank; and a program that checks its adapters in this way
#   before it draws its own draws other numbers than one that does not.
#
# Needs python3.11 and a registry of packages. Takes about two minutes, most of it for the
# installation.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
cat > "$work/trial.py" <<'PY'
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

shape = Qwen2Config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, vocab_size=1000)
seconds, moved, drawn = {}, {}, {}
for low in (False, True):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    torch.manual_seed(0)
    before, started = torch.random.get_rng_state(), time.process_time()
    adapted = get_peft_model(model, LoraConfig(r=64, target_modules="all-linear"), low_cpu_mem_usage=low)
    seconds[low] = time.process_time() - started
    moved[low] = not torch.equal(before, torch.random.get_rng_state())
    drawn[low] = torch.rand(1).item()
    assert {parameter.device.type for parameter in adapted.parameters()} == {"meta"}
    print(f"low_cpu_mem_usage={low}: {seconds[low]:.2f} s, generator moved: {moved[low]}, next number: {drawn[low]:.6f}")
assert moved == {False: True, True: False}, "this has changed"
assert drawn[False] != drawn[True] and seconds[False] > 2 * seconds[True], "this has changed"
PY
"$work/venv/bin/python" "$work/trial.py"
