// Foundation for the Mac build: on top of Apple's own objc/ and dispatch/ headers (the ziglang package has them), only
// the classes that csrc/metal and PyTorch's mps headers name. Metal's stub headers are shared with the simulated
// device.
#pragma once
#include <Availability.h>
#include <dispatch/dispatch.h>
#include <objc/NSObject.h>

// Apple's own headers bring these in, and the wheel's MPS headers rely on that.
#include <condition_variable>
#include <functional>
#include <mutex>

#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type
#define NS_OPTIONS(type, name) \
  type name;                   \
  enum : type
#define FOUNDATION_EXPORT extern "C"

typedef double CFTimeInterval;
typedef double NSTimeInterval;

typedef struct _NSRange {
  NSUInteger location;
  NSUInteger length;
} NSRange;

@protocol NSCopying
- (id)copyWithZone:(struct _NSZone *)zone;
@end

@interface NSString : NSObject <NSCopying>
+ (instancetype)stringWithUTF8String:(const char *)nullTerminatedCString;
@property(readonly) const char *UTF8String;
@end

@interface NSNumber : NSObject <NSCopying>
@end

@interface NSArray<__covariant ObjectType> : NSObject <NSCopying>
@property(readonly) NSUInteger count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
@end

@interface NSDictionary<__covariant KeyType, __covariant ObjectType> : NSObject <NSCopying>
@end

typedef NSString *NSErrorDomain;

@interface NSError : NSObject <NSCopying>
@property(readonly, copy) NSString *localizedDescription;
@end
