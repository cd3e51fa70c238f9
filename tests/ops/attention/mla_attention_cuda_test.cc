#include "ops/attention/mla_attention.h"
#include "ops/runtime/attention_library.h"
#include "ops/runtime/libraries.h"
#include "tests/ops/parity.h"

namespace tessera {
namespace {

/// Takes the place of a length of documents: queries begin in the middle of documents, which no table of documents can
/// express. (A length of 0 means whole sequences, and the dims say so.)
constexpr std::int64_t kNoDocuments = -1;

struct Case {
  std::int64_t num_seqs, seq_len, heads, nope, rope, v, doc_length;
};

class MlaAttentionCuda : public ParityTest {
 protected:
  struct Operands {
    MlaDims dims;
    MlaOperands in;
    Tensor o, lse, d_o, d_q, d_kv, d_k_rope;
  };

  static std::int32_t doc_start(const Case& c, std::int64_t position) {
    if (c.doc_length == 0) return 0;
    if (c.doc_length == kNoDocuments) return static_cast<std::int32_t>(position / 3);
    return static_cast<std::int32_t>(position / c.doc_length * c.doc_length);
  }

  static MlaDims dims_of(const Case& c, const std::vector<TokenRange>& queries = {}) {
    return {.num_seqs = c.num_seqs,
            .seq_len = c.seq_len,
            .num_heads = c.heads,
            .dim_nope = c.nope,
            .dim_rope = c.rope,
            .dim_v = c.v,
            .scale = static_cast<float>(1.0 / std::sqrt(c.nope + c.rope)),
            .queries = queries,
            .whole_sequences = c.doc_length == 0};
  }

  Operands make(const Case& c, DType dtype, const std::vector<TokenRange>& queries = {}) {
    Operands x;
    x.dims = dims_of(c, queries);
    std::vector<std::int32_t> starts;
    const std::vector<TokenRange> all = {{0, c.seq_len}};
    for (std::int64_t seq = 0; seq < c.num_seqs; ++seq) {
      for (const TokenRange& range : queries.empty() ? all : queries) {
        for (std::int64_t i = range.begin; i < range.end; ++i) starts.push_back(doc_start(c, i));
      }
    }
    const auto tokens = static_cast<std::int64_t>(starts.size()), keys = c.num_seqs * c.seq_len;
    x.in = {.q = random({tokens, c.heads * (c.nope + c.rope)}, dtype, 2.0),
            .kv = random({keys, c.heads * (c.nope + c.v)}, dtype),
            .k_rope = random({keys, c.rope}, dtype),
            .doc_start_T = ints(starts)};
    x.o = poisoned({tokens, c.heads * c.v}, dtype);
    x.lse = poisoned({tokens, c.heads}, DType::kFloat32);
    x.d_o = random({tokens, c.heads * c.v}, dtype);
    x.d_q = poisoned(x.in.q.shape(), dtype);
    x.d_kv = poisoned(x.in.kv.shape(), dtype);
    x.d_k_rope = poisoned(x.in.k_rope.shape(), dtype);
    return x;
  }

  static MlaOperands on(const Side& side, const MlaOperands& in) {
    return {side(in.q), side(in.kv), side(in.k_rope), side(in.doc_start_T)};
  }

  static void backward(const Side& side, const Operands& x) {
    mla_attention_backward(side.op, x.dims, on(side, x.in), side(x.o), side(x.lse), side(x.d_o), side(x.d_q),
                           side(x.d_kv), side(x.d_k_rope));
  }

  void check(const Case& c, DType dtype, const std::vector<TokenRange>& queries = {}) {
    SCOPED_TRACE(fmt::format("{} x {} tokens, {} heads of {} + {} and {}, documents of {}, {}", c.num_seqs, c.seq_len,
                             c.heads, c.nope, c.rope, c.v, c.doc_length, name_of(dtype)));
    const ArenaScope scope(arena_);
    const Operands x = make(c, dtype, queries);
    expect_close(
        [&](const Side& side) { mla_attention_forward(side.op, x.dims, on(side, x.in), side(x.o), side(x.lse)); },
        {x.o, x.lse}, kBackwardBound);
    // Both sides get the CPU's o and lse.
    expect_close([&](const Side& side) { backward(side, x); }, {x.d_q, x.d_kv, x.d_k_rope}, kBackwardBound);
  }

  /// Returns how many heads a GPU computes at a time. In float32, a forward's scratch is the keys of these alone.
  static std::int64_t heads_of_group(const Case& c) {
    const std::int64_t tokens = c.num_seqs * c.seq_len, qk = c.nope + c.rope;
    Arena arena(Device::kCuda);
    const auto of_token = [&](std::int64_t width) { return arena.allocate({tokens, width}, DType::kFloat32); };
    const MlaOperands in{.q = of_token(c.heads * qk),
                         .kv = of_token(c.heads * (c.nope + c.v)),
                         .k_rope = of_token(c.rope),
                         .doc_start_T = arena.allocate({tokens}, DType::kInt32)};
    const Tensor o = of_token(c.heads * c.v), lse = of_token(c.heads);
    const std::size_t before = arena.used();
    mla_attention_forward({.arena = &arena}, dims_of(c), in, o, lse);
    return static_cast<std::int64_t>((arena.peak() - before) / sizeof(float)) / (tokens * qk);
  }

