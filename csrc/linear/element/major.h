// The innermost loop of products with unstructured sparsity: entries of one major over one tile.
#pragma once

#include "base/layout.h"

namespace dynsparse {

// Majors that no two threads share: two cache lines of every sample.
constexpr i64 CHUNK = 2 * LINE;

// Activations and accumulators of one major for NV vectors of samples, and the entries being worked
// on. `Number` is the type of their index, which counts from the tile's first minor.
template <int NV, bool ACCUMULATE, bool DOT, class Number>
struct Major {
  // Neighbouring entries add to different accumulators, where registers allow it: a chain of
  // dependent multiply-adds would take four cycles per entry.
  static constexpr int SETS = VL == 16 || !DOT ? 2 : 1;

  V held[NV];
  V sum[SETS][NV];
  const float* tile;
  const Number* idx;
  const float* weights;

  // Entry p: accumulates, and returns the lanes of its dot product.
  template <int SET>
  DYNSPARSE_INLINE V entry(i64 p) {
    const float* x = tile + static_cast<i64>(idx[p]) * (NV * VL);
    V weight{}, dot{};
    if constexpr (ACCUMULATE) weight = broadcast(weights[p]);
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      V lanes = load(x + j * VL);
      if constexpr (ACCUMULATE && DOT) pin(lanes);
      if constexpr (ACCUMULATE) sum[SET % SETS][j] += weight * lanes;
      if constexpr (DOT) dot = j == 0 ? held[j] * lanes : dot + held[j] * lanes;
    }
    return dot;
  }

  // N entries from p on, folded as far as a tree of N leaves goes.
  template <int N, int SET = 0>
  DYNSPARSE_INLINE V entries(i64 p) {
    if constexpr (N == 1) {
      return entry<SET>(p);
    } else {
      V a = entries<N / 2, 0>(p);
      V b = entries<N / 2, 1>(p + N / 2);
      if constexpr (!DOT) return a;
      else if constexpr (N == 2) return fold1(a, b);
      else if constexpr (N == 4) return fold2(a, b);
      else return fold_quarters(a, b);
    }
  }

  // The entries from p on, four at most.
  DYNSPARSE_INLINE V quad(i64 p, i64 end) {
    if (p + 4 <= end) return entries<4>(p);
    V a = entry<0>(p), b{}, c{};
    if (p + 1 < end) b = entry<1>(p + 1);
    if (p + 2 < end) c = entry<0>(p + 2);
    return fold2(fold1(a, b), fold1(c, V{}));
  }

  // Fewer than VL entries.
  DYNSPARSE_INLINE V rest(i64 p, i64 end) {
    V a = quad(p, end), b{}, c{}, d{};
    if constexpr (VL == 4) return a;
    if (p + 4 < end) b = quad(p + 4, end);
    if constexpr (VL == 8) return fold_quarters(a, b);
    if (p + 8 < end) c = quad(p + 8, end);
    if (p + 12 < end) d = quad(p + 12, end);
    return fold_quarters(fold_quarters(a, b), fold_quarters(c, d));
  }

  // From the accumulators' start on, and what they came to.
  DYNSPARSE_INLINE void start(const float* from) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      sum[0][j] = load(from + j * VL);
      if constexpr (SETS > 1) sum[1][j] = V{};
    }
  }
  DYNSPARSE_INLINE void start(V value) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      sum[0][j] = value;
      if constexpr (SETS > 1) sum[1][j] = V{};
    }
  }
  DYNSPARSE_INLINE void finish(float* to) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      if constexpr (SETS > 1) sum[0][j] += sum[1][j];
      store(to + j * VL, sum[0][j]);
    }
  }
  DYNSPARSE_INLINE void hold(const float* from) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) held[j] = load(from + j * VL);
  }
};

}  // namespace dynsparse
