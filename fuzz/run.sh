#!/usr/bin/env bash
# Replays the seeds of every fuzz target, then fuzzes each for some seconds. Fails if anything is found, and names the
# file that shows it. See CONTRIBUTING.md.
#   fuzz/run.sh BUILD SECONDS [TARGET...]     JOBS=n: number of targets at the same time
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$1 seconds=$2
shift 2
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || mapfile -t targets < <(ls "$here/corpus")
findings=$build/findings
mkdir -p "$findings"

run_target() {
  local name=$1 log=$findings/$1.log work=$build/corpus/$1
  # No reader may take more memory than its file justifies. Files have at most 64 KiB, and one allocation at most 64
  # MiB.
  local options=(-malloc_limit_mb=64 -rss_limit_mb=1024 -timeout=10 "-artifact_prefix=$findings/$name-")
  local fuzz_options=(-seed=1 -max_len=65536 "-max_total_time=$seconds")
  if [[ -f $here/$name.options ]]; then read -ra more <"$here/$name.options" && fuzz_options+=("${more[@]}"); fi
  mkdir -p "$work"  # libFuzzer adds files here; the folder of seeds does not change
  local seeds=("$here/corpus/$name"/*)
  # Seeds are replayed without -max_len, which would cut them.
  if "$build/fuzz_$name" "${options[@]}" "${seeds[@]}" >"$log" 2>&1 &&
     { ((seconds == 0)) || "$build/fuzz_$name" "${options[@]}" "${fuzz_options[@]}" "$work" "$here/corpus/$name" \
         >>"$log" 2>&1; }; then
    echo "fuzz $name: ${#seeds[@]} seeds; $(grep '^Done ' "$log" || echo 'not fuzzed') from -seed=1"
  else
    echo "fuzz $name: FOUND something; all of it is in $log:" >&2
    grep -E 'finding:|ERROR:|runtime error|terminate|what\(\)|SUMMARY|Test unit written|Running:' "$log" | tail -n 6 >&2
    return 1
  fi
}
export -f run_target
export here build seconds findings
printf '%s\0' "${targets[@]}" | xargs -0 -n 1 -P "${JOBS:-2}" bash -c 'run_target "$0"'
