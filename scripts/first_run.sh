#!/usr/bin/env bash
# first_run.sh TESSERA CONFIG [ARGS]: prints how long the run will take on this machine, then trains. A first run that
# would take more than five minutes gets fewer steps, unless ARGS has the number of steps. If it is interrupted, the
# next start goes on to as many.
set -euo pipefail
tessera=$1 config=$2
shift 2

value_of() {  # value_of section key: prints a key's value in the configuration that the run will have
  "$tessera" train "$config" "${arguments[@]}" --print-config | sed -n "/^\[$1\]/,/^\[/s/^$2 = //p" | tr -d '"'
}
arguments=("$@")
steps=$(value_of training steps)
run=$(value_of job dump_folder)
checkpoints=$run/$(value_of checkpoint folder)
newest=$(find "$checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sed 's/.*step-//' | sort -n | tail -n 1) || true
newest=${newest:-0}
planned=$(sed -n 's/.*"training.steps": "\([0-9]*\)".*/\1/p' "$run/run.json" 2>/dev/null) || true
if [[ " $* " == *--training.steps* ]]; then
  is_fixed=true
else
  is_fixed=false
fi
if [[ $is_fixed == false && $newest -gt 0 && $newest -lt ${planned:-0} && $planned -lt $steps ]]; then
  echo "the run goes on to step $planned, as at its start" >&2
  arguments+=("--training.steps=$planned")
elif [[ $newest -lt $steps ]]; then
  echo "timing a step" >&2
  milliseconds=$("$tessera" bench step "$config" "${arguments[@]}" --steps 1 --warmup 0 2>/dev/null |
    sed -n 's/.*"step_ms":\([0-9.e+-]*\).*/\1/p') || milliseconds=  # the run itself then says what is wrong
  if [[ -n $milliseconds ]]; then
    # Steps take at most 270 s, if 40 of them do. The rest is for validations and checkpoints.
    read -r minutes fitting < <(awk -v ms="$milliseconds" -v n="$((steps - newest))" \
      'BEGIN { s = ms / 1000; fit = int(270 / s / 10) * 10; if (fit < 40) fit = 40; printf "%.1f %d\n", s * n / 60, fit }')
    echo "$((steps - newest)) steps take about $minutes minutes here" >&2
    if [[ $newest -eq 0 && $fitting -lt $steps && $is_fixed == false ]]; then
      more="$* --training.steps=$steps"
      echo "so this first run takes $fitting; make train CONFIG='$config' ARGS='${more# }' goes on to $steps" >&2
      arguments+=("--training.steps=$fitting")
    fi
  fi
fi
exec "$tessera" train "$config" "${arguments[@]}"
