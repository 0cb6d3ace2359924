// Packing for the block kernels that read features as vectors.
#pragma once

#include "base/layout.h"

namespace dynsparse {

// Features [begin, end), multiples of 16, of `count` samples from `first` on:
// out[(f - begin) / 16 * stride + sample * 16 + f % 16], with a stride of at least count * 16.
void pack_lines(const Matrix& from, i64 first, i64 count, i64 begin, i64 end, i64 stride,
                float* out);

}  // namespace dynsparse
