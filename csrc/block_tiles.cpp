#include "block.h"
#include "scratch.h"

namespace dynsparse {
namespace {

// Output features per chunk, and per pass over the entries of a major.
constexpr i64 CHUNK = 2 * LINE;
constexpr int ROWS = REGISTERS / (2 * TILE_VECTORS);
// Features packed per task.
constexpr i64 STRIP = 128;

// Outputs [first, first + R) of one major and one tile. BLOCK is the block size, or 0 for any.
template <int NV, int R, int BLOCK, bool TRANSPOSED>
DYNSPARSE_INLINE void outputs(const BlockPass& pass, i64 major, i64 first, const float* tile,
                              float* out) {
  const i64 block = BLOCK ? BLOCK : pass.block;
  const i64 across = TRANSPOSED ? 1 : block, along = TRANSPOSED ? block : 1;
  V sum[R][NV];
#pragma GCC unroll 4
  for (int u = 0; u < R; u++) {
    const V start = broadcast(pass.bias ? pass.bias[major * block + first + u] : 0.0f);
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) sum[u][j] = start;
  }
  for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
    const i64 slot = pass.order ? pass.order[p] : p;
    const float* x = tile + pass.idx[p] * block * (NV * VL);
    const float* w = pass.values + slot * block * block + first * across;
#pragma GCC unroll 8
    for (i64 k = 0; k < block; k++, x += NV * VL) {
      V lanes[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) {
        lanes[j] = load(x + j * VL);
        pin(lanes[j]);
      }
#pragma GCC unroll 4
      for (int u = 0; u < R; u++) {
        const V weight = broadcast(w[u * across + k * along]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) sum[u][j] += weight * lanes[j];
      }
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < R; u++) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(out + u * NV * VL + j * VL, sum[u][j]);
  }
}

// Outputs [begin, end) of the whole matrix, at most CHUNK of them, for one tile.
template <int NV, int BLOCK, bool TRANSPOSED>
void chunk(const BlockPass& pass, const Tile& tile, const float* packed, i64 begin, i64 end) {
  const i64 block = BLOCK ? BLOCK : pass.block;
  alignas(64) float out[CHUNK * NV * VL];
  for (i64 f = begin; f < end;) {
    const i64 major = f / block, first = f % block;
    const i64 left = least(block - first, end - f);
    float* to = out + (f - begin) * NV * VL;
    if (left >= ROWS) {
      outputs<NV, ROWS, BLOCK, TRANSPOSED>(pass, major, first, packed, to);
      f += ROWS;
    } else {
      outputs<NV, 1, BLOCK, TRANSPOSED>(pass, major, first, packed, to);
      f += 1;
    }
  }
  unpack(out, tile, begin, end, pass.out, pass.majors * block);
}

template <int BLOCK, bool TRANSPOSED>
void chunk(const BlockPass& pass, const Tile& tile, const float* packed, i64 begin, i64 end) {
  switch (tile.vectors) {
    case 1: return chunk<1, BLOCK, TRANSPOSED>(pass, tile, packed, begin, end);
    case 2: return chunk<2, BLOCK, TRANSPOSED>(pass, tile, packed, begin, end);
    case 3: return chunk<3, BLOCK, TRANSPOSED>(pass, tile, packed, begin, end);
    default: return chunk<4, BLOCK, TRANSPOSED>(pass, tile, packed, begin, end);
  }
}

template <bool TRANSPOSED>
void chunk(const BlockPass& pass, const Tile& tile, const float* packed, i64 begin, i64 end) {
  switch (pass.block) {
    case 4: return chunk<4, TRANSPOSED>(pass, tile, packed, begin, end);
    case 8: return chunk<8, TRANSPOSED>(pass, tile, packed, begin, end);
    default: return chunk<0, TRANSPOSED>(pass, tile, packed, begin, end);
  }
}

// ---- gradient of the blocks ----

// Corner of a block that is computed at once: DOWN rows (of dy) by 4 columns (of x).
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
constexpr int DOWN = VL == 16 ? 4 : 2;
// Floats of packed x that stay in the second-level cache: tiles are taken together up to there.
constexpr i64 CACHED = 1 << 18;

// Consecutive tiles, summed in registers before lanes are folded.
struct Range {
  const float* x;
  const float* dy;
  i64 x_size;  // floats per tile
  i64 dy_size;
  i64 first;
  i64 last;
  i64 batch;
};

