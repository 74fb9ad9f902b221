// SPDX-License-Identifier: BSD-3-Clause
// A QNN backend with its log and device: what contexts are made on.
#pragma once

#include <memory>

#include "core/api.h"
#include "core/status.h"
#include "qnn/library.h"

namespace executorch_qnn {

// To be freed before the process runs its exit handlers, as QNN has static objects that it needs:
// never hold one in a static variable.
class ETQNN_API Backend {
 public:
  // `soc_model` is QNN's number of the SoC to compile for (57 is SM8650); on a device it may be 0
  // for the one that is there. Log lines less severe than `log_level` are not made.
  static Result<std::shared_ptr<const Backend>> create(
      std::shared_ptr<const Library> library, uint32_t soc_model,
      abi::LogLevel log_level = abi::LogLevel::kError);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  const std::shared_ptr<const Library>& library() const { return library_; }
  const abi::Interface& api() const { return library_->api(); }
  uint32_t soc_model() const { return soc_model_; }
  abi::Handle handle() const { return backend_; }
  abi::Handle device() const { return device_; }

  // Whether QNN would accept an op. Nothing is added to any graph.
  Status validate(const abi::OpConfig& op) const;

  // While it lives, QNN makes log lines down to INFO: the compiler's totals are among them.
  class ETQNN_API Verbose {
   public:
    explicit Verbose(const Backend& backend);
    ~Verbose();
    Verbose(const Verbose&) = delete;
    Verbose& operator=(const Verbose&) = delete;

   private:
    const Backend& backend_;
  };

 private:
  Backend(std::shared_ptr<const Library> library, uint32_t soc_model, abi::LogLevel log_level)
      : library_(std::move(library)), soc_model_(soc_model), log_level_(log_level) {}
  Status open();

  std::shared_ptr<const Library> library_;
  uint32_t soc_model_;
  abi::LogLevel log_level_;
  abi::Handle log_ = nullptr;
  abi::Handle backend_ = nullptr;
  abi::Handle device_ = nullptr;
};

}  // namespace executorch_qnn
