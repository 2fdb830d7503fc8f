// The properties of the simulated Mac: the least capable Mac that has Metal 3.
#pragma once
#include <cstddef>
#include <cstdint>

namespace simulator {

constexpr char kDeviceName[] = "Simulated Apple M1";
constexpr unsigned kCoreCount = 8;
constexpr uint64_t kRegistryId = 0x100000001;
constexpr int kFamily = 1007;  // MTLGPUFamilyApple7
constexpr unsigned kMacOSMajor = 15, kMacOSMinor = 0;
constexpr size_t kMaxBufferLength = size_t(8) << 30;
constexpr uint64_t kWorkingSetSize = uint64_t(10) << 30;  // two thirds of 16 GB

size_t allocated_buffer_bytes();  // the bytes of all live MTLBuffers

}  // namespace simulator
