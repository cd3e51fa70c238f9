#!/usr/bin/env bash
# Runs all benchmarks: operators and generation (Google Benchmark), the training step against PyTorch and beside other
# programs, several ranks, large worlds, saving, tokenizing against the package `tokenizers`, and expert-parallel
# backends against each other; steps are predicted, then measured. Forecasts for GPUs are compared with what was
# measured there. If there is a GPU, its operators and steps run against PyTorch.
#   bench/run.sh BUILD_FOLDER
set -euo pipefail
build=$1
venv=build/venv
if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -c 'import torch, numpy' 2>/dev/null; then
  echo "bench: installing PyTorch into $venv" >&2
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet torch numpy
fi
if ! "$venv/bin/python" -c 'import tokenizers' 2>/dev/null; then
  echo "bench: installing tokenizers into $venv" >&2
  "$venv/bin/pip" install --quiet tokenizers
fi
"$build/bench/bench_ops" --benchmark_min_time=0.2
"$build/bench/bench_quantize" --benchmark_min_time=0.2
"$build/bench/bench_generate"
"$venv/bin/python" bench/compare.py --tessera "$build/src/app/tessera" --python "$venv/bin/python"
# These fail if a bound is missed. The others run nevertheless.
status=0
"$venv/bin/python" bench/busy.py --tessera "$build/src/app/tessera" || status=1
"$venv/bin/python" bench/guards.py --tessera "$build/src/app/tessera" || status=1
"$venv/bin/python" bench/recipes.py --tessera "$build/src/app/tessera" || status=1
"$venv/bin/python" bench/forecast.py all --tessera "$build/src/app/tessera" || status=1
if grep -qx 'TESSERA_CUDA:BOOL=ON' "$build/CMakeCache.txt"; then  # these need no GPU
  "$venv/bin/python" bench/forecast_gpu.py --tessera "$build/src/app/tessera" || status=1
  "$venv/bin/python" bench/forecast_published.py --tessera "$build/src/app/tessera" || status=1
fi
"$venv/bin/python" bench/parallel.py --tessera "$build/src/app/tessera" || status=1
"$build/bench/bench_turns" || status=1
"$build/src/app/tessera" bench world --ranks 64,256,1024 || status=1
"$venv/bin/python" bench/many_processes.py --tessera "$build/src/app/tessera" --ranks 256 || status=1
"$venv/bin/python" bench/checkpoint.py --tessera "$build/src/app/tessera" || status=1
scripts/fetch_corpus.sh data/corpus || status=1
"$venv/bin/python" bench/tokenizer_compare.py --bench "$build/bench/bench_tokenizer" --python "$venv/bin/python" || status=1
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -np 4 "$build/bench/bench_ep" || status=1
if nvidia-smi -L >/dev/null 2>&1; then
  "$venv/bin/python" bench/gpu.py --tessera "$build/src/app/tessera" --python "$venv/bin/python" --peers || status=1
fi
exit $status
