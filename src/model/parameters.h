// The field table: what parameters a model has, written once. It drives allocation, initialisation, the optimizer,
// checkpoints and tests.
//
// Per parameter there are a float32 master weight, a float32 gradient and AdamW's two float32 moments, and, when
// computing in bfloat16, a rounded copy that the layers read. Each of the five is one flat buffer with the parameters
// one behind the other.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/context.h"

namespace tessera {

/// Initial distribution: normal, conditioned on |x| <= bound; or the constant 1.
struct Init {
  float std = 0.0f;    // 0: all ones
  float bound = 0.0f;  // absolute; 0: none
};

/// Whether a parameter is the weight of a GEMM that a recipe may run in low precision: y = x · wᵀ for all rows, or with
/// an expert's own matrix for its rows.
enum class GemmKind : std::uint8_t { kNone, kLinear, kGrouped };

struct ParamSpec {
  std::string name;
  Shape shape;
  Init init;
  /// For w13: distribution of the second half (the up rows) of the last dim but one; `init` is then that of the first.
  std::optional<Init> init_up = std::nullopt;
  GemmKind gemm = GemmKind::kNone;
};

using ParamId = std::size_t;

class Parameters {
 public:
  /// Adds a parameter; its name must be new. Not after allocate().
  ParamId add(ParamSpec spec);
  /// Adds float32 numbers that are not trained but are part of the model's state (the experts' biases); start at 0.
  ParamId add_buffer(std::string name, Shape shape);

  std::size_t size() const { return specs_.size(); }
  std::size_t num_buffers() const { return buffer_specs_.size(); }
  const ParamSpec& spec(ParamId id) const { return specs_[id]; }
  const ParamSpec& buffer_spec(ParamId id) const { return buffer_specs_[id]; }

  /// Bytes that allocate() takes.
  std::size_t num_bytes(DType compute) const;
  /// `compute`: the type that layers read, float32 or bfloat16.
  void allocate(DType compute);
  /// Only what layers read, for inference: no gradients, no moments, and masters only when computing in float32.
  void allocate_weights(DType compute);
  /// Only says in what type layers compute; the tensors are on Device::kMeta.
  void allocate_meta(DType compute);
  DType compute_dtype() const { return compute_; }

  /// What layers read: the master weight itself or its bfloat16 copy.
  Tensor weight(ParamId id) const;
  Tensor gradient(ParamId id) const { return view(gradients_, id, DType::kFloat32); }
  Tensor master(ParamId id) const { return view(masters_, id, DType::kFloat32); }
  Tensor first_moment(ParamId id) const { return view(first_moments_, id, DType::kFloat32); }
  Tensor second_moment(ParamId id) const { return view(second_moments_, id, DType::kFloat32); }
  Tensor buffer(ParamId id) const;

  /// All parameters' numbers at once, [total]. The gaps between parameters are 0.
  Tensor all_gradients() const { return flat(gradients_, DType::kFloat32); }
  Tensor all_masters() const { return flat(masters_, DType::kFloat32); }
  Tensor all_first_moments() const { return flat(first_moments_, DType::kFloat32); }
  Tensor all_second_moments() const { return flat(second_moments_, DType::kFloat32); }
  /// Undefined when computing in float32.
  Tensor all_shadows() const;

  /// Draws the masters, each number by (seed, parameter's name, index), and rounds the copies.
  void initialise(std::uint64_t seed);
  /// Makes the bfloat16 copies from the masters, after loading these.
  void refresh_shadows();
  /// Sets numbers of a parameter from `offset` on, in the masters and in the copies, as far as there are any.
  void set(ParamId id, std::int64_t offset, std::span<const float> numbers);

 private:
  Tensor view(const Buffer& buffer, ParamId id, DType dtype) const;
  Tensor flat(const Buffer& buffer, DType dtype) const;

  std::vector<ParamSpec> specs_, buffer_specs_;
  std::vector<std::int64_t> offsets_, buffer_offsets_;  // in numbers
  std::int64_t total_ = 0, buffer_total_ = 0;
  DType compute_ = DType::kFloat32;
  Device device_ = Device::kMeta;
  Buffer masters_, gradients_, first_moments_, second_moments_, shadows_, buffers_;
};

}  // namespace tessera
