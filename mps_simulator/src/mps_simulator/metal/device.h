// The functions of metal/ that pytorch/ uses, in plain C++. A `buffer` is an id<MTLBuffer>.
#pragma once
#include <dispatch/dispatch.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace simulator {

// The caller owns the buffer until destroy_buffer. Returns null if there is not enough memory.
void* create_buffer(size_t length, size_t capacity);
void destroy_buffer(void* buffer);
std::byte* buffer_data(const void* buffer);  // without the checks of -contents
size_t buffer_length(const void* buffer);
size_t buffer_capacity(const void* buffer);
void forget_content(std::byte* data, size_t capacity);  // fills it with NaN, or with zeros in a sparse buffer
void set_buffer_length(void* buffer, size_t length);
bool is_buffer_busy(const void* buffer);  // whether a command buffer that has not completed uses it
uint32_t buffer_retain_count(const void* buffer);

// ---- PyTorch's stream ----
// Runs `work` in stream order, as a blit would. An open compute encoder ends first.
void enqueue(std::function<void()> work, const std::vector<const void*>& buffers);
// Does the same for work that is not a command on a Mac. It runs even if a fault drops the other commands.
void enqueue_bookkeeping(std::function<void()> work, const void* buffer);
void commit_stream();
void wait_for_stream();  // throws errors of the commands
bool is_stream_idle();
uint64_t pending_commands();
uint64_t waits();  // how often the host has waited for the stream
void* stream_command_buffer();
dispatch_queue_t stream_queue();

}  // namespace simulator
