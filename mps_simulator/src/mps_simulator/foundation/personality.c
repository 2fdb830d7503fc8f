// Under -fobjc-runtime=gcc Objective-C++ functions use __gnu_objc_personality_v0, with which C++ catch clauses do not
// catch. Linked into each library with Objective-C++ in it, this replaces it by C++'s own.
#include <unwind.h>

_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, struct _Unwind_Exception*,
                                         struct _Unwind_Context*);

__attribute__((visibility("hidden"))) _Unwind_Reason_Code
__gnu_objc_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class exception_class,
                          struct _Unwind_Exception* exception, struct _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, exception_class, exception, context);
}
