// SPDX-License-Identifier: BSD-3-Clause
// Memory-mapped files, to read and to write.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "core/api.h"
#include "core/status.h"

namespace executorch_qnn {

// A whole file, mapped read-only. An empty one has no bytes, and is none the worse for it.
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

// A file that appears under its name only when it is complete: it is filled without a name where
// the file system can do that, else under another one in the same folder, and commit() renames it.
// Without commit() nothing is left behind, and what the name meant before stays; of a process that
// is killed a hidden ".NAME.*.tmp" may stay, at worst. Replaces regular files only, and keeps their
// mode; where `path` is a symbolic link, what it leads to.
class ETQNN_API OutputFile {
 public:
  // To be filled by write().
  static Result<OutputFile> create(const std::string& path);
  // To be filled through data(). Reserves `capacity` bytes, so that a full disk is an error here
  // and not a SIGBUS later.
  static Result<OutputFile> create(const std::string& path, uint64_t capacity);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  // Appends.
  Status write(const void* data, size_t size);
  // Gives the file its name once its bytes are on the disk: not even a power cut leaves a part.
  Status commit();

  void* data() const { return data_; }
  // Cuts the file to `size` bytes and gives it its name.
  Status commit(uint64_t size);

 private:
  OutputFile() = default;
  void unmap();
  Status publish();

  std::string path_;
  std::string temporary_;  // its present name; empty if there is none to remove
  int fd_ = -1;
  void* data_ = nullptr;
  uint64_t capacity_ = 0;
};

// While it lives, pages of a shared file mapping that somebody fills go to the file and leave this
// process's memory soon after they were written. What the file holds does not change by it.
class ETQNN_API WriteBehind {
 public:
  WriteBehind(void* data, uint64_t size);
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;
  ~WriteBehind();

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool end_ = false;
  std::thread thread_;
};

}  // namespace executorch_qnn
