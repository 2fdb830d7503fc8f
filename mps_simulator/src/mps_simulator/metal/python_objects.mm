// The Metal objects in Python (mps_simulator/metal.py). They check nothing, so that tests can make every mistake that
// Objective-C++ code can make.
#include "mps_simulator/pytorch/bindings.h"

#include <ATen/mps/MPSStream.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "mps_simulator/foundation/queue.h"
#include "objects.h"

namespace simulator {
namespace {

template <typename Object>
class Handle {
 public:
  explicit Handle(Object retained) : object_(retained) {}
  Handle(Handle&& other) noexcept : object_(other.object_), mine_(std::exchange(other.mine_, false)) {}
  ~Handle() {
    try {
      if (mine_) [object_ release];
    } catch (...) {  // a misuse, which has already been reported
    }
  }
  Object get() const { return object_; }
  void retain() { [object_ retain]; }
  void release() {  // sends one release message, even if Python still holds references
    mine_ = false;
    [object_ release];
  }

 private:
  Object object_;
  bool mine_ = true;
};

using Library = Handle<id<MTLLibrary>>;
using Pipeline = Handle<id<MTLComputePipelineState>>;
using Buffer = Handle<id<MTLBuffer>>;
using Queue = Handle<id<MTLCommandQueue>>;
using CommandBuffer = Handle<id<MTLCommandBuffer>>;
using Encoder = Handle<id<MTLComputeCommandEncoder>>;
using BlitEncoder = Handle<id<MTLBlitCommandEncoder>>;

id<MTLDevice> device() { return MTLCreateSystemDefaultDevice(); }

NSString* text_of(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }

MTLSize size_of(const py::object& value) {
  std::vector<size_t> lengths;
  if (py::isinstance<py::int_>(value))
    lengths = {value.cast<size_t>()};
  else
    lengths = value.cast<std::vector<size_t>>();
  lengths.resize(3, 1);
  return MTLSizeMake(lengths[0], lengths[1], lengths[2]);
}

Library compile_library(const std::string& source, uint32_t version, bool fast_math,
                        const std::map<std::string, std::string>& macros) {
  @autoreleasepool {
    std::vector<id> names, values;
    for (const auto& [name, value] : macros) {
      names.push_back(text_of(name));
      values.push_back(text_of(value));
    }
    MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
    options.languageVersion = static_cast<MTLLanguageVersion>(version);
    options.fastMathEnabled = fast_math;
    options.preprocessorMacros = [NSDictionary dictionaryWithObjects:values.data()
                                                             forKeys:names.data()
                                                               count:names.size()];
    NSError* error = nil;
    id<MTLLibrary> library = [device() newLibraryWithSource:text_of(source) options:options error:&error];
    const std::string message = error ? [[error localizedDescription] UTF8String] : "";
    TORCH_CHECK(library, message);
    return Library(library);
  }
}

std::vector<std::string> functions_of(const Library& library) {
  std::vector<std::string> names;
  @autoreleasepool {
    for (NSString* name in [library.get() functionNames]) names.push_back([name UTF8String]);
  }
  return names;
}

void set_constant(MTLFunctionConstantValues* values, unsigned index, const py::handle& value) {
  if (py::isinstance<py::bool_>(value)) {
    const bool flag = value.cast<bool>();
    [values setConstantValue:&flag type:MTLDataTypeBool atIndex:index];
  } else if (py::isinstance<py::float_>(value)) {
    const auto number = value.cast<float>();
    [values setConstantValue:&number type:MTLDataTypeFloat atIndex:index];
  } else {
    const auto number = value.cast<int32_t>();
    [values setConstantValue:&number type:MTLDataTypeInt atIndex:index];
  }
}

Pipeline make_pipeline(const Library& library, const std::string& name,
                       const std::map<unsigned, py::object>& constants) {
  @autoreleasepool {
    MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
    for (const auto& [index, value] : constants) set_constant(values, index, value);
    NSError* error = nil;
    id<MTLFunction> function = [library.get() newFunctionWithName:text_of(name) constantValues:values error:&error];
    const std::string message = error ? [[error localizedDescription] UTF8String] : "";
    TORCH_CHECK(function, message);
    [function autorelease];
    return Pipeline([device() newComputePipelineStateWithFunction:function error:nil]);
  }
}

Buffer make_buffer(size_t length) {
  return Buffer([device() newBufferWithLength:length options:MTLResourceStorageModeShared]);
}

py::bytes read_buffer(const Buffer& buffer) {
  const auto* first = static_cast<const char*>([buffer.get() contents]);
  return py::bytes(first, [buffer.get() length]);
}

void write_buffer(const Buffer& buffer, const std::string& bytes, size_t offset) {
  TORCH_CHECK(offset + bytes.size() <= [buffer.get() length], "more bytes than the buffer has");
  memcpy(static_cast<char*>([buffer.get() contents]) + offset, bytes.data(), bytes.size());
}

void set_buffer(const Encoder& encoder, const py::object& value, NSUInteger index, std::optional<NSUInteger> offset) {
  if (value.is_none()) {
    [encoder.get() setBuffer:nil offset:0 atIndex:index];
  } else if (py::isinstance<Buffer>(value)) {
    [encoder.get() setBuffer:value.cast<Buffer&>().get() offset:offset.value_or(0) atIndex:index];
  } else {
    TORCH_CHECK_TYPE(THPVariable_Check(value.ptr()), "set_buffer takes a tensor, a Buffer or None");
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    [encoder.get() setBuffer:(id<MTLBuffer>)const_cast<void*>(tensor.storage().data())
                      offset:offset.value_or(tensor.storage_offset() * tensor.element_size())
                     atIndex:index];
  }
}

void set_bytes(const Encoder& encoder, const py::object& value, NSUInteger index) {
  if (py::isinstance<py::float_>(value)) {
    const auto number = value.cast<float>();
    [encoder.get() setBytes:&number length:sizeof(number) atIndex:index];
  } else if (py::isinstance<py::int_>(value)) {
    const auto number = static_cast<int32_t>(value.cast<int64_t>());
    [encoder.get() setBytes:&number length:sizeof(number) atIndex:index];
  } else {
    const auto bytes = py::bytes(value).cast<std::string>();
    [encoder.get() setBytes:bytes.data() length:bytes.size() atIndex:index];
  }
}

template <typename Object>
py::class_<Handle<Object>> bind_handle(py::module_& module, const char* name) {
  return py::class_<Handle<Object>>(module, name)
      .def("retain", &Handle<Object>::retain)
      .def("release", torch::wrap_pybind_function(&Handle<Object>::release))
      .def_property_readonly("retain_count", [](const Handle<Object>& handle) { return [handle.get() retainCount]; });
}

void bind_programs(py::module_& module) {
  bind_handle<id<MTLLibrary>>(module, "Library")
      .def(py::init(torch::wrap_pybind_function(&compile_library)), py::arg("source"), py::arg("language_version"),
           py::arg("fast_math"), py::arg("macros"))
      .def_property_readonly("functions", &functions_of)
      .def("pipeline", torch::wrap_pybind_function(&make_pipeline), py::arg("name"),
           py::arg("constants") = std::map<unsigned, py::object>());
  bind_handle<id<MTLComputePipelineState>>(module, "Pipeline")
      .def_property_readonly("name", [](const Pipeline& p) { return std::string([[p.get() label] UTF8String]); })
      .def_property_readonly("max_total_threads_per_threadgroup",
                             [](const Pipeline& p) { return [p.get() maxTotalThreadsPerThreadgroup]; })
      .def_property_readonly("thread_execution_width", [](const Pipeline& p) { return [p.get() threadExecutionWidth]; })
      .def_property_readonly("static_threadgroup_memory_length",
                             [](const Pipeline& p) { return [p.get() staticThreadgroupMemoryLength]; });
  module.def("pipeline_of_nothing", torch::wrap_pybind_function([] {
               return Pipeline([device() newComputePipelineStateWithFunction:nil error:nil]);
             }));
}

void bind_buffers(py::module_& module) {
  bind_handle<id<MTLBuffer>>(module, "Buffer")
      .def(py::init(torch::wrap_pybind_function(&make_buffer)), py::arg("length"))
      .def_property_readonly("length", [](const Buffer& buffer) { return [buffer.get() length]; })
      .def("read", torch::wrap_pybind_function(&read_buffer))
      .def("write", torch::wrap_pybind_function(&write_buffer), py::arg("data"), py::arg("offset") = 0);
  module.def("buffer_of", [](const py::object& tensor) {
    const void* object = THPVariable_Unpack(tensor.ptr()).storage().data();
    return Buffer([(id<MTLBuffer>)const_cast<void*>(object) retain]);
  });
}

void bind_encoders(py::module_& module) {
  using torch::wrap_pybind_function;
  bind_handle<id<MTLComputeCommandEncoder>>(module, "Encoder")
      .def("set_pipeline", wrap_pybind_function([](const Encoder& e, const Pipeline* pipeline) {
             [e.get() setComputePipelineState:pipeline ? pipeline->get() : nil];
           }))
      .def("set_buffer", wrap_pybind_function(&set_buffer), py::arg("buffer"), py::arg("index"),
           py::arg("offset") = py::none())
      .def("set_bytes", wrap_pybind_function(&set_bytes), py::arg("value"), py::arg("index"))
      .def("set_threadgroup_memory", wrap_pybind_function([](const Encoder& e, NSUInteger length, NSUInteger index) {
             [e.get() setThreadgroupMemoryLength:length atIndex:index];
           }),
           py::arg("length"), py::arg("index"))
      .def("dispatch_threadgroups",
           wrap_pybind_function([](const Encoder& e, const py::object& grid, const py::object& group) {
             [e.get() dispatchThreadgroups:size_of(grid) threadsPerThreadgroup:size_of(group)];
           }))
      .def("dispatch_threads",
           wrap_pybind_function([](const Encoder& e, const py::object& grid, const py::object& group) {
             [e.get() dispatchThreads:size_of(grid) threadsPerThreadgroup:size_of(group)];
           }))
      .def("memory_barrier",
           wrap_pybind_function([](const Encoder& e) { [e.get() memoryBarrierWithScope:MTLBarrierScopeBuffers]; }))
      .def("end_encoding", wrap_pybind_function([](const Encoder& e) { [e.get() endEncoding]; }));
  bind_handle<id<MTLBlitCommandEncoder>>(module, "BlitEncoder")
      .def("copy", wrap_pybind_function([](const BlitEncoder& e, const Buffer& from, NSUInteger from_offset,
                                           const Buffer& to, NSUInteger to_offset, NSUInteger size) {
             [e.get() copyFromBuffer:from.get()
                        sourceOffset:from_offset
                            toBuffer:to.get()
                   destinationOffset:to_offset
                                size:size];
           }))
      .def("fill", wrap_pybind_function([](const BlitEncoder& e, const Buffer& buffer, NSUInteger offset,
                                           NSUInteger length, uint8_t value) {
             [e.get() fillBuffer:buffer.get() range:NSMakeRange(offset, length) value:value];
           }))
      .def("end_encoding", wrap_pybind_function([](const BlitEncoder& e) { [e.get() endEncoding]; }));
}

void bind_command_buffers(py::module_& module) {
  using torch::wrap_pybind_function;
  bind_handle<id<MTLCommandBuffer>>(module, "CommandBuffer")
      .def("compute_encoder", wrap_pybind_function([](const CommandBuffer& buffer) {
             @autoreleasepool {
               return Encoder([[buffer.get() computeCommandEncoder] retain]);
             }
           }))
      .def("blit_encoder", wrap_pybind_function([](const CommandBuffer& buffer) {
             @autoreleasepool {
               return BlitEncoder([[buffer.get() blitCommandEncoder] retain]);
             }
           }))
      .def("commit", wrap_pybind_function([](const CommandBuffer& buffer) { [buffer.get() commit]; }))
      .def("wait", wrap_pybind_function([](const CommandBuffer& buffer) { [buffer.get() waitUntilCompleted]; }))
      .def_property_readonly("status", [](const CommandBuffer& buffer) { return int([buffer.get() status]); })
      .def_property_readonly("error", [](const CommandBuffer& buffer) -> std::optional<std::string> {
        @autoreleasepool {
          NSError* error = [buffer.get() error];
          if (!error) return std::nullopt;
          return [[error localizedDescription] UTF8String];
        }
      });
  bind_handle<id<MTLCommandQueue>>(module, "CommandQueue")
      .def(py::init([] { return Queue([device() newCommandQueue]); }))
      .def(
          "command_buffer",
          [](const Queue& queue, bool retained) {
            @autoreleasepool {
              id<MTLCommandBuffer> buffer =
                  retained ? [queue.get() commandBuffer] : [queue.get() commandBufferWithUnretainedReferences];
              return CommandBuffer([buffer retain]);
            }
          },
          py::arg("retained") = true);
}

void bind_stream(py::module_& module) {
  auto queue = [] { return at::mps::getCurrentMPSStream()->queue(); };
  module.def("enter_stream", torch::wrap_pybind_function_no_gil([queue] { enter_queue(queue()); }));
  module.def("leave_stream", [queue] { leave_queue(queue()); });
  module.def("stream_encoder", torch::wrap_pybind_function(
                                   [] { return Encoder([at::mps::getCurrentMPSStream()->commandEncoder() retain]); }));
  module.def("stream_command_buffer", torch::wrap_pybind_function([] {
               return CommandBuffer([[at::mps::getCurrentMPSStream()->commandBuffer() rootCommandBuffer] retain]);
             }));
  module.def("error_buffer", torch::wrap_pybind_function(
                                 [] { return Buffer([at::mps::getCurrentMPSStream()->getErrorBuffer() retain]); }));
}

}  // namespace

void bind_metal_objects(py::module_& module) {
  bind_programs(module);
  bind_buffers(module);
  bind_encoders(module);
  bind_command_buffers(module);
  bind_stream(module);
}

}  // namespace simulator
