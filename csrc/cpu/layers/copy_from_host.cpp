#include "ops/layers/copy_from_host.h"

#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const CopyFromHost<int64_t>& op) { op.copy(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<CopyFromHost, &run>(m); }

}  // namespace torch_gdn
