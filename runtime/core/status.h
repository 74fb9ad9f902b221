// SPDX-License-Identifier: BSD-3-Clause
// How the core reports failure: a Status, or a Result<T> that holds a value or a Status. The core
// throws nothing of its own; the Python module turns a Status into an exception and the delegate
// into an ExecuTorch Error.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace executorch_qnn {

// What went wrong, as far as a caller has to tell cases apart.
enum class ErrorKind : uint8_t {
  kNone,
  kLibraryNotFound,  // the QNN libraries are not where we looked
  kIncompatible,     // a library, file or payload of a version or target we cannot use
  kInvalid,          // the caller passed something wrong
  kQnn,              // QNN refused or failed; `Status::code` is its error code
  kState,            // a state buffer does not fit its slot
  kIo,               // the operating system failed on a file
  kRuntime,          // ExecuTorch's runtime failed
};

// The name that the Python module gives the kind.
inline const char* to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kNone:
      return "none";
    case ErrorKind::kLibraryNotFound:
      return "library_not_found";
    case ErrorKind::kIncompatible:
      return "incompatible";
    case ErrorKind::kInvalid:
      return "invalid";
    case ErrorKind::kQnn:
      return "qnn";
    case ErrorKind::kState:
      return "state";
    case ErrorKind::kIo:
      return "io";
    case ErrorKind::kRuntime:
      return "runtime";
  }
  return "unknown";
}

// Success, or a failure in words. A successful Status allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorKind kind, std::string message, uint64_t code = 0)
      : kind_(kind), code_(code), message_(std::move(message)) {}

  bool ok() const { return kind_ == ErrorKind::kNone; }
  ErrorKind kind() const { return kind_; }
  // QNN's error code (or ExecuTorch's, for kRuntime); 0 if there is none.
  uint64_t code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  ErrorKind kind_ = ErrorKind::kNone;
  uint64_t code_ = 0;
  std::string message_;
};

// A value, or the Status that says why there is none. `value()` may only be asked of an ok()
// result.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}         // NOLINT
  Result(Status status) : content_(std::in_place_index<1>, std::move(status)) {}  // NOLINT

  bool ok() const { return content_.index() == 0; }
  T& value() & { return *std::get_if<0>(&content_); }
  const T& value() const& { return *std::get_if<0>(&content_); }
  T&& value() && { return std::move(*std::get_if<0>(&content_)); }
  Status status() const { return ok() ? Status() : *std::get_if<1>(&content_); }

 private:
  std::variant<T, Status> content_;
};

}  // namespace executorch_qnn

#define ETQNN_CONCAT_(a, b) a##b
#define ETQNN_CONCAT(a, b) ETQNN_CONCAT_(a, b)

// Returns from the calling function if `expression`, a Status, is not ok.
#define ETQNN_TRY(expression)                             \
  do {                                                    \
    ::executorch_qnn::Status etqnn_status = (expression); \
    if (!etqnn_status.ok()) return etqnn_status;          \
  } while (false)

// Declares or assigns `target` from `expression`, a Result, or returns its Status.
#define ETQNN_ASSIGN(target, expression) \
  ETQNN_ASSIGN_(target, expression, ETQNN_CONCAT(etqnn_result_, __LINE__))
#define ETQNN_ASSIGN_(target, expression, result) \
  auto result = (expression);                     \
  if (!result.ok()) return result.status();       \
  target = std::move(result).value()
