#include "ops/attention/mla_attention.h"

#include "ops/cpu/kernels.h"
#include "ops/cpu/types.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

struct Case {
  std::int64_t num_seqs, seq_len, heads, nope, rope, v;
  std::int64_t doc_length;  // 0: one document; kIrregular: random lengths that differ between sequences
  float scale = 0.3f;
};

constexpr std::int64_t kIrregular = -1;

std::vector<std::int32_t> document_starts(const Case& c) {
  const Philox lengths(5, 0);
  std::vector<std::int32_t> starts;
  for (std::int64_t t = 0; t < c.num_seqs * c.seq_len; ++t) {
    const std::int64_t i = t % c.seq_len;
    if (c.doc_length == kIrregular) {
      // A document ends here with a probability that makes runs of single tokens and long documents.
      const double likely = t / 20 % 3 == 0 ? 0.7 : 0.02;
      const bool begins = i == 0 || lengths.uniform(static_cast<std::uint64_t>(t)) < likely;
      starts.push_back(begins ? static_cast<std::int32_t>(i) : starts.back());
    } else {
      starts.push_back(c.doc_length == 0 ? 0 : static_cast<std::int32_t>(i / c.doc_length * c.doc_length));
    }
  }
  return starts;
}

/// Computes o and lse of all tokens and heads, from q, kv and k_rope.
void reference(const Case& c, const Doubles& q, const Doubles& kv, const Doubles& k_rope,
               const std::vector<std::int32_t>& starts, double scale, Doubles& o, Doubles& lse) {
  const auto u = [](std::int64_t x) { return static_cast<std::size_t>(x); };
  o.assign(u(c.num_seqs * c.seq_len * c.heads * c.v), 0.0);
  lse.assign(u(c.num_seqs * c.seq_len * c.heads), 0.0);
  for (std::int64_t t = 0; t < c.num_seqs * c.seq_len; ++t) {
    const std::int64_t first = t / c.seq_len * c.seq_len;
    for (std::int64_t h = 0; h < c.heads; ++h) {
      Doubles scores;
      double max = -HUGE_VAL, sum = 0.0;
      for (std::int64_t j = first + starts[u(t)]; j <= t; ++j) {
        double s = 0.0;
        for (std::int64_t i = 0; i < c.nope; ++i) {
          s += q[u((t * c.heads + h) * (c.nope + c.rope) + i)] * kv[u((j * c.heads + h) * (c.nope + c.v) + i)];
        }
        for (std::int64_t i = 0; i < c.rope; ++i) {
          s += q[u((t * c.heads + h) * (c.nope + c.rope) + c.nope + i)] * k_rope[u(j * c.rope + i)];
        }
        scores.push_back(s * scale);
        max = std::max(max, scores.back());
      }
      for (const double s : scores) sum += std::exp(s - max);
      lse[u(t * c.heads + h)] = max + std::log(sum);
      for (std::size_t j = 0; j < scores.size(); ++j) {
        const double weight = std::exp(scores[j] - max) / sum;
        const std::int64_t key = first + starts[u(t)] + static_cast<std::int64_t>(j);
        for (std::int64_t i = 0; i < c.v; ++i) {
          o[u((t * c.heads + h) * c.v + i)] += weight * kv[u((key * c.heads + h) * (c.nope + c.v) + c.nope + i)];
        }
      }
    }
  }
}

class MlaAttention : public TypedOperatorTest {
 protected:
  struct Operands {
    MlaDims dims;
    MlaOperands in;
    Tensor o, lse, d_o, d_q, d_kv, d_k_rope;
    std::vector<std::int32_t> starts;
  };

  Operands make(const Case& c) {
    Operands x;
    const std::int64_t tokens = c.num_seqs * c.seq_len;
    x.dims = {.num_seqs = c.num_seqs,
              .seq_len = c.seq_len,
              .num_heads = c.heads,
              .dim_nope = c.nope,
              .dim_rope = c.rope,
              .dim_v = c.v,
              .scale = c.scale};
    x.starts = document_starts(c);
    x.in = {.q = randoms({tokens, c.heads * (c.nope + c.rope)}),
            .kv = randoms({tokens, c.heads * (c.nope + c.v)}),
            .k_rope = randoms({tokens, c.rope}),
            .doc_start_T = ints(x.starts)};
    x.o = randoms({tokens, c.heads * c.v});
    x.lse = random({tokens, c.heads});
    x.d_o = randoms({tokens, c.heads * c.v});
    x.d_q = randoms(x.in.q.shape());
    x.d_kv = randoms(x.in.kv.shape());
    x.d_k_rope = randoms(x.in.k_rope.shape());
    return x;
  }

