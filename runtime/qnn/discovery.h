// SPDX-License-Identifier: BSD-3-Clause
// Where the QNN libraries are.
#pragma once

#include <string>
#include <vector>

#include "core/api.h"
#include "core/status.h"

namespace executorch_qnn {

inline constexpr char kHtpLibrary[] = "libQnnHtp.so";
inline constexpr char kSystemLibrary[] = "libQnnSystem.so";

struct LibraryCandidate {
  std::string how;     // "argument", "QNN_SDK_ROOT", "package" or "system"
  std::string folder;  // holds libQnnHtp.so
};

struct LibrarySearch {
  std::vector<LibraryCandidate> found;  // best first
  std::vector<std::string> looked_at;   // every place, for the error message

  // The best candidate, or an error that lists the places and says how to get the libraries.
  ETQNN_API Result<LibraryCandidate> best() const;
};

// Looks in this order: `path` (a folder of libraries or the root of an SDK), QNN_SDK_ROOT, the
// folders in `extra`, LD_LIBRARY_PATH and, if nothing was found so far, wherever the dynamic loader
// finds libQnnHtp.so. A given `path` is the only place looked at: a wrong one is an error, not a
// hint.
ETQNN_API LibrarySearch find_library(const std::string& path,
                                     const std::vector<std::string>& extra);

}  // namespace executorch_qnn
