// A layer's dispatch and combine, forward and backward, on every rank of a group. The numbers of operands tell where
// they are from. Every rank can compute the operands of all ranks, and so what each rank must get.
//
// Numbers lie on a coarse grid, so that sums and products are exact in float32 and results are known to the bit. For a
// comparison of backends they may be any numbers.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "ep/backends/make_dispatcher.h"
#include "ep/dispatcher.h"
#include "ops/quantize/quantize.h"
#include "tests/comm/delayed_transport.h"
#include "tests/comm/ranks.h"
#include "tests/ep/whole_calls.h"
#include "tests/ops/harness.h"

namespace tessera::ep_test {

/// Sleeps before some of the protocol's steps.
class RandomDelays : public ep::StepHook {
 public:
  RandomDelays(std::uint64_t seed, int rank)
      : random_(seed * 100 + static_cast<std::uint64_t>(rank), stream_of("test.step_delay")) {}

  void before(const ep::Step&) override {
    const auto words = random_.words(num_steps_++);
    if (words[0] % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(words[1] % 1500));
  }

 private:
  Philox random_;
  std::uint64_t num_steps_ = 0;
};

/// Says which experts tokens choose. With kOwnDomain they choose only those in the domain of the token's rank, and with
/// kNextDomain only those in the next.
enum class Skew { kUniform, kForced, kOneExpert, kOneRank, kEmptyRank, kHalfOfTheExperts, kOwnDomain, kNextDomain };

struct Case {
  std::int64_t num_tokens = 37, dim = 40, num_experts = 12, top_k = 3;
  DType dtype = DType::kFloat32;
  std::int64_t alignment = 1;
  Skew skew = Skew::kUniform;
  bool plain = true, quantized = false;  // forms of the rows
  bool in_window = false;                // plain rows stay in the window, if they arrive in one
  PayloadPrecision dispatch_forward = PayloadPrecision::kDefault, combine_backward = PayloadPrecision::kDefault;
  double capacity_factor = 0.0;
  bool on_grid = true;
  int num_domains = 1;  // with more than one, an exchange is in front of the dispatcher
  /// If this is more than one, the ranks are the first of so many domains. Tokens then choose experts of the others,
  /// too.
  std::int64_t one_of_domains = 1;

  DispatchOptions options() const {
    return {.max_tokens = num_tokens,
            .dim = dim,
            .num_experts = num_experts,
            .top_k = top_k,
            .num_domains = one_of_domains,
            .dtype = dtype,
            .max_alignment = alignment,
            .capacity_factor = capacity_factor,
            .dispatch_forward = dispatch_forward,
            .combine_backward = combine_backward};
  }
};

inline constexpr PayloadPrecision kMxfp8 = PayloadPrecision::kMxfp8;

/// Returns cases in float32. Tests also run each of them in bfloat16.
inline std::vector<Case> cases() {
  return {
      {},
      {.alignment = 32, .quantized = true, .in_window = true},
      {.alignment = 128, .skew = Skew::kForced, .plain = false, .quantized = true},
      {.skew = Skew::kEmptyRank, .quantized = true, .dispatch_forward = kMxfp8, .combine_backward = kMxfp8},
      {.alignment = 32, .skew = Skew::kOneRank, .plain = false, .quantized = true, .dispatch_forward = kMxfp8},
      {.top_k = 1, .alignment = 32, .skew = Skew::kOneExpert, .in_window = true, .combine_backward = kMxfp8},
      {.num_tokens = 3, .dim = 300, .top_k = 12, .skew = Skew::kHalfOfTheExperts},
      {.alignment = 4, .skew = Skew::kOneExpert, .in_window = true, .on_grid = false},
      {.num_tokens = 50,
       .skew = Skew::kHalfOfTheExperts,
       .quantized = true,
       .dispatch_forward = kMxfp8,
       .combine_backward = kMxfp8,
       .on_grid = false},
      {.num_tokens = 300, .dim = 64, .alignment = 32, .in_window = true, .capacity_factor = 2.5, .on_grid = false},
  };
}

/// Holds a rank's groups for dispatch over several domains.
struct Domains {
  Domains(ProcessGroup& group, int num_domains)
      : all(group),
        within(part(group.rank() / (group.size() / num_domains), "ep_within", num_domains)),
        across(part(group.rank() % (group.size() / num_domains), "ep_across", num_domains)) {}
  DomainGroups groups() { return {.all = all, .within = within, .across = across}; }
  /// Makes a direct dispatcher, for one domain or for several.
  std::unique_ptr<Dispatcher> make_direct(const DispatchOptions& options, ep::StepHook* hook = nullptr) {
    if (across.size() == 1) return make_dispatcher(DispatchBackend::kDirect, all, options, hook);
    return make_two_level_dispatcher(groups(), options, hook);
  }

