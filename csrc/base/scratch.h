// Aligned scratch memory that is kept between calls.
#pragma once

#include <cstddef>

namespace dynsparse {

// Borrows a buffer for the length of a call. Buffers only grow and are shared by all threads that
// call kernels: as many exist as calls ever ran at the same time.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool failed() const { return data_ == nullptr; }

  // Hands out consecutive pieces; their rounded sizes must have been summed for the constructor.
  template <class T>
  T* take(std::size_t count) {
    T* piece = reinterpret_cast<T*>(data_ + used_);
    used_ += rounded(count * sizeof(T));
    return piece;
  }

  static constexpr std::size_t rounded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  template <class T>
  static constexpr std::size_t size_of(std::size_t count) {
    return rounded(count * sizeof(T));
  }

 private:
  char* data_;
  std::size_t size_;
  std::size_t used_ = 0;
};

}  // namespace dynsparse
