#include "base/bf16.h"

namespace dynsparse {
namespace {

float widened(bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

bf16 narrowed(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  // What is cut off may be all that makes a NaN one.
  const uint32_t nan = bits >> 16 | 0x40;
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

}  // namespace

void widen(const bf16* from, i64 stride, i64 count, float* to) {
  if (stride == 1)
    for (i64 i = 0; i < count; i++) to[i] = widened(from[i]);
  else
    for (i64 i = 0; i < count; i++) to[i] = widened(from[i * stride]);
}

void narrow(const float* from, i64 count, bf16* to) {
  for (i64 i = 0; i < count; i++) to[i] = narrowed(from[i]);
}

}  // namespace dynsparse
