// Memory between two pages that must not be touched. Address sanitizers do not see vector loads
// that are masked in hardware; the processor does.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define GUARDED_POISON
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GUARDED_POISON
#endif
#endif
#if defined(GUARDED_POISON)
#include <sanitizer/asan_interface.h>
#endif

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "sanitize: %s\n", what);
  std::abort();
}

// RIGHT: the last byte is the last of its page; LEFT: the first is the first; ALIGNED: as far to
// the right as an address that is a multiple of 64 allows.
enum class Place { RIGHT, LEFT, ALIGNED };

class Guarded {
 public:
  Guarded(std::size_t bytes, Place place) : bytes_(bytes) {
    room_ = (bytes + PAGE - 1) / PAGE * PAGE;
    void* found = mmap(nullptr, room_ + 2 * PAGE, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) die("no memory");
    begin_ = static_cast<char*>(found) + PAGE;
    if (room_ && mprotect(begin_, room_, PROT_READ | PROT_WRITE)) die("no memory");
    const std::size_t slack = room_ - bytes_;
    before_ = place == Place::RIGHT ? slack : place == Place::LEFT ? 0 : slack / 64 * 64;
    // Bytes of 0xff are NaN as float, double and bfloat16.
    if (room_ <= FILLED) std::memset(begin_, 0xff, room_);
#if defined(GUARDED_POISON)
    ASAN_POISON_MEMORY_REGION(begin_, before_);
    ASAN_POISON_MEMORY_REGION(begin_ + before_ + bytes_, slack - before_);
#endif
  }
  ~Guarded() {
#if defined(GUARDED_POISON)
    ASAN_UNPOISON_MEMORY_REGION(begin_, room_);
#endif
    if (room_ <= FILLED) {
      untouched(0, before_);
      untouched(before_ + bytes_, room_);
    }
    munmap(begin_ - PAGE, room_ + 2 * PAGE);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  void* data() const { return begin_ + before_; }
  std::size_t bytes() const { return bytes_; }

  // From now on whoever writes here is stopped.
  void freeze() {
    if (room_ && mprotect(begin_, room_, PROT_READ)) die("mprotect");
  }

 private:
  static constexpr std::size_t PAGE = 4096, FILLED = std::size_t{1} << 26;

  void untouched(std::size_t from, std::size_t to) const {
    for (std::size_t i = from; i < to; i++)
      if (begin_[i] != char(0xff)) die("memory beside an array was written");
  }

  char* begin_;
  std::size_t bytes_, room_, before_;
};
