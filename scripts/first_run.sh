#!/usr/bin/env bash
# first_run.sh TESSERA CONFIG [ARGS]: prints how long the run will take on this machine, then trains. A first run that
# would take more than five minutes gets fewer steps, unless ARGS has the number of steps.
set -euo pipefail
tessera=$1 config=$2
shift 2

value_of() {  # value_of section key: prints a key's value in the configuration that the run will have
  "$tessera" train "$config" "${arguments[@]}" --print-config | sed -n "/^\[$1\]/,/^\[/s/^$2 = //p" | tr -d '"'
}
arguments=("$@")
steps=$(value_of training steps)
checkpoints=$(value_of job dump_folder)/$(value_of checkpoint folder)
if [[ -z $(find "$checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null) ]]; then
  echo "timing a step" >&2
  milliseconds=$("$tessera" bench step "$config" "${arguments[@]}" --steps 1 --warmup 0 2>/dev/null |
    sed -n 's/.*"step_ms":\([0-9.e+-]*\).*/\1/p') || milliseconds=  # the run itself then says what is wrong
  if [[ -n $milliseconds ]]; then
    # Steps take at most 270 s, if 40 of them do. The rest is for validations and checkpoints.
    read -r minutes fitting < <(awk -v ms="$milliseconds" -v n="$steps" \
      'BEGIN { s = ms / 1000; fit = int(270 / s / 10) * 10; if (fit < 40) fit = 40; printf "%.1f %d\n", s * n / 60, fit }')
    echo "$steps steps take about $minutes minutes here" >&2
    if [[ $fitting -lt $steps && " $* " != *--training.steps* ]]; then
      echo "so this first run takes $fitting; make train CONFIG='$config' ARGS='$* --training.steps=$steps' goes on to $steps" >&2
      arguments+=("--training.steps=$fitting")
    fi
  fi
fi
exec "$tessera" train "$config" "${arguments[@]}"
