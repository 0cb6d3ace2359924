// Single elements: a multiply-add per entry and vector, read from where the tap is shifted to.

#include "conv/conv.h"

namespace dynsparse {
namespace {

// Outputs of a row that are worked on at once.
constexpr int RUN = 8, RUN_DOTS = REGISTERS == 32 ? 8 : 4;

// One major and P neighbouring outputs.
template <int P, bool ACCUMULATE, bool DOT, bool STEPS>
struct Run {
  V held[P];
  V sum[P];
  const float* tile;  // at the first output
  const i32* offset;
  const float* weights;
  i64 step;  // floats from output to output

  // Entry p: accumulates, and returns the lanes of its dot product.
  DYNSPARSE_INLINE V entry(i64 p) {
    const float* x = tile + static_cast<i64>(offset[p]) * VL;
    V weight{}, even{}, odd{};
    if constexpr (ACCUMULATE) weight = broadcast(weights[p]);
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) {
      V lanes = load(x + j * (STEPS ? step : VL));
      if constexpr (ACCUMULATE && DOT) pin(lanes);
      if constexpr (ACCUMULATE) sum[j] += weight * lanes;
      if constexpr (DOT) {
        if (j % 2)
          odd += held[j] * lanes;
        else
          even += held[j] * lanes;
      }
    }
    if constexpr (DOT && P > 1) even += odd;
    return even;
  }

  // N entries from p on, folded as far as a tree of N leaves goes; those past `end` are zeros.
  template <int N, bool ALL>
  DYNSPARSE_INLINE V entries(i64 p, i64 end) {
    if constexpr (N == 1) {
      if constexpr (ALL) return entry(p);
      return p < end ? entry(p) : V{};
    } else {
      if constexpr (!ALL)
        if (p >= end) return V{};
      V a = entries<N / 2, ALL>(p, end), b = entries<N / 2, ALL>(p + N / 2, end);
      if constexpr (N == 2) return fold1(a, b);
      else if constexpr (N == 4) return fold2(a, b);
      else return fold_quarters(a, b);
    }
  }

  DYNSPARSE_INLINE void all(i64 p, i64 end, float* sums) {
    if constexpr (DOT) {
      for (; p + VL <= end; p += VL)
        store_unaligned(sums + p, load_unaligned(sums + p) + entries<VL, true>(p, end));
      if (p < end)
        store_first(sums + p, load_first(sums + p, end - p) + entries<VL, false>(p, end), end - p);
    } else {
      for (; p < end; p++) entry(p);
    }
  }
};

template <int P, bool ACCUMULATE, bool DOT, bool STEPS>
void all_majors(const ConvPass& pass, const ConvTile& tile, i64 row, i64 x, float* sums) {
  Run<P, ACCUMULATE, DOT, STEPS> run;
  const Tiling& t = pass.tiling;
  run.tile = tile.packed + (row * pass.source.step_y * t.columns + x * pass.source.step_x) * VL;
  run.offset = pass.offset;
  run.weights = pass.weights;
  run.step = pass.source.step_x * VL;
  const i64 area = tile.high * tile.wide;
  for (i64 m = 0; m < pass.majors; m++) {
    if constexpr (DOT) {
      const float* from = tile.held + (m * area + row * tile.wide + x) * VL;
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) run.held[j] = load(from + j * VL);
    }
    if constexpr (ACCUMULATE) {
      const V start = broadcast(pass.bias ? pass.bias[m] : 0.0f);
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) run.sum[j] = start;
    }
    run.all(pass.ptr[m], pass.ptr[m + 1], sums);
    if constexpr (ACCUMULATE) {
      float* to = tile.out + (m * tile.wide + x) * VL;
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) store(to + j * VL, run.sum[j]);
    }
  }
}

template <bool ACCUMULATE, bool DOT, bool STEPS>
void one_row(const ConvPass& pass, const ConvTile& tile, i64 row, float* sums) {
  constexpr i64 most_at_once = DOT ? RUN_DOTS : RUN;
  const i64 runs = ceil_div(tile.wide, most_at_once);
  for (i64 k = 0; k < runs; k++) {
    const i64 x = tile.wide * k / runs, count = tile.wide * (k + 1) / runs - x;
    switch (count) {
      case 1: all_majors<1, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums); break;
      case 2: all_majors<2, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums); break;
      case 3: all_majors<3, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums); break;
      case 4: all_majors<4, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums); break;
      default:
        if constexpr (most_at_once == 8) switch (count) {
            case 5: all_majors<5, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums); break;
            case 6: all_majors<6, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums); break;
            case 7: all_majors<7, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums); break;
            default: all_majors<8, ACCUMULATE, DOT, STEPS>(pass, tile, row, x, sums);
          }
    }
  }
}

}  // namespace

void conv_elements(const ConvPass& pass, const ConvTile& tile, i64 row, float* sums) {
  // Only forward has steps.
  if (pass.source.step_x != 1) return one_row<true, false, true>(pass, tile, row, sums);
  if (!sums) return one_row<true, false, false>(pass, tile, row, sums);
  if (pass.out.data) return one_row<true, true, false>(pass, tile, row, sums);
  one_row<false, true, false>(pass, tile, row, sums);
}

}  // namespace dynsparse
