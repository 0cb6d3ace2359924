// The functions of the GNU runtime for OpenMP that the kernels call. LLVM's runtime has them, too.
#ifndef DYNSPARSE_BASE_OPENMP_H
#define DYNSPARSE_BASE_OPENMP_H

extern "C" {

int omp_get_thread_num();
int omp_get_num_threads();
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier();
void GOMP_critical_start();
void GOMP_critical_end();
bool GOMP_loop_nonmonotonic_dynamic_start(long begin, long end, long step, long chunk, long* first,
                                          long* last);
bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last);
void GOMP_loop_end();
void GOMP_loop_end_nowait();

}  // extern "C"

#endif
