// SPDX-License-Identifier: BSD-3-Clause
#include "delegate/options.h"

#include <mutex>
#include <vector>

#include "qnn/discovery.h"

namespace executorch_qnn {
namespace {

std::mutex g_mutex;

DelegateOptions& options_locked() {
  static auto* options = new DelegateOptions();  // outlives delegates destroyed at exit
  return *options;
}

}  // namespace

DelegateOptions delegate_options() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return options_locked();
}

void set_delegate_options(const DelegateOptions& options) {
  std::lock_guard<std::mutex> lock(g_mutex);
  options_locked() = options;
}

Result<std::string> resolve_libraries(const std::string& explicit_folder,
                                      const DelegateOptions& options) {
  const std::string& folder = explicit_folder.empty() ? options.libraries : explicit_folder;
  std::vector<std::string> extra;
  if (!options.package_folder.empty()) extra.push_back(options.package_folder);
  ETQNN_ASSIGN(const LibraryCandidate best, find_library(folder, extra).best());
  return best.folder;
}

}  // namespace executorch_qnn
