// SPDX-License-Identifier: BSD-3-Clause
#include "session/session.h"

#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/method.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "delegate/failure.h"
#include "delegate/options.h"
#include "delegate/store_registry.h"
#include "graph/context.h"
#include "memory/region.h"
#include "session/et_log.h"
#include "state/store.h"

namespace executorch_qnn {

namespace et = executorch::runtime;
using executorch::extension::MallocMemoryAllocator;

namespace {

constexpr size_t kPage = 4096;

// Planned memory. ExecuTorch fills what has an initial value when it loads a method and leaves the
// rest as it is, so the rest must be zero: a mutable buffer may lie there.
class Arena {
 public:
  static Result<Arena> zeros(size_t bytes) {
    Arena arena;
    ETQNN_ASSIGN(arena.memory_, Region::allocate(bytes));
    std::memset(arena.memory_.address(), 0, bytes);
    return arena;
  }

  uint8_t* data() const { return static_cast<uint8_t*>(memory_.address()); }
  size_t size() const { return memory_.size(); }

  // Remembers the present content, of which most is zero, for restore().
  void seal() {
    static const uint8_t kZeros[kPage] = {};
    for (size_t at = 0; at < size(); at += kPage) {
      const size_t bytes = std::min(kPage, size() - at);
      if (std::memcmp(data() + at, kZeros, bytes) == 0) continue;
      sealed_.emplace_back(at, std::vector<uint8_t>(data() + at, data() + at + bytes));
    }
  }

  void restore() {
    std::memset(data(), 0, size());
    for (const auto& [at, bytes] : sealed_) std::memcpy(data() + at, bytes.data(), bytes.size());
  }

 private:
  Region memory_;
  std::vector<std::pair<size_t, std::vector<uint8_t>>> sealed_;
};

// A loaded method and the memory it works in, in the order in which they may be destroyed
// backwards.
struct LoadedMethod {
  MethodInfo info;
  std::vector<Arena> own_arenas;
  std::vector<et::Span<uint8_t>> spans;
  MallocMemoryAllocator method_allocator;
  MallocMemoryAllocator temp_allocator;
  std::optional<et::HierarchicalAllocator> planned;
  std::optional<et::MemoryManager> memory;
  std::vector<Region> unplanned_outputs;
  std::optional<et::Method> method;
};

std::string describe_tensor(int8_t type, const std::vector<int32_t>& dims) {
  const std::vector<uint32_t> unsigned_dims(dims.begin(), dims.end());
  const char* name = to_string(static_cast<ScalarType>(type));
  return describe(name != nullptr ? name : "unknown", unsigned_dims.data(), unsigned_dims.size());
}

std::string describe_kind(ValueKind kind) {
  switch (kind) {
    case ValueKind::kTensor:
      return "a tensor";
    case ValueKind::kInt:
      return "an int";
    case ValueKind::kDouble:
      return "a float";
    case ValueKind::kBool:
      return "a bool";
    case ValueKind::kNone:
      return "None";
    case ValueKind::kOther:
      break;
  }
  return "a value of another kind";
}

ValueKind kind_of(const InputValue& value) {
  constexpr ValueKind kKinds[] = {ValueKind::kNone, ValueKind::kTensor, ValueKind::kInt,
                                  ValueKind::kDouble, ValueKind::kBool};
  return kKinds[value.index()];
}

// The type that stores a host tensor as it is.
abi::DataType stored_as_is(ScalarType type) {
  switch (type) {
    case ScalarType::kUint8:
      return abi::DataType::kUint8;
    case ScalarType::kInt8:
      return abi::DataType::kInt8;
    case ScalarType::kInt16:
      return abi::DataType::kInt16;
    case ScalarType::kInt32:
      return abi::DataType::kInt32;
    case ScalarType::kInt64:
      return abi::DataType::kInt64;
    case ScalarType::kFloat16:
      return abi::DataType::kFloat16;
    case ScalarType::kFloat32:
      return abi::DataType::kFloat32;
    case ScalarType::kFloat64:
      return static_cast<abi::DataType>(0x264);
    case ScalarType::kBool:
      return abi::DataType::kBool8;
    case ScalarType::kUint16:
      return abi::DataType::kUint16;
  }
  return abi::DataType{};
}

}  // namespace

struct Session::Parts {
  std::optional<Buffers> buffers;
  std::optional<StoreToken> token;
  // Planned memory from the second buffer on is the same for all methods: that is where
  // ExecuTorch's share_mutable_buffers puts what methods share. The first one is each method's own.
  std::vector<Arena> shared_arenas;
  std::map<std::string, std::unique_ptr<LoadedMethod>> methods;
  mutable std::mutex mutex;

