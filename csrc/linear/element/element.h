// Products with unstructured sparsity.
//
// One pass over the non-zeros serves all three products. Its "majors" are the rows of a CSR (or the
// columns of a CSC) index, its "minors" what the entries point to; the minors' activations are
// packed in tiles, the majors' stay natural and are transposed a few at a time while in L1.
//
//   pass                     majors  packed  accumulates            dots with
//   forward                  out     X       Y[m] += w * X[i]       -
//   grad_input               in      dY      dX[m] += w * dY[i]     -
//   grad_weight              out     X       -                      dY[m]
//   grad_input, grad_weight  in      dY      dX[m] += w * dY[i]     X[m]
//
// The last line is why backward may run by columns: dY[i] is loaded once and used for both
// gradients, and these loads, one per multiply-add otherwise, are what limits every pass.
#pragma once

#include "linear/element/panel_index.h"

namespace dynsparse {

struct ElementPass {
  // The index: entries ptr[m] .. ptr[m + 1] of major m, pointing to the minors idx[p].
  const i32* ptr;
  const i32* idx;
  i64 majors;
  i64 minors;
  i64 batch;
  Matrix packed;  // [batch, minors]
  int threads;

  // Accumulation into out [batch, majors], contiguous; skipped where out is null.
  Output out = {};
  const float* values = nullptr;  // [nnz]; entry p's is values[order ? order[p] : p]
  const float* bias = nullptr;    // [majors] or null: zero
  // In place of `values`, in the order of a CSR index: those of major m in units of scale[m]. Only
  // passes without dot products have them.
  const int8_t* int8_values = nullptr;
  const float* scale = nullptr;

  // Dot products into sums [nnz], in the order of the values; skipped where sums is null.
  Matrix held = {};  // [batch, majors]
  float* sums = nullptr;

  // The sums over the samples of what is held [majors] or packed [minors]; skipped where null. Only
  // passes with dot products have them.
  float* held_sums = nullptr;
  float* packed_sums = nullptr;

  // [nnz] or null: the identity.
  const i32* order = nullptr;

  // The index by panels, or null: then the entries are worked on as they come.
  const PanelIndex* panels = nullptr;
};

// Minors whose sums one thread computes; the threads take turns.
constexpr i64 SHARE = 128;

// Floats between what threads keep: memory a power of two apart shares sets of the caches, which
// costs a tenth.
constexpr i64 APART = 5 * LINE;

// panels: what dynsparse_panels_make has made of the index, or null. False where scratch memory is
// not to be had.
bool run(ElementPass pass, const void* panels);

// out[i] = values[i] * scale for the i < count.
void widen(const int8_t* values, i64 count, float scale, float* out);

// Memory of a thread for the weights of a major that come in int8: columns may repeat in a row.
i64 int8_buffer_size(const ElementPass& pass);

// out[p] = from[order[p]] for the p in [begin, end).
void gather(const float* from, const i32* order, i64 begin, i64 end, float* out);

// The first major of the k-th of `parts` stretches with about equal work; majors where k = parts.
i64 first_major(const ElementPass& pass, i64 k, i64 parts);

}  // namespace dynsparse
