// Stops an op's first launch of a kernel variant, so that the self-test in Python runs the call instead.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "launch/block.h"
#include "launch/launch.h"

namespace torch_gdn {

// Thrown before the launches of an op run. Launches of the same op that ran before have written no argument.
struct Untested {};

// Returns whether the running op may launch all of these variants: they passed, or `unless_failed` and they did not
// fail. It may in a Trusted block, without a self-test, and outside of every op.
bool are_tested(Launches launches, bool unless_failed = false);

// Lets every launch of the thread that starts it run.
struct Trust {};
using Trusted = Block<Trust>;

// Turns the self-test on or off, and forgets all verdicts.
void set_self_test(bool on);

// Gives variants of ops a verdict. Names them by the op and the variant, with a space between.
void set_tested(const std::vector<std::string>& names, bool passed);

// Passes the call to the op gdn_self_test::<name>, after gdn_self_test::define(name). Both are in Python.
void run_self_test(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace torch_gdn
