#include "linear/element/panels.h"

#include "base/scratch.h"
#include "linear/element/major.h"

namespace dynsparse {
namespace {

// The entries are fetched so far ahead: rows of the tile, read in between from here and there, keep
// the processor from seeing streams.
constexpr i64 AHEAD = 256;
// When values are copied, those of the major so many further on are announced.
constexpr i64 NEXT = 16;

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
    } else {
      const V dots = this->rest(p, end);
      store_first(sums + p, first ? dots : dots + load_first(sums + p, end - p), end - p);
    }
  }
};

// The majors of a thread, and what it keeps of them over the panels of a tile.
struct Own {
  i64 first, last;  // majors
  float* packed;    // [minor of a panel][lane]
  // [major][lane]. All of them at once come from the natural layout and go back to it: long runs of
  // every sample's row, where a few cache lines of each would wait for memory one by one.
  float* held;
  float* out;
  // By entry. Where it begins differs from panel to panel, if the memory holds but one of them.
  const float* weights;
  float* sums;
  float* widened;  // the weights of a major that come in int8
};

// The majors of a thread in a panel, with their entries.
struct Part {
  const PanelIndex& index;
  i64 panel;
  const i32* starts;  // [major]: where its entries begin
  i64 begin, end;     // entries

  Part(const ElementPass& pass, const Own& own, i64 panel)
      : index(*pass.panels), panel(panel), starts(index.starts + panel * pass.majors),
        begin(starts[own.first]), end(starts[own.last]) {}
};

template <int NV, bool ACCUMULATE, bool DOT>
void run_panel(const ElementPass& pass, const Tile& tile, const Own& own, const Part& part) {
  constexpr int width = NV * VL;
  const bool starts = part.panel == 0, ends = part.panel + 1 == part.index.panels;
  const i64 majors = own.last - own.first;
  if (DOT && starts) {
    pack(pass.held, tile, own.first, own.last, own.held);
    if (pass.held_sums)
      sum_lanes(own.held, width, majors, tile.first > 0, pass.held_sums + own.first);
  }
  Streamed<NV, ACCUMULATE, DOT> major;
  major.tile = own.packed;
  major.idx = part.index.idx;
  major.weights = own.weights;
  major.sums = own.sums;
  const i32* from = part.starts + own.first;
  for (i64 m = 0; m < majors; m++) {
    if constexpr (DOT) major.hold(own.held + m * width);
    if constexpr (ACCUMULATE) {
      if (starts)
        major.start(broadcast(pass.bias ? pass.bias[own.first + m] : 0.0f));
      else
        major.start(own.out + m * width);
    }
    if (pass.int8_values) {
      const i64 first = part.index.values[part.panel * pass.majors + own.first + m];
      widen(pass.int8_values + first, from[m + 1] - from[m], pass.scale[own.first + m],
            own.widened);
      major.weights = own.widened - from[m];
    }
    major.all(from[m], from[m + 1], tile.first == 0);
    if constexpr (ACCUMULATE) major.finish(own.out + m * width);
  }
  if (ACCUMULATE && ends) unpack(own.out, tile, own.first, own.last, pass.out, pass.majors);
}

template <bool ACCUMULATE, bool DOT>
void run_panel(const ElementPass& pass, const Tile& tile, const Own& own, const Part& part) {
  static_assert(TILE_VECTORS == 4, "one case for every width of the last tile");
  switch (tile.vectors) {
    case 1: return run_panel<1, ACCUMULATE, DOT>(pass, tile, own, part);
    case 2: return run_panel<2, ACCUMULATE, DOT>(pass, tile, own, part);
    case 3: return run_panel<3, ACCUMULATE, DOT>(pass, tile, own, part);
    default: return run_panel<4, ACCUMULATE, DOT>(pass, tile, own, part);
  }
}

void run_panel(const ElementPass& pass, const Tile& tile, const Own& own, const Part& part) {
  if (pass.out && pass.sums) return run_panel<true, true>(pass, tile, own, part);
  if (pass.sums) return run_panel<false, true>(pass, tile, own, part);
  return run_panel<true, false>(pass, tile, own, part);
}

// The weights of a part, in the order of its entries.
void fetch(const ElementPass& pass, const Own& own, const Part& part, float* weights) {
  if (part.index.order) {
    gather(pass.values, part.index.order, part.begin, part.end, weights);
    return;
  }
  const i32* from = part.index.values + part.panel * pass.majors;
  for (i64 m = own.first; m < own.last; m++) {
    if (m + NEXT < own.last)
      for (i64 p = from[m + NEXT]; p < from[m + NEXT] + 3 * LINE; p += LINE)
        __builtin_prefetch(pass.values + p);
    const i64 to = part.starts[m];
    std::memcpy(weights + to, pass.values + from[m], (part.starts[m + 1] - to) * sizeof(float));
  }
}

