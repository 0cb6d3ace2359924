// Dropout whose mask is never stored: it is drawn again, from its seed, for the backward pass.
//
// Random bits come from xoshiro128++ (Blackman & Vigna 2021, "Scrambled linear pseudorandom number
// generators"), one stream per lane of sixteen. Every chunk of elements has its own streams, so the
// result depends on the seed alone, not on threads or the width of vectors.

#include "api.h"
#include "base/simd.h"

namespace {

using dynsparse::i32;
using dynsparse::i64;
using dynsparse::V;
using dynsparse::VL;

typedef uint32_t VBits __attribute__((vector_size(DYNSPARSE_VECTOR_BYTES), may_alias));
typedef int32_t VInt __attribute__((vector_size(DYNSPARSE_VECTOR_BYTES), may_alias));

constexpr int LANES = 16;
constexpr int GROUPS = LANES / VL;
constexpr i64 CHUNK = 8192;

// splitmix64 (Steele et al. 2014): the usual seeding of the xoshiro family.
uint64_t next_seed(uint64_t& state) {
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

DYNSPARSE_INLINE V kept(V x, VBits random, i32 threshold, float scale) {
  const VInt keep = reinterpret_cast<VInt>(random) >= threshold;
  return reinterpret_cast<V>(reinterpret_cast<VInt>(x * scale) & keep);
}

void run_chunk(const float* x, float* y, i64 count, Streams streams, i32 threshold, float scale) {
  for (i64 i = 0; i < count; i += LANES) {
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      const VBits random = streams.next(g);
      const i64 at = i + g * VL;
      if (at + VL <= count) {
        dynsparse::store_unaligned(
            y + at, kept(dynsparse::load_unaligned(x + at), random, threshold, scale));
      } else if (at < count) {
        const V last = kept(dynsparse::load_first(x + at, count - at), random, threshold, scale);
        dynsparse::store_first(y + at, last, count - at);
      }
    }
  }
}

}  // namespace

void dynsparse_dropout(const float* x, float* y, i64 count, uint64_t seed, i32 threshold,
                       float scale, i32 threads) {
  const i64 chunks = dynsparse::ceil_div(count, CHUNK);
#pragma omp parallel for schedule(static) num_threads(threads) if (chunks > 4 && threads > 1)
  for (i64 c = 0; c < chunks; c++) {
    const i64 begin = c * CHUNK;
    run_chunk(x + begin, y + begin, dynsparse::least(CHUNK, count - begin), Streams(seed, c),
              threshold, scale);
  }
}
