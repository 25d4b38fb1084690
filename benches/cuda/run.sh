#!/usr/bin/env bash
# Builds the kernel texts with nvcc, checks them against the row form, times them beside fp16 attention; prints a Markdown table.
# Without nvcc nothing is built, without a GPU it is only built, and either is said.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if ! command -v nvcc >/dev/null; then
  echo "not run: there is no nvcc"
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

gpu=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n1 | tr -d . || true)
nvcc -O3 -std=c++17 ${gpu:+-arch=sm_$gpu} -o "$folder/bench" benches/cuda/bench.cu
if [[ -z $gpu ]]; then
  echo "compiled, not run: there is no CUDA GPU"
  exit 0
fi
cargo run --quiet --release --no-default-features --example kernel_vectors -- "$folder/vectors"
python3 benches/cuda/sdpa.py >"$folder/sdpa" || echo "fp16 attention was not timed" >&2
"$folder/bench" "$folder/vectors" "$folder/sdpa"
