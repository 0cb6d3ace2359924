// Products with blocks of 16, 32, 64 or 128 on the parts of recent x86 processors that multiply
// bfloat16 and accumulate in float32: matrix units (AMX), or vectors (AVX-512-bf16).
#pragma once

#include "linear/block/block.h"

namespace dynsparse {

// Whether the processor has them and, for AMX, the system lets this process use them.
bool amx_usable();
bool dots_usable();

inline bool units_fit(i64 block) {
  return block == 16 || block == 32 || block == 64 || block == 128;
}

// All activations are bfloat16; the values are of either type. False where scratch memory is not to
// be had.
bool run_on_amx(const BlockPass& pass);
bool run_on_dots(const BlockPass& pass);

}  // namespace dynsparse
