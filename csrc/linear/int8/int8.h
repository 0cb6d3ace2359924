// Forward products with weights in int8: W[r, c] = scale[r] * values at (r, c).
//
// Blocks whose size is a multiple of 8 come as [block / 4][block][4]: quads of neighbouring
// columns, row below row. The 32-bit lanes of a vector of bytes are then quads of as many rows,
// which both kernels want, and no sums across lanes are left for the end. Other blocks are
// row-major.
#pragma once

#include "base/layout.h"

namespace dynsparse {

struct Int8Pass {
  const int8_t* values;  // [nnz, ...], by rows
  const float* scale;    // [out]
  const i32* row_ptr;    // [out / block + 1]
  const i32* cols;       // [nnz]
  const float* bias;     // [out] or null
  Matrix x;              // [batch, in], float32
  float* y;              // [batch, out], contiguous
  i64 batch;
  i64 out;
  i64 in;
  i64 block;
  const void* panels;     // of single elements, or null
  const uint16_t* masks;  // [out, ceil(in / 16)] of single elements, or null
  int threads;

  bool has_quads() const { return block % 8 == 0; }
};

// Columns that lie together.
constexpr int QUAD = 4;

// Vectors of 8 lanes at most: blocks of 8 have no more rows.
constexpr int LANES = VL < 8 ? VL : 8;
typedef float F __attribute__((vector_size(4 * LANES), may_alias));
typedef float FU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef i32 Q __attribute__((vector_size(4 * LANES), may_alias));
typedef i32 QU __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

DYNSPARSE_INLINE F load_lanes(const float* p) { return *reinterpret_cast<const FU*>(p); }
DYNSPARSE_INLINE void store_lanes(float* p, F v) { *reinterpret_cast<FU*>(p) = v; }
DYNSPARSE_INLINE Q load_quads(const int8_t* p) { return *reinterpret_cast<const QU*>(p); }

// The weights of column c of a vector of quads, times 2^24: they are the upper bytes of the lanes,
// and so exact as floats.
constexpr float QUAD_SCALE = 1.0f / (1 << 24);
DYNSPARSE_INLINE F column_of(Q quads, int c) {
  const int lower = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 3 - c : c;  // bytes that follow
  return __builtin_convertvector((quads << (8 * lower)) & -(1 << 24), F);
}

// Activations in float32. False where scratch memory is not to be had.
bool int8_forward_few(const Int8Pass& pass);       // masks, blocks of 4 and of multiples of 8
bool int8_forward_elements(const Int8Pass& pass);  // single elements
bool int8_forward_many(const Int8Pass& pass);      // blocks, through weights in float32

// Activations in int8, scaled by the largest magnitude of each sample; blocks of multiples of 8.
bool int8_forward_dynamic(const Int8Pass& pass);
// Its rows [begin, end) of blocks, on processors with AVX-512-VNNI. x: quads of features in int8,
// [in / QUAD][sample] of each INT8_SAMPLES samples, which stay in the caches. units [batch]: what
// one step of a sample's activations stands for.
constexpr i64 INT8_SAMPLES = 32;
void int8_dot_products_vnni(const Int8Pass& pass, const i32* x, const float* units, i64 begin,
                            i64 end);

}  // namespace dynsparse
