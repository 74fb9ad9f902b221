// SPDX-License-Identifier: BSD-3-Clause
// One delegate call, prepared: everything that can be decided when it is loaded is decided here.
#pragma once

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/span.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/status.h"
#include "delegate/payload.h"
#include "graph/context.h"
#include "memory/region.h"
#include "state/store.h"

namespace executorch_qnn {

class TensorTable;

class Executor {
 public:
  // `slots` has the slot of each of the payload's states, in order, in `store`. Fails with kInvalid
  // unless the graph's own tensors, as its context binary describes them, are those of the payload.
  static Result<std::unique_ptr<Executor>> create(const Payload& payload,
                                                  std::shared_ptr<const ExecutableGraph> graph,
                                                  std::shared_ptr<StateStore> store,
                                                  const std::vector<StateSlot*>& slots);

  // `args` are the inputs and then the outputs, in the payload's order. Checks them all, runs the
  // graph and, if it succeeded, brings the slots up to date: exchanges double-buffered ones, places
  // new rows, adds increments. A success allocates nothing, and copies of the state only those.
  Status execute(executorch::runtime::Span<executorch::runtime::EValue*> args);

  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

 private:
  struct Argument {
    ScalarType type{};
    Converter converter;
    uint32_t rank = 0;
    const int32_t* dims = nullptr;     // in shapes_
    const int32_t* strides = nullptr;  // of dense memory, in shapes_
    size_t elements = 0;
    abi::Tensor* tensor = nullptr;  // null: the graph does not use this argument
    void* scratch = nullptr;        // what the tensor is bound to if values are converted
  };

  struct State {
    StateSlot* slot = nullptr;
    StateBinding binding{};
    abi::Tensor* input = nullptr;
    abi::Tensor* output = nullptr;
    // What the tensors are bound to if the slot is wider than the graph.
    void* input_copy = nullptr;
    void* output_copy = nullptr;
    float factor = 1;  // of what is added
  };

  // Rows that a graph puts out, and where they go.
  struct Rows {
    StateSlot* slot = nullptr;
    const int32_t* positions = nullptr;
    const uint8_t* data = nullptr;
    size_t outer = 0, length = 0, count = 0, row_bytes = 0;
  };

  Executor(std::shared_ptr<const ExecutableGraph> graph, std::shared_ptr<StateStore> store)
      : graph_(std::move(graph)), store_(std::move(store)) {}

  Status build(const Payload& payload, const std::vector<StateSlot*>& slots);
  Status check(const executorch::runtime::EValue& value, size_t index, const Argument& want) const;
  Status build_states(const Payload& payload, const std::vector<StateSlot*>& slots,
                      TensorTable& inputs, TensorTable& outputs);
  void bind_states();
  static void place(const Rows& rows);
  Status update_states();

  std::shared_ptr<const ExecutableGraph> graph_;
  std::shared_ptr<StateStore> store_;
  std::vector<abi::Tensor> inputs_, outputs_;  // the graph's, as QNN gets them
  std::vector<Argument> arguments_;            // inputs, then outputs
  size_t n_inputs_ = 0;
  std::vector<int32_t> shapes_;
  Region scratch_;
  std::vector<Region> copies_;  // what states_ and rows_ point into
  std::vector<State> states_;
  std::vector<Rows> rows_;
  std::vector<StateSlot*> double_buffered_;
  uint64_t epoch_ = 0;  // of the store when the states were bound
};

}  // namespace executorch_qnn
