// SPDX-License-Identifier: BSD-3-Clause
// Running: contexts loaded from a binary, and their graphs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/api.h"
#include "core/status.h"
#include "graph/inspect.h"
#include "qnn/backend.h"

namespace executorch_qnn {

class ExecutableGraph;

// A context binary, loaded. The graphs of a context may be executed by one thread at a time; the
// caller takes execution_mutex() where several share a context.
class ETQNN_API ExecutableContext : public std::enable_shared_from_this<ExecutableContext> {
 public:
  // QNN copies `binary`: it may be a read-only mapping and may be freed when this returns.
  static Result<std::shared_ptr<ExecutableContext>> load(std::shared_ptr<const Backend> backend,
                                                         const void* binary, uint64_t size);
  ~ExecutableContext();
  ExecutableContext(const ExecutableContext&) = delete;
  ExecutableContext& operator=(const ExecutableContext&) = delete;

  // The graph keeps this context alive. QNN is asked once for each, so that a session that is
  // loaded does not do it while another executes.
  Result<std::shared_ptr<const ExecutableGraph>> graph(const std::string& name) const;

  const std::shared_ptr<const Backend>& backend() const { return backend_; }
  const ContextDescription& description() const { return description_; }
  abi::Handle handle() const { return handle_; }
  std::mutex& execution_mutex() const { return execution_mutex_; }

 private:
  explicit ExecutableContext(std::shared_ptr<const Backend> backend)
      : backend_(std::move(backend)) {}

  std::shared_ptr<const Backend> backend_;
  ContextDescription description_;
  abi::Handle handle_ = nullptr;
  mutable std::mutex execution_mutex_;
  mutable std::mutex graphs_mutex_;
  mutable std::map<std::string, abi::Handle> graphs_;
};

// A graph that can be executed.
//
//   std::vector<abi::Tensor> in;                       // built once, when the graph is loaded
//   for (const TensorSpec& spec : graph->inputs()) in.push_back(ExecutableGraph::bind(spec,
//   address));
//   ...
//   graph->execute(in.data(), in.size(), out.data(), out.size());        // allocates nothing
class ETQNN_API ExecutableGraph {
 public:
  const std::string& name() const { return description_->name; }
  // Every input must be given at each execute; QNN matches tensors by id, so the order does not
  // matter.
  const std::vector<TensorSpec>& inputs() const { return description_->inputs; }
  const std::vector<TensorSpec>& outputs() const { return description_->outputs; }
  const GraphDescription& description() const { return *description_; }
  const std::shared_ptr<const ExecutableContext>& context() const { return context_; }

  // The struct that binds `spec.bytes()` bytes at `address` to one of this graph's tensors. It
  // points into `spec` and is good as long as the graph is. Addresses may be exchanged in place
  // later: `tensor.v1.buffer.data = other`.
  static abi::Tensor bind(const TensorSpec& spec, void* address);
  // The same for memory registered with the context.
  static abi::Tensor bind_handle(const TensorSpec& spec, abi::Handle memory);

  // Runs the graph once and waits for it. A success allocates no memory of ours.
  Status execute(const abi::Tensor* inputs, size_t n_inputs, abi::Tensor* outputs,
                 size_t n_outputs) const;
  // How often this thread has called execute() so far, on any graph, with whatever result.
  static uint64_t executions();

 private:
  friend class ExecutableContext;
  ExecutableGraph(std::shared_ptr<const ExecutableContext> context,
                  const GraphDescription* description, abi::Handle handle)
      : context_(std::move(context)), description_(description), handle_(handle) {}

  std::shared_ptr<const ExecutableContext> context_;
  const GraphDescription* description_;  // in the context
  abi::Handle handle_;
};

}  // namespace executorch_qnn
