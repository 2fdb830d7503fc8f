#include "ops/arguments.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <sstream>

namespace torch_gdn {

namespace {

// The bytes of a strided tensor: dimensions of more than one element, the largest stride first.
struct Box {
  struct Dimension {
    int64_t size, stride;
  };
  const char* first;
  c10::SmallVector<Dimension, 6> dimensions;
  int64_t item, extent;  // from the first byte to the last

  explicit Box(const at::Tensor& x) : first(static_cast<const char*>(x.const_data_ptr())), item(x.element_size()) {
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (x.size(d) > 1) dimensions.push_back({x.size(d), x.stride(d) * item});
    }
    std::sort(dimensions.begin(), dimensions.end(), [](const auto& a, const auto& b) { return a.stride > b.stride; });
    measure();
  }

  void measure() {
    extent = item;
    for (const auto& [size, stride] : dimensions) extent += (size - 1) * stride;
  }

  bool is_dense() const {
    int64_t bytes = item;
    for (const auto& each : dimensions) bytes *= each.size;
    return bytes == extent;
  }

  // Each dimension steps over all that is within it. Other layouts without overlap exist, but no allocator makes them.
  bool overlaps_itself() const {
    int64_t within = item;
    for (auto each = dimensions.rbegin(); each != dimensions.rend(); ++each) {
      if (each->stride < within) return true;
      within += (each->size - 1) * each->stride;
    }
    return false;
  }

  Box slice(int64_t index) const {
    Box part = *this;
    part.first += index * dimensions.front().stride;
    part.dimensions.erase(part.dimensions.begin());
    part.measure();
    return part;
  }
};

// Slices of what has gaps are compared, up to `slices` of them: pages with several tensors each have many, and are
// right.
bool overlap(const Box& a, const Box& b, int& slices) {
  if (a.first >= b.first + b.extent || b.first >= a.first + a.extent) return false;
  const bool a_is_dense = a.is_dense(), b_is_dense = b.is_dense();
  if (a_is_dense && b_is_dense) return true;
  const bool split_a = b_is_dense || (!a_is_dense && a.extent >= b.extent);
  const Box &split = split_a ? a : b, &other = split_a ? b : a;
  for (int64_t i = 0; i < split.dimensions.front().size; ++i) {
    if (--slices < 0) return false;
    if (overlap(split.slice(i), other, slices)) return true;
  }
  return false;
}

}  // namespace

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (!a.storage().is_alias_of(b.storage()) || a.numel() == 0 || b.numel() == 0) return false;
  int slices = 1024;
  return overlap(Box(a), Box(b), slices);
}

std::vector<Argument> arguments_of(const std::string& schema) {
  std::vector<Argument> arguments;
  const size_t open = schema.find('('), close = schema.find(") ->");
  std::istringstream list(schema.substr(open + 1, close - open - 1));
  for (std::string text; std::getline(list, text, ',');) {
    const std::string declared = text.substr(0, text.find('='));
    if (declared == " *") continue;  // those after it are given by name
    arguments.push_back({declared.substr(declared.rfind(' ') + 1), declared.find("!)") != std::string::npos});
  }
  return arguments;
}

void check_required(const char* op, const std::vector<Argument>& arguments, TensorPointers tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_TYPE(tensors[i] == nullptr || tensors[i]->defined(), op, ": ", arguments[i].name,
                     ": expected a tensor, got None");
  }
}

void check_written(const char* op, const std::vector<Argument>& arguments, TensorPointers tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!arguments[i].is_written || tensors[i] == nullptr) continue;
    TORCH_CHECK_VALUE(tensors[i]->numel() == 0 || !Box(*tensors[i]).overlaps_itself(), op, ": ", arguments[i].name,
                      ": expected elements that do not overlap, got strides ", tensors[i]->strides());
    for (size_t j = 0; j < tensors.size(); ++j) {
      if (j == i || tensors[j] == nullptr) continue;
      TORCH_CHECK_VALUE(!share_memory(*tensors[i], *tensors[j]), op, ": ", arguments[i].name,
                        ": expected memory of its own, got some that is ", arguments[j].name, "'s too");
    }
  }
}

}  // namespace torch_gdn