  /// Runs forward and backward with the operators, or with the kernels of one instruction set.
  void run(const Operands& x) {
    if (table_ == nullptr) {
      mla_attention_forward(context(), x.dims, x.in, x.o, x.lse);
      mla_attention_backward(context(), x.dims, x.in, x.o, x.lse, x.d_o, x.d_q, x.d_kv, x.d_k_rope);
      return;
    }
    const ArenaScope scope(arena_);
    const MlaDims& dims = x.dims;
    const std::int64_t per_seq = dims.seq_len * dims.dim_rope;
    const Tensor per_head = random({dims.num_seqs * dims.num_heads, per_seq});
    const cpu::Element element = cpu::element_of(dtype());
    cpu::AttentionShape shape{.seq_len = dims.seq_len,
                              .num_heads = dims.num_heads,
                              .dim_nope = dims.dim_nope,
                              .dim_rope = dims.dim_rope,
                              .dim_v = dims.dim_v,
                              .scale = dims.scale,
                              .num_ranges = 1,
                              .ranges = {{0, dims.seq_len}, {}}};
    for (std::size_t i = 0; i < dims.queries.size(); ++i) {
      shape.num_ranges = static_cast<int>(dims.queries.size());
      shape.ranges[i] = {dims.queries[i].begin, dims.queries[i].end};
    }
    std::byte* scratch = arena_.allocate_bytes(std::max(table_->attention_forward_scratch(shape, element),
                                                        table_->attention_backward_scratch(shape, element)));
    Doubles d_k_rope(doubles(x.d_k_rope).size(), 0.0);
    for (std::int64_t seq = 0; seq < dims.num_seqs; ++seq) {
      for (std::int64_t head = 0; head < dims.num_heads; ++head) {
        table_->attention_forward(
            {shape, x.in.q.raw(), x.in.kv.raw(), x.in.k_rope.raw(), x.starts.data(), x.o.raw(), x.lse.data<float>()},
            element, seq, head, scratch);
        table_->attention_backward(
            {shape, x.in.q.raw(), x.in.kv.raw(), x.in.k_rope.raw(), x.starts.data(), x.o.raw(), x.lse.data<float>(),
             x.d_o.raw(), x.d_q.raw(), x.d_kv.raw(), per_head.data<float>()},
            element, seq, head, scratch);
        const Doubles part = doubles(per_head[seq * dims.num_heads + head]);
        for (std::size_t i = 0; i < part.size(); ++i) {
          d_k_rope[static_cast<std::size_t>(seq * per_seq) + i] += part[i];
        }
      }
    }
    for (std::size_t i = 0; i < d_k_rope.size(); ++i) {
      const auto sum = static_cast<float>(d_k_rope[i]);
      if (dtype() == DType::kFloat32) {
        x.d_k_rope.data<float>()[i] = sum;
      } else {
        x.d_k_rope.data<BFloat16>()[i] = BFloat16(sum);
      }
    }
  }

  /// Compares the results with the reference. `slack` widens the bounds.
  void check(const Case& c, bool differences = true, double slack = 1.0) {
    const Operands x = make(c);
    const Doubles q = doubles(x.in.q), kv = doubles(x.in.kv), k_rope = doubles(x.in.k_rope), g = doubles(x.d_o);
    Doubles o, lse;
    const auto scale = static_cast<double>(x.dims.scale);
    reference(c, q, kv, k_rope, x.starts, scale, o, lse);
    run(x);
    const double forward_bound = bound_for(dtype(), slack * kForwardBound);
    const double backward_bound = bound_for(dtype(), slack * kBackwardBound);
    EXPECT_LE(relative_error(x.o, o), forward_bound);
    EXPECT_LE(relative_error(x.lse, lse), kForwardBound);
    if (!differences) return;
    const auto loss = [&](const Doubles& q_, const Doubles& kv_, const Doubles& k_rope_) {
      Doubles o_, lse_;
      reference(c, q_, kv_, k_rope_, x.starts, scale, o_, lse_);
      return dot(o_, g);
    };
    EXPECT_LE(relative_error(x.d_q, central_differences([&](const Doubles& v) { return loss(v, kv, k_rope); }, q)),
              backward_bound);
    EXPECT_LE(relative_error(x.d_kv, central_differences([&](const Doubles& v) { return loss(q, v, k_rope); }, kv)),
              backward_bound);
    EXPECT_LE(relative_error(x.d_k_rope, central_differences([&](const Doubles& v) { return loss(q, kv, v); }, k_rope)),
              backward_bound);
  }