  Status load_shared_arenas(const ProgramFile& program);
  Status load_method(const ProgramFile& program, const std::string& name);
  Status find_host_buffers(LoadedMethod& loaded);

  template <class Visit>
  void each_arena(const Visit& visit) {
    for (Arena& arena : shared_arenas) visit(arena);
    for (auto& entry : methods) {
      for (Arena& arena : entry.second->own_arenas) visit(arena);
    }
  }
};

Status Session::Parts::load_shared_arenas(const ProgramFile& program) {
  std::vector<size_t> sizes;
  for (const std::string& name : program.methods()) {
    const auto meta = program.program().method_meta(name.c_str());
    if (!meta.ok()) return executorch_failure(meta.error(), "cannot read method " + name);
    for (size_t i = 1; i < meta->num_memory_planned_buffers(); ++i) {
      const auto bytes = meta->memory_planned_buffer_size(i);
      if (!bytes.ok() || bytes.get() < 0) {
        return executorch_failure(bytes.error(), "cannot plan the memory of method " + name);
      }
      if (sizes.size() < i) sizes.resize(i);
      sizes[i - 1] = std::max(sizes[i - 1], static_cast<size_t>(bytes.get()));
    }
  }
  for (size_t bytes : sizes) {
    ETQNN_ASSIGN(Arena arena, Arena::zeros(bytes));
    shared_arenas.push_back(std::move(arena));
  }
  return {};
}

Status Session::Parts::load_method(const ProgramFile& program, const std::string& name) {
  auto loaded = std::make_unique<LoadedMethod>();
  ETQNN_ASSIGN(loaded->info, program.method(name));
  const auto meta = program.program().method_meta(name.c_str());
  if (!meta.ok()) return executorch_failure(meta.error(), "cannot read method " + name);
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
    const auto bytes = meta->memory_planned_buffer_size(i);
    if (!bytes.ok() || bytes.get() < 0) {
      return executorch_failure(bytes.error(), "cannot plan the memory of method " + name);
    }
    if (i == 0) {
      ETQNN_ASSIGN(Arena arena, Arena::zeros(static_cast<size_t>(bytes.get())));
      loaded->own_arenas.push_back(std::move(arena));
    }
    const Arena& arena = i == 0 ? loaded->own_arenas[0] : shared_arenas[i - 1];
    loaded->spans.emplace_back(arena.data(), arena.size());
  }
  loaded->planned.emplace(et::Span<et::Span<uint8_t>>(loaded->spans.data(), loaded->spans.size()));
  loaded->memory.emplace(&loaded->method_allocator, &*loaded->planned, &loaded->temp_allocator);

  et::BackendOptions<1> options;
  et::LoadBackendOptionsMap backends;
  static_assert(sizeof kStoreOption <= et::kMaxOptionKeyLength);
  if (options.set_option(kStoreOption, token->text().c_str()) != et::Error::Ok ||
      backends.set_options(kBackendId, options.view()) != et::Error::Ok) {
    return {ErrorKind::kRuntime, "cannot pass options to ExecuTorch"};
  }
  auto method =
      program.program().load_method(name.c_str(), &*loaded->memory, nullptr, nullptr, &backends);
  if (!method.ok()) {
    return executorch_failure(method.error(),
                              "cannot load method " + name + " of " + program.path());
  }
  loaded->method.emplace(std::move(method.get()));

