// In place of csrc/base/scratch.cpp: include/base/scratch.h keeps nothing.
#include "api.h"

void dynsparse_release_scratch() {}
void dynsparse_pattern_large_pages(void*, int64_t) {}
