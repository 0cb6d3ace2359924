// Growth by products of 16-bit integers: which positions may exceed one threshold, and which are
// sure to exceed another.

#include <algorithm>
#include <limits>

#include "api.h"
#include "base/scratch.h"
#include "base/vnni.h"
#include "update/grow.h"
#include "update/tiles.h"

using namespace dynsparse;

#if defined(DYNSPARSE_TILES)

namespace {

// Samples whose products are added up in 32 bits, whatever they are: a factor is at most LONGEST
// long over these, so by Cauchy-Schwarz no sum leaves an i32. Rounding adds half of a root of them.
constexpr i64 AT_ONCE = 2048;
constexpr float LONGEST = 46000.0f;
constexpr float MOST_INT16 = 32767.0f;
// Lengths below cannot be told from underflow; what such a column adds is below any threshold.
constexpr float SHORTEST = 1e-18f;

// Rows of which masks are made at a time.
constexpr i64 BLOCK_ROWS = 16 * TILE_ROWS;
// Features that are packed at a time: whole panels of either side.
constexpr i64 STRIP = 192;
static_assert(STRIP % TILE_ROWS == 0 && STRIP % TILE_COLS == 0);

using u16 = uint16_t;
using u64 = uint64_t;
constexpr i64 WORD = 16;

Tile tile() {
#if defined(DYNSPARSE_VNNI)
  if (vnni_usable()) return tile_of_products_vnni;
#endif
  return tile_of_products;
}

// A matrix [batch, features] as integers in panels, see tiles.h; and of each feature what one of
// its integers stands for, upside down (0 for a feature of zeros), its length, and that of what
// rounding takes from it.
struct Packed {
  const float* from;
  i64 batch_stride, feature_stride, batch, features, panel;
  i32* data;
  float *inverse, *length, *error;

  i64 pairs() const { return ceil_div(batch, 2); }
  i64 padded() const { return ceil_div(features, STRIP) * STRIP; }

  void row(i64 i, i64 begin, i64 count, float* to) const {
    const float* at = from + i * batch_stride + begin * feature_stride;
    if (feature_stride == 1)
      for (i64 j = 0; j < count; j++) to[j] = at[j];
    else
      for (i64 j = 0; j < count; j++) to[j] = at[j * feature_stride];
    for (i64 j = count; j < STRIP; j++) to[j] = 0;
  }

  void pack(i64 begin) const {
    const i64 count = least(STRIP, features - begin);
    alignas(64) float values[STRIP], scale[STRIP], unit[STRIP];
    alignas(64) float squares[STRIP] = {}, part[STRIP] = {}, longest[STRIP] = {}, top[STRIP] = {};
    alignas(64) float lost[STRIP] = {};
    for (i64 i = 0; i < batch; i++) {
      row(i, begin, count, values);
      for (i64 j = 0; j < STRIP; j++) {
        part[j] += values[j] * values[j];
        top[j] = std::fabs(values[j]) > top[j] ? std::fabs(values[j]) : top[j];
      }
      if ((i + 1) % AT_ONCE && i + 1 < batch) continue;
      for (i64 j = 0; j < STRIP; j++) {
        squares[j] += part[j];
        longest[j] = part[j] > longest[j] ? part[j] : longest[j];
        part[j] = 0;
      }
    }
    for (i64 j = 0; j < STRIP; j++) {
      const float most = std::sqrt(longest[j]);
      const bool some = most > SHORTEST;
      scale[j] = some ? std::fmin(LONGEST / most, MOST_INT16 / top[j]) : 0;
      unit[j] = some ? 1 / scale[j] : 0;
      if (j >= count) continue;
      inverse[begin + j] = scale[j];
      length[begin + j] = some ? std::sqrt(squares[j]) : 0;
    }
    for (i64 i = 0; i < batch; i += 2) {
      alignas(64) i32 both[STRIP] = {};
      for (i64 half = 0; half < least(2, batch - i); half++) {
        row(i + half, begin, count, values);
        for (i64 j = 0; j < STRIP; j++) {
          // To the nearest integer, as adding and subtracting 3 * 2^22 rounds.
          const float rounded = (values[j] * scale[j] + 12582912.0f) - 12582912.0f;
          const float off = values[j] - rounded * unit[j];
          lost[j] += off * off;
          const i32 number = static_cast<i32>(rounded);
          both[j] |= half ? static_cast<i32>(static_cast<u32>(number) << 16) : number & 0xffff;
        }
      }
      for (i64 j = 0; j < STRIP; j += panel)
        std::memcpy(data + (begin + j) * pairs() + i / 2 * panel, both + j, panel * sizeof(i32));
    }
    for (i64 j = 0; j < count; j++)
      error[begin + j] = scale[j] > 0 ? std::sqrt(lost[j]) : 0;
  }

  void pack_all(i32 threads) const {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 begin = 0; begin < features; begin += STRIP) pack(begin);
  }
};

