#import <Foundation/Foundation.h>

#include <objc/runtime.h>

#include <cstdlib>
#include <cstring>
#include <string>

@interface SimString : NSString {
  std::string* _text;
}
- (instancetype)initWithText:(const char*)text;
@end

@implementation NSString
+ (instancetype)string {
  return [self stringWithUTF8String:""];
}
+ (instancetype)stringWithUTF8String:(const char*)text {
  return (NSString*)[[[SimString alloc] initWithText:text] autorelease];
}
- (const char*)UTF8String {
  return "";
}
- (NSUInteger)length {
  NSUInteger count = 0;
  for (const char* c = [self UTF8String]; *c; c++) count += (*c & 0xC0) != 0x80;
  return count;
}
- (BOOL)isEqualToString:(NSString*)other {
  return strcmp([self UTF8String], [other UTF8String]) == 0;
}
- (BOOL)isEqual:(id)other {
  return [self isEqualToString:other];
}
- (NSUInteger)hash {
  return std::hash<std::string>{}([self UTF8String]);
}
- (NSString*)stringByAppendingString:(NSString*)other {
  return [NSString stringWithUTF8String:(std::string([self UTF8String]) + [other UTF8String]).c_str()];
}
- (NSString*)description {
  return self;
}
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
@end

@implementation SimString
- (instancetype)initWithText:(const char*)text {
  _text = new std::string(text);
  return self;
}
- (const char*)UTF8String {
  return _text->c_str();
}
- (void)dealloc {
  delete _text;
  [super dealloc];
}
@end

// clang emits objects of this layout for @"...": {isa, characters, length}. They have no reference count, so the class
// cannot derive from NSObject.
__attribute__((objc_root_class))
@interface NSConstantString {
  Class isa;
  const char* _characters;
  unsigned _length;
}
@end

@implementation NSConstantString
+ (void)initialize {
}
- (const char*)UTF8String {
  return _characters;
}
- (NSUInteger)length {
  NSUInteger count = 0;
  for (unsigned i = 0; i < _length; i++) count += (_characters[i] & 0xC0) != 0x80;
  return count;
}
- (BOOL)isEqualToString:(NSString*)other {
  return strcmp(_characters, [other UTF8String]) == 0;
}
- (BOOL)isEqual:(id)other {
  return [(NSString*)self isEqualToString:other];
}
- (NSUInteger)hash {
  return std::hash<std::string>{}(_characters);
}
- (NSString*)stringByAppendingString:(NSString*)other {
  return [NSString stringWithUTF8String:(std::string(_characters) + [other UTF8String]).c_str()];
}
- (NSString*)description {
  return (NSString*)self;
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)isKindOfClass:(Class)aClass {
  return aClass == object_getClass(self) || aClass == [NSString class];
}
- (id)retain {
  return self;
}
- (void)release {
}
- (id)autorelease {
  return self;
}
- (NSUInteger)retainCount {
  return ~0ul;
}
- (id)copy {
  return self;
}
- (id)copyWithZone:(NSZone*)zone {
  return self;
}
@end
