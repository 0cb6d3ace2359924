// Growth: block scores of a chunk of the gradient, the free positions above a threshold, and the
// k best of many scores. Scores are magnitudes; NaN marks what can never be chosen.

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/bf16.h"
#include "base/scratch.h"
#include "base/simd.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using dynsparse::i32;
using dynsparse::i64;

namespace {

// Below so many scores a second thread costs more than it gives.
constexpr i64 SMALL = 1 << 15;
// From so many candidates on, a sample that spares most of them pays.
constexpr i64 MANY = 1 << 15;

enum Pooling { SUM, AVERAGE, LARGEST };

template <Pooling pooling>
DYNSPARSE_INLINE float combine(float a, float b) {
  if (pooling == LARGEST) return b > a || b != b ? b : a;
  return a + b;
}

// Columns that are worked on at once.
constexpr i64 PIECE = 1024;

// One row of blocks: grad [block, width * block] -> scores [width]. Rows of a block first, then its
// columns, each from the first to the last: an order that plain tensor operations can repeat.
template <Pooling pooling>
void pool_row(const float* grad, i64 width, i64 block, float* scores) {
  alignas(64) float sums[PIECE];
  const i64 stride = width * block;
  const i64 step = dynsparse::most(1, PIECE / block);
  for (i64 first = 0; first < width; first += step) {
    const i64 blocks = dynsparse::least(step, width - first), count = blocks * block;
    const float* from = grad + first * block;
    for (i64 j = 0; j < count; j++) sums[j] = std::fabs(from[j]);
    for (i64 i = 1; i < block; i++) {
      from += stride;
      for (i64 j = 0; j < count; j++) sums[j] = combine<pooling>(sums[j], std::fabs(from[j]));
    }
    for (i64 c = 0; c < blocks; c++) {
      float score = sums[c * block];
      for (i64 j = 1; j < block; j++) score = combine<pooling>(score, sums[c * block + j]);
      scores[first + c] = pooling == AVERAGE ? score / static_cast<float>(block * block) : score;
    }
  }
}

// The magnitudes above the threshold among scores [count], count <= PIECE, and where they are;
// returns how many. `kept` and `places` have room for a vector more than they get.
i64 collect(const float* scores, i64 count, float threshold, float* kept, i32* places) {
  i64 n = 0, c = 0;
#if defined(__AVX512F__)
  const __m512 limit = _mm512_set1_ps(threshold);
  __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; c + 16 <= count; c += 16, place = _mm512_add_epi32(place, _mm512_set1_epi32(16))) {
    const __m512 score = _mm512_abs_ps(_mm512_loadu_ps(scores + c));
    const __mmask16 above = _mm512_cmp_ps_mask(score, limit, _CMP_GT_OQ);
    _mm512_storeu_ps(kept + n, _mm512_maskz_compress_ps(above, score));
    _mm512_storeu_si512(places + n, _mm512_maskz_compress_epi32(above, place));
    n += __builtin_popcount(above);
  }
#endif
  for (; c < count; c++) {  // without branches: which are above is random
    kept[n] = std::fabs(scores[c]);
    places[n] = static_cast<i32>(c);
    n += kept[n] > threshold;
  }
  return n;
}

// Rising with the score, equal for equal scores (0.0 and -0.0 among them); falling if `largest`.
DYNSPARSE_INLINE uint32_t key_of(float score, uint32_t flip) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return (bits ^ ((bits >> 31 ? ~uint32_t{0} : uint32_t{1} << 31))) ^ flip;
}

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

// Which of `count` scores are the k of smallest key: those below the pivot, and the first `ties` of
// those equal to it. The scores are cut into pieces, one per thread.
struct Selection {
  const float* scores;
  const i64 count;
  const uint32_t flip;
  const i64 pieces;
  uint32_t pivot = 0;
  i64* end = nullptr;   // [pieces + 1]: how many are chosen before each piece
  i64* ties = nullptr;  // [pieces + 1]: how many ties in each

  Selection(const float* scores, i64 count, bool largest, i32 threads)
      : scores(scores),
        count(count),
        flip(largest ? ~uint32_t{0} : 0),
        pieces(count < SMALL ? 1 : threads),
        room_(2 * dynsparse::Scratch::size_of<i64>(pieces + 1)) {
    if (room_.failed()) return;
    end = room_.take<i64>(pieces + 1);
    ties = room_.take<i64>(pieces + 1);
  }

  i64 begin_of(i64 piece) const { return count * piece / pieces; }

