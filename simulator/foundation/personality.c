// Under -fobjc-runtime=gcc clang marks Objective-C++ functions with __gnu_objc_personality_v0, which runs destructors
// but lets no C++ catch catch. Linked into each library that has Objective-C++ in it, this gives them C++'s own.
#include <unwind.h>

_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, struct _Unwind_Exception*,
                                         struct _Unwind_Context*);

__attribute__((visibility("hidden"))) _Unwind_Reason_Code
__gnu_objc_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class exception_class,
                          struct _Unwind_Exception* exception, struct _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, exception_class, exception, context);
}