  for (size_t i = 0; i < loaded->info.outputs.size(); ++i) {
    if (loaded->info.outputs[i].kind != ValueKind::kTensor) continue;
    const auto tensor = meta->output_tensor_meta(i);
    if (!tensor.ok() || tensor->is_memory_planned()) continue;
    const auto& output = loaded->method->get_output(i);
    if (output.isTensor() && output.toTensor().const_data_ptr() != nullptr) continue;  // a constant
    ETQNN_ASSIGN(Region region, Region::allocate(tensor->nbytes()));
    const et::Error error = loaded->method->set_output_data_ptr(region.address(), region.size(), i);
    if (error != et::Error::Ok) {
      return executorch_failure(
          error, "cannot give output " + std::to_string(i) + " of " + name + " its memory");
    }
    loaded->unplanned_outputs.push_back(std::move(region));
  }
  ETQNN_TRY(find_host_buffers(*loaded));
  methods[name] = std::move(loaded);
  return {};
}

Status Session::Parts::find_host_buffers(LoadedMethod& loaded) {
  const et::MethodMeta meta = loaded.method->method_meta();
  for (size_t i = 0; i < meta.num_attributes(); ++i) {
    const auto info = meta.attribute_tensor_meta(i);
    if (!info.ok()) continue;
    auto tensor = loaded.method->get_attribute(info->name());
    if (!tensor.ok() || tensor->mutable_data_ptr() == nullptr) continue;
    StateDescriptor descriptor;
    descriptor.name = info->name();
    descriptor.host_type = static_cast<ScalarType>(tensor->scalar_type());
    descriptor.stored_type = stored_as_is(descriptor.host_type);
    descriptor.dims.assign(tensor->sizes().begin(), tensor->sizes().end());
    if (to_string(descriptor.host_type) == nullptr) {
      return {ErrorKind::kState, "buffer " + descriptor.name + " is kept by the host in a type " +
                                     "(number " +
                                     std::to_string(static_cast<int>(descriptor.host_type)) +
                                     ") that a session cannot hand out or save"};
    }
    ETQNN_TRY(buffers->add_host(descriptor, tensor->mutable_data_ptr()));
  }
  return {};
}

Session::Session(std::shared_ptr<const ProgramFile> program)
    : program_(std::move(program)), parts_(std::make_unique<Parts>()) {}

Session::~Session() = default;

Result<std::shared_ptr<Session>> Session::create(std::shared_ptr<const ProgramFile> program) {
  std::shared_ptr<Session> session(new Session(std::move(program)));
  ETQNN_TRY(session->load(std::make_shared<StateStore>()));
  return session;
}

Status Session::load(std::shared_ptr<StateStore> store) {
  EtLogCapture log;
  (void)take_failure();
  parts_->token.emplace(store, program_->options().libraries, program_->sealed());
  parts_->buffers.emplace(std::move(store));
  ETQNN_TRY(parts_->load_shared_arenas(*program_));
  for (const std::string& name : program_->methods()) {
    ETQNN_TRY(parts_->load_method(*program_, name));
  }
  parts_->each_arena([](Arena& arena) { arena.seal(); });
  return {};
}

Result<std::shared_ptr<Session>> Session::fork() const {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  ETQNN_ASSIGN(std::shared_ptr<StateStore> store, parts_->buffers->fork_store());
  std::shared_ptr<Session> twin(new Session(program_));
  ETQNN_TRY(twin->load(std::move(store)));
  // Only what holds state has to be copied, but that does not show in the plan.
  std::vector<Arena*> from, to;
  parts_->each_arena([&from](Arena& arena) { from.push_back(&arena); });
  twin->parts_->each_arena([&to](Arena& arena) { to.push_back(&arena); });
  for (size_t i = 0; i < from.size(); ++i) {
    std::memcpy(to[i]->data(), from[i]->data(), from[i]->size());
  }
  return twin;
}

