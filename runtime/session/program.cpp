// SPDX-License-Identifier: BSD-3-Clause
#include "session/program.h"

#include <executorch/runtime/executor/method_meta.h>
#include <executorch/runtime/platform/runtime.h>

#include <utility>

#include "core/file.h"
#include "delegate/failure.h"
#include "memory/convert.h"
#include "session/et_log.h"
#include "session/kernels.h"
#include "session/seal.h"

namespace executorch_qnn {

namespace et = executorch::runtime;
using executorch::extension::MmapDataLoader;

namespace {

ValueKind kind_of(et::Tag tag) {
  switch (tag) {
    case et::Tag::Tensor:
      return ValueKind::kTensor;
    case et::Tag::Int:
      return ValueKind::kInt;
    case et::Tag::Double:
      return ValueKind::kDouble;
    case et::Tag::Bool:
      return ValueKind::kBool;
    case et::Tag::None:
      return ValueKind::kNone;
    default:
      return ValueKind::kOther;
  }
}

ValueInfo value_info(const et::Result<et::Tag>& tag, const et::Result<et::TensorInfo>& tensor) {
  ValueInfo info;
  if (!tag.ok()) return info;
  info.kind = kind_of(tag.get());
  if (info.kind == ValueKind::kTensor && tensor.ok()) {
    info.type = static_cast<int8_t>(tensor.get().scalar_type());
    info.dims.assign(tensor.get().sizes().begin(), tensor.get().sizes().end());
  }
  return info;
}

}  // namespace

Status executorch_failure(et::Error error, const std::string& action, ErrorKind kind) {
  if (const Status own = take_failure(); !own.ok()) {
    return {own.kind(), action + ": " + own.message(), own.code()};
  }
  std::string why;
  if (const EtLogCapture* log = EtLogCapture::current()) why = log->text();
  if (why.empty()) why = et::to_string(error);
  if (error == et::Error::InvalidProgram) kind = ErrorKind::kIncompatible;
  return {kind, action + ": " + why, static_cast<uint64_t>(error)};
}

size_t tensor_bytes(int8_t type, const std::vector<int32_t>& dims) {
  size_t bytes = element_bytes(static_cast<ScalarType>(type));
  for (int32_t dim : dims) bytes *= static_cast<size_t>(dim);
  return bytes;
}

Result<std::shared_ptr<const ProgramFile>> ProgramFile::open(const std::string& path,
                                                             const ProgramOptions& options) {
  et::runtime_init();
  load_cpu_kernels();
  EtLogCapture log;
  std::shared_ptr<ProgramFile> file(new ProgramFile());
  file->path_ = path;
  file->options_ = options;
  {
    // This mapping also says what is wrong with a path; ExecuTorch's loader only that something is.
    ETQNN_ASSIGN(MappedFile content, MappedFile::open(path));
    ETQNN_ASSIGN(file->digest_, check_seal(content.data(), content.size(), path));
    file->sealed_ = file->digest_.has_value();
    if (!file->sealed_) file->unsealed_.emplace(std::move(content));
  }
  auto loader = MmapDataLoader::from(
      file->path_.c_str(),
      options.mlock ? MmapDataLoader::MlockConfig::UseMlock : MmapDataLoader::MlockConfig::NoMlock);
  if (!loader.ok()) return executorch_failure(loader.error(), "cannot read " + path);
  file->loader_ = std::make_unique<MmapDataLoader>(std::move(loader.get()));
  auto program =
      et::Program::load(file->loader_.get(), et::Program::Verification::InternalConsistency);
  if (!program.ok()) {
    return executorch_failure(program.error(), path + " is no intact .pte file",
                              ErrorKind::kIncompatible);
  }
  file->program_ = std::make_unique<et::Program>(std::move(program.get()));
  for (size_t i = 0; i < file->program_->num_methods(); ++i) {
    const auto name = file->program_->get_method_name(i);
    if (!name.ok()) return executorch_failure(name.error(), "cannot read the methods of " + path);
    file->methods_.emplace_back(name.get());
  }
  return std::shared_ptr<const ProgramFile>(std::move(file));
}

ProgramFile::~ProgramFile() = default;

Result<MethodInfo> ProgramFile::method(const std::string& name) const {
  EtLogCapture log;
  const auto meta = program_->method_meta(name.c_str());
  if (!meta.ok()) {
    std::string known;
    for (const std::string& method : methods_) known += (known.empty() ? "" : ", ") + method;
    return Status(ErrorKind::kState, path_ + " has no method " + name + "; it has " + known);
  }
  MethodInfo info;
  for (size_t i = 0; i < meta->num_inputs(); ++i) {
    info.inputs.push_back(value_info(meta->input_tag(i), meta->input_tensor_meta(i)));
  }
  for (size_t i = 0; i < meta->num_outputs(); ++i) {
    info.outputs.push_back(value_info(meta->output_tag(i), meta->output_tensor_meta(i)));
  }
  for (size_t i = 0; i < meta->num_backends(); ++i) {
    if (const auto backend = meta->get_backend_name(i); backend.ok()) {
      info.backends.emplace_back(backend.get());
    }
  }
  return info;
}

Result<std::string> ProgramFile::named_data(const std::string& key) const {
  EtLogCapture log;
  const auto map = program_->get_named_data_map();
  if (!map.ok()) return Status(ErrorKind::kInvalid, path_ + " has no named data");
  auto data = map.get()->get_data(key);
  if (!data.ok()) return Status(ErrorKind::kInvalid, path_ + " has no named data " + key);
  return std::string(static_cast<const char*>(data->data()), data->size());
}

Digest ProgramFile::digest() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!digest_) digest_ = Sha256::of(unsealed_->data(), unsealed_->size());
  return *digest_;
}

}  // namespace executorch_qnn
