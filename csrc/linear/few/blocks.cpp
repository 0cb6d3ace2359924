// Products of a few samples with blocks, where a vector holds whole rows of a block.
//
// Blocks of BLOCK x BLOCK, in row-major order, are cut into vectors of ROWS rows by COLUMNS
// columns. Such a vector of weights meets COLUMNS activations repeated ROWS times, and ROWS
// gradients each repeated COLUMNS times. Sums over columns (forward) or rows (grad_input) within a
// vector wait until the end. Everything runs in the order of the values, by rows: nothing is
// permuted.

#include "base/scratch.h"
#include "linear/few/few.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace dynsparse {
namespace {

template <int BLOCK>
struct Cut {
  static constexpr int COLUMNS = BLOCK < VL ? BLOCK : VL;
  static constexpr int ROWS = VL / COLUMNS;
  static constexpr int DOWN = BLOCK / ROWS;       // vectors below each other
  static constexpr int ACROSS = BLOCK / COLUMNS;  // and beside each other
};

// COLUMNS floats, repeated until the vector is full.
template <int COLUMNS>
DYNSPARSE_INLINE V repeat(const float* p) {
  if constexpr (COLUMNS == VL) {
    return load_unaligned(p);
  } else {
#if defined(__AVX512F__)
    // Masks of all lanes: the plain intrinsics of GCC 12 warn about their own headers.
    if constexpr (COLUMNS == 4) return _mm512_maskz_broadcast_f32x4(0xFFFF, _mm_loadu_ps(p));
    if constexpr (COLUMNS == 8)
      return _mm512_castpd_ps(
          _mm512_maskz_broadcast_f64x4(0xFF, _mm256_castps_pd(_mm256_loadu_ps(p))));
#elif defined(__AVX__)
    if constexpr (COLUMNS == 4) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#endif
    alignas(64) float lanes[VL];
    for (int i = 0; i < VL; i += COLUMNS) std::memcpy(lanes + i, p, COLUMNS * sizeof(float));
    return load(lanes);
  }
}

// x to [piece of COLUMNS][sample][COLUMNS].
template <int COLUMNS>
void pack_pieces(const Matrix& from, i64 batch, i64 features, float* out) {
  for (i64 f = 0; f < features; f += COLUMNS)
    for (i64 s = 0; s < batch; s++, out += COLUMNS) {
      const float* row = from.data.f32 + from.at(s, f);
      for (int i = 0; i < COLUMNS; i++) out[i] = row[i * from.feature_stride];
    }
}

// ---- forward ----

// DOWN vectors of a block row, from `first` on, by SAMPLES samples. Neighbouring blocks add to
// different accumulators where these are few, so that additions need not wait for each other.
template <int BLOCK, int DOWN, int SAMPLES, class Weights>
void forward_vectors(const FewPass& pass, const Weights* weights, const float* x, i64 row,
                     int first, i64 sample) {
  using C = Cut<BLOCK>;
  constexpr int SETS = DOWN * SAMPLES > 4 ? 1 : DOWN * SAMPLES > 2 ? 2 : 4;
  V acc[SETS][DOWN][SAMPLES] = {};
  const i64 stride = pass.batch * C::COLUMNS;
  const auto add = [&](i64 p, V(&sums)[DOWN][SAMPLES]) __attribute__((always_inline)) {
    const Weights* values = weights + p * BLOCK * BLOCK + first * C::ROWS * BLOCK;
    const float* pieces = x + pass.cols[p] * C::ACROSS * stride + sample * C::COLUMNS;
#pragma GCC unroll 2
    for (int h = 0; h < C::ACROSS; h++) {
      V w[DOWN];
#pragma GCC unroll 16
      for (int j = 0; j < DOWN; j++)
        w[j] = load_unaligned(values + j * C::ROWS * BLOCK + h * C::COLUMNS);
#pragma GCC unroll 8
      for (int s = 0; s < SAMPLES; s++) {
        V lanes = repeat<C::COLUMNS>(pieces + h * stride + s * C::COLUMNS);
        if constexpr (DOWN > 1) pin(lanes);
#pragma GCC unroll 16
        for (int j = 0; j < DOWN; j++) sums[j][s] += w[j] * lanes;
      }
    }
  };
  i64 p = pass.row_ptr[row];
  const i64 end = pass.row_ptr[row + 1];
  for (; p + SETS <= end; p += SETS)
#pragma GCC unroll 4
    for (int k = 0; k < SETS; k++) add(p + k, acc[k]);
  for (; p < end; p++) add(p, acc[0]);
#pragma GCC unroll 16
  for (int j = 0; j < DOWN; j++)
#pragma GCC unroll 8
    for (int s = 0; s < SAMPLES; s++) {
      V total = acc[0][j][s];
#pragma GCC unroll 4
      for (int k = 1; k < SETS; k++) total += acc[k][j][s];
      alignas(64) float lanes[VL];
      store(lanes, total);
      for (int r = 0; r < C::ROWS; r++) {
        const i64 at = row * BLOCK + (first + j) * C::ROWS + r;
        const float bias = pass.bias ? pass.bias[at] : 0.0f;
        float sum = pass.scale ? 0.0f : bias;
        for (int c = 0; c < C::COLUMNS; c++) sum += lanes[r * C::COLUMNS + c];
        pass.y[(sample + s) * pass.out + at] = pass.scale ? sum * pass.scale[at] + bias : sum;
      }
    }
}

template <int BLOCK, int SAMPLES, class Weights>
void forward_samples(const FewPass& pass, const Weights* weights, const float* x, i64 row,
                     i64 sample) {
  constexpr int ALL = Cut<BLOCK>::DOWN, FIT = REGISTERS / 2 / SAMPLES;
  constexpr int DOWN = ALL < FIT ? ALL : FIT;
  for (int first = 0; first < ALL; first += DOWN)
    forward_vectors<BLOCK, DOWN, SAMPLES>(pass, weights, x, row, first, sample);
}

template <int BLOCK, class Weights>
void forward_row(const FewPass& pass, const Weights* weights, const float* x, i64 row) {
  i64 sample = 0;
  for (; sample + 4 <= pass.batch; sample += 4)
    forward_samples<BLOCK, 4>(pass, weights, x, row, sample);
  if (sample + 2 <= pass.batch) {
    forward_samples<BLOCK, 2>(pass, weights, x, row, sample);
    sample += 2;
  }
  if (sample < pass.batch) forward_samples<BLOCK, 1>(pass, weights, x, row, sample);
}

template <int BLOCK, class Weights>
bool forward(const FewPass& pass, const Weights* weights) {
  const i64 size = pass.batch * pass.in;
  Scratch scratch(Scratch::size_of<float>(size));
  if (scratch.failed()) return false;
  float* x = scratch.take<float>(size);
  pack_pieces<Cut<BLOCK>::COLUMNS>(pass.x, pass.batch, pass.in, x);
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (i64 row = 0; row < pass.out / BLOCK; row++) forward_row<BLOCK>(pass, weights, x, row);
  return true;
}

// ---- backward ----

// `count` vectors of a block, one below the other.
template <int BLOCK, int DOWN, bool INPUT, bool VALUES>
DYNSPARSE_INLINE void backward_vectors(const FewPass& pass, const float* values, float* dvalues,
                                       const float* x, const float* dy, float* dx) {
  using C = Cut<BLOCK>;
  constexpr int STRIDE = C::ROWS * BLOCK;
  V w[DOWN], dw[DOWN];
#pragma GCC unroll 8
  for (int j = 0; j < DOWN; j++) {
    if constexpr (INPUT) w[j] = load_unaligned(values + j * STRIDE);
    dw[j] = V{};
  }
  for (i64 s = 0; s < pass.batch; s++) {
    V lanes{}, acc{};
    if constexpr (VALUES) lanes = repeat<C::COLUMNS>(x + s * C::COLUMNS);
    if constexpr (VALUES) pin(lanes);
    if constexpr (INPUT) acc = load(dx + s * VL);
#pragma GCC unroll 8
    for (int j = 0; j < DOWN; j++) {
      V grad = load(dy + (j * pass.batch + s) * VL);
      if constexpr (VALUES && INPUT) pin(grad);
      if constexpr (VALUES) dw[j] += grad * lanes;
      if constexpr (INPUT) acc += grad * w[j];
    }
    if constexpr (INPUT) store(dx + s * VL, acc);
  }
  if constexpr (VALUES)
#pragma GCC unroll 8
    for (int j = 0; j < DOWN; j++) store_unaligned(dvalues + j * STRIDE, dw[j]);
}

// Block rows [begin, end). x [piece][sample][COLUMNS]; dy [vector of rows][sample][VL], repeated;
// dx [piece][sample][VL], not yet summed over the rows of a vector.
template <int BLOCK, bool INPUT, bool VALUES>
void backward_part(const FewPass& pass, const float* x, const float* dy, float* dx, i64 begin,
                   i64 end) {
  using C = Cut<BLOCK>;
  constexpr int FIT = REGISTERS / 4, DOWN = C::DOWN < FIT ? C::DOWN : FIT;
  const i64 batch = pass.batch;
  for (i64 row = begin; row < end; row++)
    for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++)
      for (int j = 0; j < C::DOWN; j += DOWN)
        for (int h = 0; h < C::ACROSS; h++) {
          const i64 piece = (static_cast<i64>(pass.cols[p]) * C::ACROSS + h) * batch;
          const i64 at = p * BLOCK * BLOCK + j * C::ROWS * BLOCK + h * C::COLUMNS;
          backward_vectors<BLOCK, DOWN, INPUT, VALUES>(
              pass, pass.values + at, VALUES ? pass.dvalues + at : nullptr,
              x + piece * C::COLUMNS, dy + (row * C::DOWN + j) * batch * VL, dx + piece * VL);
        }
}