// One thread's rows, block by block.
struct Screen {
  const Packed &rows, &cols;
  const i32 *row_ptr, *taken;
  float low, high, worst, sums_off;
  const float *col_unit, *col_bound;
  i64 words;
  Tile tile;

  // Bit c of word c / 16: |sum| + bound > low, or |sum| - bound > high, of a row of a tile.
  void masks_of(const float* sums, i64 row, i64 first, u16* may, u16* sure) const {
    const float scale = rows.inverse[row];
    // A row of zeros has no scores.
    const V least_scale = broadcast(scale > 0 ? low * scale : std::numeric_limits<float>::max());
    const V most_scale = broadcast(scale > 0 ? high * scale : std::numeric_limits<float>::max());
    const V bound = broadcast(bound_of(row) * scale);
    for (i64 w = 0; w < TILE_COLS / WORD; w++) {
      unsigned above = 0, certain = 0;
      for (i64 v = 0; v < WORD; v += VL) {
        const i64 c = w * WORD + v;
        const V unit = load(col_unit + first + c);
        const V off = bound * load(col_bound + first + c);
        const V sum = magnitude(load(sums + c));
        above |= bits_above(sum, least_scale * unit - off) << v;
        certain |= bits_above(sum, most_scale * unit + off) << v;
      }
      may[w] = static_cast<u16>(above);
      sure[w] = static_cast<u16>(certain);
    }
  }

  // What a sum of products is off by at most, over the length of the column: what rounding takes
  // from either factor (Cauchy-Schwarz), and what float32 loses in adding up.
  float bound_of(i64 row) const {
    return (rows.error[row] + (rows.length[row] + rows.error[row]) * worst) * (1 + sums_off);
  }

  static DYNSPARSE_INLINE V magnitude(V v) {
#if defined(__AVX512BW__)
    return reinterpret_cast<V>(_mm512_abs_ps(reinterpret_cast<__m512>(v)));
#else
    return reinterpret_cast<V>(
        _mm256_andnot_ps(_mm256_set1_ps(-0.0f), reinterpret_cast<__m256>(v)));
#endif
  }

  static DYNSPARSE_INLINE unsigned bits_above(V a, V b) {
#if defined(__AVX512BW__)
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                              _CMP_GT_OQ);
#else
    return _mm256_movemask_ps(_mm256_cmp_ps(reinterpret_cast<__m256>(a),
                                            reinterpret_cast<__m256>(b), _CMP_GT_OQ));
#endif
  }

  // Masks [BLOCK_ROWS, words] of the rows from `first` on.
  void block(i64 first, i64 last, u16* may, u16* sure) const {
    alignas(64) float sums[TILE_ROWS * TILE_COLS];
    const i64 pairs = rows.pairs();
    for (i64 c = 0; c < words * WORD; c += TILE_COLS)
      for (i64 row = first; row < last; row += TILE_ROWS) {
        const i32 *left = rows.data + row * pairs, *right = cols.data + c * pairs;
        i64 k = 0;
        do {
          const i64 some = least(AT_ONCE / 2, pairs - k);
          tile(left + k * TILE_ROWS, right + k * TILE_COLS, some, k > 0, sums);
          k += some;
        } while (k < pairs);
        for (i64 r = row; r < least(row + TILE_ROWS, last); r++) {
          const i64 at = (r - first) * words + c / WORD;
          masks_of(sums + (r - row) * TILE_COLS, r, c, may + at, sure + at);
        }
      }
  }

  // The positions of a mask, counted from `offset`, while there is room; returns how many more.
  template <class T>
  static i64 places(const u16* mask, i64 words, i64 offset, T* to, i64 room) {
    i64 n = 0;
    for (i64 w = 0; w < words; w += 4) {
      u64 bits;
      std::memcpy(&bits, mask + w, sizeof bits);
      if (n + __builtin_popcountll(bits) > room) return room + 1;
      for (; bits; bits &= bits - 1)
        to[n++] = static_cast<T>(offset + w * WORD + __builtin_ctzll(bits));
    }
    return n;
  }

  struct Found {
    i32* open_counts;
    i32* open;
    i64 open_room;
    i64* sure;
    i64 sure_room;
    i64 opened = 0, certain = 0;
  };

  // False where there was too little room.
  bool run(i64 first, i64 last, u16* scratch, Found& found) const {
    u16 *may = scratch, *sure = may + BLOCK_ROWS * words, *held = sure + BLOCK_ROWS * words;
    for (i64 begin = first; begin < last; begin += BLOCK_ROWS) {
      const i64 end = least(begin + BLOCK_ROWS, last);
      block(begin, end, may, sure);
      for (i64 row = begin; row < end; row++) {
        std::fill(held, held + words, u16{0});
        for (i64 p = row_ptr[row]; p < row_ptr[row + 1]; p++)
          held[taken[p] / WORD] |= static_cast<u16>(1u << (taken[p] % WORD));
        u16 *open = may + (row - begin) * words, *certain = sure + (row - begin) * words;
        for (i64 w = 0; w < words; w++) {
          certain[w] = static_cast<u16>(certain[w] & ~held[w]);
          open[w] = static_cast<u16>(open[w] & ~held[w] & ~certain[w]);
        }
        const i64 more = places(open, words, 0, found.open + found.opened,
                                found.open_room - found.opened);
        if (more > found.open_room - found.opened) return false;
        found.opened += more;
        found.open_counts[row] = static_cast<i32>(more);
        const i64 also = places(certain, words, row * cols.features, found.sure + found.certain,
                                found.sure_room - found.certain);
        if (also > found.sure_room - found.certain) return false;
        found.certain += also;
      }
    }
    return true;
  }
};

}  // namespace

