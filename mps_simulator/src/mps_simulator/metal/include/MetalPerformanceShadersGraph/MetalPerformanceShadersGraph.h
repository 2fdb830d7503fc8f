// The names of MetalPerformanceShadersGraph that PyTorch's headers use.
#pragma once
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

@interface MPSGraph : NSObject
@end

@interface MPSGraphTensor : NSObject <NSCopying>
@end

@interface MPSGraphTensorData : NSObject
@end

@interface MPSGraphExecutionDescriptor : NSObject
@end

@interface MPSGraphCompilationDescriptor : NSObject
@end
