// Tests what operators owe (ops/runtime/context.h), in the same way on one call of each. The call is large enough for
// several tasks. Operators that are not here are left to their own tests.
//  * An operand of another shape or another type throws. So does one with gaps between rows, unless the contract says
//    "strided".
//  * Strided operands give the result of contiguous ones, and nothing beside them is written.
//  * Outputs are assigned whatever they held, sums are accumulated, and inputs stay unchanged.
//  * The result is the same for any number of threads, and for a second call, whatever scratch memory held.
//  * Measuring touches no data and takes as much memory as the real call. Scratch is given back.
#include <functional>

#include "ops/attention/mla_attention.h"
#include "ops/attention/rope.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/embedding.h"
#include "ops/elementwise/swiglu.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/grouped_gemm.h"
#include "ops/gemm/quantized_gemm.h"
#include "ops/loss/cross_entropy.h"
#include "ops/norm/rmsnorm.h"
#include "ops/optimizer/adamw.h"
#include "ops/quantize/quantize.h"
#include "ops/routing/permute.h"
#include "ops/routing/router.h"
#include "tests/ops/harness.h"

namespace tessera {
namespace {

enum class Role { kIn, kOut, kSum, kChanged };
enum Freedom : unsigned { kNothing = 0, kAnyType = 1, kAnyShape = 2, kStrided = 4 };
enum class Fault { kNone, kShape, kType, kStride };

/// How a call differs from the plain one: the fault of one operand, and what outputs and sums hold before.
struct Variation {
  Fault fault = Fault::kNone;
  std::size_t operand = 0;
  std::uint32_t garbage = 0;
  bool zero_sums = false;
};

/// Makes the operands of one call, and keeps them.
class Call {
 public:
  struct Operand {
    Tensor tensor, whole;  // `whole` includes the memory beside the tensor
    Role role;
    unsigned freedom;
    Doubles before, whole_before;
  };

  Call(Context context, DType dtype, Variation variation) : context_(context), dtype_(dtype), variation_(variation) {}

  const Context& context() const { return context_; }
  DType dtype() const { return dtype_; }
  const std::vector<Operand>& operands() const { return operands_; }
  std::size_t operand_bytes() const { return operand_bytes_; }
  double result = 0.0;  // the number that an operator returns

  Tensor in(Shape shape, unsigned freedom = kNothing) { return in(shape, dtype_, freedom); }
  Tensor out(Shape shape, unsigned freedom = kNothing) { return out(shape, dtype_, freedom); }
  Tensor in(Shape shape, DType dtype, unsigned freedom = kNothing) { return make(shape, dtype, Role::kIn, freedom); }
  Tensor out(Shape shape, DType dtype, unsigned freedom = kNothing) { return make(shape, dtype, Role::kOut, freedom); }
  Tensor sum(Shape shape, DType dtype = DType::kFloat32, unsigned freedom = kNothing) {
    return make(shape, dtype, Role::kSum, freedom);
  }
  Tensor changed(Shape shape, DType dtype = DType::kFloat32, unsigned freedom = kNothing) {
    return make(shape, dtype, Role::kChanged, freedom);
  }
  Tensor ints(Shape shape, const std::function<std::int64_t(std::int64_t)>& value) {
    return make(shape, DType::kInt32, Role::kIn, kNothing, value);
  }