  // False without scratch memory.
  bool find(i64 k) {
    if (room_.failed()) return false;
    const int bits = count < SMALL ? 11 : 16, shift = 32 - bits;
    const i64 bins = i64{1} << bits;

    // How many keys begin with each digit of so many bits.
    dynsparse::Scratch scratch(dynsparse::Scratch::size_of<i32>(pieces * bins));
    if (scratch.failed()) return false;
    i32* held = scratch.take<i32>(pieces * bins);
#pragma omp parallel for num_threads(pieces) schedule(static)
    for (i64 t = 0; t < pieces; t++) {
      i32* own = held + t * bins;
      std::memset(own, 0, bins * sizeof(i32));
      for (i64 i = begin_of(t); i < begin_of(t + 1); i++) own[key_of(scores[i], flip) >> shift]++;
    }
    // The digit of the key of rank k, and its rank among those that begin alike.
    i64 digit = -1, alike = 0, rank = k;
    while (rank > alike) {
      rank -= alike;
      alike = 0;
      digit++;
      for (i64 t = 0; t < pieces; t++) alike += held[t * bins + digit];
    }

    // The keys that begin alike, and the one of rank k among them.
    dynsparse::Scratch list(2 * dynsparse::Scratch::size_of<uint32_t>(alike + 1));
    if (list.failed()) return false;
    uint32_t* keys = list.take<uint32_t>(alike + 1);
    uint32_t* sorted = list.take<uint32_t>(alike + 1);
    i64 begin = 0;
    for (i64 t = 0; t < pieces; t++) {
      end[t] = begin;
      begin += held[t * bins + digit];
    }
#pragma omp parallel for num_threads(pieces) schedule(static)
    for (i64 t = 0; t < pieces; t++) {
      i64 n = end[t];
      for (i64 i = begin_of(t); i < begin_of(t + 1); i++) {
        const uint32_t key = key_of(scores[i], flip);
        if (key >> shift == digit) keys[n++] = key;
      }
    }
    std::copy(keys, keys + alike, sorted);
    std::nth_element(sorted, sorted + rank - 1, sorted + alike);
    pivot = sorted[rank - 1];

    // Every piece gets its smaller keys and, in order of position, ties while there is room.
    i64 room = rank;
    for (i64 i = 0; i < alike; i++) room -= keys[i] < pivot;
    for (i64 t = 0, p = 0, sum = 0; t < pieces; t++) {
      i64 smaller = 0, equal = 0;
      for (i64 d = 0; d < digit; d++) smaller += held[t * bins + d];
      for (const i64 stop = p + held[t * bins + digit]; p < stop; p++) {
        smaller += keys[p] < pivot;
        equal += keys[p] == pivot;
      }
      ties[t] = dynsparse::least(equal, room);
      room -= ties[t];
      sum += smaller + ties[t];
      end[t + 1] = sum;
    }
    end[0] = 0;
    return true;
  }

  // Whether score i is chosen; `left` ties still may be.
  bool takes(i64 i, i64& left) const {
    const uint32_t key = key_of(scores[i], flip);
    const bool tie = (key == pivot) & (left > 0);
    left -= tie;
    return (key < pivot) | tie;
  }

 private:
  dynsparse::Scratch room_;
};

}  // namespace

// scores [rows, width] = the pooled magnitudes of grad [rows * block, width * block]; pooling 0:
// sum, 1: mean, 2: maximum. block is at most 1024.
DYNSPARSE_EXPORT void dynsparse_grow_pool(
    const float* grad, i64 rows, i64 width, i64 block, i32 pooling, float* scores, i32 threads) {
  const i64 pieces = rows * width * block * block < SMALL ? 1 : threads;
#pragma omp parallel for num_threads(pieces) schedule(static)
  for (i64 row = 0; row < rows; row++) {
    const float* from = grad + row * block * width * block;
    float* to = scores + row * width;
    if (pooling == SUM) pool_row<SUM>(from, width, block, to);
    else if (pooling == AVERAGE) pool_row<AVERAGE>(from, width, block, to);
    else pool_row<LARGEST>(from, width, block, to);
  }
}

// How many of |scores| [rows, width] exceed the threshold outside the pattern's rows (row_ptr
// [rows + 1], cols). Where they fit the room, found_scores and found_flat get them in order, flat
// positions counted from `offset`; otherwise nothing is written. -1 without scratch memory.
// Scores at the pattern are overwritten with NaN. With a negative threshold those that cannot be
// among the `wanted` largest may be left out.
DYNSPARSE_EXPORT i64 dynsparse_grow_scan(
    float* scores, i64 rows, i64 width, const i32* row_ptr, const i32* cols, float threshold,
    i64 wanted, i64 offset, float* found_scores, i64* found_flat, i64 room, i32 threads) {
  const i64 pieces = rows * width < SMALL ? 1 : dynsparse::least(threads, rows);
  dynsparse::Scratch scratch((rows + 1) * sizeof(i64));
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
      const i64 found = collect(own, dynsparse::least(PIECE, width - c), threshold, kept, places);
      const i64 first = offset + row * width + c;
      std::memcpy(found_scores + n, kept, found * sizeof(float));
      for (i64 i = 0; i < found; i++) found_flat[n + i] = first + places[i];
      n += found;
    }
  }
  return begin[rows];
}

