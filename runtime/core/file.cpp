// SPDX-License-Identifier: BSD-3-Clause
#include "core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <utility>

namespace executorch_qnn {
namespace {

Status io_error(const char* action, const std::string& path, int error) {
  std::string reason = std::generic_category().message(error);
  return {ErrorKind::kIo, std::string("cannot ") + action + " " + path + ": " + reason};
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// A name beside `path` that nobody takes for it, nor finds with a pattern such as "NAME*".
std::string temporary_name(const std::string& path) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) < 0) random = static_cast<uint64_t>(getpid());
  char suffix[32];
  std::snprintf(suffix, sizeof suffix, ".%016" PRIx64 ".tmp", random);
  const size_t slash = path.rfind('/');
  const size_t base = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(0, base) + "." + path.substr(base) + suffix;
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
  } else if (!S_ISREG(info.st_mode)) {
    error = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
  } else if (info.st_size == 0) {
    data = nullptr;  // mmap refuses to map nothing
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

Result<OutputFile> OutputFile::create(const std::string& path) {
  OutputFile file;
  file.path_ = path;
  if (char* target = realpath(path.c_str(), nullptr)) {
    file.path_ = target;
    std::free(target);
  }
  struct stat old{};
  const bool replaces = stat(file.path_.c_str(), &old) == 0;
  if (replaces) {
    if (!S_ISREG(old.st_mode)) {
      return io_error("write", path, S_ISDIR(old.st_mode) ? EISDIR : EINVAL);
    }
    // rename() would not ask.
    if (access(file.path_.c_str(), W_OK) != 0) return io_error("write", path, errno);
  }
  file.fd_ = ::open(folder_of(file.path_).c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
  if (file.fd_ < 0) {
    std::string name = temporary_name(file.path_);
    file.fd_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file.fd_ < 0) return io_error("create", path, errno);
    file.temporary_ = std::move(name);
  }
  if (replaces && fchmod(file.fd_, old.st_mode & 07777) != 0) {
    return io_error("create", path, errno);
  }
  return file;
}

Result<OutputFile> OutputFile::create(const std::string& path, uint64_t capacity) {
  if (capacity == 0) return Status(ErrorKind::kInvalid, "nothing to write to " + path);
  ETQNN_ASSIGN(OutputFile file, create(path));
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

Status OutputFile::write(const void* data, size_t size) {
  const auto* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(fd_, at, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return io_error("write", path_, written < 0 ? errno : ENOSPC);
    at += written;
    size -= static_cast<size_t>(written);
  }
  return {};
}

Status OutputFile::publish() {
  if (temporary_.empty()) {
    // No call gives a file without a name the name of another one.
    std::string name = temporary_name(path_);
    const std::string self = "/proc/self/fd/" + std::to_string(fd_);
    if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0) {
      return io_error("write", path_, errno);
    }
    temporary_ = std::move(name);
  }
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return io_error("write", path_, errno);
  temporary_.clear();
  return {};
}

Status OutputFile::commit(uint64_t size) {
  unmap();
  if (ftruncate(fd_, static_cast<off_t>(size)) != 0) return io_error("write", path_, errno);
  return publish();
}

Status OutputFile::commit() {
  // The bytes first: after a crash the name must not stand for less.
  if (fsync(fd_) != 0) return io_error("write", path_, errno);
  ETQNN_TRY(publish());
  const int folder = ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return {};  // a folder that may be written and not read: no way to ask for it
  const int error = fsync(folder) == 0 ? 0 : errno;
  close(folder);
  // Some file systems cannot, and say so with EINVAL.
  return error == 0 || error == EINVAL ? Status() : io_error("write the folder of", path_, error);
}

// ------------------------------------------------------------------------------ write-behind

WriteBehind::WriteBehind(void* data, uint64_t size) {
  thread_ = std::thread([this, data, size] {
    std::unique_lock<std::mutex> lock(mutex_);
    // A page of a shared mapping that is dropped stays in the page cache, dirty: the next access
    // finds it there. Only the whole mapping at once, because nobody says where the writer is.
    while (!ended_.wait_for(lock, std::chrono::milliseconds(5), [this] { return end_; })) {
      madvise(data, size, MADV_DONTNEED);
    }
  });
}

WriteBehind::~WriteBehind() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

}  // namespace executorch_qnn
