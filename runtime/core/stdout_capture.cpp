// SPDX-License-Identifier: BSD-3-Clause
#include "core/stdout_capture.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace executorch_qnn {
namespace {

std::mutex g_capture_mutex;
std::atomic<int> g_diagnostics_fd{-1};

// A descriptor above the standard three: with stdout closed, open() could hand out 1 itself.
int above_standard(int fd) {
  if (fd < 0 || fd > 2) return fd;
  int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  close(fd);
  return moved;
}

bool is_regular(int fd) {
  struct stat info{};
  return fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

// A file that can be read back: the diagnostics file if it is one.
int open_target() {
  int diagnostics = g_diagnostics_fd;
  if (is_regular(diagnostics)) return fcntl(diagnostics, F_DUPFD_CLOEXEC, 3);
  int fd = above_standard(memfd_create("qnn-stdout", MFD_CLOEXEC));
  return fd >= 0 ? fd : above_standard(open("/dev/null", O_RDWR | O_CLOEXEC));
}

int redirect(int fd, int target) {
  int saved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  dup2(target, fd);
  return saved;
}

void restore(int fd, int saved) {
  if (saved >= 0) {
    dup2(saved, fd);
    close(saved);
  } else {
    close(fd);
  }
}

}  // namespace

StdoutCapture::StdoutCapture(Scope scope) : scope_(scope), lock_(g_capture_mutex) {
  target_ = open_target();
  if (target_ < 0) return;
  fflush(stdout);
  start_ = lseek(target_, 0, SEEK_END);
  saved_stdout_ = redirect(STDOUT_FILENO, target_);
  if (scope_ == kStdoutAndStderr) saved_stderr_ = redirect(STDERR_FILENO, target_);
}

StdoutCapture::~StdoutCapture() { finish(); }

std::string StdoutCapture::finish() {
  std::string text;
  if (target_ < 0) return text;
  fflush(stdout);
  restore(STDOUT_FILENO, saved_stdout_);
  if (scope_ == kStdoutAndStderr) restore(STDERR_FILENO, saved_stderr_);
  char buffer[4096];
  ssize_t count;
  off_t position = start_;
  while ((count = pread(target_, buffer, sizeof buffer, position)) > 0) {
    text.append(buffer, static_cast<size_t>(count));
    position += count;
  }
  if (int fd = g_diagnostics_fd; fd >= 0 && !is_regular(fd)) {
    [[maybe_unused]] ssize_t written = write(fd, text.data(), text.size());
  }
  close(target_);
  target_ = -1;
  lock_.unlock();
  return text;
}

bool set_diagnostics_file(const std::string& path) {
  std::lock_guard<std::mutex> lock(g_capture_mutex);
  int fd = -1;
  if (!path.empty()) {
    constexpr int kFlags = O_CREAT | O_APPEND | O_CLOEXEC;
    fd = open(path.c_str(), kFlags | O_RDWR, 0666);
    if (fd < 0) fd = open(path.c_str(), kFlags | O_WRONLY, 0666);  // the write end of a pipe
    fd = above_standard(fd);
    if (fd < 0) return false;
    // Text that waits in a buffer would be lost in the crash that it explains.
    setvbuf(stdout, nullptr, _IONBF, 0);
  }
  int previous = g_diagnostics_fd.exchange(fd);
  if (previous >= 0) close(previous);
  return true;
}

int diagnostics_fd() { return g_diagnostics_fd; }

}  // namespace executorch_qnn