  ProcessGroup& all;
  ProcessGroup within, across;  // none, if there is one domain

 private:
  ProcessGroup part(int color, const char* axis, int num_domains) const {
    return num_domains == 1 ? ProcessGroup() : all.split(color, all.rank(), axis);
  }
};

/// Makes a dispatcher and allocates its memory.
inline std::unique_ptr<Dispatcher> allocated_dispatcher(DispatchBackend backend, ProcessGroup& group,
                                                        const DispatchOptions& options, ep::StepHook* hook = nullptr) {
  std::unique_ptr<Dispatcher> dispatcher = make_dispatcher(backend, group, options, hook);
  dispatcher->allocate();
  return dispatcher;
}

using Bytes = std::vector<std::uint8_t>;

inline Bytes bytes(const Tensor& x) {
  const auto* begin = static_cast<const std::uint8_t*>(x.raw());
  return {begin, begin + x.num_bytes()};
}

inline void set_bytes(const Tensor& x, int value) {
  if (x.defined() && x.num_bytes() > 0) std::memset(x.raw(), value, x.num_bytes());
}

/// Holds the output of one rank's router.
struct HostRouting {
  std::vector<std::int32_t> expert_ids, counts;
  std::vector<float> weights;
};

/// Computes one pass of a layer. Passes with another `pass` have other numbers.
class Layer {
 public:
  Layer(const Case& the_case, int num_ranks, std::uint64_t pass)
      : case_(the_case),
        num_ranks_(num_ranks),
        ranks_per_domain_(num_ranks / the_case.num_domains),
        pass_(pass),
        local_(the_case.num_experts / num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) routings_.push_back(route(rank));
  }

  const Case& test_case() const { return case_; }
  const HostRouting& routing(int rank) const { return routings_[static_cast<std::size_t>(rank)]; }

  /// Returns the number of `what` for this key.
  float number(const char* what, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t j = 0) const {
    const std::uint32_t word = word_of(what, a, b, c, j);
    if (case_.on_grid) return static_cast<float>(static_cast<int>(word % 255) - 127) / 64.0f;  // 7 bits and a sign
    return static_cast<float>(BFloat16(static_cast<float>(word) * 0x1p-31f - 1.0f)) +
           (case_.dtype == DType::kFloat32 ? static_cast<float>(word % 1024) * 0x1p-20f : 0.0f);
  }

  /// Expects the gradients of the weights for all of a rank's choices. Those without an expert have 0.
  void expect_d_weights(std::span<const float> d_weights_tK, int rank) const {
    const std::vector<std::int32_t>& expert_ids = routing(rank).expert_ids;
    ASSERT_EQ(d_weights_tK.size(), expert_ids.size());
    for (std::size_t slot = 0; slot < expert_ids.size(); ++slot) {
      const auto at = static_cast<std::int64_t>(slot);
      const float expected =
          expert_ids[slot] == kNoExpert ? 0.0f : number("d_weight", rank, at / case_.top_k, at % case_.top_k);
      ASSERT_EQ(d_weights_tK[slot], expected) << slot;
    }
  }

