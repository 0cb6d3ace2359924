// Products of activations and weights in int8, without saturation: |a * w| is a product of an
// unsigned and a signed byte whose sums of two fit 16 bits, as both are at most 127.
#pragma once

#include "base/scratch.h"
#include "linear/int8/int8.h"

#if defined(__SSSE3__)
#include <immintrin.h>
#endif

namespace dynsparse {
namespace {


// Weights as they come, and what the processor wants to know of them beforehand.
struct Weights {
  Q quads;
#if defined(__SSSE3__)
  Q magnitudes;
#endif
};

#if defined(__AVX2__)
DYNSPARSE_INLINE __m256i bits(Q v) { return reinterpret_cast<__m256i>(v); }
DYNSPARSE_INLINE Weights weights_at(const int8_t* p) {
  const Q quads = load_quads(p);
  return {quads, reinterpret_cast<Q>(_mm256_abs_epi8(bits(quads)))};
}
// Each lane of `sum` plus the dot product of its quads.
DYNSPARSE_INLINE Q add_dots(Q sum, const Weights& w, Q activations) {
  const __m256i a = _mm256_sign_epi8(bits(activations), bits(w.quads));
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return reinterpret_cast<Q>(_mm256_dpbusd_epi32(bits(sum), bits(w.magnitudes), a));
#else
  const __m256i pairs = _mm256_maddubs_epi16(bits(w.magnitudes), a);
  return sum + reinterpret_cast<Q>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
#elif defined(__SSSE3__)
DYNSPARSE_INLINE __m128i bits(Q v) { return reinterpret_cast<__m128i>(v); }
DYNSPARSE_INLINE Weights weights_at(const int8_t* p) {
  const Q quads = load_quads(p);
  return {quads, reinterpret_cast<Q>(_mm_abs_epi8(bits(quads)))};
}
DYNSPARSE_INLINE Q add_dots(Q sum, const Weights& w, Q activations) {
  const __m128i a = _mm_sign_epi8(bits(activations), bits(w.quads));
  const __m128i pairs = _mm_maddubs_epi16(bits(w.magnitudes), a);
  return sum + reinterpret_cast<Q>(_mm_madd_epi16(pairs, _mm_set1_epi16(1)));
}
#else
DYNSPARSE_INLINE Weights weights_at(const int8_t* p) { return {load_quads(p)}; }
DYNSPARSE_INLINE Q add_dots(Q sum, const Weights& w, Q activations) {
#pragma GCC unroll 4
  for (int c = 0; c < QUAD; c++)
    sum += ((w.quads << (24 - 8 * c)) >> 24) * ((activations << (24 - 8 * c)) >> 24);
  return sum;
}
#endif

// Some samples, from `first` on, with their quads [in / QUAD][count] and units [count].
struct Samples {
  const i32* x;
  const float* units;
  i64 first;
  i64 count;
};

// VECTORS vectors of rows of a block row, from `first` on, by SAMPLES samples.
template <int VECTORS, int SAMPLES>
void dot_rows(const Int8Pass& pass, const Samples& samples, i64 row, i64 first, i64 sample) {
  const i64 block = pass.block, stride = samples.count;
  Q sum[SAMPLES][VECTORS] = {};
  for (i64 p = pass.row_ptr[row]; p < pass.row_ptr[row + 1]; p++) {
    const int8_t* values = pass.values + p * block * block + first * QUAD;
    const i32* quad = samples.x + pass.cols[p] * (block / QUAD) * stride + sample;
    for (i64 g = 0; g < block; g += QUAD, values += block * QUAD, quad += stride) {
      Weights w[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) w[v] = weights_at(values + v * LANES * QUAD);
#pragma GCC unroll 4
      for (int s = 0; s < SAMPLES; s++) {
        const Q activations = quad[s] - Q{};
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[s][v] = add_dots(sum[s][v], w[v], activations);
      }
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < SAMPLES; s++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const i64 at = row * block + first + v * LANES;
      const F unit = load_lanes(pass.scale + at) * samples.units[sample + s];
      F y = __builtin_convertvector(sum[s][v], F) * unit;
      if (pass.bias) y += load_lanes(pass.bias + at);
      store_lanes(pass.y + (samples.first + sample + s) * pass.out + at, y);
    }
}

template <int SAMPLES>
void dot_samples(const Int8Pass& pass, const Samples& samples, i64 row, i64 sample) {
  i64 first = 0;
  for (; first + 2 * LANES <= pass.block; first += 2 * LANES)
    dot_rows<2, SAMPLES>(pass, samples, row, first, sample);
  if (first < pass.block) dot_rows<1, SAMPLES>(pass, samples, row, first, sample);
}

// Rows [begin, end) of blocks for all samples.
void dot_products(const Int8Pass& pass, const i32* x, const float* units, i64 begin, i64 end) {
  for (i64 first = 0; first < pass.batch; first += INT8_SAMPLES) {
    const i64 count = least(INT8_SAMPLES, pass.batch - first);
    const Samples samples = {x + first * (pass.in / QUAD), units + first, first, count};
    for (i64 row = begin; row < end; row++) {
      i64 sample = 0;
      for (; sample + 4 <= count; sample += 4) dot_samples<4>(pass, samples, row, sample);
      for (; sample < count; sample++) dot_samples<1>(pass, samples, row, sample);
    }
  }
}

}  // namespace
}  // namespace dynsparse
