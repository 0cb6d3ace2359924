// Blocks of any size: vectors hold samples.

#include <type_traits>

#include "linear/block/run.h"

namespace dynsparse {
namespace {

// Output features that no two threads share: two cache lines of every sample.
constexpr i64 CHUNK = 2 * LINE;
// Blocks so many entries further on are fetched.
constexpr i64 AHEAD = 8;

// Outputs [first, first + R) of one major and one tile. BLOCK is the block size, or 0 for any.
template <int NV, int R, int BLOCK, bool TRANSPOSED>
DYNSPARSE_INLINE void outputs(const BlockPass& pass, i64 major, i64 first, const float* tile,
                              i64 width, float* out) {
  const i64 block = BLOCK ? BLOCK : pass.block;
  const i64 across = TRANSPOSED ? 1 : block, along = TRANSPOSED ? block : 1;
  V sum[R][NV];
#pragma GCC unroll 8
  for (int u = 0; u < R; u++) {
    const V start = broadcast(pass.bias ? pass.bias[major * block + first + u] : 0.0f);
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) sum[u][j] = start;
  }
  // grad_input jumps from block to block, and the hardware does not foresee where to.
  const i64 last = pass.ptr[pass.majors] - 1;
  for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
    const i64 slot = pass.order ? pass.order[p] : p;
    if (TRANSPOSED && BLOCK && BLOCK <= 8 && pass.order) {
      const float* soon = pass.values.f32 + pass.order[least(p + AHEAD, last)] * BLOCK * BLOCK;
#pragma GCC unroll 4
      for (int i = 0; i < BLOCK * BLOCK; i += LINE) __builtin_prefetch(soon + i);
    }
    const float* x = tile + pass.idx[p] * block * width;
    const float* w = pass.values.f32 + slot * block * block + first * across;
#pragma GCC unroll 8
    for (i64 k = 0; k < block; k++, x += width) {
      V lanes[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) {
        lanes[j] = load(x + j * VL);
        pin(lanes[j]);
      }
#pragma GCC unroll 8
      for (int u = 0; u < R; u++) {
        const V weight = broadcast(w[u * across + k * along]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) sum[u][j] += weight * lanes[j];
      }
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < R; u++) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(out + u * width + j * VL, sum[u][j]);
  }
}

// Outputs [begin, end) of the whole matrix, for NV vectors of samples. R accumulators of each.
template <int NV, int R, int BLOCK, bool TRANSPOSED>
void features_of(const BlockPass& pass, const float* tile, i64 width, i64 begin, i64 end,
                 float* out) {
  const i64 block = BLOCK ? BLOCK : pass.block;
  for (i64 f = begin; f < end;) {
    const i64 major = f / block, first = f % block;
    float* to = out + (f - begin) * width;
    if (least(block - first, end - f) >= R) {
      outputs<NV, R, BLOCK, TRANSPOSED>(pass, major, first, tile, width, to);
      f += R;
    } else {
      outputs<NV, 1, BLOCK, TRANSPOSED>(pass, major, first, tile, width, to);
      f += 1;
    }
  }
}

// Rows at a time: wide tiles of small blocks have too few registers for more than 4.
constexpr int FEW = REGISTERS == 32 ? 4 : 2, MANY = REGISTERS == 32 ? 8 : 4;

template <int BLOCK, bool TRANSPOSED>
void all_samples(const BlockPass& pass, const float* tile, i64 width, i64 begin, i64 end,
                 float* out) {
  const auto run = [&](auto vectors, auto rows, i64 lane) {
    features_of<vectors(), rows(), BLOCK, TRANSPOSED>(pass, tile + lane, width, begin, end,
                                                      out + lane);
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one{};
  constexpr integral_constant<int, 2> two{};
  constexpr integral_constant<int, 3> three{};
  constexpr integral_constant<int, 4> four{};
  constexpr integral_constant<int, FEW> few{};
  constexpr integral_constant<int, MANY> many{};
  constexpr bool large = BLOCK % MANY == 0 && BLOCK;
  switch (width / VL) {
    case 1: return run(one, std::conditional_t<large, decltype(many), decltype(few)>{}, 0);
    case 2: return run(two, std::conditional_t<large, decltype(many), decltype(few)>{}, 0);
    case 3: return run(three, std::conditional_t<large, decltype(many), decltype(few)>{}, 0);
    default:
      if constexpr (large) {
        run(two, many, 0);
        run(two, many, 2 * VL);
      } else {
        run(four, few, 0);
      }
  }
}

template <bool TRANSPOSED>
void all_samples(const BlockPass& pass, const float* tile, i64 width, i64 begin, i64 end,
                 float* out) {
  switch (pass.block) {
    case 4: return all_samples<4, TRANSPOSED>(pass, tile, width, begin, end, out);
    case 8: return all_samples<8, TRANSPOSED>(pass, tile, width, begin, end, out);
    case 16: return all_samples<16, TRANSPOSED>(pass, tile, width, begin, end, out);
    case 32: return all_samples<32, TRANSPOSED>(pass, tile, width, begin, end, out);
    default: return all_samples<0, TRANSPOSED>(pass, tile, width, begin, end, out);
  }
}

// ---- gradient of the blocks ----

// Corner of a block that is computed at once: DOWN rows (of dy) by 4 columns (of x).
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
constexpr int DOWN = VL == 16 ? 4 : 2;
// Adds to dvalues [block, block] (or sets it) the corner at (u, k); what lies past the block's
// edge is computed from its last row or column and not stored.
void corner(const float* dy, const float* x, i64 width, i64 block, i64 u, i64 k, bool add,
            float* dvalues) {
  V sum[DOWN][4] = {};
  const float *down[DOWN], *right[4];
  for (int i = 0; i < DOWN; i++) down[i] = dy + least(u + i, block - 1) * width;
  for (int i = 0; i < 4; i++) right[i] = x + least(k + i, block - 1) * width;
  for (i64 lane = 0; lane < width; lane += VL) {
    V lanes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      lanes[i] = load(right[i] + lane);
      pin(lanes[i]);
    }
#pragma GCC unroll 4
    for (int d = 0; d < DOWN; d++) {
      V grad = load(down[d] + lane);
      pin(grad);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) sum[d][i] += grad * lanes[i];
    }
  }
  V four[DOWN];
