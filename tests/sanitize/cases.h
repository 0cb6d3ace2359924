// What the cases share: random numbers, guarded arrays, and the functions of one library.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "api.h"
#include "include/guarded.h"

using i32 = int32_t;
using i64 = int64_t;

// The functions of api.h that the cases call.
#define FUNCTIONS(FUNCTION) \
  FUNCTION(masks_expand) \
  FUNCTION(bf16_unit) \
  FUNCTION(release_scratch) \
  FUNCTION(pattern_large_pages) \
  FUNCTION(linear_forward) \
  FUNCTION(linear_backward) \
  FUNCTION(linear_forward_bf16) \
  FUNCTION(linear_backward_bf16) \
  FUNCTION(conv_forward) \
  FUNCTION(conv_backward) \
  FUNCTION(attention_forward) \
  FUNCTION(attention_backward) \
  FUNCTION(panels_from) \
  FUNCTION(panels_size) \
  FUNCTION(panels_bytes) \
  FUNCTION(panels_make) \
  FUNCTION(int8_forward) \
  FUNCTION(small_masks) \
  FUNCTION(small_forward) \
  FUNCTION(small_backward) \
  FUNCTION(sparse_input_forward) \
  FUNCTION(sparse_input_backward) \
  FUNCTION(rows_to_dense) \
  FUNCTION(rows_from_dense) \
  FUNCTION(pattern_merge) \
  FUNCTION(pattern_by_columns) \
  FUNCTION(pattern_unpack) \
  FUNCTION(pattern_move) \
  FUNCTION(grow_pool) \
  FUNCTION(grow_scan) \
  FUNCTION(grow_select) \
  FUNCTION(grow_compact) \
  FUNCTION(grow_screen) \
  FUNCTION(grow_screens) \
  FUNCTION(rank_keys) \
  FUNCTION(rank_digits) \
  FUNCTION(rank_narrow) \
  FUNCTION(rank_places) \
  FUNCTION(dropout)

// They, in the library under test.
struct Library {
#define FUNCTION(name) decltype(&dynsparse_##name) name;
  FUNCTIONS(FUNCTION)
#undef FUNCTION
};

struct Random {
  std::mt19937_64 engine;
  explicit Random(uint64_t seed) : engine(seed) {}
  i64 below(i64 n) { return static_cast<i64>(engine() % static_cast<uint64_t>(n)); }
  i64 among(std::initializer_list<i64> list) { return list.begin()[below(list.size())]; }
  bool chance(int percent) { return below(100) < percent; }
  // Few bits, so that bfloat16 holds them, too.
  float number() { return static_cast<float>(below(257) - 128) / 64; }
  Place place() { return chance(70) ? Place::RIGHT : Place::LEFT; }
};

