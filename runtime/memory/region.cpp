// SPDX-License-Identifier: BSD-3-Clause
#include "memory/region.h"

#include <cstdlib>
#include <utility>

namespace executorch_qnn {

Result<Region> Region::allocate(size_t bytes) {
  // Whole alignment units, so that a vector loop over the tail stays inside.
  if (bytes > SIZE_MAX - kAlignment) return Status(ErrorKind::kRuntime, "region size overflows");
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* address = nullptr;
  if (posix_memalign(&address, kAlignment, rounded == 0 ? kAlignment : rounded) != 0) {
    return Status(ErrorKind::kRuntime, "no memory for " + std::to_string(bytes) + " bytes");
  }
  return Region(address, bytes);
}

Region::Region(Region&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  return *this;
}

Region::~Region() { std::free(address_); }

}  // namespace executorch_qnn
