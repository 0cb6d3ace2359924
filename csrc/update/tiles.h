// Products of small integers: what the screen of growth computes a tile of at a time.
//
// Both operands are packed in pairs of samples, two int16 in an i32: [panel][pair][features], with
// TILE_ROWS features a panel on the left and TILE_COLS on the right.
#pragma once

#include "base/simd.h"

#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#define DYNSPARSE_TILES
#endif

namespace dynsparse {

// Whole words of 16 columns; with the rows as many accumulators as the registers hold.
constexpr i64 TILE_ROWS = 6;
#if defined(__AVX512BW__)
constexpr i64 TILE_COLS = 64;
#else
constexpr i64 TILE_COLS = 16;
#endif

// sums [TILE_ROWS, TILE_COLS] = left panel^T right panel over so many pairs, or added to them.
using Tile = void (*)(const i32* left, const i32* right, i64 pairs, bool add, float* sums);

void tile_of_products(const i32* left, const i32* right, i64 pairs, bool add, float* sums);

#if defined(DYNSPARSE_VNNI)
// The same with instructions that multiply and add in one.
void tile_of_products_vnni(const i32* left, const i32* right, i64 pairs, bool add, float* sums);
#endif

#if defined(DYNSPARSE_TILES)

#if defined(__AVX512BW__)
using Ints = __m512i;
DYNSPARSE_INLINE Ints load_ints(const i32* p) { return _mm512_loadu_si512(p); }
DYNSPARSE_INLINE Ints spread_int(i32 i) { return _mm512_set1_epi32(i); }
DYNSPARSE_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
DYNSPARSE_INLINE V floats(Ints i) { return reinterpret_cast<V>(_mm512_cvtepi32_ps(i)); }
struct MultiplyThenAdd {
  static DYNSPARSE_INLINE Ints dot(Ints sum, Ints a, Ints b) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
  }
};
#else
using Ints = __m256i;
DYNSPARSE_INLINE Ints load_ints(const i32* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
DYNSPARSE_INLINE Ints spread_int(i32 i) { return _mm256_set1_epi32(i); }
DYNSPARSE_INLINE Ints zero_ints() { return _mm256_setzero_si256(); }
DYNSPARSE_INLINE V floats(Ints i) { return reinterpret_cast<V>(_mm256_cvtepi32_ps(i)); }
struct MultiplyThenAdd {
  static DYNSPARSE_INLINE Ints dot(Ints sum, Ints a, Ints b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  }
};
#endif

// In a register alone: GCC 12 would store the sums as well, in every round.
DYNSPARSE_INLINE void keep(Ints& i) { __asm__("" : "+v"(i)); }

template <class Multiply, std::size_t... I, std::size_t... C>
DYNSPARSE_INLINE void compute_tile(const i32* left, const i32* right, i64 pairs, bool add,
                                   float* sums, std::index_sequence<I...>,
                                   std::index_sequence<C...>) {
  constexpr std::size_t COLS = sizeof...(C);
  Ints acc[] = {((void)I, zero_ints())...};
  for (i64 k = 0; k < pairs; k++, left += TILE_ROWS, right += TILE_COLS) {
    const Ints b[] = {load_ints(right + C * VL)...};
    ((acc[I] = Multiply::dot(acc[I], spread_int(left[I / COLS]), b[I % COLS]), keep(acc[I])), ...);
  }
  const auto put = [add](float* to, V more) { store(to, add ? load(to) + more : more); };
  (put(sums + I / COLS * TILE_COLS + I % COLS * VL, floats(acc[I])), ...);
}

template <class Multiply>
DYNSPARSE_INLINE void compute_tile(const i32* left, const i32* right, i64 pairs, bool add,
                                   float* sums) {
  constexpr std::size_t COLS = TILE_COLS / VL;
  compute_tile<Multiply>(left, right, pairs, add, sums,
                         std::make_index_sequence<TILE_ROWS * COLS>{},
                         std::make_index_sequence<COLS>{});
}

#endif

}  // namespace dynsparse
