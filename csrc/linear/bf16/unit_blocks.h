// Products with blocks of 16, 32, 64 or 128 in bfloat16, by a Unit that multiplies bfloat16 and
// accumulates in float32. For files compiled with AVX-512-bf16.
//
// Of the operands of a product the left one holds 16 rows of values, the right one pairs of values
// (k, k + 1) of 16 columns in each row, and the sums are 16 by 16 floats. A Unit has
//
//   Unit(depth)          one per thread: sums over `depth` values at a time, 16 or 32
//   static collides(bytes)
//     Whether rows so many bytes apart are better copied to where they do not share cache sets.
//   static sums_of(pass, major, prepared, x, stride, sums)
//     The sums [group_of(block)][block] of one major for a group of samples, x [sample][feature].
//   static gradient(block, left, right, side, groups, add, to)
//     One block [block][block] from operands of 16 features by DEPTH samples each, `groups` of them
//     in a row; those of the next 16 features are `side` floats further on. `add`: to what is
//     there.
#pragma once

#include <immintrin.h>

#include "linear/bf16/units.h"
#include "linear/block/run.h"

namespace dynsparse {
namespace {

constexpr i64 SIDE = 16;
// Samples at a time.
constexpr i64 GROUP = 64;
i64 group_of(i64 block) { return block == SIDE ? GROUP : GROUP / 2; }
constexpr i64 LARGEST = 128;
// Pairs fill operands of so many values; they are the samples of a gradient's.
constexpr i64 DEPTH = 32;

using Line = __m512i;

Line load_line(const void* p) { return _mm512_loadu_si512(p); }

// 16 values of each of two rows as pairs (a0, b0), (a1, b1), ...
Line pairs(__m256i a, __m256i b) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(a),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

void transpose_lines(Line (&r)[SIDE]) {
  V lanes[SIDE];
  for (int i = 0; i < SIDE; i++) lanes[i] = reinterpret_cast<V>(r[i]);
  transpose(lanes);
  for (int i = 0; i < SIDE; i++) r[i] = reinterpret_cast<Line>(lanes[i]);
}

// Values of rows of a block, rounded.
struct Rows {
  Input values;
  i64 block;

  __m256i half(i64 row, i64 first) const {
    const i64 at = row * block + first;
    if (values.b16) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values.b16 + at));
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(values.f32 + at)));
  }
  // 32 of them, or 16 and zeros.
  Line whole(i64 row, i64 first) const {
    if (block == SIDE) return _mm512_zextsi256_si512(half(row, 0));
    if (values.b16) return load_line(values.b16 + row * block + first);
    const float* at = values.f32 + row * block + first;
    return reinterpret_cast<Line>(
        _mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + SIDE), _mm512_loadu_ps(at)));
  }
};

// A block as right operands, one per 16 outputs: [block / 16][block / 2][16] pairs. The outputs
// are the rows of the block, or its columns (`transposed`).
void prepare(const Rows& rows, bool transposed, i32* out) {
  const i64 block = rows.block, half = block / 2;
  for (i64 n = 0; n < block; n += SIDE, out += half * SIDE) {
    if (transposed) {
      for (i64 k = 0; k < half; k++)
        _mm512_storeu_si512(out + k * SIDE, pairs(rows.half(2 * k, n), rows.half(2 * k + 1, n)));
    } else {
      for (i64 first = 0; first < half; first += SIDE) {
        Line square[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) square[i] = rows.whole(n + i, 2 * first);
        transpose_lines(square);
#pragma GCC unroll 16
        for (int k = 0; k < SIDE; k++)
          if (k < half) _mm512_storeu_si512(out + (first + k) * SIDE, square[k]);
      }
    }
  }
}

// ---- out = x times blocks ----

// Adds the bias, rounds, and writes `count` rows.
void write(const BlockPass& pass, i64 major, const float* sums, i64 count, bf16* out) {
  const i64 block = pass.block, features = pass.majors * block;
  for (i64 half = 0; half < block; half += SIDE) {
    const i64 feature = major * block + half;
    const __m512 bias = pass.bias ? _mm512_loadu_ps(pass.bias + feature) : _mm512_setzero_ps();
    for (i64 m = 0; m < count; m++) {
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + m * block + half), bias);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + m * features + feature),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
    }
  }
}

