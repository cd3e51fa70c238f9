#!/bin/bash
# The launcher's pod: waits until the workers answer, then trains.
#   recipes/kubernetes/launch.sh MODEL NODES SPARES DATASET DUMP INTERFACE
# HOSTS: a file with a worker per line. WAIT: after so many seconds it starts without spares that do not answer; nodes
# that are still to be bought take minutes. ADDRESS: this pod's, for the workers.
set -euo pipefail
[[ $# -eq 6 ]] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
nodes=$2 spares=$3
wait=${WAIT:-1800}
trap 'exit 143' TERM  # without a handler the first process of a container ignores SIGTERM

mapfile -t workers < <(awk 'NF && $1 !~ /^#/ { print $1 }' "$HOSTS")
if [[ ${#workers[@]} -lt $nodes ]]; then
  echo "launch.sh: '$HOSTS' names ${#workers[@]} workers, and the run needs $nodes" >&2
  exit 2
fi
while :; do
  mapfile -t answering < <(
    for worker in "${workers[@]}"; do
      { timeout 20 ssh -oBatchMode=yes -oConnectTimeout=5 "$worker" true </dev/null 2>/dev/null && echo "$worker"; } &
    done
    wait
  )
  if [[ ${#answering[@]} -eq ${#workers[@]} ]]; then break; fi
  if [[ $SECONDS -ge $wait ]]; then
    [[ ${#answering[@]} -lt $nodes ]] || break
    echo "launch.sh: ${#answering[@]} of $nodes workers answer after $wait s" >&2
    exit 1
  fi
  echo "launch.sh: ${#answering[@]} of ${#workers[@]} workers answer" >&2
  sleep 5
done
if [[ ${#answering[@]} -lt $((nodes + spares)) ]]; then spares=$((${#answering[@]} - nodes)); fi
# The order is that of the workers' file, so ranks keep their places from start to start.
sorted=$(printf '%s\n' "${workers[@]}" | grep -Fxf <(printf '%s\n' "${answering[@]}"))
exec "$(dirname "$0")/../train.sh" "$1" "$nodes" "$spares" "${@:4}" \
  --hosts "$(paste -sd, <<<"$sorted")" --address "$ADDRESS"