namespace {

std::string describe_expected(const ValueInfo& want) {
  return want.kind == ValueKind::kTensor ? describe_tensor(want.type, want.dims)
                                         : describe_kind(want.kind);
}

std::string describe_given(const InputValue& value) {
  if (const auto* tensor = std::get_if<TensorView>(&value)) {
    return describe_tensor(tensor->type, tensor->dims);
  }
  return describe_kind(kind_of(value));
}

Status does_not_fit(const InputValue& value, const ValueInfo& want, const std::string& where) {
  return {ErrorKind::kState,
          where + " must be " + describe_expected(want) + ", got " + describe_given(value)};
}

Status check_input(const InputValue& value, const ValueInfo& want, const std::string& where) {
  if (kind_of(value) != want.kind) return does_not_fit(value, want, where);
  const auto* tensor = std::get_if<TensorView>(&value);
  if (tensor == nullptr) return {};
  bool fits = tensor->type == want.type && tensor->dims.size() == want.dims.size();
  for (size_t d = 0; fits && d < tensor->dims.size(); ++d) {
    // A dynamic dimension may be smaller than its bound; ExecuTorch knows which are.
    fits = tensor->dims[d] >= 0 && tensor->dims[d] <= want.dims[d];
  }
  if (!fits) return does_not_fit(value, want, where);
  const size_t bytes = tensor_bytes(tensor->type, tensor->dims);
  if (tensor->bytes != bytes) {
    return {ErrorKind::kState, where + " is " + describe_given(value) + " and takes " +
                                   std::to_string(bytes) + " bytes, got " +
                                   std::to_string(tensor->bytes)};
  }
  if (tensor->data == nullptr && bytes > 0) return {ErrorKind::kState, where + " has no memory"};
  return {};
}

Status check_output(const OutputValue& output, const ValueInfo& info, const std::string& where) {
  if (info.kind != ValueKind::kTensor || output.data == nullptr) return {};
  const size_t bytes = tensor_bytes(info.type, info.dims);
  if (output.capacity >= bytes) return {};
  return {ErrorKind::kInvalid, where + " is " + describe_expected(info) + " and takes up to " +
                                   std::to_string(bytes) + " bytes, there is room for " +
                                   std::to_string(output.capacity)};
}

bool needs_64_bits(const InputValue& value) {
  const auto* tensor = std::get_if<TensorView>(&value);
  if (tensor == nullptr || tensor->type != static_cast<int8_t>(ScalarType::kInt64)) return false;
  const auto* values = static_cast<const int64_t*>(tensor->data);
  return std::any_of(values, values + tensor->bytes / sizeof *values,
                     [](int64_t v) { return v != static_cast<int32_t>(v); });
}

// What a TensorImpl refers to.
struct TensorParts {
  std::vector<executorch::aten::SizesType> sizes;
  std::vector<executorch::aten::DimOrderType> dim_order;
  std::vector<executorch::aten::StridesType> strides;
  std::optional<executorch::aten::TensorImpl> impl;
};

et::EValue to_evalue(const InputValue& value, TensorParts& parts) {
  if (const auto* tensor = std::get_if<TensorView>(&value)) {
    const size_t rank = tensor->dims.size();
    parts.sizes.assign(tensor->dims.begin(), tensor->dims.end());
    parts.dim_order.resize(rank);
    parts.strides.resize(rank);
    int32_t stride = 1;
    for (size_t d = rank; d-- > 0;) {
      parts.dim_order[d] = static_cast<executorch::aten::DimOrderType>(d);
      parts.strides[d] = stride;
      stride *= std::max(parts.sizes[d], 1);
    }
    // ExecuTorch reads inputs only, but has no tensor type that says so.
    parts.impl.emplace(static_cast<executorch::aten::ScalarType>(tensor->type),
                       static_cast<ssize_t>(rank), parts.sizes.data(),
                       const_cast<void*>(tensor->data), parts.dim_order.data(),
                       parts.strides.data());
    return et::EValue(executorch::aten::Tensor(&*parts.impl));
  }
  if (const auto* number = std::get_if<int64_t>(&value)) return et::EValue(*number);
  if (const auto* number = std::get_if<double>(&value)) return et::EValue(*number);
  if (const auto* flag = std::get_if<bool>(&value)) return et::EValue(*flag);
  return et::EValue();
}

Status copy_output(const et::EValue& value, OutputValue& output, const std::string& where) {
  output.scalar = std::monostate();
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    output.type = static_cast<int8_t>(tensor.scalar_type());
    output.dims.assign(tensor.sizes().begin(), tensor.sizes().end());
    if (output.data != nullptr && tensor.nbytes() > output.capacity) {
      return {ErrorKind::kInvalid, where + " takes " + std::to_string(tensor.nbytes()) +
                                       " bytes, there is room for " +
                                       std::to_string(output.capacity)};
    }
    if (output.data != nullptr && tensor.nbytes() > 0) {
      std::memcpy(output.data, tensor.const_data_ptr(), tensor.nbytes());
    }
  } else if (value.isInt()) {
    output.scalar = value.toInt();
  } else if (value.isDouble()) {
    output.scalar = value.toDouble();
  } else if (value.isBool()) {
    output.scalar = value.toBool();
  } else if (value.isString()) {
    const auto text = value.toString();
    output.scalar = std::string(text.data(), text.size());
  } else if (!value.isNone()) {
    return {ErrorKind::kRuntime, where + " is of a kind that cannot be returned"};
  }
  return {};
}

}  // namespace

