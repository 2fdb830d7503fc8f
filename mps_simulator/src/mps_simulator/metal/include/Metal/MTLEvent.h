#pragma once
#import <Foundation/Foundation.h>

@protocol MTLEvent <NSObject>
@property(copy, atomic) NSString *label;
@end

@protocol MTLSharedEvent <MTLEvent>
@property(readwrite) uint64_t signaledValue;
@end

typedef void (^MTLSharedEventNotificationBlock)(id<MTLSharedEvent>, uint64_t value);

@interface MTLSharedEventListener : NSObject
@end
