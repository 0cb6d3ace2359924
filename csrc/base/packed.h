// Patterns as files hold them: src/dynsparse/pattern/packed.py describes the two forms.
#pragma once

#include "base/simd.h"

namespace dynsparse {

// Calls take(i) for each present block i of `total`, in ascending order, and at most `nnz` times;
// false where the pattern is not one of `nnz` blocks.
template <class Take>
bool for_each_block(const uint8_t* packed, i64 bytes, bool gaps, i64 total, i64 nnz, Take take) {
  i64 count = 0;
  if (gaps) {
    i64 position = 0;
    bool ends = true;
    for (i64 i = 0; i < bytes; i++) {
      position += packed[i];
      ends = packed[i] != 255;
      if (!ends) continue;
      if (position >= total || count == nnz) return false;
      take(position++);
      count++;
    }
    return ends && count == nnz;
  }
  if (bytes != (total + 7) / 8) return false;
  // Eight bytes at a time: the end of a run of bits is what a processor cannot foresee.
  for (i64 begin = 0; begin < bytes; begin += 8) {
    u64 bits = 0;
    for (i64 i = least(begin + 8, bytes); i-- > begin;) bits = bits << 8 | packed[i];
    for (; bits; bits &= bits - 1) {
      const i64 position = 8 * begin + __builtin_ctzll(bits);
      if (position >= total || count == nnz) return false;
      take(position);
      count++;
    }
  }
  return count == nnz;
}

// row_ptr [height + 1] and cols [nnz] of a packed pattern; false where it is not one of `nnz`
// blocks of height x width.
inline bool unpack_pattern(const uint8_t* packed, i64 bytes, bool gaps, i64 height, i64 width,
                           i64 nnz, i32* row_ptr, i32* cols) {
  i64 row = 0, start = 0, entry = 0;
  row_ptr[0] = 0;
  const bool is_whole =
      for_each_block(packed, bytes, gaps, height * width, nnz, [&](i64 position) {
        for (; position >= start + width; start += width)
          row_ptr[++row] = static_cast<i32>(entry);
        cols[entry++] = static_cast<i32>(position - start);
      });
  while (row < height) row_ptr[++row] = static_cast<i32>(entry);
  return is_whole;
}

}  // namespace dynsparse
