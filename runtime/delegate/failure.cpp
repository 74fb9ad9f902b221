// SPDX-License-Identifier: BSD-3-Clause
#include "delegate/failure.h"

#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <cstring>

#include "state/state_api.h"

namespace executorch_qnn {
namespace {

using executorch::runtime::Error;

// Plain data, so that nothing is left to be destroyed in threads that end after this library.
struct Failure {
  ErrorKind kind;
  uint64_t code;
  char text[4096];
};
thread_local Failure t_last{};

}  // namespace

void set_last_error(const std::string& text) {
  const size_t size = std::min(text.size(), sizeof t_last.text - 1);
  std::memcpy(t_last.text, text.data(), size);
  t_last.text[size] = 0;
}

Error fail(const Status& status, Error invalid) {
  set_last_error(status.message());
  t_last.kind = status.kind();
  t_last.code = status.code();
  ET_LOG(Error, "QnnDelegate: %s", t_last.text);
  switch (status.kind()) {
    case ErrorKind::kLibraryNotFound:
      return Error::NotFound;
    case ErrorKind::kIncompatible:
      return Error::DelegateInvalidCompatibility;
    case ErrorKind::kInvalid:
      return invalid;
    case ErrorKind::kState:
      return Error::InvalidState;
    case ErrorKind::kIo:
      return Error::AccessFailed;
    default:
      return Error::Internal;
  }
}

Status take_failure() {
  if (t_last.kind == ErrorKind::kNone) return {};
  Status status(t_last.kind, t_last.text, t_last.code);
  t_last.kind = ErrorKind::kNone;
  return status;
}

}  // namespace executorch_qnn

const char* etqnn_last_error() { return executorch_qnn::t_last.text; }
