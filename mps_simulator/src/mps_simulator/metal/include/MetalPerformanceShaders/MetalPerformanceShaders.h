// The names of MetalPerformanceShaders that PyTorch's headers use.
#pragma once
#import <Metal/Metal.h>

typedef NS_ENUM(uint32_t, MPSDataType) {
  MPSDataTypeInvalid = 0,
};

@interface MPSCommandBuffer : NSObject <MTLCommandBuffer> {
  id<MTLCommandBuffer> _root;
}
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)commandQueue;
+ (instancetype)commandBufferWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer;
@property(readonly, nonatomic) id<MTLCommandBuffer> commandBuffer;
@property(readonly, nonatomic) id<MTLCommandBuffer> rootCommandBuffer;
- (void)commitAndContinue;
@end

@interface MPSKernel : NSObject
@end

@interface MPSNDArray : NSObject
@end

typedef NSArray<NSNumber *> MPSShape;
