// How the products with blocks are shared out among threads; what is computed is a Kernel's:
//
//   static constexpr i64 HEIGHT                  samples per tile
//   i64 padded(samples)                          samples that a tile has room for
//   void pack(from, first, count, begin, end, out)
//     Features [begin, end) of `count` samples: padded(count) * (end - begin) floats, of which
//     those of a feature range that starts at a multiple of a block lie together.
//   i64 step                                     majors that no two threads share
//   void outputs(pass, begin, end, tile, first, count)
//     Of majors [begin, end), for as many of them at once as is best.
//   void gradient(pass, row, dy, x, count, begin, end, add)
//     The blocks of one row in block columns [begin, end); dy and x hold just their features.
//   static constexpr bool SUMS                   whether it has
//   void sum(packed, count, features, add, sums)
//     The sums of packed features over `count` samples.
#pragma once

#include <atomic>

#include "base/caches.h"
#include "base/scratch.h"
#include "linear/block/block.h"

namespace dynsparse {

// Samples whose gradients are summed before they are added to dvalues.
constexpr i64 RANGE = 256;
// Floats of packed x that stay in the second-level cache: wider layers are cut into strips.
constexpr i64 CACHED = SECOND_LEVEL / sizeof(float);
// Features packed at a time: enough for the hardware to prefetch along the rows.
constexpr i64 RUN = 4 * LINE;

// Where each thread has samples enough, it packs tiles of its own and computes all majors for
// them: nobody waits, and what it packed lies in its own cache. Otherwise all threads pack
// together and share out the majors.
template <class Kernel>
bool run_outputs(const BlockPass& pass, const Kernel& kernel) {
  const i64 block = pass.block, inputs = pass.minors * block, nnz = pass.ptr[pass.majors];
  const i64 threads = pass.threads, fair = ceil_div(pass.batch, threads);
  const bool own = fair >= 16;
  // The same number of tiles for each thread.
  const i64 height = own ? kernel.padded(ceil_div(fair, ceil_div(fair, Kernel::HEIGHT)))
                         : least(Kernel::HEIGHT, kernel.padded(pass.batch));
  const i64 tiles = ceil_div(pass.batch, height), size = height * inputs;
  Scratch scratch(Scratch::size_of<float>(size * (own ? threads : tiles)));
  if (scratch.failed()) return false;
  float* packed = scratch.take<float>(size * (own ? threads : tiles));
  const auto count = [&](i64 t) { return least(height, pass.batch - t * height); };
  const auto outputs = [&](i64 begin, i64 end, const float* tile, i64 t) {
    kernel.outputs(pass, begin, least(pass.majors, end), tile, t * height, count(t));
  };

  const i64 units = ceil_div(pass.majors, kernel.step);
  const i64 per_task = units_per_task(units, height * nnz * block * block / VL, pass.threads);
  const i64 tasks = ceil_div(units, per_task);
  const i64 wide = ceil_div(2 * RUN, block) * block, strips = ceil_div(inputs, wide);
  std::atomic<int> started{0};

#pragma omp parallel num_threads(pass.threads)
  if (own) {
    float* tile = packed + started++ * size;
#pragma omp for schedule(dynamic)
    for (i64 t = 0; t < tiles; t++) {
      kernel.pack(pass.packed, t * height, count(t), 0, inputs, tile);
      outputs(0, pass.majors, tile, t);
    }
  } else {
#pragma omp for collapse(2) schedule(static)
    for (i64 t = 0; t < tiles; t++)
      for (i64 s = 0; s < strips; s++)
        kernel.pack(pass.packed, t * height, count(t), s * wide, least(inputs, (s + 1) * wide),
                    packed + t * size + kernel.padded(count(t)) * s * wide);
#pragma omp for collapse(2) schedule(dynamic)
    for (i64 t = 0; t < tiles; t++)
      for (i64 k = 0; k < tasks; k++)
        outputs(k * per_task * kernel.step, (k + 1) * per_task * kernel.step, packed + t * size, t);
  }
  return true;
}

// The first row that belongs to `part`, so that all parts have about as many blocks.
inline i64 row_of_part(const BlockPass& pass, i64 part, i64 parts) {
  const i64 wanted = pass.row_ptr[pass.minors] * part / parts;
  i64 low = 0, high = pass.minors;
  if (part == parts) return high;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (pass.row_ptr[middle] < wanted)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Each thread has a rectangle of the matrix of its own and packs what that needs for itself: to
// pack some of it twice costs less than to fetch what another core has just written.
template <class Kernel>
bool run_gradient(const BlockPass& pass, const Kernel& kernel) {
  const i64 block = pass.block;
  const int threads = pass.threads;
  int across = 1;
  for (int c = 2; c * c <= threads; c++)
    if (threads % c == 0) across = c;
  const int down = threads / across;
  float* const sums = Kernel::SUMS ? pass.packed_sums : nullptr;
  const i64 range = least(RANGE, pass.batch), height = kernel.padded(range);
  const i64 rows = ceil_div(RUN, block);
  const i64 strip = most(1, least(ceil_div(pass.majors, across), CACHED / (height * block)));
  const i64 x_size = strip * block * height, dy_size = rows * block * height;
  Scratch scratch(Scratch::size_of<float>((x_size + dy_size) * threads));
  if (scratch.failed()) return false;
  float* all = scratch.take<float>((x_size + dy_size) * threads);

#pragma omp parallel for num_threads(threads) schedule(static)
  for (int part = 0; part < threads; part++) {
    float *x = all + part * (x_size + dy_size), *dy = x + x_size;
    const i64 top = row_of_part(pass, part / across, down);
    const i64 bottom = row_of_part(pass, part / across + 1, down);
    const i64 left = pass.majors * (part % across) / across;
    const i64 right = pass.majors * (part % across + 1) / across;
    for (i64 base = 0; base < pass.batch; base += range) {
      const i64 count = least(range, pass.batch - base);
      for (i64 begin = left; begin < right; begin += strip) {
        const i64 end = least(right, begin + strip);
        kernel.pack_x(pass, base, count, begin * block, end * block, x);
        for (i64 first = top; first < bottom; first += rows) {
          const i64 last = least(bottom, first + rows);
          kernel.pack_dy(pass, base, count, first * block, last * block, dy);
          if constexpr (Kernel::SUMS)  // once, by a part that has columns
            if (sums && begin == left && part % across + 1 == across)
              kernel.sum(dy, count, (last - first) * block, base > 0, sums + first * block);
          for (i64 row = first; row < last; row++)
            kernel.gradient(pass, row, dy + (row - first) * block * kernel.padded(count), x, count,
                            begin, end, base > 0);
        }
      }
    }
  }
  return true;
}

template <class Kernel>
bool run_blocks(const BlockPass& pass, const Kernel& kernel) {
  return (!pass.out || run_outputs(pass, kernel)) && (!pass.dvalues || run_gradient(pass, kernel));
}

}  // namespace dynsparse
