// What an op accepts: written once, called first by every device's kernel. Each check_<op> takes the op's own arguments
// and returns the sizes that the kernel needs, so nothing is parsed twice. A wrong value raises ValueError, a wrong
// dtype TypeError; the message is "<op>: <argument>: expected <what>, got <what>". torch_gdn/fakes.py raises the same.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace torch_gdn {

using at::Tensor;
using std::optional;

constexpr int64_t kLargestK = 256, kLargestV = 512;

struct ChunkShape {
  int64_t B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0;  // what an op does not have stays 0
  int64_t N = 0;                                      // sequences: B, or len(cu_seqlens) - 1 when packed
  int64_t NT = 0;                                     // rows of h: chunks of a batch row, or an upper bound when packed
  int64_t C = 0;                                      // tokens a chunk
  bool packed = false;
  bool tiled = false;  // a key head serves every H-th value head, not a block of neighbours
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The checks of one call of one op. `device` and `dtype` are those of the op's first tensor.
class Check {
 public:
  Check(const char* op, const char* first, const Tensor& tensor) : op_(op), first_(first), device_(tensor.device()) {}

  template <typename... Got>
  void value(bool holds, const char* argument, const char* expected, const Got&... got) const {
    TORCH_CHECK_VALUE(holds, op_, ": ", argument, ": expected ", expected, ", got ", got...);
  }

  void dimensions(const char* argument, const Tensor& x, int64_t count, const char* pattern) const {
    TORCH_CHECK_VALUE(x.dim() == count, op_, ": ", argument, ": expected ", count, " dimensions ", pattern, ", got ",
                      x.dim(), " of shape ", x.sizes());
    on_device(argument, x);
  }

  void shape(const char* argument, const Tensor& x, const char* pattern, std::initializer_list<int64_t> sizes) const {
    const at::IntArrayRef expected(sizes.begin(), sizes.size());
    TORCH_CHECK_VALUE(x.sizes() == expected, op_, ": ", argument, ": expected shape ", pattern, " = ", expected,
                      ", got ", x.sizes());
    on_device(argument, x);
  }

  void on_device(const char* argument, const Tensor& x) const {
    TORCH_CHECK_VALUE(x.device() == device_, op_, ": ", argument, ": expected a tensor on ", device_, " like ", first_,
                      ", got one on ", x.device());
  }

  void is_f32(const char* argument, const Tensor& x) const {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, op_, ": ", argument, ": expected dtype Float, got ",
                     x.scalar_type());
  }

  void is_floating(const char* argument, const Tensor& x) const {
    TORCH_CHECK_TYPE(at::isFloatingType(x.scalar_type()), op_, ": ", argument, ": expected a floating dtype, got ",
                     x.scalar_type());
  }

