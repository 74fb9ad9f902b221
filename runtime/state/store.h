// SPDX-License-Identifier: BSD-3-Clause
// The mutable buffers of one session: one slot of memory per fully qualified name, whichever
// graphs, partitions and methods use it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/status.h"
#include "memory/region.h"
#include "state/descriptor.h"

namespace executorch_qnn {

// How a graph uses a slot. The numbers are those of the payload.
enum class StateBinding : uint32_t {
  kInPlace = 0,       // reads and writes one address
  kDoubleBuffer = 1,  // reads one region and writes another; the two change places after a success
  kReadOnly = 2,
  kWriteOnly = 3,
  kDelta = 4,       // puts out rows and their positions; the rows are then placed into the slot
  kAccumulate = 5,  // puts out what is to be added to the slot, which is wider than the graph
  kCopied = 6,      // reads and writes copies in the graph's own type
};

ETQNN_API const char* to_string(StateBinding binding);

// The stored bytes that a slot starts from. `owner` keeps them alive; without data they are zeros.
struct InitialValue {
  std::shared_ptr<const void> owner;
  const void* data = nullptr;
};

// One buffer's memory. The address of a slot never changes while its store lives; those of its
// regions change only by swap(), with which StateStore::epoch() moves.
class ETQNN_API StateSlot {
 public:
  const StateDescriptor& descriptor() const { return descriptor_; }
  StateBinding binding() const { return binding_; }  // the strongest of its users
  // Where graphs read the buffer.
  void* front() const { return front_.address(); }
  // Where a graph with `binding` writes it.
  void* target(StateBinding binding) const {
    return binding == StateBinding::kDoubleBuffer ? back_.address() : front_.address();
  }

  // The addresses that were last given to QNN, for reports and tests; null if there is none.
  const void* bound_input = nullptr;
  const void* bound_output = nullptr;

 private:
  friend class StateStore;
  StateDescriptor descriptor_;
  InitialValue initial_;
  StateBinding binding_ = StateBinding::kReadOnly;
  Region front_;
  Region back_;  // empty unless somebody double-buffers
};

class ETQNN_API StateStore {
 public:
  StateStore() = default;
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // Makes the slot and fills it with `initial`, or returns the one of that name, untouched, if the
  // descriptors agree. An error names the buffer and both descriptors. Takes the mutex.
  Result<StateSlot*> bind(const StateDescriptor& descriptor, StateBinding binding,
                          const InitialValue& initial);

  // Serialises executions, and everything below, on this store: they expect it to be held.
  std::mutex& mutex() { return mutex_; }

  const std::map<std::string, std::unique_ptr<StateSlot>>& slots() const { return slots_; }
  StateSlot* find(const std::string& name) const;

  // Exchanges the regions of a double-buffered slot: no byte moves.
  void swap(StateSlot& slot) {
    std::swap(slot.front_, slot.back_);
    ++epoch_;
  }
  // Changes whenever an address of some slot does.
  uint64_t epoch() const { return epoch_; }

  // Back to the initial values.
  void reset();
  // A new store with the same slots and bytes; initial values are shared.
  Result<std::shared_ptr<StateStore>> fork();

  // The host's view: values in `host_type`, dense. `size` must be descriptor.host_bytes().
  Status read(const StateSlot& slot, void* host, size_t size);
  Status write(StateSlot& slot, const void* host, size_t size);

  // Bytes of state that anything here copied so far. An execution adds none.
  uint64_t bytes_copied() const { return bytes_copied_; }

 private:
  void fill(StateSlot& slot);

  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<StateSlot>> slots_;
  uint64_t epoch_ = 0;
  uint64_t bytes_copied_ = 0;
};

}  // namespace executorch_qnn
