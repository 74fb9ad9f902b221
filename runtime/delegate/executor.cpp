// SPDX-License-Identifier: BSD-3-Clause
#include "delegate/executor.h"

#include <mutex>
#include <string>
#include <utility>

namespace executorch_qnn {
namespace {

using executorch::runtime::EValue;
using executorch::runtime::Span;

Status mismatch(const std::string& what) {
  return {ErrorKind::kInvalid, "the context binary does not fit its payload: " + what};
}

// Hands out the tensors of one side of a graph by name, each once.
class TensorTable {
 public:
  TensorTable(const std::vector<TensorSpec>& specs, std::vector<abi::Tensor>& tensors,
              std::string side)
      : specs_(specs), tensors_(tensors), side_(std::move(side)), taken_(specs.size()) {
    tensors_.reserve(specs.size());
    for (const TensorSpec& spec : specs) tensors_.push_back(ExecutableGraph::bind(spec, nullptr));
  }

  Result<abi::Tensor*> take(const std::string& name, abi::DataType dtype,
                            const std::vector<uint32_t>& dims, const StateEncoding& encoding) {
    for (size_t i = 0; i < specs_.size(); ++i) {
      const TensorSpec& spec = specs_[i];
      if (spec.name != name) continue;
      if (taken_[i]) return mismatch(side_ + " " + name + " is used twice");
      if (spec.dtype != dtype || spec.dims != dims) {
        return mismatch(side_ + " " + name + " is " +
                        describe(to_string(spec.dtype), spec.dims.data(), spec.dims.size()) +
                        ", expected " + describe(to_string(dtype), dims.data(), dims.size()));
      }
      const Encoding& e = spec.encoding;
      if (encoding.quantized && (e.scales.size() != 1 || e.scales[0] != encoding.scale ||
                                 e.offsets.size() != 1 || e.offsets[0] != encoding.offset)) {
        return mismatch(side_ + " " + name + " has another encoding");
      }
      taken_[i] = true;
      return &tensors_[i];
    }
    return mismatch("graph has no " + side_ + " " + name);
  }

  // QNN reads and writes every one of them.
  Status all_taken() const {
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (!taken_[i]) return mismatch(side_ + " " + specs_[i].name + " is bound to nothing");
    }
    return {};
  }

 private:
  const std::vector<TensorSpec>& specs_;
  std::vector<abi::Tensor>& tensors_;
  std::string side_;
  std::vector<bool> taken_;
};

// QNN has no tensors of rank 0.
std::vector<uint32_t> npu_dims(const std::vector<uint32_t>& dims) {
  return dims.empty() ? std::vector<uint32_t>{1} : dims;
}

size_t aligned(size_t bytes) {
  return (bytes + Region::kAlignment - 1) / Region::kAlignment * Region::kAlignment;
}

}  // namespace

Result<std::unique_ptr<Executor>> Executor::create(const Payload& payload,
                                                   std::shared_ptr<const ExecutableGraph> graph,
                                                   std::shared_ptr<StateStore> store,
                                                   const std::vector<StateSlot*>& slots) {
  std::unique_ptr<Executor> executor(new Executor(std::move(graph), std::move(store)));
  ETQNN_TRY(executor->build(payload, slots));
  return executor;
}

Status Executor::build(const Payload& payload, const std::vector<StateSlot*>& slots) {
  TensorTable inputs(graph_->inputs(), inputs_, "input");
  TensorTable outputs(graph_->outputs(), outputs_, "output");
  n_inputs_ = payload.inputs.size();

  size_t shape_words = 0;
  for (const auto* side : {&payload.inputs, &payload.outputs}) {
    for (const PayloadTensor& tensor : *side) shape_words += 2 * tensor.dims.size();
  }
  shapes_.reserve(shape_words);  // pointers into it stay good
  size_t scratch_bytes = 0;
  std::vector<std::pair<size_t, size_t>> scratch_offsets;  // argument, offset
  for (const auto* side : {&payload.inputs, &payload.outputs}) {
    TensorTable& table = side == &payload.inputs ? inputs : outputs;
    for (const PayloadTensor& tensor : *side) {
      Argument argument;
      argument.type = tensor.host_type;
      argument.conversion = tensor.conversion;
      argument.rank = static_cast<uint32_t>(tensor.dims.size());
      argument.elements = tensor.elements();
      argument.npu_element_bytes = element_bytes(tensor.npu_type);
      argument.dims = shapes_.data() + shapes_.size();
      for (uint32_t dim : tensor.dims) shapes_.push_back(static_cast<int32_t>(dim));
      argument.strides = shapes_.data() + shapes_.size();
      size_t stride = argument.elements;
      for (uint32_t dim : tensor.dims) {
        stride /= dim;
        shapes_.push_back(static_cast<int32_t>(stride));
      }
      if (!tensor.tensor.empty()) {
        ETQNN_ASSIGN(argument.tensor,
                     table.take(tensor.tensor, tensor.npu_type, tensor.npu_dims, tensor.encoding));
        if (tensor.conversion != Conversion::kNone) {
          scratch_offsets.emplace_back(arguments_.size(), scratch_bytes);
          scratch_bytes += aligned(argument.elements * argument.npu_element_bytes);
        }
      }
      arguments_.push_back(argument);
    }
  }
  if (scratch_bytes > 0) {
    ETQNN_ASSIGN(scratch_, Region::allocate(scratch_bytes));
    for (const auto& [argument, offset] : scratch_offsets) {
      arguments_[argument].scratch = static_cast<uint8_t*>(scratch_.address()) + offset;
      arguments_[argument].tensor->v1.buffer.data = arguments_[argument].scratch;
    }
  }

  for (size_t i = 0; i < payload.states.size(); ++i) {
    const PayloadState& state = payload.states[i];
    const StateDescriptor& d = state.descriptor;
    State bound{slots[i], state.binding, nullptr, nullptr};
    if (!state.input.empty()) {
      ETQNN_ASSIGN(bound.input,
                   inputs.take(state.input, d.stored_type, npu_dims(d.dims), d.encoding));
    }
    if (!state.output.empty()) {
      ETQNN_ASSIGN(bound.output,
                   outputs.take(state.output, d.stored_type, npu_dims(d.dims), d.encoding));
    }
    states_.push_back(bound);
    if (state.binding == StateBinding::kDoubleBuffer) double_buffered_.push_back(slots[i]);
  }
  ETQNN_TRY(inputs.all_taken());
  ETQNN_TRY(outputs.all_taken());
  if (!states_.empty()) {
    std::lock_guard<std::mutex> lock(store_->mutex());
    bind_states();
  }
  return {};
}

