// A radix select of which each rank sees its own scores only: their keys, and histograms of digits.

#include "api.h"
#include "update/grow.h"

using namespace dynsparse;

namespace {

// Digits are of keys from the most negative one on.
DYNSPARSE_INLINE u32 digit_of(i32 key, i32 shift, i32 bits) {
  return (static_cast<u32>(key) ^ 0x80000000u) >> shift & ((1u << bits) - 1);
}

// Eight bytes of 0 or 1 as bits: each is moved to the top byte by a power of two of its own.
DYNSPARSE_INLINE uint64_t bits_of(const uint8_t* bytes) {
  uint64_t eight = 0;
  for (i64 b = 0; b < 8; b++) eight |= uint64_t{bytes[b]} << 8 * b;
  return eight * 0x0102040810204080u >> 56;
}

// Where the bits of a word are 1, behind `n` numbers that are there; returns how many then are.
DYNSPARSE_INLINE i64 place(uint64_t word, i64 first, i64* numbers, i64 n) {
  for (; word; word &= word - 1) numbers[n++] = first + __builtin_ctzll(word);
  return n;
}

constexpr i64 WORD = 64;

}  // namespace

void dynsparse_rank_keys(const float* scores, i64 count, i32 largest, i32* keys) {
  const i32 flip = largest ? 0 : ~0;
  for (i64 i = 0; i < count; i++) {
    const float score = scores[i] + 0.0f;  // -0.0 becomes 0.0
    i32 bits;
    std::memcpy(&bits, &score, sizeof bits);
    keys[i] = (bits ^ (bits >> 31 & 0x7fffffff)) ^ flip;
  }
}

void dynsparse_rank_digits(const i32* keys, i64 count, i32 shift, i32 bits, i32* counts) {
  // Equal digits come one after the other, and each waits for the one before.
  constexpr int APART = 4;
  constexpr i64 MOST = 1 << 11;
  i32 own[APART][MOST] = {};
  i64 i = 0;
  for (; i + APART <= count; i += APART)
    for (int l = 0; l < APART; l++) own[l][digit_of(keys[i + l], shift, bits)]++;
  for (; i < count; i++) own[0][digit_of(keys[i], shift, bits)]++;
  for (i64 b = 0; b < i64{1} << bits; b++)
    counts[b] = own[0][b] + own[1][b] + own[2][b] + own[3][b];
}

void dynsparse_rank_narrow(const i32* keys, i64 count, i32 shift, i32 bits, i32 digit, i32* found,
                           i64 room) {
  i64 n = 0, i = 0;
#if defined(__AVX512F__)
  const __m512i top = _mm512_set1_epi32(static_cast<i32>(0x80000000u));
  const __m512i mask = _mm512_set1_epi32((1 << bits) - 1), wanted = _mm512_set1_epi32(digit);
  for (; n + 16 <= room && i + 16 <= count; i += 16) {
    const __m512i own = _mm512_loadu_si512(keys + i);
    const __m512i digits =
        _mm512_and_si512(_mm512_srl_epi32(_mm512_xor_si512(own, top), _mm_cvtsi32_si128(shift)),
                         mask);
    const unsigned alike = _mm512_cmpeq_epi32_mask(digits, wanted);
    _mm512_storeu_si512(found + n, _mm512_maskz_compress_epi32(alike, own));
    n += __builtin_popcount(alike);
  }
#endif
  for (; n < room && i < count; i++) {  // without branches
    found[n] = keys[i];
    n += digit_of(keys[i], shift, bits) == static_cast<u32>(digit);
  }
}

i64 dynsparse_rank_places(const uint8_t* chosen, i64 count, i64 offset, i64* places) {
  i64 n = 0, i = 0;
  for (; i + WORD <= count; i += WORD) {
    uint64_t word = 0;
    for (i64 b = 0; b < WORD; b += 8) word |= bits_of(chosen + i + b) << b;
    n = place(word, offset + i, places, n);
  }
  for (; i < count; i++)
    if (chosen[i]) places[n++] = offset + i;
  return n;
}