#pragma GCC unroll 4
  for (int d = 0; d < DOWN; d++)
    four[d] = fold2(fold1(sum[d][0], sum[d][1]), fold1(sum[d][2], sum[d][3]));
  alignas(64) float result[DOWN][4];
  if constexpr (VL == 16)
    store(result[0],
          fold_quarters(fold_quarters(four[0], four[1]), fold_quarters(four[2], four[3])));
  else if constexpr (VL == 8)
    store(result[0], fold_quarters(four[0], four[1]));
  else
    for (int d = 0; d < DOWN; d++) store(result[d], four[d]);
  if (u + DOWN <= block && k + 4 <= block) {
    for (int d = 0; d < DOWN; d++) {
      Four& to = *reinterpret_cast<Four*>(dvalues + (u + d) * block + k);
      const Four from = *reinterpret_cast<const Four*>(result[d]);
      to = add ? to + from : from;
    }
    return;
  }
  for (int d = 0; d < DOWN && u + d < block; d++)
    for (int i = 0; i < 4 && k + i < block; i++) {
      float& to = dvalues[(u + d) * block + k + i];
      to = add ? to + result[d][i] : result[d][i];
    }
}

struct TileKernel {
  static constexpr i64 HEIGHT = TILE;
  i64 step;

  i64 padded(i64 samples) const { return ceil_div(samples, VL) * VL; }

  void pack(const Matrix& from, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    dynsparse::pack(from, {first, count, static_cast<int>(ceil_div(count, VL))}, begin, end, out);
  }

  static constexpr bool SUMS = true;
  void sum(const float* packed, i64 count, i64 features, bool add, float* sums) const {
    sum_lanes(packed, padded(count), features, add, sums);
  }

  void pack_x(const BlockPass& pass, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    pack(pass.x, first, count, begin, end, out);
  }
  void pack_dy(const BlockPass& pass, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    pack(pass.packed, first, count, begin, end, out);
  }

  void outputs(const BlockPass& pass, i64 begin, i64 end, const float* tile, i64 first,
               i64 count) const {
    alignas(64) float out[GATHERED * TILE];
    const i64 width = padded(count), features = pass.majors * pass.block;
    for (i64 f = begin * pass.block; f < end * pass.block; f += GATHERED) {
      const i64 last = least(f + GATHERED, end * pass.block);
      if (pass.transposed)
        all_samples<true>(pass, tile, width, f, last, out);
      else
        all_samples<false>(pass, tile, width, f, last, out);
      unpack(out, {first, count, static_cast<int>(width / VL)}, f, last, pass.out, features);
    }
  }

  void gradient(const BlockPass& pass, i64 row, const float* dy, const float* x, i64 count,
                i64 begin, i64 end, bool add) const {
    const i64 block = pass.block, width = padded(count);
    for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++) {
      const i64 column = pass.cols[p];
      if (column < begin) continue;
      if (column >= end) break;
      for (i64 u = 0; u < block; u += DOWN)
        for (i64 k = 0; k < block; k += 4)
          corner(dy, x + (column - begin) * block * width, width, block, u, k, add,
                 gradient_at(pass, p));
    }
  }
};

}  // namespace

bool run_in_tiles(const BlockPass& pass) {
  return run_blocks(pass, TileKernel{ceil_div(CHUNK, pass.block)});
}

}  // namespace dynsparse
