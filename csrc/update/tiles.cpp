#include "update/tiles.h"

#if defined(DYNSPARSE_TILES)
namespace dynsparse {

void tile_of_products(const i32* left, const i32* right, i64 pairs, bool add, float* sums) {
  compute_tile<MultiplyThenAdd>(left, right, pairs, add, sums);
}

}  // namespace dynsparse
#endif
