// SPDX-License-Identifier: BSD-3-Clause
// ExecuTorch explains its failures in its log only. An EtLogCapture keeps what is logged as an
// error on this thread while it is alive, instead of printing it.
#pragma once

#include <string>

namespace executorch_qnn {

class EtLogCapture {
 public:
  EtLogCapture();
  ~EtLogCapture();
  EtLogCapture(const EtLogCapture&) = delete;
  EtLogCapture& operator=(const EtLogCapture&) = delete;

  // The innermost capture of this thread, or null.
  static EtLogCapture* current();
  void add(const char* line, size_t size);
  const std::string& text() const { return text_; }

 private:
  EtLogCapture* outer_;
  std::string text_;
};

}  // namespace executorch_qnn
