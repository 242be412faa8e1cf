// Reads the dynamic section through the program headers, as the dynamic linker does.
#include "model/elf.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/error.h"

namespace untorch {
namespace {

#if defined(__x86_64__)
constexpr std::uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr std::uint16_t kMachine = EM_AARCH64;
#else
#error "untorch runs on x86-64 and aarch64"
#endif

bool is_libtorch(const std::string& name) { return name.rfind("libtorch", 0) == 0 || name.rfind("libc10", 0) == 0; }

class Image {
 public:
  Image(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  [[noreturn]] void damaged(const char* why) const {
    throw_error(ErrorKind::kInvalidFile, name_, " is no usable shared library: ", why);
  }

  template <class T>
  T at(std::uint64_t offset) const {
    if (offset > bytes_.size() || sizeof(T) > bytes_.size() - offset) damaged("an offset points outside of the file");
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }

  std::string string(std::uint64_t table, std::uint64_t table_size, std::uint64_t offset) const {
    if (offset >= table_size || table > bytes_.size() || table_size > bytes_.size() - table) {
      damaged("a name lies outside of the string table");
    }
    const char* start = reinterpret_cast<const char*>(bytes_.data()) + table + offset;
    const void* end = std::memchr(start, 0, table_size - offset);
    if (end == nullptr) damaged("a name in the string table has no end");
    return {start, static_cast<const char*>(end)};
  }

  std::uint64_t size() const noexcept { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
  const std::string& name_;
};

}  // namespace

std::string elf_machine_name(std::uint16_t machine) {
  switch (machine) {
    case EM_X86_64:
      return "x86_64";
    case EM_AARCH64:
      return "aarch64";
    case EM_386:
      return "i386";
    case EM_ARM:
      return "arm";
    case EM_PPC64:
      return "ppc64";
    case EM_S390:
      return "s390x";
    case EM_RISCV:
      return "riscv";
    default:
      return "machine " + std::to_string(machine);
  }
}

ElfLibrary::ElfLibrary(std::span<const std::byte> bytes, std::string name) : name_(std::move(name)) {
  const Image image(bytes, name_);
  if (bytes.size() < sizeof(Elf64_Ehdr) || std::memcmp(bytes.data(), ELFMAG, SELFMAG) != 0) {
    image.damaged("it has no ELF header");
  }
  const auto header = image.at<Elf64_Ehdr>(0);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_type != ET_DYN) {
    image.damaged("it is not a 64-bit little-endian shared object");
  }
  if (header.e_machine != kMachine) {
    throw_error(ErrorKind::kUnsupported, name_, " was compiled for ", elf_machine_name(header.e_machine),
                ", this machine is ", elf_machine_name(kMachine));
  }
  if (header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phnum == 0 || header.e_phnum > 1024) {
    image.damaged("its program headers are damaged");
  }

  std::vector<Elf64_Phdr> loads;
  std::optional<Elf64_Phdr> dynamic;
  if (header.e_phoff > image.size()) image.damaged("its program headers are damaged");
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    const auto segment = image.at<Elf64_Phdr>(header.e_phoff + i * sizeof(Elf64_Phdr));
    if (segment.p_type == PT_GNU_STACK && (segment.p_flags & PF_X) != 0) {
      executable_stack_ = header.e_phoff + i * sizeof(Elf64_Phdr);
    }
    if (segment.p_type == PT_LOAD || segment.p_type == PT_DYNAMIC) {
      if (segment.p_offset > image.size() || segment.p_filesz > image.size() - segment.p_offset) {
        image.damaged("a segment reaches past the end of the file");
      }
      if (segment.p_filesz > segment.p_memsz || segment.p_vaddr + segment.p_memsz < segment.p_vaddr) {
        image.damaged("a segment has impossible sizes");
      }
    }
    if (segment.p_type == PT_LOAD) loads.push_back(segment);
    if (segment.p_type == PT_DYNAMIC) dynamic = segment;
  }
  if (!dynamic) image.damaged("it has no dynamic section");

  // Addresses in the dynamic section are virtual; this is where they lie in the file.
  const auto file_offset = [&](std::uint64_t address) -> std::uint64_t {
    for (const auto& load : loads) {
      if (address >= load.p_vaddr && address - load.p_vaddr < load.p_filesz)
        return load.p_offset + (address - load.p_vaddr);
    }
    image.damaged("an address lies in no segment");
  };

