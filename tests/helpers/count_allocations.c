// Counts, if preloaded, the allocations that a library asks for while a thread counts. The asking library is the
// nearest caller outside the C and C++ libraries, whose functions (strings, containers) allocate for others.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <stddef.h>
#include <string.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static __thread const char* counted_library;
static __thread long allocations, others;

static int is_of(const char* file, const char* library) {
  const char* name = strrchr(file, '/');
  return strncmp(name ? name + 1 : file, library, strlen(library)) == 0;
}

static void note(void) {
  const char* library = counted_library;
  if (!library) return;
  counted_library = NULL;  // the next calls allocate too
  enum { kMost = 16 };
  void* frames[kMost];
  const int count = backtrace(frames, kMost);
  Dl_info found;
  for (int i = 0; i < count; ++i) {
    if (!dladdr(frames[i], &found) || !found.dli_fname) continue;
    if (is_of(found.dli_fname, "count_allocations") || is_of(found.dli_fname, "libstdc++") ||
        is_of(found.dli_fname, "libc.so")) {
      continue;
    }
    ++*(is_of(found.dli_fname, library) ? &allocations : &others);
    break;
  }
  counted_library = library;
}

void begin_counting(const char* library) {
  void* frames[1];
  backtrace(frames, 1);  // loads what it needs
  allocations = others = 0;
  counted_library = library;
}

long end_counting(void) {
  counted_library = NULL;
  return allocations;
}

long allocations_of_others(void) { return others; }

void* malloc(size_t size) {
  note();
  return __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  note();
  return __libc_calloc(count, size);
}

void* realloc(void* old, size_t size) {
  note();
  return __libc_realloc(old, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  note();
  return __libc_memalign(alignment, size);
}
