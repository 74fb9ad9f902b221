// SPDX-License-Identifier: BSD-3-Clause
#include "session/seal.h"

#include <cstring>

#include "core/byte_reader.h"

namespace executorch_qnn {
namespace {

constexpr char kMagic[8] = {'E', 'T', 'Q', 'N', 'N', 'S', 'E', 'A'};
constexpr size_t kSealBytes = 64;

}  // namespace

Result<std::optional<Digest>> check_seal(const void* file, size_t size, const std::string& path) {
  if (size < kSealBytes) return std::optional<Digest>();
  ByteReader seal(static_cast<const uint8_t*>(file) + size - kSealBytes, kSealBytes);
  if (std::memcmp(seal.bytes(sizeof kMagic), kMagic, sizeof kMagic) != 0) {
    return std::optional<Digest>();
  }
  const auto version = seal.number<uint32_t>();
  seal.number<uint32_t>();
  const auto sealed_bytes = seal.number<uint64_t>();
  Digest stated;
  std::memcpy(stated.data(), seal.bytes(stated.size()), stated.size());
  if (version != 1 || sealed_bytes != size - kSealBytes ||
      Sha256::of(file, sealed_bytes) != stated) {
    return Status(ErrorKind::kIncompatible,
                  path + " is damaged: its content is not what its seal states");
  }
  return std::optional<Digest>(stated);
}

}  // namespace executorch_qnn
