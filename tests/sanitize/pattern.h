// Random patterns as index arrays, guarded and read only.
#pragma once

#include "cases.h"

struct Index {
  i64 out, in, block, nnz;  // features; blocks
  std::vector<i32> row, col;
  Array<i32> row_ptr, cols, col_ptr, csc_rows, csc_perm;
};

// Distinct positions of [height, width], ascending.
inline std::vector<i64> some_positions(Random& random, i64 height, i64 width, i64 most) {
  const i64 all = height * width;
  if (all == 0) return {};
  std::set<i64> found;
  if (random.chance(10) && all <= most) {
    for (i64 i = 0; i < all; i++) found.insert(i);
  } else {
    const i64 wanted = random.below(std::min(most, all) + 1);
    // Some in a few rows, so that others are empty.
    const i64 rows = random.chance(30) ? 1 + random.below(height) : height;
    for (i64 i = 0; i < wanted; i++) found.insert(random.below(rows) * width + random.below(width));
  }
  return {found.begin(), found.end()};
}

inline Index make_index(Random& random, i64 height, i64 width, i64 block, i64 most) {
  const std::vector<i64> flat = some_positions(random, height, width, most);
  const i64 nnz = flat.size();
  std::vector<i32> row(nnz), col(nnz), row_ptr(height + 1), col_ptr(width + 1);
  for (i64 i = 0; i < nnz; i++) {
    row[i] = flat[i] / width;
    col[i] = flat[i] % width;
    row_ptr[row[i] + 1]++;
    col_ptr[col[i] + 1]++;
  }
  for (i64 r = 0; r < height; r++) row_ptr[r + 1] += row_ptr[r];
  for (i64 c = 0; c < width; c++) col_ptr[c + 1] += col_ptr[c];
  std::vector<i32> next(col_ptr.begin(), col_ptr.end()), csc_rows(nnz), csc_perm(nnz);
  for (i64 i = 0; i < nnz; i++) {
    const i32 at = next[col[i]]++;
    csc_rows[at] = row[i];
    csc_perm[at] = i;
  }
  return {height * block,        width * block,         block,
          nnz,                   row,                   col,
          {random, row_ptr},     {random, col},         {random, col_ptr},
          {random, csc_rows},    {random, csc_perm}};
}
