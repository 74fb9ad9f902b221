// SPDX-License-Identifier: BSD-3-Clause
// Saved state: all mutable buffers of a session in one file.
//
// Little endian, packed:
//   char[8] "ETQNNSTA"; u16 major 1; u16 minor 0; u32 CRC-32 of every other byte of the file;
//   u64 size of the file; u8[32] SHA-256 of the program; u32 number of buffers, and for each:
//   str name; i32 host type; u32 stored type; u32 rank; u32 dims[]; u32 quantized; f32 scale;
//   i32 offset; u64 bytes; the bytes as stored.       (str = u32 length, UTF-8)
//
// There is no part of it that another version may read: a state is whole or it is nothing.
#pragma once

#include <string>
#include <vector>

#include "core/api.h"
#include "core/digest.h"
#include "core/status.h"
#include "state/descriptor.h"

namespace executorch_qnn {

// A buffer and where its descriptor.stored_bytes() bytes are.
struct StateRecord {
  StateDescriptor descriptor;
  void* data = nullptr;
};

// The file appears complete, on the disk and under its name, or not at all.
ETQNN_API Status write_state_file(const std::string& path, const Digest& program,
                                  const std::vector<StateRecord>& records);

// Refuses, with kState, a damaged file, one of another version or program and one whose buffers are
// not exactly those of `records`. Memory is only written once everything has been checked.
ETQNN_API Status read_state_file(const std::string& path, const Digest& program,
                                 const std::vector<StateRecord>& records);

// What a file says about itself.
struct StateFileInfo {
  uint16_t major = 0, minor = 0;
  Digest program{};
  uint64_t bytes = 0;
  std::vector<StateDescriptor> buffers;
};

// Refuses the same, as far as that can be told without a program.
ETQNN_API Result<StateFileInfo> inspect_state_file(const std::string& path);

}  // namespace executorch_qnn
