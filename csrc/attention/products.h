// Small dense products in scratch memory, of which block-sparse attention is made.
#pragma once

#include "base/simd.h"

namespace dynsparse {

// Accumulators: G rows of C by N vectors of its columns. Each vector of B serves all rows, each
// broadcast element of A all vectors.
//
// C [G, N * VL] = or += A [G, depth] times B [depth, N * VL]. With `turned`, A lies there as
// [depth, G].
template <bool turned, bool add, int G, int N>
DYNSPARSE_INLINE void corner(const float* a, i64 a_stride, const float* b, i64 b_stride, i64 depth,
                             float* c, i64 c_stride) {
  V sum[G][N];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) sum[g][n] = add ? load_unaligned(c + g * c_stride + n * VL) : V{};
  for (i64 t = 0; t < depth; t++) {
    V lanes[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) {
      lanes[n] = load_unaligned(b + n * VL);
      pin(lanes[n]);
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      const V one = broadcast(turned ? a[g] : a[g * a_stride]);
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) sum[g][n] += one * lanes[n];
    }
    a += turned ? a_stride : 1;
    b += b_stride;
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) store_unaligned(c + g * c_stride + n * VL, sum[g][n]);
}

// All rows of C from `row` on, in groups of G, then in smaller ones.
template <bool turned, bool add, int G, int N>
DYNSPARSE_INLINE void columns(const float* a, i64 a_stride, const float* b, i64 b_stride,
                              i64 depth, float* c, i64 c_stride, i64 row, i64 rows) {
  for (; row + G <= rows; row += G)
    corner<turned, add, G, N>(a + (turned ? row : row * a_stride), a_stride, b, b_stride, depth,
                              c + row * c_stride, c_stride);
  if constexpr (G > 1)
    if (row < rows)
      columns<turned, add, G / 2, N>(a, a_stride, b, b_stride, depth, c, c_stride, row, rows);
}

// C [rows, width] = or += A B; width is a multiple of LINE.
template <bool turned, bool add>
inline void multiply(const float* a, i64 a_stride, const float* b, i64 b_stride, i64 depth,
                     float* c, i64 c_stride, i64 rows, i64 width) {
  constexpr int ROWS = REGISTERS == 32 ? 8 : 4;
  i64 at = 0;
  for (; at + 2 * VL <= width; at += 2 * VL)
    columns<turned, add, ROWS, 2>(a, a_stride, b + at, b_stride, depth, c + at, c_stride, 0, rows);
  if (at < width)
    columns<turned, add, 2 * ROWS, 1>(a, a_stride, b + at, b_stride, depth, c + at, c_stride, 0,
                                      rows);
}

}  // namespace dynsparse
