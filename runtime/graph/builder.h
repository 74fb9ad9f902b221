// SPDX-License-Identifier: BSD-3-Clause
// Compiling: contexts and graphs under construction.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/api.h"
#include "core/status.h"
#include "graph/tensor.h"
#include "qnn/backend.h"

namespace executorch_qnn {

// A scalar parameter; `value` is converted to `dtype`.
struct ScalarParam {
  abi::DataType dtype = abi::DataType::kUint32;
  std::variant<int64_t, double> value;
};

// An op on the tensors of one graph, which it names by index.
struct NodeSpec {
  struct Param {
    std::string name;
    std::variant<ScalarParam, uint32_t> value;
  };

  std::string name;
  std::string type;
  std::vector<uint32_t> inputs;
  std::vector<uint32_t> outputs;
  std::vector<Param> params;
};

struct GraphOptions {
  bool float16 = true;                     // compute float tensors in fp16
  std::optional<uint32_t> vtcm_megabytes;  // 0: all that the SoC has; nothing: QNN's default, 4
  uint32_t optimization_level = 0;         // 1 to 3; 0: QNN's default
  uint32_t hvx_threads = 0;                // 0: QNN's default
  bool share_io = false;  // let the compiler analyse whether outputs may overlay inputs
};

struct ContextOptions {
  // Graphs share equal static tensors. The x86 simulator cannot load such a binary.
  bool share_weights = false;
};

// What `finalize` says about memory traffic of one execution, in bytes. Deterministic.
struct DdrTraffic {
  uint64_t read = 0, write = 0, spill = 0, fill = 0;
};

struct FinalizeReport {
  std::string log;  // what QNN printed meanwhile
  DdrTraffic ddr;
  double seconds = 0;
};

// Finds the "DDR bandwidth summary" in what finalize printed; zeros if there is none.
ETQNN_API DdrTraffic parse_ddr_summary(const std::string& text);

// Asks QNN about one op whose tensors belong to no graph. `data` has one entry per tensor: its
// static data (`tensors[i].bytes()` bytes), or null.
ETQNN_API Status validate_op(const Backend& backend, const std::vector<TensorSpec>& tensors,
                             const std::vector<const void*>& data, const NodeSpec& node);

class GraphBuilder;

// A context that graphs are compiled into. Calls on one context and its graphs wait for each other.
class ETQNN_API ContextBuilder : public std::enable_shared_from_this<ContextBuilder> {
 public:
  static Result<std::shared_ptr<ContextBuilder>> create(std::shared_ptr<const Backend> backend,
                                                        const ContextOptions& options = {});
  ~ContextBuilder();
  ContextBuilder(const ContextBuilder&) = delete;
  ContextBuilder& operator=(const ContextBuilder&) = delete;

  // The graph keeps this context alive.
  Result<std::shared_ptr<GraphBuilder>> create_graph(const std::string& name,
                                                     const GraphOptions& options = {});

  // The context binary, written through a mapping of the file. Returns its size.
  Result<uint64_t> write_binary(const std::string& path);
  Result<std::vector<uint8_t>> binary();

 private:
  friend class GraphBuilder;
  explicit ContextBuilder(std::shared_ptr<const Backend> backend) : backend_(std::move(backend)) {}
  Result<uint64_t> binary_size();
  Result<uint64_t> copy_binary(void* buffer, uint64_t capacity);
  const Library& library() const { return *backend_->library(); }
  const abi::Interface& api() const { return backend_->api(); }

  std::shared_ptr<const Backend> backend_;
  std::mutex mutex_;
  abi::Handle handle_ = nullptr;
  uint32_t unfinished_graphs_ = 0;
  // Of all graphs, as QNN keeps pointers to some of what they own.
  std::list<std::deque<Tensor>> tensors_;
};

// A graph under construction. Nodes are added in topological order; each is validated first,
// because QNN's own add does not.
class ETQNN_API GraphBuilder {
 public:
  // Returns the tensor's index in this graph. A static tensor comes with `data` of exactly
  // `spec.bytes()` bytes, which QNN copies before this returns; it may be a read-only mapping.
  Result<uint32_t> add_tensor(TensorSpec spec, const void* data = nullptr, uint64_t size = 0);
  Status add_node(const NodeSpec& node);
  Result<FinalizeReport> finalize();

  const std::string& name() const { return name_; }
  const TensorSpec& tensor(uint32_t index) const { return tensors_[index].spec(); }
  size_t tensor_count() const { return tensors_.size(); }

  GraphBuilder(const GraphBuilder&) = delete;
  GraphBuilder& operator=(const GraphBuilder&) = delete;

 private:
  friend class ContextBuilder;
  GraphBuilder(std::shared_ptr<ContextBuilder> context, std::string name)
      : context_(std::move(context)),
        name_(std::move(name)),
        tensors_(context_->tensors_.emplace_back()) {}
  Status check_open() const;

  std::shared_ptr<ContextBuilder> context_;
  std::string name_;
  abi::Handle handle_ = nullptr;
  std::deque<Tensor>& tensors_;  // in the context
  bool finalized_ = false;
};

}  // namespace executorch_qnn
