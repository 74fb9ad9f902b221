// SPDX-License-Identifier: BSD-3-Clause
// Running a program: its methods, loaded once, and the mutable buffers they share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/api.h"
#include "core/status.h"
#include "session/buffers.h"
#include "session/program.h"
#include "state/store.h"

namespace executorch_qnn {

// A dense tensor in the caller's memory.
struct TensorView {
  const void* data = nullptr;
  size_t bytes = 0;
  int8_t type = 0;  // number of c10::ScalarType
  std::vector<int32_t> dims;
};

// An argument of a method; monostate is None.
using InputValue = std::variant<std::monostate, TensorView, int64_t, double, bool>;

// A result that is no tensor; monostate stands for None and for tensors.
using OutputScalar = std::variant<std::monostate, int64_t, double, bool, std::string>;

// One result. For a tensor the caller gives `data` and `capacity`, at least the bytes that the
// method's description says, or null if it does not want the values; the rest is filled in.
struct OutputValue {
  void* data = nullptr;
  size_t capacity = 0;
  int8_t type = 0;
  std::vector<int32_t> dims;
  OutputScalar scalar;
};

// Owns its mutable buffers: those of the delegates, and those that ExecuTorch keeps in its planned
// memory ("host"), as far as the program names them. Calls on one session wait for each other;
// sessions of one file share its context and weights and may run in parallel. Sessions and their
// program may go in any order.
class ETQNN_API Session {
 public:
  // Loads all methods. Buffers have their initial values.
  static Result<std::shared_ptr<Session>> create(std::shared_ptr<const ProgramFile> program);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const std::shared_ptr<const ProgramFile>& program() const { return program_; }

  // `outputs` must have one entry per output of the method. What does not fit, an input (kState) or
  // the room for an output (kInvalid), is refused before anything runs. A method that fails on its
  // way says so if it may have changed buffers.
  Status run(const std::string& method, const std::vector<InputValue>& inputs,
             std::vector<OutputValue>& outputs);

  std::vector<StateInfo> state() const;
  // Values in the buffer's own type (descriptor.host_type), dense, descriptor.host_bytes() of them.
  Status read_state(const std::string& name, void* values, size_t bytes) const;
  Status write_state(const std::string& name, const void* values, size_t bytes);
  Result<StateDescriptor> describe_state(const std::string& name) const;
  Status reset_state();
  Status save_state(const std::string& path) const;
  Status load_state(const std::string& path);
  // A session of its own with a copy of this one's state.
  Result<std::shared_ptr<Session>> fork() const;

  // Bytes of delegate-owned state that were copied so far, by anything.
  uint64_t state_bytes_copied() const;

 private:
  struct Parts;
  explicit Session(std::shared_ptr<const ProgramFile> program);
  Status load(std::shared_ptr<StateStore> store);

  std::shared_ptr<const ProgramFile> program_;
  std::unique_ptr<Parts> parts_;
};

}  // namespace executorch_qnn