  /// Makes both passes over many copies of the sequences, and keeps the results of the last copy.
  static void run_copies(const Side& side, const Operands& x, std::int64_t num_copies, Arena& arena) {
    const ArenaScope scope(arena);
    const cuda::Stream& stream = side.op.cuda->stream();
    const auto copies = [&](const Tensor& tensor) {
      std::vector<std::int64_t> dims = tensor.shape().dims();
      dims[0] *= num_copies;
      const Tensor all = arena.allocate(Shape(dims), tensor.dtype());
      for (std::int64_t at = 0; at < dims[0]; at += tensor.dim(0)) {
        cuda::copy_bytes(stream, side(tensor).raw(), tensor.num_bytes(), all.rows(at, at + tensor.dim(0)).raw());
      }
      return all;
    };
    const auto keep_last = [&](const Tensor& all, const Tensor& tensor) {
      const Tensor last = all.rows(all.dim(0) - tensor.dim(0), all.dim(0));
      cuda::copy_bytes(stream, last.raw(), last.num_bytes(), side(tensor).raw());
    };
    MlaDims dims = x.dims;
    dims.num_seqs *= num_copies;
    const MlaOperands in{copies(x.in.q), copies(x.in.kv), copies(x.in.k_rope), copies(x.in.doc_start_T)};
    const Tensor o = copies(x.o), lse = copies(x.lse), d_o = copies(x.d_o);
    const Tensor d_q = copies(x.d_q), d_kv = copies(x.d_kv), d_k_rope = copies(x.d_k_rope);
    const Context op{.arena = &arena, .cuda = side.op.cuda};
    mla_attention_forward(op, dims, in, o, lse);
    mla_attention_backward(op, dims, in, o, lse, d_o, d_q, d_kv, d_k_rope);
    keep_last(o, x.o);
    keep_last(lse, x.lse);
    keep_last(d_q, x.d_q);
    keep_last(d_kv, x.d_kv);
    keep_last(d_k_rope, x.d_k_rope);
  }
};

TEST_F(MlaAttentionCuda, Float32) {
  check({1, 1, 1, 2, 2, 2, 0}, DType::kFloat32);
  check({2, 19, 3, 10, 6, 14, 0}, DType::kFloat32);
  check({1, 150, 2, 5, 4, 3, 40}, DType::kFloat32);
  check({2, 100, 2, 128, 64, 128, 0}, DType::kFloat32);
  check({1, 130, 2, 128, 64, 128, 3}, DType::kFloat32);
  check({1, 70, 1, 160, 96, 256, kNoDocuments}, DType::kFloat32);  // the largest head dims
}

TEST_F(MlaAttentionCuda, Bfloat16) {
  check({1, 64, 1, 128, 64, 128, 0}, DType::kBFloat16);
  check({2, 256, 2, 128, 64, 128, 0}, DType::kBFloat16);
  check({3, 2, 2, 128, 64, 128, 0}, DType::kBFloat16);
  check({2, 203, 4, 128, 64, 128, 0}, DType::kBFloat16);  // tails of tiles
  check({1, 300, 3, 64, 32, 64, 0}, DType::kBFloat16);    // other head dims
  check({1, 90, 2, 10, 6, 14, 0}, DType::kBFloat16);      // head dims that cuDNN does not take
}

TEST_F(MlaAttentionCuda, Documents) {
  check({2, 512, 2, 128, 64, 128, 300}, DType::kBFloat16);
  check({2, 512, 2, 128, 64, 128, 512}, DType::kBFloat16);  // one document per sequence
  check({1, 700, 2, 128, 64, 128, 351}, DType::kBFloat16);
  check({2, 300, 2, 128, 64, 128, 3}, DType::kBFloat16);  // more documents than the table has room for
  check({1, 300, 2, 128, 64, 128, kNoDocuments}, DType::kBFloat16);
}

// Many heads of many tokens are computed in groups: here, in two of 32, three of 32, and three of 36 heads.
TEST_F(MlaAttentionCuda, GroupsOfHeads) {
  arena_ = Arena(std::size_t{300} << 20);
  check({16, 512, 64, 16, 8, 16, 0}, DType::kBFloat16);
  check({16, 512, 96, 16, 8, 16, 200}, DType::kBFloat16);
  check({16, 512, 64, 16, 8, 16, 3}, DType::kBFloat16);  // more documents than the table has room for
  check({32, 240, 108, 5, 4, 3, 100}, DType::kFloat32);
}

TEST_F(MlaAttentionCuda, GroupsHaveAMultipleOfFourHeads) {
  EXPECT_EQ(heads_of_group({16, 512, 64, 16, 8, 16, 0}), 32);
  EXPECT_EQ(heads_of_group({16, 512, 96, 16, 8, 16, 0}), 32);
  EXPECT_EQ(heads_of_group({32, 240, 108, 5, 4, 3, 0}), 36);
  EXPECT_EQ(heads_of_group({32, 240, 70, 5, 4, 3, 0}), 70);  // and not 35
  EXPECT_EQ(heads_of_group({1, 4096, 128, 128, 64, 128, 0}), 64);
  EXPECT_EQ(heads_of_group({2, 4096, 128, 128, 64, 128, 0}), 32);
}

// Two groups of 32 heads, which have the 671B model's dims. Copies of two sequences are enough tokens for groups.
TEST_F(MlaAttentionCuda, GroupsOfLargeHeads) {
  Arena gpu(std::size_t{2} << 30, Device::kCuda);
  for (const std::int64_t docs : {0, 100}) {
    const ArenaScope scope(arena_);
    const Operands x = make({2, 128, 64, 128, 64, 128, docs}, DType::kBFloat16);
    expect_close(
        [&](const Side& side) {
          if (side.op.target() == Device::kCuda) return run_copies(side, x, 32, gpu);
          mla_attention_forward(side.op, x.dims, x.in, x.o, x.lse);
          backward(side, x);
        },
        {x.o, x.lse, x.d_q, x.d_kv, x.d_k_rope}, kBackwardBound);
  }
}

TEST_F(MlaAttentionCuda, AsAGraph) {
  for (const std::int64_t docs : {0, 300, 3}) {
    const ArenaScope scope(arena_);
    const Operands x = make({2, 512, 2, 128, 64, 128, docs}, DType::kBFloat16);
    const std::vector<Tensor> outputs = {x.o, x.lse, x.d_q, x.d_kv, x.d_k_rope};
    expect_close(
        [&](const Side& side) {
          as_graph(side, outputs, [&] {
            mla_attention_forward(side.op, x.dims, on(side, x.in), side(x.o), side(x.lse));
            backward(side, x);
          });
        },
        outputs, kBackwardBound);
  }
}

TEST_F(MlaAttentionCuda, PartsOfASequence) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t docs : {0, 60}) {
      check({2, 156, 2, 16, 8, 16, docs}, dtype, {{0, 39}, {117, 156}});
      check({1, 156, 2, 16, 8, 16, docs}, dtype, {{39, 117}});
    }
  }
}

