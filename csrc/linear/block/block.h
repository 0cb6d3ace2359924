// Products with blocks, for any block size.
//
// As for single elements (linear/element) the majors are the block rows of a CSR index or the block
// columns of a CSC index, and the minors are what its entries point to.
//
// Two families of kernels. In tiles (tiles.cpp) the batch is the vector dimension, which suits
// every block size. In lines (lines.cpp) the features of a block are, which needs blocks of whole
// cache lines, and is faster for these: nothing but the weights is transposed.
#pragma once

#include "base/layout.h"

namespace dynsparse {

struct BlockPass {
  i64 majors;  // in blocks, as the minors
  i64 minors;
  i64 block;
  i64 batch;
  Matrix packed;  // [batch, minors * block]: x in forward, dy in backward
  int threads;

  // The product: out [batch, majors * block], contiguous; skipped where out is null. Row u of a
  // block makes its output u, or column u where the blocks are transposed (grad_input).
  Output out = {};
  const i32* ptr = nullptr;    // [majors + 1]
  const i32* idx = nullptr;    // [nnz]
  const i32* order = nullptr;  // [nnz] or null: entry p's block is values[order ? order[p] : p]
  Input values = {};           // [nnz, block, block]; bfloat16 only on the units of linear/bf16
  const float* bias = nullptr;    // [majors * block] or null: zero
  bool transposed = false;

  // The gradient of the blocks: dvalues [nnz, block, block] = packed^T x at the blocks of the CSR
  // index whose rows are the minors; skipped where dvalues is null.
  float* dvalues = nullptr;
  const i32* row_ptr = nullptr;  // [minors + 1]
  const i32* cols = nullptr;     // [nnz]
  const i32* slots = nullptr;    // [nnz] or null: entry p's block is dvalues[slots ? slots[p] : p]
  Matrix x = {};                 // [batch, majors * block]
  // [minors * block]: packed, summed over the samples; skipped where null, or without dvalues.
  float* packed_sums = nullptr;
};

// False where scratch memory is not to be had.
bool run_in_tiles(const BlockPass& pass);
bool run_in_lines(const BlockPass& pass);

// Where the gradient of entry p of the rows belongs.
inline float* gradient_at(const BlockPass& pass, i64 p) {
  return pass.dvalues + (pass.slots ? pass.slots[p] : p) * pass.block * pass.block;
}

// Features of outputs that are gathered before they are written: long runs are faster.
constexpr i64 GATHERED = 256;

// Outputs in bfloat16 are rounded where they are gathered, which takes no larger blocks.
inline bool lines_fit(const BlockPass& pass) {
  return pass.block % LINE == 0 && (!pass.packed.data.b16 || pass.block <= GATHERED);
}

}  // namespace dynsparse
