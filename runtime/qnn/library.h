// SPDX-License-Identifier: BSD-3-Clause
// One loaded pair of QNN libraries (HTP backend and system), and what it can tell about itself.
#pragma once

#include <memory>
#include <string>

#include "core/api.h"
#include "core/status.h"
#include "qnn/abi.h"
#include "qnn/log.h"

namespace executorch_qnn {

// Loaded once per folder and process and never unloaded: QNN keeps threads and thread-local data
// that do not survive dlclose. All functions are thread-safe.
class ETQNN_API Library {
 public:
  // `folder` as found by find_library(). Refuses a library of another major core API or one older
  // than core 2.36; a newer minor is accepted, of which only the part known to us is used.
  static Result<std::shared_ptr<const Library>> load(const std::string& folder);

  const std::string& folder() const { return folder_; }
  const std::string& build_id() const { return build_id_; }  // "v2.51.0.260929181845"
  const std::string& provider() const { return provider_; }  // "HTP_QTI_AISW"
  abi::Version core_api() const { return version_.core; }
  abi::Version backend_api() const { return version_.backend; }
  // {0, 0, 0} without libQnnSystem.so.
  abi::Version system_api() const { return system_version_; }

  const abi::Interface& api() const { return api_; }
  // Null without libQnnSystem.so, which is only needed to look into context binaries.
  const abi::SystemInterface* system() const { return has_system_ ? &system_ : nullptr; }

  // Success, or a failure of QNN in words: what was tried, the code and its name, what to do about
  // it, and the lines that QNN logged meanwhile.
  Status check(abi::Error error, const char* action, const LogCapture& log) const;

  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

 private:
  explicit Library(std::string folder) : folder_(std::move(folder)) {}
  Status open();
  Status open_system();

  std::string folder_;
  std::string build_id_;
  std::string provider_;
  abi::ApiVersion version_{};
  abi::Version system_version_{};
  abi::Interface api_{};
  abi::SystemInterface system_{};
  bool has_system_ = false;
};

}  // namespace executorch_qnn
