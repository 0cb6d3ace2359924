#include "element_cells.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "scratch.h"

namespace dynsparse {
namespace {

// Columns of a tile at most: 32 KiB of activations.
constexpr i64 COLUMNS = (32 << 10) / (TILE * sizeof(float));
// Rows of a group at most: their accumulators share the second-level cache with a packed tile.
constexpr i64 GROUP = 2048;
// Entries are copied this many at a time; what is copied too much is overwritten by what follows.
constexpr i64 COPIED = 16;

// `rows` rows of a cell with `count` entries each: list[first ...], their entries from `entry` on.
struct Run {
  i32 count;
  i32 rows;
  i32 first;
  i32 entry;
};

template <class T>
T* take(char*& at, i64 count) {
  T* piece = reinterpret_cast<T*>(at);
  at += Scratch::size_of<T>(count);
  return piece;
}

struct Cells {
  i64 tiles, columns;
  i32* counts;    // [row][tile]: entries
  Run* runs;      // [tile][count]: those with rows first
  i32* used;      // [tile]: how many runs have rows
  i32* row_at;    // [tile][count]: rows so far, then where the next one goes
  i32* entry_at;  // [tile][count]: where its entries go
  i32* list;      // rows, counted from the group's first
  i32* cols;      // [entry]
  float* weights;

  explicit Cells(i64 minors)
      : tiles(ceil_div(minors, COLUMNS)), columns(ceil_div(minors, most(tiles, 1))) {}

