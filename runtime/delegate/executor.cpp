// SPDX-License-Identifier: BSD-3-Clause
#include "delegate/executor.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "core/half.h"

namespace executorch_qnn {
namespace {

using executorch::runtime::EValue;
using executorch::runtime::Span;

Status mismatch(const std::string& what) {
  return {ErrorKind::kInvalid, "the context binary does not fit its payload: " + what};
}

// Memory that lives as long as `owned`.
Result<void*> allocate(size_t bytes, std::vector<Region>& owned) {
  ETQNN_ASSIGN(Region region, Region::allocate(bytes));
  owned.push_back(std::move(region));
  return owned.back().address();
}

}  // namespace

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
                            const std::vector<uint32_t>& dims, const TensorEncoding& encoding) {
    ETQNN_ASSIGN(const size_t i, find(name));
    const TensorSpec& spec = specs_[i];
    if (taken_[i]) return mismatch(side_ + " " + name + " is used twice");
    if (spec.dtype != dtype || spec.dims != dims) {
      return mismatch(side_ + " " + name + " is " +
                      describe(to_string(spec.dtype), spec.dims.data(), spec.dims.size()) +
                      ", expected " + describe(to_string(dtype), dims.data(), dims.size()));
    }
    ETQNN_TRY(check_encoding(spec, encoding));
    taken_[i] = true;
    return &tensors_[i];
  }

  // The memory of a tensor that several states share parts of; made when it is first asked for.
  // They need `elements` of it.
  Result<void*> shared(const std::string& name, abi::DataType dtype, size_t elements,
                       const TensorEncoding& encoding, std::vector<Region>& memory) {
    ETQNN_ASSIGN(const size_t i, find(name));
    const TensorSpec& spec = specs_[i];
    void*& data = tensors_[i].v1.buffer.data;
    if (taken_[i] && data == nullptr) return mismatch(side_ + " " + name + " is used twice");
    if (spec.dtype != dtype || spec.bytes() / element_bytes(dtype) < elements) {
      return mismatch(side_ + " " + name + " does not hold what it should");
    }
    ETQNN_TRY(check_encoding(spec, encoding));
    if (!taken_[i]) {
      ETQNN_ASSIGN(data, allocate(spec.bytes(), memory));
      taken_[i] = true;
    }
    return data;
  }

  // QNN reads and writes every one of them.
  Status all_taken() const {
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (!taken_[i]) return mismatch(side_ + " " + specs_[i].name + " is bound to nothing");
    }
    return {};
  }

 private:
  Result<size_t> find(const std::string& name) const {
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (specs_[i].name == name) return i;
    }
    return mismatch("graph has no " + side_ + " " + name);
  }

  Status check_encoding(const TensorSpec& spec, const TensorEncoding& want) const {
    const Encoding& e = spec.encoding;
    const bool same = e.scales.size() == 1 && e.scales[0] == want.scale && e.offsets.size() == 1 &&
                      e.offsets[0] == want.offset;
    if (want.quantized && !same) return mismatch(side_ + " " + spec.name + " has another encoding");
    return {};
  }

  const std::vector<TensorSpec>& specs_;
  std::vector<abi::Tensor>& tensors_;
  std::string side_;
  std::vector<bool> taken_;
};

