// From images to streams and back.

#include "conv/conv.h"

namespace dynsparse {
namespace {

// Where the lanes of one row are; null: nowhere.
struct Row {
  float* lane[VL];
};

// VL columns from `x` on of every lane, of which `count` are there, become vectors of lanes.
void turn_columns(const Row& row, i64 x, i64 count, float* out, i64 stride) {
  V square[VL];
#pragma GCC unroll 16
  for (int l = 0; l < VL; l++)
    square[l] = !row.lane[l] ? V{}
                : count == VL ? load_unaligned(row.lane[l] + x)
                              : load_first(row.lane[l] + x, count);
  transpose(square);
  if (count == VL) {
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) store(out + i * stride, square[i]);
  } else {
    for (i64 i = 0; i < count; i++) store(out + i * stride, square[i]);
  }
}

void turn_back(const Row& row, i64 x, i64 count, const float* from, i64 stride) {
  V square[VL];
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) square[i] = i < count ? load(from + i * stride) : V{};
  transpose(square);
  for (int l = 0; l < VL; l++) {
    if (!row.lane[l]) continue;
    if (count == VL)
      store_unaligned(row.lane[l] + x, square[l]);
    else
      store_first(row.lane[l] + x, square[l], count);
  }
}

Row row_of(const Images& images, const Streams& streams, i64 step, i64 y) {
  Row row;
  for (int l = 0; l < VL; l++) {
    const i64 at = y + streams.row[l] * step;
    const bool there = l < streams.count && at >= 0 && at < images.height;
    row.lane[l] = there ? images.data + streams.image[l] * images.n + at * images.h : nullptr;
  }
  return row;
}

Row moved(const Row& row, i64 by) {
  Row to;
  for (int l = 0; l < VL; l++) to.lane[l] = row.lane[l] ? row.lane[l] + by : nullptr;
  return to;
}

// The lanes of one place, plane by plane.
void turn_planes(const Images& from, const Row& row, i64 planes, float* out, i64 stride) {
  if (from.c == 1) {
    for (i64 c = 0; c < planes; c += VL)
      turn_columns(row, c, least(VL, planes - c), out + c * stride, stride);
    return;
  }
  for (i64 c = 0; c < planes; c++)
    for (int l = 0; l < VL; l++)
      out[c * stride + l] = row.lane[l] ? row.lane[l][c * from.c] : 0.0f;
}

}  // namespace

void pack_images(const Images& from, i64 planes, const Streams& streams, i64 step_y, i64 y,
                 i64 x, i64 rows, i64 columns, i64 stride, float* out) {
  const i64 first = least(columns, most(0, -x));
  const i64 last = most(first, least(columns, from.width - x));
  for (i64 r = 0; r < rows; r++) {
    const Row row = row_of(from, streams, step_y, y + r);
    float* to = out + r * columns * VL;
    if (from.w == 1) {
      for (i64 c = 0; c < planes; c++) {
        float* line = to + c * stride * VL;
        for (i64 i = 0; i < first; i++) store(line + i * VL, V{});
        for (i64 i = last; i < columns; i++) store(line + i * VL, V{});
        const Row at = moved(row, c * from.c + x);
        for (i64 i = first; i < last; i += VL)
          turn_columns(at, i, least(VL, last - i), line + i * VL, VL);
      }
      continue;
    }
    for (i64 i = 0; i < columns; i++) {
      float* place = to + i * VL;
      if (i < first || i >= last)
        for (i64 c = 0; c < planes; c++) store(place + c * stride * VL, V{});
      else
        turn_planes(from, moved(row, (x + i) * from.w), planes, place, stride * VL);
    }
  }
}

namespace {

// The lanes of row y of the grid, in images that have it at the window.
Row grid_row(const Images& images, const Window& window, const Streams& streams, i64 height,
             i64 y) {
  Row row;
  for (int l = 0; l < VL; l++) {
    const i64 at = streams.row[l] + y;
    row.lane[l] = l < streams.count && at < height
                      ? images.data + streams.image[l] * images.n +
                            (window.first_y + at * window.step_y) * images.h
                      : nullptr;
  }
  return row;
}

}  // namespace

void unpack_images(const float* from, const Images& to, const Window& window, i64 planes,
                   const Streams& streams, i64 height, i64 y, i64 x, i64 wide) {
  const Row row = grid_row(to, window, streams, height, y);
  const i64 first = window.first_x + x * window.step_x, step = window.step_x;
  if (to.w == 1 && step == 1) {
    for (i64 c = 0; c < planes; c++) {
      const Row at = moved(row, c * to.c + first);
      for (i64 i = 0; i < wide; i += VL)
        turn_back(at, i, least(VL, wide - i), from + (c * wide + i) * VL, VL);
    }
    return;
  }
  for (i64 i = 0; i < wide; i++) {
    const Row at = moved(row, (first + i * step) * to.w);
    if (to.c == 1) {
      for (i64 c = 0; c < planes; c += VL)
        turn_back(at, c, least(VL, planes - c), from + (c * wide + i) * VL, wide * VL);
      continue;
    }
    for (i64 c = 0; c < planes; c++)
      for (int l = 0; l < VL; l++)
        if (at.lane[l]) at.lane[l][c * to.c] = from[(c * wide + i) * VL + l];
  }
}

void pack_held(const Images& from, const Window& window, i64 planes, const Streams& streams,
               i64 height, i64 y, i64 x, i64 high, i64 wide, float* out) {
  const i64 stride = high * wide;
  for (i64 r = 0; r < high; r++) {
    const Row row = grid_row(from, window, streams, height, y + r);
    const i64 first = window.first_x + x * window.step_x;
    float* to = out + r * wide * VL;
    if (from.w == 1 && window.step_x == 1) {
      for (i64 c = 0; c < planes; c++) {
        const Row at = moved(row, c * from.c + first);
        for (i64 i = 0; i < wide; i += VL)
          turn_columns(at, i, least(VL, wide - i), to + (c * stride + i) * VL, VL);
      }
      continue;
    }
    for (i64 i = 0; i < wide; i++)
      turn_planes(from, moved(row, (first + i * window.step_x) * from.w), planes, to + i * VL,
                  stride * VL);
  }
}

}  // namespace dynsparse
