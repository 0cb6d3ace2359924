// The k best of many scores.

#include <algorithm>

#include "api.h"
#include "base/scratch.h"
#include "update/grow.h"

using namespace dynsparse;

namespace {

// Rising with the score, equal for equal scores (0.0 and -0.0 among them); falling if `largest`.
DYNSPARSE_INLINE uint32_t key_of(float score, uint32_t flip) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return (bits ^ ((bits >> 31 ? ~uint32_t{0} : uint32_t{1} << 31))) ^ flip;
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
        pieces(count < FEW_SCORES ? 1 : threads),
        room_(2 * Scratch::size_of<i64>(pieces + 1)) {
    if (room_.failed()) return;
    end = room_.take<i64>(pieces + 1);
    ties = room_.take<i64>(pieces + 1);
  }

  i64 begin_of(i64 piece) const { return count * piece / pieces; }

  // False without scratch memory.
  bool find(i64 k) {
    if (room_.failed()) return false;
    const int bits = count < FEW_SCORES ? 11 : 16, shift = 32 - bits;
    const i64 bins = i64{1} << bits;

    // How many keys begin with each digit of so many bits.
    Scratch scratch(Scratch::size_of<i32>(pieces * bins));
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
    Scratch list(2 * Scratch::size_of<uint32_t>(alike + 1));
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
      ties[t] = least(equal, room);
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
  Scratch room_;
};

}  // namespace

int dynsparse_grow_select(const float* scores, i64 count, i64 k, i32 largest, i64* positions,
                          i32 threads) {
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

int dynsparse_grow_compact(float* scores, i64* flat, i64 count, i64 k, i32 threads) {
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

void dynsparse_grow_merge(const i64* one, i64 count, const i64* other, i64 others, i64* merged) {
  i64 i = 0, j = 0, n = 0;
  while (i < count && j < others) {  // without branches: which comes first is random
    const i64 a = one[i], b = other[j];
    const bool first = a < b;
    merged[n++] = first ? a : b;
    i += first;
    j += !first;
  }
  std::copy(one + i, one + count, merged + n);
  std::copy(other + j, other + others, merged + n + count - i);
}
