// How large caches are: asked, or counted on, here alone.
#pragma once

#include "base/simd.h"

namespace dynsparse {

// Bytes of one core's caches; what is usual where the system does not tell.
i64 first_level_cache();
i64 second_level_cache();

// What kernels count on, whatever the machine: where work is cut decides in which order sums are
// formed. Machines in use have these or more.
constexpr i64 FIRST_LEVEL = 32 << 10;
constexpr i64 SECOND_LEVEL = 1 << 20;

}  // namespace dynsparse
