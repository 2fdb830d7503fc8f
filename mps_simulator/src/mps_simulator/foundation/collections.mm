#import <Foundation/Foundation.h>

#include <cstdio>
#include <utility>
#include <vector>

#include "mps_simulator/foundation/fault.h"

@implementation NSNumber
- (instancetype)initWithReal:(double)real integer:(long long)integer {
  _real = real;
  _integer = integer;
  return self;
}
+ (NSNumber*)numberWithBool:(BOOL)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithInt:(int)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithUnsignedInt:(unsigned int)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithLong:(long)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithUnsignedLong:(unsigned long)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithLongLong:(long long)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithUnsignedLongLong:(unsigned long long)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithFloat:(float)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithDouble:(double)value {
  return [[[self alloc] initWithReal:value integer:value] autorelease];
}
+ (NSNumber*)numberWithInteger:(NSInteger)value {
  return [self numberWithLong:value];
}
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value {
  return [self numberWithUnsignedLong:value];
}
- (BOOL)boolValue {
  return _real != 0;
}
- (int)intValue {
  return static_cast<int>(_integer);
}
- (long)longValue {
  return _integer;
}
- (double)doubleValue {
  return _real;
}
- (NSUInteger)unsignedIntegerValue {
  return _integer;
}
- (NSString*)stringValue {
  char text[32];
  if (_real == static_cast<double>(_integer))
    snprintf(text, sizeof(text), "%lld", _integer);
  else
    snprintf(text, sizeof(text), "%.17g", _real);
  return [NSString stringWithUTF8String:text];
}
- (NSString*)description {
  return [self stringValue];
}
- (BOOL)isEqual:(id)other {
  return [other isKindOfClass:[NSNumber class]] && [(NSNumber*)other doubleValue] == _real;
}
- (NSUInteger)hash {
  return _integer;
}
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
@end

namespace {

using Objects = std::vector<id>;
using Entries = std::vector<std::pair<id, id>>;

}  // namespace

@implementation NSArray
+ (instancetype)array {
  return [[self new] autorelease];
}
+ (instancetype)arrayWithObjects:(const id*)objects count:(NSUInteger)count {
  NSArray* array = [[self new] autorelease];
  for (NSUInteger i = 0; i < count; i++) static_cast<Objects*>(array->_objects)->push_back([objects[i] retain]);
  return array;
}
- (instancetype)init {
  _objects = new Objects;
  return self;
}
- (void)dealloc {
  auto* objects = static_cast<Objects*>(_objects);
  for (id object : *objects) [object release];
  delete objects;
  [super dealloc];
}
- (NSUInteger)count {
  return static_cast<Objects*>(_objects)->size();
}
- (id)objectAtIndex:(NSUInteger)index {
  auto* objects = static_cast<Objects*>(_objects);
  if (index >= objects->size())
    simulator::fault("-[NSArray objectAtIndex:]: index " + std::to_string(index) + " of " +
                     std::to_string(objects->size()) + " objects");
  return (*objects)[index];
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained*)buffer
                                    count:(NSUInteger)length {
  if (state->state) return 0;
  auto* objects = static_cast<Objects*>(_objects);
  state->state = 1;
  state->itemsPtr = objects->data();
  state->mutationsPtr = state->extra;
  return objects->size();
}
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
@end

@implementation NSDictionary
+ (instancetype)dictionary {
  return [[self new] autorelease];
}
+ (instancetype)dictionaryWithObjects:(const id*)objects forKeys:(const id*)keys count:(NSUInteger)count {
  NSDictionary* dictionary = [[self new] autorelease];
  for (NSUInteger i = 0; i < count; i++)
    static_cast<Entries*>(dictionary->_entries)->emplace_back([keys[i] retain], [objects[i] retain]);
  return dictionary;
}
- (instancetype)init {
  _entries = new Entries;
  return self;
}
- (void)dealloc {
  auto* entries = static_cast<Entries*>(_entries);
  for (auto& [key, object] : *entries) {
    [key release];
    [object release];
  }
  delete entries;
  [super dealloc];
}
- (NSUInteger)count {
  return static_cast<Entries*>(_entries)->size();
}
- (id)objectForKey:(id)wanted {
  for (auto& [key, object] : *static_cast<Entries*>(_entries))
    if ([key isEqual:wanted]) return object;
  return nil;
}
- (NSArray*)allKeys {
  Objects keys;
  for (auto& [key, object] : *static_cast<Entries*>(_entries)) keys.push_back(key);
  return [NSArray arrayWithObjects:keys.data() count:keys.size()];
}
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
@end

NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";

@implementation NSError
+ (instancetype)errorWithDomain:(NSErrorDomain)domain code:(NSInteger)code userInfo:(NSDictionary*)info {
  NSError* error = [[self new] autorelease];
  error->_domain = [domain copy];
  error->_code = code;
  error->_userInfo = [info copy];
  return error;
}
- (void)dealloc {
  [_domain release];
  [_userInfo release];
  [super dealloc];
}
- (NSErrorDomain)domain {
  return _domain;
}
- (NSInteger)code {
  return _code;
}
- (NSDictionary*)userInfo {
  return _userInfo;
}
- (NSString*)localizedDescription {
  return [_userInfo objectForKey:NSLocalizedDescriptionKey];
}
- (NSString*)description {
  return [self localizedDescription];
}
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
@end

@implementation NSURL
@end
@implementation NSData
@end
@implementation NSBundle
@end
