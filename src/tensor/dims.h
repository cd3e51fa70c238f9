// Checks that one letter stands for one size. A tensor's name ends in its dims (docs/shapes.md). Within a call, a
// tensor fails the check if its name is wrong or its shape does not fit the others.
#pragma once

#include <array>
#include <cctype>
#include <string_view>

#include "base/error.h"
#include "tensor/tensor.h"

namespace tessera {

/// Holds the sizes that the letters of a call stand for.
class Dims {
 public:
  /// `name` is the name of a tensor, or an expression that ends in one, such as "saved.x_tD". A letter without a size
  /// gets that of `shape`. A digit before a letter is a factor, and one at the end is a term (offsets_E1 has E + 1
  /// numbers). If `shape` has one dim per character, each digit is itself a size. Throws InternalError if a size
  /// differs.
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

/// Removes the first of the comma-separated `names` and returns it.
inline std::string_view next_name(std::string_view& names) {
  const std::size_t comma = names.find(',');
  std::string_view name = names.substr(0, comma);
  names.remove_prefix(comma == std::string_view::npos ? names.size() : comma + 1);
  while (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  return name;
}

/// Returns the tensor itself, or the form of an operand that has the matrix's shape.
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

/// Checks that the names of these tensors and operands agree with their shapes, with one size per letter. Undefined
/// tensors are not checked.
#define TESSERA_DIMS(...) ::tessera::detail::check_dims(#__VA_ARGS__, __VA_ARGS__)

}  // namespace tessera
