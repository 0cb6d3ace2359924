// The linear products on bfloat16 activations: on the units that multiply bfloat16, else as those
// on float32, with values widened and activations converted while they are packed.

#include <cstdlib>

#include "api.h"
#include "base/scratch.h"
#include "linear/block/block.h"
#include "linear/linear.h"
#if defined(DYNSPARSE_BF16_UNITS)
#include "linear/bf16/units.h"
#endif

namespace dynsparse {
namespace {

enum Unit { NONE, DOTS, AMX };

Unit unit() {
#if defined(DYNSPARSE_BF16_UNITS)
  static const Unit found = [] {
    const char* wanted = std::getenv("DYNSPARSE_BF16_UNIT");
    const int limit = wanted && *wanted ? std::atoi(wanted) : AMX;
    if (limit >= AMX && amx_usable()) return AMX;
    return limit >= DOTS && dots_usable() ? DOTS : NONE;
  }();
  return found;
#else
  return NONE;
#endif
}

bool unit_serves([[maybe_unused]] i64 block) {
#if defined(DYNSPARSE_BF16_UNITS)
  return units_fit(block) && unit() != NONE;
#else
  return false;
#endif
}

bool run_on_unit([[maybe_unused]] const BlockPass& pass) {
#if defined(DYNSPARSE_BF16_UNITS)
  return unit() == AMX ? run_on_amx(pass) : run_on_dots(pass);
#else
  return false;
#endif
}

// `all` values in parallel, either way.
template <class Convert>
void convert_all(i64 all, int threads, const Convert& convert) {
  constexpr i64 PIECE = 1 << 14;
#pragma omp parallel for num_threads(threads) schedule(static) if (all > 4 * PIECE)
  for (i64 i = 0; i < all; i += PIECE) convert(i, least(PIECE, all - i));
}


// float32 values of `count`: those given, or widened into `wide`.
const float* floats_of(const Input& values, i64 count, int threads, float* wide) {
  if (!values.b16) return values.f32;
  convert_all(count, threads, [&](i64 i, i64 n) { widen(values.b16 + i, 1, n, wide + i); });
  return wide;
}

}  // namespace
}  // namespace dynsparse

using dynsparse::bf16;
using dynsparse::i32;
using dynsparse::i64;

i32 dynsparse_bf16_unit() { return dynsparse::unit(); }

int dynsparse_linear_forward_bf16(const bf16* x, i64 x_batch_stride, i64 x_feature_stride,
                                  const void* values, i32 values_type, const i32* row_ptr,
                                  const i32* cols, const i32* slots, const void* row_panels,
                                  const float* bias, bf16* y, i64 batch, i64 out, i64 in,
                                  i64 block, i32 threads) {
  using namespace dynsparse;
  if (batch == 0) return 0;
  const Matrix input = {x, x_batch_stride, x_feature_stride};
  const Input weights(values, values_type);
  if (unit_serves(block)) {
    BlockPass pass = {out / block, in / block, block, batch, input, threads};
    pass.out = y;
    pass.ptr = row_ptr;
    pass.idx = cols;
    pass.order = slots;
    pass.values = weights;
    pass.bias = bias;
    return run_on_unit(pass) ? 0 : 1;
  }
  const i64 all = static_cast<i64>(row_ptr[out / block]) * block * block;
  const i64 wide_size = weights.b16 ? all : 0;
  Scratch scratch(Scratch::size_of<float>(wide_size));
  if (scratch.failed()) return 1;
  const float* floats = floats_of(weights, all, threads, scratch.take<float>(wide_size));
  const Index index = {row_ptr, cols, slots, nullptr, nullptr, nullptr, out, in, block,
                       row_panels, nullptr};
  return linear_forward(input, floats, index, bias, y, batch, threads);
}

int dynsparse_linear_backward_bf16(const bf16* dy, i64 dy_batch_stride, i64 dy_feature_stride,
                                   const bf16* x, i64 x_batch_stride, i64 x_feature_stride,
                                   const void* values, i32 values_type, const i32* row_ptr,
                                   const i32* cols, const i32* slots, const i32* col_ptr,
                                   const i32* csc_rows, const i32* csc_perm,
                                   const void* row_panels, const void* col_panels, bf16* dx,
                                   void* dvalues, float* dbias, i64 batch, i64 out, i64 in,
                                   i64 block, i32 threads) {
  using namespace dynsparse;
  const Matrix grad = {dy, dy_batch_stride, dy_feature_stride};
  const Matrix input = {x, x_batch_stride, x_feature_stride};
  const bool on_unit = batch > 0 && unit_serves(block), rounds = values_type == DYNSPARSE_BFLOAT16;
  // The gradient of bfloat16 values is summed in float32.
  const i64 all = static_cast<i64>(row_ptr[out / block]) * block * block;
  const i64 wide_size = rounds && dx && !on_unit ? all : 0, sums_size = rounds && dvalues ? all : 0;
  Scratch scratch(Scratch::size_of<float>(wide_size) + Scratch::size_of<float>(sums_size));
  if (scratch.failed()) return 1;
  float* wide = scratch.take<float>(wide_size);
  float* sums = sums_size ? scratch.take<float>(sums_size) : static_cast<float*>(dvalues);
  const Input weights(values, values_type);
  int status = 0;
  if (on_unit) {
    BlockPass pass = {in / block, out / block, block, batch, grad, threads};
    pass.out = dx;
    pass.ptr = col_ptr;
    pass.idx = csc_rows;
    pass.order = csc_perm;
    pass.values = weights;
    pass.transposed = true;
    pass.dvalues = sums;
    pass.row_ptr = row_ptr;
    pass.cols = cols;
    pass.slots = slots;
    pass.x = input;
    if (dbias) sum_samples(grad, batch, out, dbias, threads);
    status = run_on_unit(pass) ? 0 : 1;
  } else {
    const Index index = {row_ptr, cols, slots, col_ptr, csc_rows, csc_perm, out, in, block,
                         row_panels, col_panels};
    const float* floats = dx ? floats_of(weights, all, threads, wide) : nullptr;
    status = linear_backward(grad, input, floats, index, dx, sums, dbias, batch, threads);
  }
  if (status == 0 && sums_size)
    convert_all(all, threads, [&](i64 i, i64 n) {
      narrow(sums + i, n, static_cast<bf16*>(dvalues) + i);
    });
  return status;
}
