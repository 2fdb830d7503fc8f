#include <cstring>

#include "mps_simulator/engine/kernel_abi.h"
#include "objects.h"

NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

@implementation MTLCompileOptions
@synthesize preprocessorMacros = _preprocessorMacros;
@synthesize languageVersion = _languageVersion;
@synthesize mathMode = _mathMode;
@synthesize mathFloatingPointFunctions = _mathFloatingPointFunctions;
- (instancetype)init {
  _mathMode = MTLMathModeFast;
  _mathFloatingPointFunctions = MTLMathFloatingPointFunctionsFast;
  return self;
}
- (void)dealloc {
  [_preprocessorMacros release];
  [super dealloc];
}
// The older switch sets both newer ones.
- (BOOL)fastMathEnabled {
  return _mathMode != MTLMathModeSafe;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  _mathMode = enabled ? MTLMathModeFast : MTLMathModeSafe;
  _mathFloatingPointFunctions = enabled ? MTLMathFloatingPointFunctionsFast : MTLMathFloatingPointFunctionsPrecise;
}
- (id)copyWithZone:(NSZone*)zone {
  MTLCompileOptions* copy = [MTLCompileOptions new];
  copy.preprocessorMacros = _preprocessorMacros;
  copy->_languageVersion = _languageVersion;
  copy->_mathMode = _mathMode;
  copy->_mathFloatingPointFunctions = _mathFloatingPointFunctions;
  return copy;
}
@end

namespace simulator {
namespace {

size_t size_of(MTLDataType type) {
  switch (type) {
    case MTLDataTypeBool:
    case MTLDataTypeChar:
    case MTLDataTypeUChar:
      return 1;
    case MTLDataTypeShort:
    case MTLDataTypeUShort:
    case MTLDataTypeHalf:
    case MTLDataTypeBFloat:
      return 2;
    case MTLDataTypeInt:
    case MTLDataTypeUInt:
    case MTLDataTypeFloat:
    case MTLDataTypeHalf2:
      return 4;
    case MTLDataTypeLong:
    case MTLDataTypeULong:
    case MTLDataTypeInt2:
    case MTLDataTypeUInt2:
    case MTLDataTypeFloat2:
    case MTLDataTypeHalf3:
    case MTLDataTypeHalf4:
      return 8;
    case MTLDataTypeInt3:
    case MTLDataTypeInt4:
    case MTLDataTypeUInt3:
    case MTLDataTypeUInt4:
    case MTLDataTypeFloat3:
    case MTLDataTypeFloat4:
      return 16;
    case MTLDataTypeNone:
      break;
  }
  fault("setConstantValue: a function constant cannot have MTLDataType " + std::to_string(type));
}

}  // namespace

}  // namespace simulator

using simulator::FunctionConstants;

@implementation MTLFunctionConstantValues
- (instancetype)init {
  _values = new FunctionConstants;
  return self;
}
- (void)dealloc {
  delete static_cast<FunctionConstants*>(_values);
  [super dealloc];
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  const auto* first = static_cast<const std::byte*>(value);
  [self constants][index].assign(first, first + simulator::size_of(type));
}
- (void)reset {
  [self constants].clear();
}
- (FunctionConstants&)constants {
  return *static_cast<FunctionConstants*>(_values);
}
- (id)copyWithZone:(NSZone*)zone {
  MTLFunctionConstantValues* copy = [MTLFunctionConstantValues new];
  [copy constants] = [self constants];
  return copy;
}
@end

@implementation SimLibrary
@synthesize label = _label;
- (instancetype)initWithProgram:(std::shared_ptr<const simulator::Program>)compiled {
  program = new std::shared_ptr<const simulator::Program>(std::move(compiled));
  return self;
}
- (void)dealloc {
  delete program;
  [_label release];
  [super dealloc];
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (NSArray<NSString*>*)functionNames {
  std::vector<id> names;
  for (const std::string& name : (*program)->function_names())
    names.push_back([NSString stringWithUTF8String:name.c_str()]);
  return [NSArray arrayWithObjects:names.data() count:names.size()];
}
- (SimFunction*)functionNamed:(NSString*)name constants:(const FunctionConstants&)constants {
  auto found = (*program)->function([name UTF8String], constants);
  if (!found) return nil;
  SimFunction* function = [SimFunction new];
  function->function = new std::shared_ptr<const simulator::Function>(std::move(found));
  return function;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  return [self functionNamed:name constants:{}];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  SimFunction* function = [self functionNamed:name constants:[values constants]];
  if (!function && error) {
    NSString* text = [[@"no function named " stringByAppendingString:name] stringByAppendingString:@" in the library"];
    *error = [NSError errorWithDomain:MTLLibraryErrorDomain
                                 code:MTLLibraryErrorFunctionNotFound
                             userInfo:@{NSLocalizedDescriptionKey : text}];
  }
  return function;
}
@end

@implementation SimFunction
@synthesize label = _label;
- (void)dealloc {
  delete function;
  [_label release];
  [super dealloc];
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (NSString*)name {
  return [NSString stringWithUTF8String:(*function)->name.c_str()];
}
@end

@implementation SimPipeline
- (instancetype)initWithFunction:(SimFunction*)source {
  function = new std::shared_ptr<const simulator::Function>(*source->function);
  return self;
}
- (void)dealloc {
  delete function;
  [super dealloc];
}
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (NSString*)label {
  return [NSString stringWithUTF8String:(*function)->name.c_str()];
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  const uint32_t limit = (*function)->kernel->max_total_threads;
  return limit ? limit : simulator::kMaxThreads;
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
// The length is known only after the kernel has run, because the engine sees threadgroup arrays when the kernel
// declares them.
- (NSUInteger)staticThreadgroupMemoryLength {
  const auto figures = simulator::figures();
  const auto found = figures.find((*function)->name);
  return found == figures.end() ? 0 : found->second.threadgroup_memory;
}
@end