Status Session::run(const std::string& name, const std::vector<InputValue>& inputs,
                    std::vector<OutputValue>& outputs) {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  EtLogCapture log;
  (void)take_failure();
  const auto found = parts_->methods.find(name);
  if (found == parts_->methods.end()) return program_->method(name).status();
  LoadedMethod& loaded = *found->second;
  const std::vector<ValueInfo>& wanted = loaded.info.inputs;
  if (inputs.size() != wanted.size()) {
    return {ErrorKind::kState, "method " + name + " takes " + std::to_string(wanted.size()) +
                                   " inputs, got " + std::to_string(inputs.size())};
  }
  if (outputs.size() != loaded.info.outputs.size()) {
    return {ErrorKind::kInvalid,
            "method " + name + " has " + std::to_string(loaded.info.outputs.size()) + " outputs"};
  }
  const auto where = [&name](const char* side, size_t i) {
    return side + (" " + std::to_string(i)) + " of method " + name;
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    ETQNN_TRY(check_input(inputs[i], wanted[i], where("input", i)));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    ETQNN_TRY(check_output(outputs[i], loaded.info.outputs[i], where("output", i)));
  }
  std::vector<TensorParts> parts(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const et::Error error = loaded.method->set_input(to_evalue(inputs[i], parts[i]), i);
    if (error == et::Error::Ok) continue;
    const Status status = does_not_fit(inputs[i], wanted[i], where("input", i));
    return executorch_failure(error, status.message(), ErrorKind::kState);
  }
  // A delegate refuses an int64 beyond its 32 bits when its turn comes: others have had theirs
  // then.
  std::optional<std::vector<std::vector<uint8_t>>> before;
  if (std::any_of(inputs.begin(), inputs.end(), needs_64_bits)) before = parts_->buffers->copy();
  const uint64_t executions = ExecutableGraph::executions();
  if (const et::Error error = loaded.method->execute(); error != et::Error::Ok) {
    const Status why = executorch_failure(error, "method " + name + " failed");
    if (before) {
      parts_->buffers->restore(*before);
      return why;
    }
    // A check that fails before the first graph runs has left everything alone.
    if (ExecutableGraph::executions() == executions && !parts_->buffers->has_host()) return why;
    if (parts_->buffers->list().empty()) return why;
    return {why.kind(),
            why.message() +
                "; mutable buffers may have been changed before: reset, load or write "
                "the state before the next call",
            why.code()};
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    ETQNN_TRY(copy_output(loaded.method->get_output(i), outputs[i], where("output", i)));
  }
  return {};
}

std::vector<StateInfo> Session::state() const {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->buffers->list();
}

Result<StateDescriptor> Session::describe_state(const std::string& name) const {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->buffers->describe(name);
}

Status Session::read_state(const std::string& name, void* values, size_t bytes) const {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->buffers->read(name, values, bytes);
}

Status Session::write_state(const std::string& name, const void* values, size_t bytes) {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->buffers->write(name, values, bytes);
}

Status Session::reset_state() {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  parts_->buffers->reset_store();
  parts_->each_arena([](Arena& arena) { arena.restore(); });
  return {};
}

Status Session::save_state(const std::string& path) const {
  const Digest digest = program_->digest();
  std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->buffers->save(path, digest);
}

Status Session::load_state(const std::string& path) {
  const Digest digest = program_->digest();
  std::lock_guard<std::mutex> lock(parts_->mutex);
  return parts_->buffers->load(path, digest);
}

uint64_t Session::state_bytes_copied() const {
  std::lock_guard<std::mutex> lock(parts_->mutex);
  StateStore& store = *parts_->buffers->store();
  std::lock_guard<std::mutex> store_lock(store.mutex());
  return store.bytes_copied();
}

}  // namespace executorch_qnn
