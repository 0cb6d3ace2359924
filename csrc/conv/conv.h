// Convolutions with sparse weights, without an unfolded input.
//
// One pass serves all three products, as with linear layers: majors own outputs, minors are what
// their entries point to. Minors are planes of an image here, and an entry points to a plane
// shifted by its tap.
//
//   pass                     majors  packed  accumulates            dots with
//   forward                  out     X       Y[m] += w * X[i]       -
//   grad_input, grad_weight  in      dY      dX[m] += w * dY[i]     X[m]
//
// Vectors hold streams: images, or strips of images where there are few. So a shift by any tap is a
// whole number of vectors, whatever the stride and the width of the image, and nothing is computed
// that does not count. What a tile of outputs reads is packed once, [plane][row][column][stream],
// with zeros where the image ends.
//
// With a stride the gradient of the input falls into phases, inputs of the same remainder: each
// sees taps of its own, and is a pass without stride.
#pragma once

#include "base/simd.h"

namespace dynsparse {

// Planes of a batch of images, at any strides.
struct Images {
  float* data = nullptr;
  i64 n = 0, c = 0, h = 0, w = 0;  // strides
  i64 height = 0, width = 0;
};

// Where something lies in images: row y, column x of the grid of outputs is row first_y + y *
// step_y, column first_x + x * step_x.
struct Window {
  i64 first_y, first_x, step_y, step_x;
};

// How outputs are divided: into streams of `strip` rows of an image, VL of which go together, and
// each group into tiles.
struct Tiling {
  i64 strips, strip;  // strips per image, rows of a strip
  i64 groups;         // of VL streams
  i64 high, wide;     // outputs of a tile
  i64 down, across;   // tiles of a strip
  i64 rows, columns;  // of a plane as it is packed
  i64 plane;          // vectors from plane to plane
};

struct ConvPass {
  i64 batch;
  i64 height, width;  // of the grid of outputs
  int threads;

  Images packed;  // read at `source` and, beyond, shifted by taps
  i64 planes;
  Window source;
  i64 reach_y, reach_x;  // largest shift + 1

  Images out;   // [majors * block] planes, or data null: not computed
  Images held;  // of as many planes, or data null: no dots
  Window target;  // where both lie

  i64 majors, block;
  i64 entries = 0;  // elements, about: what the choice of tiles goes by
  const i32* ptr = nullptr;      // [majors + 1]
  const i32* offset = nullptr;   // [entries] in vectors, from the tile's first
  const i32* slot = nullptr;     // [entries] or null: the identity
  const float* weights = nullptr;  // of elements in the order of entries, of blocks by slot
  const float* bias = nullptr;     // [majors * block] or null
  bool transposed = false;         // majors are the columns of blocks
  float* sums = nullptr;  // [threads][entries * block * block], added to: the dots, by entries

  Tiling tiling;
};

// Sets `tiling`, for which offsets can then be made.
void choose_tiling(ConvPass& pass);

// False where scratch memory is not to be had.
bool run_conv(const ConvPass& pass);

// What one thread does for one tile. packed: as `Tiling` says; held [majors * block][high * wide];
// out [majors * block][wide] for one row of the tile.
struct ConvTile {
  const float* packed;
  const float* held;
  float* out;
  i64 high, wide;  // outputs of this tile
};
void conv_elements(const ConvPass& pass, const ConvTile& tile, i64 row, float* sums);
void conv_blocks(const ConvPass& pass, const ConvTile& tile, i64 row);
void conv_block_dots(const ConvPass& pass, const ConvTile& tile, float* sums);

// Streams of one group: of lane l the image, or none, and its first row in the grid.
struct Streams {
  i64 count;
  i64 image[VL];
  i64 row[VL];
};
// Rows [y, y + rows) and columns [x, x + columns) of the images' planes as `window` has them in the
// streams, with zeros outside: out[(plane * stride + r * columns + c) * VL + lane]. The window's
// steps do not count: rows and columns are the images' own. Rows past `last` of a stream's image,
// counted in the grid, are zeros, too.
void pack_images(const Images& from, i64 planes, const Streams& streams, i64 step_y, i64 y,
                 i64 x, i64 rows, i64 columns, i64 stride, float* out);
// One row of outputs: from [planes][wide] to row y of the streams' grid, columns from x on.
void unpack_images(const float* from, const Images& to, const Window& window, i64 planes,
                   const Streams& streams, i64 height, i64 y, i64 x, i64 wide);
// As pack_images for outputs themselves, at the window's steps: [planes][high * wide].
void pack_held(const Images& from, const Window& window, i64 planes, const Streams& streams,
               i64 height, i64 y, i64 x, i64 high, i64 wide, float* out);

}  // namespace dynsparse
