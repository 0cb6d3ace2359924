// Searches among the ascending columns of one row's entries.
#pragma once

#include "simd.h"

namespace dynsparse {

// How many of the entries [p, end) lie before column `bound`; `all` is the length of cols.
DYNSPARSE_INLINE i64 count_below(const i32* cols, i64 p, i64 end, i64 all, i32 bound) {
  const i64 from = p;
#if defined(__AVX512F__)
  while (p + 16 <= all) {
    // Entries after the row's are compared too: its own come first, and are counted up to the first
    // that fails.
    const __mmask16 low =
        _mm512_cmplt_epi32_mask(_mm512_loadu_si512(cols + p), _mm512_set1_epi32(bound));
    const i64 n = least(__builtin_ctz(~static_cast<unsigned>(low)), end - p);
    p += n;
    if (n < 16) return p - from;
  }
#else
  (void)all;
#endif
  while (p < end && cols[p] < bound) p++;
  return p - from;
}

// The first of the entries [begin, end) that does not lie before column `bound`.
inline i64 first_from(const i32* cols, i64 begin, i64 end, i64 bound) {
  while (begin < end) {
    const i64 middle = (begin + end) / 2;
    if (cols[middle] < bound)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

}  // namespace dynsparse
