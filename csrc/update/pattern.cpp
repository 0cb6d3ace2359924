// Pattern updates on the index arrays: one merge makes the new CSR arrays and tells where each
// slot comes from, a counting sort makes the CSC arrays, and tensors are moved.
//
// Rows are cut into one piece per thread; a piece finds its place in the other lists by bisection.

#include <algorithm>

#include "api.h"
#include "base/packed.h"
#include "base/scratch.h"
#include "base/simd.h"

using dynsparse::i32;
using dynsparse::i64;

namespace {

// Below so many slots a second thread costs more than it gives.
constexpr i64 SMALL = 1 << 15;

bool ascending(const i64* list, i64 count, i64 bound) {
  if (count == 0) return true;
  bool good = list[0] >= 0 && list[count - 1] < bound;
  bool disorder = false;
  for (i64 i = 1; i < count; i++) disorder |= list[i] <= list[i - 1];
  return good && !disorder;
}

// The first row of piece t of `pieces` with about equally many slots.
i64 piece_begin(const i32* row_ptr, i64 height, i64 t, i64 pieces) {
  if (t == pieces) return height;
  const i64 slot = row_ptr[height] * t / pieces;
  return t == 0 ? 0 : std::lower_bound(row_ptr, row_ptr + height, slot) - row_ptr;
}

struct Merge {
  const i32 *row_ptr, *cols, *slots;
  const uint8_t* leaves;
  const i64 *grow, *reused;
  i64 grown, width;
  i32 *new_row_ptr, *new_cols, *source;

  i32 slot_of(i64 entry) const { return slots ? slots[entry] : static_cast<i32>(entry); }

  i64 leaving(i64 begin, i64 end) const {
    i64 count = 0;
    for (i64 p = begin; p < end; p++) count += leaves[slot_of(p)];
    return count;
  }

  // Rows [first, last), before which `left` entries leave; 3 * width entries of scratch. False
  // where a grown position is taken.
  bool run(i64 first, i64 last, i64 left, i32* scratch) const {
    i32 *kept_cols = scratch, *kept_slots = scratch + width, *new_slots = scratch + 2 * width;
    i64 g = std::lower_bound(grow, grow + grown, first * width) - grow;
    i64 q = row_ptr[first] - left + g;
    bool taken = false;
    for (i64 row = first; row < last; row++) {
      new_row_ptr[row] = static_cast<i32>(q);
      const i64 start = row * width;
      // Which slots leave and which positions join is random: no loop branches on it.
      i64 kept = 0;
      for (i64 p = row_ptr[row]; p < row_ptr[row + 1]; p++) {
        const i32 own = slot_of(p);
        kept_cols[kept] = cols[p];
        kept_slots[kept] = own;
        kept += 1 - leaves[own];
      }
      const i64 row_grow = g;
      for (; g < grown && grow[g] < start + width; g++)
        new_slots[g - row_grow] = reused ? static_cast<i32>(reused[g]) : -1;
      const i64 joining = g - row_grow;
      taken |= merge_row(kept_cols, kept_slots, kept, grow + row_grow, new_slots, joining, start,
                         new_cols + q, source + q);
      q += kept + joining;
    }
    return !taken;
  }

