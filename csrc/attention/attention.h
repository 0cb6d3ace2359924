// Attention at the blocks of a pattern: scores, softmax and product of one block row at a time.
//
// What a head reads is packed once: rows of keys and of values, padded with zeros to whole lines.
// Inside, vectors hold the queries of a block row, padded to whole lines, too: scores lie as
// [keys, queries], so that the softmax is a matter of whole vectors.
//
// The softmax is taken in one pass, with the largest score so far (Milakov & Gimelshein 2018,
// "Online normalizer calculation for softmax"); the backward pass computes the weights anew from
// the logarithms of their sums, as Dao et al. 2022, "FlashAttention", do.
#pragma once

#include "base/random.h"
#include "base/scratch.h"
#include "base/simd.h"

namespace dynsparse {

// [batch, heads, tokens, features] with any strides.
template <class T>
struct Four {
  T* data;
  const i64* strides;

  T* head(i64 n, i64 h) const { return data + n * strides[0] + h * strides[1]; }
};

struct Attention {
  i64 batch, heads, queries, keys, features, value_features, block;
  const i32* row_ptr;
  const i32* cols;
  const float* bias;  // [batch, keys] or null
  bool causal;
  float scale;
  u64 seed;
  i32 threshold;
  float kept;  // what weights that are not dropped are multiplied by; 0: none are dropped
  int threads;

  i64 rows() const { return queries / block; }
  i64 nnz() const { return row_ptr[rows()]; }
  static i64 whole(i64 count) { return ceil_div(count, LINE) * LINE; }
  i64 width() const { return whole(block); }

  // Where a block row's entries end: those beyond the diagonal may be left out.
  i64 end(i64 row) const {
    i64 end = row_ptr[row + 1];
    if (causal)
      while (end > row_ptr[row] && cols[end - 1] > row) end--;
    return end;
  }

  // How many pieces the block rows of a head are worked on in.
  i64 parts() const {
    const i64 all = batch * heads;
    return threads == 1 || all >= 2 * threads ? 1 : least(rows(), ceil_div(2 * threads, all));
  }
  // The first block row of a piece: pieces have about as many blocks.
  i64 first(i64 part, i64 parts) const {
    i64 row = 0;
    if (part == parts) return rows();
    while (row < rows() && row_ptr[row] * parts < part * nnz()) row++;
    return row;
  }
};

// As the functions of api.h are told it.
inline Attention attention_of(const i64* sizes, const i32* row_ptr, const i32* cols,
                              const float* bias, float scale, u64 seed, i32 threshold, float kept,
                              i32 threads) {
  return {sizes[0], sizes[1], sizes[2],      sizes[3], sizes[4], sizes[5],  sizes[6], row_ptr,
          cols,     bias,     sizes[7] != 0, scale,    seed,     threshold, kept,     threads};
}

// Rows [count, whole(features)], zeros behind the features; `to` has room for them.
inline void pack_rows(const float* from, i64 by_token, i64 by_feature, i64 count, i64 features,
                      float factor, float* to) {
  const i64 width = Attention::whole(features);
  for (i64 i = 0; i < count; i++, from += by_token, to += width) {
    i64 f = 0;
    if (by_feature == 1)
      for (; f + VL <= features; f += VL) store(to + f, load_unaligned(from + f) * factor);
    for (; f < features; f++) to[f] = from[f * by_feature] * factor;
    for (; f < width; f++) to[f] = 0;
  }
}

// [width of a row, queries' width] of packed rows [count, width of a row]; zeros behind the count.
inline void turn(const float* rows, i64 count, i64 features, i64 width, float* to) {
  const i64 stride = Attention::whole(features);
  for (i64 f = 0; f < stride; f += VL)
    for (i64 i = 0; i < width; i += VL) {
      V square[VL];
#pragma GCC unroll 16
      for (int k = 0; k < VL; k++)
        square[k] = i + k < count ? load(rows + (i + k) * stride + f) : V{};
      transpose(square);
#pragma GCC unroll 16
      for (int k = 0; k < VL; k++) store(to + (f + k) * width + i, square[k]);
    }
}

// The reverse, for `count` of the queries, to where they belong.
inline void put_turned(const float* turned, i64 count, i64 features, i64 width, float factor,
                       float* to, i64 by_token, i64 by_feature) {
  for (i64 f = 0; f < features; f += VL)
    for (i64 i = 0; i < count; i += VL) {
      V square[VL];
#pragma GCC unroll 16
      for (int k = 0; k < VL; k++) square[k] = load(turned + (f + k) * width + i);
      transpose(square);
      for (int k = 0; k < VL && i + k < count; k++) {
        float* at = to + (i + k) * by_token + f * by_feature;
        const i64 left = features - f;
        if (by_feature == 1 && left >= VL) {
          store_unaligned(at, square[k] * factor);
        } else {
          for (i64 j = 0; j < least(left, VL); j++) at[j * by_feature] = square[k][j] * factor;
        }
      }
    }
}

// What may not be looked at in a block, at -infinity, and the bias of keys; scores [block, width].
inline void mask(const Attention& a, i64 n, i64 row, i64 col, float* scores) {
  const i64 width = a.width();
  if (a.bias)
    for (i64 j = 0; j < a.block; j++) {
      const V more = broadcast(a.bias[n * a.keys + col * a.block + j]);
      for (i64 i = 0; i < width; i += VL)
        store(scores + j * width + i, load(scores + j * width + i) + more);
    }
  if (a.causal && row == col)
    for (i64 j = 1; j < a.block; j++)
      for (i64 i = 0; i < j; i++) scores[j * width + i] = -__builtin_inff();
}

// Weights of an entry after dropout, or what is to be dropped alike; [block, width], in place.
inline void drop(const Attention& a, i64 head, i64 entry, float* weights) {
  if (a.kept == 0) return;
  Streams streams(a.seed, head * a.nnz() + entry);
  for (i64 at = 0; at < a.block * a.width(); at += LANES)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++)
      store(weights + at + g * VL, dynsparse::kept(load(weights + at + g * VL), streams.next(g),
                                                   a.threshold, a.kept));
}

}  // namespace dynsparse
