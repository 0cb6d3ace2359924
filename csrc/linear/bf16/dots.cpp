// Compiled with AVX-512-bf16 for x86-64-v4 only, and called where it is there.
#include <cpuid.h>

#include "linear/bf16/unit_blocks.h"

namespace dynsparse {
namespace {

using Sums = __m512;
using Pairs = __m512bh;

// Two neighbouring values in every lane.
DYNSPARSE_INLINE Pairs spread(const void* pair) {
  i32 bits;
  std::memcpy(&bits, pair, sizeof bits);
  return reinterpret_cast<Pairs>(_mm512_set1_epi32(bits));
}

// Dot products of pairs in vectors: 16 rows of the left operand, and so 16 sums, at a time.
struct Dots {
  explicit Dots(i64) {}

  // The 16 rows read at a time would all want the same two sets of the first-level cache.
  static bool collides(i64 bytes) { return bytes % 2048 == 0; }

  static void sums_of(const BlockPass& pass, i64 major, const i32* prepared, const bf16* x,
                      i64 stride, float* sums) {
    switch (pass.block) {
      case 16: return sums_of<16>(pass, major, prepared, x, stride, sums);
      case 32: return sums_of<32>(pass, major, prepared, x, stride, sums);
      case 64: return sums_of<64>(pass, major, prepared, x, stride, sums);
      default: return sums_of<LARGEST>(pass, major, prepared, x, stride, sums);
    }
  }

  static void gradient(i64 block, const float* left, const float* right, i64 side, i64 groups,
                       bool add, float* to) {
    for (i64 i = 0; i < block; i += SIDE)
      for (i64 j = 0; j < block; j += SIDE)
        square(left + i / SIDE * side, right + j / SIDE * side, groups, add, to + i * block + j,
               block);
  }

 private:
  template <i64 BLOCK>
  static void sums_of(const BlockPass& pass, i64 major, const i32* prepared, const bf16* x,
                      i64 stride, float* sums) {
    constexpr i64 half = BLOCK / 2, size = half * BLOCK;
    for (i64 m = 0; m < group_of(BLOCK); m += SIDE)
      for (i64 n = 0; n < BLOCK; n += SIDE) {
        Sums sum[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) sum[i] = _mm512_setzero_ps();
        for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
          const bf16* left = x + m * stride + pass.idx[p] * BLOCK;
          const i32* right = prepared + p * size + n * half;
          for (i64 k = 0; k < half; k++) {
            const Pairs pairs = reinterpret_cast<Pairs>(load_line(right + k * SIDE));
#pragma GCC unroll 16
            for (int i = 0; i < SIDE; i++)
              sum[i] = _mm512_dpbf16_ps(sum[i], pairs, spread(left + i * stride + 2 * k));
          }
        }
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) _mm512_store_ps(sums + (m + i) * BLOCK + n, sum[i]);
      }
  }

  // 16 rows of a block's gradient by 16 columns; its rows are `width` apart.
  static void square(const float* left, const float* right, i64 groups, bool add, float* to,
                     i64 width) {
    Sums sum[SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) sum[i] = add ? _mm512_loadu_ps(to + i * width) : Sums{};
    for (i64 k = 0; k < groups * SIDE; k++) {
      const float* rows = left + k / SIDE * SIDE * SIDE + k % SIDE;
      const Pairs pairs = reinterpret_cast<Pairs>(load_line(right + k * SIDE));
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; i++)
        sum[i] = _mm512_dpbf16_ps(sum[i], pairs, spread(rows + i * SIDE));
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) _mm512_storeu_ps(to + i * width, sum[i]);
  }
};

}  // namespace

bool dots_usable() {
  static const bool usable = [] {
    constexpr unsigned AVX512_BF16 = 1u << 5;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX512_BF16);
  }();
  return usable;
}

bool run_on_dots(const BlockPass& pass) {
  return run_bf16_blocks<Dots>(pass);
}

}  // namespace dynsparse
