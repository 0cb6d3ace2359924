// Rows of a sparse matrix laid out densely, and back: for products that dense kernels do faster.
//
// A slab holds `count` block rows from `first` on, [count * block, in], contiguous.

#include "api.h"
#include "base/masks.h"

using dynsparse::i32;
using dynsparse::i64;

namespace {

// Slabs of fewer elements are laid out by the calling thread.
constexpr i64 SMALL = 1 << 16;

using dynsparse::MASKS_EXPAND;
using dynsparse::u16;
using dynsparse::WORD;

// One row of single elements. The last word of a row may not be whole.
void expand_row(const float* values, const float* end, const u16* masks, float* row, i64 in) {
  const i64 whole = in / WORD;
  for (i64 g = 0; g <= whole; g++)
    for (int v = 0; v < dynsparse::WORD_VECTORS; v++) {
      const i64 at = g * WORD + v * dynsparse::VL, count = dynsparse::least(dynsparse::VL, in - at);
      if (count <= 0) return;
      const unsigned mask = dynsparse::lanes_of(masks[g], v);
      const dynsparse::V lanes = end - values >= dynsparse::VL
                                     ? dynsparse::expand<true>(mask, values)
                                     : dynsparse::expand<false>(mask, values);
      values += dynsparse::count_bits(mask);
      if (count == dynsparse::VL)
        dynsparse::store_unaligned(row + at, lanes);
      else
        dynsparse::store_first(row + at, lanes, count);
    }
}

void compress_row(const float* row, const u16* masks, float* values, const float* end, i64 in) {
  const i64 whole = in / WORD;
  for (i64 g = 0; g <= whole; g++)
    for (int v = 0; v < dynsparse::WORD_VECTORS; v++) {
      const i64 at = g * WORD + v * dynsparse::VL, count = dynsparse::least(dynsparse::VL, in - at);
      if (count <= 0) return;
      const unsigned mask = dynsparse::lanes_of(masks[g], v);
      const dynsparse::V lanes = count == dynsparse::VL ? dynsparse::load_unaligned(row + at)
                                                        : dynsparse::load_first(row + at, count);
      dynsparse::compress(mask, values, end, lanes);
      values += dynsparse::count_bits(mask);
    }
}

// One block between its place among the values and its place in a slab. Sizes known to the
// compiler are several times as fast.
template <i64 BLOCK>
void copy_block(const float* from, i64 from_stride, float* to, i64 to_stride, i64 block) {
  const i64 size = BLOCK ? BLOCK : block;
  for (i64 u = 0; u < size; u++)
    std::memcpy(to + u * to_stride, from + u * from_stride, size * sizeof(float));
}

using CopyBlock = void (*)(const float*, i64, float*, i64, i64);

CopyBlock copy_of(i64 block) {
  switch (block) {
    case 4: return copy_block<4>;
    case 8: return copy_block<8>;
    case 16: return copy_block<16>;
    case 32: return copy_block<32>;
    default: return copy_block<0>;
  }
}

}  // namespace

void dynsparse_rows_to_dense(const float* values, const i32* row_ptr, const i32* cols,
                             const u16* masks, float* slab, i64 first, i64 count, i64 in,
                             i64 block, i32 threads) {
  if (count * block * in < SMALL) threads = 1;
  const CopyBlock copy = copy_of(block);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 r = 0; r < count; r++) {
    const i64 begin = row_ptr[first + r], end = row_ptr[first + r + 1];
    float* rows = slab + r * block * in;
    if (masks && MASKS_EXPAND) {
      expand_row(values + begin, values + end, masks + (first + r) * dynsparse::words_of(in), rows,
                 in);
      continue;
    }
    std::memset(rows, 0, block * in * sizeof(float));
    if (block == 1) {
      for (i64 p = begin; p < end; p++) rows[cols[p]] = values[p];
      continue;
    }
    for (i64 p = begin; p < end; p++)
      copy(values + p * block * block, block, rows + cols[p] * block, in, block);
  }
}

void dynsparse_rows_from_dense(const float* slab, const i32* row_ptr, const i32* cols,
                               const u16* masks, float* values, i64 first, i64 count, i64 in,
                               i64 block, i32 threads) {
  if (count * block * in < SMALL) threads = 1;
  const CopyBlock copy = copy_of(block);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 r = 0; r < count; r++) {
    const i64 begin = row_ptr[first + r], end = row_ptr[first + r + 1];
    const float* rows = slab + r * block * in;
    if (masks && MASKS_EXPAND) {
      compress_row(rows, masks + (first + r) * dynsparse::words_of(in), values + begin,
                   values + end, in);
      continue;
    }
    if (block == 1) {
      for (i64 p = begin; p < end; p++) values[p] = rows[cols[p]];
      continue;
    }
    for (i64 p = begin; p < end; p++)
      copy(rows + cols[p] * block, in, values + p * block * block, block, block);
  }
}
