#include "ops/cpu/kernels.h"

#include <cstring>

namespace tessera::cpu {

extern const KernelTable kKernelsAvx512;
extern const KernelTable kKernelsAvx512Bf16;
extern const KernelTable kKernelsBaseline;

namespace {

struct Variant {
  const KernelTable* table;
  bool supported;
};

/// Returns the variants, best first.
const Variant* variants(std::size_t& count) {
  static const Variant kVariants[] = {
#ifdef TESSERA_HAS_AVX512
      {&kKernelsAvx512Bf16, __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16")},
      {&kKernelsAvx512, __builtin_cpu_supports("x86-64-v4") != 0},
#endif
      {&kKernelsBaseline, true},
  };
  count = sizeof(kVariants) / sizeof(kVariants[0]);
  return kVariants;
}

const KernelTable* used = nullptr;  // set by use_kernels

}  // namespace

void use_kernels(const KernelTable* table) { used = table; }

const KernelTable& kernels() {
  if (used != nullptr) return *used;
  std::size_t count = 0;
  const Variant* variant = variants(count);
  while (!variant->supported) ++variant;
  return *variant->table;
}

const KernelTable* kernels_named(const char* name) {
  std::size_t count = 0;
  const Variant* all = variants(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (std::strcmp(all[i].table->name, name) == 0 && all[i].supported) return all[i].table;
  }
  return nullptr;
}

}  // namespace tessera::cpu
