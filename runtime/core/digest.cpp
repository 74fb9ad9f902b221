// SPDX-License-Identifier: BSD-3-Clause
#include "core/digest.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace executorch_qnn {
namespace {

// Slicing by eight: table[k][b] advances the CRC of byte b over k further zero bytes.
struct CrcTables {
  uint32_t table[8][256];
};

constexpr CrcTables make_crc_tables() {
  CrcTables t{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0u);
    t.table[0][byte] = crc;
  }
  for (int k = 1; k < 8; ++k) {
    for (int byte = 0; byte < 256; ++byte) {
      const uint32_t before = t.table[k - 1][byte];
      t.table[k][byte] = (before >> 8) ^ t.table[0][before & 0xFF];
    }
  }
  return t;
}

constexpr CrcTables kCrc = make_crc_tables();

// The register before and after; crc32() inverts it at both ends.
uint32_t crc_by_table(const uint8_t* p, size_t size, uint32_t crc) {
  for (; size >= 8; size -= 8, p += 8) {
    uint32_t low = 0, high = 0;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    low ^= crc;
    crc = kCrc.table[7][low & 0xFF] ^ kCrc.table[6][(low >> 8) & 0xFF] ^
          kCrc.table[5][(low >> 16) & 0xFF] ^ kCrc.table[4][low >> 24] ^
          kCrc.table[3][high & 0xFF] ^ kCrc.table[2][(high >> 8) & 0xFF] ^
          kCrc.table[1][(high >> 16) & 0xFF] ^ kCrc.table[0][high >> 24];
  }
  for (; size > 0; --size, ++p) crc = (crc >> 8) ^ kCrc.table[0][(crc ^ *p) & 0xFF];
  return crc;
}

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t rotate_right(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

constexpr uint32_t load_be32(const uint8_t* p) {
  return (uint32_t{p[0]} << 24) | (uint32_t{p[1]} << 16) | (uint32_t{p[2]} << 8) | p[3];
}

#if defined(__x86_64__)

__attribute__((target("sha,sse4.1,ssse3"))) void sha256_x86(uint32_t* state, const uint8_t* blocks,
                                                            size_t count) noexcept {
  const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  // The instructions want the eight words as (a b e f) and (c d g h), most significant first.
  __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);

  for (; count > 0; --count, blocks += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      const auto* from = reinterpret_cast<const __m128i*>(blocks + 16 * i);
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(from), byte_swap);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i));
      const __m128i wk = _mm_add_epi32(w[i & 3], k);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0E));
      if (i < 12) {
        const __m128i w1 = w[(i + 1) & 3], w2 = w[(i + 2) & 3], w3 = w[(i + 3) & 3];
        const __m128i part =
            _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w1), _mm_alignr_epi8(w3, w2, 4));
        w[i & 3] = _mm_sha256msg2_epu32(part, w3);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  dcba = _mm_blend_epi16(feba, dchg, 0xF0);
  hgfe = _mm_alignr_epi8(dchg, feba, 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), dcba);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), hgfe);
}

// x^n modulo the polynomial, bit-reversed and shifted as carry-less multiplication of reversed
// operands wants it.
constexpr uint64_t power_of_x(int n) {
  uint32_t value = 0x80000000u;
  for (int i = 0; i < n; ++i) value = (value >> 1) ^ ((value & 1) ? 0xEDB88320u : 0u);
  return uint64_t{value} << 1;
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i advance(__m128i block, __m128i powers) {
  return _mm_xor_si128(_mm_clmulepi64_si128(block, powers, 0x00),
                       _mm_clmulepi64_si128(block, powers, 0x11));
}

// Four 16-byte blocks, each moved on by 64 bytes at a time: a block stands for all the bytes that
// it has passed. At the end there are 16 bytes of the same remainder as the whole.
__attribute__((target("pclmul,sse4.1"))) uint32_t crc_fast(const uint8_t* p, size_t size,
                                                           uint32_t crc) {
  if (size < 128) return crc_by_table(p, size, crc);
  const auto load = [](const uint8_t* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  const __m128i by_64 = _mm_set_epi64x(static_cast<long long>(power_of_x(512 - 32)),
                                       static_cast<long long>(power_of_x(512 + 32)));
  const __m128i by_16 = _mm_set_epi64x(static_cast<long long>(power_of_x(128 - 32)),
                                       static_cast<long long>(power_of_x(128 + 32)));
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(p + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (p += 64, size -= 64; size >= 64; p += 64, size -= 64) {
    for (int i = 0; i < 4; ++i) x[i] = _mm_xor_si128(advance(x[i], by_64), load(p + 16 * i));
  }
  for (int i = 1; i < 4; ++i) x[i] = _mm_xor_si128(advance(x[i - 1], by_16), x[i]);
  uint8_t rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), x[3]);
  return crc_by_table(p, size, crc_by_table(rest, sizeof rest, 0));
}

bool has_crc_instructions() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

bool has_sha_instructions() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse4.1") || !__builtin_cpu_supports("ssse3")) return false;
  // Compilers older than GCC 14 do not know the name "sha": leaf 7, EBX bit 29.
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
  return (ebx >> 29) & 1;
}

constexpr internal::Sha256Compress kFast = sha256_x86;

#elif defined(__aarch64__) && defined(__linux__)

#if defined(__clang__)
#define ETQNN_SHA_TARGET __attribute__((target("sha2")))
#else
#define ETQNN_SHA_TARGET __attribute__((target("+crypto")))
#endif

