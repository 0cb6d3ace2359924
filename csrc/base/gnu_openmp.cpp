// Clang's OpenMP on the GNU runtime. Clang compiles to calls of LLVM's runtime, torch for Linux
// brings the GNU one, and two runtimes in a process would compete for the cores: these are the
// functions that Clang calls, by means of those that every runtime has (LLVM's own, too).
//
// Only what the kernels use is here; anything else stays an undefined symbol, and the library is
// not loaded. Kernels are never called from inside a parallel region, so that what Clang calls
// serialized is outside all teams.

#include <cstdarg>
#include <cstdlib>
#include <utility>

#include "base/openmp.h"
#include "base/simd.h"

namespace dynsparse {
namespace {

struct Place;  // in the source, which nobody asks for
// (thread, thread, captured variables...)
using Work = void (*)(i32*, i32*, ...);

constexpr int MOST_CAPTURED = 48;
struct Region {
  Work work;
  int count;
  void* captured[MOST_CAPTURED];
};

template <std::size_t>
using Captured = void*;
template <std::size_t... I>
void call(const Region& region, i32* thread, std::index_sequence<I...>) {
  // Not as a function of any number of arguments, which some machines pass another way.
  using Exact = void (*)(i32*, i32*, Captured<I>...);
  reinterpret_cast<Exact>(region.work)(thread, thread, region.captured[I]...);
}
template <int COUNT>
void call_with(const Region& region, i32* thread) {
  call(region, thread, std::make_index_sequence<COUNT>{});
}
template <std::size_t... COUNT>
void dispatch(const Region& region, i32* thread, std::index_sequence<COUNT...>) {
  using Call = void (*)(const Region&, i32*);
  static constexpr Call calls[] = {call_with<COUNT>...};
  calls[region.count](region, thread);
}

void run(void* data) {
  i32 thread = omp_get_thread_num();
  dispatch(*static_cast<const Region*>(data), &thread,
           std::make_index_sequence<MOST_CAPTURED + 1>{});
}

thread_local unsigned asked_threads = 0;

struct Loop {
  long begin, end, step, chunk;
  bool started;
};
thread_local Loop loop;

// This thread's share of [lower, upper], as the GNU runtime divides: the first get one more.
template <class T>
void share(i32 schedule, i32* is_last, T* lower, T* upper, i64 step) {
  constexpr i32 EVEN = 34, MODIFIERS = 3 << 29;
  if ((schedule & ~MODIFIERS) != EVEN) std::abort();
  const i64 first = static_cast<i64>(*lower), last = static_cast<i64>(*upper);
  const i64 count = step > 0 ? (last - first) / step + 1 : (first - last) / -step + 1;
  const i64 threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const i64 each = count / threads, more = count % threads;
  const i64 begin = thread * each + least(thread, more), own = each + (thread < more);
  *lower = static_cast<T>(first + begin * step);
  *upper = static_cast<T>(first + (begin + own - 1) * step);
  *is_last = own > 0 && begin + own == count;
}

}  // namespace
}  // namespace dynsparse

using namespace dynsparse;

extern "C" {

void __kmpc_fork_call(Place*, i32 count, Work work, ...) {
  Region region = {work, count, {}};
  if (count > MOST_CAPTURED) std::abort();
  va_list rest;
  va_start(rest, work);
  for (i32 i = 0; i < count; i++) region.captured[i] = va_arg(rest, void*);
  va_end(rest);
  const unsigned threads = asked_threads;
  asked_threads = 0;
  GOMP_parallel(run, &region, threads, 0);
}
void __kmpc_push_num_threads(Place*, i32, i32 threads) { asked_threads = threads; }
i32 __kmpc_global_thread_num(Place*) { return omp_get_thread_num(); }
void __kmpc_serialized_parallel(Place*, i32) { asked_threads = 0; }
void __kmpc_end_serialized_parallel(Place*, i32) {}
void __kmpc_barrier(Place*, i32) { GOMP_barrier(); }

void __kmpc_for_static_init_4(Place*, i32, i32 schedule, i32* is_last, i32* lower, i32* upper, i32*,
                              i32 step, i32) {
  share(schedule, is_last, lower, upper, step);
}
void __kmpc_for_static_init_8(Place*, i32, i32 schedule, i32* is_last, i64* lower, i64* upper, i64*,
                              i64 step, i64) {
  share(schedule, is_last, lower, upper, step);
}
void __kmpc_for_static_init_8u(Place*, i32, i32 schedule, i32* is_last, uint64_t* lower,
                               uint64_t* upper, i64*, i64 step, i64) {
  share(schedule, is_last, lower, upper, step);
}
void __kmpc_for_static_fini(Place*, i32) {}

void __kmpc_dispatch_init_8(Place*, i32, i32, i64 lower, i64 upper, i64 step, i64 chunk) {
  loop = {lower, upper + (step > 0 ? 1 : -1), step, chunk, false};
}
i32 __kmpc_dispatch_next_8(Place*, i32, i32* is_last, i64* lower, i64* upper, i64* step) {
  long first, last;
  const bool some = loop.started
                        ? GOMP_loop_nonmonotonic_dynamic_next(&first, &last)
                        : GOMP_loop_nonmonotonic_dynamic_start(loop.begin, loop.end, loop.step,
                                                               loop.chunk, &first, &last);
  loop.started = true;
  if (!some) {
    GOMP_loop_end_nowait();
    return 0;
  }
  *lower = first;
  *upper = last - (loop.step > 0 ? 1 : -1);
  *step = loop.step;
  *is_last = last == loop.end;
  return 1;
}
void __kmpc_dispatch_deinit(Place*, i32) {}  // from Clang 19 on

// 1: this thread adds its share to the result itself, while the others wait.
i32 __kmpc_reduce_nowait(Place*, i32, i32, std::size_t, void*, void (*)(void*, void*), void*) {
  GOMP_critical_start();
  return 1;
}
void __kmpc_end_reduce_nowait(Place*, i32, void*) { GOMP_critical_end(); }

}  // extern "C"
