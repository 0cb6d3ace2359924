// Whether the processor has AVX-512-VNNI, which x86-64-v4 does not promise.
#pragma once

#if defined(DYNSPARSE_VNNI)
#include <cpuid.h>

namespace dynsparse {

inline bool vnni_usable() {
  static const bool usable = [] {
    constexpr unsigned AVX512_VNNI = 1u << 11;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & AVX512_VNNI);
  }();
  return usable;
}

}  // namespace dynsparse
#endif
