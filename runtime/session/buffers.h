// SPDX-License-Identifier: BSD-3-Clause
// The mutable buffers of a program by name, whoever keeps them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/digest.h"
#include "core/status.h"
#include "state/state_file.h"
#include "state/store.h"

namespace executorch_qnn {

struct StateInfo {
  StateDescriptor descriptor;
  std::string binding;  // of the slot, see to_string(StateBinding); or "host"
  const void* address = nullptr;
  // What QNN was given for the graph's input and output; null if it has none.
  const void* input_address = nullptr;
  const void* output_address = nullptr;
};

// Those of a store, and those that ExecuTorch keeps in its planned memory ("host"), as far as a
// program names them. Calls wait for executions on the store; the caller sees to it that none
// works on the planned memory.
class Buffers {
 public:
  explicit Buffers(std::shared_ptr<StateStore> store) : store_(std::move(store)) {}

  const std::shared_ptr<StateStore>& store() const { return store_; }

  // Those of the store alone.
  Result<std::shared_ptr<StateStore>> fork_store() const;
  void reset_store();

  // A buffer in planned memory. kState if one of its name lies elsewhere.
  Status add_host(const StateDescriptor& descriptor, void* address);
  bool has_host() const { return !host_.empty(); }

  // Those of the store by name, then those of the host.
  std::vector<StateInfo> list() const;
  Result<StateDescriptor> describe(const std::string& name) const;
  // Values in the buffer's own type (descriptor.host_type), dense, descriptor.host_bytes() of them.
  Status read(const std::string& name, void* values, size_t bytes) const;
  Status write(const std::string& name, const void* values, size_t bytes);
  // The bytes of all buffers, to go back to.
  std::vector<std::vector<uint8_t>> copy() const;
  void restore(const std::vector<std::vector<uint8_t>>& copy);
  // `program` is what the file is good for.
  Status save(const std::string& path, const Digest& program) const;
  Status load(const std::string& path, const Digest& program);

 private:
  struct Host {
    StateDescriptor descriptor;
    void* address = nullptr;
  };
  Result<const Host*> host_buffer(const std::string& name) const;
  std::vector<StateRecord> records() const;

  std::shared_ptr<StateStore> store_;
  std::map<std::string, Host> host_;
};

}  // namespace executorch_qnn
