// Bit masks of the columns that are present: [out, ceil(in / WORD)], bit c % WORD of word c / WORD.
#pragma once

#include "base/simd.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace dynsparse {

using u16 = uint16_t;

// Whether this instruction set expands masks itself; without, they are read bit by bit.
#if defined(__AVX512F__)
constexpr bool MASKS_EXPAND = true;
#else
constexpr bool MASKS_EXPAND = false;
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

// VL lanes: the next values where the mask has a bit, zero elsewhere. Reads no more than these.
DYNSPARSE_INLINE V expand(unsigned mask, const float* values) {
#if defined(__AVX512F__)
  return _mm512_maskz_expandloadu_ps(static_cast<__mmask16>(mask), values);
#else
  alignas(64) float lanes[VL];
#pragma GCC unroll 8
  for (int i = 0; i < VL; i++) {
    const unsigned bit = mask >> i & 1;
    lanes[i] = bit ? *values : 0.0f;
    values += bit;
  }
  return load(lanes);
#endif
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
  (void)end;
  alignas(64) float lanes[VL];
  store(lanes, v);
#pragma GCC unroll 8
  for (int i = 0; i < VL; i++)
    if (mask >> i & 1) *values++ = lanes[i];
#endif
}

}  // namespace dynsparse