// Adds to dvalues [block, block] (or sets it) the corner at (u, k); what lies past the block's
// edge is computed from its last row or column and not stored.
void corner(const Range& tiles, i64 row, i64 column, i64 block, i64 u, i64 k, bool add,
            float* dvalues) {
  V sum[DOWN][4] = {};
  for (i64 t = tiles.first; t < tiles.last; t++) {
    const i64 width = tile_at(t, tiles.batch).width();
    const float* dy = tiles.dy + (t - tiles.first) * tiles.dy_size + row * block * width;
    const float* x = tiles.x + (t - tiles.first) * tiles.x_size + column * block * width;
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

void gradient_of_row(const BlockPass& pass, const Range& range, i64 row) {
  const i64 block = pass.block;
  for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++)
    for (i64 u = 0; u < block; u += DOWN)
      for (i64 k = 0; k < block; k += 4)
        corner(range, row, pass.cols[p], block, u, k, range.first > 0,
               pass.dvalues + p * block * block);
}

}  // namespace

bool run_in_tiles(const BlockPass& pass) {
  const i64 tiles = tiles_of(pass.batch), at_once = least(tiles, TILES_AT_ONCE);
  const i64 inputs = pass.minors * pass.block, features = pass.majors * pass.block;
  const i64 tile_size = TILE * inputs, x_size = pass.dvalues ? TILE * features : 0;
  Scratch scratch(Scratch::size_of<float>(tile_size * at_once) +
                  Scratch::size_of<float>(x_size * at_once));
  if (scratch.failed()) return false;
  float* packed = scratch.take<float>(tile_size * at_once);
  float* x = scratch.take<float>(x_size * at_once);

  const i64 strips = ceil_div(inputs, STRIP), x_strips = x_size ? ceil_div(features, STRIP) : 0;
  const i64 nnz = pass.out ? pass.ptr[pass.majors] : pass.row_ptr[pass.minors];
  const i64 cost = TILE_VECTORS * nnz * pass.block * pass.block;
  const i64 chunks = ceil_div(features, CHUNK);
  const i64 per_task = units_per_task(chunks, cost, pass.threads);
  const i64 tasks = ceil_div(chunks, per_task);
  const i64 rows_per_task = units_per_task(pass.minors, cost, pass.threads);
  const i64 row_tasks = ceil_div(pass.minors, rows_per_task);
  const i64 in_cache = x_size ? most(1, CACHED / x_size) : 1;

#pragma omp parallel num_threads(pass.threads)
  for (i64 base = 0; base < tiles; base += at_once) {
    const i64 count = least(at_once, tiles - base);
#pragma omp for collapse(2) schedule(static)
    for (i64 t = 0; t < count; t++)
      for (i64 s = 0; s < strips + x_strips; s++) {
        const Tile tile = tile_at(base + t, pass.batch);
        const bool is_x = s >= strips;
        const i64 begin = (is_x ? s - strips : s) * STRIP;
        pack(is_x ? pass.x : pass.packed, tile, begin,
             least(is_x ? features : inputs, begin + STRIP),
             (is_x ? x + t * x_size : packed + t * tile_size) + begin * tile.width());
      }
    if (pass.out) {
#pragma omp for collapse(2) schedule(dynamic) nowait
      for (i64 t = 0; t < count; t++)
        for (i64 k = 0; k < tasks; k++) {
          const Tile tile = tile_at(base + t, pass.batch);
          for (i64 c = k * per_task; c < least(chunks, (k + 1) * per_task); c++) {
            const i64 begin = c * CHUNK, end = least(features, begin + CHUNK);
            if (pass.transposed)
              chunk<true>(pass, tile, packed + t * tile_size, begin, end);
            else
              chunk<false>(pass, tile, packed + t * tile_size, begin, end);
          }
        }
    }
    if (pass.dvalues) {
      // A barrier after each range: blocks are summed range by range, in order.
      for (i64 t = 0; t < count; t += in_cache) {
        const Range range = {x + t * x_size,    packed + t * tile_size,
                             x_size,            tile_size,
                             base + t,          base + least(count, t + in_cache),
                             pass.batch};
#pragma omp for schedule(dynamic)
        for (i64 k = 0; k < row_tasks; k++)
          for (i64 m = k * rows_per_task; m < least(pass.minors, (k + 1) * rows_per_task); m++)
            gradient_of_row(pass, range, m);
      }
    }
// No tile may be packed anew while another thread still reads it.
#pragma omp barrier
  }
  return true;
}

}  // namespace dynsparse