  /// Checks queries of some ranges against all keys, for ranges that together are the sequence. Their rows must equal
  /// the whole's. The gradients of keys and values must add up to the whole's.
  void check_parts(const Case& c, const std::vector<std::vector<TokenRange>>& parts) {
    const Operands x = make(c);
    run(x);
    Doubles d_kv(doubles(x.d_kv).size(), 0.0), d_k_rope(doubles(x.d_k_rope).size(), 0.0);
    for (const std::vector<TokenRange>& ranges : parts) {
      Operands part = x;
      part.dims.queries = ranges;
      part.starts.clear();
      std::vector<std::int64_t> tokens;
      for (std::int64_t b = 0; b < c.num_seqs; ++b) {
        for (const TokenRange& range : ranges) {
          for (std::int64_t i = range.begin; i < range.end; ++i) tokens.push_back(b * c.seq_len + i);
        }
      }
      for (const std::int64_t t : tokens) part.starts.push_back(x.starts[static_cast<std::size_t>(t)]);
      const auto of_queries = [&](const Tensor& whole) {
        const auto rows = static_cast<std::int64_t>(tokens.size());
        const Tensor result = arena_.allocate({rows, whole.dim(1)}, whole.dtype());
        const std::size_t bytes = static_cast<std::size_t>(whole.dim(1)) * size_of(whole.dtype());
        for (std::int64_t r = 0; r < rows; ++r) {
          std::memcpy(result[r].raw(), whole[tokens[static_cast<std::size_t>(r)]].raw(), bytes);
        }
        return result;
      };
      part.in.q = of_queries(x.in.q);
      part.in.doc_start_T = ints(part.starts);
      part.d_o = of_queries(x.d_o);
      part.o = randoms(of_queries(x.o).shape());
      part.lse = random(of_queries(x.lse).shape());
      part.d_q = randoms(part.in.q.shape());
      part.d_kv = randoms(x.d_kv.shape());
      part.d_k_rope = randoms(x.d_k_rope.shape());
      run(part);
      EXPECT_LE(relative_error(part.o, doubles(of_queries(x.o))), bound_for(dtype(), kForwardBound));
      EXPECT_LE(relative_error(part.lse, doubles(of_queries(x.lse))), kForwardBound);
      EXPECT_LE(relative_error(part.d_q, doubles(of_queries(x.d_q))), bound_for(dtype(), kBackwardBound));
      d_kv = plus(d_kv, doubles(part.d_kv));
      d_k_rope = plus(d_k_rope, doubles(part.d_k_rope));
    }
    EXPECT_LE(relative_error(x.d_kv, d_kv), bound_for(dtype(), kBackwardBound));
    EXPECT_LE(relative_error(x.d_k_rope, d_k_rope), bound_for(dtype(), kBackwardBound));
  }

  const cpu::KernelTable* table_ = nullptr;  // null means the operators, which take the best kernels
};

TEST_P(MlaAttention, PartsOfASequence) {
  const auto check_all = [&] {
    for (const std::int64_t docs : {std::int64_t{0}, kIrregular}) {
      check_parts({2, 8, 2, 4, 2, 6, docs}, {{{0, 2}, {6, 8}}, {{2, 6}}});
      check_parts({1, 9, 1, 3, 2, 5, docs}, {{{0, 1}, {8, 9}}, {{1, 4}, {5, 8}}, {{4, 5}}});  // all sizes are odd
      check_parts({2, 156, 1, 4, 2, 6, docs}, {{{0, 39}, {117, 156}}, {{39, 117}}});
      check_parts({1, 1204, 1, 4, 2, 4, docs}, {{{0, 301}, {903, 1204}}, {{301, 602}, {602, 903}}});
    }
  };
  check_all();
  for (const cpu::KernelTable* table : kernel_tables()) {
    table_ = table;
    SCOPED_TRACE(table->name);
    check_all();
  }
}

TEST_P(MlaAttention, QueriesThatAreNoRangesThrow) {
  Operands x = make({1, 8, 1, 2, 2, 2, 0});
  const auto fails = [&](std::vector<TokenRange> ranges) {
    x.dims.queries = ranges;
    EXPECT_THROW(mla_attention_forward(context(), x.dims, x.in, x.o, x.lse), InternalError);
  };
  fails({{0, 9}});
  fails({{4, 8}, {0, 4}});
  fails({{0, 4}, {4, 4}});
  fails({{0, 2}, {2, 4}, {4, 8}});
  fails({{0, 4}});  // there are 8 rows
}

TEST_P(MlaAttention, SmallSizes) {
  check({1, 1, 1, 2, 2, 2, 0});     // a single token
  check({2, 5, 2, 4, 2, 4, 0});     // two sequences
  check({1, 19, 3, 10, 6, 14, 0});  // multiples of nothing
  check({1, 7, 2, 5, 4, 3, 0});     // odd dims: bfloat16 pairs span nope and rope, and rows start at odd places
  check({2, 12, 2, 4, 2, 6, 5});    // documents
}