  std::uint64_t strings = 0, strings_size = 0, symbols = 0, gnu_hash = 0, sysv_hash = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> needed;  // entry offset, string offset
  for (std::uint64_t i = 0; i < dynamic->p_filesz / sizeof(Elf64_Dyn); ++i) {
    const std::uint64_t offset = dynamic->p_offset + i * sizeof(Elf64_Dyn);
    const auto entry = image.at<Elf64_Dyn>(offset);
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_STRTAB) strings = file_offset(entry.d_un.d_ptr);
    if (entry.d_tag == DT_STRSZ) strings_size = entry.d_un.d_val;
    if (entry.d_tag == DT_SYMTAB) symbols = file_offset(entry.d_un.d_ptr);
    if (entry.d_tag == DT_GNU_HASH) gnu_hash = file_offset(entry.d_un.d_ptr);
    if (entry.d_tag == DT_HASH) sysv_hash = file_offset(entry.d_un.d_ptr);
    if (entry.d_tag == DT_NEEDED) needed.emplace_back(offset, entry.d_un.d_val);
  }
  if (strings == 0 || symbols == 0) image.damaged("it has no dynamic symbols");
  strings_file_offset_ = strings;
  for (const auto& [entry, string] : needed) {
    needed_entries_.push_back({entry, string, image.string(strings, strings_size, string)});
    needed_.push_back(needed_entries_.back().name);
  }

  // The number of symbols: from the old hash table, or from the GNU one, whose chains hold the defined symbols last;
  // undefined ones come before its first symbol, which is all that is needed here.
  std::uint64_t count = 0;
  if (sysv_hash != 0) {
    count = image.at<std::uint32_t>(sysv_hash + 4);
  } else if (gnu_hash != 0) {
    count = image.at<std::uint32_t>(gnu_hash + 4);
  } else {
    image.damaged("it has no symbol hash table");
  }
  if (count > image.size() / sizeof(Elf64_Sym)) image.damaged("it claims more symbols than the file can hold");
  std::uint64_t total = 0;  // names may share their ends, but not so that a small file makes a big list
  for (std::uint64_t i = 1; i < count; ++i) {
    const auto symbol = image.at<Elf64_Sym>(symbols + i * sizeof(Elf64_Sym));
    if (symbol.st_shndx != SHN_UNDEF || symbol.st_name == 0) continue;
    undefined_.push_back({image.string(strings, strings_size, symbol.st_name),
                          ELF64_ST_BIND(symbol.st_info) == STB_WEAK, strings + symbol.st_name});
    total += undefined_.back().name.size();
    if (total > 4 * image.size()) image.damaged("its symbols' names overlap");
  }
}

void ElfLibrary::rename(std::span<std::byte> copy, const ElfSymbol& symbol, const std::string& name) {
  check(name.size() == symbol.name.size(), "cannot rename ", symbol.name, " to ", name);
  std::memcpy(copy.data() + symbol.file_offset, name.data(), name.size());
}

void ElfLibrary::clear_executable_stack(std::span<std::byte> copy) const {
  if (executable_stack_ == 0) return;
  std::byte* const field = copy.data() + executable_stack_ + offsetof(Elf64_Phdr, p_flags);
  Elf64_Word flags = 0;
  std::memcpy(&flags, field, sizeof flags);
  flags &= ~static_cast<Elf64_Word>(PF_X);
  std::memcpy(field, &flags, sizeof flags);
}

bool ElfLibrary::needs_libtorch() const noexcept { return std::any_of(needed_.begin(), needed_.end(), is_libtorch); }

void ElfLibrary::rebind_libtorch(std::span<std::byte> copy, const std::string& soname) const {
  const NeededEntry* host = nullptr;
  for (const auto& entry : needed_entries_) {
    if (is_libtorch(entry.name) && entry.name.size() >= soname.size()) host = &entry;
  }
  if (host == nullptr) {
    throw_error(ErrorKind::kUnsupported, name_, " needs libtorch under a name that is too short to be replaced by ",
                soname);
  }
  std::memcpy(copy.data() + strings_file_offset_ + host->string_offset, soname.c_str(), soname.size() + 1);
  for (const auto& entry : needed_entries_) {
    if (!is_libtorch(entry.name)) continue;
    // The entry is { tag, value }; the value is the name's offset in the string table.
    std::memcpy(copy.data() + entry.entry_offset + offsetof(Elf64_Dyn, d_un), &host->string_offset,
                sizeof(std::uint64_t));
  }
}

}  // namespace untorch
