// SHA-256 (FIPS 180-4), by the CPU's SHA instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace untorch {

using Sha256Digest = std::array<std::byte, 32>;

// How blocks of 64 bytes are compressed. kInstructions: SHA-NI on x86-64, the SHA-2 instructions of Armv8.
enum class Sha256Path { kPortable, kInstructions };
bool has_sha256_instructions() noexcept;

class Sha256 {
 public:
  // kInstructions only where has_sha256_instructions().
  explicit Sha256(Sha256Path path) noexcept;
  Sha256() noexcept : Sha256(has_sha256_instructions() ? Sha256Path::kInstructions : Sha256Path::kPortable) {}

  void update(std::span<const std::byte> bytes) noexcept;
  // Once; nothing may follow.
  Sha256Digest finish() noexcept;

 private:
  using Compress = void (*)(std::uint32_t* state, const std::byte* data, std::size_t blocks);
  Compress compress_;
  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, 64> pending_;
  std::uint64_t length_ = 0;
};

Sha256Digest sha256(std::span<const std::byte> bytes) noexcept;

// 64 lower-case hexadecimal digits, and back; false for anything else.
std::string to_hex(const Sha256Digest& digest);
bool from_hex(std::string_view text, Sha256Digest& digest) noexcept;

}  // namespace untorch
