#include "base/bf16.h"

#include <cstdlib>

#include "linear/block/block.h"
#include "linear/linear.h"
#include "base/scratch.h"
#if defined(DYNSPARSE_BF16_UNITS)
#include "linear/bf16/units.h"
#endif

namespace dynsparse {
namespace {

// Floats in between: half of the first-level cache.
constexpr i64 BUFFER = 6144;

float widened(bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
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
  return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

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

bool run_on_unit([[maybe_unused]] const BlockPass& pass, [[maybe_unused]] const bf16* low_values) {
#if defined(DYNSPARSE_BF16_UNITS)
  return unit() == AMX ? run_on_amx(pass, low_values) : run_on_dots(pass, low_values);
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

void pack_low(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  alignas(64) float buffer[BUFFER];
  const i64 run = most(1, BUFFER / tile.count / LINE * LINE);
  for (i64 f = begin; f < end; f += run, out += run * tile.width()) {
    const i64 some = least(run, end - f);
    const bf16* row = low_data(from) + tile.first * from.batch_stride + f * from.feature_stride;
    for (i64 sample = 0; sample < tile.count; sample++, row += from.batch_stride)
      widen(row, from.feature_stride, some, buffer + sample * some);
    pack({buffer, some, 1}, {0, tile.count, tile.vectors}, 0, some, out);
  }
}

void unpack_low(const float* from, const Tile& tile, i64 begin, i64 end, float* to, i64 features) {
  alignas(64) float buffer[BUFFER];
  const i64 run = most(1, BUFFER / tile.count / LINE * LINE);
  bf16* out = reinterpret_cast<bf16*>(to) + tile.first * features;
  for (i64 f = begin; f < end; f += run, from += run * tile.width()) {
    const i64 some = least(run, end - f);
    unpack(from, {0, tile.count, tile.vectors}, 0, some, buffer, some);
    for (i64 sample = 0; sample < tile.count; sample++)
      narrow(buffer + sample * some, some, out + sample * features + f);
  }
}

}  // namespace dynsparse

using dynsparse::bf16;
using dynsparse::i32;
using dynsparse::i64;

// What multiplies blocks of 16 and 32 in bfloat16: 2 the processor's matrix units (AMX), 1 its vectors
// (AVX-512-bf16), 0 nothing, they are widened to float32. The environment variable
// DYNSPARSE_BF16_UNIT may ask for less: 1 or 0.
DYNSPARSE_EXPORT i32 dynsparse_bf16_unit() { return dynsparse::unit(); }

// As dynsparse_linear_forward (linear.cpp) with bfloat16 x and y; values are bfloat16 too (low) or
// float32, the bias is float32. Sums are float32, rounded once.
DYNSPARSE_EXPORT int dynsparse_linear_forward_bf16(
    const bf16* x, i64 x_batch_stride, i64 x_feature_stride, const void* values, i32 low,
    const i32* row_ptr, const i32* cols, const void* row_panels, const float* bias, bf16* y,
    i64 batch, i64 out, i64 in, i64 block, i32 threads) {
  using namespace dynsparse;
  if (batch == 0) return 0;
  const Matrix input = {reinterpret_cast<const float*>(x), x_batch_stride, x_feature_stride, true};
  float* y_data = reinterpret_cast<float*>(y);
  const float* weights = low ? nullptr : static_cast<const float*>(values);
  if (unit_serves(block)) {
    BlockPass pass = {out / block, in / block, block, batch, input, threads};
    pass.out = y_data;
    pass.ptr = row_ptr;
    pass.idx = cols;
    pass.values = weights;
    pass.bias = bias;
    return run_on_unit(pass, low ? static_cast<const bf16*>(values) : nullptr) ? 0 : 1;
  }
  const i64 all = low ? row_ptr[out / block] * block * block : 0;
  Scratch scratch(Scratch::size_of<float>(all));
  if (scratch.failed()) return 1;
  if (low) {
    float* wide = scratch.take<float>(all);
    convert_all(all, threads, [&](i64 i, i64 n) {
      widen(static_cast<const bf16*>(values) + i, 1, n, wide + i);
    });
    weights = wide;
  }
  const Index index = {row_ptr, cols, nullptr, nullptr, nullptr, out, in, block,
                       row_panels, nullptr};
  return linear_forward(input, weights, index, bias, y_data, batch, threads);
}

// As dynsparse_linear_backward with bfloat16 dy, x and dx; values and dvalues are bfloat16 too
// (low) or float32.
DYNSPARSE_EXPORT int dynsparse_linear_backward_bf16(
    const bf16* dy, i64 dy_batch_stride, i64 dy_feature_stride, const bf16* x, i64 x_batch_stride,
    i64 x_feature_stride, const void* values, i32 low, const i32* row_ptr, const i32* cols,
    const i32* col_ptr, const i32* csc_rows, const i32* csc_perm, const void* row_panels,
    const void* col_panels, bf16* dx, void* dvalues, i64 batch, i64 out, i64 in, i64 block,
    i32 threads) {
  using namespace dynsparse;
  const Matrix grad = {reinterpret_cast<const float*>(dy), dy_batch_stride, dy_feature_stride,
                       true};
  const Matrix input = {reinterpret_cast<const float*>(x), x_batch_stride, x_feature_stride, true};
  float* dx_data = reinterpret_cast<float*>(dx);
  const bool on_unit = batch > 0 && unit_serves(block);
  const i64 all = low ? row_ptr[out / block] * block * block : 0;
  const i64 weights_size = dx && !on_unit ? all : 0, sums_size = dvalues ? all : 0;
  Scratch scratch(Scratch::size_of<float>(weights_size) + Scratch::size_of<float>(sums_size));
  if (scratch.failed()) return 1;
  float* weights = scratch.take<float>(weights_size);
  float* sums = low && dvalues ? scratch.take<float>(sums_size) : static_cast<float*>(dvalues);
  convert_all(weights_size, threads, [&](i64 i, i64 n) {
    widen(static_cast<const bf16*>(values) + i, 1, n, weights + i);
  });
  const float* given = low ? weights : static_cast<const float*>(values);
  int status = 0;
  if (on_unit) {
    BlockPass pass = {in / block, out / block, block, batch, grad, threads};
    pass.out = dx_data;
    pass.ptr = col_ptr;
    pass.idx = csc_rows;
    pass.order = csc_perm;
    pass.values = given;
    pass.transposed = true;
    pass.dvalues = sums;
    pass.row_ptr = row_ptr;
    pass.cols = cols;
    pass.x = input;
    status = run_on_unit(pass, low ? static_cast<const bf16*>(values) : nullptr) ? 0 : 1;
  } else {
    const Index index = {row_ptr, cols, col_ptr, csc_rows, csc_perm, out, in, block,
                         row_panels, col_panels};
    status = linear_backward(grad, input, given, index, dx_data, sums, batch, threads);
  }
  if (status == 0 && low && dvalues)
    convert_all(all, threads, [&](i64 i, i64 n) {
      narrow(sums + i, n, static_cast<bf16*>(dvalues) + i);
    });
  return status;
}
