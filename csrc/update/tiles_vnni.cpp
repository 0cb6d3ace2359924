// Compiled with AVX-512-VNNI for x86-64-v4 only, and called where it is there.
#include "update/tiles.h"

namespace dynsparse {
namespace {

struct MultiplyAdd {
  static DYNSPARSE_INLINE Ints dot(Ints sum, Ints a, Ints b) {
    return _mm512_dpwssd_epi32(sum, a, b);
  }
};

}  // namespace

void tile_of_products_vnni(const i32* left, const i32* right, i64 pairs, bool add, float* sums) {
  compute_tile<MultiplyAdd>(left, right, pairs, add, sums);
}

}  // namespace dynsparse
