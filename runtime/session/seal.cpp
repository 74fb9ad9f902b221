// SPDX-License-Identifier: BSD-3-Clause
#include "session/seal.h"

#include <cstring>

#include "core/byte_reader.h"
#include "core/file.h"

namespace executorch_qnn {
namespace {

constexpr char kMagic[8] = {'E', 'T', 'Q', 'N', 'N', 'S', 'E', 'A'};
constexpr size_t kSealBytes = 64;

}  // namespace

Result<std::optional<Digest>> check_seal(const void* file, size_t size, const std::string& path) {
  if (size < kSealBytes) return std::optional<Digest>();
  const auto* content = static_cast<const uint8_t*>(file);
  const uint8_t* start = content + size - kSealBytes;
  ByteReader seal(start, kSealBytes);
  if (std::memcmp(seal.bytes(sizeof kMagic), kMagic, sizeof kMagic) != 0) {
    return std::optional<Digest>();
  }
  const auto version = seal.number<uint32_t>();
  const auto crc = seal.number<uint32_t>();
  const auto content_bytes = seal.number<uint64_t>();
  Digest stated;
  std::memcpy(stated.data(), seal.bytes(stated.size()), stated.size());
  const bool intact = seal.number<uint32_t>() == crc32(start, kSealBytes - 8);
  if (intact && version != 1) {
    return Status(
        ErrorKind::kIncompatible,
        path + " has a seal of version " + std::to_string(version) + "; upgrade executorch-qnn");
  }
  if (!intact || content_bytes != size - kSealBytes || crc32(content, content_bytes) != crc) {
    return Status(ErrorKind::kIncompatible,
                  path + " is damaged: its content is not what its seal states");
  }
  return std::optional<Digest>(stated);
}

Result<Digest> program_digest(const std::string& path) {
  ETQNN_ASSIGN(const MappedFile file, MappedFile::open(path));
  ETQNN_ASSIGN(const std::optional<Digest> sealed, check_seal(file.data(), file.size(), path));
  return sealed ? *sealed : Sha256::of(file.data(), file.size());
}

}  // namespace executorch_qnn