 private:
  Tensor make(Shape shape, DType dtype, Role role, unsigned freedom,
              const std::function<std::int64_t(std::int64_t)>& value = {}) {
    const std::size_t index = operands_.size();
    const Fault fault = index == variation_.operand ? variation_.fault : Fault::kNone;
    const int last = shape.num_dims() - 1;
    if (fault == Fault::kShape) shape = with_last_dim(shape, shape[last] + 1);
    if (fault == Fault::kType) dtype = dtype == DType::kFloat32 ? DType::kBFloat16 : DType::kFloat32;
    Tensor whole =
        context_.arena->allocate(fault == Fault::kStride ? with_last_dim(shape, shape[last] + 3) : shape, dtype);
    const Tensor tensor = fault == Fault::kStride ? whole.columns(1, shape[last] + 1) : whole;
    operand_bytes_ = context_.arena->used();
    const auto stream = static_cast<std::uint32_t>(index) + (role == Role::kOut ? 1000 * variation_.garbage : 0);
    if (!context_.measuring()) {
      fill(whole, 999, {});
      fill(tensor, stream, role == Role::kSum && variation_.zero_sums ? [](std::int64_t) { return 0; } : value);
      operands_.push_back({tensor, whole, role, freedom, doubles(tensor), doubles(whole)});
    } else {
      operands_.push_back({tensor, whole, role, freedom, {}, {}});
    }
    return tensor;
  }

  static Shape with_last_dim(const Shape& shape, std::int64_t dim) {
    switch (shape.num_dims()) {
      case 1:
        return {dim};
      case 2:
        return {shape[0], dim};
      default:
        return {shape[0], shape[1], dim};
    }
  }

  /// Fills a tensor with `value` of the index, or with uniform numbers in (0, 1).
  static void fill(const Tensor& tensor, std::uint32_t stream, const std::function<std::int64_t(std::int64_t)>& value) {
    const Philox philox(11, stream);
    const std::int64_t length = tensor.num_elements() / tensor.dim(0);
    for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
      const std::int64_t at = i / length * tensor.stride() + i % length;
      const double number = value ? static_cast<double>(value(i)) : philox.uniform(static_cast<std::uint64_t>(i));
      switch (tensor.dtype()) {
        case DType::kFloat64:
          tensor.data<double>()[at] = number;
          break;
        case DType::kFloat32:
          tensor.data<float>()[at] = static_cast<float>(number);
          break;
        case DType::kBFloat16:
          tensor.data<BFloat16>()[at] = BFloat16(static_cast<float>(number));
          break;
        case DType::kInt32:
          tensor.data<std::int32_t>()[at] = static_cast<std::int32_t>(number * (value ? 1.0 : 1e6));
          break;
        case DType::kFloat8E4M3:
        case DType::kFloat8E8M0:  // finite numbers, and no scale far from 1
          static_cast<std::uint8_t*>(tensor.raw())[at] = static_cast<std::uint8_t>(100.0 + 20.0 * number);
          break;
      }
    }
  }

