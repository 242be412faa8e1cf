// Shared libraries, looked into before the dynamic linker sees them: what they need, and for which machine they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace untorch {

struct ElfSymbol {
  std::string name;
  bool weak;
  std::uint64_t file_offset;  // of the name
};

// The parts of a 64-bit little-endian ELF shared library that decide whether it can run here. Every offset in the file
// is checked; a damaged or foreign file throws kInvalidFile or kUnsupported, naming `name`.
class ElfLibrary {
 public:
  ElfLibrary(std::span<const std::byte> bytes, std::string name);

  const std::vector<std::string>& needed() const noexcept { return needed_; }
  const std::vector<ElfSymbol>& undefined() const noexcept { return undefined_; }
  // Names of libtorch's libraries among needed(): libtorch.so, libtorch_cpu.so, libtorch_cuda.so, libc10.so …
  bool needs_libtorch() const noexcept;

  // Rewrites, in `copy` (the same bytes, writeable), the needed libtorch libraries to `soname`: one of the old names is
  // overwritten by it in the string table and the other entries are pointed to the same place, so that no byte moves.
  void rebind_libtorch(std::span<std::byte> copy, const std::string& soname) const;
  // Renames, in `copy`, an undefined symbol; both names have the same length. Undefined symbols are in no hash table,
  // so nothing else has to change.
  static void rename(std::span<std::byte> copy, const ElfSymbol& symbol, const std::string& name);
  // Offset of a program header that asks for an executable stack, 0 when there is none. Weights that were assembled
  // into a library ask for one by accident, and newer C libraries then refuse to open it.
  std::uint64_t executable_stack() const noexcept { return executable_stack_; }
  // Takes that wish out of `copy`.
  void clear_executable_stack(std::span<std::byte> copy) const;

 private:
  struct NeededEntry {
    std::uint64_t entry_offset;   // file offset of the dynamic entry
    std::uint64_t string_offset;  // of its name, in the string table
    std::string name;
  };
  std::string name_;
  std::uint64_t strings_file_offset_ = 0;
  std::vector<NeededEntry> needed_entries_;
  std::vector<std::string> needed_;
  std::vector<ElfSymbol> undefined_;
  std::uint64_t executable_stack_ = 0;
};

// e_machine codes by name, for messages: "x86_64", "aarch64", "machine 243".
std::string elf_machine_name(std::uint16_t machine);

}  // namespace untorch
