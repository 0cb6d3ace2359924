// Products of a few samples with single non-zeros, where the features are the vector dimension.
//
// Which columns of a row are present is a bit mask, 16 columns to a word. A vector of a row's
// dense weights is expanded from the values in registers, used for every sample, and forgotten:
// what is read is the values and one bit per element, at any density, and the arithmetic is that of
// a dense product. The other kernels read a column number per non-zero instead, and waste most of
// a vector on a handful of samples.

#include "base/caches.h"
#include "base/masks.h"
#include "base/scratch.h"
#include "linear/few/few.h"

namespace dynsparse {
namespace {

// Samples [batch, in] to [word][sample][WORD], zeros behind the last feature: samples side by side
// instead of a power of two apart, where they would compete for the same cache lines.
void pack_words(const Matrix& from, i64 batch, i64 features, float* out) {
  for (i64 f = 0; f < features; f += WORD) {
    const i64 count = least(WORD, features - f);
    for (i64 s = 0; s < batch; s++, out += WORD) {
      const float* row = from.data.f32 + from.at(s, f);
      if (count == WORD && from.feature_stride == 1)
        std::memcpy(out, row, WORD * sizeof(float));
      else
        for (i64 i = 0; i < WORD; i++) out[i] = i < count ? row[i * from.feature_stride] : 0.0f;
    }
  }
}

// Whether `expand` may read VL values from any of the rows up to `end` on.
template <class Weights>
bool is_inside(const FewPass& pass, i64 end) {
  return !(MASKS_BY_TABLE || sizeof(Weights) == 1) ||
         pass.row_ptr[end] + VL <= pass.row_ptr[pass.out];
}

// ---- forward ----

// ROWS rows by SAMPLES samples: their accumulators stay in registers.
template <int ROWS, int SAMPLES, bool INSIDE, class Weights>
void forward_rows(const FewPass& pass, const Weights* weights, const float* x, i64 row,
                  i64 sample) {
  const i64 words = words_of(pass.in);
  const Weights* values[ROWS];
  const u16* masks[ROWS];
  // Padded to whole trees of sums.
  constexpr int PADDED = (ROWS * SAMPLES + VL - 1) / VL * VL;
  V acc[PADDED] = {};
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    values[r] = weights + pass.row_ptr[row + r];
    masks[r] = pass.masks + (row + r) * words;
  }
  x += sample * WORD;
  for (i64 g = 0; g < words; g++, x += pass.batch * WORD) {
#pragma GCC unroll 4
    for (int v = 0; v < WORD_VECTORS; v++) {
      V w[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const unsigned mask = lanes_of(masks[r][g], v);
        w[r] = expand<INSIDE>(mask, values[r]);
        if constexpr (SAMPLES > 1) pin(w[r]);
        values[r] += count_bits(mask);
      }
#pragma GCC unroll 16
      for (int s = 0; s < SAMPLES; s++) {
        V lanes = load(x + s * WORD + v * VL);
        if constexpr (ROWS > 1) pin(lanes);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) acc[s * ROWS + r] += w[r] * lanes;
      }
    }
  }
  alignas(64) float sums[PADDED];
#pragma GCC unroll 4
  for (int i = 0; i < PADDED; i += VL)
    store(sums + i, sums_of<VL>(acc + i));
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    const float bias = pass.bias ? pass.bias[row + r] : 0.0f;
    const float scale = pass.scale ? pass.scale[row + r] : 1.0f;
#pragma GCC unroll 16
    for (int s = 0; s < SAMPLES; s++)
      pass.y[(sample + s) * pass.out + row + r] = sums[s * ROWS + r] * scale + bias;
  }
}

template <int SAMPLES, class Weights>
void forward_samples(const FewPass& pass, const Weights* weights, const float* x, i64 begin,
                     i64 end, i64 sample) {
  // As many accumulators as registers allow, beside the weights and the sample at hand.
  constexpr int ROWS = SAMPLES > 4   ? REGISTERS / 16
                       : SAMPLES > 1 ? REGISTERS / 8
                                     : REGISTERS / 4;
  i64 row = begin;
  for (; row + ROWS <= end && is_inside<Weights>(pass, row + ROWS); row += ROWS)
    forward_rows<ROWS, SAMPLES, true>(pass, weights, x, row, sample);
  for (; row < end; row++) forward_rows<1, SAMPLES, false>(pass, weights, x, row, sample);
}

// At most MOST samples at a time.
template <int MOST, class Weights>
void forward_chunk(const FewPass& pass, const Weights* weights, const float* x, i64 begin, i64 end,
                   i64 sample) {
  for (; sample + MOST <= pass.batch; sample += MOST)
    forward_samples<MOST>(pass, weights, x, begin, end, sample);
  if constexpr (MOST > 1)
    if (sample < pass.batch) forward_chunk<MOST - 1>(pass, weights, x, begin, end, sample);
}

template <int MOST, class Weights>
bool forward(const FewPass& pass, const Weights* weights) {
  const i64 size = pass.batch * words_of(pass.in) * WORD;
  Scratch scratch(Scratch::size_of<float>(size));
  if (scratch.failed()) return false;
  float* x = scratch.take<float>(size);
  pack_words(pass.x, pass.batch, pass.in, x);
  constexpr i64 ROWS = 16;
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (i64 begin = 0; begin < pass.out; begin += ROWS)
    forward_chunk<MOST>(pass, weights, x, begin, least(pass.out, begin + ROWS), 0);
  return true;
}

// ---- backward ----

// What one thread works on.
struct Part {
  const float* x;   // [word][sample][WORD]
  const float* dy;  // [out][sample]
  float* dx;        // [word][sample][WORD], sums of this part
  i64* next;        // [out]: the slot of each row's next value
};

