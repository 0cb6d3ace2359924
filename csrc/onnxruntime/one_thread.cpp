// OpenMP with one thread, for onnxruntime's operator: its kernels are the objects of the package's,
// but each call has one thread, which is onnxruntime's, and there is no runtime to find.
//
// Only what the kernels call is here; the linker refuses anything else.

#include "base/openmp.h"

extern "C" {

int omp_get_thread_num() { return 0; }
int omp_get_num_threads() { return 1; }
void GOMP_parallel(void (*work)(void*), void* data, unsigned, unsigned) { work(data); }
void GOMP_barrier() {}
void GOMP_critical_start() {}
void GOMP_critical_end() {}
bool GOMP_loop_nonmonotonic_dynamic_start(long begin, long end, long, long, long* first,
                                          long* last) {
  *first = begin;
  *last = end;
  return begin != end;
}
bool GOMP_loop_nonmonotonic_dynamic_next(long*, long*) { return false; }
void GOMP_loop_end() {}
void GOMP_loop_end_nowait() {}

}  // extern "C"
