#include "base/layout.h"

#include "base/bf16.h"

namespace dynsparse {
namespace {

// Features run contiguously: transpose squares of VL samples by VL features.
void pack_rows(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  const i64 width = tile.width();
  for (i64 lane = 0; lane < width; lane += VL) {
    const i64 samples = least(VL, tile.count - lane);
    const float* source = from.data + (tile.first + lane) * from.batch_stride;
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
    const float* source = from.data + tile.first + f * from.feature_stride;
    i64 lane = 0;
    for (; lane + VL <= tile.count; lane += VL) store(out + lane, load_unaligned(source + lane));
    if (lane < width) store(out + lane, load_first(source + lane, tile.count - lane));
  }
}

void pack_any(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  const i64 width = tile.width();
  for (i64 f = begin; f < end; f++, out += width) {
    const float* source =
        from.data + tile.first * from.batch_stride + f * from.feature_stride;
    for (i64 lane = 0; lane < width; lane++)
      out[lane] = lane < tile.count ? source[lane * from.batch_stride] : 0.0f;
  }
}

}  // namespace

void pack(const Matrix& from, const Tile& tile, i64 begin, i64 end, float* out) {
  if (from.low)
    pack_low(from, tile, begin, end, out);
  else if (from.feature_stride == 1)
    pack_rows(from, tile, begin, end, out);
  else if (from.batch_stride == 1)
    pack_columns(from, tile, begin, end, out);
  else
    pack_any(from, tile, begin, end, out);
}

void unpack(const float* from, const Tile& tile, i64 begin, i64 end, float* to, i64 features,
            bool low) {
  if (low) return unpack_low(from, tile, begin, end, to, features);
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

}  // namespace dynsparse