  float token(int rank, std::int64_t t, std::int64_t j) const { return number("y", rank, t, 0, j); }

  /// Returns a tensor [t, D] of a rank, such as y or the gradient of the layer's output.
  Tensor tokens(Arena& arena, const char* what, int rank) const {
    const Tensor x = arena.allocate({case_.num_tokens, case_.dim}, case_.dtype);
    for (std::int64_t t = 0; t < case_.num_tokens; ++t) {
      for (std::int64_t j = 0; j < case_.dim; ++j) set(x, t, j, number(what, rank, t, 0, j));
    }
    return x;
  }

  TokenRouting tensors(Arena& arena, int rank) const {
    const HostRouting& host = routing(rank);
    const TokenRouting routing{.expert_ids_tK = arena.allocate({case_.num_tokens, case_.top_k}, DType::kInt32),
                               .weights_tK = arena.allocate({case_.num_tokens, case_.top_k}, DType::kFloat32),
                               .counts_E = arena.allocate({case_.num_experts}, DType::kInt32)};
    if (arena.device() == Device::kMeta) return routing;
    std::copy(host.expert_ids.begin(), host.expert_ids.end(), routing.expert_ids_tK.data<std::int32_t>());
    std::copy(host.weights.begin(), host.weights.end(), routing.weights_tK.data<float>());
    std::copy(host.counts.begin(), host.counts.end(), routing.counts_E.data<std::int32_t>());
    return routing;
  }

  /// Describes the content of a row. A source of -1 means padding.
  struct Row {
    int source = -1;
    std::int64_t token = 0, k = 0, expert = 0;
  };
  struct Rows {
    std::vector<Row> rows;  // includes padding
    std::vector<std::int32_t> offsets{0};
  };
  Rows rows_of(int rank) const {
    Rows result;
    for (std::int64_t expert = rank * local_; expert < (rank + 1) * local_; ++expert) {
      for (int i = 0; i < num_ranks_; ++i) {
        // Rows are in the order of the source's place in its domain, and then of its domain.
        const int source = i % case_.num_domains * ranks_per_domain_ + i / case_.num_domains;
        const auto& ids = routing(source).expert_ids;
        for (std::size_t slot = 0; slot < ids.size(); ++slot) {
          if (ids[slot] != expert) continue;
          const auto at = static_cast<std::int64_t>(slot);
          result.rows.push_back({source, at / case_.top_k, at % case_.top_k, expert});
        }
      }
      const auto alignment = static_cast<std::size_t>(case_.alignment);
      result.rows.resize((result.rows.size() + alignment - 1) / alignment * alignment);
      result.offsets.push_back(static_cast<std::int32_t>(result.rows.size()));
    }
    return result;
  }

  /// Returns the sum of a token's rows of `what`, made as every backend makes it (ep/dispatcher.h), on top of y.
  double sum(const char* what, int rank, std::int64_t t, std::int64_t j, bool weighted, double y, bool per_rank) const {
    const HostRouting& host = routing(rank);
    double total = y, in_domain = 0.0;
    for (int owner = 0; owner < num_ranks_; ++owner) {
      double part = 0.0;
      for (std::int64_t k = 0; k < case_.top_k; ++k) {
        const auto slot = static_cast<std::size_t>(t * case_.top_k + k);
        const std::int64_t expert = host.expert_ids[slot];
        if (expert == kNoExpert || expert / local_ != owner) continue;
        const auto weight = weighted ? static_cast<double>(host.weights[slot]) : 1.0;
        part += weight * static_cast<double>(number(what, rank, t, expert + 1, j));
      }
      in_domain += per_rank ? rounded(part) : part;
      if ((owner + 1) % ranks_per_domain_ != 0) continue;
      total += case_.num_domains > 1 ? rounded(in_domain) : in_domain;
      in_domain = 0.0;
    }
    return rounded(total);
  }