ETQNN_SHA_TARGET void sha256_arm(uint32_t* state, const uint8_t* blocks, size_t count) noexcept {
  uint32x4_t abcd = vld1q_u32(state);
  uint32x4_t efgh = vld1q_u32(state + 4);
  for (; count > 0; --count, blocks += 64) {
    const uint32x4_t abcd_before = abcd;
    const uint32x4_t efgh_before = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * i)));
    }
    for (int i = 0; i < 16; ++i) {
      const uint32x4_t wk = vaddq_u32(w[i & 3], vld1q_u32(kRound + 4 * i));
      const uint32x4_t before = abcd;
      abcd = vsha256hq_u32(abcd, efgh, wk);
      efgh = vsha256h2q_u32(efgh, before, wk);
      if (i < 12) {
        w[i & 3] = vsha256su1q_u32(vsha256su0q_u32(w[i & 3], w[(i + 1) & 3]), w[(i + 2) & 3],
                                   w[(i + 3) & 3]);
      }
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

#if defined(__clang__)
#define ETQNN_CRC_TARGET __attribute__((target("crc")))
#else
#define ETQNN_CRC_TARGET __attribute__((target("+crc")))
#endif

ETQNN_CRC_TARGET uint32_t crc_fast(const uint8_t* p, size_t size, uint32_t crc) {
  for (; size >= 8; size -= 8, p += 8) {
    uint64_t word = 0;
    std::memcpy(&word, p, sizeof word);
    crc = __crc32d(crc, word);
  }
  for (; size > 0; --size, ++p) crc = __crc32b(crc, *p);
  return crc;
}

bool has_crc_instructions() {
  constexpr unsigned long kHwcapCrc32 = 1ul << 7;
  return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
}

bool has_sha_instructions() {
  constexpr unsigned long kHwcapSha2 = 1ul << 6;
  return (getauxval(AT_HWCAP) & kHwcapSha2) != 0;
}

constexpr internal::Sha256Compress kFast = sha256_arm;

#else

uint32_t crc_fast(const uint8_t* p, size_t size, uint32_t crc) {
  return crc_by_table(p, size, crc);
}
bool has_crc_instructions() { return false; }
bool has_sha_instructions() { return false; }
constexpr internal::Sha256Compress kFast = internal::sha256_portable;

#endif

}  // namespace

uint32_t internal::crc32_portable(const uint8_t* data, size_t size, uint32_t crc) noexcept {
  return ~crc_by_table(data, size, ~crc);
}

uint32_t crc32(const void* data, size_t size, uint32_t crc) noexcept {
  static const bool fast = has_crc_instructions();
  const auto* p = static_cast<const uint8_t*>(data);
  return ~(fast ? crc_fast(p, size, ~crc) : crc_by_table(p, size, ~crc));
}

void internal::sha256_portable(uint32_t* state, const uint8_t* blocks, size_t count) noexcept {
  for (; count > 0; --count, blocks += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_be32(blocks + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      const uint32_t s0 = rotate_right(x, 7) ^ rotate_right(x, 18) ^ (x >> 3);
      const uint32_t s1 = rotate_right(y, 17) ^ rotate_right(y, 19) ^ (y >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t s[8];
    std::memcpy(s, state, sizeof s);
    // The working variables a..h move down one place per round: the index moves instead.
#pragma GCC unroll 8
    for (int i = 0; i < 64; ++i) {
      const auto at = [&s, i](int k) -> uint32_t& { return s[(k + 64 - i) & 7]; };
      const uint32_t a = at(0), e = at(4);
      const uint32_t sum1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
      const uint32_t choose = (e & at(5)) ^ (~e & at(6));
      const uint32_t t1 = at(7) + sum1 + choose + kRound[i] + w[i];
      const uint32_t sum0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
      const uint32_t majority = (a & at(1)) ^ (a & at(2)) ^ (at(1) & at(2));
      at(3) += t1;
      at(7) = t1 + sum0 + majority;
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

internal::Sha256Compress internal::sha256_best() noexcept {
  static const Sha256Compress best = has_sha_instructions() ? kFast : sha256_portable;
  return best;
}

Sha256::Sha256() noexcept
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::update(const void* data, size_t size) noexcept {
  if (size == 0) return;
  const auto compress = internal::sha256_best();
  const auto* p = static_cast<const uint8_t*>(data);
  const size_t filled = length_ % block_.size();
  length_ += size;
  if (filled > 0) {
    const size_t taken = size < block_.size() - filled ? size : block_.size() - filled;
    std::memcpy(block_.data() + filled, p, taken);
    if (filled + taken < block_.size()) return;
    compress(state_.data(), block_.data(), 1);
    p += taken;
    size -= taken;
  }
  compress(state_.data(), p, size / block_.size());
  std::memcpy(block_.data(), p + size / block_.size() * block_.size(), size % block_.size());
}

Digest Sha256::finish() noexcept {
  const uint64_t bits = length_ * 8;
  constexpr uint8_t kPadding[64] = {0x80};
  const size_t filled = length_ % block_.size();
  update(kPadding, filled < 56 ? 56 - filled : 120 - filled);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length, sizeof length);
  Digest digest{};
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest Sha256::of(const void* data, size_t size) noexcept {
  Sha256 hash;
  hash.update(data, size);
  return hash.finish();
}

std::string to_hex(const Digest& digest) {
  std::string text;
  for (uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace executorch_qnn
