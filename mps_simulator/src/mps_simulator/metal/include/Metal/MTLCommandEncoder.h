#pragma once
#import <Foundation/Foundation.h>

@protocol MTLDevice;

typedef NS_OPTIONS(NSUInteger, MTLBarrierScope) {
  MTLBarrierScopeBuffers = 1,
  MTLBarrierScopeTextures = 2,
  MTLBarrierScopeRenderTargets = 4,
};

@protocol MTLCommandEncoder <NSObject>
@property(readonly) id<MTLDevice> device;
@property(copy, atomic) NSString *label;
- (void)endEncoding;
@end
