#!/usr/bin/env bash
# Compares the loss of every low-precision recipe with bfloat16: the debug model on GCIDE, 1,500 steps, three seeds a
# side. docs/results.md reports the results, and why this learning rate was chosen. The script takes more than an hour
# on 2 cores and continues where it was interrupted. It needs the corpus (`make data/gcide/dataset.json`).
#   bench/precision_runs.sh TESSERA [FOLDER]
set -euo pipefail
tessera=$1
folder=${2:-outputs/precision}
source "$(dirname "$0")/precision_sides.sh"
base="configs/debugmodel.toml $common --training.device=cpu --training.local_batch_size=2 --training.seq_len=256 \
--checkpoint.interval=500 --checkpoint.keep_latest_k=1"
sides=()
for precision in bf16 mxfp8 mxfp8_wgrad_with_hp fp8_blockwise; do
  sides+=("$precision=$base $(in_precision "$precision")")
done
exec "$tessera" compare "${sides[@]}" --seeds 3 --runs "$folder/runs" --out "$folder/report.html"