  void is_activation(const char* argument, const Tensor& x) const {
    const auto dtype = x.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op_, ": ", argument,
                     ": expected dtype BFloat16, Half or Float, got ", dtype);
  }

  void same_dtype(const char* argument, const Tensor& x, const Tensor& first) const {
    same_dtype(argument, x, first, first_);
  }

  void same_dtype(const char* argument, const Tensor& x, const Tensor& other, const char* other_name) const {
    TORCH_CHECK_TYPE(x.scalar_type() == other.scalar_type(), op_, ": ", argument, ": expected dtype ",
                     other.scalar_type(), " like ", other_name, ", got ", x.scalar_type());
  }

  void is_boolean(const char* argument, const Tensor& x) const {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kBool, op_, ": ", argument, ": expected dtype Bool, got ", x.scalar_type());
  }

  void integers(const char* argument, const Tensor& x) const {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kInt || x.scalar_type() == at::kLong, op_, ": ", argument,
                     ": expected dtype Int or Long, got ", x.scalar_type());
    TORCH_CHECK_VALUE(x.is_cpu() || x.device() == device_, op_, ": ", argument, ": expected a tensor on the CPU or on ",
                      device_, " like ", first_, ", got one on ", x.device());
  }

  void chunk_size(int64_t size) const {
    value(size == 16 || size == 32 || size == 64, "chunk_size", "16, 32 or 64", size);
  }

  void heads(const char* key, int64_t key_heads, const char* value_name, int64_t value_heads) const {
    TORCH_CHECK_VALUE(key_heads >= 1, op_, ": ", key, ": expected at least one head, got ", key_heads);
    TORCH_CHECK_VALUE(value_heads >= 1 && value_heads % key_heads == 0, op_, ": ", value_name,
                      ": expected a number of heads that is a multiple of the ", key_heads, " of ", key, ", got ",
                      value_heads);
  }

  void key_size(const char* argument, int64_t size) const {
    TORCH_CHECK_VALUE(size >= 1 && size <= kLargestK, op_, ": ", argument, ": expected K from 1 to ", kLargestK,
                      ", got ", size);
  }

  void value_size(const char* argument, int64_t size) const {
    TORCH_CHECK_VALUE(size >= 1 && size <= kLargestV, op_, ": ", argument, ": expected V from 1 to ", kLargestV,
                      ", got ", size);
  }

  // Fills N, NT and packed from B, T and C, which must be set.
  void sequences(ChunkShape& s, const optional<Tensor>& cu_seqlens, const optional<Tensor>& chunk_indices) const {
    s.packed = cu_seqlens.has_value();
    s.N = s.B;
    const int64_t chunks = s.C > 0 ? ceil_div(s.T, s.C) : 0;
    s.NT = chunks;
    if (!s.packed) {
      TORCH_CHECK_VALUE(!chunk_indices.has_value(), op_,
                        ": chunk_indices: expected None where cu_seqlens is None, got a tensor of shape ",
                        chunk_indices->sizes());
      return;
    }
    integers("cu_seqlens", *cu_seqlens);
    TORCH_CHECK_VALUE(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 2, op_,
                      ": cu_seqlens: expected shape [N + 1] with N >= 1, got ", cu_seqlens->sizes());
    TORCH_CHECK_VALUE(s.B == 1, op_, ": cu_seqlens: expected a batch of 1 (sequences packed along T), got a batch of ",
                      s.B);
    s.N = cu_seqlens->size(0) - 1;
    s.NT = chunks + (s.C > 0 ? s.N : 0);
    if (chunk_indices.has_value()) {
      integers("chunk_indices", *chunk_indices);
      TORCH_CHECK_VALUE(chunk_indices->dim() == 2 && chunk_indices->size(1) == 2, op_,
                        ": chunk_indices: expected shape [NT, 2], got ", chunk_indices->sizes());
      s.NT = chunk_indices->size(0);
    }
    if (!cu_seqlens->is_cpu()) return;
    const int64_t real_chunks =
        cu_seqlens->scalar_type() == at::kInt ? bounds<int32_t>(s, *cu_seqlens) : bounds<int64_t>(s, *cu_seqlens);
    TORCH_CHECK_VALUE(!chunk_indices.has_value() || s.NT >= real_chunks, op_, ": chunk_indices: expected ", real_chunks,
                      " rows, one for each chunk of cu_seqlens, got ", s.NT);
  }

  void initial_state(const ChunkShape& s, const optional<Tensor>& state, bool state_v_first) const {
    if (!state.has_value()) return;
    if (state_v_first) {
      shape("initial_state", *state, "[N, HV, V, K]", {s.N, s.HV, s.V, s.K});
    } else {
      shape("initial_state", *state, "[N, HV, K, V]", {s.N, s.HV, s.K, s.V});
    }
    is_floating("initial_state", *state);
  }

 protected:
  const char* op() const { return op_; }

 private:
  // Checks the boundaries of a cu_seqlens on the CPU; returns how many chunks they make.
  template <typename Index>
  int64_t bounds(const ChunkShape& s, const Tensor& cu_seqlens) const {
    const auto at = cu_seqlens.accessor<Index, 1>();
    TORCH_CHECK_VALUE(at[0] == 0, op_, ": cu_seqlens: expected the first boundary to be 0, got ", at[0]);
    int64_t chunks = 0;
    for (int64_t n = 0; n < s.N; ++n) {
      TORCH_CHECK_VALUE(at[n] <= at[n + 1], op_, ": cu_seqlens: expected ascending boundaries, got ", at[n], " before ",
                        at[n + 1], " at index ", n);
      if (s.C > 0) chunks += ceil_div(at[n + 1] - at[n], s.C);
    }
    TORCH_CHECK_VALUE(at[s.N] == s.T, op_, ": cu_seqlens: expected the last boundary to be T = ", s.T, ", got ",
                      at[s.N]);
    return chunks;
  }

  const char* op_;
  const char* first_;
  at::Device device_;
};