  i64 lengths() const { return columns + 1; }
  i64 room(i64 entries, i64 rows) const {
    return entries + COPIED * (tiles * least(lengths(), rows) + 1);
  }
  std::size_t bytes(i64 rows, i64 entries) const {
    return Scratch::size_of<i32>(rows * tiles) * 2 + Scratch::size_of<Run>(tiles * lengths()) +
           Scratch::size_of<i32>(tiles) + Scratch::size_of<i32>(tiles * lengths()) * 2 +
           Scratch::size_of<i32>(room(entries, rows)) +
           Scratch::size_of<float>(room(entries, rows));
  }
  // Lays the arrays out from `at` on and moves it behind them.
  void place(char*& at, i64 rows, i64 entries) {
    counts = take<i32>(at, rows * tiles);
    list = take<i32>(at, rows * tiles);
    runs = take<Run>(at, tiles * lengths());
    used = take<i32>(at, tiles);
    row_at = take<i32>(at, tiles * lengths());
    entry_at = take<i32>(at, tiles * lengths());
    cols = take<i32>(at, room(entries, rows));
    weights = take<float>(at, room(entries, rows));
  }
};

// How many of the entries [p, end) of a row point below `bound`; `all`: the length of idx.
DYNSPARSE_INLINE i64 count_below(const i32* idx, i64 p, i64 end, i64 all, i32 bound) {
  const i64 from = p;
#if defined(__AVX512F__)
  while (p + 16 <= all) {
    // Entries after the row's are compared too: the row's own come first, and are counted up to the
    // first that fails.
    const __mmask16 low =
        _mm512_cmplt_epi32_mask(_mm512_loadu_si512(idx + p), _mm512_set1_epi32(bound));
    const i64 n = least(__builtin_ctz(~static_cast<unsigned>(low)), end - p);
    p += n;
    if (n < 16) return p - from;
  }
#else
  (void)all;
#endif
  while (p < end && idx[p] < bound) p++;
  return p - from;
}

// False where a row's entries are not in ascending order: such an index has no cells.
bool count(const ElementPass& pass, Cells& cells, i64 begin, i64 end) {
  const i64 all = pass.ptr[pass.majors];
  std::memset(cells.row_at, 0, cells.tiles * cells.lengths() * sizeof(i32));
  i32* counts = cells.counts;
  for (i64 m = begin; m < end; m++) {
    i64 p = pass.ptr[m];
    for (i64 t = 0; t < cells.tiles; t++) {
      const i32 bound = static_cast<i32>((t + 1) * cells.columns);
      const i64 n = count_below(pass.idx, p, pass.ptr[m + 1], all, bound);
      if (n > cells.columns) return false;
      p += n;
      *counts++ = static_cast<i32>(n);
      cells.row_at[t * cells.lengths() + n]++;
    }
    if (p != pass.ptr[m + 1]) return false;
  }
  return true;
}

void make_runs(Cells& cells) {
  i64 row = 0, entry = 0;
  for (i64 t = 0; t < cells.tiles; t++) {
    i32 used = 0;
    // Rows without entries matter in the first cell only, where accumulators start.
    for (i64 n = t == 0 ? 0 : 1; n < cells.lengths(); n++) {
      const i64 at = t * cells.lengths() + n, rows = cells.row_at[at];
      if (rows == 0) continue;
      cells.runs[t * cells.lengths() + used++] = {static_cast<i32>(n), static_cast<i32>(rows),
                                                  static_cast<i32>(row), static_cast<i32>(entry)};
      cells.row_at[at] = static_cast<i32>(row);
      cells.entry_at[at] = static_cast<i32>(entry);
      row += rows;
      entry += n * rows + COPIED;
    }
    cells.used[t] = used;
  }
}

template <bool ORDERED>
void copy_entries(const ElementPass& pass, Cells& cells, i64 begin, i64 end) {
  const i64 all = pass.ptr[pass.majors], tiles = cells.tiles;
  const i32* __restrict idx = pass.idx;
  const i32* __restrict order = pass.order;
  const float* __restrict values = pass.values;
  const i32* counts = cells.counts;
  i32* __restrict cols = cells.cols;
  float* __restrict weights = cells.weights;
  for (i64 m = begin; m < end; m++) {
    i64 p = pass.ptr[m];
    for (i64 t = 0; t < tiles; t++) {
      const i64 n = *counts++;
      if (n == 0 && t > 0) continue;
      const i64 at = t * cells.lengths() + n;
      cells.list[cells.row_at[at]++] = static_cast<i32>(m - begin);
      const i64 to = cells.entry_at[at];
      cells.entry_at[at] = static_cast<i32>(to + n);
      for (i64 i = 0; i < n; i += COPIED) {
        // A constant length, and so two instructions, but at the very end.
        if (p + i + COPIED <= all) {
          std::memcpy(cols + to + i, idx + p + i, COPIED * sizeof(i32));
          if (!ORDERED) std::memcpy(weights + to + i, values + p + i, COPIED * sizeof(float));
        } else {
          std::memcpy(cols + to + i, idx + p + i, (n - i) * sizeof(i32));
          if (!ORDERED) std::memcpy(weights + to + i, values + p + i, (n - i) * sizeof(float));
        }
      }
      if (ORDERED)
        for (i64 i = 0; i < n; i++) weights[to + i] = values[order[p + i]];
      p += n;
    }
  }
}

// ROWS rows with `count` entries each, one after another in cols and weights.
template <int NV, int ROWS>
DYNSPARSE_INLINE void accumulate(const float* x, const i32* cols, const float* weights, i64 count,
                                 const i32* list, float* out, const float* bias, bool first) {
  constexpr int width = NV * VL;
  V sum[ROWS][NV];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    const V start = broadcast(first && bias ? bias[list[r]] : 0.0f);
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      sum[r][j] = first ? start : load(out + static_cast<i64>(list[r]) * width + j * VL);
  }
  for (i64 i = 0; i < count; i++) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const V weight = broadcast(weights[r * count + i]);
      const float* from = x + static_cast<i64>(cols[r * count + i]) * width;
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) sum[r][j] += weight * load(from + j * VL);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      store(out + static_cast<i64>(list[r]) * width + j * VL, sum[r][j]);
}

