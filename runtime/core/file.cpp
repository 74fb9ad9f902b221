// SPDX-License-Identifier: BSD-3-Clause
#include "core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

namespace executorch_qnn {
namespace {

Status io_error(const char* action, const std::string& path, int error) {
  std::string reason = std::generic_category().message(error);
  return {ErrorKind::kIo, std::string("cannot ") + action + " " + path + ": " + reason};
}

// The mode that open(2) would give a new file; mkstemp's own is for the user alone.
mode_t default_mode() {
  mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return io_error("open", path, errno);
  struct stat info{};
  void* data = MAP_FAILED;
  int error = 0;
  if (fstat(fd, &info) != 0) {
    error = errno;
  } else if (!S_ISREG(info.st_mode) || info.st_size == 0) {
    error = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
  } else {
    data = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) error = errno;
  }
  close(fd);
  if (error != 0) return io_error("read", path, error);
  return MappedFile(data, static_cast<size_t>(info.st_size));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

Result<OutputFile> OutputFile::create(const std::string& path, uint64_t capacity) {
  if (capacity == 0) return Status(ErrorKind::kInvalid, "nothing to write to " + path);
  OutputFile file;
  file.path_ = path;
  std::string name = path + ".XXXXXX";
  file.fd_ = mkostemp(name.data(), O_CLOEXEC);
  if (file.fd_ < 0) return io_error("create", path, errno);
  file.temporary_ = std::move(name);
  int error = posix_fallocate(file.fd_, 0, static_cast<off_t>(capacity));
  if (error != 0) return io_error("reserve space for", path, error);
  void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd_, 0);
  if (data == MAP_FAILED) return io_error("map", path, errno);
  file.data_ = data;
  file.capacity_ = capacity;
  return file;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      capacity_(other.capacity_) {}

OutputFile::~OutputFile() {
  unmap();
  if (fd_ >= 0) close(fd_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void OutputFile::unmap() {
  if (data_ != nullptr) munmap(std::exchange(data_, nullptr), capacity_);
}

Status OutputFile::commit(uint64_t size) {
  unmap();
  if (ftruncate(fd_, static_cast<off_t>(size)) != 0 || fchmod(fd_, default_mode()) != 0 ||
      rename(temporary_.c_str(), path_.c_str()) != 0) {
    return io_error("write", path_, errno);
  }
  temporary_.clear();
  return {};
}

}  // namespace executorch_qnn
