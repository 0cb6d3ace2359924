// Stands in for csrc/base/scratch.h in sanitized builds: nothing is kept between calls, every piece
// lies alone between guard pages, filled with NaN, and what is written behind its end is found.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "guarded.h"

namespace dynsparse {

class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : left_(bytes) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool failed() const { return false; }

  template <class T>
  T* take(std::size_t count) {
    const std::size_t size = rounded(count * sizeof(T));
    if (size > left_) die("more scratch memory is taken than was asked for");
    left_ -= size;
    pieces_.push_back(std::make_unique<Guarded>(count * sizeof(T), Place::ALIGNED));
    return static_cast<T*>(pieces_.back()->data());
  }

  static constexpr std::size_t rounded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  template <class T>
  static constexpr std::size_t size_of(std::size_t count) {
    return rounded(count * sizeof(T));
  }

 private:
  std::size_t left_;
  std::vector<std::unique_ptr<Guarded>> pieces_;
};

}  // namespace dynsparse
