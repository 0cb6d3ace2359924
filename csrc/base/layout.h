// From the natural layout [batch, features] to batch tiles [tile][feature][lane] and back.
//
// The batch is the vector dimension of the kernels: a tile holds up to TILE samples, feature by
// feature. The last tile is only as many vectors wide as its samples need; lanes past the batch
// hold zeros.
#pragma once

#include "base/bf16.h"
#include "base/simd.h"

namespace dynsparse {

// Vectors and samples per full tile: four accumulators hide the latency of a multiply-add.
constexpr int TILE_VECTORS = 4;
constexpr int TILE = TILE_VECTORS * VL;

// A [batch, features] tensor of either type and any strides (in elements).
struct Matrix {
  Input data;
  i64 batch_stride = 0;
  i64 feature_stride = 0;

  i64 at(i64 sample, i64 feature) const {
    return sample * batch_stride + feature * feature_stride;
  }
};

// The samples of one tile: `count` of them from `first` on, padded to `vectors` vectors.
struct Tile {
  i64 first;
  i64 count;
  int vectors;
  i64 width() const { return static_cast<i64>(vectors) * VL; }
};

// How many of `units` equal pieces of work one task takes: many where they are small, but enough
// tasks for an even load. `work` is the number of vector multiply-adds of all units.
inline i64 units_per_task(i64 units, i64 work, int threads) {
  constexpr i64 WORTHWHILE = 1 << 14;
  const i64 even = ceil_div(units, threads * 8);
  return most(1, least(even, WORTHWHILE * units / (work + 1)));
}

// `full`: the samples of a full tile.
inline Tile tile_at(i64 index, i64 batch, i64 full = TILE) {
  const i64 first = index * full, count = least(full, batch - first);
  return {first, count, static_cast<int>(ceil_div(count, VL))};
}
inline i64 tiles_of(i64 batch, i64 full = TILE) { return ceil_div(batch, full); }

// Features [begin, end) of the tile's samples: out[(f - begin) * width + lane].
void pack(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out);

// The sums of `count` packed features over the samples of a tile, `width` lanes wide: stored, or
// added to what is there.
void sum_lanes(const float* packed, i64 width, i64 count, bool add, float* sums);

// The reverse, into a contiguous [batch, features] tensor, rounded where that is bfloat16; only
// real samples are written.
void unpack(const float* from, const Tile& tile, i64 begin, i64 end, const Output& to,
            i64 features);

}  // namespace dynsparse
