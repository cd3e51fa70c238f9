#!/usr/bin/env bash
# Runs every test of the GPU's operators under compute-sanitizer's memcheck, initcheck and racecheck, many at a time:
#   tests/compute_sanitizer.sh BUILD [FILTER]
# BUILD: the build folder (build/release); FILTER: of the tests, as for --gtest_filter. SANITIZER_JOBS: how many run at
# a time, by default 5, because 16 ran out of memory; SANITIZER_SECONDS: how long each may take. Prints a line per tool and test that is
# not clean, and fails if there is one. Races are looked for in our own kernels only: of
# cuBLASLt's and cuDNN's, which wait for copies by barriers that the tool does not know, it reports some that are none.
set -euo pipefail

build=${1:?"usage: tests/compute_sanitizer.sh BUILD [FILTER]"}
export TEST_BINARY=$build/tests/ops/test_ops_cuda SANITIZER_SECONDS=${SANITIZER_SECONDS:-280}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export logs

# Under a tool the process that is to fail does not end; and asking for too much memory is an error to it.
excluded='*CudaFailures*'

check() {
  local tool=$1 name=$2 log=$logs/$1.$2 status=0
  local only_ours=()
  [ "$tool" != racecheck ] || only_ours=(--kernel-name kernel_substring=tessera)
  timeout -s KILL "$SANITIZER_SECONDS" compute-sanitizer --tool "$tool" --error-exitcode 1 "${only_ours[@]}" \
    "$TEST_BINARY" --gtest_brief=1 --gtest_filter="$name" > "$log" 2>&1 || status=$?
  # 255: tests that ask the GPU for nothing.
  if grep -q 'PASSED' "$log" && { [ $status = 0 ] || [ $status = 255 ]; }; then return; fi
  echo "$tool: $name: exit status $status"
  grep -A 3 '========= [A-Z].*[a-z]' "$log" | grep -v COMPUTE-SANITIZER | head -12
  return 1
}
export -f check

tests=$("$TEST_BINARY" --gtest_list_tests --gtest_filter="${2:-*}-$excluded" |
  awk '/^[A-Za-z].*\.$/ {suite = $1} /^  / {print suite $1}')
[ -n "$tests" ] || { echo "no such test: ${2:-}" >&2; exit 2; }
# These use cuBLASLt, which racecheck cannot leave out. Dense 8-bit products run the grouped kernels.
blas='^(GemmCuda\..*|QuantizedGemmCuda\.Dense|BesideCuda\.ProductsAreTheSame)$'
for tool in memcheck initcheck racecheck; do
  for name in $tests; do
    [ $tool = racecheck ] && [[ $name =~ $blas ]] || echo "$tool $name"
  done
done | xargs -P "${SANITIZER_JOBS:-5}" -L 1 bash -c 'check "$0" "$1"'
echo "compute-sanitizer: $(wc -w <<< "$tests") tests are clean under memcheck, initcheck and racecheck"