  double rounded(double x) const {
    const auto narrow = static_cast<float>(x);
    return static_cast<double>(case_.dtype == DType::kFloat32 ? narrow : static_cast<float>(BFloat16(narrow)));
  }

  static void set(const Tensor& x, std::int64_t row, std::int64_t j, float value) {
    const std::int64_t at = row * x.dim(1) + j;
    if (x.dtype() == DType::kFloat32) {
      x.data<float>()[at] = value;
    } else {
      x.data<BFloat16>()[at] = BFloat16(value);
    }
  }

 private:
  /// Mixes the key well enough for numbers of tests (the finalizer of MurmurHash3).
  std::uint32_t word_of(const char* what, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t j) const {
    std::uint64_t hash = pass_ * 0x9e3779b97f4a7c15u + stream_of(what);
    for (const std::int64_t part : {a, b, c, j}) {
      hash = (hash ^ static_cast<std::uint64_t>(part)) * 0xff51afd7ed558ccdu;
      hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53u;
      hash ^= hash >> 33;
    }
    return static_cast<std::uint32_t>(hash);
  }

  HostRouting route(int rank) const {
    HostRouting host;
    host.counts.resize(static_cast<std::size_t>(case_.num_experts), 0);
    const Philox philox(pass_ * 100 + static_cast<std::uint64_t>(rank), stream_of("test.routing"));
    for (std::int64_t t = 0; t < case_.num_tokens; ++t) {
      // A token chooses the K allowed experts with the lowest random numbers, in their order.
      std::vector<std::pair<std::uint32_t, std::int32_t>> drawn;
      const std::int64_t num_experts = case_.num_experts * case_.one_of_domains;
      for (std::int32_t expert = 0; expert < num_experts; ++expert) {
        const auto index = static_cast<std::uint64_t>(t * num_experts + expert);
        if (allowed(rank, expert)) drawn.emplace_back(draw(expert, philox.words(index)[0]), expert);
      }
      std::sort(drawn.begin(), drawn.end());
      for (std::int64_t k = 0; k < case_.top_k; ++k) {
        const std::int64_t slot = t * case_.top_k + k;
        const std::int32_t expert = case_.skew == Skew::kForced ? static_cast<std::int32_t>(slot % num_experts)
                                                                : drawn[static_cast<std::size_t>(k)].second;
        const bool is_here = expert < case_.num_experts;
        host.expert_ids.push_back(is_here ? expert : kNoExpert);
        if (is_here) ++host.counts[static_cast<std::size_t>(expert)];
        const std::uint32_t word = philox.words(static_cast<std::uint64_t>(slot), 1)[0];
        host.weights.push_back(case_.on_grid ? static_cast<float>(word % 5) * 0.25f
                                             : static_cast<float>(word) * 0x1p-32f);
      }
    }
    return host;
  }

  bool allowed(int rank, std::int32_t expert) const {
    const std::int64_t domain = expert / local_ / ranks_per_domain_, own = rank / ranks_per_domain_;
    switch (case_.skew) {
      case Skew::kOwnDomain:
        return domain == own;
      case Skew::kNextDomain:
        return domain == (own + 1) % case_.num_domains;
      case Skew::kOneRank:
        return expert / local_ == num_ranks_ - 1;
      case Skew::kEmptyRank:
        return num_ranks_ == 1 || expert / local_ != 1;
      case Skew::kHalfOfTheExperts:
        return expert % 2 == static_cast<std::int32_t>(pass_ % 2);
      default:
        return true;
    }
  }
  /// Makes expert 5 everyone's first choice, if the case asks for it.
  std::uint32_t draw(std::int32_t expert, std::uint32_t word) const {
    return case_.skew == Skew::kOneExpert && expert == 5 ? 0 : word;
  }

