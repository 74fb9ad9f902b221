// SPDX-License-Identifier: BSD-3-Clause
#include "qnn/backend.h"

#include <string>

#include "core/stdout_capture.h"

namespace executorch_qnn {

Result<std::shared_ptr<const Backend>> Backend::create(std::shared_ptr<const Library> library,
                                                       uint32_t soc_model,
                                                       abi::LogLevel log_level) {
  std::shared_ptr<Backend> backend(new Backend(std::move(library), soc_model, log_level));
  ETQNN_TRY(backend->open());
  return std::shared_ptr<const Backend>(backend);
}

Status Backend::open() {
  echo_log(log_level_);
  LogCapture log;
  StdoutCapture quiet;
  ETQNN_TRY(library_->check(api().log_create(&on_qnn_log, log_level_, &log_), "opening the QNN log",
                            log));
  ETQNN_TRY(library_->check(api().backend_create(log_, nullptr, &backend_),
                            "creating the QNN backend", log));
  abi::HtpDeviceConfig soc{};
  soc.at4 = soc.at8 = soc_model_;
  abi::Config config{};
  config.option = abi::kConfigCustom;
  config.custom = &soc;
  const abi::Config* configs[] = {&config, nullptr};
  std::string action = "creating the QNN device for SoC model " + std::to_string(soc_model_);
  return library_->check(api().device_create(log_, soc_model_ != 0 ? configs : nullptr, &device_),
                         action.c_str(), log);
}

Backend::~Backend() {
  if (device_ != nullptr) api().device_free(device_);
  if (backend_ != nullptr) api().backend_free(backend_);
  if (log_ != nullptr) api().log_free(log_);
}

Status Backend::validate(const abi::OpConfig& op) const {
  LogCapture log;
  abi::Error error = api().backend_validate_op_config(backend_, op);
  if (error == 0) return {};
  std::string action = std::string("validating op ") + op.v1.name + " (" + op.v1.type + ")";
  return library_->check(error, action.c_str(), log);
}

Backend::Verbose::Verbose(const Backend& backend) : backend_(backend) {
  if (backend_.log_level_ < abi::LogLevel::kInfo) {
    backend_.api().log_set_level(backend_.log_, abi::LogLevel::kInfo);
  }
}

Backend::Verbose::~Verbose() {
  if (backend_.log_level_ < abi::LogLevel::kInfo) {
    backend_.api().log_set_level(backend_.log_, backend_.log_level_);
  }
}

}  // namespace executorch_qnn
