#include "block.h"
#include "scratch.h"

namespace dynsparse {
namespace {

// Samples packed together.
constexpr i64 HEIGHT = 64;
// Features packed per task.
constexpr i64 STRIP = 8 * LINE;

// ---- out = packed times blocks ----

// Accumulators: SAMPLES samples by VECTORS vectors of output features. Each vector of weights
// serves all samples, each broadcast activation all vectors. BLOCK is the block size, or 0 for any.
template <int BLOCK>
struct Shape {
  static constexpr int VECTORS = VL == 16 ? (BLOCK == 32 ? 2 : 1) : REGISTERS == 32 ? 4 : 2;
  static constexpr int SAMPLES = VL == 16 ? (BLOCK == 32 ? 12 : 24) : 6;
};

// `S` samples from `sample` on, VECTORS vectors of outputs from feature `first` of a major on.
template <int BLOCK, int S>
void outputs(const BlockPass& pass, const float* values, i64 major, i64 first,
             const float* panels, i64 height, i64 sample, float* out) {
  constexpr int N = Shape<BLOCK>::VECTORS;
  const i64 block = BLOCK ? BLOCK : pass.block, lines = block / LINE;
  const i64 features = pass.majors * block;
  V sum[S][N];
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) {
    const i64 feature = major * block + first + j * VL;
    const V start = pass.bias ? load_unaligned(pass.bias + feature) : V{};
#pragma GCC unroll 24
    for (int m = 0; m < S; m++) sum[m][j] = start;
  }
  for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
    const i64 slot = pass.order ? pass.order[p] : p;
    const float* w = values + slot * block * block + first;
    const float* x = panels + pass.idx[p] * lines * height * LINE + sample * LINE;
    for (i64 line = 0; line < lines; line++, x += height * LINE) {
#pragma GCC unroll 4
      for (int k = 0; k < LINE; k++, w += block) {
        V weight[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) weight[j] = load_unaligned(w + j * VL);
#pragma GCC unroll 24
        for (int m = 0; m < S; m++) {
          const V activation = broadcast(x[m * LINE + k]);
#pragma GCC unroll 4
          for (int j = 0; j < N; j++) sum[m][j] += activation * weight[j];
        }
      }
    }
  }
#pragma GCC unroll 24
  for (int m = 0; m < S; m++) {
#pragma GCC unroll 4
    for (int j = 0; j < N; j++)
      store_unaligned(out + (sample + m) * features + major * block + first + j * VL, sum[m][j]);
  }
}

constexpr int smaller(int samples) {
  return samples > 16 ? 16 : samples > 8 ? 8 : samples > 4 ? 4 : samples > 2 ? 2 : 1;
}

// All samples of a tile, in groups of S, then in smaller ones.
template <int BLOCK, int S>
void all_samples(const BlockPass& pass, const float* values, i64 major, i64 first,
                 const float* panels, i64 height, i64 sample, float* out) {
  for (; sample + S <= height; sample += S)
    outputs<BLOCK, S>(pass, values, major, first, panels, height, sample, out);
  if constexpr (S > 1)
    if (sample < height)
      all_samples<BLOCK, smaller(S)>(pass, values, major, first, panels, height, sample, out);
}

template <int BLOCK>
void one_major(const BlockPass& pass, const float* values, i64 major, const float* panels,
               i64 height, float* out) {
  const i64 block = BLOCK ? BLOCK : pass.block;
  constexpr int width = Shape<BLOCK>::VECTORS * VL;
  for (i64 first = 0; first < block; first += width)
    all_samples<BLOCK, Shape<BLOCK>::SAMPLES>(pass, values, major, first, panels, height, 0, out);
}

void one_major(const BlockPass& pass, const float* values, i64 major, const float* panels,
               i64 height, float* out) {
  switch (pass.block) {
    case 16: return one_major<16>(pass, values, major, panels, height, out);
    case 32: return one_major<32>(pass, values, major, panels, height, out);
    default: return one_major<0>(pass, values, major, panels, height, out);
  }
}

void transpose_block(const float* from, float* to, i64 block) {
  for (i64 i = 0; i < block; i += VL)
    for (i64 j = 0; j < block; j += VL) {
      V square[VL];
#pragma GCC unroll 16
      for (int k = 0; k < VL; k++) square[k] = load_unaligned(from + (i + k) * block + j);
      transpose(square);
#pragma GCC unroll 16
      for (int k = 0; k < VL; k++) store_unaligned(to + (j + k) * block + i, square[k]);
    }
}

// ---- gradient of the blocks ----

// Accumulators: DOWN rows (of dy) by VECTORS vectors of columns (of x).
template <int BLOCK>
struct Corner {
  static constexpr int VECTORS = Shape<BLOCK>::VECTORS;
  static constexpr int DOWN = VL == 16 ? 16 / VECTORS : 4;
};

template <int BLOCK>
void gradient_of(const float* dy, const float* x, i64 height, i64 any_block, bool add,
                 float* dvalues) {
  constexpr int N = Corner<BLOCK>::VECTORS, DOWN = Corner<BLOCK>::DOWN;
  const i64 block = BLOCK ? BLOCK : any_block;
  for (i64 u = 0; u < block; u += DOWN)
    for (i64 k = 0; k < block; k += N * VL) {
      float* to = dvalues + u * block + k;
      const float* down = dy + u / LINE * height * LINE + u % LINE;
      const float* right[N];
      for (int j = 0; j < N; j++)
        right[j] = x + (k + j * VL) / LINE * height * LINE + (k + j * VL) % LINE;
      V sum[DOWN][N];
#pragma GCC unroll 16
      for (int d = 0; d < DOWN; d++) {
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) sum[d][j] = add ? load_unaligned(to + d * block + j * VL) : V{};
      }
      for (i64 sample = 0; sample < height * LINE; sample += LINE) {
        V lanes[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) lanes[j] = load(right[j] + sample);
#pragma GCC unroll 16
        for (int d = 0; d < DOWN; d++) {
          const V grad = broadcast(down[sample + d]);
#pragma GCC unroll 4
          for (int j = 0; j < N; j++) sum[d][j] += grad * lanes[j];
        }
      }
#pragma GCC unroll 16
      for (int d = 0; d < DOWN; d++) {
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) store_unaligned(to + d * block + j * VL, sum[d][j]);
      }
    }
}