  Case case_;
  int num_ranks_, ranks_per_domain_;
  std::uint64_t pass_;
  std::int64_t local_;
  std::vector<HostRouting> routings_;
};

/// Makes one rank's pass of a layer, call by call, and checks each call. It collects the results, to compare backends.
class LayerRun {
 public:
  LayerRun(const Layer& layer, DispatchBackend backend, Dispatcher& dispatcher, const ProcessGroup& group,
           const Context& op)
      : layer_(layer),
        case_(layer.test_case()),
        dispatcher_(dispatcher),
        calls_(dispatcher),
        rank_(group.rank()),
        num_ranks_(group.size()),
        op_(op),
        crosses_(backend != DispatchBackend::kLocal),
        expected_(layer.rows_of(group.rank())) {
    saved_ = dispatcher.allocate_saved(op, {.name = "layers.7.moe", .alignment = case_.alignment},
                                       layer.tensors(*op.arena, rank_));
    for (const Tensor& x : {saved_.offsets_e1, saved_.weights_R}) set_bytes(x, 0xff);
  }

  const DispatchSaved& saved() const { return saved_; }
  const std::map<std::string, Bytes>& results() const { return results_; }

  /// Makes all calls, with sums assigned or added. Checks that rows and gradients are still there after the next call.
  void make_all(Write combine_write, Write backward_write) {
    dispatch();
    combine(combine_write);
    check_rows("kept");
    if (case_.in_window) {  // the experts' outputs may lie over the rows
      const Tensor out_RD = rows("out");
      std::memcpy(x_RD_.plain.raw(), out_RD.raw(), out_RD.num_bytes());
      combine(x_RD_.plain, combine_write);
    }
    combine_backward();
    dispatch_again();
    check_gradients("kept gradients");
    dispatch_backward(backward_write);
  }

  void dispatch() {
    x_RD_ = operand(case_.in_window ? dispatcher_.rows_in_window(op_, saved_) : Tensor());
    calls_.dispatch(op_, layer_.tokens(*op_.arena, "y", rank_), saved_, x_RD_);
    EXPECT_EQ(doubles(saved_.offsets_e1), Doubles(expected_.offsets.begin(), expected_.offsets.end()));
    std::vector<float> weights(static_cast<std::size_t>(saved_.num_rows()), 0.0f);
    for (std::size_t r = 0; r < expected_.rows.size(); ++r) {
      const Layer::Row& row = expected_.rows[r];
      if (row.source < 0) continue;
      weights[r] = layer_.routing(row.source).weights[static_cast<std::size_t>(row.token * case_.top_k + row.k)];
    }
    EXPECT_TRUE(std::ranges::equal(std::span(saved_.weights_R.data<float>(), weights.size()), weights));
    check_rows("dispatch");
  }

  /// Checks the rows of the forward. After later calls, this shows that they are still there.
  void check_rows(const std::string& call) { check_rows(call, "y", case_.dispatch_forward, x_RD_); }

  void dispatch_again() {
    poison_operand(x_RD_);
    calls_.dispatch_again(op_, layer_.tokens(*op_.arena, "y", rank_), saved_, x_RD_);
    check_rows("dispatch again");
  }

  void combine(Write write = Write::kAssign) { combine(rows("out"), write); }
  void combine(const Tensor& out_RD, Write write) {
    const Tensor y_tD = layer_.tokens(*op_.arena, "before", rank_);
    calls_.combine(op_, out_RD, saved_, y_tD, write);
    check_sums("combine", "out", /*weighted=*/true, write, y_tD);
  }

  void combine_backward() {
    d_out_RD_ = operand(case_.in_window ? dispatcher_.gradients_in_window(op_, saved_) : Tensor());
    calls_.combine_backward(op_, layer_.tokens(*op_.arena, "d_y", rank_), saved_, d_out_RD_);
    check_gradients("combine backward");
  }
  void check_gradients(const std::string& call) { check_rows(call, "d_y", case_.combine_backward, d_out_RD_); }