inline ChunkShape check_chunk_local_cumsum(const Tensor& g, int64_t chunk_size, const optional<Tensor>& cu_seqlens,
                                           const optional<Tensor>& chunk_indices) {
  const Check check("chunk_local_cumsum", "g", g);
  check.is_floating("g", g);
  check.dimensions("g", g, 3, "[B, T, HV]");
  check.chunk_size(chunk_size);
  ChunkShape s{.B = g.size(0), .T = g.size(1), .HV = g.size(2), .C = chunk_size};
  check.sequences(s, cu_seqlens, chunk_indices);
  return s;
}

inline ChunkShape check_chunk_scaled_dot_kkt(const Tensor& k, const Tensor& g, const Tensor& beta,
                                             const optional<Tensor>& cu_seqlens, int64_t chunk_size,
                                             const optional<Tensor>& chunk_indices) {
  const Check check("chunk_scaled_dot_kkt", "k", k);
  check.is_activation("k", k);
  check.dimensions("k", k, 4, "[B, T, H, K]");
  check.is_f32("g", g);
  check.dimensions("g", g, 3, "[B, T, HV]");
  check.chunk_size(chunk_size);
  ChunkShape s{.B = k.size(0), .T = k.size(1), .H = k.size(2), .HV = g.size(2), .K = k.size(3), .C = chunk_size};
  check.key_size("k", s.K);
  check.heads("k", s.H, "g", s.HV);
  check.shape("g", g, "[B, T, HV]", {s.B, s.T, s.HV});
  check.is_floating("beta", beta);
  check.shape("beta", beta, "[B, T, HV]", {s.B, s.T, s.HV});
  check.sequences(s, cu_seqlens, chunk_indices);
  return s;
}

inline ChunkShape check_solve_tril(const Tensor& A, const optional<Tensor>& cu_seqlens,
                                   const optional<Tensor>& chunk_indices) {
  const Check check("solve_tril", "A", A);
  check.is_f32("A", A);
  check.dimensions("A", A, 4, "[B, T, HV, chunk_size]");
  ChunkShape s{.B = A.size(0), .T = A.size(1), .HV = A.size(2), .C = A.size(3)};
  check.value(s.C == 16 || s.C == 32 || s.C == 64, "A", "a last dimension (the chunk size) of 16, 32 or 64", s.C);
  check.sequences(s, cu_seqlens, chunk_indices);
  return s;
}

