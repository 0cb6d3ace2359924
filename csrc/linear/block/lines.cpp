// Blocks of whole cache lines: vectors hold features.

#include "linear/block/pack.h"
#include "linear/block/run.h"

namespace dynsparse {
namespace {

// ---- out = packed times blocks ----

// Accumulators: SAMPLES samples by VECTORS vectors of output features. Each vector of weights
// serves all samples, each broadcast activation all vectors. BLOCK is the block size, or 0 for any.
template <int BLOCK>
struct Shape {
  static constexpr int VECTORS =
      VL == 16 ? (BLOCK >= 64 ? 4 : BLOCK == 32 ? 2 : 1) : REGISTERS == 32 ? 4 : 2;
  static constexpr int SAMPLES = VL == 16 ? 24 / VECTORS : 6;
};

// Packed samples: line l of sample s at data + l * stride + s * LINE.
struct Lines {
  const float* data;
  i64 stride;
  i64 height;
};

// `S` samples from `sample` on, VECTORS vectors of outputs from feature `first` of a major on.
template <int BLOCK, int S>
void outputs(const BlockPass& pass, const float* values, i64 major, i64 first,
             const Lines& lines, i64 sample, float* out, i64 out_stride) {
  constexpr int N = Shape<BLOCK>::VECTORS;
  const i64 block = BLOCK ? BLOCK : pass.block, across = block / LINE;
  V sum[S][N];
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) {
    const i64 feature = major * block + first + j * VL;
    const V start = pass.bias ? load_unaligned(pass.bias + feature) : V{};
#pragma GCC unroll 24
    for (int m = 0; m < S; m++) sum[m][j] = start;
  }
  // The first samples of a major fetch the weights of the next one into the second-level cache:
  // grad_input jumps from block to block, and the hardware does not foresee where to.
  const i64 begin = pass.ptr[major], end = pass.ptr[major + 1], last = pass.ptr[pass.majors] - 1;
  const auto weights = [&](i64 p) {
    return values + (pass.order ? pass.order[p] : p) * block * block + first;
  };
  for (i64 p = begin; p < end; p++) {
    const float* w = weights(p);
    const float* ahead = sample == 0 ? weights(least(p + end - begin, last)) : w;
    const float* x = lines.data + pass.idx[p] * across * lines.stride + sample * LINE;
    for (i64 line = 0; line < across; line++, x += lines.stride) {
#pragma GCC unroll 4
      for (int k = 0; k < LINE; k++, w += block) {
        V weight[N];
        __builtin_prefetch(ahead, 0, 2);
        ahead += block;
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
      store_unaligned(out + (sample + m) * out_stride + first + j * VL, sum[m][j]);
  }
}

constexpr int smaller(int samples) {
  return samples > 16 ? 16 : samples > 8 ? 8 : samples > 4 ? 4 : samples > 2 ? 2 : 1;
}

// All samples of a tile, in groups of S, then in smaller ones.
template <int BLOCK, int S>
void all_samples(const BlockPass& pass, const float* values, i64 major, i64 first,
                 const Lines& lines, i64 sample, float* out, i64 out_stride) {
  for (; sample + S <= lines.height; sample += S)
    outputs<BLOCK, S>(pass, values, major, first, lines, sample, out, out_stride);
  if constexpr (S > 1)
    if (sample < lines.height)
      all_samples<BLOCK, smaller(S)>(pass, values, major, first, lines, sample, out, out_stride);
}

template <int BLOCK>
void one_major(const BlockPass& pass, const float* values, i64 major, const Lines& lines,
               float* out, i64 out_stride) {
  const i64 block = BLOCK ? BLOCK : pass.block;
  constexpr int width = Shape<BLOCK>::VECTORS * VL;
  for (i64 first = 0; first < block; first += width)
    all_samples<BLOCK, Shape<BLOCK>::SAMPLES>(pass, values, major, first, lines, 0, out,
                                              out_stride);
}

void one_major(const BlockPass& pass, const float* values, i64 major, const Lines& lines,
               float* out, i64 out_stride) {
  switch (pass.block) {
    case 16: return one_major<16>(pass, values, major, lines, out, out_stride);
    case 32: return one_major<32>(pass, values, major, lines, out, out_stride);
    case 64: return one_major<64>(pass, values, major, lines, out, out_stride);
    case 128: return one_major<128>(pass, values, major, lines, out, out_stride);
    default: return one_major<0>(pass, values, major, lines, out, out_stride);
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

// Accumulators: DOWN rows (of dy) by C vectors of columns (of x), which may lie in several blocks
// of a row: these share each broadcast of dy.
constexpr int DOWN = REGISTERS == 32 ? 8 : 4, ACROSS = 3;

struct Column {
  const float* x;  // its line of the first sample
  float* to;       // its first row in dvalues
};

template <int R, int C>
void corner(const float* dy, const Column* columns, i64 count, i64 block, i64 u, bool add) {
  V sum[R][C];
  const float* x[C];
#pragma GCC unroll 4
  for (int j = 0; j < C; j++) x[j] = columns[j].x;
#pragma GCC unroll 16
  for (int d = 0; d < R; d++) {
#pragma GCC unroll 4
    for (int j = 0; j < C; j++)
      sum[d][j] = add ? load_unaligned(columns[j].to + (u + d) * block) : V{};
  }
  dy += u / LINE * LINE * count + u % LINE;
#pragma GCC unroll 2
  for (i64 sample = 0; sample < count * LINE; sample += LINE) {
    V lanes[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) {
      lanes[j] = load(x[j] + sample);
      pin(lanes[j]);
    }
#pragma GCC unroll 16
    for (int d = 0; d < R; d++) {
      const V grad = broadcast(dy[sample + d]);
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sum[d][j] += grad * lanes[j];
    }
  }
#pragma GCC unroll 16
  for (int d = 0; d < R; d++) {
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) store_unaligned(columns[j].to + (u + d) * block, sum[d][j]);
  }
}

template <int R, int C>
void corners(const float* dy, const Column* columns, i64 count, i64 block, bool add) {
  for (i64 u = 0; u < block; u += R) corner<R, C>(dy, columns, count, block, u, add);
}

// ---- the passes ----

struct LineKernel {
  static constexpr i64 HEIGHT = 64;
  const float* values;
  i64 step;

  i64 padded(i64 samples) const { return samples; }

  void pack(const Matrix& from, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    pack_lines(from, first, count, begin, end, count * LINE, out);
  }

  static constexpr bool SUMS = true;
  void sum(const float* packed, i64 count, i64 features, bool add, float* sums) const {
    constexpr int CHAINS = 4;  // an addition waits for the one before
    for (i64 f = 0; f < features; f += LINE, packed += count * LINE)
      for (int j = 0; j < LINE; j += VL) {
        V chain[CHAINS] = {};
        i64 sample = 0;
        for (; sample + CHAINS <= count; sample += CHAINS)
#pragma GCC unroll 4
          for (int k = 0; k < CHAINS; k++) chain[k] += load(packed + (sample + k) * LINE + j);
        for (; sample < count; sample++) chain[0] += load(packed + sample * LINE + j);
        V all = (chain[0] + chain[1]) + (chain[2] + chain[3]);
        if (add) all += load_unaligned(sums + f + j);
        store_unaligned(sums + f + j, all);
      }
  }

  void pack_x(const BlockPass& pass, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    pack(pass.x, first, count, begin, end, out);
  }
  void pack_dy(const BlockPass& pass, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    pack(pass.packed, first, count, begin, end, out);
  }

  void outputs(const BlockPass& pass, i64 begin, i64 end, const float* tile, i64 first,
               i64 count) const {
    for (i64 m = begin; m < end; m += step)
      gathered(pass, m, least(end, m + step), tile, first, count);
  }

  void gathered(const BlockPass& pass, i64 begin, i64 end, const float* tile, i64 first,
                i64 count) const {
    const i64 block = pass.block, features = pass.majors * block;
    const Lines packed = {tile, count * LINE, count};
    const i64 place = first * features + begin * block;
    float* const out = pass.out.f32 ? pass.out.f32 + place : nullptr;
    if (end == begin + 1 && out) return one_major(pass, values, begin, packed, out, features);
    constexpr i64 stride = GATHERED + LINE;
    alignas(64) float staged[HEIGHT * stride];
    for (i64 m = begin; m < end; m++)
      one_major(pass, values, m, packed, staged + (m - begin) * block, stride);
    const i64 width = (end - begin) * block;
    for (i64 sample = 0; sample < count; sample++) {
      const float* from = staged + sample * stride;
      if (out)
        for (i64 f = 0; f < width; f += VL)
          store_unaligned(out + sample * features + f, load(from + f));
      else
        narrow(from, width, pass.out.b16 + place + sample * features);
    }
  }

  void gradient(const BlockPass& pass, i64 row, const float* dy, const float* x, i64 count,
                i64 begin, i64 end, bool add) const {
    const i64 block = pass.block;
    Column columns[ACROSS];
    int some = 0;
    for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++) {
      const i64 column = pass.cols[p];
      if (column < begin) continue;
      if (column >= end) break;
      for (i64 k = 0; k < block; k += VL) {
        const i64 feature = (column - begin) * block + k;
        columns[some++] = {x + feature / LINE * LINE * count + feature % LINE,
                           gradient_at(pass, p) + k};
        if (some < ACROSS) continue;
        corners<DOWN, ACROSS>(dy, columns, count, block, add);
        some = 0;
      }
    }
    if (some == 2) corners<DOWN, 2>(dy, columns, count, block, add);
    if (some == 1) corners<2 * DOWN, 1>(dy, columns, count, block, add);
  }
};

}  // namespace

bool run_in_lines(const BlockPass& pass) {
  const i64 block = pass.block, nnz = pass.out ? pass.ptr[pass.majors] : 0;
  // The kernel reads weights as vectors of outputs: grad_input finds them so, forward does not.
  const bool turn = pass.out && !pass.transposed;
  const i64 turned_size = turn ? nnz * block * block : 0;
  Scratch scratch(Scratch::size_of<float>(turned_size));
  if (scratch.failed()) return false;
  float* turned = scratch.take<float>(turned_size);
  if (turn) {
#pragma omp parallel for num_threads(pass.threads) schedule(static)
    for (i64 p = 0; p < nnz; p++)
      transpose_block(pass.values.f32 + p * block * block, turned + p * block * block, block);
  }
  return run_blocks(pass, LineKernel{turn ? turned : pass.values.f32, most(1, GATHERED / block)});
}

}  // namespace dynsparse