// One group and one tile of samples: all cells, then the group's rows to where they belong.
template <int NV>
void samples(const ElementPass& pass, const Cells& cells, const Tile& tile, const float* x,
             float* out, i64 begin, i64 end) {
  // Four rows of four vectors are sixteen accumulators.
  constexpr int ROWS = REGISTERS >= 32 ? 4 : 2;
  const float* bias = pass.bias ? pass.bias + begin : nullptr;
  for (i64 t = 0; t < cells.tiles; t++) {
    for (i64 u = 0; u < cells.used[t]; u++) {
      const Run& run = cells.runs[t * cells.lengths() + u];
      const i32* list = cells.list + run.first;
      const i32* cols = cells.cols + run.entry;
      const float* weights = cells.weights + run.entry;
      const i64 n = run.count;
      i64 r = 0;
      for (; r + ROWS <= run.rows; r += ROWS)
        accumulate<NV, ROWS>(x, cols + r * n, weights + r * n, n, list + r, out, bias, t == 0);
      for (; r < run.rows; r++)
        accumulate<NV, 1>(x, cols + r * n, weights + r * n, n, list + r, out, bias, t == 0);
    }
  }
  unpack(out, tile, begin, end, pass.out, pass.majors, pass.packed.low);
}

void samples(const ElementPass& pass, const Cells& cells, const Tile& tile, const float* x,
             float* out, i64 begin, i64 end) {
  static_assert(TILE_VECTORS == 4, "one case for every width of the last tile");
  switch (tile.vectors) {
    case 1: return samples<1>(pass, cells, tile, x, out, begin, end);
    case 2: return samples<2>(pass, cells, tile, x, out, begin, end);
    case 3: return samples<3>(pass, cells, tile, x, out, begin, end);
    default: return samples<4>(pass, cells, tile, x, out, begin, end);
  }
}

}  // namespace

// Measured with AVX-512; narrower vectors need less of the caches.
bool cells_pay(const ElementPass& pass) {
  const double nnz = pass.ptr[pass.majors];
  const double all = static_cast<double>(pass.majors) * pass.minors;
  return VL == 16 && pass.batch >= 256 && nnz > 0.08 * all && nnz * pass.batch >= 50.0 * all;
}

bool run_in_cells(const ElementPass& pass) {
  const i64 groups = pass.threads * ceil_div(pass.majors, pass.threads * GROUP);
  const i64 per_thread = groups / pass.threads;
  i64 rows = 0, entries = 0;
  for (i64 g = 0; g < groups; g++) {
    const i64 begin = first_major(pass, g, groups), end = first_major(pass, g + 1, groups);
    rows = most(rows, end - begin);
    entries = most(entries, pass.ptr[end] - pass.ptr[begin]);
  }
  Cells shape(pass.minors);
  const std::size_t each = shape.bytes(rows, entries) + Scratch::size_of<float>(TILE * rows) +
                           Scratch::size_of<float>(TILE * pass.minors);
  Scratch scratch(each * pass.threads);
  if (scratch.failed()) return false;
  char* const room = scratch.take<char>(each * pass.threads);

  bool done = true;
#pragma omp parallel for schedule(static) num_threads(pass.threads) reduction(&& : done)
  for (int k = 0; k < pass.threads; k++) {
    char* at = room + k * each;
    Cells cells = shape;
    cells.place(at, rows, entries);
    float* out = take<float>(at, TILE * rows);
    float* packed = take<float>(at, TILE * pass.minors);
    for (i64 g = k * per_thread; g < (k + 1) * per_thread; g++) {
      const i64 begin = first_major(pass, g, groups), end = first_major(pass, g + 1, groups);
      if (begin == end) continue;
      if (!count(pass, cells, begin, end)) {
        done = false;
        break;
      }
      make_runs(cells);
      if (pass.order)
        copy_entries<true>(pass, cells, begin, end);
      else
        copy_entries<false>(pass, cells, begin, end);
      for (i64 t = 0; t < tiles_of(pass.batch); t++) {
        const Tile tile = tile_at(t, pass.batch);
        pack(pass.packed, tile, 0, pass.minors, packed);
        samples(pass, cells, tile, packed, out, begin, end);
      }
    }
  }
  return done;
}

}  // namespace dynsparse
