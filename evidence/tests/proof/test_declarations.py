"""Tests that Objective-C's and metal-cpp's declarations of the same thing get the same notation."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.proof.mac import declarations, metal_cpp

pytestmark = pytest.mark.xdist_group("proof")

OBJECTIVE_C = """
#include <objc/NSObject.h>
@class NSString, NSError, NSArray<__covariant ObjectType>;
@protocol MTLBuffer;
typedef struct { NSUInteger width, height; } MTLSize;
enum MTLKind : NSUInteger { MTLKindSerial = 3 };
typedef void (^MTLHandler)(id<MTLBuffer>);
@protocol MTLThing <NSObject>
- (id<MTLBuffer>)bufferOfSize:(MTLSize)size name:(NSString *)name error:(NSError **)error;
- (void)setBytes:(const void *)bytes kind:(enum MTLKind)kind;
- (void)addHandler:(MTLHandler)handler;
@property(readonly) NSArray<NSString *> *names;
@property BOOL enabled;
@end
@interface NSThing : NSObject
+ (instancetype)thing;
@end
"""

CPP = """
#include <objc/runtime.h>
namespace NS {
using UInteger = unsigned long;
class Object {
 public:
  template <typename R, typename... A> static R sendMessage(const void*, SEL, A...);
};
template <class Class, class Base = Object> class Referencing : public Base {};
class String; class Error; class Array;
namespace Private {
namespace Class { void* s_kNSThing = objc_lookUpClass("NSThing"); }
namespace Selector { SEL s_kthing = sel_registerName("thing"); }
}
class Thing : public Referencing<Thing> { public: static Thing* thing(); };
}
namespace MTL {
namespace Private {
namespace Protocol { void* s_kMTLThing = objc_getProtocol("MTLThing"); }
namespace Selector {
SEL s_kbuffer = sel_registerName("bufferOfSize:name:error:");
SEL s_ksetBytes = sel_registerName("setBytes:kind:");
SEL s_kaddHandler = sel_registerName("addHandler:");
SEL s_knames = sel_registerName("names");
SEL s_kenabled = sel_registerName("enabled");
SEL s_ksetEnabled = sel_registerName("setEnabled:");
}
}
using namespace MTL::Private::Selector;
struct Size { NS::UInteger width, height; };
enum Kind : NS::UInteger { KindSerial = 3 };
class Buffer;
using Handler = void (^)(Buffer*);
class Thing : public NS::Referencing<Thing> {
 public:
  Buffer* buffer(Size size, const NS::String* name, NS::Error** error);
  void setBytes(const void* bytes, Kind kind);
  void addHandler(Handler handler);
  NS::Array* names() const;
  bool enabled() const;
  void setEnabled(bool enabled);
};
}
inline NS::Thing* NS::Thing::thing() {
  return Object::sendMessage<Thing*>(Private::Class::s_kNSThing, Private::Selector::s_kthing);
}
inline MTL::Buffer* MTL::Thing::buffer(Size size, const NS::String* name, NS::Error** error) {
  return Object::sendMessage<MTL::Buffer*>(this, s_kbuffer, size, name, error);
}
inline void MTL::Thing::setBytes(const void* bytes, Kind kind) {
  Object::sendMessage<void>(this, s_ksetBytes, bytes, kind);
}
inline void MTL::Thing::addHandler(Handler handler) { Object::sendMessage<void>(this, s_kaddHandler, handler); }
inline NS::Array* MTL::Thing::names() const { return Object::sendMessage<NS::Array*>(this, s_knames); }
inline bool MTL::Thing::enabled() const { return Object::sendMessage<bool>(this, s_kenabled); }
inline void MTL::Thing::setEnabled(bool enabled) { Object::sendMessage<void>(this, s_ksetEnabled, enabled); }
"""


@pytest.fixture
def objective_c(tmp_path: Path) -> dict[declarations.Key, str]:
    (tmp_path / "Thing.h").write_text(OBJECTIVE_C)
    unit = declarations.parse('#include "Thing.h"', [f"-I{tmp_path}"])
    return {each.key: each.value for each in declarations.objective_c(unit, [tmp_path])}


@pytest.fixture
def cpp(tmp_path: Path) -> dict[declarations.Key, str]:
    for folder in ("Foundation", "Metal"):
        (tmp_path / "cpp" / folder).mkdir(parents=True)
    (tmp_path / "cpp/Foundation/Foundation.hpp").write_text("")
    (tmp_path / "cpp/Metal/Metal.hpp").write_text(CPP)
    return {each.key: each.value for each in metal_cpp.read(tmp_path / "cpp")}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("method", "MTLThing", "-bufferOfSize:name:error:"), "MTLBuffer*(MTLSize, NSString*, NSError**)"),
        (("method", "MTLThing", "-setBytes:kind:"), "void(const void*, MTLKind)"),
        (("method", "MTLThing", "-addHandler:"), "void(block void(MTLBuffer*))"),
        (("method", "MTLThing", "-names"), "NSArray*()"),
        (("method", "MTLThing", "-enabled"), "bool()"),
        (("method", "MTLThing", "-setEnabled:"), "void(bool)"),
        (("method", "NSThing", "+thing"), "NSThing*()"),
        (("enumerator", "MTLKindSerial"), "unsigned long 3"),
        (("struct", "MTLSize"), "{unsigned long width @0; unsigned long height @8} 16 bytes"),
        (("type", "MTLHandler"), "block void(MTLBuffer*)"),
        (("kind", "MTLThing"), "protocol"),
        (("kind", "NSThing"), "class"),
    ],
)
def test_both_languages_give_one_notation(
    key: declarations.Key,
    value: str,
    objective_c: dict[declarations.Key, str],
    cpp: dict[declarations.Key, str],
) -> None:
    assert objective_c[key] == value
    assert cpp[key] == value


def test_header_that_does_not_parse_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "Thing.h").write_text("@interface Broken : NoSuchClass\n@end\n")
    with pytest.raises(declarations.HeaderError, match="NoSuchClass"):
        declarations.parse('#include "Thing.h"', [f"-I{tmp_path}"])
