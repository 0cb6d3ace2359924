// Weights in int8, activations in float32.

#include "base/scratch.h"
#include "linear/block/block.h"
#include "linear/element/element.h"
#include "linear/few/few.h"
#include "linear/int8/int8.h"

namespace dynsparse {
namespace {

// x to [quad of features][sample][QUAD]: samples side by side instead of a power of two apart,
// where they would compete for the same cache lines.
void pack_quads(const Matrix& from, i64 batch, i64 features, float* out) {
  for (i64 f = 0; f < features; f += QUAD)
    for (i64 s = 0; s < batch; s++, out += QUAD) {
      const float* x = from.data.f32 + from.at(s, f);
      for (int c = 0; c < QUAD; c++) out[c] = x[c * from.feature_stride];
    }
}

void finish(const Int8Pass& pass, i64 sample, i64 row, F sum, float unit) {
  F y = sum * (load_lanes(pass.scale + row) * unit);
  if (pass.bias) y += load_lanes(pass.bias + row);
  store_lanes(pass.y + sample * pass.out + row, y);
}

// ---- blocks of multiples of 8 ----

// VECTORS vectors of rows of a block row, from `first` on, by SAMPLES samples. Columns add to
// different sums where these are few, so that additions need not wait for each other.
template <int VECTORS, int SAMPLES>
void quad_rows(const Int8Pass& pass, const float* x, i64 row, i64 first, i64 sample) {
  constexpr int SETS = SAMPLES > 2 ? 1 : SAMPLES > 1 ? 2 : 4;
  const i64 block = pass.block, stride = pass.batch * QUAD;
  F sum[SETS][SAMPLES][VECTORS] = {};
  for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++) {
    const int8_t* values = pass.values + p * block * block + first * QUAD;
    const float* quad = x + pass.cols[p] * (block / QUAD) * stride + sample * QUAD;
    for (i64 g = 0; g < block; g += QUAD, values += block * QUAD, quad += stride) {
      Q quads[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) quads[v] = load_quads(values + v * LANES * QUAD);
#pragma GCC unroll 4
      for (int c = 0; c < QUAD; c++) {
        F w[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) w[v] = column_of(quads[v], c);
#pragma GCC unroll 4
        for (int s = 0; s < SAMPLES; s++) {
          const F activation = quad[s * QUAD + c] - F{};
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++) sum[c % SETS][s][v] += w[v] * activation;
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < SAMPLES; s++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      F total = sum[0][s][v];
#pragma GCC unroll 4
      for (int k = 1; k < SETS; k++) total += sum[k][s][v];
      finish(pass, sample + s, row * block + first + v * LANES, total, QUAD_SCALE);
    }
}

template <int SAMPLES>
void quad_samples(const Int8Pass& pass, const float* x, i64 row, i64 sample) {
  i64 first = 0;
  for (; first + 2 * LANES <= pass.block; first += 2 * LANES)
    quad_rows<2, SAMPLES>(pass, x, row, first, sample);
  if (first < pass.block) quad_rows<1, SAMPLES>(pass, x, row, first, sample);
}

// ---- weights in float32 ----

// A loop of its own, for its pointers alone.
DYNSPARSE_INLINE void widen_each(const int8_t* __restrict values, i64 count,
                            const float* __restrict scales, float* __restrict out) {
#pragma GCC unroll 1
  for (i64 i = 0; i < count; i++) out[i] = static_cast<float>(values[i]) * scales[i];
}

void dequantize_blocks(const Int8Pass& pass, i64 row, float* out) {
  constexpr i64 LARGEST = 15;
  const i64 block = pass.block, size = block * block;
  const float* scale = pass.scale + row * block;
  float scales[LARGEST * LARGEST];
  const bool fits = block <= LARGEST;
  for (i64 i = 0; fits && i < size; i++) scales[i] = scale[i / block];
  for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++) {
    if (block == QUAD)  // a constant count needs no loop
      widen_each(pass.values + p * QUAD * QUAD, QUAD * QUAD, scales, out + p * QUAD * QUAD);
    else if (fits)
      widen_each(pass.values + p * size, size, scales, out + p * size);
    else
      for (i64 r = 0; r < block; r++)
        widen(pass.values + p * size + r * block, block, scale[r], out + p * size + r * block);
  }
}

// Columns become rows: the kernels of blocks want them so.
void dequantize_quads(const Int8Pass& pass, i64 row, float* out) {
  const i64 block = pass.block, size = block * block;
  const float* scale = pass.scale + row * block;
  for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++)
    for (i64 c = 0; c < block; c += QUAD)
      for (i64 r = 0; r < block; r += LANES) {
        const Q quads = load_quads(pass.values + p * size + c * block + r * QUAD);
        const F unit = load_lanes(scale + r) * QUAD_SCALE;
#pragma GCC unroll 4
        for (int k = 0; k < QUAD; k++)
          store_lanes(out + p * size + (c + k) * block + r, column_of(quads, k) * unit);
      }
}

}  // namespace

bool int8_forward_few(const Int8Pass& pass) {
  if (!pass.has_quads()) {
    const FewPass few = {nullptr,  pass.row_ptr, pass.cols,    pass.masks, pass.batch, pass.out,
                         pass.in,  pass.threads, pass.x,       pass.bias,  pass.y,     pass.scale};
    return pass.block == 1 ? int8_elements_forward(few, pass.values)
                           : int8_blocks_of_4_forward(few, pass.values);
  }
  const bool is_packed = pass.batch == 1 && pass.x.feature_stride == 1;
  const i64 size = is_packed ? 0 : pass.batch * pass.in;
  Scratch scratch(Scratch::size_of<float>(size));
  if (scratch.failed()) return false;
  float* packed = scratch.take<float>(size);
  if (!is_packed) pack_quads(pass.x, pass.batch, pass.in, packed);
  const float* x = is_packed ? pass.x.data.f32 : packed;
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (i64 row = 0; row < pass.out / pass.block; row++) {
    i64 sample = 0;
    for (; sample + 4 <= pass.batch; sample += 4) quad_samples<4>(pass, x, row, sample);
    if (sample + 2 <= pass.batch) {
      quad_samples<2>(pass, x, row, sample);
      sample += 2;
    }
    if (sample < pass.batch) quad_samples<1>(pass, x, row, sample);
  }
  return true;
}

bool int8_forward_elements(const Int8Pass& pass) {
  ElementPass elements = {pass.row_ptr, pass.cols, pass.out,    pass.in,
                          pass.batch,   pass.x,    pass.threads};
  elements.out = {pass.y};
  elements.int8_values = pass.values;
  elements.scale = pass.scale;
  elements.bias = pass.bias;
  return run(elements, pass.panels);
}

bool int8_forward_many(const Int8Pass& pass) {
  const i64 block = pass.block, rows = pass.out / block;
  const i64 size = pass.row_ptr[rows] * block * block;
  Scratch scratch(Scratch::size_of<float>(size));
  if (scratch.failed()) return false;
  float* values = scratch.take<float>(size);
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (i64 row = 0; row < rows; row++) {
    if (pass.has_quads())
      dequantize_quads(pass, row, values);
    else
      dequantize_blocks(pass, row, values);
  }
  BlockPass blocks = {rows, pass.in / block, block, pass.batch, pass.x, pass.threads};
  blocks.out = {pass.y};
  blocks.ptr = pass.row_ptr;
  blocks.idx = pass.cols;
  blocks.values = values;
  blocks.bias = pass.bias;
  blocks.transposed = pass.has_quads();
  return lines_fit(blocks) ? run_in_lines(blocks) : run_in_tiles(blocks);
}

}  // namespace dynsparse
