// Products of a few samples: single elements (elements.cpp) and blocks of 4, 8, 16, 32, 64 and 128
// (blocks.cpp). Activations are float32.
#pragma once

#include "base/layout.h"

namespace dynsparse {

struct FewPass {
  const float* values;    // [nnz] or [nnz, block, block]
  const i32* row_ptr;     // [out / block + 1]
  const i32* cols;        // [nnz]; blocks only
  const uint16_t* masks;  // [out, ceil(in / 16)]; single elements only
  i64 batch;
  i64 out;
  i64 in;
  int threads;

  Matrix x = {};  // [batch, in]

  // Forward.
  const float* bias = nullptr;   // [out] or null
  float* y = nullptr;            // [batch, out], contiguous
  const float* scale = nullptr;  // [out] or null: of weights in int8

  // Backward. What is null is not computed.
  Matrix dy = {};            // [batch, out]
  float* dx = nullptr;       // [batch, in], contiguous
  float* dvalues = nullptr;  // as values
};

// False where scratch memory is not to be had.
bool elements_forward(const FewPass& pass);
bool elements_backward(const FewPass& pass);
bool blocks_forward(const FewPass& pass, i64 block);
bool blocks_backward(const FewPass& pass, i64 block);
// Weights in int8 in place of `values`.
bool int8_elements_forward(const FewPass& pass, const int8_t* values);
bool int8_blocks_of_4_forward(const FewPass& pass, const int8_t* values);

}  // namespace dynsparse