template <class Unit>
bool run_bf16_outputs(const BlockPass& pass) {
  const i64 block = pass.block, group = group_of(block);
  const i64 inputs = pass.minors * block, features = pass.majors * block;
  const i64 nnz = pass.ptr[pass.majors], size = block * block / 2;
  // Rows of contiguous features are read where they are, but for those of a group that is not full.
  const bool copy =
      pass.packed.feature_stride != 1 || Unit::collides(pass.packed.batch_stride * 2);
  const i64 copied = inputs + 2 * SIDE;  // features from one copied row to the next
  const i64 whole = copy ? 0 : pass.batch / group * group;
  const i64 padded = ceil_div(pass.batch - whole, group) * group;
  Scratch scratch(Scratch::size_of<i32>(nnz * size) + Scratch::size_of<bf16>(padded * copied));
  if (scratch.failed()) return false;
  i32* prepared = scratch.take<i32>(nnz * size);
  bf16* rest = scratch.take<bf16>(padded * copied);

  // Samples whose x stays in the second-level cache while all majors pass over them.
  const i64 cached = most(group, SECOND_LEVEL / (inputs * 2) / group * group);
  const i64 rounds = ceil_div(pass.batch, cached);
  const i64 some = most(1, least(8, pass.majors / (8 * pass.threads)));

#pragma omp parallel num_threads(pass.threads)
  {
    const Unit unit(least(block, DEPTH));
    if (padded) {
#pragma omp for schedule(static)
      for (i64 m = 0; m < padded; m++) {
        bf16* to = rest + m * copied;
        const i64 sample = whole + m, stride = pass.packed.feature_stride;
        const bf16* from = pass.packed.data.b16 + pass.packed.at(sample, 0);
        if (sample >= pass.batch)
          std::memset(to, 0, inputs * sizeof(bf16));
        else if (stride == 1)
          std::memcpy(to, from, inputs * sizeof(bf16));
        else
          for (i64 f = 0; f < inputs; f++) to[f] = from[f * stride];
      }
    }
    alignas(64) float sums[GROUP / 2 * LARGEST];
    for (i64 t = 0; t < rounds; t++) {
#pragma omp for schedule(dynamic, some)
      for (i64 major = 0; major < pass.majors; major++) {
        // The first samples that a major meets prepare its blocks for all.
        if (t == 0)
          for (i64 p = pass.ptr[major]; p < pass.ptr[major + 1]; p++) {
            const i64 at = (pass.order ? pass.order[p] : p) * block * block;
            const Input& v = pass.values;
            const Input values = v.b16 ? Input(v.b16 + at) : Input(v.f32 + at);
            prepare({values, block}, pass.transposed, prepared + p * size);
          }
        for (i64 m = t * cached; m < least(pass.batch, (t + 1) * cached); m += group) {
          const bool in_place = m < whole;
          const bf16* x = in_place ? pass.packed.data.b16 + pass.packed.at(m, 0)
                                   : rest + (m - whole) * copied;
          const i64 stride = in_place ? pass.packed.batch_stride : copied;
          Unit::sums_of(pass, major, prepared, x, stride, sums);
          write(pass, major, sums, least(group, pass.batch - m),
                pass.out.b16 + m * features);
        }
      }
    }
  }
  return true;
}

// ---- gradient of the blocks ----

template <class Unit>
struct Gradient {
  static constexpr bool SUMS = false;

  // In pairs of samples.
  i64 padded(i64 samples) const { return ceil_div(samples, DEPTH) * SIDE; }

  // Operands of 16 features by 32 samples: [feature / 16][sample / 32][16][16] pairs of samples.
  // Each row of a right operand is a pair, each row of a left one a feature (`left`).
  void pack(const Matrix& from, i64 first, i64 count, i64 begin, i64 end, bool left,
            float* out) const {
    const i64 groups = ceil_div(count, DEPTH);
    const auto values = [&](i64 sample, i64 f) {
      if (sample >= count) return _mm256_setzero_si256();
      const bf16* at = from.data.b16 + from.at(first + sample, f);
      if (from.feature_stride == 1) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
      alignas(32) uint16_t gathered[SIDE];
      for (int i = 0; i < SIDE; i++) gathered[i] = at[i * from.feature_stride].bits;
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(gathered));
    };
    for (i64 g = 0; g < groups; g++)
      for (i64 f = begin; f < end; f += SIDE) {
        Line square[SIDE];
        for (int k = 0; k < SIDE; k++)
          square[k] = pairs(values(g * DEPTH + 2 * k, f), values(g * DEPTH + 2 * k + 1, f));
        if (left) transpose_lines(square);
        float* to = out + ((f - begin) / SIDE * groups + g) * SIDE * SIDE;
        for (int k = 0; k < SIDE; k++) _mm512_store_si512(to + k * SIDE, square[k]);
      }
  }
  void pack_x(const BlockPass& pass, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    pack(pass.x, first, count, begin, end, false, out);
  }
  void pack_dy(const BlockPass& pass, i64 first, i64 count, i64 begin, i64 end, float* out) const {
    pack(pass.packed, first, count, begin, end, true, out);
  }

  void gradient(const BlockPass& pass, i64 row, const float* dy, const float* x, i64 count,
                i64 begin, i64 end, bool add) const {
    const Unit unit(DEPTH);
    const i64 groups = ceil_div(count, DEPTH), side = groups * SIDE * SIDE;
    i64 p = pass.row_ptr[row];
    const i64 last = pass.row_ptr[row + 1];
    while (p < last && pass.cols[p] < begin) p++;
    for (; p < last && pass.cols[p] < end; p++) {
      const i64 block = pass.block;
      const float* right = x + (pass.cols[p] - begin) * (block / SIDE) * side;
      float* to = gradient_at(pass, p);
      Unit::gradient(block, dy, right, side, groups, add, to);
    }
  }
};

template <class Unit>
bool run_bf16_blocks(const BlockPass& pass) {
  return (!pass.out || run_bf16_outputs<Unit>(pass)) &&
         (!pass.dvalues || run_gradient(pass, Gradient<Unit>{}));
}

}  // namespace
}  // namespace dynsparse
