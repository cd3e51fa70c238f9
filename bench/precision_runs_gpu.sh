#!/usr/bin/env bash
# The loss of the 16B model in mxfp8 and fp8_blockwise against bfloat16 on the GPUs of this machine: a real corpus, 1,500 steps,
# on all sides the same data and seeds, then `tessera compare`. FOLDER/SIDE/seed-N/train.log is what a run says; a run that ended is
# not run again, others start anew: checkpoints would be 190 GB each. A verdict takes three seeds.
#   bench/precision_runs_gpu.sh TESSERA RANKS [FOLDER [DATASET [SEEDS]]]
set -euo pipefail
if [[ $# -lt 2 || $# -gt 5 ]]; then
  echo "usage: $0 TESSERA RANKS [FOLDER [DATASET [SEEDS]]]" >&2
  exit 2
fi
tessera=$1 ranks=$2 folder=${3:-outputs/precision-16B} dataset=${4:-data/gcide} seeds=${5:-3}
source "$(dirname "$0")/precision_sides.sh"
# As many tokens as the debug model's corpus has in little more than an epoch; room for any load of the experts.
base="--model.flavor=16B --training.device=cuda --training.dataset_path=$dataset --training.local_batch_size=1 \
--training.seq_len=2048 --validation.enable=true --activation_checkpoint.mode=selective --metrics.log_freq=1 \
--parallelism.expert_parallel_degree=$ranks --parallelism.expert_parallel_comm_backend=direct"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

is_not_finite() { # a run whose loss is not finite any more has ended, too, and compare says so
  [[ -f $1/metrics.jsonl ]] && tail -n 1 "$1/metrics.jsonl" | grep -Eq '"(loss|grad_norm)":null'
}

sides=()
for precision in bf16 mxfp8 fp8_blockwise; do sides+=("$precision=$folder/$precision"); done
for ((seed = 1; seed <= seeds; ++seed)); do
  for precision in bf16 mxfp8 fp8_blockwise; do
    run=$folder/$precision/seed-$seed
    if [[ -f $run/train.ended ]]; then continue; fi
    rm -rf "$run"
    mkdir -p "$run"
    echo "$precision, seed $seed: $run/train.log" >&2
    # shellcheck disable=SC2046,SC2086  # options are words without spaces
    mpirun --oversubscribe --bind-to none -np "$ranks" "$tessera" train $base $common $(in_precision "$precision") \
      "--debug.seed=$seed" "--job.dump_folder=$run" >"$run/train.log" 2>&1 || is_not_finite "$run" ||
      { tail -n 20 "$run/train.log" >&2; exit 1; }
    touch "$run/train.ended"
  done
done
exec "$tessera" compare "${sides[@]}" --out "$folder/report.html"
