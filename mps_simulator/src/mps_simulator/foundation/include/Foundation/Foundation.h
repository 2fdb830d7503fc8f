// The part of Apple's Foundation that Objective-C++ host code for Metal uses, for clang with GCC's libobjc and manual
// retain and release. It declares only names that a Mac has, so code that compiles with it finds the same names there.
#pragma once
#include <Availability.h>
#include <Block.h>
#include <dispatch/dispatch.h>
#include <objc/objc.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

// Apple's own headers include these headers, and the MPS headers of PyTorch's wheel rely on that.
#include <condition_variable>
#include <functional>
#include <mutex>

// libobjc defines nil as (id)0 and YES as (BOOL)1. Apple's nil initialises any Objective-C or C++ pointer, and @YES
// needs the literal.
#undef nil
#undef Nil
#undef YES
#undef NO
#define nil __null
#define Nil __null
#define YES __objc_yes
#define NO __objc_no

#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")
#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type
#define NS_OPTIONS(type, name) \
  type name;                   \
  enum : type
#define FOUNDATION_EXPORT extern "C"

typedef long NSInteger;
typedef unsigned long NSUInteger;
typedef double CFTimeInterval;
typedef double NSTimeInterval;

typedef struct _NSRange {
  NSUInteger location;
  NSUInteger length;
} NSRange;

static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
  NSRange range = {location, length};
  return range;
}

typedef struct _NSZone NSZone;

@class NSString, NSArray<__covariant ObjectType>;

@protocol NSObject
- (BOOL)isEqual:(id)object;
@property(readonly) NSUInteger hash;
- (Class)class;
- (BOOL)isKindOfClass:(Class)aClass;
- (instancetype)retain;
- (void)release;
- (instancetype)autorelease;
- (NSUInteger)retainCount;
@property(readonly, copy) NSString *description;
@end

@protocol NSCopying
- (id)copyWithZone:(NSZone *)zone;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
  int _retain_count;
}
+ (void)initialize;
+ (instancetype)alloc;
+ (instancetype)new;
+ (Class)class;
- (instancetype)init;
- (void)dealloc;
- (id)copy;
@end

@interface NSAutoreleasePool : NSObject {
  void *_objects;
  NSAutoreleasePool *_parent;
}
- (void)drain;
@end

@interface NSString : NSObject <NSCopying>
+ (instancetype)string;
+ (instancetype)stringWithUTF8String:(const char *)nullTerminatedCString;
@property(readonly) NSUInteger length;
@property(readonly) const char *UTF8String;
- (BOOL)isEqualToString:(NSString *)aString;
- (NSString *)stringByAppendingString:(NSString *)aString;
@end

@interface NSNumber : NSObject <NSCopying> {
  double _real;
  long long _integer;
}
+ (NSNumber *)numberWithBool:(BOOL)value;
+ (NSNumber *)numberWithInt:(int)value;
+ (NSNumber *)numberWithUnsignedInt:(unsigned int)value;
+ (NSNumber *)numberWithLong:(long)value;
+ (NSNumber *)numberWithUnsignedLong:(unsigned long)value;
+ (NSNumber *)numberWithLongLong:(long long)value;
+ (NSNumber *)numberWithUnsignedLongLong:(unsigned long long)value;
+ (NSNumber *)numberWithFloat:(float)value;
+ (NSNumber *)numberWithDouble:(double)value;
+ (NSNumber *)numberWithInteger:(NSInteger)value;
+ (NSNumber *)numberWithUnsignedInteger:(NSUInteger)value;
@property(readonly) BOOL boolValue;
@property(readonly) int intValue;
@property(readonly) long longValue;
@property(readonly) double doubleValue;
@property(readonly) NSUInteger unsignedIntegerValue;
@property(readonly, copy) NSString *stringValue;
@end

typedef struct {
  unsigned long state;
  id __unsafe_unretained *itemsPtr;
  unsigned long *mutationsPtr;
  unsigned long extra[5];
} NSFastEnumerationState;

@interface NSArray<__covariant ObjectType> : NSObject <NSCopying> {
  void *_objects;
}
+ (instancetype)array;
+ (instancetype)arrayWithObjects:(const ObjectType *)objects count:(NSUInteger)count;
@property(readonly) NSUInteger count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState *)state
                                  objects:(id __unsafe_unretained *)buffer
                                    count:(NSUInteger)len;
@end

@interface NSDictionary<__covariant KeyType, __covariant ObjectType> : NSObject <NSCopying> {
  void *_entries;
}
+ (instancetype)dictionary;
+ (instancetype)dictionaryWithObjects:(const ObjectType *)objects forKeys:(const id *)keys count:(NSUInteger)count;
@property(readonly) NSUInteger count;
@property(readonly, copy) NSArray<KeyType> *allKeys;
- (ObjectType)objectForKey:(KeyType)aKey;
@end

typedef NSString *NSErrorDomain;
typedef NSString *NSErrorUserInfoKey;
FOUNDATION_EXPORT NSErrorUserInfoKey const NSLocalizedDescriptionKey;

@interface NSError : NSObject <NSCopying> {
  NSErrorDomain _domain;
  NSInteger _code;
  NSDictionary *_userInfo;
}
+ (instancetype)errorWithDomain:(NSErrorDomain)domain code:(NSInteger)code userInfo:(NSDictionary *)dict;
@property(readonly, copy) NSErrorDomain domain;
@property(readonly) NSInteger code;
@property(readonly, copy) NSDictionary *userInfo;
@property(readonly, copy) NSString *localizedDescription;
@end

@interface NSURL : NSObject
@end

@interface NSData : NSObject
@end

@interface NSBundle : NSObject
@end
