// Program headers and dynamic section, held to what the dynamic linker takes for granted.
#include "model/elf_view.h"

namespace untorch {
namespace {

constexpr std::uint64_t kPage = 4096;            // the smallest page of the machines served
constexpr std::uint64_t kMaxImage = 1ull << 40;  // address space of one library
constexpr std::uint64_t kMaxTls = 1ull << 24;
constexpr std::uint64_t kMaxAlign = 1ull << 30;

bool power_of_two(std::uint64_t n) noexcept { return n != 0 && (n & (n - 1)) == 0; }

}  // namespace

ElfView::ElfView(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {
  header_ = at<Elf64_Ehdr>(0);
  require(std::memcmp(header_.e_ident, ELFMAG, SELFMAG) == 0 && header_.e_ident[EI_CLASS] == ELFCLASS64 &&
              header_.e_ident[EI_DATA] == ELFDATA2LSB && header_.e_ident[EI_VERSION] == EV_CURRENT &&
              header_.e_version == EV_CURRENT && header_.e_type == ET_DYN,
          "its ELF header is damaged");
  read_segments();
  read_dynamic();
}

const Elf64_Phdr* ElfView::find(std::uint64_t address, std::uint64_t size, std::uint32_t flags,
                                bool in_file) const noexcept {
  for (const Elf64_Phdr& load : loads_) {
    const std::uint64_t extent = in_file ? load.p_filesz : load.p_memsz;
    if (address < load.p_vaddr || address - load.p_vaddr > extent || size > extent - (address - load.p_vaddr)) continue;
    if ((load.p_flags & flags) == flags) return &load;
  }
  return nullptr;
}

std::uint64_t ElfView::offset_of(std::uint64_t address, std::uint64_t size, const char* what) const {
  const Elf64_Phdr* load = find(address, size, PF_R, true);
  if (load == nullptr) damaged(std::string(what) + " lies outside of its segments");
  return load->p_offset + (address - load->p_vaddr);
}

const char* ElfView::string(std::uint64_t offset) const {
  require(offset < strings_size_, "a name lies outside of the string table");
  return reinterpret_cast<const char*>(bytes_.data()) + strings_ + offset;
}

const Elf64_Phdr* ElfView::segment(std::uint32_t type) const noexcept {
  for (const Elf64_Phdr& segment : segments_) {
    if (segment.p_type == type) return &segment;
  }
  return nullptr;
}

void ElfView::read_segments() {
  const std::uint64_t table = header_.e_phnum * sizeof(Elf64_Phdr);
  require(header_.e_phentsize == sizeof(Elf64_Phdr) && header_.e_phnum != 0 && header_.e_phnum <= 1024 &&
              header_.e_phoff <= bytes_.size() && table <= bytes_.size() - header_.e_phoff,
          "its program headers are damaged");
  std::uint64_t end = 0;
  for (unsigned i = 0; i < header_.e_phnum; ++i) {
    const auto segment = at<Elf64_Phdr>(header_.e_phoff + i * sizeof(Elf64_Phdr));
    segments_.push_back(segment);
    if (segment.p_type != PT_LOAD) continue;
    require(segment.p_offset <= bytes_.size() && segment.p_filesz <= bytes_.size() - segment.p_offset,
            "a segment reaches past the end of the file");
    require(segment.p_memsz != 0 && segment.p_filesz <= segment.p_memsz && segment.p_memsz <= kMaxImage &&
                segment.p_vaddr <= kMaxImage,
            "a segment has impossible sizes");
    require(power_of_two(segment.p_align) && segment.p_align % kPage == 0 && segment.p_align <= kMaxAlign &&
                (segment.p_vaddr - segment.p_offset) % segment.p_align == 0,
            "a segment is not aligned");
    // Out of order or overlapping, they would be mapped over each other, or over the memory of others.
    require(segment.p_vaddr / kPage * kPage >= end, "its segments overlap or are out of order");
    end = (segment.p_vaddr + segment.p_memsz + kPage - 1) / kPage * kPage;
    require((segment.p_flags & PF_R) != 0 && (segment.p_filesz == segment.p_memsz || (segment.p_flags & PF_W) != 0),
            "a segment has impossible access rights");
    loads_.push_back(segment);
  }
  require(!loads_.empty(), "it has no segments to load");

  unsigned dynamics = 0, threads = 0;
  for (const Elf64_Phdr& segment : segments_) {
    switch (segment.p_type) {
      case PT_DYNAMIC: {
        const Elf64_Phdr* load = find(segment.p_vaddr, segment.p_filesz, PF_R | PF_W, true);
        require(++dynamics == 1 && load != nullptr && segment.p_vaddr % 8 == 0 &&
                    load->p_offset + (segment.p_vaddr - load->p_vaddr) == segment.p_offset,
                "its dynamic section lies outside of its segments");
        break;
      }
      case PT_TLS:
        require(++threads == 1 && segment.p_filesz <= segment.p_memsz && segment.p_memsz <= kMaxTls &&
                    segment.p_align <= kPage && (segment.p_align == 0 || power_of_two(segment.p_align)) &&
                    (segment.p_filesz == 0 || find(segment.p_vaddr, segment.p_filesz, PF_R, true) != nullptr),
                "its thread-local data are damaged");
        break;
      case PT_GNU_RELRO: {
        const Elf64_Phdr* load = find(segment.p_vaddr, 1, PF_W, false);
        require(load != nullptr && segment.p_memsz <= kMaxImage &&
                    (segment.p_vaddr + segment.p_memsz) / kPage * kPage <=
                        (load->p_vaddr + load->p_memsz + kPage - 1) / kPage * kPage,
                "its read-only data lie outside of its segments");
        break;
      }
      case PT_PHDR:
        require(offset_of(segment.p_vaddr, table, "the program header table") == header_.e_phoff,
                "its program headers are damaged");
        break;
      case PT_NOTE:
      case PT_GNU_PROPERTY:
      case PT_GNU_EH_FRAME:
        require(segment.p_memsz == segment.p_filesz &&
                    offset_of(segment.p_vaddr, segment.p_memsz, "a note") == segment.p_offset,
                "a segment contradicts another one");
        break;
      default:
        break;
    }
  }
  require(dynamics == 1, "it has no dynamic section");

  for (const Elf64_Phdr& segment : segments_) {
    if (segment.p_type != PT_NOTE && segment.p_type != PT_GNU_PROPERTY) continue;
    const std::uint64_t align = segment.p_align == 8 ? 8 : 4;
    for (std::uint64_t done = 0; done < segment.p_filesz;) {
      require(segment.p_filesz - done >= sizeof(Elf64_Nhdr), "a note is cut off");
      const auto note = at<Elf64_Nhdr>(segment.p_offset + done);
      const std::uint64_t length = sizeof note + (std::uint64_t{note.n_namesz} + align - 1) / align * align +
                                   (std::uint64_t{note.n_descsz} + align - 1) / align * align;
      require(length <= segment.p_filesz - done + align - 1, "a note is cut off");
      done += length;
    }
  }
}

void ElfView::read_dynamic() {
  const Elf64_Phdr& section = *segment(PT_DYNAMIC);
  bool ended = false;
  std::vector<std::uint64_t> names;
  for (std::uint64_t i = 0; i < section.p_filesz / sizeof(Elf64_Dyn) && !ended; ++i) {
    const auto entry = at<Elf64_Dyn>(section.p_offset + i * sizeof(Elf64_Dyn));
    dynamic_[entry.d_tag] = entry.d_un.d_val;
    switch (entry.d_tag) {
      case DT_NULL:
        ended = true;
        break;
      case DT_NEEDED:
        needed_.push_back(entry.d_un.d_val);
        [[fallthrough]];
      case DT_SONAME:
      case DT_RPATH:
      case DT_RUNPATH:
      case DT_FILTER:
      case DT_AUXILIARY:
        names.push_back(entry.d_un.d_val);
        break;
      default:
        break;
    }
  }
  require(ended, "its dynamic section has no end");
  require(has(DT_STRTAB) && has(DT_SYMTAB) && has(DT_STRSZ), "it has no dynamic symbols");
  strings_size_ = tag(DT_STRSZ);
  strings_ = offset_of(tag(DT_STRTAB), strings_size_, "the string table");
  // With this, every name that starts in the table also ends in it.
  require(strings_size_ != 0 && at<char>(strings_ + strings_size_ - 1) == '\0', "its string table has no end");
  for (const std::uint64_t offset : names) (void)string(offset);
  require(!has(DT_SYMENT) || tag(DT_SYMENT) == sizeof(Elf64_Sym), "its symbols have an impossible size");
  require(!has(DT_RELAENT) || tag(DT_RELAENT) == sizeof(Elf64_Rela), "its relocations have an impossible size");
  require(!has(DT_RELRENT) || tag(DT_RELRENT) == sizeof(Elf64_Relr), "its relocations have an impossible size");
  require(!has(DT_JMPREL) || tag(DT_PLTREL) == DT_RELA, "its relocations are of an unknown kind");
  require(!has(DT_REL) && !has(DT_TEXTREL) && (tag(DT_FLAGS) & DF_TEXTREL) == 0,
          "it has relocations that position-independent code does not have");
  require(has(DT_JMPREL) == has(DT_PLTRELSZ) && has(DT_RELR) == has(DT_RELRSZ) && has(DT_RELA) == has(DT_RELASZ),
          "its relocations have no size");
  require(!has(DT_RELA) || (has(DT_RELASZ) && has(DT_RELAENT)), "its relocations have no size");
  require((tag(DT_FLAGS_1) & DF_1_GLOBAL) == 0, "it asks to be visible to other libraries");
  require(!has(DT_PLTGOT) || find(tag(DT_PLTGOT), 8, PF_W, false) != nullptr,
          "its offset table lies outside of its segments");
  for (const std::int64_t code : {DT_INIT, DT_FINI}) {
    require(!has(code) || executable(tag(code)), "an initialiser lies outside of its code");
  }
}

}  // namespace untorch
