#include "element.h"

#include "element_panels.h"
#include "scratch.h"

namespace dynsparse {
namespace {

// Majors per chunk: two cache lines per sample, 8 KiB of activations at most.
constexpr int CHUNK = 2 * LINE;
// Minors packed per task.
constexpr i64 STRIP = 128;

// What the dot products of a tile become: stored, or added to those of the tiles before; in the
// end written to where the values are.
struct Sums {
  float* partial;    // [nnz], in the order of the index
  const i32* order;  // null: partial is the final place
  float* final;
  bool first;
  bool last;

  DYNSPARSE_INLINE void put(i64 p, V sum) const {
    if (!first) sum += load_unaligned(partial + p);
    if (last && order) {
      alignas(64) float lanes[VL];
      store(lanes, sum);
#pragma GCC unroll 16
      for (int i = 0; i < VL; i++) final[order[p + i]] = lanes[i];
    } else {
      store_unaligned(partial + p, sum);
    }
  }
  // The first n <= 4 lanes.
  DYNSPARSE_INLINE void put_few(i64 p, V sum, int n) const {
    alignas(64) float lanes[VL];
    store(lanes, sum);
    for (int i = 0; i < n; i++) {
      float s = first ? lanes[i] : lanes[i] + partial[p + i];
      if (last && order)
        final[order[p + i]] = s;
      else
        partial[p + i] = s;
    }
  }
};

// One major and one tile: activations, accumulators and the entries being worked on.
template <int NV, bool ACCUMULATE, bool DOT>
struct Major {
  // Neighbouring entries add to different accumulators, where registers allow it: a chain of
  // dependent multiply-adds would take four cycles per entry.
  static constexpr int SETS = VL == 16 || !DOT ? 2 : 1;

  V held[NV];
  V sum[SETS][NV];
  const float* tile;
  const i32* idx;
  const float* weights;

  // Entry p: accumulates, and returns the lanes of its dot product.
  template <int SET>
  DYNSPARSE_INLINE V entry(i64 p) {
    const float* x = tile + static_cast<i64>(idx[p]) * (NV * VL);
    V weight{}, dot{};
    if constexpr (ACCUMULATE) weight = broadcast(weights[p]);
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      V lanes = load(x + j * VL);
      if constexpr (ACCUMULATE && DOT) pin(lanes);
      if constexpr (ACCUMULATE) sum[SET % SETS][j] += weight * lanes;
      if constexpr (DOT) dot = j == 0 ? held[j] * lanes : dot + held[j] * lanes;
    }
    return dot;
  }

  // N entries from p on, folded as far as a tree of N leaves goes.
  template <int N, int SET = 0>
  DYNSPARSE_INLINE V entries(i64 p) {
    if constexpr (N == 1) {
      return entry<SET>(p);
    } else {
      V a = entries<N / 2, 0>(p);
      V b = entries<N / 2, 1>(p + N / 2);
      if constexpr (N == 2) return fold1(a, b);
      else if constexpr (N == 4) return fold2(a, b);
      else return fold_quarters(a, b);
    }
  }

  // The dot products of 1 to 3 entries, in the first lanes.
  DYNSPARSE_INLINE V rest(i64 p, i64 n) {
    V a = entry<0>(p);
    V b = n > 1 ? entry<1>(p + 1) : V{};
    V c = n > 2 ? entry<0>(p + 2) : V{};
    return sum_quarters(fold2(fold1(a, b), fold1(c, V{})));
  }

  DYNSPARSE_INLINE void all(i64 p, i64 end, const Sums& sums) {
    if constexpr (!DOT) {
      for (; p + 2 <= end; p += 2) {
        entry<0>(p);
        entry<1>(p + 1);
      }
      if (p < end) entry<0>(p);
    } else {
      for (; p + VL <= end; p += VL) sums.put(p, entries<VL>(p));
      if constexpr (VL > 4)
        for (; p + 4 <= end; p += 4) sums.put_few(p, sum_quarters(entries<4>(p)), 4);
      if (p < end) sums.put_few(p, rest(p, end - p), static_cast<int>(end - p));
    }
  }
};

template <int NV, bool ACCUMULATE, bool DOT>
void chunk(const ElementPass& pass, const float* weights, const Tile& tile, const float* packed,
           const Sums& sums, i64 begin, i64 end) {
  constexpr int width = NV * VL;
  alignas(64) float held[DOT ? CHUNK * width : 1];
  alignas(64) float out[ACCUMULATE ? CHUNK * width : 1];
  if constexpr (DOT) pack(pass.held, tile, begin, end, held);
  for (i64 m = begin; m < end; m++) {
    Major<NV, ACCUMULATE, DOT> major;
    major.tile = packed;
    major.idx = pass.idx;
    major.weights = weights;
    V start = broadcast(pass.bias ? pass.bias[m] : 0.0f);
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      major.sum[0][j] = start;
      if constexpr (major.SETS > 1) major.sum[1][j] = V{};
      if constexpr (DOT) major.held[j] = load(held + (m - begin) * width + j * VL);
    }
    major.all(pass.ptr[m], pass.ptr[m + 1], sums);
    if constexpr (ACCUMULATE) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) {
        if constexpr (major.SETS > 1) major.sum[0][j] += major.sum[1][j];
        store(out + (m - begin) * width + j * VL, major.sum[0][j]);
      }
    }
  }
  if constexpr (ACCUMULATE) unpack(out, tile, begin, end, pass.out, pass.majors, pass.packed.low);
}

