// SPDX-License-Identifier: BSD-3-Clause
// What the delegate's tests share: payloads and null contexts made by hand, named data in memory,
// and a delegate that is called the way ExecuTorch calls it.
#pragma once

#include <dlfcn.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/platform/runtime.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/digest.h"
#include "delegate/failure.h"
#include "delegate/options.h"
#include "delegate/payload.h"
#include "null/format.h"

namespace support {

namespace et = executorch::runtime;
using namespace executorch_qnn;

using Bytes = std::vector<uint8_t>;

class Writer {
 public:
  template <class T>
  Writer& number(T value) {
    const auto* from = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
    return *this;
  }
  Writer& u32(size_t value) { return number(static_cast<uint32_t>(value)); }
  Writer& text(const std::string& value) {
    u32(value.size());
    bytes.insert(bytes.end(), value.begin(), value.end());
    return *this;
  }
  Writer& dims(const std::vector<uint32_t>& values) {
    u32(values.size());
    for (uint32_t value : values) u32(value);
    return *this;
  }

  Bytes bytes;
};

// ------------------------------------------------------------------------------------- payloads

inline void put(Writer& w, const TensorEncoding& encoding) {
  w.u32(encoding.quantized ? 1 : 0);
  if (encoding.quantized) w.number(encoding.scale).number(encoding.offset);
}

// A body in its envelope; `tail` is what a later minor version might append.
inline Bytes seal(const Bytes& body, uint16_t major = 2, uint16_t minor = 0) {
  Writer rest;
  rest.number<uint64_t>(32 + body.size()).number<uint64_t>(0);
  rest.bytes.insert(rest.bytes.end(), body.begin(), body.end());
  Writer whole;
  for (char c : std::string("ETQNNDLG")) whole.number(c);
  whole.number(major).number(minor).number(crc32(rest.bytes.data(), rest.bytes.size()));
  whole.bytes.insert(whole.bytes.end(), rest.bytes.begin(), rest.bytes.end());
  return whole.bytes;
}

inline Bytes body(const Payload& p) {
  Writer w;
  w.text(p.method).text(p.graph).text(p.context_key);
  w.bytes.insert(w.bytes.end(), p.context_digest.begin(), p.context_digest.end());
  w.number(p.context_size).text(p.build_id).u32(p.core_major).u32(p.core_minor);
  w.u32(p.soc_model).u32(p.htp_arch).text(p.target);
  for (const auto* side : {&p.inputs, &p.outputs}) {
    w.u32(side->size());
    for (const PayloadTensor& t : *side) {
      w.text(t.tensor).number(static_cast<int32_t>(t.host_type));
      w.number(static_cast<uint32_t>(t.npu_type)).dims(t.dims).dims(t.npu_dims);
      put(w, t.encoding);
      w.u32(0);
    }
  }
  w.u32(p.states.size());
  for (const PayloadState& s : p.states) {
    w.text(s.descriptor.name).number(static_cast<int32_t>(s.descriptor.host_type));
    w.number(static_cast<uint32_t>(s.descriptor.stored_type));
    w.number(static_cast<uint32_t>(s.npu_type)).dims(s.descriptor.dims);
    put(w, s.descriptor.encoding);
    w.text(s.input).text(s.output).u32(static_cast<uint32_t>(s.binding));
    w.u32(s.initial_key.empty() ? 0 : 1);
    if (!s.initial_key.empty()) w.text(s.initial_key);
    if (s.binding == StateBinding::kDelta) {
      w.text(s.rows.positions).number(s.rows.offset).u32(s.rows.outer).u32(s.rows.length);
      w.u32(s.rows.row).u32(s.rows.count);
    }
    if (s.binding == StateBinding::kAccumulate) w.number(s.scale);
  }
  return w.bytes;
}

inline Bytes pack(const Payload& payload) { return seal(body(payload)); }

inline PayloadTensor tensor(std::string name, ScalarType host, abi::DataType npu,
                            std::vector<uint32_t> dims, TensorEncoding encoding = {}) {
  PayloadTensor t;
  t.encoding = encoding;
  t.tensor = std::move(name);
  t.host_type = host;
  t.npu_type = npu;
  t.npu_dims = dims.empty() ? std::vector<uint32_t>{1} : dims;
  t.dims = std::move(dims);
  return t;
}

inline PayloadState state(const std::string& name, StateBinding binding,
                          std::vector<uint32_t> dims = {4}, ScalarType host = ScalarType::kInt32,
                          abi::DataType stored = abi::DataType::kInt32) {
  PayloadState s;
  s.descriptor.name = name;
  s.descriptor.host_type = host;
  s.descriptor.stored_type = s.npu_type = stored;
  s.descriptor.dims = std::move(dims);
  if (binding != StateBinding::kWriteOnly) s.input = name + "_in";
  if (binding != StateBinding::kReadOnly) s.output = name + "_out";
  s.binding = binding;
  return s;
}

// A buffer of which the graph puts out `rows.count` rows in its tensor `output`.
inline PayloadState delta(const std::string& name, std::vector<uint32_t> dims, std::string output,
                          PayloadRows rows) {
  PayloadState s = state(name, StateBinding::kDelta, std::move(dims));
  s.input.clear();
  s.output = std::move(output);
  s.rows = std::move(rows);
  return s;
}

// A payload with the states first, then the I/O: so does its graph, whose step() then works
// pairwise.
inline Payload payload(std::string graph, std::vector<PayloadState> states,
                       std::vector<PayloadTensor> inputs, std::vector<PayloadTensor> outputs) {
  Payload p;
  p.method = "forward";
  p.graph = std::move(graph);
  p.context_key = "context";
  p.build_id = "v2.null";
  p.core_major = 2;
  p.core_minor = 40;
  p.soc_model = 57;
  p.htp_arch = 75;
  p.target = "SM8650";
  p.states = std::move(states);
  p.inputs = std::move(inputs);
  p.outputs = std::move(outputs);
  return p;
}

// ------------------------------------------------------------------------------------- contexts

struct TensorRow {
  std::string name;
  uint32_t type;
  std::vector<uint32_t> dims;
  TensorEncoding encoding;
};

inline void put(Writer& w, const std::vector<TensorRow>& rows, uint32_t first_id) {
  w.u32(rows.size());
  for (const TensorRow& row : rows) {
    w.text(row.name).u32(first_id++).u32(row.type).dims(row.dims);
    put(w, row.encoding);
  }
}

// Several buffers may have parts of one tensor: it is as long as the longest of them needs.
inline void share(std::vector<TensorRow>& rows, TensorRow row) {
  for (TensorRow& known : rows) {
    if (known.name != row.name) continue;
    known.dims[0] = std::max(known.dims[0], row.dims[0]);
    return;
  }
  rows.push_back(std::move(row));
}

// The graph that a payload asks for.
inline void put_graph(Writer& w, const Payload& p, null_qnn::Behaviour behaviour) {
  std::vector<TensorRow> inputs, outputs;
  for (const PayloadState& s : p.states) {
    const auto type = static_cast<uint32_t>(s.npu_type);
    const auto& dims = s.descriptor.dims;
    const std::vector<uint32_t> npu_dims = dims.empty() ? std::vector<uint32_t>{1} : dims;
    const TensorEncoding& encoding = s.descriptor.encoding;
    if (!s.input.empty()) inputs.push_back({s.input, type, npu_dims, encoding});
    if (s.binding == StateBinding::kDelta) {
      const PayloadRows& r = s.rows;
      const auto elements = static_cast<uint32_t>(r.offset) + r.outer * r.count * r.row;
      share(outputs, {s.output, type, {elements}, encoding});
      share(outputs, {r.positions, static_cast<uint32_t>(abi::DataType::kInt32), {r.count}, {}});
    } else if (!s.output.empty()) {
      outputs.push_back({s.output, type, npu_dims, encoding});
    }
  }
  for (const PayloadTensor& t : p.inputs) {
    if (t.tensor.empty()) continue;
    inputs.push_back({t.tensor, static_cast<uint32_t>(t.npu_type), t.npu_dims, t.encoding});
  }
  for (const PayloadTensor& t : p.outputs) {
    outputs.push_back({t.tensor, static_cast<uint32_t>(t.npu_type), t.npu_dims, t.encoding});
  }
  w.text(p.graph).u32(behaviour);
  put(w, inputs, 100);
  put(w, outputs, 500);
}

inline Bytes context(const std::vector<Payload>& payloads,
                     null_qnn::Behaviour behaviour = null_qnn::kStep) {
  Writer w;
  for (char c : std::string("NULLQNN1")) w.number(c);
  w.u32(57).u32(payloads.size());
  for (const Payload& p : payloads) put_graph(w, p, behaviour);
  return w.bytes;
}

// ------------------------------------------------------------------------------------- ExecuTorch

// Named data in memory, which keeps books of what is still lent.
class NamedData final : public et::NamedDataMap {
 public:
  std::map<std::string, Bytes> entries;
  mutable int lent = 0;