TEST_F(MlaAttentionCuda, DeterministicGradients) {
  for (const std::int64_t docs : {0, 300}) {
    const ArenaScope scope(arena_);
    const Operands x = make({2, 512, 3, 128, 64, 128, docs}, DType::kBFloat16);
    const Tensor outputs[] = {x.d_q, x.d_kv, x.d_k_rope};
    expect_close(
        [&](const Side& side) {
          mla_attention_forward(side.op, x.dims, on(side, x.in), side(x.o), side(x.lse));
          if (side.op.target() == Device::kCpu) return backward(side, x);
          side.op.cuda->set_deterministic(true);
          std::vector<std::byte> first, again;
          for (int run = 0; run < 5; ++run) {
            backward(side, x);
            again.clear();
            for (const Tensor& output : outputs) {
              const std::size_t at = again.size();
              again.resize(at + output.num_bytes());
              cuda::copy_bytes(side.op.cuda->stream(), side(output).raw(), output.num_bytes(), again.data() + at);
            }
            side.op.cuda->synchronize();
            if (run == 0) first = again;
            EXPECT_TRUE(first == again) << "run " << run;
          }
        },
        {x.d_q, x.d_kv, x.d_k_rope}, kBackwardBound);
  }
}

// A plan that is made without a GPU has at least the scratch that cuDNN asks for on a Hopper.
TEST_F(MlaAttentionCuda, TheEstimateOfScratchSufficesOnHopper) {
  cuda::Runtime runtime;
  if (runtime.compute_capability() != 9) GTEST_SKIP() << "the estimate is for Hopper";
  cuda::AttentionLibrary& library = runtime.libraries().attention();
  const auto check = [&](const cuda::AttentionShape& shape) {
    for (const bool backward : {false, true}) {
      EXPECT_LE(library.workspace_bytes(shape, backward),
                cuda::AttentionLibrary::estimated_workspace_bytes(shape, backward))
          << shape.num_heads << " of " << shape.token_heads << " heads, " << shape.seq_len << " tokens, "
          << shape.max_documents << " documents, deterministic " << shape.deterministic << ", backward " << backward;
    }
  };
  for (const std::int64_t token_heads : {16, 128}) {
    for (const std::int64_t seq_len : {203, 4096}) {
      for (const std::int64_t documents : {0, 40}) {
        for (const bool deterministic : {false, true}) {
          check({.num_seqs = 2,
                 .seq_len = seq_len,
                 .num_heads = std::min<std::int64_t>(token_heads, 32),
                 .token_heads = token_heads,
                 .dim_qk = 192,
                 .dim_v = 128,
                 .v_stride = 256,
                 .max_documents = documents,
                 .scale = 0.1f,
                 .deterministic = deterministic});
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
