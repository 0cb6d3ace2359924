// Forward: the outputs, and the logarithm of each query's sum of exponentials.

#include <atomic>
#include <cmath>

#include "api.h"
#include "attention/attention.h"
#include "attention/products.h"
#include "base/exp.h"

namespace dynsparse {
namespace {

// Scores that are worked on at a time, so that they stay in the first-level cache.
constexpr i64 SCORES = 4096;
// Finite, so that what is masked everywhere gives zeros and not NaN.
constexpr float LOWEST = -3.4028234e38f;

struct Room {
  float *k, *v, *rows, *q, *scores, *out, *most, *sum;
};

i64 blocks_at_a_time(const Attention& a) {
  return most(1, SCORES / (a.block * a.width()));
}

// Scores become weights of the running softmax, [keys, width]; what was summed before is scaled to
// the new largest score.
void exponentiate(const Attention& a, const Room& room, i64 keys) {
  const i64 width = a.width(), outputs = Attention::whole(a.value_features);
  for (i64 i = 0; i < width; i += VL) {
    float* const scores = room.scores + i;
    const V before = load(room.most + i);
    V top = before;
    for (i64 j = 0; j < keys; j++) {
      const V one = load(scores + j * width);
      top = one > top ? one : top;
    }
    store(room.most + i, top);
    const V factor = exponential(before - top);
    V sum = load(room.sum + i) * factor;
    for (i64 j = 0; j < keys; j++) {
      const V weight = exponential(load(scores + j * width) - top);
      store(scores + j * width, weight);
      sum += weight;
    }
    store(room.sum + i, sum);
    for (i64 f = 0; f < outputs; f++) {
      float* const at = room.out + f * width + i;
      store(at, load(at) * factor);
    }
  }
}

void one_row(const Attention& a, const Room& room, i64 n, i64 h, i64 row) {
  const i64 block = a.block, width = a.width();
  const i64 in = Attention::whole(a.features), out = Attention::whole(a.value_features);
  for (i64 i = 0; i < width; i++) room.most[i] = LOWEST, room.sum[i] = 0;
  for (i64 i = 0; i < out * width; i++) room.out[i] = 0;
  const i64 end = a.end(row), step = blocks_at_a_time(a);
  for (i64 first = a.row_ptr[row]; first < end; first += step) {
    const i64 last = least(end, first + step);
    for (i64 p = first; p < last; p++) {
      float* const scores = room.scores + (p - first) * block * width;
      multiply<false, false>(room.k + a.cols[p] * block * in, in, room.q, width, a.features,
                             scores, width, block, width);
      mask(a, n, row, a.cols[p], scores);
    }
    exponentiate(a, room, (last - first) * block);
    for (i64 p = first; p < last; p++) {
      float* const weights = room.scores + (p - first) * block * width;
      drop(a, n * a.heads + h, p, weights);
      multiply<true, true>(room.v + a.cols[p] * block * out, out, weights, width, block, room.out,
                           width, out, width);
    }
  }
}

void finish(const Attention& a, const Room& room, float* to, i64 by_token, i64 by_feature,
            float* sums) {
  const i64 width = a.width();
  alignas(64) float factor[LINE];
  for (i64 i = 0; i < width; i += LINE) {
    for (i64 j = 0; j < LINE; j++) factor[j] = room.sum[i + j] > 0 ? 1 / room.sum[i + j] : 0;
    // NaN is not to be lost.
    for (i64 j = 0; j < LINE; j++)
      if (room.sum[i + j] != room.sum[i + j]) factor[j] = room.sum[i + j];
    for (i64 f = 0; f < Attention::whole(a.value_features); f++)
      for (i64 j = 0; j < LINE; j += VL) {
        float* const at = room.out + f * width + i + j;
        store(at, load(at) * load(factor + j));
      }
  }
  put_turned(room.out, a.block, a.value_features, width, 1, to, by_token, by_feature);
  for (i64 i = 0; i < a.block; i++)
    sums[i] = room.sum[i] == 0 ? __builtin_inff() : room.most[i] + std::log(room.sum[i]);
}

bool run(const Attention& a, const Four<const float>& q, const Four<const float>& k,
         const Four<const float>& v, const Four<float>& out, float* sums) {
  const i64 in = Attention::whole(a.features), across = Attention::whole(a.value_features);
  const i64 width = a.width(), parts = a.parts(), tasks = a.batch * a.heads * parts;
  const i64 sizes[] = {a.keys * in,     a.keys * across,
                       a.block * in,    in * width,
                       blocks_at_a_time(a) * a.block * width,
                       across * width,  width,
                       width};
  const int threads = static_cast<int>(most(1, least(a.threads, tasks)));
  std::size_t bytes = 0;
  for (const i64 size : sizes) bytes += Scratch::size_of<float>(size);
  Scratch scratch(bytes * threads);
  if (scratch.failed()) return false;
  char* const memory = scratch.take<char>(bytes * threads);
  std::atomic<int> started{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    char* own = memory + started++ * bytes;
    const auto take = [&](int i) {
      float* const piece = reinterpret_cast<float*>(own);
      own += Scratch::size_of<float>(sizes[i]);
      return piece;
    };
    const Room room = {take(0), take(1), take(2), take(3), take(4), take(5), take(6), take(7)};
#pragma omp for schedule(dynamic)
    for (i64 task = 0; task < tasks; task++) {
      const i64 head = task / parts, part = task % parts, n = head / a.heads, h = head % a.heads;
      pack_rows(k.head(n, h), k.strides[2], k.strides[3], a.keys, a.features, 1, room.k);
      pack_rows(v.head(n, h), v.strides[2], v.strides[3], a.keys, a.value_features, 1, room.v);
      for (i64 row = a.first(part, parts), end = a.first(part + 1, parts); row < end; row++) {
        const i64 token = row * a.block;
        pack_rows(q.head(n, h) + token * q.strides[2], q.strides[2], q.strides[3], a.block,
                  a.features, a.scale, room.rows);
        turn(room.rows, a.block, a.features, width, room.q);
        one_row(a, room, n, h, row);
        finish(a, room, out.head(n, h) + token * out.strides[2], out.strides[2], out.strides[3],
               sums + head * a.queries + token);
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace dynsparse

int dynsparse_attention_forward(const float* q, const int64_t* q_strides, const float* k,
                                const int64_t* k_strides, const float* v,
                                const int64_t* v_strides, const int32_t* row_ptr,
                                const int32_t* cols, const float* bias, float* out,
                                const int64_t* out_strides, float* sums, const int64_t* sizes,
                                float scale, uint64_t seed, int32_t threshold, float kept,
                                int32_t threads) {
  const dynsparse::Attention a =
      dynsparse::attention_of(sizes, row_ptr, cols, bias, scale, seed, threshold, kept, threads);
  return !dynsparse::run(a, {q, q_strides}, {k, k_strides}, {v, v_strides}, {out, out_strides},
                         sums);
}
