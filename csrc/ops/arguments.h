// Checks what every op requires of its tensors: required ones exist, all have memory, and written ones
// have memory of their own.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

#include <array>
#include <optional>
#include <tuple>

namespace torch_gdn {

// Says whether the op writes to the argument.
inline bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  return alias != nullptr && alias->isWrite();
}

// Has one pointer per argument. It is nullptr for an argument that is not a tensor.
using TensorPointers = c10::ArrayRef<const at::Tensor*>;

void check_required(const char* op, const c10::FunctionSchema& schema, TensorPointers tensors);
bool share_memory(const at::Tensor& a, const at::Tensor& b);

// Checks that the memory of each tensor on the CPU has room for its elements, before checks of numbers read it.
void check_memory(const char* op, const c10::FunctionSchema& schema, TensorPointers tensors);

// Checks that a written tensor overlaps neither itself nor another argument.
void check_written(const char* op, const c10::FunctionSchema& schema, TensorPointers tensors);

template <typename... Member>
std::array<const at::Tensor*, sizeof...(Member)> tensors_of(const std::tuple<Member&...>& members, bool required_only) {
  const auto pointer = [&](const auto& member) -> const at::Tensor* {
    using Type = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<Type, at::Tensor>) {
      return &member;
    } else if constexpr (std::is_same_v<Type, std::optional<at::Tensor>>) {
      return !required_only && member.has_value() ? &*member : nullptr;
    } else {
      return nullptr;
    }
  };
  return std::apply([&](const auto&... each) { return std::array{pointer(each)...}; }, members);
}

}  // namespace torch_gdn
