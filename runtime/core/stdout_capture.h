// SPDX-License-Identifier: BSD-3-Clause
// The QNN libraries print progress and statistics straight to file descriptor 1, whatever the log
// level. This keeps that text off the program's stdout, and keeps it for us.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <string>

#include "core/api.h"

namespace executorch_qnn {

// Sends file descriptor 1 of the whole process elsewhere for the lifetime of the object. Captures
// of several threads wait for each other; what other threads print meanwhile is captured too. Works
// when stdout is closed.
class ETQNN_API StdoutCapture {
 public:
  StdoutCapture();
  ~StdoutCapture();
  StdoutCapture(const StdoutCapture&) = delete;
  StdoutCapture& operator=(const StdoutCapture&) = delete;

  // Restores stdout and returns what was printed. To be called once; the destructor does the same.
  std::string finish();

 private:
  std::unique_lock<std::mutex> lock_;
  int saved_ = -1;   // a duplicate of the real stdout; -1 if that is closed
  int target_ = -1;  // where fd 1 points meanwhile; -1 after finish()
  off_t start_ = 0;  // where our text begins in `target_`
};

// A file that receives captured text and QNN's log lines as they come, so that they outlive a crash
// of the process. An empty path ends it. Returns false if the file cannot be opened.
ETQNN_API bool set_diagnostics_file(const std::string& path);

// The descriptor of that file, or -1.
int diagnostics_fd();

}  // namespace executorch_qnn
