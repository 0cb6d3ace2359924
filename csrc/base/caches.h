// The size of this machine's cache.
#pragma once

#include "base/simd.h"

namespace dynsparse {

// Bytes of one core's second-level cache; what is usual where the system does not tell.
i64 second_level_cache();

}  // namespace dynsparse
