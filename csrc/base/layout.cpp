#include "base/layout.h"

#include "base/caches.h"

namespace dynsparse {
namespace {

// Floats between bfloat16 and tiles: a few cache lines of every sample in the first-level cache, so
// that no activations are kept in both types.
constexpr i64 BUFFER = FIRST_LEVEL * 3 / 4 / sizeof(float);

// Features run contiguously: transpose squares of VL samples by VL features.
void pack_rows(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  const i64 width = tile.width();
  for (i64 lane = 0; lane < width; lane += VL) {
    const i64 samples = least(VL, tile.count - lane);
    const float* source = from.data.f32 + (tile.first + lane) * from.batch_stride;
    float* target = out + lane;
    i64 f = begin;
    for (; f + VL <= end; f += VL, target += VL * width) {
      V square[VL];
      if (samples == VL) {
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++)
          square[i] = load_unaligned(source + i * from.batch_stride + f);
      } else {
        for (int i = 0; i < VL; i++)
          square[i] = i < samples ? load_unaligned(source + i * from.batch_stride + f) : V{};
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < VL; i++) store(target + i * width, square[i]);
    }
    if (f < end) {
      V square[VL];
      for (int i = 0; i < VL; i++)
        square[i] = i < samples ? load_first(source + i * from.batch_stride + f, end - f) : V{};
      transpose(square);
      for (i64 i = 0; i < end - f; i++) store(target + i * width, square[i]);
    }
  }
}

// Samples run contiguously: copy.
void pack_columns(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  const i64 width = tile.width();
  for (i64 f = begin; f < end; f++, out += width) {
    const float* source = from.data.f32 + tile.first + f * from.feature_stride;
    i64 lane = 0;
    for (; lane + VL <= tile.count; lane += VL) store(out + lane, load_unaligned(source + lane));
    if (lane < width) store(out + lane, load_first(source + lane, tile.count - lane));
  }
}

void pack_any(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  const i64 width = tile.width();
  for (i64 f = begin; f < end; f++, out += width) {
    const float* source = from.data.f32 + from.at(tile.first, f);
    for (i64 lane = 0; lane < width; lane++)
      out[lane] = lane < tile.count ? source[lane * from.batch_stride] : 0.0f;
  }
}

void pack_bf16(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  alignas(64) float buffer[BUFFER];
  const i64 run = most(1, BUFFER / tile.count / LINE * LINE);
  for (i64 f = begin; f < end; f += run, out += run * tile.width()) {
    const i64 some = least(run, end - f);
    const bf16* row = from.data.b16 + from.at(tile.first, f);
    for (i64 sample = 0; sample < tile.count; sample++, row += from.batch_stride)
      widen(row, from.feature_stride, some, buffer + sample * some);
    pack_rows({buffer, some, 1}, {0, tile.count, tile.vectors}, 0, some, out);
  }
}

void unpack_rows(const float* from, const Tile& tile, i64 begin, i64 end, float* to,
                 i64 features) {
  const i64 width = tile.width();
  for (i64 lane = 0; lane < tile.count; lane += VL) {
    const i64 samples = least(VL, tile.count - lane);
    float* target = to + (tile.first + lane) * features;
    const float* source = from + lane;
    for (i64 f = begin; f < end; f += VL, source += VL * width) {
      const i64 count = least(VL, end - f);
      V square[VL];
      if (count == VL) {
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) square[i] = load(source + i * width);
      } else {
        for (int i = 0; i < VL; i++) square[i] = i < count ? load(source + i * width) : V{};
      }
      transpose(square);
      if (count == VL && samples == VL) {
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) store_unaligned(target + i * features + f, square[i]);
      } else if (count == VL) {
        for (i64 i = 0; i < samples; i++) store_unaligned(target + i * features + f, square[i]);
      } else {
        for (i64 i = 0; i < samples; i++) store_first(target + i * features + f, square[i], count);
      }
    }
  }
}

void unpack_bf16(const float* from, const Tile& tile, i64 begin, i64 end, bf16* to, i64 features) {
  alignas(64) float buffer[BUFFER];
  const i64 run = most(1, BUFFER / tile.count / LINE * LINE);
  bf16* out = to + tile.first * features;
  for (i64 f = begin; f < end; f += run, from += run * tile.width()) {
    const i64 some = least(run, end - f);
    unpack_rows(from, {0, tile.count, tile.vectors}, 0, some, buffer, some);
    for (i64 sample = 0; sample < tile.count; sample++)
      narrow(buffer + sample * some, some, out + sample * features + f);
  }
}

}  // namespace

void pack(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  if (from.data.b16)
    pack_bf16(from, tile, begin, end, out);
  else if (from.feature_stride == 1)
    pack_rows(from, tile, begin, end, out);
  else if (from.batch_stride == 1)
    pack_columns(from, tile, begin, end, out);
  else
    pack_any(from, tile, begin, end, out);
}

void sum_lanes(const float* packed, i64 width, i64 count, bool add, float* sums) {
  for (i64 f = 0; f < count; f += VL) {
    const i64 some = least(VL, count - f);
    V leaves[VL] = {};
    for (i64 i = 0; i < some; i++, packed += width) {
      leaves[i] = load(packed);
      for (i64 lane = VL; lane < width; lane += VL) leaves[i] += load(packed + lane);
    }
    const V here = sums_of<VL>(leaves);
    store_first(sums + f, add ? load_first(sums + f, some) + here : here, some);
  }
}

void unpack(const float* from, const Tile& tile, i64 begin, i64 end, const Output& to,
            i64 features) {
  if (to.b16)
    unpack_bf16(from, tile, begin, end, to.b16, features);
  else
    unpack_rows(from, tile, begin, end, to.f32, features);
}

}  // namespace dynsparse
