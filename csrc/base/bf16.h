// bfloat16: the upper half of a float, rounded to nearest even.
#pragma once

#include "base/layout.h"

namespace dynsparse {

using bf16 = uint16_t;

inline const bf16* low_data(const Matrix& from) {
  return reinterpret_cast<const bf16*>(from.data);
}

// `count` values of any stride to floats, and contiguous floats back.
void widen(const bf16* from, i64 stride, i64 count, float* to);
void narrow(const float* from, i64 count, bf16* to);

// pack and unpack (layout.h) of bfloat16 activations: through a few floats in the first-level
// cache, so that no activations are kept in both types.
void pack_low(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out);
void unpack_low(const float* from, const Tile& tile, i64 begin, i64 end, float* to, i64 features);

}  // namespace dynsparse