// The sums over the samples of those packed minors whose turn thread k has.
void add_share(const ElementPass& pass, const Tile& tile, i64 k, i64 begin, i64 end,
               const float* packed) {
  for (i64 first = begin; first < end; first += SHARE)
    if ((first - begin) / SHARE % pass.threads == k)
      sum_lanes(packed + (first - begin) * tile.width(), tile.width(),
                least(SHARE, end - first), tile.first > 0, pass.packed_sums + first);
}

// The sums of a part that is worked on by rows.
void deliver(const ElementPass& pass, const Own& own, const Part& part) {
  if (const i32* slots = part.index.order) {
    for (i64 p = part.begin; p < part.end; p++) pass.sums[slots[p]] = own.sums[p];
    return;
  }
  const i32* to = part.index.values + part.panel * pass.majors;
  for (i64 m = own.first; m < own.last; m++) {
    const i64 from = part.starts[m];
    std::memcpy(pass.sums + to[m], own.sums + from, (part.starts[m + 1] - from) * sizeof(float));
  }
}

}  // namespace

bool run_in_panels(const ElementPass& pass) {
  const PanelIndex& index = *pass.panels;
  const i64 tiles = tiles_of(pass.batch), width = tile_at(0, pass.batch).width();
  const i64 entries = pass.ptr[pass.majors];
  i64 majors = 0, largest = 0;  // of a thread, and its entries of one panel
  for (i64 k = 0; k < pass.threads; k++) {
    const i64 first = first_major(pass, k, pass.threads);
    const i64 last = first_major(pass, k + 1, pass.threads);
    majors = most(majors, last - first);
    for (i64 panel = 0; panel < index.panels; panel++) {
      const i32* starts = index.starts + panel * pass.majors;
      largest = most(largest, starts[last] - starts[first]);
    }
  }
  // In one panel whose values lie side by side everything has their order, and weights in int8 are
  // read where they are. Otherwise, with several tiles, there is memory for the weights and sums of
  // all panels, else for one panel of every thread.
  const bool natural = (index.values && index.panels == 1) || pass.int8_values;
  const bool by_columns = index.inverse != nullptr;
  const i64 room = natural ? 0 : tiles > 1 ? entries : pass.threads * largest;
  const i64 weights_size = pass.out ? room : 0;
  const i64 sums_size = !pass.sums ? 0 : by_columns ? entries : room;
  const i64 held_size = pass.sums ? majors * width + APART : 0;
  const i64 out_size = pass.out ? majors * width + APART : 0;
  const i64 packed_size = index.size * width + APART;
  const i64 widened_size = int8_buffer_size(pass);
  Scratch scratch(Scratch::size_of<float>(weights_size) + Scratch::size_of<float>(sums_size) +
                  Scratch::size_of<float>(packed_size * pass.threads) +
                  Scratch::size_of<float>(widened_size * pass.threads) +
                  Scratch::size_of<float>(held_size * pass.threads) +
                  Scratch::size_of<float>(out_size * pass.threads));
  if (scratch.failed()) return false;
  float* const weights = scratch.take<float>(weights_size);
  float* const sums = scratch.take<float>(sums_size);
  float* const packed = scratch.take<float>(packed_size * pass.threads);
  float* const widened = scratch.take<float>(widened_size * pass.threads);
  float* const held = scratch.take<float>(held_size * pass.threads);
  float* const out = scratch.take<float>(out_size * pass.threads);

#pragma omp parallel num_threads(pass.threads)
  {
#pragma omp for schedule(static)
    for (int k = 0; k < pass.threads; k++) {
      Own own;
      own.first = first_major(pass, k, pass.threads);
      own.last = first_major(pass, k + 1, pass.threads);
      if (own.first == own.last && !pass.packed_sums) continue;
      own.packed = packed + k * packed_size;
      own.held = held + k * held_size;
      own.out = out + k * out_size;
      own.widened = widened + k * widened_size;
      own.weights = natural ? pass.values : weights;
      own.sums = natural ? pass.sums : sums;
      for (i64 t = 0; t < tiles; t++) {
        const Tile tile = tile_at(t, pass.batch);
        for (i64 panel = 0; panel < index.panels; panel++) {
          const Part part(pass, own, panel);
          if (!natural && t == 0) {
            // Not read or written before part.begin.
            float* const of_part = tiles > 1 ? weights : weights + k * largest - part.begin;
            if (pass.out) fetch(pass, own, part, of_part);
            own.weights = of_part;
            if (!by_columns) own.sums = tiles > 1 ? sums : sums + k * largest - part.begin;
          }
          const i64 begin = panel * index.size, end = least(pass.minors, begin + index.size);
          pack(pass.packed, tile, begin, end, own.packed);
          if (pass.packed_sums) add_share(pass, tile, k, begin, end, own.packed);
          run_panel(pass, tile, own, part);
          if (pass.sums && !natural && !by_columns && t + 1 == tiles) deliver(pass, own, part);
        }
      }
    }
    if (pass.sums && by_columns) {
#pragma omp for schedule(static)
      for (int k = 0; k < pass.threads; k++)
        gather(sums, index.inverse, entries * k / pass.threads, entries * (k + 1) / pass.threads,
               pass.sums);
    }
  }
  return true;
}

}  // namespace dynsparse