inline ChunkShape check_recompute_w_u(const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& A,
                                      const Tensor& g, const optional<Tensor>& cu_seqlens,
                                      const optional<Tensor>& chunk_indices) {
  const Check check("recompute_w_u", "k", k);
  check.is_activation("k", k);
  check.dimensions("k", k, 4, "[B, T, H, K]");
  check.same_dtype("v", v, k);
  check.dimensions("v", v, 4, "[B, T, HV, V]");
  check.is_f32("A", A);
  check.dimensions("A", A, 4, "[B, T, HV, chunk_size]");
  ChunkShape s{.B = k.size(0), .T = k.size(1), .H = k.size(2), .HV = v.size(2), .K = k.size(3), .V = v.size(3)};
  s.C = A.size(3);
  check.value(s.C == 16 || s.C == 32 || s.C == 64, "A", "a last dimension (the chunk size) of 16, 32 or 64", s.C);
  check.key_size("k", s.K);
  check.value_size("v", s.V);
  check.heads("k", s.H, "v", s.HV);
  check.shape("v", v, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
  check.is_floating("beta", beta);
  check.shape("beta", beta, "[B, T, HV]", {s.B, s.T, s.HV});
  check.shape("A", A, "[B, T, HV, chunk_size]", {s.B, s.T, s.HV, s.C});
  check.is_f32("g", g);
  check.shape("g", g, "[B, T, HV]", {s.B, s.T, s.HV});
  check.sequences(s, cu_seqlens, chunk_indices);
  return s;
}

inline ChunkShape check_chunk_fwd_h(const Tensor& k, const Tensor& w, const Tensor& u, const Tensor& g,
                                    const optional<Tensor>& initial_state, bool /*output_final_state*/,
                                    int64_t chunk_size, bool state_v_first, const optional<Tensor>& cu_seqlens,
                                    const optional<Tensor>& chunk_indices) {
  const Check check("chunk_fwd_h", "k", k);
  check.is_activation("k", k);
  check.dimensions("k", k, 4, "[B, T, H, K]");
  check.same_dtype("w", w, k);
  check.same_dtype("u", u, k);
  check.dimensions("u", u, 4, "[B, T, HV, V]");
  check.chunk_size(chunk_size);
  ChunkShape s{.B = k.size(0), .T = k.size(1), .H = k.size(2), .HV = u.size(2), .K = k.size(3), .V = u.size(3)};
  s.C = chunk_size;
  check.key_size("k", s.K);
  check.value_size("u", s.V);
  check.heads("k", s.H, "u", s.HV);
  check.shape("u", u, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
  check.shape("w", w, "[B, T, HV, K]", {s.B, s.T, s.HV, s.K});
  check.is_f32("g", g);
  check.shape("g", g, "[B, T, HV]", {s.B, s.T, s.HV});
  check.sequences(s, cu_seqlens, chunk_indices);
  check.initial_state(s, initial_state, state_v_first);
  return s;
}

inline ChunkShape check_chunk_fwd_o(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& h, const Tensor& g,
                                    optional<double> /*scale*/, bool state_v_first, const optional<Tensor>& cu_seqlens,
                                    int64_t chunk_size, const optional<Tensor>& chunk_indices) {
  const Check check("chunk_fwd_o", "q", q);
  check.is_activation("q", q);
  check.dimensions("q", q, 4, "[B, T, H, K]");
  check.same_dtype("k", k, q);
  check.same_dtype("v", v, q);
  check.dimensions("v", v, 4, "[B, T, HV, V]");
  check.same_dtype("h", h, q);
  check.chunk_size(chunk_size);
  ChunkShape s{.B = q.size(0), .T = q.size(1), .H = q.size(2), .HV = v.size(2), .K = q.size(3), .V = v.size(3)};
  s.C = chunk_size;
  check.key_size("q", s.K);
  check.value_size("v", s.V);
  check.heads("q", s.H, "v", s.HV);
  check.shape("k", k, "[B, T, H, K]", {s.B, s.T, s.H, s.K});
  check.shape("v", v, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
  check.is_f32("g", g);
  check.shape("g", g, "[B, T, HV]", {s.B, s.T, s.HV});
  check.sequences(s, cu_seqlens, chunk_indices);
  if (state_v_first) {
    check.shape("h", h, "[B, NT, HV, V, K]", {s.B, s.NT, s.HV, s.V, s.K});
  } else {
    check.shape("h", h, "[B, NT, HV, K, V]", {s.B, s.NT, s.HV, s.K, s.V});
  }
  return s;
}

inline void check_l2norm(const Tensor& x, double eps) {
  const Check check("l2norm", "x", x);
  check.is_activation("x", x);
  check.value(x.dim() >= 1, "x", "at least one dimension", x.dim());
  check.value(eps >= 0, "eps", "a number that is not negative", eps);
}

// The boundaries as contiguous int64 on `device`, where the kernels read them; the content of a CPU tensor was checked
// by check_<op> (Check::sequences).
inline optional<Tensor> sequence_bounds(const optional<Tensor>& cu_seqlens, at::Device device) {
  if (!cu_seqlens.has_value()) return std::nullopt;
  return cu_seqlens->to(cu_seqlens->options().device(device).dtype(at::kLong)).contiguous();
}

// Kernels take any strides but read along the last dimension; model code practically never has another last stride.
inline Tensor unit_last_stride(const Tensor& x, const char* name) {
  if (x.size(-1) <= 1 || x.stride(-1) == 1) return x;
  TORCH_WARN_ONCE("torch_gdn: ", name, " has a last stride of ", x.stride(-1),
                  " and is copied on every call; a last "
                  "stride of 1 needs no copy (any other stride is free)");
  return x.contiguous();
}

inline double scale_or_default(optional<double> scale, int64_t K) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(K)));
}

}  // namespace torch_gdn
