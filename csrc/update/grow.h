// What growth shares. Scores are magnitudes; NaN marks what can never be chosen.
#pragma once

#include <cmath>

#include "base/simd.h"

namespace dynsparse {

// Below so many scores a second thread costs more than it gives.
constexpr i64 FEW_SCORES = 1 << 15;
// Columns that are worked on at once.
constexpr i64 PIECE = 1024;

// The magnitudes above the threshold among scores [count], count <= PIECE, and where they are;
// returns how many. `kept` and `places` have room for a vector more than they get.
inline i64 collect(const float* scores, i64 count, float threshold, float* kept, i32* places) {
  i64 n = 0, c = 0;
#if defined(__AVX512F__)
  const __m512 limit = _mm512_set1_ps(threshold);
  __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; c + 16 <= count; c += 16, place = _mm512_add_epi32(place, _mm512_set1_epi32(16))) {
    const __m512 score = _mm512_abs_ps(_mm512_loadu_ps(scores + c));
    const __mmask16 above = _mm512_cmp_ps_mask(score, limit, _CMP_GT_OQ);
    _mm512_storeu_ps(kept + n, _mm512_maskz_compress_ps(above, score));
    _mm512_storeu_si512(places + n, _mm512_maskz_compress_epi32(above, place));
    n += __builtin_popcount(above);
  }
#endif
  for (; c < count; c++) {  // without branches: which are above is random
    kept[n] = std::fabs(scores[c]);
    places[n] = static_cast<i32>(c);
    n += kept[n] > threshold;
  }
  return n;
}

}  // namespace dynsparse
