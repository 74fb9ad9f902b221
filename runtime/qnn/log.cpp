// SPDX-License-Identifier: BSD-3-Clause
#include "qnn/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/stdout_capture.h"

namespace executorch_qnn {
namespace {

constexpr size_t kMaxCapturedBytes = 16384;

std::mutex g_mutex;              // guards the list and every capture's text
LogCapture* g_newest = nullptr;  // all live captures
thread_local LogCapture* g_innermost = nullptr;
std::atomic<abi::LogLevel> g_echo_level{abi::LogLevel::kError};

char level_letter(abi::LogLevel level) {
  static constexpr char kLetters[] = "?EWIVD";
  return kLetters[std::min<uint32_t>(static_cast<uint32_t>(level), 5)];
}

// QNN says most things twice.
bool has_line(const std::string& text, const std::string& line) {
  size_t at = text.find(line);
  if (at == std::string::npos) return false;
  size_t end = at + line.size();
  return (at == 0 || text[at - 1] == '\n') && (end == text.size() || text[end] == '\n');
}

bool is_progress(const char* line) {
  return std::strstr(line, "ing stage:") != nullptr || std::strstr(line, "ed stage:") != nullptr ||
         std::strstr(line, "DDR bandwidth summary") != nullptr ||
         std::strstr(line, "_bytes=") != nullptr;
}

void append_line(std::string& text, const char* line) {
  if (text.size() > kMaxCapturedBytes || *line == 0 || has_line(text, line)) return;
  if (!text.empty()) text += '\n';
  text += line;
}

// Cuts what surrounds the message proper: white space, a second statement of the level.
char* trim(char* line) {
  while (*line == ' ' || *line == '\n') ++line;
  if (std::strncmp(line, "<E> ", 4) == 0) line += 4;
  size_t size = std::strlen(line);
  while (size > 0 && (line[size - 1] == '\n' || line[size - 1] == ' ')) line[--size] = 0;
  return line;
}

void print_line(int fd, abi::LogLevel level, const char* line) {
  char buffer[2100];
  int size = snprintf(buffer, sizeof buffer, "[qnn %c] %s\n", level_letter(level), line);
  size = std::min<int>(size, sizeof buffer - 1);
  // Best effort: there is nowhere to report a failure to log.
  [[maybe_unused]] ssize_t written = write(fd, buffer, static_cast<size_t>(size));
}

}  // namespace

LogCapture::LogCapture() : outer_(g_innermost) {
  std::lock_guard<std::mutex> lock(g_mutex);
  older_ = g_newest;
  if (older_ != nullptr) older_->newer_ = this;
  g_newest = this;
  g_innermost = this;
}

LogCapture::~LogCapture() {
  std::lock_guard<std::mutex> lock(g_mutex);
  (newer_ != nullptr ? newer_->older_ : g_newest) = older_;
  if (older_ != nullptr) older_->newer_ = newer_;
  g_innermost = outer_;
}

std::string LogCapture::errors() const {
  std::lock_guard<std::mutex> lock(g_mutex);
  return errors_;
}

std::string LogCapture::progress() const {
  std::lock_guard<std::mutex> lock(g_mutex);
  return progress_;
}

void echo_log(abi::LogLevel level) {
  abi::LogLevel current = g_echo_level;
  while (level > current && !g_echo_level.compare_exchange_weak(current, level)) {
  }
}

void on_qnn_log(const char* format, abi::LogLevel level, uint64_t /*timestamp*/, va_list args) {
  char buffer[2048];
  vsnprintf(buffer, sizeof buffer, format, args);
  const char* line = trim(buffer);
  if (int fd = diagnostics_fd(); fd >= 0) {
    print_line(fd, level, line);
  } else if (level > abi::LogLevel::kError && level <= g_echo_level) {
    print_line(STDERR_FILENO, level, line);
  }
  std::string LogCapture::* text = nullptr;
  if (level == abi::LogLevel::kError) {
    text = &LogCapture::errors_;
  } else if (level == abi::LogLevel::kInfo && is_progress(line)) {
    text = &LogCapture::progress_;
  } else {
    return;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_innermost != nullptr) {
    append_line(g_innermost->*text, line);
    return;
  }
  for (LogCapture* capture = g_newest; capture != nullptr; capture = capture->older_) {
    append_line(capture->*text, line);
  }
}

}  // namespace executorch_qnn
