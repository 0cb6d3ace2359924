// bfloat16: the upper half of a float, rounded to nearest even.
#pragma once

#include "api.h"
#include "base/simd.h"

namespace dynsparse {

using bf16 = dynsparse_bf16;

// An array of float32 or of bfloat16, whichever pointer is set; none where neither is.
struct Input {
  const float* f32 = nullptr;
  const bf16* b16 = nullptr;

  Input() = default;
  Input(const float* data) : f32(data) {}
  Input(const bf16* data) : b16(data) {}
  // As the C interface hands it over: `type` is a dynsparse_type.
  Input(const void* data, i32 type) {
    if (type == DYNSPARSE_BFLOAT16)
      b16 = static_cast<const bf16*>(data);
    else
      f32 = static_cast<const float*>(data);
  }
};

struct Output {
  float* f32 = nullptr;
  bf16* b16 = nullptr;

  Output() = default;
  Output(float* data) : f32(data) {}
  Output(bf16* data) : b16(data) {}
  explicit operator bool() const { return f32 || b16; }
};

// `count` values of any stride to floats, and contiguous floats back.
void widen(const bf16* from, i64 stride, i64 count, float* to);
void narrow(const float* from, i64 count, bf16* to);

}  // namespace dynsparse
