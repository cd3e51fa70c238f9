#!/usr/bin/env bash
# Benchmarks: operators (Google Benchmark), then the training step against PyTorch. bench/run.sh BUILD_FOLDER
set -euo pipefail
build=$1
venv=build/venv
if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -c 'import torch, numpy' 2>/dev/null; then
  echo "bench: installing PyTorch into $venv" >&2
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet torch numpy
fi
"$build/bench/bench_ops" --benchmark_min_time=0.2
"$venv/bin/python" bench/compare.py --tessera "$build/src/app/tessera" --python "$venv/bin/python"
