# shellcheck shell=bash disable=SC2034
# Sets what precision_runs.sh and precision_runs_gpu.sh have in common: the length of a run, its learning rate, and the
# options of a side. The scripts source this file.
common="--training.steps=1500 --optimizer.lr=2.2e-4 --lr_scheduler.warmup_steps=200 --validation.freq=500 --validation.steps=64"

# bf16 or a recipe. "_256" after its name is blocks of 256, and then "_output" an output projection in 8 bits.
in_precision() {
  [[ $1 == bf16 ]] && return
  local recipe=${1%_output}
  echo "--model.converters=quantize.linear.mx,quantize.grouped_mm.mx" \
    "--quantize.linear.mx.recipe_name=${recipe%_256} --quantize.grouped_mm.mx.recipe_name=${recipe%_256}"
  if [[ $recipe == *_256 ]]; then
    echo "--quantize.linear.mx.block_shape=256x256 --quantize.grouped_mm.mx.block_shape=256x256"
  fi
  if [[ $1 == *_output ]]; then echo "--quantize.linear.mx.convert_output=true"; fi
}
