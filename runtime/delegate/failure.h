// SPDX-License-Identifier: BSD-3-Clause
// The way of a failure out of ExecuTorch: its interfaces return a number, the words take this path.
#pragma once

#include <executorch/runtime/core/error.h>

#include <string>

#include "core/api.h"
#include "core/status.h"

namespace executorch_qnn {

// Writes one line to ExecuTorch's log, remembers the words for this thread and returns the number:
// `invalid` for ErrorKind::kInvalid, which means the program at load and an argument at execute.
executorch::runtime::Error fail(const Status& status, executorch::runtime::Error invalid);

// The delegate's last failure on this thread since the last call; ok() if there was none.
ETQNN_API Status take_failure();

// Makes `text` what etqnn_last_error() says on this thread. See state/state_api.h.
void set_last_error(const std::string& text);

}  // namespace executorch_qnn
