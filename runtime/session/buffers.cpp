// SPDX-License-Identifier: BSD-3-Clause
#include "session/buffers.h"

#include <cstring>
#include <mutex>

namespace executorch_qnn {
namespace {}  // namespace

Status Buffers::add_host(const StateDescriptor& descriptor, void* address) {
  const auto [known, inserted] = host_.emplace(descriptor.name, Host{descriptor, address});
  if (inserted || known->second.address == address) return {};
  return {ErrorKind::kState, "buffer " + descriptor.name +
                                 " is kept by the host, and another method has a copy of its own: "
                                 "lower the program with share_mutable_buffers=True"};
}

Result<const Buffers::Host*> Buffers::host_buffer(const std::string& name) const {
  const auto found = host_.find(name);
  if (found != host_.end()) return &found->second;
  return Status(ErrorKind::kState, "the program has no mutable buffer " + name);
}

Result<std::shared_ptr<StateStore>> Buffers::fork_store() const {
  std::lock_guard<std::mutex> lock(store_->mutex());
  return store_->fork();
}

void Buffers::reset_store() {
  std::lock_guard<std::mutex> lock(store_->mutex());
  store_->reset();
}

std::vector<StateInfo> Buffers::list() const {
  std::lock_guard<std::mutex> lock(store_->mutex());
  std::vector<StateInfo> all;
  for (const auto& entry : store_->slots()) {
    const StateSlot& slot = *entry.second;
    all.push_back({slot.descriptor(), to_string(slot.binding()), slot.front(), slot.bound_input,
                   slot.bound_output});
  }
  for (const auto& entry : host_) {
    all.push_back({entry.second.descriptor, "host", entry.second.address, nullptr, nullptr});
  }
  return all;
}

Result<StateDescriptor> Buffers::describe(const std::string& name) const {
  std::lock_guard<std::mutex> lock(store_->mutex());
  if (const StateSlot* slot = store_->find(name)) return slot->descriptor();
  ETQNN_ASSIGN(const Host* host, host_buffer(name));
  return host->descriptor;
}

Status Buffers::read(const std::string& name, void* values, size_t bytes) const {
  std::lock_guard<std::mutex> lock(store_->mutex());
  if (const StateSlot* slot = store_->find(name)) return store_->read(*slot, values, bytes);
  ETQNN_ASSIGN(const Host* host, host_buffer(name));
  ETQNN_TRY(host->descriptor.check_host_bytes(bytes));
  std::memcpy(values, host->address, bytes);
  return {};
}

Status Buffers::write(const std::string& name, const void* values, size_t bytes) {
  std::lock_guard<std::mutex> lock(store_->mutex());
  if (StateSlot* slot = store_->find(name)) return store_->write(*slot, values, bytes);
  ETQNN_ASSIGN(const Host* host, host_buffer(name));
  ETQNN_TRY(host->descriptor.check_host_bytes(bytes));
  std::memcpy(host->address, values, bytes);
  return {};
}

std::vector<StateRecord> Buffers::records() const {
  std::vector<StateRecord> records;
  for (const auto& entry : store_->slots()) {
    records.push_back({entry.second->descriptor(), entry.second->front()});
  }
  for (const auto& entry : host_)
    records.push_back({entry.second.descriptor, entry.second.address});
  return records;
}

std::vector<std::vector<uint8_t>> Buffers::copy() const {
  std::lock_guard<std::mutex> lock(store_->mutex());
  std::vector<std::vector<uint8_t>> bytes;
  for (const StateRecord& record : records()) {
    const auto* from = static_cast<const uint8_t*>(record.data);
    bytes.emplace_back(from, from + record.descriptor.stored_bytes());
  }
  return bytes;
}

void Buffers::restore(const std::vector<std::vector<uint8_t>>& copy) {
  std::lock_guard<std::mutex> lock(store_->mutex());
  const std::vector<StateRecord> to = records();
  for (size_t i = 0; i < to.size(); ++i) std::memcpy(to[i].data, copy[i].data(), copy[i].size());
}

Status Buffers::save(const std::string& path, const Digest& program) const {
  std::lock_guard<std::mutex> lock(store_->mutex());
  return write_state_file(path, program, records());
}

Status Buffers::load(const std::string& path, const Digest& program) {
  std::lock_guard<std::mutex> lock(store_->mutex());
  return read_state_file(path, program, records());
}

}  // namespace executorch_qnn
