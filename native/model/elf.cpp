// Reads program headers, dynamic section and symbol table, as the dynamic linker does.
#include "model/elf.h"

#include <algorithm>

namespace untorch {
namespace {

#if defined(__x86_64__)
constexpr std::uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr std::uint16_t kMachine = EM_AARCH64;
#else
#error "untorch runs on x86-64 and aarch64"
#endif

constexpr std::size_t kMaxVersions = 1 << 16;

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

void check_elf_machine(const ElfImage& elf) {
  if (elf.header().e_machine == kMachine) return;
  throw_error(ErrorKind::kUnsupported, elf.name(), " was compiled for ", elf_machine_name(elf.header().e_machine),
              ", this machine is ", elf_machine_name(kMachine));
}

ElfImage::ElfImage(std::span<const std::byte> bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {
  require(bytes.size() >= sizeof(Elf64_Ehdr) && std::memcmp(bytes.data(), ELFMAG, SELFMAG) == 0,
          "it has no ELF header");
  header_ = at<Elf64_Ehdr>(0);
  require(
      header_.e_ident[EI_CLASS] == ELFCLASS64 && header_.e_ident[EI_DATA] == ELFDATA2LSB && header_.e_type == ET_DYN,
      "it is not a 64-bit little-endian shared object");
  read_segments();
  read_dynamic();
  read_symbols();
}

void ElfImage::read_segments() {
  const std::uint64_t table = header_.e_phnum * sizeof(Elf64_Phdr);
  require(header_.e_phentsize == sizeof(Elf64_Phdr) && header_.e_phnum != 0 && header_.e_phnum <= 1024 &&
              header_.e_phoff <= bytes_.size() && table <= bytes_.size() - header_.e_phoff,
          "its program headers are damaged");
  for (unsigned i = 0; i < header_.e_phnum; ++i) {
    const auto segment = at<Elf64_Phdr>(header_.e_phoff + i * sizeof(Elf64_Phdr));
    segments_.push_back(segment);
    if (segment.p_type != PT_LOAD && segment.p_type != PT_DYNAMIC) continue;
    require(segment.p_offset <= bytes_.size() && segment.p_filesz <= bytes_.size() - segment.p_offset,
            "a segment reaches past the end of the file");
    require(segment.p_filesz <= segment.p_memsz && segment.p_vaddr + segment.p_memsz >= segment.p_vaddr,
            "a segment has impossible sizes");
    if (segment.p_type == PT_LOAD) loads_.push_back(segment);
  }
}

const Elf64_Phdr* ElfImage::segment(std::uint32_t type) const noexcept {
  for (const Elf64_Phdr& segment : segments_) {
    if (segment.p_type == type) return &segment;
  }
  return nullptr;
}

const Elf64_Phdr* ElfImage::find(std::uint64_t address, std::uint64_t size, std::uint32_t flags,
                                 bool in_file) const noexcept {
  for (const Elf64_Phdr& load : loads_) {
    const std::uint64_t extent = in_file ? load.p_filesz : load.p_memsz;
    if (address < load.p_vaddr || address - load.p_vaddr > extent || size > extent - (address - load.p_vaddr)) continue;
    if ((load.p_flags & flags) == flags) return &load;
  }
  return nullptr;
}

std::uint64_t ElfImage::offset_of(std::uint64_t address, std::uint64_t size, const char* what) const {
  const Elf64_Phdr* load = find(address, size, PF_R, true);
  if (load == nullptr) damaged(std::string(what) + " lies outside of its segments");
  return load->p_offset + (address - load->p_vaddr);
}

void ElfImage::read_dynamic() {
  const Elf64_Phdr* section = segment(PT_DYNAMIC);
  require(section != nullptr, "it has no dynamic section");
  bool ended = false;
  for (std::uint64_t i = 0; i < section->p_filesz / sizeof(Elf64_Dyn) && !ended; ++i) {
    const std::uint64_t offset = section->p_offset + i * sizeof(Elf64_Dyn);
    const auto entry = at<Elf64_Dyn>(offset);
    dynamic_[entry.d_tag] = entry.d_un.d_val;
    if (entry.d_tag == DT_NEEDED) needed_.push_back({offset, entry.d_un.d_val, nullptr});
    ended = entry.d_tag == DT_NULL;
  }
  require(ended, "its dynamic section has no end");
  require(has(DT_STRTAB) && has(DT_SYMTAB) && has(DT_STRSZ), "it has no dynamic symbols");
  require(!has(DT_SYMENT) || tag(DT_SYMENT) == sizeof(Elf64_Sym), "its symbols have an impossible size");
  strings_size_ = tag(DT_STRSZ);
  strings_ = offset_of(tag(DT_STRTAB), strings_size_, "the string table");
  // With this, every name that starts in the table also ends in it.
  require(strings_size_ != 0 && at<char>(strings_ + strings_size_ - 1) == '\0', "its string table has no end");
  for (Needed& needed : needed_) {
    needed.name = string(needed.string_offset);
    needed.string_offset += strings_;
  }
}

const char* ElfImage::string(std::uint64_t offset) const {
  require(offset < strings_size_, "a name lies outside of the string table");
  return reinterpret_cast<const char*>(bytes_.data()) + strings_ + offset;
}

bool ElfImage::needs(std::string_view soname) const noexcept {
  return std::any_of(needed_.begin(), needed_.end(), [&](const Needed& needed) { return needed.name == soname; });
}

void ElfImage::read_symbols() {
  require(has(DT_HASH) || has(DT_GNU_HASH), "it has no symbol hash table");
  num_symbols_ =
      has(DT_HASH) ? value_at<std::uint32_t>(tag(DT_HASH) + 4, "the hash table") : gnu_hash_symbols(tag(DT_GNU_HASH));
  require(num_symbols_ <= bytes_.size() / sizeof(Elf64_Sym), "it claims more symbols than the file can hold");
  symbols_ = offset_of(tag(DT_SYMTAB), num_symbols_ * sizeof(Elf64_Sym), "the symbol table");
}

// The GNU hash table does not hold the number of symbols: the chain that starts last ends with the last symbol.
std::uint64_t ElfImage::gnu_hash_symbols(std::uint64_t address) const {
  const std::uint64_t at_header = offset_of(address, 16, "the hash table");
  const auto buckets = at<std::uint32_t>(at_header), first = at<std::uint32_t>(at_header + 4),
             words = at<std::uint32_t>(at_header + 8);
  const std::uint64_t size = 16 + 8ull * words + 4ull * buckets;
  const std::uint64_t heads = offset_of(address, size, "the hash table") + 16 + 8ull * words;
  std::uint32_t last = 0;
  for (std::uint64_t i = 0; i < buckets; ++i) last = std::max(last, at<std::uint32_t>(heads + 4 * i));
  if (last == 0 || last < first) return first;
  for (std::uint64_t i = last;; ++i) {
    if ((value_at<std::uint32_t>(address + size + 4 * (i - first), "the hash table") & 1u) != 0) return i + 1;
  }
}

std::optional<Elf64_Sym> ElfImage::find_defined(std::string_view name) const {
  for (std::uint64_t i = 1; i < num_symbols_; ++i) {
    const Elf64_Sym entry = symbol(i);
    if (ELF64_ST_BIND(entry.st_info) == STB_LOCAL || entry.st_shndx == SHN_UNDEF || entry.st_name == 0) continue;
    if (string(entry.st_name) == name) return entry;
  }
  return std::nullopt;
}

std::vector<ElfVersionNeed> ElfImage::version_needs() const {
  std::vector<ElfVersionNeed> found;
  if (!has(DT_VERNEED)) return found;
  for (std::uint64_t address = tag(DT_VERNEED);;) {
    const auto need = value_at<Elf64_Verneed>(address, "a symbol version");
    const char* const file = string(need.vn_file);
    for (std::uint64_t entry = address + need.vn_aux;;) {
      const auto aux = value_at<Elf64_Vernaux>(entry, "a symbol version");
      require(found.size() < kMaxVersions, "its symbol versions are damaged");
      found.push_back({static_cast<std::uint16_t>(aux.vna_other & 0x7fffu), file, string(aux.vna_name)});
      if (aux.vna_next == 0) break;
      entry += aux.vna_next;
    }
    if (need.vn_next == 0) break;
    address += need.vn_next;
  }
  return found;
}

std::vector<ElfSymbol> ElfImage::symbols() const {
  std::map<std::uint16_t, ElfVersionNeed> versions;
  std::uint64_t indices = 0;
  if (has(DT_VERSYM)) {
    for (const ElfVersionNeed& need : version_needs()) versions.emplace(need.index, need);
    indices = offset_of(tag(DT_VERSYM), 2 * num_symbols_, "a symbol version");
  }
  std::vector<ElfSymbol> found;
  std::uint64_t total = 0;  // names may share their ends, but not so that a small file makes a long list
  for (std::uint64_t i = 1; i < num_symbols_; ++i) {
    const Elf64_Sym entry = symbol(i);
    if (ELF64_ST_BIND(entry.st_info) == STB_LOCAL || entry.st_name == 0) continue;
    ElfSymbol made{string(entry.st_name), strings_ + entry.st_name, entry.st_shndx != SHN_UNDEF,
                   ELF64_ST_BIND(entry.st_info) == STB_WEAK};
    if (indices != 0) made.version_offset = indices + 2 * i;
    if (!made.is_defined && indices != 0) {
      const auto it = versions.find(at<std::uint16_t>(indices + 2 * i) & 0x7fffu);
      if (it != versions.end()) {
        made.version = it->second.name;
        made.version_file = it->second.file;
      }
    }
    total += made.name.size();
    require(total <= 4 * bytes_.size(), "its symbols' names overlap");
    found.push_back(made);
  }
  return found;
}

}  // namespace untorch
