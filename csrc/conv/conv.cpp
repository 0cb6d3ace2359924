// The passes of a convolution: which entries they have, and where these point to.

#include "conv/conv.h"

#include <algorithm>

#include "api.h"
#include "base/scratch.h"

namespace dynsparse {
namespace {

// As api.h lists them.
struct Sizes {
  i64 batch, in, height, width, out, out_height, out_width, kernel_h, kernel_w, stride_h, stride_w,
      top, left, dilation_h, dilation_w, groups, block;

  i64 per_group() const { return in / groups; }
  i64 taps() const { return kernel_h * kernel_w; }
};

Images images(const float* data, const i64* strides, i64 height, i64 width) {
  return {const_cast<float*>(data), strides[0], strides[1], strides[2], strides[3], height, width};
}

int forward(const float* x, const i64* x_strides, const float* values, const i32* row_ptr,
            const i32* cols, const float* bias, float* y, const i64* y_strides, const Sizes& s,
            int threads) {
  const i64 block = s.block, majors = s.out / block, per_group = s.per_group();
  ConvPass pass = {};
  pass.batch = s.batch;
  pass.height = s.out_height;
  pass.width = s.out_width;
  pass.threads = threads;
  pass.packed = images(x, x_strides, s.height, s.width);
  pass.planes = s.in;
  pass.source = {-s.top, -s.left, s.stride_h, s.stride_w};
  pass.reach_y = (s.kernel_h - 1) * s.dilation_h + 1;
  pass.reach_x = (s.kernel_w - 1) * s.dilation_w + 1;
  pass.out = images(y, y_strides, s.out_height, s.out_width);
  pass.target = {0, 0, 1, 1};
  pass.majors = majors;
  pass.block = block;
  pass.ptr = row_ptr;
  pass.weights = values;
  pass.bias = bias;
  const i64 nnz = row_ptr[majors];
  pass.entries = nnz * block * block;
  choose_tiling(pass);
  const Tiling& t = pass.tiling;
  Scratch scratch(Scratch::size_of<i32>(nnz));
  if (scratch.failed()) return 1;
  i32* offset = scratch.take<i32>(nnz);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 m = 0; m < majors; m++) {
    const i64 group = m * block / (s.out / s.groups);
    i64 tap = 0;  // columns ascend
    for (i64 p = row_ptr[m]; p < row_ptr[m + 1]; p++) {
      const i64 column = cols[p] * block;
      while (column >= (tap + 1) * per_group) tap++;
      const i64 plane = group * per_group + column - tap * per_group;
      offset[p] = static_cast<i32>(plane * t.plane + tap / s.kernel_w * s.dilation_h * t.columns +
                                   tap % s.kernel_w * s.dilation_w);
    }
  }
  pass.offset = offset;
  return run_conv(pass) ? 0 : 1;
}

// One dimension of a phase: the inputs first, first + stride, ... of which `count` are there, and
// the taps that they see, of which tap k reads the output `shift(k)` after `source`.
struct Phase {
  i64 remainder, stride, dilation;
  i64 first, count;
  i64 source, reach;

  Phase(i64 remainder, i64 kernel, i64 stride, i64 dilation, i64 padding, i64 size)
      : remainder(remainder), stride(stride), dilation(dilation) {
    // Padded position stride * t + remainder is input position + padding.
    const i64 t = padding > remainder ? ceil_div(padding - remainder, stride) : 0;
    first = stride * t + remainder - padding;
    count = first < size ? ceil_div(size - first, stride) : 0;
    i64 low = 0, high = 0;
    bool any = false;
    for (i64 k = 0; k < kernel; k++) {
      if (!has(k)) continue;
      const i64 to = (remainder - k * dilation) / stride;
      low = any ? least(low, to) : to;
      high = any ? most(high, to) : to;
      any = true;
    }
    source = t + low;
    base = low;
    reach = high - low + 1;
  }
  bool has(i64 k) const { return (k * dilation - remainder) % stride == 0; }
  i64 shift(i64 k) const { return (remainder - k * dilation) / stride - base; }

