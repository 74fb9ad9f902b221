// SPDX-License-Identifier: BSD-3-Clause
// Failures on their way to Python: `_native.Error` with the attributes `code` and `kind`.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <utility>

#include "core/status.h"

namespace executorch_qnn {

// Thrown in the Python module only; its translator makes a `_native.Error` of it.
struct NativeError : std::exception {
  explicit NativeError(Status failure) : status(std::move(failure)) {}
  const char* what() const noexcept override { return status.message().c_str(); }

  Status status;
};

inline void unwrap(Status status) {
  if (!status.ok()) throw NativeError(std::move(status));
}

template <class T>
T unwrap(Result<T> result) {
  if (!result.ok()) throw NativeError(result.status());
  return std::move(result).value();
}

// Defines `Error` in the module.
void bind_error(nanobind::module_& module);

// Defines what compiles: find_library, Library, Backend, Context, Graph, inspect_context.
void bind_compile(nanobind::module_& module);

// Defines what runs: Program, Session, register.
void bind_session(nanobind::module_& module);

}  // namespace executorch_qnn
