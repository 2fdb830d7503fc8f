#pragma once
#import <Foundation/Foundation.h>

@protocol MTLDevice;

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSString *label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@property(readonly) NSUInteger staticThreadgroupMemoryLength;
@end
