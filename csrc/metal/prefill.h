// The prefill algorithms of Metal, and which of them a call takes: that of the nearest shape in the tuning cache, else
// a heuristic. No Metal here, so that it is built and tested on every machine.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shaders/gdn/state_tile.h"

namespace torch_gdn {

// The heuristics' idea of a GPU: an M Max's cores, and what keeps each of them busy.
constexpr int64_t kTypicalCores = 40, kThreadgroupsPerCore = 3;

enum class PrefillAlgorithm {
  kChunked,     // a kernel for each stage, with its results in device memory: chunks run at the same time
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

  // Of the kernels that carry a state.
  int64_t threadgroups() const { return heads * ((V + kStateColumns - 1) / kStateColumns); }
};

struct PrefillChoice {
  PrefillAlgorithm algorithm;
  int64_t chunk_size = 0;  // of fused chunk: 8, 16 or 32 tokens; 0: its own choice
};

struct TuningRow {
  int64_t tokens, threadgroups, K;
  PrefillChoice choice;
};

// For a device of this name with so many cores: what is forced; else the nearest row that was measured on a device of
// that name, by the sum of the logarithms of the sizes' ratios; else the heuristic.
PrefillChoice prefill_algorithm(const PrefillShape& shape, const std::string& device, int64_t cores);

// Measured rows, by the devices' names.
void set_tuning_cache(std::map<std::string, std::vector<TuningRow>> rows);

// From now on every call takes this algorithm; nullopt: the tuning cache or the heuristic decides again.
void force_prefill_algorithm(std::optional<PrefillChoice> choice);
std::optional<PrefillChoice> forced_prefill_algorithm();

// Tokens of a fused chunk: as many as are wanted, where 32 KB of threadgroup memory hold them; else 16 where the rows
// of q and k take at most 8 KB, so that several threadgroups fit into the 60 KB of a core; else 8.
int64_t fused_chunk_size(int64_t K, int64_t element_bytes, int64_t wanted);

}  // namespace torch_gdn
