// SPDX-License-Identifier: BSD-3-Clause
#include "state/state_api.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "delegate/failure.h"
#include "delegate/store_registry.h"
#include "session/buffers.h"
#include "session/seal.h"
#include "session/session.h"

// The numbers are promised to programs that are compiled already.
static_assert(ETQNN_LIBRARY_NOT_FOUND ==
                  static_cast<int>(executorch_qnn::ErrorKind::kLibraryNotFound) &&
              ETQNN_RUNTIME == static_cast<int>(executorch_qnn::ErrorKind::kRuntime));
static_assert(ETQNN_TENSOR == static_cast<int>(executorch_qnn::ValueKind::kTensor) &&
              ETQNN_OTHER == static_cast<int>(executorch_qnn::ValueKind::kOther));

// Names that were handed out live as long as the handle.
class EtqnnNames {
 public:
  const char* keep(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    return names_.insert(name).first->c_str();
  }

 private:
  std::mutex mutex_;
  std::set<std::string> names_;
};

struct etqnn_session {
  std::shared_ptr<executorch_qnn::Session> session;
  std::map<std::string, executorch_qnn::MethodInfo> methods;
  EtqnnNames names;
};

struct etqnn_store {
  etqnn_store(executorch_qnn::Digest digest, std::shared_ptr<executorch_qnn::StateStore> store)
      : program(digest), token(store, ""), buffers(std::move(store)) {}

  const executorch_qnn::Digest program;
  const executorch_qnn::StoreToken token;
  executorch_qnn::Buffers buffers;
  EtqnnNames names;
};

