#!/usr/bin/env bash
# Prints the arguments of `tessera train` for one variant of a recipe, one per line:
#   recipes/variant.sh 16b|671b bf16|mxfp8 standard|direct [forced]
# forced: the balanced routing of published benchmarks. Such a run is for timing: its router learns nothing.
set -euo pipefail

usage() { sed -n '2,/^set -/{/^#/s/^# \?//p}' "$0" >&2; exit 2; }
[[ $# -eq 3 || $# -eq 4 ]] || usage
model=$1 precision=$2 exchange=$3 balance=${4:-router}
configs=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../configs")

case $model in
  16b) arguments=("$configs/16b-8gpu.toml") ;;
  671b) arguments=("$configs/671b-256gpu.toml") ;;
  *) echo "variant.sh: unknown model '$model'; expected 16b or 671b" >&2; usage ;;
esac
case $precision in
  bf16) ;;
  # MXFP8 is for the routed experts' grouped GEMMs. With 671b, quantized weights that are kept need more than an H200.
  mxfp8)
    arguments+=(--model.converters=quantize.grouped_mm.mx)
    if [[ $model == 671b ]]; then arguments+=(--quantize.keep_weights=false); fi ;;
  *) echo "variant.sh: unknown precision '$precision'; expected bf16 or mxfp8" >&2; usage ;;
esac
case $exchange in
  standard | direct) arguments+=("--parallelism.expert_parallel_comm_backend=$exchange") ;;
  *) echo "variant.sh: unknown exchange '$exchange'; expected standard or direct" >&2; usage ;;
esac
case $balance in
  router) ;;
  forced)
    arguments+=(--debug.moe_force_load_balance=true --parallelism.expert_parallel_capacity_factor=1.05)
    if [[ $model == 16b ]]; then arguments+=(--training.local_batch_size=4 --activation_checkpoint.mode=none); fi ;;
  *) echo "variant.sh: unknown balance '$balance'; expected forced or nothing" >&2; usage ;;
esac
printf '%s\n' "${arguments[@]}"
