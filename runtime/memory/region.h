// SPDX-License-Identifier: BSD-3-Clause
// Memory that a QNN graph reads or writes directly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/api.h"
#include "core/status.h"

namespace executorch_qnn {

// Where a region comes from.
enum class RegionKind : uint8_t { kHeap };

// Owned memory, aligned for the vector units of both sides and never moved while it lives.
class ETQNN_API Region {
 public:
  static constexpr size_t kAlignment = 128;

  // The bytes are not initialised: whoever fills a region knows with what.
  static Result<Region> allocate(size_t bytes);
  Region() = default;
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  ~Region();

  void* address() const { return address_; }
  size_t size() const { return size_; }
  RegionKind kind() const { return RegionKind::kHeap; }

 private:
  Region(void* address, size_t size) : address_(address), size_(size) {}
  void* address_ = nullptr;
  size_t size_ = 0;
};

}  // namespace executorch_qnn