inline float widened(dynsparse_bf16 v) {
  const uint32_t bits = uint32_t{v.bits} << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline dynsparse_bf16 narrowed(float f) {  // of a number() alone
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return {static_cast<uint16_t>(bits >> 16)};
}
inline float number_of(float f) { return f; }
inline float number_of(dynsparse_bf16 b) { return widened(b); }
inline void assign(float& to, float from) { to = from; }
inline void assign(dynsparse_bf16& to, float from) { to = narrowed(from); }

template <class T>
class Array {
 public:
  Array(Random& random, i64 count)
      : memory_(std::make_unique<Guarded>(count * sizeof(T), random.place())), count_(count) {}
  Array(Random& random, const std::vector<T>& from) : Array(random, from.size()) {
    std::copy(from.begin(), from.end(), data());
    freeze();
  }
  T* data() const { return static_cast<T*>(memory_->data()); }
  i64 size() const { return count_; }
  T& operator[](i64 i) const { return data()[i]; }
  void freeze() const { memory_->freeze(); }
  void fill(Random& random) const {
    for (i64 i = 0; i < count_; i++) assign(data()[i], random.number());
  }
  bool operator==(const Array& other) const {
    return count_ == other.count_ && std::memcmp(data(), other.data(), count_ * sizeof(T)) == 0;
  }

 private:
  std::unique_ptr<Guarded> memory_;
  i64 count_;
};

// A matrix [batch, features] of any strides, what lies between its elements being NaN; read only.
template <class T>
struct Strided {
  Array<T> memory;
  T* data;
  i64 batch_stride, feature_stride;

  static Strided random(Random& random, i64 batch, i64 features) {
    i64 by_sample = features, by_feature = 1;
    switch (random.below(8)) {
      case 0: by_sample = features + random.below(40); break;
      case 1: by_sample = 1, by_feature = batch; break;
      case 2: by_sample = 1, by_feature = batch + random.below(9); break;
      case 3:
        by_feature = 1 + random.below(4);
        by_sample = by_feature * features + random.below(5);
        break;
      case 4: by_sample = 0; break;                                // one sample for all
      case 5: by_feature = 0, by_sample = 1; break;                // one feature for all
      case 6: by_sample = -features - random.below(3); break;      // backwards
      default: break;
    }
    const i64 last_sample = (batch - 1) * by_sample, last_feature = (features - 1) * by_feature;
    const bool any = batch > 0 && features > 0;
    const i64 first = any ? std::min<i64>(0, last_sample) + std::min<i64>(0, last_feature) : 0;
    const i64 end = any ? std::max<i64>(0, last_sample) + std::max<i64>(0, last_feature) + 1 : 0;
    Strided made = {Array<T>(random, end - first), nullptr, by_sample, by_feature};
    made.data = made.memory.data() - first;
    for (i64 s = 0; s < batch; s++)
      for (i64 f = 0; f < features; f++) assign(made.at(s, f), random.number());
    made.memory.freeze();
    return made;
  }
  T& at(i64 sample, i64 feature) const {
    return data[sample * batch_stride + feature * feature_stride];
  }
};

// What the kernels came to against what they should: `bound` is the sum of the terms' magnitudes.
template <class T>
void expect_near(const Array<T>& got, const std::vector<double>& wanted,
                 const std::vector<double>& bound, double tolerance, const char* what) {
  for (i64 i = 0; i < got.size(); i++)
    if (!(std::fabs(number_of(got[i]) - wanted[i]) <= tolerance * bound[i] + 1e-30)) {
      std::fprintf(stderr, "%s[%lld]: %g, not %g\n", what, static_cast<long long>(i),
                   number_of(got[i]), wanted[i]);
      die("a result is wrong");
    }
}

inline void expect(bool holds, const char* what) {
  if (!holds) die(what);
}

// The same call at the same time from several threads, each with outputs of its own, and once more
// with another number of threads: the same bits.
template <class Outputs, class Call>
void run_alike(Random& random, const Outputs& make, const Call& call, const char* what) {
  auto first = make();
  call(*first, 1 + static_cast<i32>(random.below(6)));
  if (random.chance(70)) {
    auto second = make();
    call(*second, 1 + static_cast<i32>(random.below(6)));
    expect(*first == *second, what);
  } else {
    const int callers = 2 + random.below(2);
    std::vector<decltype(make())> all;
    for (int i = 0; i < callers; i++) all.push_back(make());
    std::vector<std::thread> threads;
    for (int i = 0; i < callers; i++)
      threads.emplace_back([&, i] { call(*all[i], 1 + i % 2); });
    for (std::thread& t : threads) t.join();
    for (const auto& outputs : all) expect(*first == *outputs, what);
  }
}

// Each makes one random case, calls what it is about and checks the results.
void linear_case(const Library& library, Random& random);
void int8_case(const Library& library, Random& random);
void index_case(const Library& library, Random& random);
void conv_case(const Library& library, Random& random);
void attention_case(const Library& library, Random& random);
void dense_rows_case(const Library& library, Random& random);
void sparse_input_case(const Library& library, Random& random);
void update_case(const Library& library, Random& random);
void growth_case(const Library& library, Random& random);
void screen_case(const Library& library, Random& random);
void selection_case(const Library& library, Random& random);
void dropout_case(const Library& library, Random& random);
void far_case(const Library& library, Random& random);