namespace executorch_qnn {
namespace {

Status invalid(std::string message) { return {ErrorKind::kInvalid, std::move(message)}; }

// Runs `call`, which returns a Status, so that nothing but a number leaves this library.
template <class Call>
int guarded(const Call& call) {
  Status status;
  try {
    status = call();
  } catch (const std::bad_alloc&) {
    status = {ErrorKind::kRuntime, "out of memory"};
  } catch (const std::exception& error) {
    status = {ErrorKind::kRuntime, error.what()};
  }
  if (!status.ok()) set_last_error(status.message());
  return static_cast<int>(status.kind());
}

#define ETQNN_NOT_NULL(argument) \
  if ((argument) == nullptr) return invalid(#argument " is NULL")

// ------------------------------------------------------------------------------------- structs

// The smallest struct that callers can have: that of version 1. Sizes of later ones are not below.
template <class T>
constexpr size_t kFirstSize = sizeof(T);

// What of a caller's struct this library knows; what the caller does not know is 0.
template <class T>
Result<T> get(const T* from, const char* name) {
  T own{};
  if (from->struct_size < kFirstSize<T>) {
    return invalid(std::string(name) + ".struct_size is " + std::to_string(from->struct_size) +
                   ", set it to sizeof");
  }
  own.struct_size = sizeof own;
  const size_t head = sizeof own.struct_size;
  std::memcpy(reinterpret_cast<char*>(&own) + head, reinterpret_cast<const char*>(from) + head,
              std::min(from->struct_size, sizeof own) - head);
  return own;
}

// The other way round; `to` has been checked by get().
template <class T>
void put(const T& own, T* to) {
  const size_t head = sizeof own.struct_size;
  std::memcpy(reinterpret_cast<char*>(to) + head, reinterpret_cast<const char*>(&own) + head,
              std::min(to->struct_size, sizeof own) - head);
}

// Elements are as far apart as their writer thinks they are.
template <class T>
T* element(T* array, size_t index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(array) + index * array->struct_size);
}

Status set_dims(const std::vector<int32_t>& from, uint32_t& rank, int32_t* dims) {
  if (from.size() > ETQNN_MAX_RANK) {
    return {ErrorKind::kRuntime, "a tensor has " + std::to_string(from.size()) + " dimensions"};
  }
  rank = static_cast<uint32_t>(from.size());
  std::copy(from.begin(), from.end(), dims);
  return {};
}

Status describe(const std::vector<ValueInfo>& side, size_t index, etqnn_value* about) {
  ETQNN_NOT_NULL(about);
  ETQNN_TRY(get(about, "about").status());
  if (index >= side.size()) return invalid("there is no value " + std::to_string(index));
  const ValueInfo& info = side[index];
  etqnn_value value{};
  value.kind = static_cast<int32_t>(info.kind);
  if (info.kind == ValueKind::kTensor) {
    value.scalar_type = info.type;
    ETQNN_TRY(set_dims(info.dims, value.rank, value.dims));
    value.bytes = tensor_bytes(info.type, info.dims);
  }
  put(value, about);
  return {};
}

Result<InputValue> to_input(const etqnn_value* given) {
  ETQNN_ASSIGN(const etqnn_value value, get(given, "input"));
  switch (value.kind) {
    case ETQNN_TENSOR:
      if (value.rank > ETQNN_MAX_RANK ||
          value.scalar_type != static_cast<int8_t>(value.scalar_type))
        return invalid("an input is no tensor that there can be");
      return InputValue(TensorView{value.data,
                                   value.bytes,
                                   static_cast<int8_t>(value.scalar_type),
                                   {value.dims, value.dims + value.rank}});
    case ETQNN_INT:
      return InputValue(value.int_value);
    case ETQNN_DOUBLE:
      return InputValue(value.double_value);
    case ETQNN_BOOL:
      return InputValue(value.int_value != 0);
    case ETQNN_NONE:
      return InputValue(std::monostate());
    default:
      return invalid("an input is of kind " + std::to_string(value.kind));
  }
}

Status give_back(const OutputValue& output, bool tensor, etqnn_value* to) {
  etqnn_value value{};
  value.data = output.data;
  value.kind = ETQNN_NONE;
  if (tensor) {
    value.kind = ETQNN_TENSOR;
    value.scalar_type = output.type;
    ETQNN_TRY(set_dims(output.dims, value.rank, value.dims));
    value.bytes = tensor_bytes(output.type, output.dims);
  } else if (const auto* number = std::get_if<int64_t>(&output.scalar)) {
    value.kind = ETQNN_INT;
    value.int_value = *number;
  } else if (const auto* real = std::get_if<double>(&output.scalar)) {
    value.kind = ETQNN_DOUBLE;
    value.double_value = *real;
  } else if (const auto* flag = std::get_if<bool>(&output.scalar)) {
    value.kind = ETQNN_BOOL;
    value.int_value = *flag ? 1 : 0;
  } else if (std::holds_alternative<std::string>(output.scalar)) {
    value.kind = ETQNN_OTHER;
  }
  put(value, to);
  return {};
}

// ------------------------------------------------------------------------------------- sessions

Result<const MethodInfo*> find_method(const etqnn_session* session, const char* method) {
  ETQNN_NOT_NULL(session);
  ETQNN_NOT_NULL(method);
  const auto found = session->methods.find(method);
  if (found != session->methods.end()) return &found->second;
  return session->session->program()->method(method).status();
}

Status make(std::shared_ptr<Session> session, etqnn_session** handle) {
  auto made = std::make_unique<etqnn_session>();
  for (const std::string& name : session->program()->methods()) {
    ETQNN_ASSIGN(made->methods[name], session->program()->method(name));
  }
  made->session = std::move(session);
  *handle = made.release();
  return {};
}

Status run(etqnn_session* session, const char* method, const etqnn_value* inputs, size_t n_inputs,
           etqnn_value* outputs, size_t n_outputs) {
  ETQNN_ASSIGN(const MethodInfo* info, find_method(session, method));
  if (n_inputs > 0) ETQNN_NOT_NULL(inputs);
  if (n_outputs > 0) ETQNN_NOT_NULL(outputs);
  std::vector<InputValue> in;
  for (size_t i = 0; i < n_inputs; ++i) {
    ETQNN_ASSIGN(InputValue value, to_input(element(inputs, i)));
    in.push_back(std::move(value));
  }
  std::vector<OutputValue> out;
  for (size_t i = 0; i < n_outputs; ++i) {
    ETQNN_ASSIGN(const etqnn_value room, get(element(outputs, i), "output"));
    out.push_back({room.data, room.bytes, 0, {}, {}});
  }
  ETQNN_TRY(session->session->run(method, in, out));
  for (size_t i = 0; i < n_outputs; ++i) {
    const bool tensor = info->outputs[i].kind == ValueKind::kTensor;
    ETQNN_TRY(give_back(out[i], tensor, element(outputs, i)));
  }
  return {};
}

// ------------------------------------------------------------------------------------- state

Status describe(const std::vector<StateInfo>& all, size_t index, EtqnnNames& names,
                etqnn_state_info* to) {
  ETQNN_NOT_NULL(to);
  ETQNN_TRY(get(to, "info").status());
  if (index >= all.size()) return invalid("there is no buffer " + std::to_string(index));
  const StateInfo& from = all[index];
  const StateDescriptor& d = from.descriptor;
  etqnn_state_info info{};
  info.name = names.keep(d.name);
  info.scalar_type = static_cast<int32_t>(d.host_type);
  ETQNN_TRY(set_dims({d.dims.begin(), d.dims.end()}, info.rank, info.dims));
  info.bytes = d.host_bytes();
  info.stored_type = static_cast<uint32_t>(d.stored_type);
  info.stored_bytes = d.stored_bytes();
  info.binding = names.keep(from.binding);
  info.address = from.address;
  info.input_address = from.input_address;
  info.output_address = from.output_address;
  info.quantized = d.encoding.quantized ? 1 : 0;
  info.scale = d.encoding.scale;
  info.offset = d.encoding.offset;
  put(info, to);
  return {};
}

Status check_values(const char* name, const void* values, size_t bytes) {
  ETQNN_NOT_NULL(name);
  if (bytes > 0) ETQNN_NOT_NULL(values);
  return {};
}

}  // namespace
}  // namespace executorch_qnn

