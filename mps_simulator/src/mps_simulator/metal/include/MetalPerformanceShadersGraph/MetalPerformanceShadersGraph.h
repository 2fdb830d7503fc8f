// What PyTorch's headers name of MetalPerformanceShadersGraph.
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
