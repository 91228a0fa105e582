#!/usr/bin/env bash
# A decode step multiplies a query with the keys that a preallocated cache holds so far, `cache[:, :, :length]`.
#
# One would assume: the product with this slice takes at most as long as the product with the whole cache.
# What happens: in bfloat16 on a processor that multiplies it in hardware, the slice takes several times as long as the whole
#   cache, though it has fewer columns, and so does the product of weights and values. A slice of one head's columns is no
#   longer a batch with one distance between its matrices, and such products leave the fast path. In float32 both take the
#   same time.
# Versions: torch 2.13.0, Linux on x86-64 with avx512_bf16 or amx_bf16; on others it says so and ends.
# Why it matters: static caches are allocated for the longest text and sliced at each step, which is meant to save work. It is
#   faster to read all columns and mask those that are not in use, or to let the fused attention read the slice.
#
# Needs python3.11 on Linux and a registry of packages. Takes about two minutes, most of it for the installation.
set -euo pipefail
if ! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
    echo "this processor does not multiply bfloat16 in hardware: nothing to see here"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$work/trial.py" <<'PY'
import time

import torch

torch.set_num_threads(1)
ROWS, HEADS, COLUMNS, SIZE, USED = 32, 4, 1024, 64, 960


def milliseconds(product):
    times = []
    for _ in range(12):
        started = time.perf_counter()
        product()
        times.append(1000 * (time.perf_counter() - started))
    return min(times[2:])


ratios = {}
for dtype in (torch.float32, torch.bfloat16):
    query = torch.randn(ROWS, HEADS, 1, SIZE).to(dtype)
    weights = torch.rand(ROWS, HEADS, 1, COLUMNS).to(dtype)
    cache = torch.randn(ROWS, HEADS, COLUMNS, SIZE).to(dtype)
    used = cache[:, :, :USED]
    with torch.inference_mode():
        whole = milliseconds(lambda: query @ cache.transpose(-1, -2))
        part = milliseconds(lambda: query @ used.transpose(-1, -2))
        whole_values = milliseconds(lambda: weights @ cache)
        part_values = milliseconds(lambda: weights[..., :USED] @ used)
    ratios[dtype] = part / whole, part_values / whole_values
    print(
        f"{dtype}: keys, all {COLUMNS} columns {whole:.2f} ms, {USED} of them {part:.2f} ms; "
        f"values, {whole_values:.2f} and {part_values:.2f} ms"
    )
assert min(ratios[torch.bfloat16]) > 2, "this has changed"
assert max(ratios[torch.float32]) < 2, "this has changed"
PY
"$work/venv/bin/python" "$work/trial.py"
