// The ways in which Metal goes through a prompt, and which of them a call takes: by a table of shapes, one way each.
// No Metal here, so that it is built, set and tested on every machine.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_gdn {

enum class PrefillWay {
  kStaged,      // a kernel for each stage of a chunk, with its results in device memory: each chunk by itself
  kFused,       // one kernel, chunk by chunk, the state in registers
  kSequential,  // token by token, the state in registers
};

std::optional<PrefillWay> prefill_way_of(const std::string& name);
std::string name_of(PrefillWay way);
std::vector<std::string> prefill_way_names();

struct PrefillShape {
  int64_t tokens;  // of a sequence, on average
  int64_t heads;   // value heads of all sequences
  int64_t K, V;
};

// The way of a call on the device with this name, or the one that is forced.
PrefillWay prefill_way(const PrefillShape& shape, const std::string& device);

// From now on every call takes this way; nothing: the table's again.
void force_prefill_way(std::optional<PrefillWay> way);
std::optional<PrefillWay> forced_prefill_way();

}  // namespace torch_gdn