void gradient_of_row(const BlockPass& pass, i64 row, const float* dy, const float* x, i64 height,
                     bool add) {
  const i64 block = pass.block;
  const float* down = dy + row * block * height;
  for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++) {
    const float* right = x + pass.cols[p] * block * height;
    float* to = pass.dvalues + p * block * block;
    switch (block) {
      case 16: gradient_of<16>(down, right, height, block, add, to); break;
      case 32: gradient_of<32>(down, right, height, block, add, to); break;
      default: gradient_of<0>(down, right, height, block, add, to);
    }
  }
}

}  // namespace

bool run_in_panels(const BlockPass& pass) {
  const i64 block = pass.block;
  const i64 inputs = pass.minors * block, features = pass.majors * block;
  const i64 nnz = pass.out ? pass.ptr[pass.majors] : pass.row_ptr[pass.minors];
  const i64 tiles = ceil_div(pass.batch, HEIGHT), at_once = least(tiles, TILES_AT_ONCE);
  const i64 tile_size = HEIGHT * inputs, x_size = pass.dvalues ? HEIGHT * features : 0;
  // The kernel reads weights as vectors of outputs: grad_input finds them so, forward does not.
  const bool turn = pass.out && !pass.transposed;
  const i64 turned_size = turn ? nnz * block * block : 0;
  Scratch scratch(Scratch::size_of<float>(tile_size * at_once) +
                  Scratch::size_of<float>(x_size * at_once) +
                  Scratch::size_of<float>(turned_size));
  if (scratch.failed()) return false;
  float* packed = scratch.take<float>(tile_size * at_once);
  float* x = scratch.take<float>(x_size * at_once);
  float* turned = scratch.take<float>(turned_size);
  const float* values = turn ? turned : pass.values;

  const i64 strips = ceil_div(inputs, STRIP), x_strips = x_size ? ceil_div(features, STRIP) : 0;
  const i64 cost = HEIGHT * nnz * block * block / VL;
  const i64 per_task = units_per_task(pass.majors, cost, pass.threads);
  const i64 tasks = ceil_div(pass.majors, per_task);
  const i64 rows_per_task = units_per_task(pass.minors, cost, pass.threads);
  const i64 row_tasks = ceil_div(pass.minors, rows_per_task);
  const auto work = [&](i64 major, i64 t, i64 base) {
    const i64 first = (base + t) * HEIGHT;
    one_major(pass, values, major, packed + t * tile_size, least(HEIGHT, pass.batch - first),
              pass.out + first * features);
  };

#pragma omp parallel num_threads(pass.threads)
  {
    for (i64 base = 0; base < tiles; base += at_once) {
      const i64 count = least(at_once, tiles - base);
#pragma omp for collapse(2) schedule(static)
      for (i64 t = 0; t < count; t++)
        for (i64 s = 0; s < strips + x_strips; s++) {
          const i64 first = (base + t) * HEIGHT, height = least(HEIGHT, pass.batch - first);
          const bool is_x = s >= strips;
          const i64 begin = (is_x ? s - strips : s) * STRIP;
          pack_panels(is_x ? pass.x : pass.packed, first, height, begin,
                      least(is_x ? features : inputs, begin + STRIP),
                      (is_x ? x + t * x_size : packed + t * tile_size) + begin * height);
        }
      if (pass.out) {
        // The first tile turns the blocks of each major just before it uses them.
        const i64 turning = turn && base == 0 ? 1 : 0;
        if (turning) {
#pragma omp for schedule(dynamic)
          for (i64 k = 0; k < tasks; k++)
            for (i64 m = k * per_task; m < least(pass.majors, (k + 1) * per_task); m++) {
              for (i64 p = pass.ptr[m]; p < pass.ptr[m + 1]; p++)
                transpose_block(pass.values + p * block * block, turned + p * block * block, block);
              work(m, 0, base);
            }
        }
#pragma omp for collapse(2) schedule(dynamic) nowait
        for (i64 t = turning; t < count; t++)
          for (i64 k = 0; k < tasks; k++)
            for (i64 m = k * per_task; m < least(pass.majors, (k + 1) * per_task); m++)
              work(m, t, base);
      }
      if (pass.dvalues) {
        // A barrier after each tile: blocks are summed tile by tile, in order.
        for (i64 t = 0; t < count; t++) {
          const i64 height = least(HEIGHT, pass.batch - (base + t) * HEIGHT);
#pragma omp for schedule(dynamic)
          for (i64 k = 0; k < row_tasks; k++)
            for (i64 m = k * rows_per_task; m < least(pass.minors, (k + 1) * rows_per_task); m++)
              gradient_of_row(pass, m, packed + t * tile_size, x + t * x_size, height,
                              base + t > 0);
        }
      }
// No tile may be packed anew while another thread still reads it.
#pragma omp barrier
    }
  }
  return true;
}

}  // namespace dynsparse
