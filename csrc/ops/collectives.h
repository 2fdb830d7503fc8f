#pragma once

#include <string>

namespace torch_gdn {

// gloo's threads must not need the interpreter's lock. Whoever releases a group last waits for them to end, and DDP's
// reducer holds the lock while it does.

// Defines the op gdn_c10d::<name>. It calls c10d::<name> with other tensors of the same storage, which Python has
// never seen, because whoever releases a tensor that Python has seen takes the lock. It returns the work alone.
void define_collective(const std::string& name);

// Defines two ops. gdn_c10d::notify(work, pipe, call) -> bool: when the work is done, gloo's thread writes the number
// `call`, as 8 bytes, to the pipe. It returns false for a work that cannot say when it is done.
// gdn_c10d::set_error(future, what): the future raises RuntimeError(what), as often as it is asked.
void define_work();

}  // namespace torch_gdn
