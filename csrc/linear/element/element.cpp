#include "linear/element/element.h"

#include "base/caches.h"
#include "base/scratch.h"
#include "linear/element/major.h"
#include "linear/element/panels.h"

namespace dynsparse {
namespace {

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
  // The first n < VL lanes.
  DYNSPARSE_INLINE void put_few(i64 p, V sum, i64 n) const {
    if (!first) sum += load_first(partial + p, n);
    if (last && order) {
      alignas(64) float lanes[VL];
      store(lanes, sum);
      for (i64 i = 0; i < n; i++) final[order[p + i]] = lanes[i];
    } else {
      store_first(partial + p, sum, n);
    }
  }
};

template <int NV, bool ACCUMULATE, bool DOT>
struct Indexed : Major<NV, ACCUMULATE, DOT, i32> {
  DYNSPARSE_INLINE void all(i64 p, i64 end, const Sums& sums) {
    if constexpr (!DOT) {
      for (; p + 2 <= end; p += 2) this->template entries<2>(p);
      if (p < end) this->template entry<0>(p);
    } else {
      for (; p + VL <= end; p += VL) sums.put(p, this->template entries<VL>(p));
      if (p < end) sums.put_few(p, this->rest(p, end), end - p);
    }
  }
};

// Where entry p of major m has the weight at p.
DYNSPARSE_INLINE const float* weights_of(const ElementPass& pass, i64 m, const float* weights,
                                         float* widened) {
  if (!pass.int8_values) return weights;
  const i64 first = pass.ptr[m];
  widen(pass.int8_values + first, pass.ptr[m + 1] - first, pass.scale[m], widened);
  return widened - first;
}

// What a thread works with.
struct Own {
  const float* weights;
  float* packed;  // [minor][lane]
  float* held;    // [major of a strip][lane]
  float* out;     // likewise
  float* widened;  // the weights of a major that come in int8
};

// Majors whose activations come from the natural layout, and go back to it, at once: long runs of
// every sample's row, where a few cache lines of each would wait for memory one by one.
constexpr i64 STRIP = 256;

template <int NV, bool ACCUMULATE, bool DOT>
void run_strip(const ElementPass& pass, const Own& own, const Tile& tile, const Sums& sums,
               i64 begin, i64 end) {
  constexpr int width = NV * VL;
  if constexpr (DOT) {
    pack(pass.held, tile, begin, end, own.held);
    if (pass.held_sums)
      sum_lanes(own.held, width, end - begin, !sums.first, pass.held_sums + begin);
  }
  for (i64 m = begin; m < end; m++) {
    Indexed<NV, ACCUMULATE, DOT> major;
    major.tile = own.packed;
    major.idx = pass.idx;
    major.weights = weights_of(pass, m, own.weights, own.widened);
    if constexpr (DOT) major.hold(own.held + (m - begin) * width);
    if constexpr (ACCUMULATE) major.start(broadcast(pass.bias ? pass.bias[m] : 0.0f));
    major.all(pass.ptr[m], pass.ptr[m + 1], sums);
    if constexpr (ACCUMULATE) major.finish(own.out + (m - begin) * width);
  }
  if constexpr (ACCUMULATE) unpack(own.out, tile, begin, end, pass.out, pass.majors);
}

template <bool ACCUMULATE, bool DOT>
void run_strip(const ElementPass& pass, const Own& own, const Tile& tile, const Sums& sums,
               i64 begin, i64 end) {
  static_assert(TILE_VECTORS == 4, "one case for every width of the last tile");
  switch (tile.vectors) {
    case 1: return run_strip<1, ACCUMULATE, DOT>(pass, own, tile, sums, begin, end);
    case 2: return run_strip<2, ACCUMULATE, DOT>(pass, own, tile, sums, begin, end);
    case 3: return run_strip<3, ACCUMULATE, DOT>(pass, own, tile, sums, begin, end);
    default: return run_strip<4, ACCUMULATE, DOT>(pass, own, tile, sums, begin, end);
  }
}

// Narrower tiles where full ones would not stay in the second-level cache. Dot products pay more
// for that, as their lanes are folded once per entry and tile, and so turn to it later.
template <bool DOT>
i64 samples_per_tile(i64 minors) {
  constexpr i64 CACHED = SECOND_LEVEL / sizeof(float);
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
  const i64 strip_size = samples * least(STRIP, pass.majors) + APART;
  const bool permuted = ACCUMULATE && pass.order, partial_sums = DOT && pass.order && tiles > 1;
  // Every thread packs the tiles it uses for itself: fetching what another has packed from its
  // cache takes longer. Accumulation splits the tiles where they come out even, else the majors,
  // as dot products always do: their sums run over all tiles.
  const bool by_tiles = !DOT && (tiles % pass.threads == 0 || tiles >= 4 * pass.threads);
  const i64 held_size = DOT ? strip_size : 0, out_size = ACCUMULATE ? strip_size : 0;
  const i64 widened_size = int8_buffer_size(pass);
  Scratch scratch(Scratch::size_of<float>(tile_size * pass.threads) +
                  Scratch::size_of<float>(held_size * pass.threads) +
                  Scratch::size_of<float>(out_size * pass.threads) +
                  Scratch::size_of<float>(widened_size * pass.threads) +
                  Scratch::size_of<float>(permuted ? nnz : 0) +
                  Scratch::size_of<float>(partial_sums ? nnz : 0));
  if (scratch.failed()) return false;
  float* packed = scratch.take<float>(tile_size * pass.threads);
  float* held = scratch.take<float>(held_size * pass.threads);
  float* out = scratch.take<float>(out_size * pass.threads);
  float* widened = scratch.take<float>(widened_size * pass.threads);
  float* gathered = scratch.take<float>(permuted ? nnz : 0);
  float* partial = pass.order ? scratch.take<float>(partial_sums ? nnz : 0) : pass.sums;
  const float* weights = permuted ? gathered : pass.values;

#pragma omp parallel num_threads(pass.threads)
  {
    if (permuted && by_tiles) {
#pragma omp for schedule(static)
      for (i64 p = 0; p < nnz; p++) gathered[p] = pass.values[pass.order[p]];
    }
#pragma omp for schedule(static)
    for (int k = 0; k < pass.threads; k++) {
      const i64 first = by_tiles ? 0 : first_major(pass, k, pass.threads);
      const i64 last = by_tiles ? pass.majors : first_major(pass, k + 1, pass.threads);
      if (first == last && !pass.packed_sums) continue;
      if (permuted && !by_tiles)
        gather(pass.values, pass.order, pass.ptr[first], pass.ptr[last], gathered);
      const Own own = {weights, packed + k * tile_size, held + k * held_size, out + k * out_size,
                       widened + k * widened_size};
      for (i64 t = by_tiles ? k : 0; t < tiles; t += by_tiles ? pass.threads : 1) {
        const Tile tile = tile_at(t, pass.batch, samples);
        for (i64 begin = 0; begin < pass.minors; begin += SHARE) {
          const i64 end = least(pass.minors, begin + SHARE);
          float* strip = own.packed + begin * tile.width();
          pack(pass.packed, tile, begin, end, strip);
          if (DOT && pass.packed_sums && begin / SHARE % pass.threads == k)
            sum_lanes(strip, tile.width(), end - begin, t > 0, pass.packed_sums + begin);
        }
        const Sums sums = {partial, pass.order, pass.sums, t == 0, t + 1 == tiles};
        for (i64 begin = first; begin < last; begin += STRIP)
          run_strip<ACCUMULATE, DOT>(pass, own, tile, sums, begin, least(last, begin + STRIP));
      }
    }
  }
  return true;
}

// One sample in float32: it stays in the first-level cache, where a tile, padded to a vector of
// samples, may not, and no lane is wasted.
template <bool ORDERED, class Value>
float sum_of_major(const ElementPass& pass, const Value* values, i64 m, const float* x) {
  const i32* idx = pass.idx;
  const auto weight = [&](i64 p) {
    return static_cast<float>(values[ORDERED ? pass.order[p] : p]);
  };
  V acc = {};
  i64 p = pass.ptr[m];
  const i64 end = pass.ptr[m + 1];
  for (; p + VL <= end; p += VL) {
    V lanes, weights;
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) lanes[i] = x[idx[p + i]];
    if constexpr (ORDERED) {
#pragma GCC unroll 16
      for (int i = 0; i < VL; i++) weights[i] = weight(p + i);
    } else {
      weights = load_unaligned(values + p);
    }
    acc += weights * lanes;
  }
  float sum = 0.0f;
  for (; p < end; p++) sum += weight(p) * x[idx[p]];
  for (int i = 0; i < VL; i++) sum += acc[i];
  return sum;
}

