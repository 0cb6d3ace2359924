// Weights and activations in int8.

#include <limits>

#include "base/scratch.h"
#include "base/vnni.h"
#include "linear/int8/dots.h"

namespace dynsparse {

namespace {

typedef int8_t Bytes __attribute__((vector_size(4 * LANES), may_alias));

// The lowest byte of every lane, in order.
template <int... I>
DYNSPARSE_INLINE void store_bytes(Q v, int8_t* out, std::integer_sequence<int, I...>) {
  constexpr int LOWEST = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 3;
  const Bytes bytes = reinterpret_cast<Bytes>(v);
  const auto lowest = __builtin_shufflevector(bytes, bytes, (4 * I + LOWEST)...);
  std::memcpy(out, &lowest, LANES);
}

// The features of a sample, one after the other, in steps of the largest magnitude / 127: out
// [quad of features][stride]. Returns the size of a step, NaN where a feature is not finite.
float quantize(const float* x, i64 features, i64 stride, i32* out) {
  // As integers magnitudes have the order of floats, and what is not finite is the largest.
  Q magnitudes = {};
  for (i64 f = 0; f < features; f += LANES) {
    const Q m = reinterpret_cast<Q>(load_lanes(x + f)) & 0x7fffffff;
    const Q larger = m > magnitudes;
    magnitudes = (m & larger) | (magnitudes & ~larger);
  }
  i32 most_bits = 0;
  for (int i = 0; i < LANES; i++) most_bits = magnitudes[i] > most_bits ? magnitudes[i] : most_bits;
  float largest;
  std::memcpy(&largest, &most_bits, sizeof largest);
  constexpr float TINY = 1e-30f;  // the quotient is finite
  const float inverse = largest > TINY ? 127.0f / largest : 0.0f;
  // Adding it leaves the nearest integer in the lowest bits.
  constexpr float ROUND = 3 << 22;
  for (i64 f = 0; f < features; f += LANES) {
    alignas(64) int8_t bytes[LANES];
    store_bytes(reinterpret_cast<Q>(load_lanes(x + f) * inverse + ROUND), bytes,
                std::make_integer_sequence<int, LANES>{});
    for (int i = 0; i < LANES / QUAD; i++)
      std::memcpy(out + (f / QUAD + i) * stride, bytes + i * QUAD, QUAD);
  }
  if (largest <= std::numeric_limits<float>::max()) return largest / 127.0f;
  return std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

bool int8_forward_dynamic(const Int8Pass& pass) {
  const i64 batch = pass.batch, in = pass.in, rows = pass.out / pass.block;
  const bool is_strided = pass.x.feature_stride != 1;
  const i64 row_size = is_strided ? in : 0;
  Scratch scratch(Scratch::size_of<i32>(in / QUAD * batch) + Scratch::size_of<float>(batch) +
                  Scratch::size_of<float>(row_size * pass.threads));
  if (scratch.failed()) return false;
  i32* x = scratch.take<i32>(in / QUAD * batch);
  float* units = scratch.take<float>(batch);
  float* copies = scratch.take<float>(row_size * pass.threads);
#pragma omp parallel num_threads(pass.threads)
  {
#pragma omp for schedule(static)
    for (int k = 0; k < pass.threads; k++)
      for (i64 s = batch * k / pass.threads; s < batch * (k + 1) / pass.threads; s++) {
        const float* row = pass.x.data.f32 + s * pass.x.batch_stride;
        float* copy = copies + k * row_size;
        for (i64 f = 0; f < row_size; f++) copy[f] = row[f * pass.x.feature_stride];
        const i64 first = s / INT8_SAMPLES * INT8_SAMPLES;
        units[s] = quantize(is_strided ? copy : row, in, least(INT8_SAMPLES, batch - first),
                            x + first * (in / QUAD) + s - first);
      }
#pragma omp for schedule(static)
    for (int k = 0; k < pass.threads; k++) {
      const i64 begin = rows * k / pass.threads, end = rows * (k + 1) / pass.threads;
#if defined(DYNSPARSE_VNNI)
      if (vnni_usable()) {
        int8_dot_products_vnni(pass, x, units, begin, end);
        continue;
      }
#endif
      dot_products(pass, x, units, begin, end);
    }
  }
  return true;
}

}  // namespace dynsparse