// x [batch, features] (any strides) rounded to bfloat16 [batch, features]; and squared lengths of its
// columns and of what the rounding takes from them, added to lengths and errors [features].
DYNSPARSE_EXPORT void dynsparse_grow_round(
    const float* x, i64 batch_stride, i64 feature_stride, i64 batch, i64 features, uint16_t* low,
    float* lengths, float* errors, i32 threads) {
  constexpr i64 STRIP = 256;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 begin = 0; begin < features; begin += STRIP) {
    const i64 count = dynsparse::least(STRIP, features - begin);
    alignas(64) float row[STRIP], rounded[STRIP], squares[STRIP] = {}, lost[STRIP] = {};
    for (i64 i = 0; i < batch; i++) {
      const float* from = x + i * batch_stride + begin * feature_stride;
      uint16_t* to = low + i * features + begin;
      if (feature_stride != 1) {
        for (i64 j = 0; j < count; j++) row[j] = from[j * feature_stride];
        from = row;
      }
      dynsparse::narrow(from, count, to);
      dynsparse::widen(to, 1, count, rounded);
      for (i64 j = 0; j < count; j++) {
        squares[j] += from[j] * from[j];
        lost[j] += (from[j] - rounded[j]) * (from[j] - rounded[j]);
      }
    }
    for (i64 j = 0; j < count; j++) {
      lengths[begin + j] += squares[j];
      errors[begin + j] += lost[j];
    }
  }
}

// Where gradients known to bfloat16 may exceed the threshold in magnitude: scores [rows, width] are
// off by at most (1/256 of themselves +) row_bounds [rows] times col_bounds [width]. Outside the
// pattern's rows (row_ptr [rows + 1], cols); scores at the pattern are overwritten with NaN, and NaN
// is never found. Writes how many there are in each row to counts [rows], and their columns to
// found_cols [room]. Returns how many they are, or more than `room` where some did not find room.
DYNSPARSE_EXPORT i64 dynsparse_grow_screen(
    uint16_t* scores, i64 rows, i64 width, const i32* row_ptr, const i32* cols,
    const float* row_bounds, const float* col_bounds, float threshold, i32* counts,
    i32* found_cols, i64 room, i32 threads) {
  const i64 pieces = rows * width < SMALL ? 1 : dynsparse::least(threads, rows);
  constexpr float ROUNDED = 1.0f + 1.0f / 256;
  constexpr uint16_t NOT_A_NUMBER = 0x7fc0;
  bool fits = true;
  // Every piece of the rows has its part of the room, first of all.
#pragma omp parallel for num_threads(pieces) schedule(static) reduction(&& : fits)
  for (i64 t = 0; t < pieces; t++) {
    alignas(64) float piece[PIECE], kept[PIECE + 16];
    i32 places[PIECE + 16];
    i64 n = room * t / pieces;
    const i64 end = room * (t + 1) / pieces, last = rows * (t + 1) / pieces;
    for (i64 row = rows * t / pieces; row < last && fits; row++) {
      uint16_t* own = scores + row * width;
      for (i64 p = row_ptr[row]; p < row_ptr[row + 1]; p++) own[cols[p]] = NOT_A_NUMBER;
      const i64 before = n;
      for (i64 c = 0; c < width && fits; c += PIECE) {
        const i64 count = dynsparse::least(PIECE, width - c);
        dynsparse::widen(own + c, 1, count, piece);
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

// The positions [k] of the k largest (or smallest) of scores [count], ascending; among equal
// scores the smaller positions. 1 <= k <= count; no NaN. Returns 0, or 1 without scratch memory.
DYNSPARSE_EXPORT int dynsparse_grow_select(
    const float* scores, i64 count, i64 k, i32 largest, i64* positions, i32 threads) {
  Selection chosen(scores, count, largest, threads);
  if (!chosen.find(k)) return 1;
#pragma omp parallel for num_threads(chosen.pieces) schedule(static)
  for (i64 t = 0; t < chosen.pieces; t++) {
    i64 n = chosen.end[t], left = chosen.ties[t];
    // Without branches; the last write stays inside this piece's part.
    for (i64 i = chosen.begin_of(t); n < chosen.end[t + 1]; i++) {
      positions[n] = i;
      n += chosen.takes(i, left);
    }
  }
  return 0;
}

// The k largest of scores [count] and what stands beside them in flat move to the front, in the
// order they were in; the first of equal ones are chosen. Returns as dynsparse_grow_select.
DYNSPARSE_EXPORT int dynsparse_grow_compact(
    float* scores, i64* flat, i64 count, i64 k, i32 threads) {
  Selection chosen(scores, count, true, threads);
  if (!chosen.find(k)) return 1;
  i64 left = 0;
  for (i64 t = 0; t < chosen.pieces; t++) left += chosen.ties[t];
  for (i64 i = 0, n = 0; n < k; i++) {
    const bool taken = chosen.takes(i, left);
    scores[n] = scores[i];
    flat[n] = flat[i];
    n += taken;
  }
  return 0;
}
