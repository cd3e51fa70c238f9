# shellcheck shell=bash disable=SC2034
# Sets what precision_runs.sh and precision_runs_gpu.sh have in common: the length of a run, its learning rate, and the
# options of a recipe. The scripts source this file.
common="--training.steps=1500 --optimizer.lr=2.2e-4 --lr_scheduler.warmup_steps=200 --validation.freq=500 --validation.steps=64"

in_precision() { # bf16 or a recipe
  [[ $1 == bf16 ]] && return
  echo "--model.converters=quantize.linear.mx,quantize.grouped_mm.mx" \
    "--quantize.linear.mx.recipe_name=$1 --quantize.grouped_mm.mx.recipe_name=$1"
}
