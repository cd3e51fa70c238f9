// One letter, one size. A tensor's name ends in its dims (docs/shapes.md); within a call each letter must stand for one
// size, so that a tensor whose name is wrong, or which does not fit the others, fails.
#pragma once

#include <array>
#include <cctype>
#include <string_view>

#include "base/error.h"
#include "tensor/tensor.h"

namespace tessera {

/// The sizes of a call's letters.
class Dims {
 public:
  /// `name`: of a tensor or an expression that ends in one, such as "saved.x_tD". Letters that have no size yet get
  /// that of `shape`. A digit before a letter is a factor, one at the end is a term (offsets_E1 has E + 1 numbers);
  /// where `shape` has a dim for each character, a digit is a size. Throws InternalError for a size that differs.
  void bind(std::string_view name, const Shape& shape) {
    std::string_view letters = name.substr(name.rfind('_') + 1);
    const auto is_digit = [&](std::size_t idx) { return std::isdigit(static_cast<unsigned char>(letters[idx])) != 0; };
    const bool one_dim_each = letters.size() == static_cast<std::size_t>(shape.num_dims());
    int dim = 0;
    for (std::size_t idx = 0; idx < letters.size(); ++idx, ++dim) {
      TESSERA_CHECK(dim < shape.num_dims(), "{} is {}", name, shape.to_string());
      std::int64_t factor = 1, term = 0;
      if (!one_dim_each && is_digit(idx) && idx + 1 < letters.size()) factor = letters[idx++] - '0';
      const char letter = letters[idx];
      if (!one_dim_each && idx + 2 == letters.size() && is_digit(idx + 1)) term = letters[++idx] - '0';
      check(letter, factor, term, name, shape, dim);
    }
    TESSERA_CHECK(dim == shape.num_dims(), "{} is {}", name, shape.to_string());
  }

 private:
  void check(char letter, std::int64_t factor, std::int64_t term, std::string_view name, const Shape& shape, int dim) {
    std::int64_t& size = sizes_[static_cast<unsigned char>(letter) % sizes_.size()];
    if (size == kNoSize) size = (shape[dim] - term) / factor;
    TESSERA_CHECK(shape[dim] == factor * size + term, "{} is {}, but {} is {}", name, shape.to_string(), letter, size);
  }

  static constexpr std::int64_t kNoSize = -1;
  std::array<std::int64_t, 128> sizes_ = [] {
    std::array<std::int64_t, 128> sizes;
    sizes.fill(kNoSize);
    for (std::size_t digit = 0; digit < 10; ++digit) sizes['0' + digit] = static_cast<std::int64_t>(digit);
    return sizes;
  }();
};

namespace detail {

/// The next of the comma-separated `names`, which it is taken from.
inline std::string_view next_name(std::string_view& names) {
  const std::size_t comma = names.find(',');
  std::string_view name = names.substr(0, comma);
  names.remove_prefix(comma == std::string_view::npos ? names.size() : comma + 1);
  while (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  return name;
}

/// A tensor, or the one of an operand's forms that has the matrix's shape.
template <typename Operand>
Tensor tensor_of(const Operand& operand) {
  if constexpr (requires { operand.plain; }) {
    return operand.plain.defined() ? operand.plain : operand.rows.elements;
  } else {
    return operand;
  }
}

template <typename... Operands>
void check_dims(std::string_view names, const Operands&... operands) {
  Dims dims;
  const auto bind = [&](const Tensor& tensor) {
    const std::string_view name = next_name(names);
    if (tensor.defined()) dims.bind(name, tensor.shape());
  };
  (bind(tensor_of(operands)), ...);
}

}  // namespace detail

/// Checks that the names of these tensors and operands say their shapes, with one size per letter. Undefined ones are
/// passed over.
#define TESSERA_DIMS(...) ::tessera::detail::check_dims(#__VA_ARGS__, __VA_ARGS__)

}  // namespace tessera