  void dispatch_backward(Write write = Write::kAccumulate) {
    const Tensor d_x_RD = rows("d_x"), d_y_tD = layer_.tokens(*op_.arena, "before", rank_);
    const Tensor d_weights_R = op_.arena->allocate({saved_.num_rows()}, DType::kFloat32);
    const Tensor d_weights_tK = op_.arena->allocate({case_.num_tokens, case_.top_k}, DType::kFloat32);
    set_bytes(d_weights_R, 0xff);
    set_bytes(d_weights_tK, 0xff);
    for (std::size_t r = 0; r < expected_.rows.size(); ++r) {
      const Layer::Row& row = expected_.rows[r];
      if (row.source < 0) continue;
      d_weights_R.data<float>()[r] = layer_.number("d_weight", row.source, row.token, row.k);
    }
    calls_.dispatch_backward(op_, d_x_RD, d_weights_R, saved_, d_y_tD, write, d_weights_tK);
    check_sums("dispatch backward", "d_x", /*weighted=*/false, write, d_y_tD);
    layer_.expect_d_weights(std::span(d_weights_tK.data<float>(), layer_.routing(rank_).weights.size()), rank_);
  }

  /// Returns rows as experts make them: numbers that tell the row, and NaN in padding and beyond.
  Tensor rows(const char* what) const {
    const Tensor x_RD = op_.arena->allocate({saved_.num_rows(), case_.dim}, case_.dtype);
    set_bytes(x_RD, 0xff);
    for (std::size_t r = 0; r < expected_.rows.size(); ++r) {
      const Layer::Row& row = expected_.rows[r];
      if (row.source < 0) continue;
      for (std::int64_t j = 0; j < case_.dim; ++j) {
        Layer::set(x_RD, static_cast<std::int64_t>(r), j,
                   layer_.number(what, row.source, row.token, row.expert + 1, j));
      }
    }
    return x_RD;
  }

 private:
  GemmOperand operand(const Tensor& in_window) const {
    const Shape shape{saved_.num_rows(), case_.dim};
    const auto allocate = [&](const Shape& s, DType dtype) { return op_.arena->allocate(s, dtype); };
    GemmOperand x;
    if (case_.plain) x.plain = in_window.defined() ? in_window : allocate(shape, case_.dtype);
    if (case_.quantized) {
      x.rows = mx::allocate_quantized(shape, mx::Format{}, allocate);
      x.columns = mx::allocate_quantized(mx::transposed(shape), mx::Format{}, allocate);
    }
    poison_operand(x);
    return x;
  }

  static void poison_operand(const GemmOperand& x) {
    for (const Tensor& part : {x.plain, x.rows.elements, x.rows.scales, x.columns.elements, x.columns.scales}) {
      set_bytes(part, 0xff);
    }
  }

