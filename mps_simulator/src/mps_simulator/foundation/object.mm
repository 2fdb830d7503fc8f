// NSObject, the autorelease pool, and zombies, which replace deallocated objects. Any message to a zombie is a fault.
#import <Foundation/Foundation.h>

#include <objc/message.h>
#include <objc/runtime.h>

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "mps_simulator/foundation/fault.h"
#include "pool.h"

using simulator::fault;
using simulator::fault_unless_unwinding;

// The class of zombies. It implements no method, so every message goes to unknown_message().
__attribute__((objc_root_class))
@interface SimZombie {
  Class isa;
}
@end
@implementation SimZombie
@end

namespace {

// Zombies are kept until this many newer ones exist.
constexpr size_t kZombies = 4096;

struct Zombies {
  std::mutex mutex;
  std::deque<id> order;
  std::unordered_map<id, Class> former_class;
};

Zombies& all_zombies() {
  static auto* instance = new Zombies;
  return *instance;
}

void make_zombie(id object) {
  Zombies& zombies = all_zombies();
  std::lock_guard lock(zombies.mutex);
  zombies.former_class[object] = object_getClass(object);
  zombies.order.push_back(object);
  object_setClass(object, (Class)objc_getClass("SimZombie"));
  if (zombies.order.size() > kZombies) {
    id oldest = zombies.order.front();
    zombies.order.pop_front();
    zombies.former_class.erase(oldest);
    object_dispose(oldest);
  }
}

std::string describe(id object, SEL selector) {
  const std::string message = sel_getName(selector);
  Zombies& zombies = all_zombies();
  std::lock_guard lock(zombies.mutex);
  auto found = zombies.former_class.find(object);
  if (found != zombies.former_class.end()) {
    const std::string name = class_getName(found->second);
    if (message == "release" || message == "autorelease")
      return name + " is over-released: -" + message + " sent to a deallocated object";
    return "-[" + name + " " + message + "] sent to a deallocated object";
  }
  return "-[" + std::string(object_getClassName(object)) + " " + message + "]: unrecognized selector";
}

id fail_message(id object, SEL selector, ...) {
  // The cleanup of another exception may release a zombie.
  fault_unless_unwinding(describe(object, selector));
  return nil;
}

IMP unknown_message(id, SEL) { return (IMP)&fail_message; }

[[maybe_unused]] const bool kInstalled = [] {
  __objc_msg_forward2 = &unknown_message;
  return true;
}();

thread_local NSAutoreleasePool* current_pool = nil;

}  // namespace

@implementation NSObject
+ (void)initialize {
}
+ (instancetype)alloc {
  NSObject* object = class_createInstance(self, 0);
  object->_retain_count = 1;
  return object;
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return self;
}
- (instancetype)init {
  return self;
}
- (void)dealloc {
  make_zombie(self);
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)isKindOfClass:(Class)aClass {
  for (Class c = object_getClass(self); c; c = class_getSuperclass(c))
    if (c == aClass) return YES;
  return NO;
}
- (instancetype)retain {
  __atomic_add_fetch(&_retain_count, 1, __ATOMIC_RELAXED);
  return self;
}
- (void)release {
  if (__atomic_sub_fetch(&_retain_count, 1, __ATOMIC_ACQ_REL) == 0) [self dealloc];
}
- (instancetype)autorelease {
  simulator::autorelease(self);
  return self;
}
- (NSUInteger)retainCount {
  return __atomic_load_n(&_retain_count, __ATOMIC_RELAXED);
}
- (BOOL)isEqual:(id)object {
  return self == object;
}
- (NSUInteger)hash {
  return (NSUInteger)self >> 4;
}
- (NSString*)description {
  return [NSString stringWithUTF8String:class_getName(object_getClass(self))];
}
- (id)copy {
  return [(id<NSCopying>)self copyWithZone:nullptr];
}
@end

@implementation NSAutoreleasePool
- (instancetype)init {
  _objects = new std::vector<id>;
  _parent = current_pool;
  current_pool = self;
  return self;
}
- (void)drain {
  [self release];
}
- (void)dealloc {
  simulator::drain_pools_above(self);  // pools that an exception left open
  auto* objects = static_cast<std::vector<id>*>(_objects);
  current_pool = _parent;
  std::exception_ptr failure;
  for (; !objects->empty(); objects->pop_back()) {
    try {
      [objects->back() release];
    } catch (...) {
      failure = std::current_exception();
    }
  }
  delete objects;
  [super dealloc];
  if (failure) std::rethrow_exception(failure);
}
- (void)add:(id)object {
  static_cast<std::vector<id>*>(_objects)->push_back(object);
}
@end

namespace simulator {

// Without a pool the object leaks, as on a Mac.
void autorelease(id object) {
  if (current_pool) [current_pool add:object];
}

id innermost_pool() { return current_pool; }

void drain_pools_above(id pool) {
  while (current_pool && current_pool != pool) [current_pool release];
}

}  // namespace simulator
