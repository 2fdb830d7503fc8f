#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>

namespace simulator {
namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(uint64_t seed)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::MPS, 0), c10::DispatchKeySet(c10::DispatchKey::MPS)),
        engine_(at::detail::createCPUGenerator(seed)) {}

  void set_current_seed(uint64_t seed) override { engine_.set_current_seed(seed); }
  uint64_t current_seed() const override { return engine_.current_seed(); }
  uint64_t seed() override { return engine_.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK_NOT_IMPLEMENTED(false, "set_offset of an mps generator"); }
  uint64_t get_offset() const override { TORCH_CHECK_NOT_IMPLEMENTED(false, "get_offset of an mps generator"); }
  void set_state(const c10::TensorImpl& state) override {
    using Pointer = c10::intrusive_ptr<c10::TensorImpl>;
    engine_.set_state(at::Tensor(Pointer::reclaim_copy(const_cast<c10::TensorImpl*>(&state))));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return engine_.get_state().getIntrusivePtr(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(0);
    copy->engine_ = engine_.clone();
    return copy;
  }
  static c10::DeviceType device_type() { return c10::DeviceType::MPS; }

  at::Generator engine_;
};

}  // namespace

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(at::make_generator<Generator>(c10::default_rng_seed_val));
  return *generator;
}

at::Generator new_generator() { return at::make_generator<Generator>(c10::default_rng_seed_val); }

at::Generator cpu_engine(const at::Generator& generator) {
  if (!generator.defined() || !generator.device().is_mps()) return generator;
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->engine_;
}

}  // namespace simulator
