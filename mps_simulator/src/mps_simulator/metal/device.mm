#include "simulated_mac.h"

#include <cstring>

#include "objects.h"

@implementation SimDevice
- (NSString*)name {
  return [NSString stringWithUTF8String:simulator::kDeviceName];
}
- (uint64_t)registryID {
  return simulator::kRegistryId;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(simulator::kMaxThreads, simulator::kMaxThreads, simulator::kMaxThreads);
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return simulator::kMaxThreadgroupMemory;
}
- (NSUInteger)maxBufferLength {
  return simulator::kMaxBufferLength;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return simulator::kWorkingSetSize;
}
- (NSUInteger)currentAllocatedSize {
  return simulator::allocated_buffer_bytes();
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  return (family >= MTLGPUFamilyApple6 && family <= simulator::kFamily) || family == MTLGPUFamilyMac2 ||
         family == MTLGPUFamilyMetal3;
}
- (id<MTLCommandQueue>)newCommandQueue {
  return [SimCommandQueue new];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0) simulator::fault("newBufferWithLength: a buffer must have more than 0 bytes");
  if (length > simulator::kMaxBufferLength) return nil;
  return [[SimBuffer alloc] initWithLength:length capacity:length];
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)bytes length:(NSUInteger)length options:(MTLResourceOptions)options {
  SimBuffer* buffer = (SimBuffer*)[self newBufferWithLength:length options:options];
  if (buffer) memcpy([buffer contents], bytes, length);
  return buffer;
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  simulator::CompileOptions settings;
  if (options) {
    settings.language_version = static_cast<uint32_t>(options.languageVersion);
    // Safe mathematics with fast functions is not safe. Treating it as fast lets a host notice that it forgot the
    // second setting.
    settings.fast_math =
        options.fastMathEnabled || options.mathFloatingPointFunctions == MTLMathFloatingPointFunctionsFast;
    for (NSString* name in [options.preprocessorMacros allKeys])
      settings.macros.emplace_back([name UTF8String],
                                   [[[options.preprocessorMacros objectForKey:name] description] UTF8String]);
  }
  try {
    return [[SimLibrary alloc] initWithProgram:simulator::compile([source UTF8String], settings)];
  } catch (const simulator::CompileError& failure) {
    if (error)
      *error = [NSError errorWithDomain:MTLLibraryErrorDomain
                                   code:MTLLibraryErrorCompileFailure
                               userInfo:@{NSLocalizedDescriptionKey : [NSString stringWithUTF8String:failure.what()]}];
    return nil;
  }
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  if (!function) simulator::fault("newComputePipelineStateWithFunction: computeFunction must not be nil");
  return [[SimPipeline alloc] initWithFunction:(SimFunction*)function];
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  static SimDevice* device = [SimDevice new];
  return device;
}

@implementation MTLSharedEventListener
@end
@implementation MTLCaptureManager
@end
