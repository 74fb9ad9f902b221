// SPDX-License-Identifier: BSD-3-Clause
#include "session/kernels.h"

#include <dlfcn.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <mutex>

#include "session/et_log.h"

namespace executorch_qnn {

void load_cpu_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    EtLogCapture quiet;  // asking for a kernel that is not there is logged as an error
    // Kernels abort the process when they are registered twice: leave those alone that are there.
    if (executorch::runtime::registry_has_op_function("aten::add.out")) return;
    // Found through this library's own search path. Never unloaded: kernels cannot be unregistered.
    dlopen("libexecutorch_kernels_optimized.so", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  });
}

}  // namespace executorch_qnn