int dynsparse_grow_screens() { return 1; }

int dynsparse_grow_screen(const float* x, i64 x_batch_stride, i64 x_feature_stride,
                          const float* dy, i64 dy_batch_stride, i64 dy_feature_stride, i64 batch,
                          i64 height, i64 width, const i32* row_ptr, const i32* cols,
                          float low, float high, i32* open_counts, i32* open_cols, i64 open_room,
                          i64* sure, i64 sure_room, i64* found, i32 threads) {
  Packed right = {x, x_batch_stride, x_feature_stride, batch, width, TILE_COLS,
                  nullptr, nullptr, nullptr, nullptr};
  Packed left = {dy, dy_batch_stride, dy_feature_stride, batch, height, TILE_ROWS,
                 nullptr, nullptr, nullptr, nullptr};
  const i64 words = ceil_div(width, 64) * 4, pieces = least(threads, ceil_div(height, BLOCK_ROWS));
  const i64 masks = (2 * BLOCK_ROWS + 1) * words;
  std::size_t bytes = Scratch::size_of<u16>(masks * pieces);
  bytes += 2 * Scratch::size_of<float>(words * WORD);
  for (const Packed* one : {&left, &right})
    bytes += Scratch::size_of<i32>(one->padded() * one->pairs()) +
             3 * Scratch::size_of<float>(one->padded());
  Scratch scratch(bytes);
  if (scratch.failed()) return 1;
  for (Packed* one : {&left, &right}) {
    one->data = scratch.take<i32>(one->padded() * one->pairs());
    for (float** part : {&one->inverse, &one->length, &one->error})
      *part = scratch.take<float>(one->padded());
    one->pack_all(threads);
  }
  float* col_unit = scratch.take<float>(words * WORD);
  float* col_bound = scratch.take<float>(words * WORD);
  float worst = 0;
  for (i64 c = 0; c < words * WORD; c++) {
    col_unit[c] = c < width ? right.inverse[c] : 0;
    col_bound[c] = c < width ? right.inverse[c] * right.length[c] : 0;
    if (c < width && right.length[c] > 0)
      worst = std::fmax(worst, right.error[c] / right.length[c]);
  }
  // 2^-24 for every term that float32 adds; twice, as these lengths may be off by as much. And for
  // what is converted and scaled.
  const float sums_off = static_cast<float>(batch + 8) * 0x1p-23f;
  const Screen screen = {left, right, row_ptr, cols, low, high, worst + sums_off,
                         sums_off, col_unit, col_bound, words, tile()};
  Screen::Found parts[64];
  const i64 used = least(pieces, 64), blocks = ceil_div(height, BLOCK_ROWS);
  u16* room = scratch.take<u16>(masks * pieces);
  bool fits = true;
#pragma omp parallel for num_threads(used) schedule(static) reduction(&& : fits)
  for (i64 t = 0; t < used; t++) {
    const i64 open_begin = open_room * t / used, sure_begin = sure_room * t / used;
    parts[t] = {open_counts,          open_cols + open_begin,
                open_room * (t + 1) / used - open_begin,
                sure + sure_begin,    sure_room * (t + 1) / used - sure_begin};
    const i64 first = blocks * t / used * BLOCK_ROWS;
    const i64 last = least(blocks * (t + 1) / used * BLOCK_ROWS, height);
    fits = fits && screen.run(first, last, room + masks * t, parts[t]);
  }
  if (!fits) return 2;
  found[0] = found[1] = 0;
  for (i64 t = 0; t < used; t++) {
    std::memmove(open_cols + found[0], parts[t].open, parts[t].opened * sizeof(i32));
    std::memmove(sure + found[1], parts[t].sure, parts[t].certain * sizeof(i64));
    found[0] += parts[t].opened;
    found[1] += parts[t].certain;
  }
  return 0;
}

#else

int dynsparse_grow_screens() { return 0; }

int dynsparse_grow_screen(const float*, i64, i64, const float*, i64, i64, i64, i64, i64, const i32*,
                          const i32*, float, float, i32*, i32*, i64, i64*, i64, i64*, i32) {
  return 1;
}

#endif
