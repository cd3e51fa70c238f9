#!/usr/bin/env bash
# Prints what `kubectl apply -f -` takes to train on Kubernetes:
#   recipes/kubernetes/render.sh jobset|mpijob 16b|671b [NAMES]
#   recipes/kubernetes/render.sh health [NAMES]
# jobset: for JobSet. mpijob: for Kubeflow's MPI operator. health: a daemon of each node, and what node-problem-detector
# asks. NAMES is a file like names.env beside this script, which it is by default.
set -euo pipefail
folder=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
usage() { sed -n '2,/^set -/{/^#/s/^# \?//p}' "$0" >&2; exit 2; }
fail() { echo "render.sh: $*" >&2; exit 2; }

kind=${1:-}
case $kind in
  jobset | mpijob)
    model=${2:-} names=${3:-$folder/names.env}
    case $model in
      16b) nodes=1 spares=0 ;;
      671b) nodes=32 spares=2 ;;
      *) fail "unknown model '$model'; expected 16b or 671b" ;;
    esac ;;
  health) model="" nodes=0 spares=0 names=${2:-$folder/names.env} ;;
  *) usage ;;
esac
[[ -r $names ]] || fail "there is no file '$names'"
# shellcheck source=/dev/null
source "$(realpath "$names")"  # a bare name would be looked up on the PATH

# Replaces a line "@include FILE" of a template by that file, indented like the line.
include() {
  local line indent part
  while IFS= read -r line; do
    if [[ $line =~ ^(\ *)@include\ (.*)$ ]]; then
      indent=${BASH_REMATCH[1]}
      while IFS= read -r part; do printf '%s%s\n' "$indent" "$part"; done < <(include "${BASH_REMATCH[2]}")
    else
      printf '%s\n' "$line"
    fi
  done <"$folder/$1"
}

text=$(include "$kind.yaml")
# The MPI operator makes keys itself. For a JobSet they are in a Secret.
if [[ $kind == mpijob ]]; then text=$(sed '/# jobset only/d' <<<"$text"); else text=${text//  # jobset only/}; fi
workers=$((nodes + spares))
# The name of a JobSet's pod has the JobSet's name, the job's name, the job's index and the pod's index. The subdomain
# is the JobSet's name.
hosts=$(for ((i = 0; i < workers; ++i)); do echo "tessera-$model-worker-0-$i.tessera-$model"; done)
hosts=${hosts//$'\n'/$'\n    '}  # indented like the template's hosts
for name in NAMESPACE IMAGE CLAIM DATASET RUNS INTERFACE RDMA RUNTIME PRECISION EXCHANGE model nodes spares workers hosts; do
  [[ -n ${!name+x} ]] || fail "'$names' does not say $name"
  text=${text//"@$name@"/"${!name}"}
done
printf '%s\n' "$text"