template <int BLOCK>
bool backward(const FewPass& pass) {
  using C = Cut<BLOCK>;
  // As for single elements the number of parts does not depend on that of the threads. Parts hold
  // ROWS times the gradient of the input, so they are fewer where blocks are small.
  constexpr i64 MOST = C::ROWS >= 4 ? 2 : 8 / C::ROWS;
  const i64 rows = pass.out / BLOCK, batch = pass.batch;
  const i64 parts = most(1, least(MOST, rows / 8));
  const i64 x_size = pass.dvalues ? batch * pass.in : 0;
  const i64 dy_size = batch * pass.out * C::COLUMNS;
  const i64 dx_size = pass.dx ? batch * pass.in * C::ROWS : 0;
  Scratch scratch(Scratch::size_of<float>(x_size) + Scratch::size_of<float>(dy_size) +
                  Scratch::size_of<float>(parts * dx_size));
  if (scratch.failed()) return false;
  float* x = scratch.take<float>(x_size);
  float* dy = scratch.take<float>(dy_size);
  float* dx = scratch.take<float>(parts * dx_size);
  if (pass.dvalues) pack_pieces<C::COLUMNS>(pass.x, batch, pass.in, x);
#pragma omp parallel num_threads(pass.threads)
  {
#pragma omp for schedule(static)
    for (i64 r = 0; r < pass.out; r += C::ROWS)
      for (i64 s = 0; s < batch; s++)
        for (int i = 0; i < VL; i++)
          dy[(r / C::ROWS * batch + s) * VL + i] =
              pass.dy.data.f32[pass.dy.at(s, r + i / C::COLUMNS)];
#pragma omp for schedule(static)
    for (i64 k = 0; k < parts; k++) {
      const i64 begin = rows * k / parts, end = rows * (k + 1) / parts;
      float* own = dx + k * dx_size;
      if (pass.dx) std::memset(own, 0, dx_size * sizeof(float));
      if (pass.dx && pass.dvalues)
        backward_part<BLOCK, true, true>(pass, x, dy, own, begin, end);
      else if (pass.dx)
        backward_part<BLOCK, true, false>(pass, x, dy, own, begin, end);
      else
        backward_part<BLOCK, false, true>(pass, x, dy, own, begin, end);
    }
    if (pass.dx) {
#pragma omp for schedule(static)
      for (i64 f = 0; f < pass.in; f += C::COLUMNS)
        for (i64 s = 0; s < batch; s++) {
          const float* from = dx + (f / C::COLUMNS * batch + s) * VL;
          V total = load(from);
          for (i64 k = 1; k < parts; k++) total += load(from + k * dx_size);
          alignas(64) float lanes[VL];
          store(lanes, total);
          for (int c = 0; c < C::COLUMNS; c++) {
            float sum = lanes[c];
            for (int r = 1; r < C::ROWS; r++) sum += lanes[r * C::COLUMNS + c];
            pass.dx[s * pass.in + f + c] = sum;
          }
        }
    }
  }
  return true;
}

}  // namespace

bool blocks_forward(const FewPass& pass, i64 block) {
  switch (block) {
    case 4: return forward<4>(pass, pass.values);
    case 8: return forward<8>(pass, pass.values);
    case 16: return forward<16>(pass, pass.values);
    case 32: return forward<32>(pass, pass.values);
    case 64: return forward<64>(pass, pass.values);
    default: return forward<128>(pass, pass.values);
  }
}

bool int8_blocks_of_4_forward(const FewPass& pass, const int8_t* values) {
  return forward<4>(pass, values);
}

bool blocks_backward(const FewPass& pass, i64 block) {
  switch (block) {
    case 4: return backward<4>(pass);
    case 8: return backward<8>(pass);
    case 16: return backward<16>(pass);
    case 32: return backward<32>(pass);
    case 64: return backward<64>(pass);
    default: return backward<128>(pass);
  }
}

}  // namespace dynsparse
