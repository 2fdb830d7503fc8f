// The stream's error log, which PyTorch reads at the next synchronisation. The layout is that of c10/metal/error.h,
// torch 2.13; csrc/metal/encoder.mm asserts it.
#pragma once
#ifdef __METAL__
#include <metal_stdlib>
using namespace metal;
typedef atomic_uint ErrorCount;
#else
typedef unsigned int ErrorCount;
#endif

struct ErrorLog {
  ErrorCount count;
  struct Message {
    char file[128];
    char function[128];
    char text[250];
    unsigned int line;
  } messages[30];
};

#ifdef __METAL__
METAL_FUNC void copy_text(device char* target, constant const char* text, int size) {
  int length = 0;
  for (; length < size - 1 && text[length] != 0; ++length) target[length] = text[length];
  target[length] = 0;
}

METAL_FUNC void report_error(
    device ErrorLog* log, constant const char* function, constant const char* text, uint line) {
  const uint slot = atomic_fetch_add_explicit(&log->count, 1u, memory_order_relaxed);
  if (slot >= 30) return;
  device ErrorLog::Message& message = log->messages[slot];
  copy_text(message.file, "torch_gdn", 128);
  copy_text(message.function, function, 128);
  copy_text(message.text, text, 250);
  message.line = line;
}
#endif
