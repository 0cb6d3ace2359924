#include "scratch.h"

#include <cstdlib>
#include <mutex>

#include "simd.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace dynsparse {
namespace {

// Packed tiles are read in random order of their rows: on pages of 4 KiB nearly every row misses
// the first-level TLB, so buffers are aligned and advised for huge pages.
constexpr std::size_t HUGE_PAGE = std::size_t{1} << 21;

constexpr int SLOTS = 16;
struct Buffer {
  char* data;
  std::size_t size;
};
Buffer idle[SLOTS];
std::mutex lock;

char* allocate(std::size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, HUGE_PAGE, bytes) != 0) return nullptr;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return static_cast<char*>(data);
}

}  // namespace

Scratch::Scratch(std::size_t bytes) : data_(nullptr), size_(0) {
  Buffer found = {nullptr, 0};
  {
    std::lock_guard<std::mutex> guard(lock);
    // The largest idle buffer: most likely large enough, and the small ones are replaced by and by.
    int best = -1;
    for (int i = 0; i < SLOTS; i++)
      if (idle[i].data && (best < 0 || idle[i].size > idle[best].size)) best = i;
    if (best >= 0) std::swap(found, idle[best]);
  }
  if (found.data && found.size < bytes) {
    std::free(found.data);
    found = {nullptr, 0};
  }
  if (!found.data) {
    std::size_t size = (bytes / HUGE_PAGE + 1) * HUGE_PAGE;
    found = {allocate(size), size};
  }
  data_ = found.data;
  size_ = found.size;
}

Scratch::~Scratch() {
  if (!data_) return;
  {
    std::lock_guard<std::mutex> guard(lock);
    for (Buffer& slot : idle)
      if (!slot.data) {
        slot = {data_, size_};
        return;
      }
  }
  std::free(data_);
}

}  // namespace dynsparse

// Gives idle scratch memory back to the system.
DYNSPARSE_EXPORT void dynsparse_release_scratch() {
  using namespace dynsparse;
  std::lock_guard<std::mutex> guard(lock);
  for (Buffer& slot : idle) {
    std::free(slot.data);
    slot = {nullptr, 0};
  }
}
