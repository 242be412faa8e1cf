// Every linker writes the table with 32-bit offsets; other forms are refused.
#include "model/elf_unwind.h"

#include <map>

namespace untorch {
namespace {

constexpr std::uint8_t kOffset32 = 0x1b;       // DW_EH_PE_pcrel | DW_EH_PE_sdata4
constexpr std::uint8_t kOffset64 = 0x1c;       // DW_EH_PE_pcrel | DW_EH_PE_sdata8
constexpr std::uint8_t kCount32 = 0x03;        // DW_EH_PE_udata4
constexpr std::uint8_t kTableOffset32 = 0x3b;  // DW_EH_PE_datarel | DW_EH_PE_sdata4
constexpr std::uint8_t kIndirect = 0x80, kOmitted = 0xff;

class Unwind {
 public:
  explicit Unwind(const ElfImage& elf) : elf_(elf) {}

  void check_table(const Elf64_Phdr& segment) {
    const std::uint64_t base = segment.p_vaddr;
    agrees(segment.p_memsz >= 12 && byte(base) == 1 && byte(base + 1) == kOffset32 && byte(base + 2) == kCount32 &&
           byte(base + 3) == kTableOffset32);
    agrees(elf_.find(base + 4 + signed32(base + 4), 4, PF_R, true) != nullptr);
    const std::uint64_t count = word(base + 8);
    agrees(count <= (segment.p_memsz - 12) / 8);
    std::uint64_t end = 0;  // of the function before
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t entry = base + 12 + 8 * i, function = base + signed32(entry);
      agrees(function >= end);
      end = function + check_description(base + signed32(entry + 4), function);
    }
  }

 private:
  // What descriptions have in common.
  struct Common {
    bool sized = false;
    std::uint8_t pointers = 0, handlers = kOmitted;
  };

  void agrees(bool condition) const { elf_.require(condition, "its unwind tables are damaged"); }
  std::uint8_t byte(std::uint64_t address) const { return elf_.value_at<std::uint8_t>(address, "an unwind table"); }
  std::uint32_t word(std::uint64_t address) const { return elf_.value_at<std::uint32_t>(address, "an unwind table"); }
  // Sign-extended, so that adding it to an address goes either way.
  std::uint64_t signed32(std::uint64_t address) const {
    return static_cast<std::uint64_t>(std::int64_t{elf_.value_at<std::int32_t>(address, "an unwind table")});
  }

  std::uint64_t leb128(std::uint64_t& at, std::uint64_t end) const {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      agrees(at < end && shift < 63);
      const std::uint8_t part = byte(at++);
      value |= std::uint64_t{part & 0x7fu} << shift;
      if ((part & 0x80u) == 0) return value;
    }
  }

  // The length of a pointer of that encoding.
  unsigned size_of(std::uint8_t encoding) const {
    agrees((encoding & ~kIndirect) == kOffset32 || (encoding & ~kIndirect) == kOffset64);
    return (encoding & 0x0fu) == (kOffset64 & 0x0fu) ? 8 : 4;
  }
  std::uint64_t pointer(std::uint64_t at, unsigned size) const {
    return at + (size == 8 ? elf_.value_at<std::uint64_t>(at, "an unwind table") : signed32(at));
  }

  // The end of a record; its length is in front of it.
  std::uint64_t record_end(std::uint64_t address) const {
    const std::uint32_t length = word(address);
    agrees(length >= 8 && length < 0xfffffff0u && elf_.find(address, 4ull + length, PF_R, true) != nullptr);
    return address + 4 + length;
  }

  const Common& common(std::uint64_t address) {
    const auto [it, is_new] = commons_.try_emplace(address);
    Common& made = it->second;
    if (!is_new) return made;
    const std::uint64_t end = record_end(address);
    agrees(word(address + 4) == 0);
    const std::uint8_t version = byte(address + 8);
    agrees(version == 1 || version == 3);
    std::string augmentation;
    std::uint64_t at = address + 9;
    for (char c; (c = static_cast<char>(byte(at++))) != '\0';) {
      agrees(at < end && augmentation.size() < 8);
      augmentation += c;
    }
    (void)leb128(at, end);  // code alignment
    (void)leb128(at, end);  // data alignment
    if (version == 1) {     // the register of the return address
      ++at;
    } else {
      (void)leb128(at, end);
    }
    if (augmentation.empty()) {
      agrees(at <= end);
      made.pointers = kOmitted;  // absolute addresses, which position-independent code does not have
      return made;
    }
    agrees(augmentation[0] == 'z');
    made.sized = true;
    const std::uint64_t length = leb128(at, end);
    agrees(length <= end - at);
    const std::uint64_t augmentation_end = at + length;
    for (const char c : augmentation.substr(1)) {
      if (c == 'S' || c == 'B') continue;  // of a signal's frame; signed return addresses
      agrees(at < augmentation_end && (c == 'R' || c == 'L' || c == 'P'));
      const std::uint8_t encoding = byte(at++);
      if (c == 'R') made.pointers = encoding;
      if (c == 'L') made.handlers = encoding;
      if (c == 'P') {  // the function that looks for handlers
        const std::uint64_t target = pointer(at, size_of(encoding));
        agrees((encoding & kIndirect) != 0 ? elf_.find(target, 8, PF_R, false) != nullptr : elf_.executable(target));
        at += size_of(encoding);
      }
    }
    agrees(at == augmentation_end);
    return made;
  }

  // Returns the length of the function.
  std::uint64_t check_description(std::uint64_t address, std::uint64_t function) {
    const std::uint64_t end = record_end(address);
    const std::uint32_t back = word(address + 4);
    agrees(back != 0);
    const Common& shared = common(address + 4 - back);
    const unsigned size = size_of(shared.pointers);
    std::uint64_t at = address + 8;
    agrees(2ull * size <= end - at && pointer(at, size) == function);
    const std::uint64_t length = size == 8 ? elf_.value_at<std::uint64_t>(at + 8, "an unwind table") : word(at + size);
    agrees(elf_.find(function, length, PF_X, true) != nullptr);
    at += 2ull * size;
    if (!shared.sized) return length;
    const std::uint64_t augmentation = leb128(at, end);
    agrees(augmentation <= end - at);
    if (shared.handlers == kOmitted) return length;
    const unsigned handler_size = size_of(shared.handlers);
    agrees(augmentation >= handler_size);
    const std::uint64_t target = pointer(at, handler_size);
    agrees(target == at || elf_.find(target, 4, PF_R, true) != nullptr);  // an offset of zero: there are none
    return length;
  }

  const ElfImage& elf_;
  std::map<std::uint64_t, Common> commons_;
};

}  // namespace

void check_unwind_tables(const ElfImage& elf) {
  if (const Elf64_Phdr* segment = elf.segment(PT_GNU_EH_FRAME)) Unwind(elf).check_table(*segment);
}

}  // namespace untorch
