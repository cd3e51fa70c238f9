#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cpu/operand_output.h"
#include "ops/cpu/sum_rows.h"
#include "ops/routing/permute.h"
#include "tensor/parallel.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kPermuteRowsPerTask = 64;
constexpr std::int64_t kNumbersPerTask = 1 << 14;

}  // namespace

void sort_by_expert(const Context& context, const Tensor& expert_ids_TK, const Tensor& counts_E, std::int64_t alignment,
                    const Tensor& offsets_E1, const Tensor& slot_of_row_R, const Tensor& row_of_slot_TK) {
  const std::int64_t num_slots = expert_ids_TK.num_elements(), num_experts = counts_E.dim(0);
  const ArenaScope scope(*context.arena);
  const Tensor next_row_E = context.arena->allocate({num_experts}, DType::kInt32);
  if (context.measuring()) return;
  auto* offsets = offsets_E1.data<std::int32_t>();
  auto* next_row = next_row_E.data<std::int32_t>();
  offsets[0] = 0;
  std::int64_t counted = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int64_t count = counts_E.data<std::int32_t>()[e];
    next_row[e] = offsets[e];
    offsets[e + 1] = offsets[e] + static_cast<std::int32_t>((count + alignment - 1) / alignment * alignment);
    counted += count;
  }
  TESSERA_CHECK(counted <= num_slots, "{} rows, {} slots", counted, num_slots);
  std::fill_n(slot_of_row_R.data<std::int32_t>(), slot_of_row_R.dim(0), -1);
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    const std::int32_t expert = expert_ids_TK.data<std::int32_t>()[slot];
    if (expert == kNoExpert) {
      row_of_slot_TK.data<std::int32_t>()[slot] = -1;
      continue;
    }
    TESSERA_CHECK(0 <= expert && expert < num_experts && next_row[expert] < offsets[expert + 1], "slot {} expert {}",
                  slot, expert);
    const std::int32_t row = next_row[expert]++;
    slot_of_row_R.data<std::int32_t>()[row] = static_cast<std::int32_t>(slot);
    row_of_slot_TK.data<std::int32_t>()[slot] = row;
  }
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int32_t count = counts_E.data<std::int32_t>()[e];
    TESSERA_CHECK(next_row[e] == offsets[e] + count, "expert {} has {} slots, counted {}", e, next_row[e] - offsets[e],
                  count);
  }
}

void gather_rows(const Context& context, const Tensor& x_TD, const Tensor& slot_of_row_R, std::int64_t top_k,
                 const Tensor& num_rows_1, const GemmOperand& y_RD) {
  const std::int64_t num_rows = slot_of_row_R.dim(0), dim = x_TD.dim(1);
  const OperandOutput output(context, y_RD, dim, x_TD.dtype());
  if (context.measuring()) return;
  const std::int64_t used = y_RD.plain.defined() ? num_rows : computed_rows(num_rows_1, num_rows);
  for_float_type(x_TD.dtype(), [&]<typename T>(T) {
    parallel_ranges(used, output.rows_per_task(kPermuteRowsPerTask), [&](std::int64_t begin, std::int64_t end) {
      T* y = output.rows<T>(begin);
      for (std::int64_t r = begin; r < end; ++r, y += dim) {
        const std::int32_t slot = slot_of_row_R.data<std::int32_t>()[r];
        if (slot < 0) {
          std::fill_n(y, dim, T{});
        } else {
          std::copy_n(row_of<T>(x_TD, slot / top_k), dim, y);
        }
      }
      output.finish<T>(begin, end);
    });
  });
}

