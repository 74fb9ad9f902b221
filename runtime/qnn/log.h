// SPDX-License-Identifier: BSD-3-Clause
// QNN's error codes say little; the reason is a line in its log. A LogCapture around a QNN call
// keeps the ERROR lines of that call, and the compiler's progress report.
#pragma once

#include <string>

#include "core/api.h"
#include "qnn/abi.h"

namespace executorch_qnn {

// Collects the ERROR lines that QNN logs while it is alive: those of its own thread, and those of
// threads that have no capture (QNN's workers). Captures of one thread nest, the innermost gets the
// line. Costs no allocation until a line arrives.
class ETQNN_API LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  // The ERROR lines so far, in order, joined by newlines.
  std::string errors() const;
  // The compiler's stages and totals, which newer libraries log at INFO and older ones print.
  std::string progress() const;

 private:
  friend void on_qnn_log(const char*, abi::LogLevel, uint64_t, va_list);

  LogCapture* const outer_;  // of this thread
  LogCapture* newer_ = nullptr;
  LogCapture* older_;  // of all threads
  std::string errors_, progress_;
};

// Lets lines down to `level` go to stderr, ERROR lines excepted: those are part of the error. For
// the whole process, as QNN's callback does not tell whose line it is. Never becomes less again.
void echo_log(abi::LogLevel level);

// The callback that every QNN log handle gets. All lines go to the diagnostics file if one is set
// (see core/stdout_capture.h).
void on_qnn_log(const char* format, abi::LogLevel level, uint64_t timestamp, va_list args);

}  // namespace executorch_qnn
