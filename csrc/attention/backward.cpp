// Backward: the weights once more, from the scores and the sums that forward has left, and from
// them the gradients of queries, keys and values.

#include <atomic>

#include "api.h"
#include "attention/attention.h"
#include "attention/products.h"
#include "base/exp.h"

namespace dynsparse {
namespace {

struct Tensors {
  Four<const float> grad, q, k, v, out;
  const float* sums;
  Four<float> dq, dk, dv;
};

// Queries' side of a block row: rows [block, features], and turned [features, width].
struct Room {
  float *k, *v, *q, *q_turned, *grad, *grad_turned, *dq;
  float *weights, *scores, *sums, *deltas;
};

// sum over the features of out * grad, of each query of a block row.
void deltas(const Attention& a, const Four<const float>& out, i64 n, i64 h, i64 token,
            const Room& room) {
  const i64 stride = Attention::whole(a.value_features);
  for (i64 i = 0; i < a.width(); i++) {
    float sum = 0;
    if (i < a.block) {
      const float* from = out.head(n, h) + (token + i) * out.strides[2];
      for (i64 f = 0; f < a.value_features; f++)
        sum += from[f * out.strides[3]] * room.grad[i * stride + f];
    }
    room.deltas[i] = sum;
  }
}

void one_row(const Attention& a, const Tensors& t, const Room& room, i64 n, i64 h, i64 row,
             float* dk, float* dv) {
  const i64 block = a.block, width = a.width(), head = n * a.heads + h, token = row * block;
  const i64 in = Attention::whole(a.features), across = Attention::whole(a.value_features);
  const auto at = [&](const Four<const float>& x) { return x.head(n, h) + token * x.strides[2]; };
  pack_rows(at(t.q), t.q.strides[2], t.q.strides[3], block, a.features, a.scale, room.q);
  turn(room.q, block, a.features, width, room.q_turned);
  pack_rows(at(t.grad), t.grad.strides[2], t.grad.strides[3], block, a.value_features, 1,
            room.grad);
  turn(room.grad, block, a.value_features, width, room.grad_turned);
  deltas(a, t.out, n, h, token, room);
  // Queries that are none have no weights.
  for (i64 i = 0; i < width; i++)
    room.sums[i] = i < block ? t.sums[head * a.queries + token + i] : __builtin_inff();
  for (i64 i = 0; i < in * width; i++) room.dq[i] = 0;
  for (i64 p = a.row_ptr[row], end = a.end(row); p < end; p++) {
    const i64 key = a.cols[p] * block;
    const float *k = room.k + key * in, *v = room.v + key * across;
    multiply<false, false>(k, in, room.q_turned, width, a.features, room.weights, width, block,
                           width);
    mask(a, n, row, a.cols[p], room.weights);
    multiply<false, false>(v, across, room.grad_turned, width, a.value_features, room.scores,
                           width, block, width);
    drop(a, head, p, room.scores);
    for (i64 j = 0; j < block * width; j += width)
      for (i64 i = 0; i < width; i += VL) {
        const V weight = exponential(load(room.weights + j + i) - load(room.sums + i));
        store(room.weights + j + i, weight);
        store(room.scores + j + i,
              weight * (load(room.scores + j + i) - load(room.deltas + i)));
      }
    if (t.dq.data)
      multiply<true, true>(k, in, room.scores, width, block, room.dq, width, in, width);
    if (t.dk.data)
      multiply<false, true>(room.scores, width, room.q, in, block, dk + key * in, in, block, in);
    if (t.dv.data) {
      drop(a, head, p, room.weights);
      multiply<false, true>(room.weights, width, room.grad, across, block, dv + key * across,
                            across, block, across);
    }
  }
  if (t.dq.data)
    put_turned(room.dq, block, a.features, width, a.scale,
               t.dq.head(n, h) + token * t.dq.strides[2], t.dq.strides[2], t.dq.strides[3]);
}

// The sum of what the pieces of a head have come to, rows [keys, whole(features)].
void put_sum(const float* pieces, i64 count, i64 apart, i64 keys, i64 features,
             const Four<float>& to, i64 n, i64 h) {
  if (!to.data) return;
  const i64 stride = Attention::whole(features);
  for (i64 i = 0; i < keys; i++) {
    float* const row = to.head(n, h) + i * to.strides[2];
    for (i64 f = 0; f < features; f++) {
      float sum = pieces[i * stride + f];
      for (i64 piece = 1; piece < count; piece++) sum += pieces[piece * apart + i * stride + f];
      row[f * to.strides[3]] = sum;
    }
  }
}

bool run(const Attention& a, const Tensors& t) {
  const i64 in = Attention::whole(a.features), across = Attention::whole(a.value_features);
  const i64 width = a.width(), parts = a.parts(), heads = a.batch * a.heads;
  const int threads = static_cast<int>(most(1, least(a.threads, heads * parts)));
  const i64 sizes[] = {a.keys * in,      a.keys * across, a.block * in,    in * width,
                       a.block * across, across * width,  in * width,      a.block * width,
                       a.block * width,  width,           width};
  std::size_t bytes = 0;
  for (const i64 size : sizes) bytes += Scratch::size_of<float>(size);
  // Gradients of keys and values: a head's, or where it is in pieces those of every piece.
  const i64 apart = a.keys * (in + across), gathered = parts == 1 ? threads : heads * parts;
  Scratch scratch(bytes * threads + Scratch::size_of<float>(apart) * gathered);
  if (scratch.failed()) return false;
  char* const memory = scratch.take<char>(bytes * threads);
  float* const gradients = scratch.take<float>(apart * gathered);
  std::atomic<int> started{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = started++;
    char* own = memory + thread * bytes;
    const auto take = [&](int i) {
      float* const piece = reinterpret_cast<float*>(own);
      own += Scratch::size_of<float>(sizes[i]);
      return piece;
    };
    const Room room = {take(0), take(1), take(2), take(3), take(4), take(5),
                       take(6), take(7), take(8), take(9), take(10)};
#pragma omp for schedule(dynamic)
    for (i64 task = 0; task < heads * parts; task++) {
      const i64 head = task / parts, part = task % parts, n = head / a.heads, h = head % a.heads;
      float* const dk = gradients + (parts == 1 ? thread : task) * apart;
      float* const dv = dk + a.keys * in;
      std::memset(dk, 0, apart * sizeof(float));
      pack_rows(t.k.head(n, h), t.k.strides[2], t.k.strides[3], a.keys, a.features, 1, room.k);
      pack_rows(t.v.head(n, h), t.v.strides[2], t.v.strides[3], a.keys, a.value_features, 1,
                room.v);
      for (i64 row = a.first(part, parts), end = a.first(part + 1, parts); row < end; row++)
        one_row(a, t, room, n, h, row, dk, dv);
      if (parts > 1) continue;
      put_sum(dk, 1, 0, a.keys, a.features, t.dk, n, h);
      put_sum(dv, 1, 0, a.keys, a.value_features, t.dv, n, h);
    }
  }
  if (parts == 1) return true;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (i64 head = 0; head < heads; head++) {
    const float* const dk = gradients + head * parts * apart;
    const i64 n = head / a.heads, h = head % a.heads;
    put_sum(dk, parts, apart, a.keys, a.features, t.dk, n, h);
    put_sum(dk + a.keys * in, parts, apart, a.keys, a.value_features, t.dv, n, h);
  }
  return true;
}

}  // namespace
}  // namespace dynsparse

int dynsparse_attention_backward(
    const float* grad, const int64_t* grad_strides, const float* q, const int64_t* q_strides,
    const float* k, const int64_t* k_strides, const float* v, const int64_t* v_strides,
    const float* out, const int64_t* out_strides, const float* sums, const int32_t* row_ptr,
    const int32_t* cols, const float* bias, float* dq, const int64_t* dq_strides, float* dk,
    const int64_t* dk_strides, float* dv, const int64_t* dv_strides, const int64_t* sizes,
    float scale, uint64_t seed, int32_t threshold, float kept, int32_t threads) {
  const dynsparse::Attention a =
      dynsparse::attention_of(sizes, row_ptr, cols, bias, scale, seed, threshold, kept, threads);
  const dynsparse::Tensors t = {{grad, grad_strides}, {q, q_strides},   {k, k_strides},
                                {v, v_strides},       {out, out_strides}, sums,
                                {dq, dq_strides},     {dk, dk_strides}, {dv, dv_strides}};
  return !dynsparse::run(a, t);
}
