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

// Keys from `low` to low + span.
struct Range {
  uint32_t low, span;
  bool holds(uint32_t key) const { return key - low <= span; }
};

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
        room_(4 * Scratch::size_of<i64>(pieces + 1)) {
    if (room_.failed()) return;
    end = room_.take<i64>(pieces + 1);
    ties = room_.take<i64>(pieces + 1);
    smaller_ = room_.take<i64>(pieces + 1);
    alike_ = room_.take<i64>(pieces + 1);
  }

  i64 begin_of(i64 piece) const { return count * piece / pieces; }

  // False without scratch memory.
  bool find(i64 k) {
    if (room_.failed()) return false;
    Range range = {0, 0};
    i64 rank = 0;  // among the keys in the range
    if (count >= FEW_SCORES) {
      range = sampled(k);
      rank = tally(range, k);
    }
    if (rank <= 0 || rank > alike_[pieces] || 4 * alike_[pieces] > count) {
      if (!by_digit(k, range)) return false;
      rank = tally(range, k);
    }
    const i64 alike = alike_[pieces];
    Scratch list(2 * Scratch::size_of<uint32_t>(alike + 1));
    if (list.failed()) return false;
    uint32_t* keys = list.take<uint32_t>(alike + 1);
    uint32_t* sorted = list.take<uint32_t>(alike + 1);
    i64 begin = 0;
    for (i64 t = 0; t < pieces; t++) {
      end[t] = begin;
      begin += alike_[t];
    }
#pragma omp parallel for num_threads(pieces) schedule(static)
    for (i64 t = 0; t < pieces; t++) {
      i64 n = end[t], i = begin_of(t);
      const i64 stop = n + alike_[t];
#if defined(__AVX512F__)
      for (; n + 16 <= stop && i + 16 <= begin_of(t + 1); i += 16) {
        const __m512i own = keys_at(i);
        const unsigned mask = _mm512_cmple_epu32_mask(
            _mm512_sub_epi32(own, _mm512_set1_epi32(static_cast<i32>(range.low))),
            _mm512_set1_epi32(static_cast<i32>(range.span)));
        _mm512_storeu_si512(keys + n, _mm512_maskz_compress_epi32(mask, own));
        n += __builtin_popcount(mask);
      }
#endif
      // Without branches; the last write stays inside this piece's part.
      for (; n < stop; i++) {
        keys[n] = key_of(scores[i], flip);
        n += range.holds(keys[n]);
      }
    }
    std::copy(keys, keys + alike, sorted);
    std::nth_element(sorted, sorted + rank - 1, sorted + alike);
    pivot = sorted[rank - 1];

    // Every piece gets its smaller keys and, in order of position, ties while there is room.
    i64 room = rank;
    for (i64 i = 0; i < alike; i++) room -= keys[i] < pivot;
    for (i64 t = 0, p = 0, sum = 0; t < pieces; t++) {
      i64 smaller = smaller_[t], equal = 0;
      for (const i64 stop = p + alike_[t]; p < stop; p++) {
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

#if defined(__AVX512F__)
  // The keys of 16 scores.
  __m512i keys_at(i64 i) const {
    const __m512 scored = _mm512_add_ps(_mm512_loadu_ps(scores + i), _mm512_setzero_ps());
    const __m512i bits = _mm512_castps_si512(scored), sign = _mm512_srai_epi32(bits, 31);
    const __m512i most = _mm512_set1_epi32(static_cast<i32>(flip ^ 0x80000000u));
    return _mm512_xor_si512(bits, _mm512_xor_si512(_mm512_srli_epi32(sign, 1), most));
  }
#endif

  // Whether score i is chosen; `left` ties still may be.
  bool takes(i64 i, i64& left) const {
    const uint32_t key = key_of(scores[i], flip);
    const bool tie = (key == pivot) & (left > 0);
    left -= tie;
    return (key < pivot) | tie;
  }

 private:
  Scratch room_;
  i64 *smaller_ = nullptr, *alike_ = nullptr;  // [pieces + 1]: keys below the range and in it; all

  // Probably the key of rank k is in it, and few others are.
  Range sampled(i64 k) const {
    constexpr i64 SAMPLE = 4096;
    uint32_t sample[SAMPLE];
    const i64 step = (count / SAMPLE) | 1;
    i64 size = 0;
    for (i64 i = 0; i < count && size < SAMPLE; i += step) sample[size++] = key_of(scores[i], flip);
    std::sort(sample, sample + size);
    const double share = static_cast<double>(k) / count, expected = size * share;
    const double margin = 4 * std::sqrt(expected * (1 - share)) + 2;
    const uint32_t low = expected < margin ? 0 : sample[static_cast<i64>(expected - margin)];
    const bool last = expected + margin >= size - 1;
    return {low, (last ? ~uint32_t{0} : sample[static_cast<i64>(expected + margin)]) - low};
  }

  // How many keys are in the range, and below; returns the rank in it of the key of rank k.
  i64 tally(Range range, i64 k) {
#pragma omp parallel for num_threads(pieces) schedule(static)
    for (i64 t = 0; t < pieces; t++) {
      constexpr i64 AT_ONCE = 1 << 16;  // so that 32 bits count them
      smaller_[t] = alike_[t] = 0;
      for (i64 i = begin_of(t); i < begin_of(t + 1); i += AT_ONCE) {
        const i64 stop = least(i + AT_ONCE, begin_of(t + 1));
        uint32_t below = 0, inside = 0;
        for (i64 j = i; j < stop; j++) {
          const uint32_t key = key_of(scores[j], flip);
          below += key < range.low;
          inside += range.holds(key);
        }
        smaller_[t] += below;
        alike_[t] += inside;
      }
    }
    smaller_[pieces] = alike_[pieces] = 0;
    for (i64 t = 0; t < pieces; t++) {
      smaller_[pieces] += smaller_[t];
      alike_[pieces] += alike_[t];
    }
    return k - smaller_[pieces];
  }

  // The keys that begin as that of rank k does; false without scratch memory.
  bool by_digit(i64 k, Range& range) const {
    const int bits = count < FEW_SCORES ? 11 : 16, shift = 32 - bits;
    const i64 bins = i64{1} << bits;
    Scratch scratch(Scratch::size_of<i32>(pieces * bins));
    if (scratch.failed()) return false;
    i32* held = scratch.take<i32>(pieces * bins);
#pragma omp parallel for num_threads(pieces) schedule(static)
    for (i64 t = 0; t < pieces; t++) {
      i32* own = held + t * bins;
      std::memset(own, 0, bins * sizeof(i32));
      for (i64 i = begin_of(t); i < begin_of(t + 1); i++) own[key_of(scores[i], flip) >> shift]++;
    }
    i64 digit = -1, alike = 0;
    for (i64 rank = k; rank > alike;) {
      rank -= alike;
      alike = 0;
      digit++;
      for (i64 t = 0; t < pieces; t++) alike += held[t * bins + digit];
    }
    range = {static_cast<uint32_t>(digit) << shift, (uint32_t{1} << shift) - 1};
    return true;
  }
};

// The positions of one piece that are chosen.
void positions_of(const Selection& chosen, i64 piece, i64* positions) {
  i64 n = chosen.end[piece], left = chosen.ties[piece], i = chosen.begin_of(piece);
  const i64 stop = chosen.end[piece + 1];
#if defined(__AVX512F__)
  const __m512i pivot = _mm512_set1_epi32(static_cast<i32>(chosen.pivot));
  __m512i place = _mm512_add_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(i));
  const __m512i eight = _mm512_set1_epi64(8);
  for (; n + 16 <= stop && i + 16 <= chosen.begin_of(piece + 1); i += 16) {
    const __m512i own = chosen.keys_at(i);
    unsigned taken = _mm512_cmplt_epu32_mask(own, pivot);
    unsigned tied = left ? _mm512_cmpeq_epu32_mask(own, pivot) : 0;
    for (; tied && left; tied &= tied - 1, left--) taken |= tied & -tied;
    for (i64 half = 0; half < 2; half++, taken >>= 8, place = _mm512_add_epi64(place, eight)) {
      const __mmask8 mask = static_cast<__mmask8>(taken);
      _mm512_storeu_si512(positions + n, _mm512_maskz_compress_epi64(mask, place));
      n += __builtin_popcount(mask);
    }
  }
#endif
  // Without branches; the last write stays inside this piece's part.
  for (; n < stop; i++) {
    positions[n] = i;
    n += chosen.takes(i, left);
  }
}

}  // namespace

int dynsparse_grow_select(const float* scores, i64 count, i64 k, i32 largest, i64* positions,
                          i32 threads) {
  Selection chosen(scores, count, largest, threads);
  if (!chosen.find(k)) return 1;
#pragma omp parallel for num_threads(chosen.pieces) schedule(static)
  for (i64 t = 0; t < chosen.pieces; t++) positions_of(chosen, t, positions);
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
