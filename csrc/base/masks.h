// Bit masks of the columns that are present: [out, ceil(in / WORD)], bit c % WORD of word c / WORD.
#pragma once

#include <array>

#include "base/simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dynsparse {

using u16 = uint16_t;

// Whether this instruction set expands masks a vector at a time; without, they are read bit by bit.
#if defined(__AVX2__)
constexpr bool MASKS_EXPAND = true;
#else
constexpr bool MASKS_EXPAND = false;
#endif

// Whether masks are expanded by a table of permutations, for want of an instruction.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool MASKS_BY_TABLE = true;
#else
constexpr bool MASKS_BY_TABLE = false;
#endif

// Columns per word, and vectors per word.
constexpr int WORD = 16;
constexpr int WORD_VECTORS = WORD / VL;

inline i64 words_of(i64 in) { return ceil_div(in, WORD); }

DYNSPARSE_INLINE int count_bits(unsigned mask) { return __builtin_popcount(mask); }

// The bits of one vector of a word. In a register of its own: counting the bits of 16-bit memory
// operands makes every count wait for the one before.
DYNSPARSE_INLINE unsigned lanes_of(u16 word, int vector) {
  unsigned mask = word;
  __asm__("" : "+r"(mask));
  return VL == WORD ? mask : mask >> (vector * VL) & ((1u << VL) - 1);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each mask of 8 bits, the lanes of a permutation, a byte each.
struct Lanes {
  alignas(8) std::array<uint8_t, 8> of[256];
};
// A lane with a bit gets its value's place among the values; ABSENT marks the others.
constexpr uint8_t ABSENT = 0x80;
constexpr Lanes expanding() {
  Lanes lanes{};
  for (int mask = 0; mask < 256; mask++) {
    uint8_t next = 0;
    for (int i = 0; i < 8; i++) lanes.of[mask][i] = mask >> i & 1 ? next++ : ABSENT;
  }
  return lanes;
}
// The lanes with a bit, one after the other.
constexpr Lanes compressing() {
  Lanes lanes{};
  for (int mask = 0; mask < 256; mask++) {
    int next = 0;
    for (uint8_t i = 0; i < 8; i++)
      if (mask >> i & 1) lanes.of[mask][next++] = i;
  }
  return lanes;
}
inline constexpr Lanes EXPANDING = expanding(), COMPRESSING = compressing();

DYNSPARSE_INLINE __m256i lanes_for(const Lanes& lanes, unsigned mask) {
  return _mm256_cvtepi8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(lanes.of[mask].data())));
}
#endif

// `expand` bit by bit: reads no more values than the mask has bits.
template <class Weights>
DYNSPARSE_INLINE V expand_bits(unsigned mask, const Weights* values) {
  alignas(64) float lanes[VL];
#pragma GCC unroll 8
  for (int i = 0; i < VL; i++) {
    const unsigned bit = mask >> i & 1;
    lanes[i] = bit ? static_cast<float>(*values) : 0.0f;
    values += bit;
  }
  return load(lanes);
}

// VL lanes: the next values where the mask has a bit, zero elsewhere. INSIDE: VL values may be
// read, whether the mask has as many bits or not.
template <bool INSIDE>
DYNSPARSE_INLINE V expand(unsigned mask, const float* values) {
#if defined(__AVX512F__)
  return _mm512_maskz_expandloadu_ps(static_cast<__mmask16>(mask), values);
#elif defined(__AVX2__)
  if constexpr (INSIDE) {
    const __m256i lanes = lanes_for(EXPANDING, mask);
    const __m256 places = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), lanes);
    return _mm256_blendv_ps(places, _mm256_setzero_ps(), _mm256_castsi256_ps(lanes));
  }
#endif
  return expand_bits(mask, values);
}

// The same of weights in int8.
template <bool INSIDE>
DYNSPARSE_INLINE V expand(unsigned mask, const int8_t* values) {
#if defined(__AVX512F__)
  if constexpr (INSIDE) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    const __m512i lanes = _mm512_maskz_expand_epi32(static_cast<__mmask16>(mask),
                                                    _mm512_maskz_cvtepi8_epi32(0xFFFF, bytes));
    return _mm512_maskz_cvtepi32_ps(0xFFFF, lanes);
  }
#elif defined(__AVX2__)
  if constexpr (INSIDE) {
    const auto load_bytes = [](const void* p) {
      return _mm_loadl_epi64(static_cast<const __m128i*>(p));
    };
    const __m128i bytes = _mm_shuffle_epi8(load_bytes(values),
                                           load_bytes(EXPANDING.of[mask].data()));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
#endif
  return expand_bits(mask, values);
}

// The reverse: the lanes with a bit, one after the other. What lies behind them, up to `end`, is
// overwritten where that is faster: values are written from the first to the last.
DYNSPARSE_INLINE void compress(unsigned mask, float* values, const float* end, V v) {
#if defined(__AVX512F__)
  const __m512 dense = _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), v);
  if (end - values >= VL)
    store_unaligned(values, dense);
  else
    _mm512_mask_storeu_ps(values, static_cast<__mmask16>((1u << count_bits(mask)) - 1), dense);
#else
#if defined(__AVX2__)
  if (end - values >= VL)
    return store_unaligned(values, _mm256_permutevar8x32_ps(v, lanes_for(COMPRESSING, mask)));
#endif
  (void)end;
  alignas(64) float lanes[VL];
  store(lanes, v);
#pragma GCC unroll 8
  for (int i = 0; i < VL; i++)
    if (mask >> i & 1) *values++ = lanes[i];
#endif
}

}  // namespace dynsparse
