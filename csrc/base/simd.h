// Vectors of the instruction set's own width, in the portable vector extensions of GCC and Clang.
//
// The width is never larger than what the machine has in one register: wider "virtual" vectors
// compile to code that is ten times slower.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define DYNSPARSE_VECTOR_BYTES 64
#elif defined(__AVX__)
#define DYNSPARSE_VECTOR_BYTES 32
#else
#define DYNSPARSE_VECTOR_BYTES 16
#endif

#define DYNSPARSE_INLINE inline __attribute__((always_inline))

namespace dynsparse {

using i32 = int32_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;

// Floats per vector, and the vector types: V on aligned scratch, VU on tensors of any alignment.
constexpr int VL = DYNSPARSE_VECTOR_BYTES / 4;
typedef float V __attribute__((vector_size(DYNSPARSE_VECTOR_BYTES), may_alias));
typedef float VU __attribute__((vector_size(DYNSPARSE_VECTOR_BYTES), aligned(4), may_alias));

// Vector registers: how large a block of accumulators may be.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

// Floats per cache line: chunks of this many features are read and written as whole lines.
constexpr int LINE = 16;

DYNSPARSE_INLINE V load(const float* p) { return *reinterpret_cast<const V*>(p); }
DYNSPARSE_INLINE void store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }
DYNSPARSE_INLINE V load_unaligned(const float* p) { return *reinterpret_cast<const VU*>(p); }
// As floats.
DYNSPARSE_INLINE V load_unaligned(const int8_t* p) {
#if defined(__AVX512F__)
  const __m512i weights = _mm512_maskz_cvtepi8_epi32(
      0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_maskz_cvtepi32_ps(0xFFFF, weights);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  V weights;
  for (int i = 0; i < VL; i++) weights[i] = static_cast<float>(p[i]);
  return weights;
#endif
}
DYNSPARSE_INLINE void store_unaligned(float* p, V v) { *reinterpret_cast<VU*>(p) = v; }
// Subtracting zero keeps every value, -0.0 included, so compilers reduce this to one broadcast.
DYNSPARSE_INLINE V broadcast(float s) { return s - V{}; }

DYNSPARSE_INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
DYNSPARSE_INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }
DYNSPARSE_INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// Keeps a value in a register. GCC folds a load with two uses into two memory operands, and loads
// are what limits these kernels.
DYNSPARSE_INLINE void pin(V& v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__SSE2__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
}

// The first n <= VL floats at p, zeros after them.
DYNSPARSE_INLINE V load_first(const float* p, i64 n) {
#if defined(__AVX512F__)
  return reinterpret_cast<V>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
#else
  alignas(64) float lanes[VL] = {};
  for (i64 i = 0; i < n; i++) lanes[i] = p[i];
  return load(lanes);
#endif
}
DYNSPARSE_INLINE void store_first(float* p, V v, i64 n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(v));
#else
  alignas(64) float lanes[VL];
  store(lanes, v);
  for (i64 i = 0; i < n; i++) p[i] = lanes[i];
#endif
}

// ---- shuffles of two vectors; b's lanes count from VL ----

template <class Pattern, std::size_t... I>
DYNSPARSE_INLINE V shuffle(V a, V b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, Pattern::lane(I)...);
}
template <class Pattern>
DYNSPARSE_INLINE V shuffle(V a, V b) {
  return shuffle<Pattern>(a, b, std::make_index_sequence<VL>{});
}

// Inside every 128-bit quarter: a0 b0 a1 b1 (first = 0) or a2 b2 a3 b3 (first = 2).
template <int first>
struct Interleave1 {
  static constexpr int lane(int i) { return (i & ~3) + first + (i % 4) / 2 + (i % 2 ? VL : 0); }
};
// Inside every 128-bit quarter: a0 a1 b0 b1 (first = 0) or a2 a3 b2 b3 (first = 2).
template <int first>
struct Interleave2 {
  static constexpr int lane(int i) { return (i & ~3) + first + i % 2 + (i % 4 >= 2 ? VL : 0); }
};
// The even (first = 0) or odd (first = 1) 128-bit quarters of a followed by b.
template <int first>
struct Quarters {
  static constexpr int lane(int i) { return (i / 4 * 2 + first) * 4 + i % 4; }
};

// r[i] lane j <- r[j] lane i.
DYNSPARSE_INLINE void transpose(V (&r)[VL]) {
  V t[VL];
#pragma GCC unroll 16
  for (int i = 0; i < VL; i += 2) {
    t[i] = shuffle<Interleave1<0>>(r[i], r[i + 1]);
    t[i + 1] = shuffle<Interleave1<2>>(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < VL; i += 4) {
    r[i] = shuffle<Interleave2<0>>(t[i], t[i + 2]);
    r[i + 1] = shuffle<Interleave2<2>>(t[i], t[i + 2]);
    r[i + 2] = shuffle<Interleave2<0>>(t[i + 1], t[i + 3]);
    r[i + 3] = shuffle<Interleave2<2>>(t[i + 1], t[i + 3]);
  }
  // Every quarter is transposed now; what is left is a transpose of whole quarters.
  if constexpr (VL == 8) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      V even = shuffle<Quarters<0>>(r[j], r[4 + j]), odd = shuffle<Quarters<1>>(r[j], r[4 + j]);
      r[j] = even;
      r[4 + j] = odd;
    }
  } else if constexpr (VL == 16) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      V even0 = shuffle<Quarters<0>>(r[j], r[4 + j]);
      V odd0 = shuffle<Quarters<1>>(r[j], r[4 + j]);
      V even1 = shuffle<Quarters<0>>(r[8 + j], r[12 + j]);
      V odd1 = shuffle<Quarters<1>>(r[8 + j], r[12 + j]);
      r[j] = shuffle<Quarters<0>>(even0, even1);
      r[4 + j] = shuffle<Quarters<0>>(odd0, odd1);
      r[8 + j] = shuffle<Quarters<1>>(even0, even1);
      r[12 + j] = shuffle<Quarters<1>>(odd0, odd1);
    }
  }
}

// ---- sums across lanes, many vectors at once ----
//
// A tree over VL vectors leaves their VL sums in one vector, in order: each level adds the halves
// of two vectors and keeps both, which costs 3 instructions per vector instead of a chain each.

// Leaves of the tree: fold1 of two vectors, fold2 of two such pairs. Every quarter of the result
// then holds partial sums of the four vectors, in order.
DYNSPARSE_INLINE V fold1(V a, V b) {
  return shuffle<Interleave1<0>>(a, b) + shuffle<Interleave1<2>>(a, b);
}
DYNSPARSE_INLINE V fold2(V a, V b) {
  return shuffle<Interleave2<0>>(a, b) + shuffle<Interleave2<2>>(a, b);
}
// Upper levels: add neighbouring quarters of a, then of b.
DYNSPARSE_INLINE V fold_quarters(V a, V b) {
  return shuffle<Quarters<0>>(a, b) + shuffle<Quarters<1>>(a, b);
}

// The sums of N vectors, in order, in the first lanes; VL of them from a full tree.
template <int N>
DYNSPARSE_INLINE V sums_of(const V* leaves) {
  if constexpr (N == 1) {
    return leaves[0];
  } else {
    V a = sums_of<N / 2>(leaves), b = sums_of<N / 2>(leaves + N / 2);
    if constexpr (N == 2) return fold1(a, b);
    else if constexpr (N == 4) return fold2(a, b);
    else return fold_quarters(a, b);
  }
}

}  // namespace dynsparse
