// The C interface of the products with weights in int8.

#include "linear/int8/int8.h"

#include "api.h"

using dynsparse::i32;
using dynsparse::i64;

int dynsparse_int8_forward(const float* x, i64 x_batch_stride, i64 x_feature_stride,
                           const int8_t* values, const float* scale, const i32* row_ptr,
                           const i32* cols, const void* row_panels, const uint16_t* masks,
                           const float* bias, float* y, i64 batch, i64 out, i64 in, i64 block,
                           i32 int8_activations, i32 threads) {
  using namespace dynsparse;
  if (batch == 0) return 0;
  Int8Pass pass = {values, scale, row_ptr, cols,       bias,  {}, y,
                   batch,  out,   in,      block, row_panels, masks, 1};
  pass.x = {x, x_batch_stride, x_feature_stride};
  // As for few samples in float32: waking another thread costs more than a small product gives.
  constexpr i64 SMALL = 1 << 17;
  const i64 entries = row_ptr[out / block] * block * block;
  pass.threads = (batch + 2) * entries < SMALL ? 1 : threads;
  // The limits are measured.
  const i64 few = block == 4 ? 12 : pass.has_quads() ? 16 : block == 1 && masks ? batch : 0;
  const bool done = int8_activations && pass.has_quads() ? int8_forward_dynamic(pass)
                    : batch <= few                       ? int8_forward_few(pass)
                    : block == 1                         ? int8_forward_elements(pass)
                                                         : int8_forward_many(pass);
  return done ? 0 : 1;
}
