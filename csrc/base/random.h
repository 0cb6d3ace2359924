// Random bits by xoshiro128++ (Blackman & Vigna 2021, "Scrambled linear pseudorandom number
// generators"), one stream per lane of sixteen. They depend on the seed and the number of the chunk
// alone, not on threads or the width of vectors.
#pragma once

#include "base/simd.h"

namespace dynsparse {

typedef uint32_t VBits __attribute__((vector_size(DYNSPARSE_VECTOR_BYTES), may_alias));
typedef int32_t VInt __attribute__((vector_size(DYNSPARSE_VECTOR_BYTES), may_alias));

constexpr int LANES = 16;
constexpr int GROUPS = LANES / VL;

// splitmix64 (Steele et al. 2014): the usual seeding of the xoshiro family.
inline uint64_t next_seed(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

template <int bits>
DYNSPARSE_INLINE VBits rotate(VBits x) {
  return (x << bits) | (x >> (32 - bits));
}

struct Streams {
  VBits s[4][GROUPS];

  Streams(uint64_t seed, i64 chunk) {
    // Two rounds apart, so that neither neighbouring seeds nor neighbouring chunks look alike.
    uint64_t state = seed;
    state = next_seed(state) + static_cast<uint64_t>(chunk);
    state = next_seed(state);
    alignas(64) uint32_t words[4][LANES];
    for (int lane = 0; lane < LANES; lane++) {
      for (int i = 0; i < 4; i += 2) {
        const uint64_t two = next_seed(state);
        words[i][lane] = static_cast<uint32_t>(two) | 1u;  // never all zeros
        words[i + 1][lane] = static_cast<uint32_t>(two >> 32);
      }
    }
    std::memcpy(s, words, sizeof(words));
  }

  // Of the lanes of group g.
  DYNSPARSE_INLINE VBits next(int g) {
    const VBits result = rotate<7>(s[0][g] + s[3][g]) + s[0][g];
    const VBits t = s[1][g] << 9;
    s[2][g] ^= s[0][g];
    s[3][g] ^= s[1][g];
    s[1][g] ^= s[2][g];
    s[0][g] ^= s[3][g];
    s[2][g] ^= t;
    s[3][g] = rotate<11>(s[3][g]);
    return result;
  }
};

// x * scale where the random number is at least the threshold, otherwise zero.
DYNSPARSE_INLINE V kept(V x, VBits random, i32 threshold, float scale) {
  const VInt keep = reinterpret_cast<VInt>(random) >= threshold;
  return reinterpret_cast<V>(reinterpret_cast<VInt>(x * scale) & keep);
}

}  // namespace dynsparse
