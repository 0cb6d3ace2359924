// e^x, vector by vector.
#pragma once

#include "base/simd.h"

namespace dynsparse {

// e^x for x below 88, to 2 units in the last place; 0 below -87.3, where floats become subnormal.
// By x = n ln 2 + r with |r| <= ln 2 / 2, and the series of e^r up to r^6.
DYNSPARSE_INLINE V exponential(V x) {
  typedef i32 VI __attribute__((vector_size(DYNSPARSE_VECTOR_BYTES), may_alias));
  const VI large = reinterpret_cast<VI>(x < broadcast(-87.3f));
  // Adding 1.5 * 2^23 rounds to a whole number, which then stands in the lowest bits.
  const V shifted = x * 1.44269504f + 12582912.f;
  const V n = shifted - 12582912.f;
  const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  V e = r * (1.f / 720) + (1.f / 120);
  e = e * r + (1.f / 24);
  e = e * r + (1.f / 6);
  e = e * r + 0.5f;
  e = e * r + 1.f;
  e = e * r + 1.f;
  const VI power = (reinterpret_cast<VI>(shifted) - 0x4b400000 + 127) << 23;
  // A product, so that NaN stays NaN.
  const VI found = reinterpret_cast<VI>(e * reinterpret_cast<V>(power));
  return reinterpret_cast<V>(found & ~large);
}

}  // namespace dynsparse
