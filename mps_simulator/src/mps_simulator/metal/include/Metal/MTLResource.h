#pragma once
#import <Foundation/Foundation.h>

@protocol MTLDevice;

typedef NS_ENUM(NSUInteger, MTLCPUCacheMode) {
  MTLCPUCacheModeDefaultCache = 0,
  MTLCPUCacheModeWriteCombined = 1,
};

typedef NS_ENUM(NSUInteger, MTLStorageMode) {
  MTLStorageModeShared = 0,
  MTLStorageModeManaged = 1,
  MTLStorageModePrivate = 2,
  MTLStorageModeMemoryless = 3,
};

typedef NS_OPTIONS(NSUInteger, MTLResourceOptions) {
  MTLResourceCPUCacheModeDefaultCache = 0,
  MTLResourceCPUCacheModeWriteCombined = 1,
  MTLResourceStorageModeShared = 0,
  MTLResourceStorageModeManaged = 16,
  MTLResourceStorageModePrivate = 32,
  MTLResourceHazardTrackingModeDefault = 0,
  MTLResourceHazardTrackingModeUntracked = 256,
  MTLResourceHazardTrackingModeTracked = 512,
};

@protocol MTLResource <NSObject>
@property(copy, atomic) NSString *label;
@property(readonly) id<MTLDevice> device;
@property(readonly) MTLStorageMode storageMode;
@end