template <bool ORDERED, class Value>
void run_sample(const ElementPass& pass, const Value* values, const float* x) {
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (int k = 0; k < pass.threads; k++) {
    const i64 end = first_major(pass, k + 1, pass.threads);
    for (i64 m = first_major(pass, k, pass.threads); m < end; m++)
      pass.out.f32[m] = sum_of_major<ORDERED>(pass, values, m, x) *
                            (pass.int8_values ? pass.scale[m] : 1.0f) +
                        (pass.bias ? pass.bias[m] : 0.0f);
  }
}

bool run_sample(const ElementPass& pass) {
  const i64 stride = pass.packed.feature_stride;
  Scratch scratch(Scratch::size_of<float>(stride == 1 ? 0 : pass.minors));
  if (scratch.failed()) return false;
  const float* x = pass.packed.data.f32;
  if (stride != 1) {
    float* copy = scratch.take<float>(pass.minors);
    for (i64 i = 0; i < pass.minors; i++) copy[i] = x[i * stride];
    x = copy;
  }
  if (pass.int8_values)
    run_sample<false>(pass, pass.int8_values, x);
  else if (pass.order)
    run_sample<true>(pass, pass.values, x);
  else
    run_sample<false>(pass, pass.values, x);
  return true;
}

}  // namespace

