// SPDX-License-Identifier: BSD-3-Clause
// The QNN libraries print progress and statistics straight to file descriptor 1, whatever the log
// level. This keeps that text off the program's stdout, and keeps it for us.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <string>

#include "core/api.h"

namespace executorch_qnn {

// Sends file descriptor 1 of the whole process elsewhere for the lifetime of the object, and 2 as
// well if asked to. Captures of several threads wait for each other; what other threads print
// meanwhile is captured too. Works when the descriptors are closed.
class ETQNN_API StdoutCapture {
 public:
  enum Scope { kStdout, kStdoutAndStderr };

  explicit StdoutCapture(Scope scope = kStdout);
  ~StdoutCapture();
  StdoutCapture(const StdoutCapture&) = delete;
  StdoutCapture& operator=(const StdoutCapture&) = delete;

  // Restores the descriptors and returns what was printed. To be called once; the destructor does
  // the same.
  std::string finish();

 private:
  const Scope scope_;
  std::unique_lock<std::mutex> lock_;
  int saved_stdout_ = -1;  // a duplicate of the real one; -1 if that is closed
  int saved_stderr_ = -1;
  int target_ = -1;  // where the descriptors point meanwhile; -1 after finish()
  off_t start_ = 0;  // where our text begins in `target_`
};

// A file that receives captured text and QNN's log lines, so that they outlive a crash of the
// process. A regular file gets them as they come; a pipe or terminal gets captured text when its
// capture ends. An empty path ends it. Returns false if the file cannot be opened.
ETQNN_API bool set_diagnostics_file(const std::string& path);

// The descriptor of that file, or -1.
int diagnostics_fd();

}  // namespace executorch_qnn
