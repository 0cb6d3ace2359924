// The sizes of this machine's caches.
#pragma once

#include "simd.h"

namespace dynsparse {

// Bytes of one core's first-level data cache and second-level cache; what is usual where the system
// does not tell.
i64 first_level_cache();
i64 second_level_cache();

}  // namespace dynsparse