  // Two ascending lists become one, from both ends at once: each step waits for the one before,
  // and two chains of steps overlap. True where a position is in both lists.
  static bool merge_row(const i32* staying, const i32* slots, i64 stay, const i64* joining,
                        const i32* new_slots, i64 join, i64 start, i32* out_cols,
                        i32* out_source) {
    const i64 count = stay + join;
    i64 i = 0, j = 0, last_i = stay - 1, last_j = join - 1, front = 0, back = count - 1;
    // While both lists hold a step's worth at either end, no end is reached.
    while (last_i - i >= 1 && last_j - j >= 1) {
      const i32 a = staying[i], b = static_cast<i32>(joining[j] - start);
      const i32 stays = -static_cast<i32>(a < b);  // all ones: a comes first
      out_cols[front] = b ^ ((a ^ b) & stays);
      out_source[front] = new_slots[j] ^ ((slots[i] ^ new_slots[j]) & stays);
      i -= stays;
      j += 1 + stays;
      front++;
      const i32 c = staying[last_i], e = static_cast<i32>(joining[last_j] - start);
      const i32 ends = -static_cast<i32>(c >= e);  // all ones: c comes last
      out_cols[back] = e ^ ((c ^ e) & ends);
      out_source[back] = new_slots[last_j] ^ ((slots[last_i] ^ new_slots[last_j]) & ends);
      last_i += ends;
      last_j -= 1 + ends;
      back--;
    }
    while (i <= last_i && j <= last_j) {
      const i32 a = staying[i], b = static_cast<i32>(joining[j] - start);
      const bool stays = a < b;
      out_cols[front] = stays ? a : b;
      out_source[front] = stays ? slots[i] : new_slots[j];
      i += stays;
      j += !stays;
      front++;
    }
    for (; i <= last_i; i++, front++) {
      out_cols[front] = staying[i];
      out_source[front] = slots[i];
    }
    for (; j <= last_j; j++, front++) {
      out_cols[front] = static_cast<i32>(joining[j] - start);
      out_source[front] = new_slots[j];
    }
    bool twice = false;
    for (i64 n = 1; n < count; n++) twice |= out_cols[n] == out_cols[n - 1];
    return twice;
  }
};

// The entry at `from`, or zeros where that is negative, without a branch: which are is random. The
// index is hidden from compilers: of one that is cut at 0 GCC 12 (for ARM) makes a load without the
// cut, and then looks whether it counts.
template <class T>
DYNSPARSE_INLINE T slot(const T* data, i64 from) {
  const i64 there = ~(from >> 63);
  i64 at = from & there;
  asm("" : "+r"(at));
  return static_cast<T>(data[at] & static_cast<T>(there));
}

// to[j] = the entry at source[j], or zeros where that is -1.
template <class T>
void move(const T* data, const i32* source, i64 count, T* to) {
  i64 j = 0;
#if defined(__AVX512F__)
  // Survivors mostly keep their order, so 16 of them come out of few more.
  if constexpr (sizeof(T) == 4) {
    for (; j + 16 <= count; j += 16) {
      const __m512i from = _mm512_loadu_si512(source + j);
      const __mmask16 there = _mm512_cmpge_epi32_mask(from, _mm512_setzero_si512());
      if (!there) {
        _mm512_storeu_si512(to + j, _mm512_setzero_si512());
        continue;
      }
      const i32 begin = source[j + __builtin_ctz(there)];
      const i64 span = i64{source[j + 31 - __builtin_clz(there)]} - begin + 1;
      const T* const own = data + begin;
      const __m512i off = _mm512_sub_epi32(from, _mm512_set1_epi32(begin));
      const __m512i end = _mm512_set1_epi32(static_cast<i32>(span));
      if (span < 1 || span > 32 || _mm512_mask_cmplt_epu32_mask(there, off, end) != there) {
        for (i64 l = j; l < j + 16; l++) to[l] = slot(data, source[l]);
        continue;
      }
      const __mmask16 low = static_cast<__mmask16>(span < 16 ? (1u << span) - 1 : 0xffff);
      const __mmask16 high = static_cast<__mmask16>(span > 16 ? (1u << (span - 16)) - 1 : 0);
      const __m512i found = _mm512_maskz_permutex2var_epi32(
          there, _mm512_maskz_loadu_epi32(low, own), off,
          _mm512_maskz_loadu_epi32(high, own + 16));
      _mm512_storeu_si512(to + j, found);
    }
  }
#endif
  for (; j < count; j++) to[j] = slot(data, source[j]);
}

void move_blocks(const char* data, i64 bytes, const i32* source, i64 first, i64 last, char* moved) {
  for (i64 j = first; j < last; j++) {
    if (source[j] < 0) std::memset(moved + j * bytes, 0, bytes);
    else std::memcpy(moved + j * bytes, data + source[j] * bytes, bytes);
  }
}

}  // namespace

int dynsparse_pattern_merge(const i32* row_ptr, const i32* cols, const i32* slots, i64 height,
                            i64 width, const uint8_t* leaves, i64 dropped, const i64* grow,
                            i64 grown, const i64* reused, i32* new_row_ptr, i32* new_cols,
                            i32* source, i32 threads) {
  const i64 nnz = row_ptr[height];
  if (!ascending(grow, grown, height * width)) return 2;
  const i64 pieces = nnz + grown < SMALL ? 1 : threads;
  const i64 room = 3 * width;
  dynsparse::Scratch scratch(dynsparse::Scratch::size_of<i32>(pieces * room));
  if (scratch.failed()) return 1;
  i32* kept = scratch.take<i32>(pieces * room);
  const Merge merge = {row_ptr, cols,  slots,       leaves,   grow,  reused,
                       grown,   width, new_row_ptr, new_cols, source};
  bool taken = false;
#pragma omp parallel for num_threads(pieces) schedule(static) reduction(| : taken)
  for (i64 t = 0; t < pieces; t++) {
    const i64 first = piece_begin(row_ptr, height, t, pieces);
    const i64 last = piece_begin(row_ptr, height, t + 1, pieces);
    // Each piece counts what leaves on its shorter side.
    const i64 begin = row_ptr[first];
    const bool early = begin < nnz - begin;
    const i64 left = early ? merge.leaving(0, begin) : dropped - merge.leaving(begin, nnz);
    taken |= !merge.run(first, last, left, kept + t * room);
  }
  new_row_ptr[height] = static_cast<i32>(nnz - dropped + grown);
  return taken ? 2 : 0;
}

