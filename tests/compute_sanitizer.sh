#!/usr/bin/env bash
# Runs every test of the GPU's operators under compute-sanitizer's memcheck, initcheck and racecheck, several at a time:
#   tests/compute_sanitizer.sh BUILD [FILTER]
# BUILD is the build folder (build/release). FILTER selects tests, as --gtest_filter does. SANITIZER_JOBS is the number
# of tests that run at a time, by default 5, because 16 ran out of memory. SANITIZER_SECONDS limits the time of each.
# Prints a line per tool and test with its seconds, and fails if one is not clean. Racecheck covers our own kernels
# only. For those of cuBLASLt and cuDNN it reports false races: they wait for copies by barriers that the tool does not
# know.
set -euo pipefail

build=${1:?"usage: tests/compute_sanitizer.sh BUILD [FILTER]"}
export TEST_BINARY=$build/tests/ops/test_ops_cuda SANITIZER_SECONDS=${SANITIZER_SECONDS:-280}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export logs

# Under a tool, the process that should fail does not end. A request for too much memory counts as an error, too.
excluded='*CudaFailures*'

check() {
  local tool=$1 name=$2 log=$logs/$1.$2 status=0 begin=$SECONDS
  local only_ours=()
  [ "$tool" != racecheck ] || only_ours=(--kernel-name kernel_substring=tessera)
  timeout -s KILL "$SANITIZER_SECONDS" compute-sanitizer --tool "$tool" --error-exitcode 1 "${only_ours[@]}" \
    "$TEST_BINARY" --gtest_brief=1 --gtest_filter="$name" > "$log" 2>&1 || status=$?
  # Status 255 means that the test did not use the GPU. A test that is skipped has shown nothing.
  if grep -q 'PASSED' "$log" && ! grep -q 'SKIPPED' "$log" && { [ $status = 0 ] || [ $status = 255 ]; }; then
    echo "$tool: $name: clean, $((SECONDS - begin)) s"
    return
  fi
  echo "$tool: $name: exit status $status"
  grep -A 3 '========= [A-Z].*[a-z]' "$log" | grep -v COMPUTE-SANITIZER | head -12
  return 1
}
export -f check

tests=$("$TEST_BINARY" --gtest_list_tests --gtest_filter="${2:-*}-$excluded" |
  awk '/^[A-Za-z].*\.$/ {suite = $1} /^  / {print suite $1}')
[ -n "$tests" ] || { echo "no such test: ${2:-}" >&2; exit 2; }
# These tests use cuBLASLt, which racecheck cannot exclude. Dense 8-bit products run the kernels of grouped products.
blas='GemmCuda\..*|QuantizedGemmCuda\.Dense|CallStreamCuda\.ProductsAreTheSame'
blas+='|MlaDecodeCuda\.(ManyNewTokensOrOddSizes|ANanInTheCacheIsInTheOutput)'
# Racecheck runs kernels one after the other. This test has a kernel that waits for another one's end.
concurrent='QuantizedGemmCuda\.SharedSumsBesideKernelsThatHoldSms'
for tool in memcheck initcheck racecheck; do
  for name in $tests; do
    [ $tool = racecheck ] && [[ $name =~ ^($blas|$concurrent)$ ]] || echo "$tool $name"
  done
done | xargs -P "${SANITIZER_JOBS:-5}" -L 1 bash -c 'check "$0" "$1"'
echo "compute-sanitizer: $(wc -w <<< "$tests") tests are clean under memcheck, initcheck and racecheck"
