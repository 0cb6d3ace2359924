#include "linear/block/pack.h"

namespace dynsparse {
namespace {

// Cache lines read from a row at a time: enough for the hardware to prefetch along the row, few
// enough that the lines written to stay in the first-level cache although they lie far apart.
constexpr i64 RUN = 4 * LINE;
// The hardware does not foresee the next rows, which lie a whole row apart.
constexpr i64 AHEAD = 8;

}  // namespace

void pack_lines(const Matrix& from, i64 first, i64 count, i64 begin, i64 end, i64 stride,
                float* out) {
  for (i64 f = begin; f < end; f += RUN, out += RUN / LINE * stride) {
    const i64 run = least(RUN, end - f);
    for (i64 sample = 0; sample < count; sample++) {
      const i64 at = from.at(first + sample, f);
      if (!from.data.b16 && from.feature_stride == 1) {
        const float* later = from.data.f32 + from.at(first + least(sample + AHEAD, count - 1), f);
        for (i64 i = 0; i < run; i += LINE) __builtin_prefetch(later + i);
      }
      float* to = out + sample * LINE;
      for (i64 i = 0; i < run; i += LINE, to += stride) {
        if (from.data.b16) {
          widen(from.data.b16 + at + i * from.feature_stride, from.feature_stride, LINE, to);
        } else if (from.feature_stride == 1) {
#pragma GCC unroll 4
          for (int j = 0; j < LINE; j += VL)
            store(to + j, load_unaligned(from.data.f32 + at + i + j));
        } else {
          const float* row = from.data.f32 + at + i * from.feature_stride;
          for (int j = 0; j < LINE; j++) to[j] = row[j * from.feature_stride];
        }
      }
    }
  }
}

}  // namespace dynsparse