  void check_rows(const std::string& call, const char* what, PayloadPrecision precision, const GemmOperand& x_RD) {
    const ArenaScope scope(*op_.arena);
    const auto used = static_cast<std::int64_t>(expected_.rows.size());
    const auto allocate = [&](const Shape& shape, DType dtype) { return op_.arena->allocate(shape, dtype); };
    const Shape shape{std::max<std::int64_t>(used, 1), case_.dim};
    const Tensor plain = allocate(shape, case_.dtype);
    mx::Quantized rows_q = mx::allocate_quantized(shape, mx::Format{}, allocate);
    const mx::Quantized columns_q = mx::allocate_quantized(mx::transposed(shape), mx::Format{}, allocate);
    for (const Tensor& x : {plain, rows_q.elements, rows_q.scales}) set_bytes(x, 0);
    const bool packed = precision == PayloadPrecision::kMxfp8 && crosses_;
    for (int source = 0; source < num_ranks_; ++source) {
      const ArenaScope source_scope(*op_.arena);
      const Tensor tokens = layer_.tokens(*op_.arena, what, source);
      const mx::Quantized q = mx::allocate_quantized(tokens.shape(), mx::Format{}, allocate);
      quantize(op_, tokens, q, {});
      if (packed) dequantize(op_, q, tokens);
      for (std::int64_t r = 0; r < used; ++r) {
        const Layer::Row& row = expected_.rows[static_cast<std::size_t>(r)];
        if (row.source != source) continue;
        copy_row(tokens, row.token, plain, r);
        copy_row(q.elements, row.token, rows_q.elements, r);
        copy_row(q.scales, row.token, rows_q.scales, r);
      }
    }
    quantize(op_, plain, {}, columns_q);
    if (used == 0) return;
    expect_rows(call + " plain", x_RD.plain, plain);
    expect_rows(call + " elements", x_RD.rows.elements, rows_q.elements);
    expect_rows(call + " scales", x_RD.rows.scales, rows_q.scales);
    // Of columns, only the first numbers of every line count.
    expect_columns(call + " columns", x_RD.columns.elements, columns_q.elements);
    expect_columns(call + " columns' scales", x_RD.columns.scales, columns_q.scales);
  }

  void expect_rows(const std::string& name, const Tensor& actual, const Tensor& expected) {
    if (!actual.defined()) return;
    const Bytes& got = results_[name] = bytes(actual.rows(0, expected.dim(0)));
    EXPECT_TRUE(got == bytes(expected)) << name << " on rank " << rank_;
  }
  void expect_columns(const std::string& name, const Tensor& actual, const Tensor& expected) {
    if (!actual.defined()) return;
    Bytes got;
    for (std::int64_t line = 0; line < actual.dim(0); ++line) {
      const auto* begin = static_cast<const std::uint8_t*>(actual.raw()) + line * actual.dim(1);
      got.insert(got.end(), begin, begin + expected.dim(1));
    }
    EXPECT_TRUE(got == bytes(expected)) << name << " on rank " << rank_;
    results_[name] = got;
  }

  void check_sums(const std::string& call, const char* what, bool weighted, Write write, const Tensor& y_tD) {
    results_[call] = bytes(y_tD);
    Doubles expected;
    for (std::int64_t t = 0; t < case_.num_tokens; ++t) {
      for (std::int64_t j = 0; j < case_.dim; ++j) {
        const double before =
            write == Write::kAccumulate ? static_cast<double>(layer_.number("before", rank_, t, 0, j)) : 0.0;
        expected.push_back(layer_.sum(what, rank_, t, j, weighted, before, crosses_));
      }
    }
    if (case_.on_grid) {
      EXPECT_TRUE(doubles(y_tD) == expected) << call << " on rank " << rank_;
    } else {
      EXPECT_LE(relative_error(y_tD, expected), bound_for(case_.dtype, kForwardBound)) << call;
    }
  }

  static void copy_row(const Tensor& from, std::int64_t row, const Tensor& to, std::int64_t r) {
    const std::size_t num_bytes = static_cast<std::size_t>(from.dim(1)) * size_of(from.dtype());
    std::memcpy(static_cast<std::byte*>(to.raw()) + static_cast<std::size_t>(r) * num_bytes,
                static_cast<const std::byte*>(from.raw()) + static_cast<std::size_t>(row) * num_bytes, num_bytes);
  }

  const Layer& layer_;
  const Case& case_;
  Dispatcher& dispatcher_;
  WholeCalls calls_;
  int rank_, num_ranks_;
  Context op_;
  bool crosses_;  // rows cross between ranks, and sums are made per rank
  Layer::Rows expected_;
  DispatchSaved saved_;
  GemmOperand x_RD_, d_out_RD_;
  std::map<std::string, Bytes> results_;
};

/// Returns the message of the Failure that body() throws.
template <typename Failure, typename Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "nothing was thrown";
}

}  // namespace tessera::ep_test
