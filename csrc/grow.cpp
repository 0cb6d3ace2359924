// The scan behind growth: candidates above a threshold in some rows of a gradient.

#include <cmath>

#include "simd.h"

using dynsparse::i32;
using dynsparse::i64;

// Appends to candidate buffers the entries of chunk [rows, columns] (row-major; gradients, or
// scores pooled over blocks, then in blocks) whose magnitude is above the threshold and that are
// not in the pattern. Row r of the chunk is row first_row + r of the whole matrix, of which row_ptr
// and cols are the CSR index; columns are sorted within a row.
//
// scores [capacity] get the magnitudes, positions [capacity] get row * columns + column. Entries
// that are NaN are never candidates. Returns the number of candidates appended, in order of
// position, or -1 where they do not fit: raise the threshold or pass larger buffers.
DYNSPARSE_EXPORT i64 dynsparse_grow_scan(const float* chunk, i64 rows, i64 columns, i64 first_row,
                                         const i32* row_ptr, const i32* cols, float threshold,
                                         float* scores, i64* positions, i64 capacity) {
  constexpr i64 STEP = 32;
  i64 count = 0;
  for (i64 r = 0; r < rows; r++) {
    const float* row = chunk + r * columns;
    i64 p = row_ptr[first_row + r];
    const i64 end = row_ptr[first_row + r + 1];
    for (i64 begin = 0; begin < columns; begin += STEP) {
      const i64 stop = dynsparse::least(begin + STEP, columns);
      int any = 0;
      for (i64 c = begin; c < stop; c++) any |= std::fabs(row[c]) > threshold;
      if (!any) continue;
      for (i64 c = begin; c < stop; c++) {
        const float score = std::fabs(row[c]);
        if (!(score > threshold)) continue;
        while (p < end && cols[p] < c) p++;
        if (p < end && cols[p] == c) continue;
        if (count == capacity) return -1;
        scores[count] = score;
        positions[count] = (first_row + r) * columns + c;
        count++;
      }
    }
  }
  return count;
}
