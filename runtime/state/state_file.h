// SPDX-License-Identifier: BSD-3-Clause
// Saved state: all mutable buffers of a session in one file.
//
// Little endian, packed:
//   char[8] "ETQNNSTA"; u16 major 1; u16 minor 0; u32 CRC-32 of everything from byte 16 on;
//   u64 size of the file; u8[32] SHA-256 of the program; u32 number of buffers, and for each:
//   str name; i32 host type; u32 stored type; u32 rank; u32 dims[]; u32 quantized; f32 scale;
//   i32 offset; u64 bytes; the bytes as stored.       (str = u32 length, UTF-8)
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

// The file appears complete or not at all.
ETQNN_API Status write_state_file(const std::string& path, const Digest& program,
                                  const std::vector<StateRecord>& records);

// Refuses a damaged file, one of another program and one whose buffers are not exactly those of
// `records`; memory is only written once everything has been checked.
ETQNN_API Status read_state_file(const std::string& path, const Digest& program,
                                 const std::vector<StateRecord>& records);

}  // namespace executorch_qnn
