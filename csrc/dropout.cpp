// Dropout whose mask is never stored: it is drawn again, from its seed, for the backward pass.
//
// Every chunk of elements has its own streams of random bits, so the result depends on the seed
// alone, not on threads or the width of vectors.

#include "api.h"
#include "base/random.h"

namespace {

using dynsparse::i32;
using dynsparse::i64;
using dynsparse::GROUPS;
using dynsparse::kept;
using dynsparse::LANES;
using dynsparse::Streams;
using dynsparse::V;
using dynsparse::VBits;
using dynsparse::VL;

constexpr i64 CHUNK = 8192;

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
