// The free positions of a chunk of the gradient whose scores exceed a threshold.

#include <algorithm>
#include <limits>

#include "api.h"
#include "base/scratch.h"
#include "update/grow.h"

using namespace dynsparse;

namespace {

// From so many candidates on, a sample that spares most of them pays.
constexpr i64 MANY = 1 << 15;

// A score that a few more than `wanted` of the `free` numbers among |scores| [count] exceed, judged
// by every n-th of them; 0 where a sample cannot tell.
float sample_threshold(const float* scores, i64 count, i64 free, i64 wanted) {
  constexpr i64 SAMPLE = 4096;
  float sample[SAMPLE];
  const i64 step = (count / SAMPLE) | 1;  // odd: not the same columns in every row
  i64 size = 0;
  for (i64 i = 0; i < count && size < SAMPLE; i += step)
    if (scores[i] == scores[i]) sample[size++] = std::fabs(scores[i]);
  const double expected = static_cast<double>(size) * wanted / free;
  const i64 rank = static_cast<i64>(expected + 4 * std::sqrt(expected) + 4);
  if (rank >= size) return 0;
  std::nth_element(sample, sample + rank, sample + size, [](float a, float b) { return a > b; });
  return sample[rank];
}

}  // namespace

i64 dynsparse_grow_scan(float* scores, i64 rows, i64 width, const i32* row_ptr, const i32* cols,
                        float threshold, i64 wanted, i64 offset, float* found_scores,
                        i64* found_flat, i64 room, i32 threads) {
  const i64 pieces = rows * width < FEW_SCORES ? 1 : least(threads, rows);
  Scratch scratch(Scratch::size_of<i64>(rows + 1));
  if (scratch.failed()) return -1;
  i64* begin = scratch.take<i64>(rows + 1);
  const auto count = [&](float limit, bool mark) {
#pragma omp parallel for num_threads(pieces) schedule(static)
    for (i64 row = 0; row < rows; row++) {
      float* own = scores + row * width;
      if (mark)
        for (i64 p = row_ptr[row]; p < row_ptr[row + 1]; p++)
          own[cols[p]] = std::numeric_limits<float>::quiet_NaN();
      i32 above = 0;
      for (i64 c = 0; c < width; c++) above += std::fabs(own[c]) > limit;
      begin[row + 1] = above;
    }
    begin[0] = 0;
    for (i64 row = 0; row < rows; row++) begin[row + 1] += begin[row];
  };
  count(threshold, true);
  if (threshold < 0 && begin[rows] >= 8 * wanted && begin[rows] >= MANY) {
    const i64 all = begin[rows];
    const float guess = sample_threshold(scores, rows * width, all, wanted);
    if (guess > 0) {
      count(guess, false);
      if (begin[rows] >= wanted) threshold = guess;
      else count(threshold, false);
    }
  }
  if (begin[rows] > room) return begin[rows];
#pragma omp parallel for num_threads(pieces) schedule(static)
  for (i64 row = 0; row < rows; row++) {
    if (begin[row] == begin[row + 1]) continue;
    float kept[PIECE + 16];
    i32 places[PIECE + 16];
    i64 n = begin[row];
    for (i64 c = 0; c < width; c += PIECE) {
      const float* own = scores + row * width + c;
      const i64 found = collect(own, least(PIECE, width - c), threshold, kept, places);
      const i64 first = offset + row * width + c;
      std::memcpy(found_scores + n, kept, found * sizeof(float));
      for (i64 i = 0; i < found; i++) found_flat[n + i] = first + places[i];
      n += found;
    }
  }
  return begin[rows];
}
