#include "tests/ops/harness.h"

namespace tessera {

namespace cpu {
extern const KernelTable kKernelsPortable;  // kernels_portable.cc
}

std::vector<const cpu::KernelTable*> kernel_tables() {
  std::vector<const cpu::KernelTable*> tables = {&cpu::kKernelsPortable};
  for (const char* name : {"baseline", "avx512", "avx512_bf16"}) {
    if (const cpu::KernelTable* table = cpu::kernels_named(name)) tables.push_back(table);
  }
  EXPECT_GE(tables.size(), 2u);
  return tables;
}

}  // namespace tessera
