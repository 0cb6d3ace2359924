#include "element_panels.h"

#include "caches.h"
#include "element_major.h"
#include "scratch.h"

namespace dynsparse {
namespace {

using u16 = uint16_t;

// The entries are fetched so far ahead: rows of the tile, read in between from here and there, keep
// the processor from seeing streams.
constexpr i64 AHEAD = 256;
// When entries are copied, those of the major so many further on are announced.
constexpr i64 NEXT = 16;
// Fewer entries per panel and major than this do not pay for visiting the major.
constexpr double WORTH_A_VISIT = 12;
// As many minors of a panel as the copied index can tell apart.
constexpr i64 MOST_MINORS = i64{1} << 16;

// A major whose entries and sums are streams.
template <int NV, bool ACCUMULATE, bool DOT>
struct Streamed : Major<NV, ACCUMULATE, DOT, u16> {
  float* sums;

  DYNSPARSE_INLINE void announce(i64 p) const {
    __builtin_prefetch(this->idx + p + AHEAD);
    if constexpr (ACCUMULATE) __builtin_prefetch(this->weights + p + AHEAD);
    if constexpr (DOT) __builtin_prefetch(sums + p + AHEAD, 1);
  }

  // `first`: the sums are stored, not added to those of the tiles before.
  DYNSPARSE_INLINE void all(i64 p, i64 end, bool first) {
    for (; p + VL <= end; p += VL) {
      announce(p);
      V dots = this->template entries<VL>(p);
      if constexpr (DOT)
        store_unaligned(sums + p, first ? dots : dots + load_unaligned(sums + p));
    }
    if (p == end) return;
    announce(p);
    if constexpr (!DOT) {
      for (; p + 2 <= end; p += 2) this->template entries<2>(p);
      if (p < end) this->template entry<0>(p);
    } else if (first) {
      store_unaligned(sums + p, this->rest(p, end));  // what is stored too much is overwritten
    } else {
      store_first(sums + p, this->rest(p, end) + load_first(sums + p, end - p), end - p);
    }
  }
};

// The majors of a thread, their entries by panels, and what is kept of the majors over the panels
// of a tile.
struct Own {
  i64 first, last;    // majors
  i64 size, panels;   // minors per panel
  i32* starts;        // [panel][major], and one more: where the entries of each begin
  u16* idx;           // [entry], counted from the panel's first minor
  float* weights;     // [entry]
  float* sums;        // [entry]
  i32* next;          // [major]: its first entry of the index that is in no panel yet
  i32* delivered;     // [major]: where its next sum is or, by rows, where it goes
  float* packed;      // [minor of a panel][lane]
  float* held;        // [major][lane], where there is more than one panel
  float* out;         // likewise

