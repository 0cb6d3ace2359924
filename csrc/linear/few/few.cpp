// The C interface of the products of a few samples.

#include "linear/few/few.h"

#include "api.h"
#include "base/masks.h"
#include "linear/linear.h"

using dynsparse::i32;
using dynsparse::i64;
using dynsparse::u16;

namespace {

// As in linear.cpp: waking another thread costs more than a small product gives.
int threads_for(const dynsparse::FewPass& pass, i64 block, i32 threads) {
  constexpr i64 SMALL = 1 << 17;
  const i64 entries =
      block == 1 ? pass.out * pass.in : pass.row_ptr[pass.out / block] * block * block;
  return (pass.batch + 2) * entries < SMALL ? 1 : threads;
}

}  // namespace

i32 dynsparse_masks_expand() { return dynsparse::MASKS_EXPAND; }

void dynsparse_small_masks(const i32* row_ptr, const i32* cols, u16* masks, i64 out, i64 in,
                           i32 threads) {
  const i64 words = dynsparse::words_of(in);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 r = 0; r < out; r++) {
    u16* row = masks + r * words;
    std::memset(row, 0, words * sizeof(u16));
    for (i64 p = row_ptr[r]; p < row_ptr[r + 1]; p++)
      row[cols[p] / dynsparse::WORD] |= static_cast<u16>(1u << (cols[p] % dynsparse::WORD));
  }
}

i64 dynsparse_small_masks_samples(i64 nnz, i64 out, i64 in, i32 int8) {
  // Measured. Masks take memory by the size of the matrix, whatever there is of it.
  constexpr i64 MOST_WORDS = 16;  // for each element
  if (!dynsparse::MASKS_EXPAND || dynsparse::words_of(in) * out > MOST_WORDS * nnz) return 0;
  if (!int8 && !dynsparse::MASKS_BY_TABLE) return 8;
  if (10 * nnz < 3 * out * in) return 0;
  return int8 && 2 * nnz >= out * in ? 8 : 4;
}

int dynsparse_small_forward(const float* x, i64 x_batch_stride, i64 x_feature_stride,
                            const float* values, const i32* row_ptr, const i32* cols,
                            const u16* masks, const float* bias, float* y, i64 batch, i64 out,
                            i64 in, i64 block, i32 threads) {
  if (batch == 0) return 0;
  dynsparse::FewPass pass = {values, row_ptr, cols, masks, batch, out, in, 1};
  pass.threads = threads_for(pass, block, threads);
  pass.x = {x, x_batch_stride, x_feature_stride};
  pass.bias = bias;
  pass.y = y;
  const bool done =
      block == 1 ? dynsparse::elements_forward(pass) : dynsparse::blocks_forward(pass, block);
  return done ? 0 : 1;
}

int dynsparse_small_backward(const float* dy, i64 dy_batch_stride, i64 dy_feature_stride,
                             const float* x, i64 x_batch_stride, i64 x_feature_stride,
                             const float* values, const i32* row_ptr, const i32* cols,
                             const u16* masks, float* dx, float* dvalues, float* dbias, i64 batch,
                             i64 out, i64 in, i64 block, i32 threads) {
  dynsparse::FewPass pass = {values, row_ptr, cols, masks, batch, out, in, 1};
  pass.threads = threads_for(pass, block, threads);
  pass.dy = {dy, dy_batch_stride, dy_feature_stride};
  if (dbias) dynsparse::sum_samples(pass.dy, batch, out, dbias, pass.threads);
  if (!dx && !dvalues) return 0;
  pass.x = {x, x_batch_stride, x_feature_stride};
  pass.dx = dx;
  pass.dvalues = dvalues;
  const bool done =
      block == 1 ? dynsparse::elements_backward(pass) : dynsparse::blocks_backward(pass, block);
  return done ? 0 : 1;
}
