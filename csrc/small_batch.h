// Products of a few samples; see small_batch.cpp.
#pragma once

#include "layout.h"

namespace dynsparse {

struct SmallPass {
  const float* values;    // [nnz]
  const i32* row_ptr;     // [out + 1]
  const uint16_t* masks;  // [out, ceil(in / 16)]
  i64 batch;
  i64 out;
  i64 in;
  int threads;

  Matrix x = {};  // [batch, in]

  // Forward.
  const float* bias = nullptr;  // [out] or null
  float* y = nullptr;           // [batch, out], contiguous

  // Backward. What is null is not computed.
  Matrix dy = {};            // [batch, out]
  float* dx = nullptr;       // [batch, in], contiguous
  float* dvalues = nullptr;  // [nnz]
};

// False where scratch memory is not to be had.
bool small_forward(const SmallPass& pass);
bool small_backward(const SmallPass& pass);

}  // namespace dynsparse
