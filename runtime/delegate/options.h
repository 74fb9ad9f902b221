// SPDX-License-Identifier: BSD-3-Clause
// What the process tells the delegate about its surroundings.
#pragma once

#include <cstdint>
#include <string>

#include "core/api.h"
#include "core/status.h"

namespace executorch_qnn {

inline constexpr char kBackendId[] = "QnnDelegate";

// Keys of the delegate's options. Each can be given for the process (set_option) or for one load
// (runtime specs), which wins.
inline constexpr char kLibrariesOption[] = "qnn_libraries";  // folder of the QNN libraries
inline constexpr char kSocOption[] = "soc_model";  // QNN's number of the SoC that this device is
inline constexpr char kStoreOption[] = "state_store";  // token of a session; load only

struct DelegateOptions {
  std::string libraries;       // empty: search
  std::string package_folder;  // searched after QNN_SDK_ROOT; Python sets it to onnxruntime_qnn's
  uint32_t soc_model = 0;      // 0: do not check
};

ETQNN_API DelegateOptions delegate_options();
ETQNN_API void set_delegate_options(const DelegateOptions& options);

// The folder to load QNN from: `explicit_folder` if given, else searched for as find_library()
// does.
Result<std::string> resolve_libraries(const std::string& explicit_folder,
                                      const DelegateOptions& options);

}  // namespace executorch_qnn