  Context context_;
  DType dtype_;
  Variation variation_;
  std::vector<Operand> operands_;
  std::size_t operand_bytes_ = 0;
};

struct Operator {
  std::string name;
  DType dtype;
  std::function<void(Call&)> run;
};

constexpr DType kFloat = DType::kFloat32;
const RouterOptions kRouting{.route_norm = true,
                             .route_scale = 2.5f,
                             .top_k = 3,
                             .num_groups = 4,
                             .num_limited_groups = 2,
                             .balance_coefficient = 0.1f,
                             .seq_len = 50,
                             .tokens_per_seq = 50};
const MlaDims kMla{
    .num_seqs = 2, .seq_len = 150, .num_heads = 3, .dim_nope = 10, .dim_rope = 6, .dim_v = 12, .scale = 0.3f};

RouterOutputs router_operands(Call& c, bool forward) {
  RouterOutputs o;
  o.scores_TE = forward ? c.out({150, 8}) : c.in({150, 8});
  o.expert_ids_TK =
      forward ? c.out({150, 3}, DType::kInt32) : c.ints({150, 3}, [](std::int64_t i) { return (i * 5 + i / 3) % 8; });
  o.weights_TK = forward ? c.out({150, 3}) : c.in({150, 3});
  o.counts_E = forward ? c.out({8}, DType::kInt32) : c.ints({8}, [](std::int64_t) { return 0; });
  o.balance_f_BE = forward ? Tensor() : c.in({3, 8});
  return o;
}

MlaOperands mla_operands(Call& c) {
  MlaOperands x;
  x.q = c.in({300, 3 * 16});
  x.kv = c.in({300, 3 * 22});
  x.k_rope = c.in({300, 6});
  x.doc_start_T = c.ints({300}, [](std::int64_t t) { return t % 150 < 70 ? 0 : 70; });
  return x;
}

/// Returns the offsets of 4 experts, the third of which is empty. 190 of 200 rows are used.
Tensor grouped_offsets(Call& c) {
  return c.ints({5}, [](std::int64_t i) { return std::vector<std::int64_t>{0, 90, 101, 101, 190}[i]; });
}

/// Allocates a quantized matrix [m, k], or a stack of them, in blocks of 1 × 32.
mx::Quantized quantized(const Shape& shape, const std::function<Tensor(Shape, DType)>& make) {
  return mx::allocate_quantized(shape, {}, make);
}
mx::Quantized quantized_in(Call& c, const Shape& shape) {
  return quantized(shape, [&](Shape s, DType dtype) { return c.in(s, dtype); });
}
mx::Quantized quantized_out(Call& c, const Shape& shape) {
  return quantized(shape, [&](Shape s, DType dtype) { return c.out(s, dtype); });
}

std::vector<Operator> operators() {
  std::vector<Operator> all;
  const auto add_operator = [&](const std::string& name, const std::function<void(Call&)>& run, bool typed = true) {
    all.push_back({name, kFloat, run});
    if (typed) all.push_back({name + "Bf16", DType::kBFloat16, run});
  };
  // If the other operands are float32, this one must be, too. If they are bfloat16, it may have another type.
  const auto free_if_bf16 = [](const Call& c) { return c.dtype() == kFloat ? kNothing : kAnyType; };

  add_operator("EmbeddingForward", [](Call& c) {
    const Tensor tokens = c.ints({150}, [](std::int64_t i) { return i * 7 % 9; });
    const Tensor table = c.in({9, 70}, kStrided), x = c.out({150, 70});  // strides work, though the contract omits them
    embedding_forward(c.context(), tokens, table, 0, x);
  });
  add_operator("EmbeddingBackward", [](Call& c) {
    const Tensor tokens = c.ints({150}, [](std::int64_t i) { return i * 7 % 9; });
    const Tensor d_x = c.in({150, 140}, kAnyType), d_table = c.sum({9, 140});
    embedding_backward(c.context(), tokens, d_x, 0, d_table);
  });
  add_operator("RmsNormForward", [](Call& c) {
    const Tensor x = c.in({150, 37}, kStrided), w = c.in({37}), y = c.out({150, 37}), rstd = c.out({150}, kFloat);
    rmsnorm_forward(c.context(), x, w, 1e-5f, y, rstd);
  });
  add_operator("ResidualRmsNormForward", [](Call& c) {
    const Tensor x = c.in({150, 37}), delta = c.in({150, 37}), w = c.in({37}), sum = c.out({150, 37});
    const Tensor y = c.out({150, 37}), rstd = c.out({150}, kFloat);
    residual_rmsnorm_forward(c.context(), x, delta, w, 1e-5f, sum, y, rstd);
  });
  for (const Write write : {Write::kAssign, Write::kAccumulate}) {
    const std::string suffix = write == Write::kAssign ? "" : "Accumulate";
    add_operator("RmsNormBackward" + suffix, [write](Call& c) {
      const Tensor d_y = c.in({150, 37}), x = c.in({150, 37}, kStrided), w = c.in({37}), rstd = c.in({150}, kFloat);
      const Tensor d_x = write == Write::kAssign ? c.out({150, 37}, kStrided) : c.sum({150, 37}, c.dtype(), kStrided);
      rmsnorm_backward(c.context(), d_y, x, w, rstd, d_x, write, c.sum({37}));
    });
    add_operator("CombineRows" + suffix, [write](Call& c) {
      const Tensor x = c.in({300, 300});
      const Tensor rows = c.ints({150, 2}, [](std::int64_t i) { return i * 7 % 300; });
      const Tensor weights = c.in({150, 2}, kFloat);
      combine_rows(c.context(), x, rows, weights,
                   write == Write::kAssign ? c.out({150, 300}) : c.sum({150, 300}, c.dtype()), write);
    });
    for (const int transposes : {0, 1, 2, 3}) {
      const auto run = [write, transposes, free_if_bf16](Call& c) {
        const bool ta = transposes % 2 == 1, tb = transposes / 2 == 1;
        // A float32 a may be multiplied by a bfloat16 b.
        const Tensor a = c.in(ta ? Shape{21, 70} : Shape{70, 21}, kStrided | free_if_bf16(c));
        const Tensor b =
            c.in(tb ? Shape{35, 21} : Shape{21, 35}, kStrided | (c.dtype() == kFloat ? kAnyType : kNothing));
        gemm(c.context(), a, ta, b, tb,
             write == Write::kAssign ? c.out({70, 35}, kStrided | free_if_bf16(c))
                                     : c.sum({70, 35}, c.dtype(), kStrided | free_if_bf16(c)),
             write);
      };
      add_operator("Gemm" + std::string(transposes % 2 == 1 ? "T" : "N") + (transposes / 2 == 1 ? "T" : "N") + suffix,
                   run);
      all.push_back(
          {fmt::format("GemmOfTwoTypes{}{}", transposes, suffix), DType::kBFloat16, [write, transposes](Call& c) {
             const bool ta = transposes % 2 == 1, tb = transposes / 2 == 1;
             const Tensor a = c.in(ta ? Shape{21, 70} : Shape{70, 21}, kFloat, kStrided | kAnyType);
             const Tensor b = c.in(tb ? Shape{35, 21} : Shape{21, 35}, kStrided);
             gemm(c.context(), a, ta, b, tb,
                  write == Write::kAssign ? c.out({70, 35}, kStrided | kAnyType)
                                          : c.sum({70, 35}, c.dtype(), kStrided | kAnyType),
                  write);
           }});
    }
  }
  for (const RopeDirection direction : {RopeDirection::kForward, RopeDirection::kBackward}) {
    const std::string suffix = direction == RopeDirection::kForward ? "Forward" : "Backward";
    add_operator("Rope" + suffix, [direction](Call& c) {
      const Tensor x = c.in({150, 3 * 38}, kStrided);
      const Tensor positions = c.ints({150}, [](std::int64_t t) { return t * 3 % 11; });
      const Tensor cos = c.in({11, 19}, kFloat), sin = c.in({11, 19}, kFloat), y = c.out({150, 3 * 38}, kStrided);
      rope(c.context(), x, 3, 38, positions, cos, sin, direction, y);
    });
    add_operator("RopeInPlace" + suffix, [direction](Call& c) {
      const Tensor x = c.changed({150, 3 * 50}, c.dtype(), kStrided | kAnyType);
      const Tensor positions = c.ints({150}, [](std::int64_t t) { return t * 3 % 11; });
      const Tensor cos = c.in({11, 19}, kFloat), sin = c.in({11, 19}, kFloat);
      rope(c.context(), x, 3, 38, positions, cos, sin, direction, x);
    });
  }
  add_operator("SwiGluForward", [](Call& c) {
    const Tensor h = c.in({150, 74}), a = c.out({150, 37});
    swiglu_forward(c.context(), h, a);
  });
  add_operator("SwiGluBackward", [](Call& c) {
    const Tensor d_a = c.in({150, 67}), h = c.in({150, 134}), d_h = c.out({150, 134}), a = c.out({150, 67});
    swiglu_backward(c.context(), d_a, h, d_h, a);
  });
  add_operator("SwiGluBackwardWeighted", [](Call& c) {
    const Tensor d_a = c.in({150, 67}), h = c.in({150, 134});
    const Tensor num_rows = c.ints({1}, [](std::int64_t) { return 150; });
    const Tensor weights = c.in({150}, kFloat), d_h = c.out({150, 134}), a = c.out({150, 67});
    swiglu_backward_weighted(c.context(), d_a, h, weights, num_rows, d_h, a, c.out({150}, kFloat));
  });
  const auto label_of = [](std::int64_t t) { return t % 5 == 3 ? kIgnoredLabel : t * 7 % 77; };
  add_operator("CrossEntropySums", [label_of](Call& c) {
    const Tensor logits = c.changed({150, 77}, kFloat, kAnyShape | kAnyType), labels = c.ints({150}, label_of);
    cross_entropy_sums(c.context(), logits, labels, 0, c.out({150, 3}, kFloat));
  });
  add_operator("CrossEntropy", [label_of](Call& c) {
    const Tensor sums = c.in({1, 150, 3}, kFloat), logits = c.in({150, 77}, kFloat, kAnyType);
    const Tensor labels = c.ints({150}, label_of);
    const Tensor losses = c.out({150}, kFloat), d_logits = c.out({150, 77}, kAnyType);
    cross_entropy(c.context(), sums, logits, labels, 0, 0.5f, losses, d_logits);
  });
  add_operator(
      "AddSum",
      [](Call& c) {
        const Tensor x = c.in({150}, kAnyShape);
        add_sum(c.context(), x, c.sum({1}, DType::kFloat64));
      },
      /*typed=*/false);
  add_operator(
      "RouterForward",
      [](Call& c) {
        const Tensor logits = c.in({150, 8}), bias = c.in({8});
        router_forward(c.context(), kRouting, logits, bias, router_operands(c, /*forward=*/true));
      },
      /*typed=*/false);
  add_operator(
      "BalanceSums",
      [](Call& c) {
        const Tensor scores = c.in({150, 8}), sums = c.out({3, 2, 8});
        balance_sums(c.context(), kRouting, scores, sums);
      },
      /*typed=*/false);
  add_operator(
      "BalanceLoss",
      [](Call& c) {
        const Tensor sums = c.in({3, 2, 8}), f = c.out({3, 8});
        balance_loss(c.context(), kRouting, sums, f, c.sum({1}, DType::kFloat64));
      },
      /*typed=*/false);
  add_operator(
      "RouterBackward",
      [](Call& c) {
        const Tensor d_weights = c.in({150, 3}), d_logits = c.out({150, 8});
        router_backward(c.context(), kRouting, router_operands(c, /*forward=*/false), d_weights, 0.5f, d_logits);
      },
      /*typed=*/false);
  add_operator(
      "SortByExpert",
      [](Call& c) {
        const Tensor ids = c.ints({150, 2}, [](std::int64_t i) { return i * i % 5; });
        const Tensor counts = c.ints({5}, [](std::int64_t e) {
          std::int64_t count = 0;
          for (std::int64_t i = 0; i < 300; ++i) count += i * i % 5 == e ? 1 : 0;
          return count;
        });
        const Tensor offsets = c.out({6}, DType::kInt32), slots = c.out({300}, DType::kInt32);
        sort_by_expert(c.context(), ids, counts, 1, offsets, slots, c.out({150, 2}, DType::kInt32));
      },
      /*typed=*/false);
  add_operator("GatherRows", [](Call& c) {
    const Tensor x = c.in({75, 70});
    const Tensor slots = c.ints({150}, [](std::int64_t r) { return r * 7 % 150; });
    const Tensor used = c.ints({1}, [](std::int64_t) { return 150; });
    gather_rows(c.context(), x, slots, 2, used, c.out({150, 70}));
  });
  add_operator("GroupedForward", [](Call& c) {
    const Tensor x = c.in({200, 33}), w = c.in({4, 150, 33}), offsets = grouped_offsets(c);
    // Rows from 190 on stay unchanged.
    grouped_linear_forward(c.context(), x, w, offsets, c.changed({200, 150}, c.dtype()));
  });
  add_operator("GroupedDgrad", [](Call& c) {
    const Tensor d_y = c.in({200, 33}), w = c.in({4, 33, 150}), offsets = grouped_offsets(c);
    grouped_linear_dgrad(c.context(), d_y, w, offsets, c.changed({200, 150}, c.dtype()));
  });
  for (const Write write : {Write::kAccumulate, Write::kAssign}) {
    const std::string suffix = write == Write::kAssign ? "Assigned" : "";
    // Makes a gradient that is added to, or one that is assigned.
    const auto gradient = [write](Call& c, const Shape& shape, unsigned freedom = kNothing) {
      return write == Write::kAssign ? c.out(shape, kFloat, freedom) : c.sum(shape, kFloat, freedom);
    };
    add_operator("GroupedWgrad" + suffix, [write, gradient](Call& c) {
      const Tensor d_y = c.in({200, 33}), x = c.in({200, 150}), offsets = grouped_offsets(c);
      grouped_linear_wgrad(c.context(), d_y, x, offsets, gradient(c, {4, 33, 150}), write);
    });
    add_operator(
        "QuantizedWgrad" + suffix,
        [write, gradient](Call& c) {
          const mx::Quantized d_y = quantized_in(c, {70, 150}), x = quantized_in(c, {96, 150});
          linear_wgrad(c.context(), d_y, x, gradient(c, {70, 96}, kStrided), write);
        },
        /*typed=*/false);
    add_operator(
        "QuantizedGroupedWgrad" + suffix,
        [write, gradient](Call& c) {
          const mx::Quantized d_y = quantized_in(c, {70, 224}), x = quantized_in(c, {40, 224});
          const Tensor offsets = c.ints({5}, [](std::int64_t e) {
            return std::vector<std::int64_t>{0, 64, 96, 96, 192}[e];
          });
          grouped_linear_wgrad(c.context(), d_y, x, offsets, gradient(c, {4, 70, 40}), write);
        },
        /*typed=*/false);
  }
  add_operator("Quantize", [](Call& c) {
    const Tensor x = c.in({150, 96}, kStrided | kAnyType);
    quantize(c.context(), x, quantized_out(c, {150, 96}), quantized_out(c, {96, 150}));
  });
  add_operator("Dequantize", [](Call& c) {
    const mx::Quantized x = quantized_in(c, {150, 96});
    dequantize(c.context(), x, c.out({150, 96}, kAnyType));
  });
  add_operator("QuantizedForward", [](Call& c) {
    QuantizedWeight w;
    w.rows = quantized_in(c, {70, 96});
    const mx::Quantized x = quantized_in(c, {150, 96});
    linear_forward(c.context(), x, w, c.out({150, 70}, kAnyType | kStrided));
  });
  for (const bool square : {false, true}) {
    add_operator(square ? "QuantizedDgradOfSquares" : "QuantizedDgrad", [square](Call& c) {
      const mx::Format format{.along = mx::kBlock, .across = square ? mx::kBlock : 1};
      const auto in = [&](Shape shape, DType dtype) { return c.in(shape, dtype); };
      QuantizedWeight w;
      (square ? w.rows : w.columns) = mx::allocate_quantized(square ? Shape{64, 96} : Shape{96, 64}, format, in);
      const mx::Quantized d_y = quantized_in(c, {150, 64});
      linear_dgrad(c.context(), d_y, w, c.out({150, 96}, kAnyType | kStrided));
    });
  }
  add_operator("SwiGluForwardQuantized", [](Call& c) {
    const Tensor h = c.in({150, 128}, kAnyType);
    GemmOperand a;
    a.rows = quantized_out(c, {150, 64});
    a.columns = quantized_out(c, {64, 150});
    swiglu_forward(c.context(), h, a);
  });
  add_operator("QuantizedGroupedForward", [](Call& c) {
    QuantizedWeight w;
    w.rows = quantized_in(c, {4, 70, 96});
    const mx::Quantized x = quantized_in(c, {200, 96});
    const Tensor offsets = grouped_offsets(c);
    grouped_linear_forward(c.context(), x, w, offsets, c.changed({200, 70}, c.dtype(), kAnyType));
  });
  add_operator("MlaForward", [](Call& c) {
    const MlaOperands x = mla_operands(c);
    const Tensor o = c.out({300, 3 * 12}), lse = c.out({300, 3}, kFloat);
    mla_attention_forward(c.context(), kMla, x, o, lse);
  });
  add_operator("MlaBackward", [](Call& c) {
    const MlaOperands x = mla_operands(c);
    const Tensor o = c.in({300, 3 * 12}), lse = c.in({300, 3}, kFloat), d_o = c.in({300, 3 * 12});
    const Tensor d_q = c.out({300, 3 * 16}), d_kv = c.out({300, 3 * 22});
    mla_attention_backward(c.context(), kMla, x, o, lse, d_o, d_q, d_kv, c.out({300, 6}));
  });
  for (const auto& [name, moments] : {std::pair{"AdamW", DType::kFloat32}, {"AdamWBfloat16", DType::kBFloat16}}) {
    add_operator(
        name,
        [moments = moments](Call& c) {
          const Tensor d_w = c.in({70'001}), w = c.changed({70'001}), m = c.changed({70'001}, moments),
                       v = c.changed({70'001}, moments);
          const Tensor step = c.in({AdamWStep::kNumbers});  // positive numbers
          adamw(c.context(), {.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f}, step, d_w, m, v,
                w, c.out({70'001}, DType::kBFloat16));
        },
        /*typed=*/false);
  }
  add_operator(
      "SumOfSquares",
      [](Call& c) { sum_of_squares(c.context(), c.in({70'001}, kAnyShape), c.out({1}, DType::kFloat64)); },
      /*typed=*/false);
  add_operator("Convert", [](Call& c) {
    const Tensor source = c.in({150, 777}, kStrided | kAnyType);
    convert(c.context(), source, c.out({150, 777}, kFloat, kStrided | kAnyType));
  });
  add_operator("ConvertToBf16", [](Call& c) {
    const Tensor source = c.in({150, 777}, kStrided | kAnyType);
    convert(c.context(), source, c.out({150, 777}, DType::kBFloat16, kStrided | kAnyType));
  });
  add_operator("Add", [free_if_bf16](Call& c) {
    const Tensor a = c.in({150, 777}), b = c.in({150, 777}, free_if_bf16(c));
    add(c.context(), a, b, c.out({150, 777}));
  });
  add_operator("Copy", [](Call& c) {
    const Tensor source = c.in({150, 777}), target = c.out({150, 777});
    copy(c.context(), source, target);
  });
  add_operator("SetZero", [](Call& c) { set_zero(c.context(), c.out({150, 777}, kAnyType | kAnyShape)); });
  add_operator("AllFinite", [](Call& c) {
    c.result = all_finite(c.context(), c.in({150, 777}, kStrided | kAnyType | kAnyShape)) ? 1.0 : 0.0;
  });
  return all;
}

void PrintTo(const Operator& op, std::ostream* out) { *out << op.name; }

class Contract : public ::testing::TestWithParam<Operator> {
 protected:
  /// Runs the call on fresh memory.
  Call run(Arena& arena, Variation variation = {}) {
    arena.release_to(0);
    if (variation.garbage != 0) poison(arena);
    Call call({.arena = &arena}, GetParam().dtype, variation);
    GetParam().run(call);
    EXPECT_EQ(arena.used(), call.operand_bytes()) << "scratch is kept";
    return call;
  }

  std::vector<Doubles> results(Variation variation = {}) {
    const Call call = run(arena_, variation);
    std::vector<Doubles> all{{call.result}};
    for (const Call::Operand& operand : call.operands()) all.push_back(doubles(operand.tensor));
    return all;
  }

  void expect_same(const std::vector<Doubles>& actual, const std::vector<Doubles>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(actual[i], expected[i]) << "result " << i;
    }
  }

  std::size_t num_operands() { return run(measuring_).operands().size(); }

  ThreadsScope threads_{std::min(num_threads(), kMostThreads)};
  Arena arena_{std::size_t{4} << 20};
  Arena measuring_;
};

// Runs on Device::kMeta, so that an operand that is not checked fails the test instead of crashing the process.
TEST_P(Contract, WrongOperandsThrow) {
  const std::vector<Call::Operand> operands = run(measuring_).operands();
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const auto expect = [&](Fault fault, bool allowed) {
      if (allowed) {
        EXPECT_NO_THROW(run(measuring_, {.fault = fault, .operand = i})) << "operand " << i;
      } else {
        measuring_.release_to(0);
        EXPECT_THROW(run(measuring_, {.fault = fault, .operand = i}), InternalError) << "operand " << i;
      }
    };
    const unsigned freedom = operands[i].freedom;
    {
      SCOPED_TRACE("shape");
      expect(Fault::kShape, (freedom & kAnyShape) != 0);
    }
    {
      SCOPED_TRACE("type");
      expect(Fault::kType, (freedom & kAnyType) != 0);
    }
    if (operands[i].tensor.num_dims() == 2) {
      SCOPED_TRACE("stride");
      expect(Fault::kStride, (freedom & kStrided) != 0);
    }
  }
}

TEST_P(Contract, StridedOperandsGiveTheSame) {
  const std::vector<Doubles> expected = results();
  for (std::size_t i = 0; i < num_operands(); ++i) {
    if ((run(measuring_).operands()[i].freedom & kStrided) == 0) continue;
    const Variation variation{.fault = Fault::kStride, .operand = i};
    const std::vector<Doubles> actual = results(variation);
    SCOPED_TRACE(i);
    expect_same(actual, expected);
    const Call call = run(arena_, variation);
    const Call::Operand& operand = call.operands()[i];
    const Doubles after = doubles(operand.whole);
    const auto width = static_cast<std::size_t>(operand.whole.dim(1));
    for (std::size_t at = 0; at < after.size(); ++at) {
      if (at % width > 0 && at % width < width - 2) continue;
      ASSERT_EQ(after[at], operand.whole_before[at]) << "beside operand " << i;
    }
  }
}

TEST_P(Contract, AssignsAccumulatesAndLeavesInputsAlone) {
  const Call plain = run(arena_);
  for (const Call::Operand& operand : plain.operands()) {
    if (operand.role == Role::kIn) {
      EXPECT_EQ(doubles(operand.tensor), operand.before);
    }
  }
  const std::vector<Doubles> first = results();
  EXPECT_EQ(results(), first) << "again";
  EXPECT_EQ(results({.garbage = 1}), first) << "other numbers before in outputs and scratch";
  const std::vector<Doubles> from_zero = results({.zero_sums = true});
  for (std::size_t i = 0; i < plain.operands().size(); ++i) {
    const Call::Operand& operand = plain.operands()[i];
    if (operand.role != Role::kSum) continue;
    EXPECT_LE(relative_error(first[i + 1], plus(from_zero[i + 1], operand.before)),
              bound_for(operand.tensor.dtype(), kForwardBound));
  }
}

TEST_P(Contract, SameAtAnyNumberOfThreads) {
  set_num_threads(1);
  const std::vector<Doubles> expected = results();
  for (const int threads : {2, 3, 4}) {
    set_num_threads(threads);
    for (int repetition = 0; repetition < 3; ++repetition) expect_same(results(), expected);
  }
}

TEST_P(Contract, MeasuringTakesTheSameMemory) {
  run(measuring_);
  Arena real(measuring_.peak());
  run(real);
  EXPECT_EQ(real.peak(), measuring_.peak());
}

INSTANTIATE_TEST_SUITE_P(Operators, Contract, ::testing::ValuesIn(operators()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace tessera
