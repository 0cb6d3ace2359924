// The gradient of a bias where no pass packs all of dy: dy is read once more.

#include "linear/linear.h"

namespace dynsparse {
namespace {

// Features that are summed at once: their sums stay in registers.
constexpr int VECTORS = 8;
constexpr i64 STRIP = VECTORS * VL;
// Samples whose sum joins those of the others as one: rounding errors then grow with the number of
// samples of a group and with that of the groups, not with their product.
constexpr i64 GROUP = 64;

// Features [begin, begin + count) of a sample: where they lie, or brought `here`.
const float* row_of(const Matrix& dy, i64 sample, i64 begin, i64 count, float* here) {
  const i64 at = dy.at(sample, begin), stride = dy.feature_stride;
  if (dy.data.b16) {
    widen(dy.data.b16 + at, stride, count, here);
  } else {
    if (stride == 1) return dy.data.f32 + at;
    for (i64 f = 0; f < count; f++) here[f] = dy.data.f32[at + f * stride];
  }
  return here;
}

void sum_strip(const Matrix& dy, i64 batch, i64 begin, i64 count, float* sums) {
  alignas(64) float here[STRIP];
  V total[VECTORS] = {};
  for (i64 base = 0; base < batch; base += GROUP) {
    V sum[VECTORS] = {};
    for (i64 sample = base; sample < least(batch, base + GROUP); sample++) {
      const float* row = row_of(dy, sample, begin, count, here);
      if (count == STRIP) {
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) sum[j] += load_unaligned(row + j * VL);
      } else {
        for (i64 j = 0; j * VL < count; j++)
          sum[j] += load_first(row + j * VL, least(VL, count - j * VL));
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) total[j] += sum[j];
  }
  for (i64 j = 0; j * VL < count; j++)
    store_first(sums + j * VL, total[j], least(VL, count - j * VL));
}

}  // namespace

void sum_samples(const Matrix& dy, i64 batch, i64 out, float* sums, int threads) {
  constexpr i64 WORTHWHILE = 1 << 18;  // additions that another thread is woken for
#pragma omp parallel for num_threads(threads) schedule(static) if (batch * out > WORTHWHILE)
  for (i64 begin = 0; begin < out; begin += STRIP)
    sum_strip(dy, batch, begin, least(STRIP, out - begin), sums + begin);
}

}  // namespace dynsparse