using namespace executorch_qnn;

extern "C" {

int etqnn_api_version(void) { return ETQNN_API_VERSION; }

int etqnn_session_open(const char* program_path, const etqnn_session_options* options,
                       etqnn_session** session) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(session);
    *session = nullptr;
    ETQNN_NOT_NULL(program_path);
    ProgramOptions own;
    if (options != nullptr) {
      ETQNN_ASSIGN(const etqnn_session_options given, get(options, "options"));
      if (given.qnn_libraries != nullptr) own.libraries = given.qnn_libraries;
      own.mlock = given.lock_memory != 0;
    }
    ETQNN_ASSIGN(auto program, ProgramFile::open(program_path, own));
    ETQNN_ASSIGN(auto made, Session::create(std::move(program)));
    return make(std::move(made), session);
  });
}

int etqnn_session_fork(etqnn_session* session, etqnn_session** twin) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(twin);
    *twin = nullptr;
    ETQNN_NOT_NULL(session);
    ETQNN_ASSIGN(auto made, session->session->fork());
    return make(std::move(made), twin);
  });
}

void etqnn_session_close(etqnn_session* session) { delete session; }

size_t etqnn_session_method_count(const etqnn_session* session) {
  return session == nullptr ? 0 : session->methods.size();
}

const char* etqnn_session_method_name(const etqnn_session* session, size_t index) {
  if (index >= etqnn_session_method_count(session)) return nullptr;
  return session->session->program()->methods()[index].c_str();
}

int etqnn_session_method(const etqnn_session* session, const char* method, size_t* n_inputs,
                         size_t* n_outputs) {
  return guarded([&]() -> Status {
    ETQNN_ASSIGN(const MethodInfo* info, find_method(session, method));
    if (n_inputs != nullptr) *n_inputs = info->inputs.size();
    if (n_outputs != nullptr) *n_outputs = info->outputs.size();
    return {};
  });
}

int etqnn_session_input(const etqnn_session* session, const char* method, size_t index,
                        etqnn_value* about) {
  return guarded([&]() -> Status {
    ETQNN_ASSIGN(const MethodInfo* info, find_method(session, method));
    return describe(info->inputs, index, about);
  });
}