 private:
  i64 base;
};

struct Backward {
  const i32 *col_ptr, *csc_rows, *csc_perm;
  const float* values;
  float* dvalues;
};

int one_phase(ConvPass& pass, const Sizes& s, const Phase& down, const Phase& across,
              const Backward& index) {
  const i64 block = s.block, majors = s.in / block, per_group = s.per_group() / block;
  const i64 rows_of_group = s.out / s.groups / block, nnz = index.col_ptr[s.taps() * per_group];
  pass.height = down.count;
  pass.width = across.count;
  pass.source = {down.source, across.source, 1, 1};
  pass.reach_y = down.reach;
  pass.reach_x = across.reach;
  pass.target = {down.first, across.first, down.stride, across.stride};
  const bool empty = pass.height == 0 || pass.width == 0;
  // Both gradients.
  const i64 products = (pass.out.data ? 1 : 0) + (pass.held.data ? 1 : 0);
  pass.entries = products * nnz * block * block / (s.stride_h * s.stride_w);
  if (!empty) choose_tiling(pass);
  const bool gathers = block == 1 && pass.out.data, dots = pass.held.data && !empty;
  const i64 threads = pass.threads;
  // What of a column belongs to a group.
  const auto part = [&](i64 m, i64 tap, i64& begin, i64& end) {
    const i64 group = m / per_group, column = tap * per_group + m % per_group;
    begin = index.col_ptr[column];
    end = index.col_ptr[column + 1];
    if (s.groups == 1) return;
    const i32 *from = index.csc_rows + begin, *to = index.csc_rows + end;
    const i64 first = group * rows_of_group;
    begin = std::lower_bound(from, to, first) - index.csc_rows;
    end = std::lower_bound(from, to, first + rows_of_group) - index.csc_rows;
  };
  Scratch lists(Scratch::size_of<i32>(majors + 1) + 2 * Scratch::size_of<i32>(nnz) +
                Scratch::size_of<float>(gathers ? nnz : 0));
  if (lists.failed()) return 1;
  i32* ptr = lists.take<i32>(majors + 1);
  i32* offset = lists.take<i32>(nnz);
  i32* slot = lists.take<i32>(nnz);
  float* gathered = lists.take<float>(gathers ? nnz : 0);
  const auto each_tap = [&](i64 m, auto&& act) {
    for (i64 i = 0; i < s.kernel_h; i++)
      for (i64 j = 0; j < s.kernel_w; j++) {
        if (!down.has(i) || !across.has(j)) continue;
        i64 begin, end;
        part(m, i * s.kernel_w + j, begin, end);
        act(i, j, begin, end);
      }
  };
  ptr[0] = 0;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 m = 0; m < majors; m++) {
    i64 count = 0;
    each_tap(m, [&](i64, i64, i64 begin, i64 end) { count += end - begin; });
    ptr[m + 1] = static_cast<i32>(count);
  }
  for (i64 m = 0; m < majors; m++) ptr[m + 1] += ptr[m];
  const i64 entries = ptr[majors], size = entries * block * block;
  const Tiling& t = pass.tiling;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 m = 0; m < majors; m++) {
    i64 to = ptr[m];
    each_tap(m, [&](i64 i, i64 j, i64 begin, i64 end) {
      const i64 shift = empty ? 0 : down.shift(i) * t.columns + across.shift(j);
      for (i64 p = begin; p < end; p++, to++) {
        offset[to] = static_cast<i32>(index.csc_rows[p] * block * t.plane + shift);
        slot[to] = index.csc_perm[p];
        if (gathers) gathered[to] = index.values[slot[to]];
      }
    });
  }
  pass.ptr = ptr;
  pass.offset = offset;
  pass.slot = slot;
  pass.weights = gathers ? gathered : index.values;
  Scratch partial(Scratch::size_of<float>(dots ? size * threads : 0));
  if (partial.failed()) return 1;
  pass.sums = dots ? partial.take<float>(size * threads) : nullptr;
  if (dots) std::memset(pass.sums, 0, size * threads * sizeof(float));
  if (!empty && !run_conv(pass)) return 1;
  if (!index.dvalues) return 0;
  const i64 area = block * block;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 p = 0; p < entries; p++)
    for (i64 i = 0; i < area; i++) {
      float total = 0;
      for (i64 k = 0; dots && k < threads; k++) total += pass.sums[k * size + p * area + i];
      index.dvalues[slot[p] * area + i] = total;
    }
  return 0;
}

int backward(const float* dy, const i64* dy_strides, const float* x, const i64* x_strides,
             float* dx, const i64* dx_strides, const Backward& index, const Sizes& s,
             int threads) {
  // The dvalues of an empty pattern may have no address.
  if (!dx && !index.dvalues) return 0;
  for (i64 i = 0; i < s.stride_h; i++)
    for (i64 j = 0; j < s.stride_w; j++) {
      const Phase down(i, s.kernel_h, s.stride_h, s.dilation_h, s.top, s.height);
      const Phase across(j, s.kernel_w, s.stride_w, s.dilation_w, s.left, s.width);
      ConvPass pass = {};
      pass.batch = s.batch;
      pass.threads = threads;
      pass.packed = images(dy, dy_strides, s.out_height, s.out_width);
      pass.planes = s.out;
      if (dx) pass.out = images(dx, dx_strides, s.height, s.width);
      if (index.dvalues) pass.held = images(x, x_strides, s.height, s.width);
      pass.majors = s.in / s.block;
      pass.block = s.block;
      pass.transposed = true;
      if (one_phase(pass, s, down, across, index)) return 1;
    }
  return 0;
}

}  // namespace
}  // namespace dynsparse

using dynsparse::i32;
using dynsparse::i64;

int dynsparse_conv_forward(const float* x, const i64* x_strides, const float* values,
                           const i32* row_ptr, const i32* cols, const float* bias, float* y,
                           const i64* y_strides, const i64* sizes, i32 threads) {
  const dynsparse::Sizes& s = *reinterpret_cast<const dynsparse::Sizes*>(sizes);
  return dynsparse::forward(x, x_strides, values, row_ptr, cols, bias, y, y_strides, s, threads);
}

int dynsparse_conv_backward(const float* dy, const i64* dy_strides, const float* x,
                            const i64* x_strides, const float* values, const i32* col_ptr,
                            const i32* csc_rows, const i32* csc_perm, float* dx,
                            const i64* dx_strides, float* dvalues, const i64* sizes,
                            i32 threads) {
  const dynsparse::Sizes& s = *reinterpret_cast<const dynsparse::Sizes*>(sizes);
  return dynsparse::backward(dy, dy_strides, x, x_strides, dx, dx_strides,
                             {col_ptr, csc_rows, csc_perm, values, dvalues}, s, threads);
}
