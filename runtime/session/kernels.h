// SPDX-License-Identifier: BSD-3-Clause
// The CPU kernels of the ops that are not delegated.
#pragma once

namespace executorch_qnn {

// Loads ExecuTorch's optimized kernels into this process, once. Where ExecuTorch's own Python
// module is loaded too, both use one copy: the dynamic loader knows the library by its name. A
// program that links kernels of its own (a device build) has no such library, and needs none: then
// this does nothing.
void load_cpu_kernels();

}  // namespace executorch_qnn
