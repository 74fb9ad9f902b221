// SPDX-License-Identifier: BSD-3-Clause
// A .pte file, opened: what it contains, without loading any of its methods.
#pragma once

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/runtime/executor/program.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/digest.h"
#include "core/file.h"
#include "core/status.h"

namespace executorch_qnn {

// What goes into a method or comes out of it.
enum class ValueKind : uint8_t { kTensor, kInt, kDouble, kBool, kNone, kOther };

struct ValueInfo {
  ValueKind kind = ValueKind::kOther;
  // Tensors only. `type` is the number of c10::ScalarType; `dims` are the upper bounds if dynamic.
  int8_t type = 0;
  std::vector<int32_t> dims;
};

// Bytes of a dense tensor; `type` is the number of c10::ScalarType.
size_t tensor_bytes(int8_t type, const std::vector<int32_t>& dims);

struct MethodInfo {
  std::vector<ValueInfo> inputs, outputs;
  std::vector<std::string> backends;
};

struct ProgramOptions {
  std::string libraries;  // folder of the QNN libraries; empty: search
  bool mlock = false;     // keep the file's pages in memory
};

// Immutable and shared by sessions. The file is mapped, and must not change while it is open.
class ETQNN_API ProgramFile {
 public:
  // A file whose seal does not fit it is refused. In one without a seal only the structure is
  // checked: that finds truncation, and most damage, but ExecuTorch itself may crash on the rest.
  static Result<std::shared_ptr<const ProgramFile>> open(const std::string& path,
                                                         const ProgramOptions& options = {});
  ~ProgramFile();
  ProgramFile(const ProgramFile&) = delete;
  ProgramFile& operator=(const ProgramFile&) = delete;

  const std::string& path() const { return path_; }
  const ProgramOptions& options() const { return options_; }
  const std::vector<std::string>& methods() const { return methods_; }
  Result<MethodInfo> method(const std::string& name) const;
  Result<std::string> named_data(const std::string& key) const;
  // SHA-256 of the file without its seal; from the seal, else computed once.
  Digest digest() const;
  // Whether the file has a seal (see session/seal.h), which open() has found to be intact.
  bool sealed() const { return sealed_; }

  const executorch::runtime::Program& program() const { return *program_; }

 private:
  ProgramFile() = default;
  std::string path_;
  ProgramOptions options_;
  std::unique_ptr<executorch::extension::MmapDataLoader> loader_;
  std::unique_ptr<executorch::runtime::Program> program_;
  std::vector<std::string> methods_;
  bool sealed_ = false;
  std::optional<MappedFile> unsealed_;  // the content, where its digest is not known yet
  mutable std::mutex mutex_;
  mutable std::optional<Digest> digest_;
};

// A call into ExecuTorch that failed, in words: those of the delegate if it was the cause, else the
// lines that ExecuTorch logged. `kind` is for the latter.
Status executorch_failure(executorch::runtime::Error error, const std::string& action,
                          ErrorKind kind = ErrorKind::kRuntime);

}  // namespace executorch_qnn
