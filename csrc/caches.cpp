#include "caches.h"

#include <unistd.h>

namespace dynsparse {
namespace {

i64 known(int name, i64 otherwise) {
  const i64 size = name < 0 ? 0 : sysconf(name);
  return size > 0 ? size : otherwise;
}

#if defined(_SC_LEVEL1_DCACHE_SIZE)
constexpr int FIRST = _SC_LEVEL1_DCACHE_SIZE, SECOND = _SC_LEVEL2_CACHE_SIZE;
#else
constexpr int FIRST = -1, SECOND = -1;
#endif

}  // namespace

i64 first_level_cache() {
  static const i64 size = known(FIRST, 32 << 10);
  return size;
}

i64 second_level_cache() {
  static const i64 size = known(SECOND, 1 << 20);
  return size;
}

}  // namespace dynsparse
