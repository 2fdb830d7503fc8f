#pragma once
#include <signal.h>
#include <stdint.h>
#include <time.h>

typedef uint64_t os_signpost_id_t;
typedef uint8_t os_signpost_type_t;

static inline uint64_t clock_gettime_nsec_np(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}
