#pragma once
#import <Metal/MTLResource.h>

@protocol MTLBuffer <MTLResource>
@property(readonly) NSUInteger length;
- (void *)contents;
@property(readonly) uint64_t gpuAddress;
@end