i64 int8_buffer_size(const ElementPass& pass) {
  if (!pass.int8_values) return 0;
  i64 longest = 0;
  for (i64 m = 0; m < pass.majors; m++) longest = most(longest, pass.ptr[m + 1] - pass.ptr[m]);
  return longest + APART;
}

void widen(const int8_t* values, i64 count, float scale, float* out) {
  const auto vector = [&](i64 i) {
    store_unaligned(out + i, load_unaligned(values + i) * broadcast(scale));
  };
  for (i64 i = 0; i + VL <= count; i += VL) vector(i);
  if (count >= VL)
    vector(count - VL);
  else
    for (i64 i = 0; i < count; i++) out[i] = static_cast<float>(values[i]) * scale;
}

// The loop has a function of its own to be compiled for its pointers alone.
void gather(const float* __restrict from, const i32* __restrict order, i64 begin, i64 end,
            float* __restrict out) {
  for (i64 p = begin; p < end; p++) out[p] = from[order[p]];
}

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

bool run(ElementPass pass, const void* panels) {
  PanelIndex index;
  if (panels) {
    index = panel_index(panels);
    pass.panels = &index;
  }
  if (pass.batch == 1 && !pass.sums && pass.packed.data.f32 && pass.out.f32)
    return run_sample(pass);
  if (pass.panels) return run_in_panels(pass);
  if (pass.out && pass.sums) return run_pass<true, true>(pass);
  if (pass.sums) return run_pass<false, true>(pass);
  return run_pass<true, false>(pass);
}

}  // namespace dynsparse
