// The algorithms in which Metal goes through a prompt, and which of them a call takes: that of the nearest shape in a
// table. No Metal here, so that it is built, set and tested on every machine.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace torch_gdn {

enum class PrefillAlgorithm {
  kChunked,     // a kernel for each stage of a chunk, with its results in device memory: each chunk by itself
  kFusedChunk,  // one kernel, chunk by chunk, the state in registers
  kRecurrent,   // one kernel, token by token, the state in registers
};

std::optional<PrefillAlgorithm> prefill_algorithm_of(const std::string& name);
std::string name_of(PrefillAlgorithm algorithm);
std::vector<std::string> prefill_algorithms();

struct PrefillShape {
  int64_t tokens;  // of a sequence, on average
  int64_t heads;   // value heads of all sequences
  int64_t K, V;

  // Of 32 columns of V: what the fused and the recurrent algorithm, and the walk over chunks of the staged one, share
  // out.
  int64_t threadgroups() const { return heads * ((V + 31) / 32); }
};

struct PrefillChoice {
  PrefillAlgorithm algorithm;
  int64_t chunk_size = 0;  // of the fused chunk algorithm: 8, 16 or 32 tokens; 0: as it goes into threadgroup memory
};

struct TuningRow {
  int64_t tokens, threadgroups, K;
  PrefillChoice choice;
};

// The algorithm of a call on the device with this name and so many cores, or the one that is forced: of the rows that
// were measured on a device of that name the nearest, by the sum of the logarithms of the sizes' ratios; without any,
// what is reckoned for its number of cores.
PrefillChoice prefill_algorithm(const PrefillShape& shape, const std::string& device, int64_t cores);

// What was measured, by the devices' names, in place of what was set before.
void set_tuning_cache(std::map<std::string, std::vector<TuningRow>> table);

// From now on every call takes this algorithm; nothing: the table's again.
void force_prefill_algorithm(std::optional<PrefillChoice> choice);
std::optional<PrefillChoice> forced_prefill_algorithm();

// Tokens of a chunk of the fused chunk algorithm: as many as are wanted, where 32 KB of threadgroup memory hold them;
// else 16 where the rows of q and k take at most 8 KB, so that several threadgroups fit into the 60 KB that a core has;
// else 8.
int64_t fused_chunk_size(int64_t K, int64_t element_bytes, int64_t wanted);

}  // namespace torch_gdn
