// Kernels write errors into the stream's error log, and PyTorch raises them at the next synchronisation. The layout
// must match c10/metal/error.h of torch 2.13; csrc/metal/encoder.mm asserts that it does.
#pragma once
#include "core/parameters.h"
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
// Appends `text` to the `length` characters that `target` holds; `size` is its capacity. Returns the new length.
METAL_FUNC int append_text(device char* target, int length, int size, constant const char* text) {
  for (; length < size - 1 && *text != 0; ++length, ++text) target[length] = *text;
  target[length] = 0;
  return length;
}

// Appends the number in decimal, and returns the new length. A 64-bit division takes a hundred instructions, so this
// subtracts powers of ten instead. It computes each power by multiplication, because a table would take constant
// memory.
METAL_FUNC int append_number(device char* target, int length, int size, int64_t number) {
  if (length + 21 > size) return length;
  uint64_t rest = uint64_t(number);
  if (number < 0) {
    target[length++] = '-';
    rest = 0ul - rest;
  }
  bool has_digits = false;
  for (int digits_after = 18; digits_after >= 0; --digits_after) {
    uint64_t power = 1;
    for (int i = 0; i < digits_after; ++i) power *= 10;
    char digit = '0';
    for (; rest >= power; rest -= power) ++digit;
    has_digits = has_digits || digit != '0' || digits_after == 0;
    if (has_digits) target[length++] = digit;
  }
  target[length] = 0;
  return length;
}

// Reports "<op>: <text><got> at <place> of sequence <sequence>", with the wording of the host's checks. `text` names
// the argument and ends with ", got ". Pass -1 to leave out the place or the sequence. The log holds 30 messages; later
// ones are only counted.
METAL_FUNC void report_error(
    device ErrorLog* log,
    constant const OpName& op,
    constant const char* text,
    int64_t got,
    int64_t place,
    uint line,
    int64_t sequence = -1) {
  const uint slot = atomic_fetch_add_explicit(&log->count, 1u, memory_order_relaxed);
  if (slot >= 30) return;
  device ErrorLog::Message& message = log->messages[slot];
  append_text(message.file, 0, 128, "torch_gdn");
  append_text(message.function, 0, 128, op.text);
  int length = append_text(message.text, 0, 250, op.text);
  length = append_text(message.text, length, 250, ": ");
  length = append_text(message.text, length, 250, text);
  length = append_number(message.text, length, 250, got);
  if (place >= 0) {
    length = append_text(message.text, length, 250, " at ");
    length = append_number(message.text, length, 250, place);
  }
  if (sequence >= 0) {
    length = append_text(message.text, length, 250, " of sequence ");
    append_number(message.text, length, 250, sequence);
  }
  message.line = line;
}
#endif
