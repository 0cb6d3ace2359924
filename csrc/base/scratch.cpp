#include "base/scratch.h"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "api.h"

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

// Where it can be, beside the C library's heap: buffers that come and go with pattern updates would
// leave holes there.
char* allocate(std::size_t bytes) {
#if defined(__linux__)
  void* found = mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(found);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) % HUGE_PAGE;
  if (before) munmap(begin, before);
  munmap(begin + before + bytes, HUGE_PAGE - before);
  madvise(begin + before, bytes, MADV_HUGEPAGE);
  return begin + before;
#else
  void* data = nullptr;
  return posix_memalign(&data, HUGE_PAGE, bytes) == 0 ? static_cast<char*>(data) : nullptr;
#endif
}

void release(Buffer& buffer) {
#if defined(__linux__)
  if (buffer.data) munmap(buffer.data, buffer.size);
#else
  std::free(buffer.data);
#endif
  buffer = {nullptr, 0};
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
  if (found.data && found.size < bytes) release(found);
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
  Buffer own = {data_, size_};
  release(own);
}

}  // namespace dynsparse

void dynsparse_release_scratch() {
  using namespace dynsparse;
  std::lock_guard<std::mutex> guard(lock);
  for (Buffer& slot : idle) release(slot);
}

// New memory costs a fifth on large pages.
void dynsparse_pattern_large_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t PAGE = dynsparse::HUGE_PAGE;
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (at + PAGE - 1) / PAGE * PAGE, end = (at + bytes) / PAGE * PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}
