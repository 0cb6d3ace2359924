// Growth on gradients known to bfloat16: the operands rounded, and the positions that may exceed a
// threshold.

#include "api.h"
#include "base/bf16.h"
#include "update/grow.h"

using namespace dynsparse;

void dynsparse_grow_round(const float* x, i64 x_batch_stride, i64 x_feature_stride, i64 batch,
                          i64 features, bf16* rounded, float* lengths, float* errors,
                          i32 threads) {
  constexpr i64 STRIP = 256;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 begin = 0; begin < features; begin += STRIP) {
    const i64 count = least(STRIP, features - begin);
    alignas(64) float row[STRIP], wide[STRIP], squares[STRIP] = {}, lost[STRIP] = {};
    for (i64 i = 0; i < batch; i++) {
      const float* from = x + i * x_batch_stride + begin * x_feature_stride;
      bf16* to = rounded + i * features + begin;
      if (x_feature_stride != 1) {
        for (i64 j = 0; j < count; j++) row[j] = from[j * x_feature_stride];
        from = row;
      }
      narrow(from, count, to);
      widen(to, 1, count, wide);
      for (i64 j = 0; j < count; j++) {
        squares[j] += from[j] * from[j];
        lost[j] += (from[j] - wide[j]) * (from[j] - wide[j]);
      }
    }
    for (i64 j = 0; j < count; j++) {
      lengths[begin + j] += squares[j];
      errors[begin + j] += lost[j];
    }
  }
}

i64 dynsparse_grow_screen(bf16* scores, i64 rows, i64 width, const i32* row_ptr, const i32* cols,
                          const float* row_bounds, const float* col_bounds, float threshold,
                          i32* counts, i32* found_cols, i64 room, i32 threads) {
  const i64 pieces = rows * width < FEW_SCORES ? 1 : least(threads, rows);
  constexpr float ROUNDED = 1.0f + 1.0f / 256;
  constexpr bf16 NOT_A_NUMBER = {0x7fc0};
  bool fits = true;
  // Every piece of the rows has its part of the room, first of all.
#pragma omp parallel for num_threads(pieces) schedule(static) reduction(&& : fits)
  for (i64 t = 0; t < pieces; t++) {
    alignas(64) float piece[PIECE], kept[PIECE + 16];
    i32 places[PIECE + 16];
    i64 n = room * t / pieces;
    const i64 end = room * (t + 1) / pieces, last = rows * (t + 1) / pieces;
    for (i64 row = rows * t / pieces; row < last && fits; row++) {
      bf16* own = scores + row * width;
      for (i64 p = row_ptr[row]; p < row_ptr[row + 1]; p++) own[cols[p]] = NOT_A_NUMBER;
      const i64 before = n;
      for (i64 c = 0; c < width && fits; c += PIECE) {
        const i64 count = least(PIECE, width - c);
        widen(own + c, 1, count, piece);
        for (i64 i = 0; i < count; i++)
          piece[i] = std::fabs(piece[i]) * ROUNDED + row_bounds[row] * col_bounds[c + i];
        const i64 found = collect(piece, count, threshold, kept, places);
        fits = n + found <= end;
        if (!fits) break;
        for (i64 i = 0; i < found; i++) found_cols[n + i] = static_cast<i32>(c + places[i]);
        n += found;
      }
      counts[row] = static_cast<i32>(n - before);
    }
  }
  if (!fits) return room + 1;
  i64 all = 0;
  for (i64 t = 0; t < pieces; t++) {
    const i64 before = all;
    for (i64 row = rows * t / pieces; row < rows * (t + 1) / pieces; row++) all += counts[row];
    std::memmove(found_cols + before, found_cols + room * t / pieces, (all - before) * sizeof(i32));
  }
  return all;
}
