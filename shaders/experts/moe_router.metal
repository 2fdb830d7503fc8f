// Chooses the experts of a token: computes scores, selects groups of experts, finds the top_k highest values, and
// computes their weights. A simdgroup owns one token. Lane l holds experts l, l + 32, ... in registers: their scores,
// their values (score + bias), and one bit per expert that can still be chosen. Lane g also holds the value of group g,
// and lane j the j-th choice.
// Layout: logits [T, E] with a row stride; bias [E]; weights [T, top_k] f32, ids [T, top_k] int32.
#include "core/elements.h"
#include "core/exponential.h"
#include "core/fragment.h"
#include "experts/parameters.h"

GDN_CONSTANT int kNoExpert = 0x7fffffff;

// NaN counts as the highest value, so that the ids stay valid.
METAL_FUNC float order_of(float value) { return isnan(value) ? INFINITY : value; }

// Returns the expert with the highest value among those whose bit is set. The lowest id wins a tie.
template <int Own>
METAL_FUNC int highest_of(thread const float* values, uint open, uint lane) {
  float own_value = -INFINITY;
  int own_expert = kNoExpert;
  UNROLL for (int i = 0; i < Own; ++i) {
    const float value = order_of(values[i]);
    const bool is_open = ((open >> i) & 1u) != 0;
    if (is_open && (own_expert == kNoExpert || value > own_value)) {
      own_value = value;
      own_expert = i * 32 + int(lane);
    }
  }
  const float highest = simd_max(own_value);
  return simd_min(own_value == highest ? own_expert : kNoExpert);
}

// Returns the number that belongs to an expert. All lanes get it.
template <int Own>
METAL_FUNC float number_of(thread const float* numbers, int expert, uint lane) {
  float own = 0.0f;
  UNROLL for (int i = 0; i < Own; ++i) own = i * 32 + int(lane) == expert ? numbers[i] : own;
  return simd_sum(own);
}

METAL_FUNC uint without(uint open, int expert, uint lane) {
  const bool is_own = expert % 32 == int(lane);
  return is_own ? open & ~(1u << uint(expert / 32)) : open;
}

// Returns the bits of the lane's experts that are in a set of groups.
template <int Own>
METAL_FUNC uint bits_of_groups(uint groups, constant MoeRouterParameters& parameters, uint lane) {
  uint bits = 0;
  UNROLL for (int i = 0; i < Own; ++i) {
    const int expert = i * 32 + int(lane);
    const bool is_there = expert < parameters.experts;
    const uint group = uint(is_there ? expert : 0) / uint(parameters.group_size);
    if (is_there && ((groups >> group) & 1u) != 0) bits |= 1u << uint(i);
  }
  return bits;
}

// Returns the set of groups whose experts can be chosen.
template <int Own>
METAL_FUNC uint choose_groups(thread const float* values, constant MoeRouterParameters& parameters, uint lane) {
  float own_value = 0.0f;
  for (int group = 0; group < parameters.groups; ++group) {
    uint open = bits_of_groups<Own>(1u << uint(group), parameters, lane);
    const int first = highest_of<Own>(values, open, lane);
    float value = number_of<Own>(values, first, lane);
    if (parameters.bias_type != kAbsent && parameters.group_size > 1) {
      open = without(open, first, lane);
      value += number_of<Own>(values, highest_of<Own>(values, open, lane), lane);
    }
    if (int(lane) == group) own_value = value;
  }
  uint chosen = 0;
  uint is_open = int(lane) < parameters.groups ? 1u : 0u;
  for (int i = 0; i < parameters.open_groups; ++i) {
    const int group = highest_of<1>(&own_value, is_open, lane);
    is_open = without(is_open, group, lane);
    chosen |= 1u << uint(group);
  }
  return chosen;
}

template <typename T, int Own>
[[kernel]] void moe_router(
    device const T* logits [[buffer(0)]],
    device const uchar* bias [[buffer(1)]],
    device float* weights [[buffer(2)]],
    device int* ids [[buffer(3)]],
    constant MoeRouterParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  static_assert(Own >= 1 && Own <= 32, "a lane has a bit for each of its experts");
  const int64_t token = group.x;
  device const T* row = logits + token * parameters.logits_stride;
  float scores[Own];
  float largest = -INFINITY;
  UNROLL for (int i = 0; i < Own; ++i) {
    const int expert = i * 32 + int(lane);
    scores[i] = expert < parameters.experts ? float(row[expert]) : -INFINITY;
    largest = fmax(largest, scores[i]);
  }
  if (parameters.has_sigmoid != 0) {
    UNROLL for (int i = 0; i < Own; ++i) scores[i] = 1.0f / (1.0f + gate_exp(-scores[i]));
  } else {
    largest = simd_max(largest);
    float sum = 0.0f;
    UNROLL for (int i = 0; i < Own; ++i) {
      scores[i] = i * 32 + int(lane) < parameters.experts ? gate_exp(scores[i] - largest) : 0.0f;
      sum += scores[i];
    }
    sum = simd_sum(sum);
    UNROLL for (int i = 0; i < Own; ++i) scores[i] /= sum;
  }

  float values[Own];
  UNROLL for (int i = 0; i < Own; ++i) {
    const int expert = i * 32 + int(lane);
    const bool is_biased = parameters.bias_type != kAbsent && expert < parameters.experts;
    values[i] = scores[i] + (is_biased ? read_float(bias, expert, parameters.bias_type) : 0.0f);
  }
  uint groups = 1;
  if (parameters.groups > 1) groups = choose_groups<Own>(values, parameters, lane);
  uint open = bits_of_groups<Own>(groups, parameters, lane);

  float own_weight = 0.0f;
  int own_expert = 0;
  float sum = 0.0f;
  for (int i = 0; i < parameters.top_k; ++i) {
    const int expert = highest_of<Own>(values, open, lane);
    const float weight = number_of<Own>(scores, expert, lane);
    open = without(open, expert, lane);
    sum += weight;
    own_weight = int(lane) == i ? weight : own_weight;
    own_expert = int(lane) == i ? expert : own_expert;
  }
  if (int(lane) < parameters.top_k) {
    const int64_t target = token * parameters.top_k + lane;
    weights[target] = own_weight / (parameters.renormalize != 0 ? sum + 1e-20f : 1.0f) * parameters.scale;
    ids[target] = own_expert;
  }
}