namespace {

void add_half(const void* increments, float factor, float* to, size_t count) {
  constexpr size_t kChunk = 256;
  float chunk[kChunk];
  const auto* from = static_cast<const uint16_t*>(increments);
  for (size_t at = 0; at < count; at += kChunk) {
    const size_t n = std::min(kChunk, count - at);
    from_half(from + at, chunk, n);
    for (size_t i = 0; i < n; ++i) to[at + i] += factor * chunk[i];
  }
}

// QNN has no tensors of rank 0; of six axes and more the first ones are stored as one.
std::vector<uint32_t> npu_dims(const std::vector<uint32_t>& dims) {
  constexpr size_t kMost = 5, kLast = 3;
  if (dims.empty()) return {1};
  if (dims.size() <= kMost) return dims;
  uint32_t first = 1;
  for (size_t i = 0; i + kLast < dims.size(); ++i) first *= dims[i];
  std::vector<uint32_t> stored{first};
  stored.insert(stored.end(), dims.end() - kLast, dims.end());
  return stored;
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
      argument.converter = tensor.converter;
      argument.rank = static_cast<uint32_t>(tensor.dims.size());
      argument.elements = tensor.elements();
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
        if (tensor.converter.kind != Conversion::kNone) {
          scratch_offsets.emplace_back(arguments_.size(), scratch_bytes);
          scratch_bytes += aligned(argument.elements * element_bytes(tensor.npu_type));
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

  ETQNN_TRY(build_states(payload, slots, inputs, outputs));
  ETQNN_TRY(inputs.all_taken());
  ETQNN_TRY(outputs.all_taken());
  if (!states_.empty()) {
    std::lock_guard<std::mutex> lock(store_->mutex());
    bind_states();
  }
  return {};
}

Status Executor::build_states(const Payload& payload, const std::vector<StateSlot*>& slots,
                              TensorTable& inputs, TensorTable& outputs) {
  for (size_t i = 0; i < payload.states.size(); ++i) {
    const PayloadState& state = payload.states[i];
    const StateDescriptor& d = state.descriptor;
    const bool converted = state.npu_type != d.stored_type;
    const size_t npu_bytes = d.elements() * element_bytes(state.npu_type);
    State bound;
    bound.slot = slots[i];
    bound.binding = state.binding;
    bound.factor = 1 / state.scale;
    if (!state.input.empty()) {
      ETQNN_ASSIGN(bound.input,
                   inputs.take(state.input, state.npu_type, npu_dims(d.dims), d.encoding));
      if (converted) {
        ETQNN_ASSIGN(bound.input_copy, allocate(npu_bytes, copies_));
      }
    }
    if (state.binding == StateBinding::kDelta) {
      const PayloadRows& r = state.rows;
      const size_t elements = size_t{r.outer} * r.count * r.row;
      ETQNN_ASSIGN(void* data, outputs.shared(state.output, d.stored_type, r.offset + elements,
                                              d.encoding, copies_));
      ETQNN_ASSIGN(void* positions,
                   outputs.shared(r.positions, abi::DataType::kInt32, r.count, {}, copies_));
      const size_t element = element_bytes(d.stored_type);
      rows_.push_back({slots[i], static_cast<const int32_t*>(positions),
                       static_cast<const uint8_t*>(data) + r.offset * element, r.outer, r.length,
                       r.count, r.row * element});
    } else if (!state.output.empty()) {
      ETQNN_ASSIGN(bound.output,
                   outputs.take(state.output, state.npu_type, npu_dims(d.dims), d.encoding));
      if (converted) {
        ETQNN_ASSIGN(bound.output_copy, allocate(npu_bytes, copies_));
      }
    }
    states_.push_back(bound);
    if (state.binding == StateBinding::kDoubleBuffer) double_buffered_.push_back(slots[i]);
  }
  return {};
}

void Executor::bind_states() {
  for (const State& state : states_) {
    if (state.input != nullptr) {
      void* data = state.input_copy != nullptr ? state.input_copy : state.slot->front();
      state.slot->bound_input = state.input->v1.buffer.data = data;
    }
    if (state.output != nullptr) {
      void* data =
          state.output_copy != nullptr ? state.output_copy : state.slot->target(state.binding);
      state.slot->bound_output = state.output->v1.buffer.data = data;
    }
  }
  for (const Rows& rows : rows_) rows.slot->bound_output = rows.data;
  epoch_ = store_->epoch();
}

void Executor::place(const Rows& rows) {
  auto* slot = static_cast<uint8_t*>(rows.slot->front());
  for (size_t block = 0; block < rows.outer; ++block) {
    uint8_t* to = slot + block * rows.length * rows.row_bytes;
    const uint8_t* from = rows.data + block * rows.count * rows.row_bytes;
    for (size_t t = 0; t < rows.count; ++t) {
      std::memcpy(to + static_cast<size_t>(rows.positions[t]) * rows.row_bytes,
                  from + t * rows.row_bytes, rows.row_bytes);
    }
  }
}

// After a successful execution.
Status Executor::update_states() {
  for (const Rows& rows : rows_) {  // all are checked before any is placed
    for (size_t t = 0; t < rows.count; ++t) {
      const int64_t at = rows.positions[t];
      if (at < 0 || static_cast<size_t>(at) >= rows.length) {
        return {ErrorKind::kInvalid, "graph " + graph_->name() + ": position " +
                                         std::to_string(at) + " is outside of " +
                                         rows.slot->descriptor().describe() + ", which has " +
                                         std::to_string(rows.length) + " rows"};
      }
    }
  }
  for (StateSlot* slot : double_buffered_) store_->swap(*slot);
  for (const Rows& rows : rows_) place(rows);
  for (const State& state : states_) {
    if (state.output_copy == nullptr) continue;
    auto* slot = static_cast<float*>(state.slot->front());
    const size_t elements = state.slot->descriptor().elements();
    if (state.binding == StateBinding::kAccumulate) {
      add_half(state.output_copy, state.factor, slot, elements);
    } else {
      from_half(static_cast<const uint16_t*>(state.output_copy), slot, elements);
    }
  }
  return {};
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
    } else if (i < n_inputs_ &&
               !argument.converter.to_npu(data, argument.scratch, argument.elements)) {
      return {ErrorKind::kInvalid, "graph " + graph_->name() + ": input " + std::to_string(i) +
                                       " holds an int64 that does not fit into 32 bits"};
    }
  }
  for (const State& state : states_) {
    if (state.input_copy == nullptr) continue;
    to_half(static_cast<const float*>(state.slot->front()),
            static_cast<uint16_t*>(state.input_copy), state.slot->descriptor().elements());
  }
  {
    std::lock_guard<std::mutex> lock(graph_->context()->execution_mutex());
    ETQNN_TRY(graph_->execute(inputs_.data(), inputs_.size(), outputs_.data(), outputs_.size()));
  }
  ETQNN_TRY(update_states());
  for (size_t i = n_inputs_; i < args.size(); ++i) {
    const Argument& argument = arguments_[i];
    if (argument.scratch == nullptr) continue;
    argument.converter.to_host(argument.scratch, args[i]->toTensor().mutable_data_ptr(),
                               argument.elements);
  }
  return {};
}

}  // namespace executorch_qnn
