// Views the memory of a device tensor as a CPU tensor. The caller must have waited for the stream, or run in stream
// order.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace simulator {

const void* buffer_of(const at::Tensor& tensor);
at::Tensor host_view(const at::Tensor& tensor);
void report_written(const at::Tensor& view);  // reports exactly the bytes of its elements

// Copies in stream order. A blocking copy from or to the host waits for the stream first.
void copy_between(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

// Returns the number of copies that PyTorch has made in each direction: "to the device", "to the host", "on the
// device".
std::map<std::string, uint64_t> copies();

}  // namespace simulator
