#!/usr/bin/env bash
# The loss of every low-precision recipe against bfloat16: the debug model on GCIDE, 1,500 steps, three seeds a side, as
# docs/results.md reports it, which says why this learning rate. Takes more than an hour on 2 cores, goes on where it was
# interrupted, and needs the corpus (`make data/gcide/dataset.json`).    bench/precision_runs.sh TESSERA [FOLDER]
set -euo pipefail
tessera=$1
folder=${2:-outputs/precision}
base="configs/debugmodel.toml --training.steps=1500 --training.local_batch_size=2 --training.seq_len=256 \
--optimizer.lr=2.2e-4 --lr_scheduler.warmup_steps=200 --validation.freq=500 --validation.steps=64 --checkpoint.interval=500 --checkpoint.keep_latest_k=1"
low="$base --model.converters=quantize.linear.mx,quantize.grouped_mm.mx"
sides=("bf16=$base")
for recipe in mxfp8 mxfp8_wgrad_with_hp fp8_blockwise; do
  sides+=("$recipe=$low --quantize.linear.mx.recipe_name=$recipe --quantize.grouped_mm.mx.recipe_name=$recipe")
done
exec "$tessera" compare "${sides[@]}" --seeds 3 --runs "$folder/runs" --out "$folder/report.html"
