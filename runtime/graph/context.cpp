// SPDX-License-Identifier: BSD-3-Clause
#include "graph/context.h"

namespace executorch_qnn {

Result<std::shared_ptr<ExecutableContext>> ExecutableContext::load(
    std::shared_ptr<const Backend> backend, const void* binary, uint64_t size) {
  std::shared_ptr<ExecutableContext> context(new ExecutableContext(std::move(backend)));
  const Library& library = *context->backend_->library();
  ETQNN_ASSIGN(context->description_, inspect_context(library, binary, size));
  LogCapture log;
  abi::Error error = library.api().context_create_from_binary(
      context->backend_->handle(), context->backend_->device(), nullptr, binary, size,
      &context->handle_, nullptr);
  std::string action = "loading a context binary compiled by QAIRT " +
                       context->description_.build_id + " with the library of QAIRT " +
                       library.build_id();
  ETQNN_TRY(library.check(error, action.c_str(), log));
  return context;
}

ExecutableContext::~ExecutableContext() {
  if (handle_ != nullptr) backend_->api().context_free(handle_, nullptr);
}

Result<std::shared_ptr<const ExecutableGraph>> ExecutableContext::graph(
    const std::string& name) const {
  const GraphDescription* description = description_.find(name);
  if (description == nullptr) {
    return Status(ErrorKind::kInvalid, "the context binary has no graph named " + name);
  }
  std::lock_guard<std::mutex> lock(graphs_mutex_);
  abi::Handle& handle = graphs_[name];
  if (handle == nullptr) {
    LogCapture log;
    abi::Error error = backend_->api().graph_retrieve(handle_, name.c_str(), &handle);
    ETQNN_TRY(backend_->library()->check(error, ("retrieving graph " + name).c_str(), log));
  }
  return std::shared_ptr<const ExecutableGraph>(
      new ExecutableGraph(shared_from_this(), description, handle));
}

abi::Tensor ExecutableGraph::bind(const TensorSpec& spec, void* address) {
  // What execute reads: id, kind, type and memory. An encoding is part of the binary.
  abi::Tensor tensor{};
  tensor.version = 1;
  abi::TensorV1& v1 = tensor.v1;
  v1.id = spec.id;
  v1.name = spec.name.c_str();
  v1.kind = spec.kind;
  v1.dtype = spec.dtype;
  v1.quantize.definition = abi::kEncodingUndefined;
  v1.quantize.encoding = abi::EncodingKind::kUndefined;
  v1.rank = static_cast<uint32_t>(spec.dims.size());
  v1.dims = spec.dims.data();
  v1.memory = abi::MemoryKind::kRaw;
  v1.buffer = {address, static_cast<uint32_t>(spec.bytes())};
  return tensor;
}

abi::Tensor ExecutableGraph::bind_handle(const TensorSpec& spec, abi::Handle memory) {
  abi::Tensor tensor = bind(spec, nullptr);
  tensor.v1.memory = abi::MemoryKind::kHandle;
  tensor.v1.buffer = {};
  tensor.v1.handle = memory;
  return tensor;
}

namespace {
thread_local uint64_t t_executions = 0;
}

uint64_t ExecutableGraph::executions() { return t_executions; }

Status ExecutableGraph::execute(const abi::Tensor* inputs, size_t n_inputs, abi::Tensor* outputs,
                                size_t n_outputs) const {
  ++t_executions;
  LogCapture log;
  const Backend& backend = *context_->backend();
  abi::Error error =
      backend.api().graph_execute(handle_, inputs, static_cast<uint32_t>(n_inputs), outputs,
                                  static_cast<uint32_t>(n_outputs), nullptr, nullptr);
  if (error == 0) return {};
  return backend.library()->check(error, ("executing graph " + name()).c_str(), log);
}

}  // namespace executorch_qnn
