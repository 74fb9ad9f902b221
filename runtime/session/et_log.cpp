// SPDX-License-Identifier: BSD-3-Clause
#include "session/et_log.h"

#include <executorch/runtime/platform/platform.h>

#include <atomic>
#include <mutex>

namespace executorch_qnn {
namespace {

namespace et = executorch::runtime;

constexpr size_t kMaxBytes = 4096;

thread_local EtLogCapture* t_innermost = nullptr;
std::mutex g_mutex;  // guards installation
std::atomic<pal_emit_log_message_method> g_next{nullptr};

void emit(et_timestamp_t timestamp, et_pal_log_level_t level, const char* file,
          const char* function, size_t line, const char* message, size_t length) {
  if (t_innermost != nullptr && (level == kError || level == kFatal)) {
    t_innermost->add(message, length);
    // A fatal line precedes an abort: nobody will read the capture.
    if (level != kFatal) return;
  }
  g_next.load()(timestamp, level, file, function, line, message, length);
}

// Steps in front of whatever writes ExecuTorch's log in this process. Not with register_pal(): it
// logs an error where somebody has registered before, as ExecuTorch's own Python module does, and
// whoever registers later does not pass on what is ours.
void install() {
  if (et::get_pal_impl()->emit_log_message == emit) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  auto* table = const_cast<et::PalImpl*>(et::get_pal_impl());  // a variable of the runtime's
  if (table->emit_log_message == emit) return;
  g_next = table->emit_log_message;
  table->emit_log_message = emit;
}

}  // namespace

EtLogCapture::EtLogCapture() : outer_(t_innermost) {
  install();
  t_innermost = this;
}

EtLogCapture::~EtLogCapture() { t_innermost = outer_; }

EtLogCapture* EtLogCapture::current() { return t_innermost; }

void EtLogCapture::add(const char* line, size_t size) {
  if (text_.size() > kMaxBytes) return;
  if (!text_.empty()) text_ += '\n';
  text_.append(line, size);
}

}  // namespace executorch_qnn
