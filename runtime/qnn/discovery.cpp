// SPDX-License-Identifier: BSD-3-Clause
#include "qnn/discovery.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

#include "core/stdout_capture.h"

namespace executorch_qnn {
namespace {

// The SDK's folders of libraries for this machine.
#if defined(__ANDROID__)
constexpr const char* kSdkFolders[] = {"lib/aarch64-android"};
#elif defined(__aarch64__)
constexpr const char* kSdkFolders[] = {"lib/aarch64-oe-linux-gcc11.2", "lib/aarch64-ubuntu-gcc9.4",
                                       "lib/aarch64-oe-linux-gcc9.3",
                                       "lib/aarch64-oe-linux-gcc8.2"};
#else
constexpr const char* kSdkFolders[] = {"lib/x86_64-linux-clang"};
#endif

constexpr char kHowToGetThem[] =
    "Get them with: pip install \"onnxruntime-qnn>=2.3,<2.8\" - or name a folder that has them "
    "(--qnn-libraries PATH, qnn_libraries=PATH) - or set QNN_SDK_ROOT to an unpacked Qualcomm AI "
    "Runtime SDK";

bool holds_library(const std::string& folder) {
  return access((folder + "/" + kHtpLibrary).c_str(), R_OK) == 0;
}

class Search {
 public:
  // `folder` itself, or the folders in which an SDK would have its libraries.
  void look(const char* how, const std::string& folder) {
    if (folder.empty()) return;
    result_.looked_at.push_back(std::string(how) + ": " + folder);
    for (const char* sub : kSdkFolders) {
      std::string candidate = folder + "/" + sub;
      if (holds_library(candidate)) return add(how, std::move(candidate));
    }
    if (holds_library(folder)) add(how, folder);
  }

  void look_in_loader_path() {
    if (const char* list = getenv("LD_LIBRARY_PATH")) {
      std::string rest = list;
      for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = rest.find_first_of(":;", begin);
        look("system", rest.substr(begin, end - begin));
      }
    }
    if (result_.found.empty()) ask_loader();
  }

  LibrarySearch take() { return std::move(result_); }

 private:
  void add(const char* how, std::string folder) {
    for (const LibraryCandidate& known : result_.found) {
      if (known.folder == folder) return;
    }
    result_.found.push_back({how, std::move(folder)});
  }

  void ask_loader() {
    result_.looked_at.push_back("system: the dynamic loader's default folders");
    // One that is loaded answers to its name, wherever it came from.
    if (dlopen(kHtpLibrary, RTLD_LAZY | RTLD_NOLOAD) != nullptr) return;
    StdoutCapture quiet(StdoutCapture::kStdoutAndStderr);
    void* handle = dlopen(kHtpLibrary, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return;
    Dl_info info{};
    if (void* symbol = dlsym(handle, "QnnInterface_getProviders");
        symbol != nullptr && dladdr(symbol, &info) != 0) {
      std::string file = info.dli_fname;
      if (size_t slash = file.rfind('/'); slash != std::string::npos)
        add("system", file.substr(0, slash));
    }
    // Not closed: QNN's libraries do not survive unloading, and this one is about to be used.
  }

  LibrarySearch result_;
};

}  // namespace

Result<LibraryCandidate> LibrarySearch::best() const {
  if (!found.empty()) return found.front();
  std::string message = std::string("no QNN libraries (") + kHtpLibrary + ") found. Looked at:";
  for (const std::string& place : looked_at) message += "\n  " + place;
  if (looked_at.empty()) message += " nothing";
  return Status(ErrorKind::kLibraryNotFound, message + "\n" + kHowToGetThem);
}

LibrarySearch find_library(const std::string& path, const std::vector<std::string>& extra) {
  Search search;
  if (!path.empty()) {
    search.look("argument", path);
    return search.take();
  }
  if (const char* root = getenv("QNN_SDK_ROOT")) search.look("QNN_SDK_ROOT", root);
  for (const std::string& folder : extra) search.look("package", folder);
  search.look_in_loader_path();
  return search.take();
}

}  // namespace executorch_qnn