int etqnn_session_output(const etqnn_session* session, const char* method, size_t index,
                         etqnn_value* about) {
  return guarded([&]() -> Status {
    ETQNN_ASSIGN(const MethodInfo* info, find_method(session, method));
    return describe(info->outputs, index, about);
  });
}

int etqnn_session_run(etqnn_session* session, const char* method, const etqnn_value* inputs,
                      size_t n_inputs, etqnn_value* outputs, size_t n_outputs) {
  return guarded([&] { return run(session, method, inputs, n_inputs, outputs, n_outputs); });
}

size_t etqnn_session_state_count(etqnn_session* session) {
  return session == nullptr ? 0 : session->session->state().size();
}

int etqnn_session_state_info(etqnn_session* session, size_t index, etqnn_state_info* info) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(session);
    return describe(session->session->state(), index, session->names, info);
  });
}

int etqnn_session_read_state(etqnn_session* session, const char* name, void* values, size_t bytes) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(session);
    ETQNN_TRY(check_values(name, values, bytes));
    return session->session->read_state(name, values, bytes);
  });
}

int etqnn_session_write_state(etqnn_session* session, const char* name, const void* values,
                              size_t bytes) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(session);
    ETQNN_TRY(check_values(name, values, bytes));
    return session->session->write_state(name, values, bytes);
  });
}

int etqnn_session_reset_state(etqnn_session* session) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(session);
    return session->session->reset_state();
  });
}

int etqnn_session_save_state(etqnn_session* session, const char* path) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(session);
    ETQNN_NOT_NULL(path);
    return session->session->save_state(path);
  });
}

int etqnn_session_load_state(etqnn_session* session, const char* path) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(session);
    ETQNN_NOT_NULL(path);
    return session->session->load_state(path);
  });
}

int etqnn_store_create(const char* program_path, etqnn_store** store) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(store);
    *store = nullptr;
    ETQNN_NOT_NULL(program_path);
    ETQNN_ASSIGN(const Digest program, program_digest(program_path));
    *store = new etqnn_store(program, std::make_shared<StateStore>());
    return {};
  });
}

int etqnn_store_fork(etqnn_store* store, etqnn_store** twin) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(twin);
    *twin = nullptr;
    ETQNN_NOT_NULL(store);
    ETQNN_ASSIGN(std::shared_ptr<StateStore> copy, store->buffers.fork_store());
    *twin = new etqnn_store(store->program, std::move(copy));
    return {};
  });
}

void etqnn_store_close(etqnn_store* store) { delete store; }

const char* etqnn_store_token(const etqnn_store* store) {
  return store == nullptr ? nullptr : store->token.text().c_str();
}

size_t etqnn_store_state_count(etqnn_store* store) {
  return store == nullptr ? 0 : store->buffers.list().size();
}

int etqnn_store_state_info(etqnn_store* store, size_t index, etqnn_state_info* info) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(store);
    return describe(store->buffers.list(), index, store->names, info);
  });
}

int etqnn_store_read_state(etqnn_store* store, const char* name, void* values, size_t bytes) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(store);
    ETQNN_TRY(check_values(name, values, bytes));
    return store->buffers.read(name, values, bytes);
  });
}

int etqnn_store_write_state(etqnn_store* store, const char* name, const void* values,
                            size_t bytes) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(store);
    ETQNN_TRY(check_values(name, values, bytes));
    return store->buffers.write(name, values, bytes);
  });
}

int etqnn_store_reset_state(etqnn_store* store) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(store);
    store->buffers.reset_store();
    return {};
  });
}

int etqnn_store_save_state(etqnn_store* store, const char* path) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(store);
    ETQNN_NOT_NULL(path);
    return store->buffers.save(path, store->program);
  });
}

int etqnn_store_load_state(etqnn_store* store, const char* path) {
  return guarded([&]() -> Status {
    ETQNN_NOT_NULL(store);
    ETQNN_NOT_NULL(path);
    return store->buffers.load(path, store->program);
  });
}

}  // extern "C"
