// Shape checks that operators share. They read like algebra: TESSERA_CHECK_TENSOR(x, DType::kFloat32, {T, D}).
#pragma once

#include "tensor/tensor.h"

namespace tessera {

/// Checks that a defined tensor has this shape and dtype, and that there are no gaps between its rows.
#define TESSERA_CHECK_TENSOR(tensor, expected_dtype, ...)                                 \
  do {                                                                                    \
    TESSERA_CHECK_STRIDED(tensor, expected_dtype, __VA_ARGS__);                           \
    TESSERA_CHECK((tensor).is_contiguous(), #tensor " has stride {}", (tensor).stride()); \
  } while (false)

/// Checks shape and dtype only. There may be gaps between rows.
#define TESSERA_CHECK_STRIDED(tensor, expected_dtype, ...)                                                        \
  do {                                                                                                            \
    TESSERA_CHECK((tensor).dtype() == (expected_dtype), #tensor " is {}, expected {}", name_of((tensor).dtype()), \
                  name_of(expected_dtype));                                                                       \
    TESSERA_CHECK((tensor).shape() == (::tessera::Shape __VA_ARGS__), #tensor " is {}, expected {}",              \
                  (tensor).shape().to_string(), (::tessera::Shape __VA_ARGS__).to_string());                      \
  } while (false)

}  // namespace tessera
