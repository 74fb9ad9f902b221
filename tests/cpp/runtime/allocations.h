// SPDX-License-Identifier: BSD-3-Clause
// Counts heap allocations of this program by standing in for malloc and its relatives. Include it
// in one source file. Sanitizers have that place themselves: then nothing is counted.
#pragma once

#include <malloc.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>

namespace allocations {

inline thread_local bool t_counting = false;
inline thread_local size_t t_count = 0;

// Allocations of this thread since the object was made.
class Counter {
 public:
  Counter() {
    t_count = 0;
    t_counting = true;
  }
  ~Counter() { t_counting = false; }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  // Also ends the counting, so that printing a result does not count.
  size_t count() {
    t_counting = false;
    return t_count;
  }
};

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
inline bool counted() { return true; }
inline size_t in_use() { return mallinfo2().uordblks; }
#else
inline bool counted() { return false; }
inline size_t in_use() { return 0; }
#endif

inline void note() {
  if (t_counting) ++t_count;
}

}  // namespace allocations

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t size) {
  allocations::note();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  allocations::note();
  return __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) {
  allocations::note();
  return __libc_realloc(memory, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  allocations::note();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, size_t alignment, size_t size) {
  allocations::note();
  *memory = __libc_memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}
}

#endif
