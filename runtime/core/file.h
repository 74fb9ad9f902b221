// SPDX-License-Identifier: BSD-3-Clause
// Memory-mapped files, to read and to write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/api.h"
#include "core/status.h"

namespace executorch_qnn {

// A whole file, mapped read-only.
class ETQNN_API MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  const void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  MappedFile(void* data, size_t size) : data_(data), size_(size) {}
  void* data_;
  size_t size_;
};

// A file that appears under its name only when it is complete: it is filled through a mapping under
// a temporary name in the same folder and renamed by commit(). Without commit() nothing is left
// behind.
class ETQNN_API OutputFile {
 public:
  // Reserves `capacity` bytes, so that a full disk is an error here and not a SIGBUS later.
  static Result<OutputFile> create(const std::string& path, uint64_t capacity);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  void* data() const { return data_; }
  // Cuts the file to `size` bytes and gives it its name.
  Status commit(uint64_t size);

 private:
  OutputFile() = default;
  void unmap();

  std::string path_;
  std::string temporary_;  // empty once there is nothing to remove
  int fd_ = -1;
  void* data_ = nullptr;
  uint64_t capacity_ = 0;
};

}  // namespace executorch_qnn