  i64 majors() const { return last - first; }
};

template <class T>
T* take(char*& at, i64 count) {
  T* piece = reinterpret_cast<T*>(at);
  at += Scratch::size_of<T>(count);
  return piece;
}

template <int NV, bool ACCUMULATE, bool DOT>
void chunk(const ElementPass& pass, const Tile& tile, const Own& own, i64 panel, i64 begin,
           i64 end) {
  constexpr int width = NV * VL;
  alignas(64) float held_here[DOT ? CHUNK * width : 1];
  alignas(64) float out_here[ACCUMULATE ? CHUNK * width : 1];
  const bool kept = own.panels > 1, starts = panel == 0, ends = panel + 1 == own.panels;
  float* held = kept ? own.held + (begin - own.first) * width : held_here;
  float* out = kept ? own.out + (begin - own.first) * width : out_here;
  if constexpr (DOT)
    if (starts) pack(pass.held, tile, begin, end, held);
  Streamed<NV, ACCUMULATE, DOT> major;
  major.tile = own.packed;
  major.idx = own.idx;
  major.weights = own.weights;
  major.sums = own.sums;
  const i32* from = own.starts + panel * own.majors() + (begin - own.first);
  for (i64 m = 0; m < end - begin; m++) {
    if constexpr (DOT) major.hold(held + m * width);
    if constexpr (ACCUMULATE) {
      if (starts)
        major.start(broadcast(pass.bias ? pass.bias[begin + m] : 0.0f));
      else
        major.start(out + m * width);
    }
    major.all(from[m], from[m + 1], tile.first == 0);
    if constexpr (ACCUMULATE) major.finish(out + m * width);
  }
  if constexpr (ACCUMULATE)
    if (ends) unpack(out, tile, begin, end, pass.out, pass.majors, pass.packed.low);
}

template <int NV, bool ACCUMULATE, bool DOT>
void run_panel(const ElementPass& pass, const Tile& tile, const Own& own, i64 panel) {
  for (i64 begin = own.first; begin < own.last; begin += CHUNK)
    chunk<NV, ACCUMULATE, DOT>(pass, tile, own, panel, begin, least(own.last, begin + CHUNK));
}

template <bool ACCUMULATE, bool DOT>
void run_panel(const ElementPass& pass, const Tile& tile, const Own& own, i64 panel) {
  static_assert(TILE_VECTORS == 4, "one case for every width of the last tile");
  switch (tile.vectors) {
    case 1: return run_panel<1, ACCUMULATE, DOT>(pass, tile, own, panel);
    case 2: return run_panel<2, ACCUMULATE, DOT>(pass, tile, own, panel);
    case 3: return run_panel<3, ACCUMULATE, DOT>(pass, tile, own, panel);
    default: return run_panel<4, ACCUMULATE, DOT>(pass, tile, own, panel);
  }
}

void run_panel(const ElementPass& pass, const Tile& tile, const Own& own, i64 panel) {
  if (pass.out && pass.sums) return run_panel<true, true>(pass, tile, own, panel);
  if (pass.sums) return run_panel<false, true>(pass, tile, own, panel);
  return run_panel<true, false>(pass, tile, own, panel);
}

// Copies the entries [p, end) of a major that point below `bound`, counted from `base`, to `own`,
// where what lies behind them may be overwritten. Returns how many they are, or -1 where they are
// not in ascending order. `all` is the length of idx.
i64 copy_below(const i32* idx, i64 p, i64 end, i64 all, i32 base, i32 bound, u16* own) {
  const i64 from = p;
  i32 last = base - 1;
#if defined(__AVX512F__)
  while (p + 16 <= all) {
    const __m512i lanes = _mm512_loadu_si512(idx + p);
    const __mmask16 below = _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(bound));
    const i64 n = least(__builtin_ctz(~static_cast<unsigned>(below)), end - p);
    const __m512i offsets = _mm512_sub_epi32(lanes, _mm512_set1_epi32(base));
    _mm512_mask_cvtepi32_storeu_epi16(own + (p - from), static_cast<__mmask16>(-1), offsets);
    // Each lane beside the one before it.
    const __m512i before = _mm512_mask_expand_epi32(
        _mm512_maskz_loadu_epi32(static_cast<__mmask16>(p > 0 ? -1 : 0xfffe), idx + p - 1), 1,
        _mm512_set1_epi32(last));
    const unsigned counted = (1u << n) - 1;
    if (~_mm512_cmpgt_epi32_mask(lanes, before) & counted) return -1;
    p += n;
    if (n < 16) return p - from;
    last = idx[p - 1];
  }
#else
  (void)all;
#endif
  for (; p < end && idx[p] < bound; p++) {
    if (idx[p] <= last) return -1;
    last = idx[p];
    own[p - from] = static_cast<u16>(last - base);
  }
  return p - from;
}

// The values of the n entries from p on. What lies behind them may be overwritten.
void copy_weights(const ElementPass& pass, i64 p, i64 n, i64 all, float* weights) {
  if (!pass.order) {
    std::memcpy(weights, pass.values + p, n * sizeof(float));
    return;
  }
  const i64 whole = least(n, all - p - 3);
  i64 i = 0;
  for (; i < whole; i += 4)
#pragma GCC unroll 4
    for (i64 j = i; j < i + 4; j++) weights[j] = pass.values[pass.order[p + j]];
  for (; i < n; i++) weights[i] = pass.values[pass.order[p + i]];
}

// Makes the entries of panel k; false where those of a major are not in ascending order.
bool copy_entries(const ElementPass& pass, const Own& own, i64 k) {
  const i64 all = pass.ptr[pass.majors], majors = own.majors();
  const i32 base = static_cast<i32>(k * own.size);
  i32* starts = own.starts + k * majors;
  i32 to = k == 0 ? 0 : starts[0];
  for (i64 m = 0; m < majors; m++) {
    starts[m] = to;
    if (m + NEXT < majors) {
      const i64 soon = own.next[m + NEXT];
      for (i64 p = soon; p < soon + 3 * LINE; p += LINE) {
        __builtin_prefetch(pass.idx + p);
        __builtin_prefetch(pass.order ? static_cast<const void*>(pass.order + p) : pass.values + p);
      }
    }
    const i64 p = own.next[m];
    const i64 n = copy_below(pass.idx, p, pass.ptr[own.first + m + 1], all, base,
                             static_cast<i32>(base + own.size), own.idx + to);
    if (n < 0) return false;
    if (pass.out) copy_weights(pass, p, n, all, own.weights + to);
    own.next[m] = static_cast<i32>(p + n);
    to += static_cast<i32>(n);
  }
  starts[majors] = to;
  return true;
}

// The first of the entries [begin, end) of a row that does not lie before column `col`.
i64 first_from(const i32* cols, i64 begin, i64 end, i64 col) {
  while (begin < end) {
    const i64 middle = (begin + end) / 2;
    if (cols[middle] < col)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// The sums of panel k to where the values are. False where the index by rows does not have the same
// entries in ascending order.
bool deliver(const ElementPass& pass, const Own& own, i64 k) {
  const u32 majors = static_cast<u32>(own.majors());
  const i32* starts = own.starts + k * own.majors();
  if (!pass.order) {
    for (u32 m = 0; m < majors; m++) {
      const i64 n = starts[m + 1] - starts[m];
      std::memcpy(pass.sums + own.delivered[m], own.sums + starts[m], n * sizeof(float));
      own.delivered[m] += static_cast<i32>(n);
    }
    return true;
  }
  std::memcpy(own.delivered, starts, majors * sizeof(i32));
  const i64 end = least(pass.minors, (k + 1) * own.size);
  for (i64 row = k * own.size; row < end; row++) {
    i64 p = first_from(pass.cols, pass.row_ptr[row], pass.row_ptr[row + 1], own.first);
    for (; p < pass.row_ptr[row + 1]; p++) {
      const u32 m = static_cast<u32>(pass.cols[p]) - static_cast<u32>(own.first);
      if (m >= majors) break;
      pass.sums[p] = own.sums[own.delivered[m]++];
    }
  }
  // As many as there are of every major, or a place was taken by another's.
  bool all = true;
  for (u32 m = 0; m < majors; m++) all &= own.delivered[m] == starts[m + 1];
  return all;
}

i64 panel_size(const ElementPass& pass, i64 width) {
  const i64 minors = most(pass.minors, 1);
  const double cached = second_level_cache() / 16.0 / (width * sizeof(float));
  const double per_minor = static_cast<double>(pass.ptr[pass.majors]) / pass.majors / minors;
  const double useful = per_minor > 0 ? WORTH_A_VISIT / per_minor : minors;
  const double size = useful > cached ? useful : cached;
  const i64 fitting = size < MOST_MINORS ? most(static_cast<i64>(size), LINE) : MOST_MINORS;
  return ceil_div(ceil_div(minors, ceil_div(minors, fitting)), LINE) * LINE;
}

}  // namespace

// Measured. Copying costs, per major, as much as some 32 entries. It brings most where a whole packed
// tile would crowd the second-level cache, and where values must be fetched from other places
// anyway; narrower vectors need less of the caches.
bool panels_pay(const ElementPass& pass) {
  const i64 tile = pass.minors * TILE * static_cast<i64>(sizeof(float));
  const bool crowded = tile > second_level_cache() / 4;
  if (!crowded && VL < 16) return false;
  const i64 samples = !crowded || VL < 16 ? 256 : pass.order ? 32 : 96;
  return pass.batch >= samples && pass.ptr[pass.majors] >= 32 * pass.majors;
}

Outcome run_in_panels(const ElementPass& pass) {
  const i64 tiles = tiles_of(pass.batch), width = tile_at(0, pass.batch).width();
  const i64 size = panel_size(pass, width), panels = ceil_div(most(pass.minors, 1), size);
  i64 majors = 0, entries = 0;
  for (i64 k = 0; k < pass.threads; k++) {
    const i64 first = first_major(pass, k, pass.threads);
    const i64 last = first_major(pass, k + 1, pass.threads);
    majors = most(majors, last - first);
    entries = most(entries, pass.ptr[last] - pass.ptr[first]);
  }
  const i64 room = entries + VL, kept = panels > 1 ? majors * width : 0;
  const std::size_t each =
      Scratch::size_of<i32>(panels * majors + 1) + Scratch::size_of<u16>(room) +
      Scratch::size_of<float>(pass.out ? room : 0) + Scratch::size_of<float>(pass.sums ? room : 0) +
      Scratch::size_of<i32>(majors) * 2 + Scratch::size_of<float>(size * width) +
      Scratch::size_of<float>(pass.sums ? kept : 0) + Scratch::size_of<float>(pass.out ? kept : 0);
  Scratch scratch(each * pass.threads);
  if (scratch.failed()) return Outcome::NO_MEMORY;
  char* const all = scratch.take<char>(each * pass.threads);

  bool ordered = true;
#pragma omp parallel for schedule(static) num_threads(pass.threads) reduction(&& : ordered)
  for (int k = 0; k < pass.threads; k++) {
    Own own;
    own.first = first_major(pass, k, pass.threads);
    own.last = first_major(pass, k + 1, pass.threads);
    if (own.first == own.last) continue;
    own.size = size;
    own.panels = panels;
    char* at = all + k * each;
    own.starts = take<i32>(at, panels * majors + 1);
    own.idx = take<u16>(at, room);
    own.weights = take<float>(at, pass.out ? room : 0);
    own.sums = take<float>(at, pass.sums ? room : 0);
    own.next = take<i32>(at, majors);
    own.delivered = take<i32>(at, majors);
    own.packed = take<float>(at, size * width);
    own.held = take<float>(at, pass.sums ? kept : 0);
    own.out = take<float>(at, pass.out ? kept : 0);
    for (i64 m = 0; m < own.majors(); m++)
      own.next[m] = own.delivered[m] = pass.ptr[own.first + m];
    for (i64 t = 0; t < tiles && ordered; t++) {
      const Tile tile = tile_at(t, pass.batch);
      for (i64 panel = 0; panel < panels && ordered; panel++) {
        if (t == 0) ordered = copy_entries(pass, own, panel);
        if (!ordered) break;
        pack(pass.packed, tile, panel * size, least(pass.minors, (panel + 1) * size), own.packed);
        run_panel(pass, tile, own, panel);
        if (pass.sums && t + 1 == tiles) ordered = deliver(pass, own, panel);
      }
    }
  }
  return ordered ? Outcome::DONE : Outcome::UNORDERED;
}

}  // namespace dynsparse