  et::Result<et::FreeableBuffer> get_data(std::string_view key) const override {
    const auto found = entries.find(std::string(key));
    if (found == entries.end()) return et::Error::NotFound;
    ++lent;
    return et::FreeableBuffer(
        found->second.data(), found->second.size(),
        [](void* count, void*, size_t) { --*static_cast<int*>(count); }, &lent);
  }
  et::Result<const et::TensorLayout> get_tensor_layout(std::string_view) const override {
    return et::Error::NotImplemented;
  }
  et::Error load_data_into(std::string_view, void*, size_t) const override {
    return et::Error::NotImplemented;
  }
  et::Result<uint32_t> get_num_keys() const override {
    return static_cast<uint32_t>(entries.size());
  }
  et::Result<const char*> get_key(uint32_t) const override { return et::Error::NotImplemented; }
};

// A program: its named data, and the payloads that point into it.
struct Program {
  NamedData data;
  std::vector<Payload> payloads;

  explicit Program(std::vector<Payload> all, null_qnn::Behaviour behaviour = null_qnn::kStep)
      : payloads(std::move(all)) {
    Bytes binary = context(payloads, behaviour);
    for (Payload& p : payloads) {
      p.context_size = binary.size();
      p.context_digest = Sha256::of(binary.data(), binary.size());
    }
    data.entries["context"] = std::move(binary);
  }
};

inline et::BackendInterface& backend() {
  et::runtime_init();
  auto* found = et::get_backend_class(kBackendId);
  if (found == nullptr) check::fail(__FILE__, __LINE__, "the backend is not registered");
  return *found;
}

// One load of one method: delegates of the same load share it.
struct Load {
  executorch::extension::MallocMemoryAllocator allocator;
  std::string method = "forward";
};

class Delegate {
 public:
  Delegate(const Program& program, size_t payload, Load& load, const std::string& token = "")
      : Delegate(program.data, pack(program.payloads[payload]), load, token) {}

