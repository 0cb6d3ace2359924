// Blocks over channels: each vector that is read serves several outputs.

#include "conv/conv.h"

namespace dynsparse {
namespace {

// U outputs of one block row (or column) by P neighbouring places.
template <int P, int U>
void outputs(const ConvPass& pass, const float* tile, i64 major, i64 first, i64 step, float* out,
             i64 stride) {
  const i64 block = pass.block, plane = pass.tiling.plane * VL;
  const i64 across = pass.transposed ? 1 : block, along = pass.transposed ? block : 1;
  V sum[U][P];
#pragma GCC unroll 4
  for (int u = 0; u < U; u++) {
    const V start = broadcast(pass.bias ? pass.bias[major * block + first + u] : 0.0f);
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) sum[u][j] = start;
  }
  for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
    const i64 slot = pass.slot ? pass.slot[p] : p;
    const float* x = tile + static_cast<i64>(pass.offset[p]) * VL;
    const float* w = pass.weights + slot * block * block + first * across;
    for (i64 k = 0; k < block; k++, x += plane, w += along) {
      V lanes[P];
#pragma GCC unroll 8
      for (int j = 0; j < P; j++) {
        lanes[j] = load(x + j * step);
        pin(lanes[j]);
      }
#pragma GCC unroll 4
      for (int u = 0; u < U; u++) {
        const V weight = broadcast(w[u * across]);
#pragma GCC unroll 8
        for (int j = 0; j < P; j++) sum[u][j] += weight * lanes[j];
      }
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < U; u++) {
#pragma GCC unroll 8
    for (int j = 0; j < P; j++) store(out + u * stride + j * VL, sum[u][j]);
  }
}

// Accumulators that fit the registers beside what they are made of.
constexpr int together(int places) {
  return REGISTERS == 32 ? (places <= 6 ? 4 : 2) : (places <= 3 ? 3 : places <= 5 ? 2 : 1);
}

template <int P>
void all_majors(const ConvPass& pass, const ConvTile& tile, i64 row, i64 x) {
  constexpr int U = together(P);
  const Tiling& t = pass.tiling;
  const i64 step = pass.source.step_x * VL, stride = tile.wide * VL, block = pass.block;
  const float* from = tile.packed + (row * pass.source.step_y * t.columns) * VL + x * step;
  for (i64 m = 0; m < pass.majors; m++) {
    float* out = tile.out + m * block * stride + x * VL;
    i64 u = 0;
    for (; u + U <= block; u += U) outputs<P, U>(pass, from, m, u, step, out + u * stride, stride);
    for (; u < block; u++) outputs<P, 1>(pass, from, m, u, step, out + u * stride, stride);
  }
}

// ---- gradient of the blocks ----

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
constexpr int SIDE = VL == 16 ? 4 : 2;

// Adds the corner of SIDE packed planes by 4 held ones, whose edges may lie past the block: those
// are computed from the last plane and not stored.
void corner(const ConvPass& pass, const ConvTile& tile, const float* packed, const float* held,
            i64 u, i64 k, float* sums) {
  const i64 block = pass.block, area = tile.high * tile.wide, plane = pass.tiling.plane;
  V sum[SIDE][4] = {};
  const float *down[SIDE], *right[4];
  for (int i = 0; i < SIDE; i++) down[i] = packed + least(u + i, block - 1) * plane * VL;
  for (int i = 0; i < 4; i++) right[i] = held + least(k + i, block - 1) * area * VL;
  for (i64 row = 0; row < tile.high; row++) {
    const i64 there = row * pass.tiling.columns * VL, here = row * tile.wide * VL;
    for (i64 x = 0; x < tile.wide * VL; x += VL) {
      V lanes[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        lanes[i] = load(right[i] + here + x);
        pin(lanes[i]);
      }
#pragma GCC unroll 4
      for (int d = 0; d < SIDE; d++) {
        V grad = load(down[d] + there + x);
        pin(grad);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[d][i] += grad * lanes[i];
      }
    }
  }
  V four[SIDE];
#pragma GCC unroll 4
  for (int d = 0; d < SIDE; d++)
    four[d] = fold2(fold1(sum[d][0], sum[d][1]), fold1(sum[d][2], sum[d][3]));
  alignas(64) float result[SIDE][4];
  if constexpr (VL == 16)
    store(result[0],
          fold_quarters(fold_quarters(four[0], four[1]), fold_quarters(four[2], four[3])));
  else if constexpr (VL == 8)
    store(result[0], fold_quarters(four[0], four[1]));
  else
    for (int d = 0; d < SIDE; d++) store(result[d], four[d]);
  if (u + SIDE <= block && k + 4 <= block) {
    for (int d = 0; d < SIDE; d++) {
      Four& to = *reinterpret_cast<Four*>(sums + (u + d) * block + k);
      to += *reinterpret_cast<const Four*>(result[d]);
    }
    return;
  }
  for (int d = 0; d < SIDE && u + d < block; d++)
    for (int i = 0; i < 4 && k + i < block; i++)
      sums[(u + d) * block + k + i] += result[d][i];
}

}  // namespace

void conv_blocks(const ConvPass& pass, const ConvTile& tile, i64 row) {
  const i64 runs = ceil_div(tile.wide, REGISTERS == 32 ? 6 : 4);
  for (i64 k = 0; k < runs; k++) {
    const i64 x = tile.wide * k / runs, count = tile.wide * (k + 1) / runs - x;
    switch (count) {
      case 1: all_majors<1>(pass, tile, row, x); break;
      case 2: all_majors<2>(pass, tile, row, x); break;
      case 3: all_majors<3>(pass, tile, row, x); break;
      case 4: all_majors<4>(pass, tile, row, x); break;
      case 5: all_majors<5>(pass, tile, row, x); break;
      default: all_majors<6>(pass, tile, row, x);
    }
  }
}

void conv_block_dots(const ConvPass& pass, const ConvTile& tile, float* sums) {
  const i64 block = pass.block, area = tile.high * tile.wide;
  for (i64 m = 0; m < pass.majors; m++) {
    const float* held = tile.held + m * block * area * VL;
    for (i64 p = pass.ptr[m]; p < pass.ptr[m + 1]; p++) {
      const float* packed = tile.packed + static_cast<i64>(pass.offset[p]) * VL;
      for (i64 u = 0; u < block; u += SIDE)
        for (i64 k = 0; k < block; k += 4)
          corner(pass, tile, packed, held, u, k, sums + p * block * block);
    }
  }
}

}  // namespace dynsparse
