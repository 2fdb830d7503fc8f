#include "prefill_way.h"

#include <array>
#include <atomic>
#include <utility>

namespace torch_gdn {

namespace {

constexpr std::array<std::pair<PrefillWay, const char*>, 3> kWays = {{
    {PrefillWay::kStaged, "staged"},
    {PrefillWay::kFused, "fused"},
    {PrefillWay::kSequential, "sequential"},
}};

constexpr int kNotForced = -1;
std::atomic<int> forced = kNotForced;

}  // namespace

std::optional<PrefillWay> prefill_way_of(const std::string& name) {
  for (const auto& [way, known] : kWays) {
    if (name == known) return way;
  }
  return std::nullopt;
}

std::string name_of(PrefillWay way) {
  for (const auto& [known, name] : kWays) {
    if (way == known) return name;
  }
  return "";
}

std::vector<std::string> prefill_way_names() {
  std::vector<std::string> names;
  for (const auto& each : kWays) names.emplace_back(each.second);
  return names;
}

PrefillWay prefill_way(const PrefillShape&, const std::string&) {
  return forced_prefill_way().value_or(PrefillWay::kStaged);
}

void force_prefill_way(std::optional<PrefillWay> way) { forced = way.has_value() ? int(*way) : kNotForced; }

std::optional<PrefillWay> forced_prefill_way() {
  const int way = forced;
  return way == kNotForced ? std::nullopt : std::optional(PrefillWay(way));
}

}  // namespace torch_gdn