  Delegate(const NamedData& data, Bytes blob, Load& load, const std::string& token = "",
           const std::string& libraries = ETQNN_NULL_QNN)
      : blob_(std::move(blob)) {
    et::BackendOptions<2> options;
    (void)options.set_option("qnn_libraries", libraries.c_str());
    if (!token.empty()) (void)options.set_option("state_store", token.c_str());
    const auto view = options.view();
    et::BackendInitContext context(&load.allocator, nullptr, load.method.c_str(), &data,
                                   {view.data(), view.size()});
    et::FreeableBuffer processed(blob_.data(), blob_.size(), nullptr);
    (void)take_failure();
    auto result = backend().init(context, &processed, {});
    error = result.error();
    failure = take_failure();
    if (result.ok()) handle_ = result.get();
  }
  ~Delegate() { close(); }
  Delegate(const Delegate&) = delete;
  Delegate& operator=(const Delegate&) = delete;

  void close() {
    if (handle_ != nullptr) backend().destroy(std::exchange(handle_, nullptr));
  }

  et::Error execute(std::vector<et::EValue*>& args) {
    et::BackendExecutionContext context;
    return backend().execute(context, handle_, {args.data(), args.size()});
  }

  et::Error error{};
  Status failure;

 private:
  Bytes blob_;
  et::DelegateHandle* handle_ = nullptr;
};

// A tensor and its memory, as an argument.
struct Arg {
  std::vector<executorch::aten::SizesType> sizes;
  std::vector<executorch::aten::DimOrderType> order;
  std::vector<executorch::aten::StridesType> strides;
  Bytes memory;
  executorch::aten::TensorImpl impl;
  et::EValue value;

  Arg(ScalarType type, std::vector<int32_t> dims, bool transposed = false)
      : sizes(dims.begin(), dims.end()),
        order(orders(dims.size(), transposed)),
        strides(stride_of(sizes, order)),
        memory(count(dims) * element_bytes(type)),
        impl(static_cast<executorch::aten::ScalarType>(type), static_cast<ssize_t>(dims.size()),
             sizes.data(), memory.data(), order.data(), strides.data()),
        value(executorch::aten::Tensor(&impl)) {}

  template <class T>
  T* as() {
    return reinterpret_cast<T*>(memory.data());
  }

 private:
  static size_t count(const std::vector<int32_t>& dims) {
    size_t n = 1;
    for (int32_t dim : dims) n *= static_cast<size_t>(dim);
    return n;
  }
  static std::vector<executorch::aten::DimOrderType> orders(size_t rank, bool transposed) {
    std::vector<executorch::aten::DimOrderType> all(rank);
    for (size_t i = 0; i < rank; ++i) {
      all[i] = static_cast<executorch::aten::DimOrderType>(transposed ? rank - 1 - i : i);
    }
    return all;
  }
  static std::vector<executorch::aten::StridesType> stride_of(
      const std::vector<executorch::aten::SizesType>& sizes,
      const std::vector<executorch::aten::DimOrderType>& order) {
    std::vector<executorch::aten::StridesType> strides(sizes.size());
    int32_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[order[i]] = stride;
      stride *= sizes[order[i]];
    }
    return strides;
  }
};

// ------------------------------------------------------------------------------------- the
// provider

template <class Function>
Function null_function(const char* name) {
  static void* const library = dlopen(ETQNN_NULL_QNN "/libQnnHtp.so", RTLD_NOW);
  return reinterpret_cast<Function>(dlsym(library, name));
}

inline const void* null_input(int i) {
  return null_function<const void* (*)(int)>("null_input")(i);
}
inline const void* null_output(int i) {
  return null_function<const void* (*)(int)>("null_output")(i);
}
enum Count { kBackends, kDevices, kContexts, kLoads, kExecutions, kCollisions };
inline int null_count(Count what) { return null_function<int (*)(int)>("null_count")(what); }

}  // namespace support
