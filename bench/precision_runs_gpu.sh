#!/usr/bin/env bash
# Compares the loss of the 16B model in low precision with bfloat16 on the GPUs of this machine: a real corpus, 1,500
# steps, the same data and seeds on all sides, then `tessera compare`. Each run has RANKS GPUs, and as many runs as fit
# run at a time. A run writes its output to FOLDER/SIDE/seed-N/train.log. A run that ended is not run again. Others
# start from the beginning, because checkpoints would take 190 GB each. It is an error if a run in FOLDER was made with
# other options. SEEDS are the first N seeds, or FIRST-LAST, and a verdict takes three. PRECISIONS are the sides, as
# precision_sides.sh names them, and the first one is the baseline. OPTIONS, of `tessera train`, apply to all sides.
#   bench/precision_runs_gpu.sh TESSERA RANKS [FOLDER [DATASET [SEEDS [PRECISIONS [OPTIONS...]]]]]
set -euo pipefail
if [[ $# -lt 2 ]]; then
  echo "usage: $0 TESSERA RANKS [FOLDER [DATASET [SEEDS [PRECISIONS [OPTIONS...]]]]]" >&2
  exit 2
fi
tessera=$1 ranks=$2 folder=${3:-outputs/precision-16B} dataset=${4:-data/gcide} seeds=${5:-3}
first_seed=${seeds%-*} last_seed=${seeds#*-}
if [[ $seeds != *-* ]]; then first_seed=1; fi
IFS=, read -ra precisions <<<"${6:-bf16,mxfp8,fp8_blockwise}"
options=("${@:7}")
source "$(dirname "$0")/precision_sides.sh"
# For each rank, 1,500 steps of 2048 tokens are 0.2 epochs of the debug model's corpus. There is room for any load of
# the experts.
base="--model.flavor=16B --training.device=cuda --training.dataset_path=$dataset --training.local_batch_size=1 \
--training.seq_len=2048 --validation.enable=true --activation_checkpoint.mode=selective --metrics.log_freq=1 \
--parallelism.expert_parallel_degree=$ranks --parallelism.expert_parallel_comm_backend=direct"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

is_not_finite() { # a run whose loss is not finite any more has ended, too, and compare reports that
  [[ -f $1/metrics.jsonl ]] && tail -n 1 "$1/metrics.jsonl" | grep -Eq '"(loss|grad_norm)":null'
}

train() { # precision, seed, number of the place
  local run=$folder/$1/seed-$2
  if [[ -f $run/train.ended ]]; then return; fi
  rm -rf "$run"
  mkdir -p "$run"
  echo "$1, seed $2: $run/train.log" >&2
  # shellcheck disable=SC2046,SC2086  # options are words without spaces
  CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:$3*ranks:ranks}") mpirun --oversubscribe --bind-to none -np "$ranks" "$tessera" train \
    $base $common "${options[@]}" $(in_precision "$1") "--debug.seed=$2" "--job.dump_folder=$run" >"$run/train.log" 2>&1 ||
    is_not_finite "$run" || { tail -n 20 "$run/train.log" >&2; return 1; }
  echo "$what" >"$run/train.ended"
}

# Finished runs in the folder are kept, and must have been made with these options.
what="$ranks ranks, $base $common ${options[*]}"
for ended in "$folder"/*/seed-*/train.ended; do
  if [[ -f $ended && $(<"$ended") != "$what" ]]; then
    echo "$0: ${ended%/*} was made with other options; take another FOLDER. It: $(<"$ended"). Now: $what" >&2
    exit 2
  fi
done

# Each place runs every num_places-th of the runs, in its own process group.
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
else
  mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
fi
num_places=$((${#gpus[@]} / ranks))
[[ $num_places -gt 0 ]] || { echo "$0: $ranks ranks, but ${#gpus[@]} GPUs" >&2; exit 2; }
places=()
trap 'for place in "${places[@]}"; do kill -- "-$place" 2>/dev/null || true; done' EXIT
trap 'exit 1' INT TERM
set -m
for ((place = 0; place < num_places; ++place)); do
  for ((i = place; i < (last_seed - first_seed + 1) * ${#precisions[@]}; i += num_places)); do
    train "${precisions[i % ${#precisions[@]}]}" $((first_seed + i / ${#precisions[@]})) "$place"
  done &
  places+=($!)
done
for _ in "${places[@]}"; do wait -n; done
places=()

sides=()
for precision in "${precisions[@]}"; do sides+=("$precision=$folder/$precision"); done
"$tessera" compare "${sides[@]}" --out "$folder/report.html"