void gather_row_bytes(const Context& context, const Tensor& x, const Tensor& source, std::int64_t divisor,
                      const Tensor& y) {
  if (context.measuring()) return;
  const auto* sources = source.data<std::int32_t>();
  const std::size_t num_bytes = static_cast<std::size_t>(x.dim(1)) * size_of(x.dtype());
  const auto* from = static_cast<const std::byte*>(x.raw());
  auto* to = static_cast<std::byte*>(y.raw());
  parallel_ranges(y.dim(0), kPermuteRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::byte* row = to + static_cast<std::size_t>(i) * num_bytes;
      if (sources[i] < 0) {
        std::memset(row, 0, num_bytes);
      } else {
        std::memcpy(row, from + static_cast<std::size_t>(sources[i] / divisor) * num_bytes, num_bytes);
      }
    }
  });
}

void gather_numbers(const Context& context, const Tensor& x, const Tensor& index, const Tensor& y) {
  if (context.measuring()) return;
  const float* from = x.data<float>();
  const auto* indices = index.data<std::int32_t>();
  float* to = y.data<float>();
  parallel_ranges(y.num_elements(), kNumbersPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] = indices[i] < 0 ? 0.0f : from[indices[i]];
  });
}

void combine_rows(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK, const Tensor& weights_TK,
                  const Tensor& y_TD, Write write) {
  const std::int64_t num_tokens = row_of_slot_TK.dim(0), top_k = row_of_slot_TK.dim(1), dim = x_RD.dim(1);
  if (context.measuring()) return;
  for_float_type(x_RD.dtype(), [&]<typename T>(T) {
    parallel_ranges(num_tokens, kPermuteRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int32_t* rows = row_of<std::int32_t>(row_of_slot_TK, t);
        const float* weights = weights_TK.defined() ? weights_TK.data<float>() + t * top_k : nullptr;
        sum_rows(
            top_k, [&](std::int64_t k) { return row_of<T>(x_RD, rows[k]); }, weights, dim, write, row_of<T>(y_TD, t));
      }
    });
  });
}

void combine_rows_by_rank(const Context& context, const Tensor& x_RD, const Tensor& row_of_slot_TK,
                          const Tensor& weights_TK, const Tensor& expert_ids_TK, std::int64_t experts_per_rank,
                          const Tensor& y_TD, Write write) {
  const std::int64_t num_tokens = row_of_slot_TK.dim(0), top_k = row_of_slot_TK.dim(1), dim = x_RD.dim(1);
  const ThreadScratch scratch(context, static_cast<std::size_t>(top_k * dim) * size_of(x_RD.dtype()));
  if (context.measuring()) return;
  for_float_type(x_RD.dtype(), [&]<typename T>(T) {
    parallel_ranges(num_tokens, kPermuteRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
      T* sums = reinterpret_cast<T*>(scratch.mine());
      std::vector<std::int64_t> ranks;
      std::vector<const T*> rows;
      std::vector<float> weights;
      for (std::int64_t t = begin; t < end; ++t) {
        const auto rank_of = [&](std::int64_t k) {
          return row_of<std::int32_t>(expert_ids_TK, t)[k] / experts_per_rank;
        };
        ranks.clear();
        for (std::int64_t k = 0; k < top_k; ++k) ranks.push_back(rank_of(k));
        std::ranges::sort(ranks);
        ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
        for (std::size_t j = 0; j < ranks.size(); ++j) {
          rows.clear();
          weights.clear();
          for (std::int64_t k = 0; k < top_k; ++k) {
            const std::int32_t row = row_of<std::int32_t>(row_of_slot_TK, t)[k];
            if (rank_of(k) != ranks[j] || row < 0) continue;
            rows.push_back(row_of<T>(x_RD, row));
            weights.push_back(weights_TK.defined() ? weights_TK.data<float>()[t * top_k + k] : 1.0f);
          }
          sum_rows(
              static_cast<std::int64_t>(rows.size()), [&](std::int64_t i) { return rows[static_cast<std::size_t>(i)]; },
              weights.data(), dim, Write::kAssign, sums + static_cast<std::int64_t>(j) * dim);
        }
        sum_rows(
            static_cast<std::int64_t>(ranks.size()), [&](std::int64_t j) { return sums + j * dim; }, nullptr, dim,
            write, row_of<T>(y_TD, t));
      }
    });
  });
}

}  // namespace tessera::cpu
