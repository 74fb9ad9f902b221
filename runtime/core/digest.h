// SPDX-License-Identifier: BSD-3-Clause
//
// Checksums: CRC-32 guards small records (payload, state file), SHA-256 names and guards contexts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/api.h"

namespace executorch_qnn {

// CRC-32 with zlib's polynomial. `crc` is the value returned for the bytes before, 0 at the start.
uint32_t crc32(const void* data, size_t size, uint32_t crc = 0) noexcept;

using Digest = std::array<uint8_t, 32>;

// In hexadecimal digits.
ETQNN_API std::string to_hex(const Digest& digest);

// SHA-256. Uses the processor's SHA instructions where it has them: a context of some hundred MB is
// then hashed faster than QNN loads it, so that every load can afford the check.
class Sha256 {
 public:
  Sha256() noexcept;
  void update(const void* data, size_t size) noexcept;
  // The digest of everything updated so far. The object must not be used afterwards.
  Digest finish() noexcept;

  static Digest of(const void* data, size_t size) noexcept;

 private:
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> block_{};
  uint64_t length_ = 0;
};

namespace internal {
// What crc32() does where the processor has no instructions for it. Exposed, like the two below, so
// that tests can compare.
uint32_t crc32_portable(const uint8_t* data, size_t size, uint32_t crc = 0) noexcept;
// Compresses `count` 64-byte blocks into `state`.
void sha256_portable(uint32_t* state, const uint8_t* blocks, size_t count) noexcept;
// The fastest compression function of this processor; may be `sha256_portable`.
using Sha256Compress = void (*)(uint32_t* state, const uint8_t* blocks, size_t count) noexcept;
Sha256Compress sha256_best() noexcept;
}  // namespace internal

}  // namespace executorch_qnn