int dynsparse_pattern_by_columns(const i32* row_ptr, const i32* cols, const i32* slots, i64 height,
                                 i64 width, i32* col_ptr, i32* csc_rows, i32* csc_slots,
                                 i32 threads) {
  const i64 nnz = row_ptr[height];
  const i64 pieces = nnz < SMALL ? 1 : threads;
  dynsparse::Scratch scratch(dynsparse::Scratch::size_of<i32>(pieces * width) +
                             dynsparse::Scratch::size_of<i32>(height));
  if (scratch.failed()) return 1;
  i32* next = scratch.take<i32>(pieces * width);
  i32* at = scratch.take<i32>(height);
  bool disorder = false;
#pragma omp parallel for num_threads(pieces) schedule(static) reduction(| : disorder)
  for (i64 t = 0; t < pieces; t++) {
    i32* count = next + t * width;
    std::fill(count, count + width, 0);
    const i64 first = piece_begin(row_ptr, height, t, pieces);
    const i64 last = piece_begin(row_ptr, height, t + 1, pieces);
    for (i64 p = row_ptr[first]; p < row_ptr[last]; p++) count[cols[p]]++;
    for (i64 row = first; row < last; row++) {
      bool falls = false;
      for (i64 p = row_ptr[row] + 1; p < row_ptr[row + 1]; p++) falls |= cols[p] < cols[p - 1];
      disorder |= falls;
    }
  }
  i32 sum = 0;
  for (i64 c = 0; c < width; c++) {
    col_ptr[c] = sum;
    for (i64 t = 0; t < pieces; t++) {
      const i32 count = next[t * width + c];
      next[t * width + c] = sum;
      sum += count;
    }
  }
  col_ptr[width] = sum;
  // As many columns at a time as there are lines in the first-level cache that they are written to,
  // where a row has enough of them.
  constexpr i64 LINES = 256, ENOUGH = 8;
  const bool narrow = !disorder && nnz * LINES >= ENOUGH * height * width;
  const i64 step = narrow ? LINES : width;
#pragma omp parallel for num_threads(pieces) schedule(static)
  for (i64 t = 0; t < pieces; t++) {
    i32* place = next + t * width;
    const i64 first = piece_begin(row_ptr, height, t, pieces);
    const i64 last = piece_begin(row_ptr, height, t + 1, pieces);
    std::copy(row_ptr + first, row_ptr + last, at + first);
    for (i64 end = step; end - step < width; end += step)
      for (i64 row = first; row < last; row++) {
        i64 p = at[row];
        for (const i64 stop = row_ptr[row + 1]; p < stop && (cols[p] < end || !narrow); p++) {
          const i32 to = place[cols[p]]++;
          csc_rows[to] = static_cast<i32>(row);
          csc_slots[to] = slots ? slots[p] : static_cast<i32>(p);
        }
        at[row] = static_cast<i32>(p);
      }
  }
  return 0;
}

int dynsparse_pattern_unpack(const uint8_t* packed, i64 bytes, i32 gaps, i64 height, i64 width,
                             i64 nnz, i32* row_ptr, i32* cols, i32* col_ptr) {
  if (!dynsparse::unpack_pattern(packed, bytes, gaps != 0, height, width, nnz, row_ptr, cols))
    return 2;
  std::fill(col_ptr, col_ptr + width + 1, 0);
  for (i64 p = 0; p < nnz; p++) col_ptr[cols[p] + 1]++;
  for (i64 c = 0; c < width; c++) col_ptr[c + 1] += col_ptr[c];
  return 0;
}

void dynsparse_pattern_move(const void* data, i64 bytes, const i32* source, i64 count, void* moved,
                            i32 threads) {
  const i64 pieces = count < SMALL ? 1 : threads;
#pragma omp parallel for num_threads(pieces) schedule(static)
  for (i64 t = 0; t < pieces; t++) {
    const i64 first = count * t / pieces, last = count * (t + 1) / pieces;
    switch (bytes) {
      case 2:
        move(static_cast<const uint16_t*>(data), source + first, last - first,
             static_cast<uint16_t*>(moved) + first);
        break;
      case 4:
        move(static_cast<const uint32_t*>(data), source + first, last - first,
             static_cast<uint32_t*>(moved) + first);
        break;
      case 8:
        move(static_cast<const uint64_t*>(data), source + first, last - first,
             static_cast<uint64_t*>(moved) + first);
        break;
      default:
        move_blocks(static_cast<const char*>(data), bytes, source, first, last,
                    static_cast<char*>(moved));
    }
  }
}
