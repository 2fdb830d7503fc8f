#include "ops/arguments.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/impl/COW.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <functional>
#include <ranges>

namespace torch_gdn {

namespace {

struct Dimension {
  int64_t size, stride;  // stride in bytes
};

// Returns the dimensions that have more than one element, the largest stride first.
c10::SmallVector<Dimension, 6> dimensions_of(const at::Tensor& x) {
  c10::SmallVector<Dimension, 6> dimensions;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1) dimensions.push_back({x.size(d), x.stride(d) * x.element_size()});
  }
  std::ranges::sort(dimensions, std::greater{}, &Dimension::stride);
  return dimensions;
}

// Returns whether a dimension's stride does not step over everything within it. Other layouts without overlap exist,
// but no allocator makes them.
bool overlaps_itself(const at::Tensor& x) {
  int64_t within = x.element_size();
  for (const auto& [size, stride] : dimensions_of(x) | std::views::reverse) {
    if (stride < within) return true;
    within += (size - 1) * stride;
  }
  return false;
}

enum class Sharing { kNone, kSome, kUndecided };

// Decides whether an element of one tensor shares a byte with an element of another. The distance between two elements
// is the distance between the first elements plus a sum over dimensions of stride times index difference. Views with
// the same layout have the same strides, so each stride gives one term. If each stride steps over everything within it,
// few of its multiples come close to a given sum. Other layouts are not worth a long search.
class Distances {
 public:
  Distances(const at::Tensor& a, const at::Tensor& b) {
    for (const auto& [size, stride] : dimensions_of(a)) add({stride, 0, size - 1});
    for (const auto& [size, stride] : dimensions_of(b)) add({stride, 1 - size, 0});
    std::ranges::sort(terms_, std::greater{}, &Term::stride);
  }

  // Returns whether some sum is between `least` and `most`.
  Sharing reach(int64_t least, int64_t most) { return reach(least, most, 0); }

 private:
  struct Term {
    int64_t stride, least, most;  // least and most are bounds of the index difference
  };

  void add(const Term& term) {
    if (term.stride == 0) return;
    const auto same = std::ranges::find(terms_, term.stride, &Term::stride);
    if (same == terms_.end()) {
      terms_.push_back(term);
    } else {
      same->least += term.least;
      same->most += term.most;
    }
  }

  // Uses the terms from `first` on, the largest strides first.
  Sharing reach(int64_t least, int64_t most, size_t first) {
    if (first == terms_.size()) return least <= 0 && most >= 0 ? Sharing::kSome : Sharing::kNone;
    int64_t rest_least = 0, rest_most = 0;
    for (size_t i = first + 1; i < terms_.size(); ++i) {
      rest_least += terms_[i].stride * terms_[i].least;
      rest_most += terms_[i].stride * terms_[i].most;
    }
    const auto [stride, fewest, largest] = terms_[first];
    const int64_t begin = std::max(fewest, ceil_div_signed(least - rest_most, stride));
    const int64_t end = std::min(largest, -ceil_div_signed(rest_least - most, stride));
    for (int64_t i = begin; i <= end; ++i) {
      if (--left_ < 0) return Sharing::kUndecided;
      const Sharing sharing = reach(least - i * stride, most - i * stride, first + 1);
      if (sharing != Sharing::kNone) return sharing;
    }
    return Sharing::kNone;
  }

  static int64_t ceil_div_signed(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

  c10::SmallVector<Term, 12> terms_;
  int64_t left_ = 100'000;  // steps, which take about a millisecond
};

Sharing sharing_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.storage().is_alias_of(b.storage()) || a.numel() == 0 || b.numel() == 0) return Sharing::kNone;
  const int64_t apart = static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  return Distances(a, b).reach(apart - a.element_size() + 1, apart + b.element_size() - 1);
}

}  // namespace

bool share_memory(const at::Tensor& a, const at::Tensor& b) { return sharing_of(a, b) != Sharing::kNone; }

void check_required(const char* op, const c10::FunctionSchema& schema, TensorPointers tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_TYPE(tensors[i] == nullptr || tensors[i]->defined(), op, ": ", schema.arguments()[i].name(),
                     ": expected a tensor, got None");
  }
}

// A lazy clone shares its memory until somebody writes to it. PyTorch's mps allocator cannot make the copy at that
// moment.
static void make_own(const char* op, const std::string& argument, const at::Tensor& tensor) {
  if (!c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr())) return;
  TORCH_CHECK_VALUE(tensor.is_cpu(), op, ": ", argument, ": expected memory of its own, got a lazy clone on ",
                    tensor.device(), "; pass its clone()");
  tensor.mutable_data_ptr();
}

// A storage can be shorter than its tensor: after storage.resize_(0), which frees weights for a while, and in a
// subclass without memory of its own whose __torch_dispatch__ is off. Only the CPU reads it by its address: for mps,
// tensors without memory can be recorded.
void check_memory(const char* op, const c10::FunctionSchema& schema, TensorPointers tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor* x = tensors[i];
    if (x == nullptr || !x->defined() || !x->is_cpu() || x->numel() == 0) continue;
    const auto& storage = x->storage();
    const size_t bytes =
        at::detail::computeStorageNbytes(x->sizes(), x->strides(), x->element_size(), x->storage_offset());
    const size_t given = storage.data_ptr().get() == nullptr ? 0 : storage.nbytes();
    TORCH_CHECK_VALUE(bytes <= given, op, ": ", schema.arguments()[i].name(), ": expected memory of at least ", bytes,
                      " bytes for its elements, got ", given);
  }
}

void check_written(const char* op, const c10::FunctionSchema& schema, TensorPointers tensors) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_written(arguments[i]) || tensors[i] == nullptr) continue;
    make_own(op, arguments[i].name(), *tensors[i]);
    TORCH_CHECK_VALUE(tensors[i]->numel() == 0 || !overlaps_itself(*tensors[i]), op, ": ", arguments[i].name(),
                      ": expected elements that do not overlap, got strides ", tensors[i]->strides());
    for (size_t j = 0; j < tensors.size(); ++j) {
      if (j == i || tensors[j] == nullptr) continue;
      const Sharing sharing = sharing_of(*tensors[i], *tensors[j]);
      TORCH_CHECK_VALUE(sharing != Sharing::kSome, op, ": ", arguments[i].name(),
                        ": expected memory of its own, got memory that it shares with ", arguments[j].name());
      TORCH_CHECK_VALUE(sharing != Sharing::kUndecided, op, ": ", arguments[i].name(),
                        ": expected memory of its own, got strides ", tensors[i]->strides(),
                        ", too complex to compare with those of ", arguments[j].name(), " in the same memory");
    }
  }
}

}  // namespace torch_gdn
