// Which kernels compute a product: by blocks or single elements, and in which passes.

#include "linear/linear.h"

#include "api.h"
#include "linear/block/block.h"
#include "linear/element/element.h"

namespace dynsparse {

namespace {

void fill_zero(float* data, i64 count) {
  if (data && count > 0) std::memset(data, 0, count * sizeof(float));
}

// Small products run on the calling thread: waking another costs more than it gives.
int threads_for(i64 batch, i64 nnz, i64 block, i64 features, i32 threads) {
  constexpr i64 SMALL = 1 << 16;
  return batch * (nnz * block * block + features) < SMALL ? 1 : threads;
}

// Whether both gradients in one pass, by columns, beat a pass each. Its dot products end up at the
// values' places, by rows, all over memory and in lines that threads share: a price per entry that
// many samples repay, few do not. The limits are measured.
bool fused_pays(i64 batch, i64 nnz, i64 out) {
  return batch > 32 && (batch > 64 || nnz > 64 * out);
}

int run_any(const ElementPass& pass, const void* panels) { return run(pass, panels) ? 0 : 1; }

int run_any(const BlockPass& pass) {
  return (lines_fit(pass) ? run_in_lines(pass) : run_in_tiles(pass)) ? 0 : 1;
}

}  // namespace

int linear_forward(const Matrix& x, const float* values, const Index& index, const float* bias,
                   const Output& y, i64 batch, int threads) {
  if (batch == 0) return 0;
  const i64 out = index.out, in = index.in, block = index.block;
  threads = threads_for(batch, index.row_ptr[out / block], block, out + in, threads);
  if (block > 1) {
    BlockPass pass = {out / block, in / block, block, batch, x, threads};
    pass.out = y;
    pass.ptr = index.row_ptr;
    pass.idx = index.cols;
    pass.order = index.slots;
    pass.values = values;
    pass.bias = bias;
    return run_any(pass);
  }
  ElementPass pass = {index.row_ptr, index.cols, out, in, batch, x, threads};
  pass.out = y;
  pass.order = index.slots;
  pass.values = values;
  pass.bias = bias;
  return run_any(pass, index.row_panels);
}

int linear_backward(const Matrix& dy, const Matrix& x, const float* values, const Index& index,
                    const Output& dx, float* dvalues, float* dbias, i64 batch, int threads) {
  if (!dx && !dvalues && !dbias) return 0;
  const i64 out = index.out, in = index.in, block = index.block;
  if (batch == 0) {
    fill_zero(dvalues, static_cast<i64>(index.row_ptr[out / block]) * block * block);
    fill_zero(dbias, out);
    return 0;
  }
  threads = threads_for(batch, index.row_ptr[out / block], block, out + in, threads);
  if (dbias && !dvalues) sum_samples(dy, batch, out, dbias, threads);
  if (!dx && !dvalues) return 0;
  if (block > 1) {
    BlockPass pass = {in / block, out / block, block, batch, dy, threads};
    pass.out = dx;
    pass.ptr = index.col_ptr;
    pass.idx = index.csc_rows;
    pass.order = index.csc_perm;
    pass.values = values;
    pass.transposed = true;
    pass.dvalues = dvalues;
    pass.row_ptr = index.row_ptr;
    pass.cols = index.cols;
    pass.slots = index.slots;
    pass.x = x;
    pass.packed_sums = dbias;
    return run_any(pass);
  }
  if (dvalues && (!dx || !fused_pays(batch, index.row_ptr[out], out))) {
    ElementPass pass = {index.row_ptr, index.cols, out, in, batch, x, threads};
    pass.held = dy;
    pass.order = index.slots;
    pass.sums = dvalues;
    pass.held_sums = dbias;
    if (run_any(pass, index.row_panels)) return 1;
    if (!dx) return 0;
    dvalues = dbias = nullptr;
  }
  ElementPass pass = {index.col_ptr, index.csc_rows, in, out, batch, dy, threads};
  pass.order = index.csc_perm;
  pass.out = dx;
  pass.values = values;
  pass.held = x;
  pass.sums = dvalues;
  pass.packed_sums = dvalues ? dbias : nullptr;
  return run_any(pass, index.col_panels);
}

}  // namespace dynsparse

using dynsparse::i32;
using dynsparse::i64;

int dynsparse_linear_forward(const float* x, i64 x_batch_stride, i64 x_feature_stride,
                             const float* values, const i32* row_ptr, const i32* cols,
                             const i32* slots, const void* row_panels, const float* bias,
                             float* y, i64 batch, i64 out, i64 in, i64 block, i32 threads) {
  const dynsparse::Index index = {row_ptr, cols, slots, nullptr,    nullptr, nullptr,
                                  out,     in,   block, row_panels, nullptr};
  return dynsparse::linear_forward({x, x_batch_stride, x_feature_stride}, values, index, bias, y,
                                   batch, threads);
}

int dynsparse_linear_backward(const float* dy, i64 dy_batch_stride, i64 dy_feature_stride,
                              const float* x, i64 x_batch_stride, i64 x_feature_stride,
                              const float* values, const i32* row_ptr, const i32* cols,
                              const i32* slots, const i32* col_ptr, const i32* csc_rows,
                              const i32* csc_perm, const void* row_panels,
                              const void* col_panels, float* dx, float* dvalues, float* dbias,
                              i64 batch, i64 out, i64 in, i64 block, i32 threads) {
  const dynsparse::Index index = {row_ptr, cols, slots, col_ptr,    csc_rows, csc_perm,
                                  out,     in,   block, row_panels, col_panels};
  return dynsparse::linear_backward({dy, dy_batch_stride, dy_feature_stride},
                                    {x, x_batch_stride, x_feature_stride}, values, index, dx,
                                    dvalues, dbias, batch, threads);
}
