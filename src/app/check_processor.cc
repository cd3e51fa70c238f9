// This file is compiled for every x86-64 processor, unlike the rest (CMakeLists.txt). It runs before everything else,
// and says what the program needs instead of ending in an illegal instruction.
#include <unistd.h>

namespace {

[[gnu::constructor(101)]] void check_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return;
  constexpr char kMessage[] =
      "tessera: this processor has no AVX2, FMA or BMI2; expected Haswell (2013), Zen or later\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  _exit(1);
#endif
}

}  // namespace