// ROWS rows of all samples, words [begin, end): dx += dy W and dvalues = dy^T x, at one expansion
// of the weights.
template <int ROWS, bool INPUT, bool VALUES, bool INSIDE>
void backward_rows(const FewPass& pass, const Part& part, i64 row, i64 begin, i64 end) {
  const i64 words = words_of(pass.in), batch = pass.batch;
  i64 slot[ROWS];
  const float* last[ROWS];
  const u16* masks[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    slot[r] = part.next[row + r];
    last[r] = VALUES ? pass.dvalues + pass.row_ptr[row + r + 1] : nullptr;
    masks[r] = pass.masks + (row + r) * words;
  }
  const float* dy = part.dy + row * batch;
  for (i64 g = begin; g < end; g++) {
#pragma GCC unroll 4
    for (int v = 0; v < WORD_VECTORS; v++) {
      V w[ROWS], dw[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        if constexpr (INPUT) w[r] = expand<INSIDE>(lanes_of(masks[r][g], v), pass.values + slot[r]);
        dw[r] = V{};
      }
      for (i64 s = 0; s < batch; s++) {
        const i64 at = (g * batch + s) * WORD + v * VL;
        V lanes{}, acc{};
        if constexpr (VALUES) lanes = load(part.x + at);
        if constexpr (VALUES) pin(lanes);
        if constexpr (INPUT) acc = load(part.dx + at);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          V grad = broadcast(dy[r * batch + s]);
          if constexpr (VALUES && INPUT) pin(grad);
          if constexpr (VALUES) dw[r] += grad * lanes;
          if constexpr (INPUT) acc += grad * w[r];
        }
        if constexpr (INPUT) store(part.dx + at, acc);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const unsigned mask = lanes_of(masks[r][g], v);
        if constexpr (VALUES) compress(mask, pass.dvalues + slot[r], last[r], dw[r]);
        slot[r] += count_bits(mask);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) part.next[row + r] = slot[r];
}

template <bool INPUT, bool VALUES>
void backward_part(const FewPass& pass, const Part& part, i64 begin, i64 end) {
  constexpr int ROWS = REGISTERS / 4;
  // So many words at a time that x and dx stay in the first-level cache while the rows go by.
  constexpr i64 CACHED = FIRST_LEVEL / 2 / sizeof(float) / WORD;
  const i64 words = words_of(pass.in), step = CACHED / most(1, pass.batch) + 1;
  for (i64 r = begin; r < end; r++) part.next[r] = pass.row_ptr[r];
  for (i64 first = 0; first < words; first += step) {
    const i64 last = least(words, first + step);
    i64 row = begin;
    for (; row + ROWS <= end && is_inside<float>(pass, row + ROWS); row += ROWS)
      backward_rows<ROWS, INPUT, VALUES, true>(pass, part, row, first, last);
    for (; row < end; row++)
      backward_rows<1, INPUT, VALUES, false>(pass, part, row, first, last);
  }
}

// Rows are dealt out in this many parts, whatever the number of threads: the parts' gradients of
// the input are added in order, and so are the same on any number.
i64 parts_of(const FewPass& pass) {
  constexpr i64 MOST = 8, ROWS_EACH = 64;
  return most(1, least(MOST, pass.out / ROWS_EACH));
}

}  // namespace

bool elements_forward(const FewPass& pass) { return forward<8>(pass, pass.values); }

bool int8_elements_forward(const FewPass& pass, const int8_t* values) {
  return forward<4>(pass, values);
}

bool elements_backward(const FewPass& pass) {
  const i64 size = pass.batch * words_of(pass.in) * WORD, parts = parts_of(pass);
  const i64 x_size = pass.dvalues ? size : 0, dx_size = pass.dx ? size : 0;
  Scratch scratch(Scratch::size_of<float>(x_size) + Scratch::size_of<float>(pass.batch * pass.out) +
                  parts * Scratch::size_of<float>(dx_size) + Scratch::size_of<i64>(pass.out));
  if (scratch.failed()) return false;
  float* x = scratch.take<float>(x_size);
  float* dy = scratch.take<float>(pass.batch * pass.out);
  float* dx = scratch.take<float>(parts * dx_size);
  i64* next = scratch.take<i64>(pass.out);
  if (pass.dvalues) pack_words(pass.x, pass.batch, pass.in, x);
  for (i64 r = 0; r < pass.out; r++)
    for (i64 s = 0; s < pass.batch; s++)
      dy[r * pass.batch + s] = pass.dy.data.f32[pass.dy.at(s, r)];
#pragma omp parallel num_threads(pass.threads)
  {
#pragma omp for schedule(static)
    for (i64 k = 0; k < parts; k++) {
      const i64 begin = pass.out * k / parts, end = pass.out * (k + 1) / parts;
      const Part part = {x, dy, dx + k * dx_size, next};
      if (pass.dx) std::memset(part.dx, 0, dx_size * sizeof(float));
      if (pass.dx && pass.dvalues)
        backward_part<true, true>(pass, part, begin, end);
      else if (pass.dx)
        backward_part<true, false>(pass, part, begin, end);
      else
        backward_part<false, true>(pass, part, begin, end);
    }
    if (pass.dx) {
#pragma omp for schedule(static)
      for (i64 g = 0; g < words_of(pass.in); g++)
        for (i64 s = 0; s < pass.batch; s++) {
          const i64 at = (g * pass.batch + s) * WORD, count = least(WORD, pass.in - g * WORD);
          float sums[WORD] = {};
          for (i64 k = 0; k < parts; k++)
            for (int i = 0; i < WORD; i++) sums[i] += dx[k * dx_size + at + i];
          std::memcpy(pass.dx + s * pass.in + g * WORD, sums, count * sizeof(float));
        }
    }
  }
  return true;
}

}  // namespace dynsparse
