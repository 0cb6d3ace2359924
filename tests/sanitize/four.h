// Tensors of four dimensions with any strides, guarded.
#pragma once

#include <array>

#include "cases.h"

using Four = std::array<i64, 4>;  // of n, c, h, w

inline i64 product(const Four& sizes) { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }

// Calls act with every place of a tensor and its number.
template <class Act>
void each_place(const Four& sizes, const Act& act) {
  i64 number = 0;
  Four at;
  for (at[0] = 0; at[0] < sizes[0]; at[0]++)
    for (at[1] = 0; at[1] < sizes[1]; at[1]++)
      for (at[2] = 0; at[2] < sizes[2]; at[2]++)
        for (at[3] = 0; at[3] < sizes[3]; at[3]++) act(at, number++);
}

// Of a tensor that is contiguous in one of torch's two ways, or in any order of its dimensions,
// with or without gaps.
inline Four random_strides(Random& random, const Four& sizes) {
  Four order = {0, 1, 2, 3};  // outermost first
  const i64 kind = random.below(4);
  if (kind == 1) order = {0, 2, 3, 1};
  if (kind == 2) std::shuffle(order.begin(), order.end(), random.engine);
  const bool gaps = random.chance(25);
  Four strides = {};
  i64 next = gaps && random.chance(50) ? 1 + random.below(3) : 1;
  for (int i = 3; i >= 0; i--) {
    strides[order[i]] = next;
    next = next * sizes[order[i]] + (gaps ? random.below(4) : 0);
  }
  // Those of dimensions of size 1 mean nothing.
  for (int d = 0; d < 4; d++)
    if (sizes[d] == 1 && random.chance(30)) strides[d] = random.among({0, 1, 7, i64{1} << 40});
  return strides;
}

// A tensor of any strides, what lies between its elements being NaN.
struct Tensor {
  Four sizes, strides;
  Array<float> memory;
  float* data;

  Tensor(Random& random, const Four& sizes, const Four& strides)
      : sizes(sizes), strides(strides), memory(random, end_of(sizes, strides, 1)),
        data(memory.data() - first_of(sizes, strides)) {}

  // One that is read: some dimensions may be repeated, run backwards, or lie far apart.
  static Tensor input(Random& random, const Four& sizes) {
    Four strides = random_strides(random, sizes);
    const int d = static_cast<int>(random.below(4));
    if (random.chance(15)) strides[d] = 0;
    else if (random.chance(5)) strides = {};
    else if (random.chance(5)) strides[d] = -strides[d];
    else if (random.chance(3) && sizes[0] <= 3) strides[0] = (i64{1} << 31) + random.below(100);
    Tensor made(random, sizes, strides);
    each_place(sizes, [&](const Four& at, i64) { made[at] = random.number(); });
    made.memory.freeze();
    return made;
  }
  float& operator[](const Four& at) const {
    i64 offset = 0;
    for (int d = 0; d < 4; d++) offset += at[d] * strides[d];
    return data[offset];
  }
  // To contiguous memory.
  void copy_to(const Array<float>& all) const {
    each_place(sizes, [&](const Four& at, i64 i) { all[i] = (*this)[at]; });
  }
  // Provided that all elements were written.
  bool gaps_are_untouched() const {
    i64 untouched = 0;
    for (i64 i = 0; i < memory.size(); i++) {
      uint32_t bits;
      std::memcpy(&bits, &memory[i], sizeof bits);
      untouched += bits == 0xffffffff;
    }
    return untouched == memory.size() - product(sizes);
  }

 private:
  static i64 first_of(const Four& sizes, const Four& strides) {
    i64 first = 0;
    for (int d = 0; d < 4; d++) first += std::min<i64>(0, (sizes[d] - 1) * strides[d]);
    return first;
  }
  static i64 end_of(const Four& sizes, const Four& strides, i64 end) {
    for (int d = 0; d < 4; d++) end += std::abs((sizes[d] - 1) * strides[d]);
    return end;
  }
};

// As torch has it: no address where there is nothing.
template <class T>
T* pointer(const Array<T>& array) {
  return array.size() ? array.data() : nullptr;
}
