// Block scores of a chunk of the gradient.

#include "api.h"
#include "update/grow.h"

using namespace dynsparse;

namespace {

enum Pooling { SUM, AVERAGE, LARGEST };

template <Pooling pooling>
DYNSPARSE_INLINE float combine(float a, float b) {
  if (pooling == LARGEST) return b > a || b != b ? b : a;
  return a + b;
}

// One row of blocks: grad [block, width * block] -> scores [width]. Rows of a block first, then its
// columns, each from the first to the last: an order that plain tensor operations can repeat.
template <Pooling pooling>
void pool_row(const float* grad, i64 width, i64 block, float* scores) {
  alignas(64) float sums[PIECE];
  const i64 stride = width * block;
  const i64 step = most(1, PIECE / block);
  for (i64 first = 0; first < width; first += step) {
    const i64 blocks = least(step, width - first), count = blocks * block;
    const float* from = grad + first * block;
    for (i64 j = 0; j < count; j++) sums[j] = std::fabs(from[j]);
    for (i64 i = 1; i < block; i++) {
      from += stride;
      for (i64 j = 0; j < count; j++) sums[j] = combine<pooling>(sums[j], std::fabs(from[j]));
    }
    for (i64 c = 0; c < blocks; c++) {
      float score = sums[c * block];
      for (i64 j = 1; j < block; j++) score = combine<pooling>(score, sums[c * block + j]);
      scores[first + c] = pooling == AVERAGE ? score / static_cast<float>(block * block) : score;
    }
  }
}

}  // namespace

void dynsparse_grow_pool(const float* grad, i64 rows, i64 width, i64 block, i32 pooling,
                         float* scores, i32 threads) {
  const i64 pieces = rows * width * block * block < FEW_SCORES ? 1 : threads;
#pragma omp parallel for num_threads(pieces) schedule(static)
  for (i64 row = 0; row < rows; row++) {
    const float* from = grad + row * block * width * block;
    float* to = scores + row * width;
    if (pooling == SUM) pool_row<SUM>(from, width, block, to);
    else if (pooling == AVERAGE) pool_row<AVERAGE>(from, width, block, to);
    else pool_row<LARGEST>(from, width, block, to);
  }
}
