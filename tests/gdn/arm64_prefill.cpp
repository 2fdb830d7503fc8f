// Runs the CPU's prefill of one head by its tables of kernels, without PyTorch's libraries, so that an emulator of
// another processor can run it: program IN OUT. Prints which kernels multiply bf16.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/simd/gdn_kernels.h"

using namespace torch_gdn::cpu;

namespace {

struct Head {
  int64_t tokens, K;
  std::vector<uint16_t> q, k, v, o;
  std::vector<float> g, beta, state;
};

template <typename T>
void read(std::FILE* file, std::vector<T>& to, size_t count) {
  to.resize(count);
  if (std::fread(to.data(), sizeof(T), count, file) != count) std::exit(2);
}

template <typename T>
HeadRows rows(std::vector<T>& of, int64_t first, int64_t width) {
  return {reinterpret_cast<char*>(of.data() + first * width), int64_t(width * sizeof(T)), at::kBFloat16};
}

template <typename Operand>
void run(const ChunkKernels<Operand>& kernels, Head& head) {
  const auto keys = std::make_unique<KeyTiles<Operand>>();
  const auto tiles = std::make_unique<HeadTiles<Operand>>();
  const auto panel = std::make_unique<PanelTiles<Operand>>();
  std::vector<Operand> second_form(head.state.size());
  Operand* operand = second_form.data();
  if constexpr (kTogether<Operand> == 1) operand = head.state.data();
  keys->K = padded(head.K);
  if constexpr (kTogether<Operand> == 2) kernels.make_operand(head.state.data(), keys->K, operand);
  for (int64_t first = 0; first < head.tokens; first += kTokens) {
    keys->tokens = std::min(kTokens, head.tokens - first);
    keys->rows = padded(keys->tokens);
    const float scale = 1.0f / __builtin_sqrtf(float(head.K));
    kernels.read_keys(rows(head.q, first, head.K), rows(head.k, first, head.K), head.K, false, scale, *keys);
    kernels.make_head(*keys, {.g = rows(head.g, first, 1), .beta = rows(head.beta, first, 1)}, *tiles);
    kernels.advance(*keys, *tiles, rows(head.v, first, kColumns), rows(head.o, first, kColumns), kColumns,
                    head.state.data(), operand, *panel);
  }
}

}  // namespace

int main(int, char** arguments) {
  std::FILE* in = std::fopen(arguments[1], "rb");
  std::vector<int64_t> sizes;
  read(in, sizes, 2);
  Head head{sizes[0], sizes[1], {}, {}, {}, {}, {}, {}, {}};
  read(in, head.q, head.tokens * head.K);
  read(in, head.k, head.tokens * head.K);
  read(in, head.v, head.tokens * kColumns);
  read(in, head.g, head.tokens);
  read(in, head.beta, head.tokens);
  read(in, head.state, head.K * kColumns);
  head.state.resize(padded(head.K) * kColumns);
  head.o.resize(head.tokens * kColumns);

  const auto* of_pairs = chunk_kernels_of_pairs();
  std::puts(of_pairs ? "pairs" : "floats");
  if (of_pairs) {
    run(*of_pairs, head);
  } else {
    run(chunk_kernels(), head);
  }
  std::FILE* out = std::fopen(arguments[2], "wb");
  std::fwrite(head.o.data(), 2, head.o.size(), out);
  std::fwrite(head.state.data(), 4, head.K * kColumns, out);
  return std::fclose(out);
}
