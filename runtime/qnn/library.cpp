// SPDX-License-Identifier: BSD-3-Clause
#include "qnn/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "core/stdout_capture.h"
#include "qnn/discovery.h"

namespace executorch_qnn {
namespace {

constexpr uint32_t kCoreMajor = 2;
constexpr uint32_t kOldestCoreMinor = 36;  // QAIRT 2.47
constexpr uint32_t kSystemMajor = 1;

std::string to_string(const abi::Version& version) {
  return std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
         std::to_string(version.patch);
}

// How much of the table a library of this minor version has: it grows at its tail, and what follows
// it in an older library is not ours to read.
size_t table_size(uint32_t core_minor) {
  return core_minor >= 40 ? sizeof(abi::Interface) : offsetof(abi::Interface, graph_validate);
}

Status not_loadable(const std::string& file) {
  const char* reason = dlerror();
  return {ErrorKind::kLibraryNotFound,
          "cannot load " + file + ": " + (reason != nullptr ? reason : "unknown reason")};
}

// What a code means for somebody who only wanted to lower or run a model.
const char* advice(uint64_t code) {
  switch (code) {
    case abi::kErrorContextBinary:
      return "a context binary loads on the same QAIRT version that compiled it or a newer one";
    case abi::kErrorDeviceConfig:
      return "this library does not know the target SoC";
    default:
      return nullptr;
  }
}

}  // namespace

Result<std::shared_ptr<const Library>> Library::load(const std::string& folder) {
  // An empty path would mean the current folder to realpath and everything to find_library.
  LibrarySearch search = find_library(folder, {});
  if (folder.empty()) search.found.clear();
  ETQNN_ASSIGN(LibraryCandidate candidate, search.best());

  std::unique_ptr<char, decltype(&free)> real(realpath(candidate.folder.c_str(), nullptr), &free);
  std::string key = real != nullptr ? real.get() : candidate.folder;

  // Leaked on purpose, like the libraries.
  static auto& loaded = *new std::map<std::string, std::shared_ptr<const Library>>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto known = loaded.find(key); known != loaded.end()) return known->second;
  std::shared_ptr<Library> library(new Library(key));
  ETQNN_TRY(library->open());
  ETQNN_TRY(library->open_system());
  loaded[key] = library;
  return std::shared_ptr<const Library>(library);
}

Status Library::open() {
  std::string file = folder_ + "/" + kHtpLibrary;
  StdoutCapture quiet(StdoutCapture::kStdoutAndStderr);
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return not_loadable(file);
  auto get = reinterpret_cast<abi::GetProviders>(dlsym(handle, abi::kGetProviders));
  const abi::Provider* const* providers = nullptr;
  uint32_t count = 0;
  if (get == nullptr || get(&providers, &count) != 0) {
    return {ErrorKind::kIncompatible, file + " offers no QNN interface"};
  }
  const abi::Provider* found = nullptr;
  for (uint32_t i = 0; i < count && found == nullptr; ++i) {
    if (providers[i]->backend_id == abi::kBackendHtp) found = providers[i];
  }
  if (found == nullptr) return {ErrorKind::kIncompatible, file + " is not an HTP backend of QNN"};
  version_ = found->version;
  if (version_.core.major != kCoreMajor || version_.core.minor < kOldestCoreMinor) {
    return {ErrorKind::kIncompatible, file + " has QNN core API " + to_string(version_.core) +
                                          "; this backend needs " + std::to_string(kCoreMajor) +
                                          "." + std::to_string(kOldestCoreMinor) +
                                          " or a later 2.x (QAIRT 2.47 or later)"};
  }
  provider_ = found->name;
  std::memcpy(&api_, &found->interface, table_size(version_.core.minor));
  const char* id = nullptr;
  if (api_.backend_get_build_id(&id) == 0 && id != nullptr) build_id_ = id;
  return {};
}

Status Library::open_system() {
  std::string file = folder_ + "/" + kSystemLibrary;
  if (access(file.c_str(), R_OK) != 0) return {};
  StdoutCapture quiet;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return not_loadable(file);
  auto get = reinterpret_cast<abi::GetSystemProviders>(dlsym(handle, abi::kGetSystemProviders));
  const abi::SystemProvider* const* providers = nullptr;
  uint32_t count = 0;
  if (get == nullptr || get(&providers, &count) != 0 || count == 0) {
    return {ErrorKind::kIncompatible, file + " offers no QNN system interface"};
  }
  system_version_ = providers[0]->version;
  if (system_version_.major != kSystemMajor) {
    return {ErrorKind::kIncompatible, file + " has QNN system API " + to_string(system_version_) +
                                          "; this backend needs " + std::to_string(kSystemMajor) +
                                          ".x"};
  }
  system_ = providers[0]->interface;
  has_system_ = true;
  return {};
}

Status Library::check(abi::Error error, const char* action, const LogCapture& log) const {
  if (error == 0) return {};
  uint64_t code = abi::error_code(error);
  std::string message = std::string(action) + " failed with QNN error " + std::to_string(code);
  const char* name = nullptr;
  if (api_.error_get_message != nullptr && api_.error_get_message(error, &name) == 0 &&
      name != nullptr) {
    message += std::string(" (") + name + ")";
  }
  if (const char* hint = advice(code)) message += std::string("; ") + hint;
  if (std::string lines = log.errors(); !lines.empty()) message += "\nQNN says: " + lines;
  return {ErrorKind::kQnn, std::move(message), code};
}

}  // namespace executorch_qnn
