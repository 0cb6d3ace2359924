// Compiled with AVX-512-VNNI for x86-64-v4 only, and called where it is there.
#include "linear/int8/dots.h"

namespace dynsparse {

void int8_dot_products_vnni(const Int8Pass& pass, const i32* x, const float* units, i64 begin,
                            i64 end) {
  dot_products(pass, x, units, begin, end);
}

}  // namespace dynsparse