void Executor::bind_states() {
  for (const State& state : states_) {
    if (state.input != nullptr) {
      state.slot->bound_input = state.input->v1.buffer.data = state.slot->front();
    }
    if (state.output != nullptr) {
      state.slot->bound_output = state.output->v1.buffer.data = state.slot->target(state.binding);
    }
  }
  epoch_ = store_->epoch();
}

Status Executor::check(const EValue& value, size_t index, const Argument& want) const {
  const bool input = index < n_inputs_;
  const auto refuse = [&](const std::string& got) {
    std::string expected = to_string(want.type);
    expected += '[';
    for (uint32_t d = 0; d < want.rank; ++d) {
      expected += (d > 0 ? ", " : "") + std::to_string(want.dims[d]);
    }
    return Status(ErrorKind::kInvalid, "graph " + graph_->name() + ": " +
                                           (input ? "input " : "output ") +
                                           std::to_string(input ? index : index - n_inputs_) +
                                           " must be a dense " + expected + "], got " + got);
  };
  if (!value.isTensor()) return refuse("no tensor");
  const auto& tensor = value.toTensor();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const auto rank = static_cast<size_t>(tensor.dim());
  const auto type = static_cast<ScalarType>(tensor.scalar_type());
  bool dense = rank == want.rank;
  bool same = dense && type == want.type;
  for (size_t d = 0; same && d < rank; ++d) {
    same = sizes[d] == want.dims[d];
    dense = dense && (strides[d] == want.strides[d] || sizes[d] == 1);
  }
  if (same && dense && tensor.const_data_ptr() != nullptr) return {};

  if (same && dense) return refuse("one without memory");
  std::vector<uint32_t> dims(sizes.begin(), sizes.end());
  return refuse((same ? "a strided " : "") + describe(type, dims));
}

Status Executor::execute(Span<EValue*> args) {
  if (args.size() != arguments_.size()) {
    return {ErrorKind::kInvalid, "graph " + graph_->name() + " takes " + std::to_string(n_inputs_) +
                                     " inputs and " +
                                     std::to_string(arguments_.size() - n_inputs_) +
                                     " outputs, got " + std::to_string(args.size()) + " arguments"};
  }
  for (size_t i = 0; i < args.size(); ++i) ETQNN_TRY(check(*args[i], i, arguments_[i]));

  std::unique_lock<std::mutex> state_lock;
  if (!states_.empty()) {
    state_lock = std::unique_lock<std::mutex>(store_->mutex());
    if (epoch_ != store_->epoch()) bind_states();
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const Argument& argument = arguments_[i];
    if (argument.tensor == nullptr) continue;
    // QNN takes inputs, too, as pointers to what it might write; it does not.
    void* data = args[i]->toTensor().mutable_data_ptr();
    if (argument.scratch == nullptr) {
      argument.tensor->v1.buffer.data = data;
    } else if (i < n_inputs_ && !to_npu(argument.conversion, data, argument.scratch,
                                        argument.elements, argument.npu_element_bytes)) {
      return {ErrorKind::kInvalid, "graph " + graph_->name() + ": input " + std::to_string(i) +
                                       " holds an int64 that does not fit into 32 bits"};
    }
  }
  {
    std::lock_guard<std::mutex> lock(graph_->context()->execution_mutex());
    ETQNN_TRY(graph_->execute(inputs_.data(), inputs_.size(), outputs_.data(), outputs_.size()));
  }
  for (StateSlot* slot : double_buffered_) store_->swap(*slot);
  for (size_t i = n_inputs_; i < args.size(); ++i) {
    const Argument& argument = arguments_[i];
    if (argument.scratch == nullptr) continue;
    to_host(argument.conversion, argument.scratch, args[i]->toTensor().mutable_data_ptr(),
            argument.elements, argument.npu_element_bytes);
  }
  return {};
}

}  // namespace executorch_qnn
