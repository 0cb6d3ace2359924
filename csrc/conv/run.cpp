// How a pass is divided into tiles, and the tiles among threads.

#include "base/caches.h"
#include "base/scratch.h"
#include "conv/conv.h"

namespace dynsparse {
namespace {

i64 packed_rows(const ConvPass& pass, i64 high) {
  return (high - 1) * pass.source.step_y + pass.reach_y;
}
i64 packed_columns(const ConvPass& pass, i64 wide) {
  return (wide - 1) * pass.source.step_x + pass.reach_x;
}

// An odd number of vectors, so that planes do not fall on the same lines of the cache.
i64 plane_of(i64 rows, i64 columns) { return rows * columns | 1; }

Streams streams_of(const ConvPass& pass, i64 group) {
  const Tiling& t = pass.tiling;
  Streams streams = {};
  const i64 first = group * VL, all = pass.batch * t.strips;
  streams.count = least(VL, all - first);
  for (int l = 0; l < VL; l++) {
    const i64 stream = least(first + l, all - 1);
    streams.image[l] = stream / t.strips;
    streams.row[l] = stream % t.strips * t.strip;
  }
  return streams;
}

}  // namespace

void choose_tiling(ConvPass& pass) {
  Tiling& t = pass.tiling;
  // Strips of images, where images alone would leave lanes empty.
  i64 least_rows = -1;
  for (i64 strips = 1; strips <= least(VL, pass.height); strips++) {
    const i64 strip = ceil_div(pass.height, strips);
    const i64 rows = ceil_div(pass.batch * strips, VL) * strip;
    if (least_rows < 0 || rows < least_rows) {
      least_rows = rows;
      t.strips = strips;
      t.strip = strip;
    }
  }
  t.groups = ceil_div(pass.batch * t.strips, VL);
  // Tiles that stay in the second-level cache, with little packed twice and runs of some length.
  // Costs are in multiply-adds, as measured: what a vector costs that is packed or unpacked; what a
  // run costs beside its outputs; by how much slower it is past the second level.
  constexpr double PACKED = 6, BESIDE = 1.5;
  const double past = pass.block > 1 ? 1.2 : 1.6, speed = pass.block > 1 ? 0.4 : 1;
  const i64 room = SECOND_LEVEL * 3 / 4 / (VL * sizeof(float));
  const i64 features = pass.majors * pass.block, beside = pass.held.data ? features : 0;
  double best = -1;
  for (i64 across = 1; across <= pass.width; across++) {
    const i64 wide = ceil_div(pass.width, across);
    if (ceil_div(pass.width, wide) != across) continue;
    for (i64 down = 1; down <= t.strip; down++) {
      const i64 high = ceil_div(t.strip, down);
      if (ceil_div(t.strip, high) != down) continue;
      const i64 rows = packed_rows(pass, high), columns = packed_columns(pass, wide);
      const i64 size = pass.planes * plane_of(rows, columns) + beside * high * wide;
      const double run = 1 + BESIDE / least(8, wide);
      const double work = speed * pass.entries * high * wide * run * (size > room ? past : 1);
      const double packing = PACKED * (pass.planes * rows * columns + features * high * wide);
      const i64 tasks = t.groups * down * across;
      const double cost = ceil_div(tasks, pass.threads) * (work + packing);
      if (best < 0 || cost < best) {
        best = cost;
        t.high = high;
        t.wide = wide;
        t.down = down;
        t.across = across;
      }
    }
  }
  t.rows = packed_rows(pass, t.high);
  t.columns = packed_columns(pass, t.wide);
  t.plane = plane_of(t.rows, t.columns);
}

bool run_conv(const ConvPass& pass) {
  const Tiling& t = pass.tiling;
  const i64 features = pass.majors * pass.block, area = t.high * t.wide;
  const i64 packed_size = pass.planes * t.plane * VL;
  const i64 held_size = pass.held.data ? features * area * VL : 0;
  const i64 out_size = pass.out.data ? features * t.wide * VL : 0;
  const i64 sums_size = static_cast<i64>(pass.ptr[pass.majors]) * pass.block * pass.block;
  const i64 tasks = t.groups * t.down * t.across;
  Scratch scratch(Scratch::size_of<float>(packed_size * pass.threads) +
                  Scratch::size_of<float>(held_size * pass.threads) +
                  Scratch::size_of<float>(out_size * pass.threads));
  if (scratch.failed()) return false;
  float* packed = scratch.take<float>(packed_size * pass.threads);
  float* held = scratch.take<float>(held_size * pass.threads);
  float* outs = scratch.take<float>(out_size * pass.threads);

  // Each thread has tiles of its own, so that sums come in an order that no chance decides.
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (int k = 0; k < pass.threads; k++) {
    float* sums = pass.sums ? pass.sums + k * sums_size : nullptr;
    ConvTile tile = {packed + k * packed_size, held + k * held_size, outs + k * out_size, 0, 0};
    for (i64 task = tasks * k / pass.threads; task < tasks * (k + 1) / pass.threads; task++) {
      const Streams streams = streams_of(pass, task / (t.down * t.across));
      const i64 y = task / t.across % t.down * t.high, x = task % t.across * t.wide;
      tile.high = least(t.high, t.strip - y);
      tile.wide = least(t.wide, pass.width - x);
      const Window& s = pass.source;
      pack_images(pass.packed, pass.planes, streams, s.step_y, s.first_y + y * s.step_y,
                  s.first_x + x * s.step_x, packed_rows(pass, tile.high), t.columns, t.plane,
                  packed + k * packed_size);
      if (pass.held.data)
        pack_held(pass.held, pass.target, features, streams, pass.height, y, x, tile.high,
                  tile.wide, held + k * held_size);
      if (sums && pass.block > 1) conv_block_dots(pass, tile, sums);
      if (!pass.out.data && pass.block > 1) continue;
      for (i64 row = 0; row < tile.high; row++) {
        if (pass.block > 1)
          conv_blocks(pass, tile, row);
        else
          conv_elements(pass, tile, row, sums);
        if (pass.out.data)
          unpack_images(tile.out, pass.out, pass.target, features, streams, pass.height, y + row,
                        x, tile.wide);
      }
    }
  }
  return true;
}

}  // namespace dynsparse