TEST_P(MlaAttention, LongerThanABlock) {
  check({1, 70, 1, 4, 2, 4, 0});    // a block of queries and keys and a tail
  check({1, 135, 1, 2, 2, 2, 0});   // more than a block of the forward's keys
  check({1, 150, 1, 2, 2, 2, 40});  // documents that span blocks; blocks that no query reads
}

// The sequences are longer than a block of either pass, and documents leave blocks out. Gradients are checked along one
// direction per operand, because differences for each number would take minutes.
TEST_P(MlaAttention, LongSequences) {
  for (const std::int64_t doc_length : {0, 310}) {
    const Case c{1, 700, 2, 6, 4, 6, doc_length};
    check(c, /*differences=*/false);
    const Operands x = make(c);
    mla_attention_forward(context(), x.dims, x.in, x.o, x.lse);
    mla_attention_backward(context(), x.dims, x.in, x.o, x.lse, x.d_o, x.d_q, x.d_kv, x.d_k_rope);
    const Tensor inputs[] = {x.in.q, x.in.kv, x.in.k_rope}, gradients[] = {x.d_q, x.d_kv, x.d_k_rope};
    for (std::size_t operand = 0; operand < 3; ++operand) {
      const Doubles direction = doubles(random(inputs[operand].shape()));
      const auto loss = [&](double step) {
        Doubles values[3], o, lse;
        for (std::size_t i = 0; i < 3; ++i) values[i] = doubles(inputs[i]);
        for (std::size_t i = 0; i < direction.size(); ++i) values[operand][i] += step * direction[i];
        reference(c, values[0], values[1], values[2], x.starts, static_cast<double>(x.dims.scale), o, lse);
        return dot(o, doubles(x.d_o));
      };
      const double expected = (loss(1e-5) - loss(-1e-5)) / 2e-5;
      const Doubles gradient = doubles(gradients[operand]);
      EXPECT_NEAR(dot(gradient, direction), expected,
                  bound_for(dtype(), kBackwardBound) * std::sqrt(dot(gradient, gradient)))
          << operand;
    }
  }
}

TEST_P(MlaAttention, UsualDims) { check({1, 200, 2, 128, 64, 128, 90}, /*differences=*/false); }

// Documents have one token or many, start at odd places, and differ between sequences. They span blocks of keys and
// queries.
TEST_P(MlaAttention, IrregularDocuments) {
  check({3, 30, 2, 3, 2, 4, kIrregular});
  check({2, 150, 1, 2, 2, 2, kIrregular});
  check({2, 600, 1, 4, 2, 4, kIrregular}, /*differences=*/false);
  check({2, 9, 2, 4, 2, 6, 1});  // each token is a document
}

// Scores reach a hundred, so most weights vanish. The float32 rounding of a score, 1e-5, is the relative error of its
// weight.
TEST_P(MlaAttention, LargeScores) { check({1, 40, 2, 4, 2, 4, 0, 50.0f}, /*differences=*/true, /*slack=*/10.0); }

// Uses every instruction set of this processor in turn. Operators otherwise take the best one.
TEST_P(MlaAttention, EveryInstructionSet) {
  for (const cpu::KernelTable* table : kernel_tables()) {
    table_ = table;
    SCOPED_TRACE(table->name);
    check({1, 1, 1, 2, 2, 2, 0});
    check({2, 19, 2, 5, 4, 3, 0});
    check({2, 12, 2, 4, 2, 6, 5});
    check({1, 70, 1, 18, 6, 10, kIrregular});
    check({1, 700, 1, 6, 4, 6, 310}, /*differences=*/false);
  }
}

TEST_P(MlaAttention, SameAtAnyNumberOfThreads) {
  const Operands x = make({2, 100, 3, 16, 8, 16, 0});
  expect_same_for_any_threads(
      [&] {
        mla_attention_forward(context(), x.dims, x.in, x.o, x.lse);
        mla_attention_backward(context(), x.dims, x.in, x.o, x.lse, x.d_o, x.d_q, x.d_kv, x.d_k_rope);
      },
      {x.o, x.lse, x.d_q, x.d_kv, x.d_k_rope});
}

TESSERA_BOTH_TYPES(MlaAttention);

TEST(MlaDims, AllAreQueries) {
  MlaDims dims{.num_seqs = 1, .seq_len = 8, .num_heads = 1, .dim_nope = 1, .dim_rope = 1, .dim_v = 1, .scale = 1.0f};
  EXPECT_TRUE(dims.all_are_queries());
  const TokenRange whole[] = {{0, 8}}, part[] = {{0, 4}}, two[] = {{0, 2}, {6, 8}};
  dims.queries = whole;
  EXPECT_TRUE(dims.all_are_queries());
  dims.queries = part;
  EXPECT_FALSE(dims.all_are_queries());
  dims.queries = two;
  EXPECT_FALSE(dims.all_are_queries());
}

}  // namespace
}  // namespace tessera
