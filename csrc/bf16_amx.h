// Products with blocks of 16 or 32 on the matrix units of recent x86 processors (AMX), which
// multiply bfloat16 and accumulate in float32.
#pragma once

#include "bf16.h"
#include "block.h"

namespace dynsparse {

// Whether the processor has the units and the system lets this process use them.
bool amx_usable();

inline bool amx_fits(i64 block) { return block == 16 || block == 32; }

// All activations are bfloat16. The values are those of the pass, or `low_values` where these are
// not null. False where scratch memory is not to be had.
bool run_on_amx(const BlockPass& pass, const bf16* low_values);

}  // namespace dynsparse
