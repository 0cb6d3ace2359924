#include "base/caches.h"

#include <unistd.h>

namespace dynsparse {

i64 first_level_cache() {
  static const i64 size = [] {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    const i64 known = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    if (known > 0) return known;
#endif
    return FIRST_LEVEL;
  }();
  return size;
}

i64 second_level_cache() {
  static const i64 size = [] {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    const i64 known = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (known > 0) return known;
#endif
    return SECOND_LEVEL;
  }();
  return size;
}

}  // namespace dynsparse