template <bool ACCUMULATE, bool DOT>
void chunk(const ElementPass& pass, const float* weights, const Tile& tile, const float* packed,
           const Sums& sums, i64 begin, i64 end) {
  static_assert(TILE_VECTORS == 4, "one case for every width of the last tile");
  switch (tile.vectors) {
    case 1: return chunk<1, ACCUMULATE, DOT>(pass, weights, tile, packed, sums, begin, end);
    case 2: return chunk<2, ACCUMULATE, DOT>(pass, weights, tile, packed, sums, begin, end);
    case 3: return chunk<3, ACCUMULATE, DOT>(pass, weights, tile, packed, sums, begin, end);
    default: return chunk<4, ACCUMULATE, DOT>(pass, weights, tile, packed, sums, begin, end);
  }
}

// Narrower tiles where full ones would not stay in the second-level cache. Dot products pay more
// for that, as their lanes are folded once per entry and tile, and so turn to it later.
template <bool DOT>
i64 samples_per_tile(i64 minors) {
  constexpr i64 CACHED = (1 << 20) / sizeof(float);
  i64 samples = TILE;
  if (!DOT && 2 * samples * minors > CACHED) samples /= 2;
  while (samples > VL && samples * minors > CACHED) samples /= 2;
  return samples;
}

template <bool ACCUMULATE, bool DOT>
bool run_pass(const ElementPass& pass) {
  const i64 samples = samples_per_tile<DOT>(pass.minors);
  const i64 tiles = tiles_of(pass.batch, samples);
  const i64 nnz = pass.ptr[pass.majors];
  const i64 tile_size = samples * pass.minors;
  const bool gather = ACCUMULATE && pass.order, partial_sums = DOT && pass.order && tiles > 1;
  // Every thread packs the tiles it uses for itself: fetching what another has packed from its
  // cache takes longer. Accumulation splits the tiles where they come out even, else the majors,
  // as dot products always do: their sums run over all tiles.
  const bool by_tiles = !DOT && (tiles % pass.threads == 0 || tiles >= 4 * pass.threads);
  Scratch scratch(Scratch::size_of<float>(tile_size * pass.threads) +
                  Scratch::size_of<float>(gather ? nnz : 0) +
                  Scratch::size_of<float>(partial_sums ? nnz : 0));
  if (scratch.failed()) return false;
  float* packed = scratch.take<float>(tile_size * pass.threads);
  float* gathered = scratch.take<float>(gather ? nnz : 0);
  float* partial = pass.order ? scratch.take<float>(partial_sums ? nnz : 0) : pass.sums;
  const float* weights = gather ? gathered : pass.values;

#pragma omp parallel num_threads(pass.threads)
  {
    if (gather && by_tiles) {
#pragma omp for schedule(static)
      for (i64 p = 0; p < nnz; p++) gathered[p] = pass.values[pass.order[p]];
    }
#pragma omp for schedule(static)
    for (int k = 0; k < pass.threads; k++) {
      const i64 first = by_tiles ? 0 : first_major(pass, k, pass.threads);
      const i64 last = by_tiles ? pass.majors : first_major(pass, k + 1, pass.threads);
      if (first == last) continue;
      if (gather && !by_tiles)
        for (i64 p = pass.ptr[first]; p < pass.ptr[last]; p++)
          gathered[p] = pass.values[pass.order[p]];
      float* own = packed + k * tile_size;
      for (i64 t = by_tiles ? k : 0; t < tiles; t += by_tiles ? pass.threads : 1) {
        const Tile tile = tile_at(t, pass.batch, samples);
        for (i64 begin = 0; begin < pass.minors; begin += STRIP)
          pack(pass.packed, tile, begin, least(pass.minors, begin + STRIP),
               own + begin * tile.width());
        const Sums sums = {partial, pass.order, pass.sums, t == 0, t + 1 == tiles};
        for (i64 begin = first; begin < last; begin += CHUNK)
          chunk<ACCUMULATE, DOT>(pass, weights, tile, own, sums, begin, least(last, begin + CHUNK));
      }
    }
  }
  return true;
}

}  // namespace

i64 first_major(const ElementPass& pass, i64 k, i64 parts) {
  // What a major costs beside its entries, in entries.
  constexpr i64 FIXED = 16;
  const i64 all = pass.ptr[pass.majors] + FIXED * pass.majors;
  i64 low = 0, high = ceil_div(pass.majors, CHUNK);
  while (low < high) {
    const i64 middle = (low + high) / 2, major = middle * CHUNK;
    if ((pass.ptr[major] + FIXED * major) * parts < all * k)
      low = middle + 1;
    else
      high = middle;
  }
  return least(pass.majors, low * CHUNK);
}

bool run(const ElementPass& pass) {
  if (panels_pay(pass)) {
    const Outcome outcome = run_in_panels(pass);
    if (outcome != Outcome::UNORDERED) return outcome == Outcome::DONE;
  }
  if (pass.out && pass.sums) return run_pass<true, true>(pass);
  if (pass.sums) return run_pass<false, true>(pass);
  return run_pass<true, false>(pass);
}

}  // namespace dynsparse
