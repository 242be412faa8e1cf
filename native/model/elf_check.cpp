// Headers, segments, dynamic section, hash tables, symbols, versions, relocations, initialisers and section headers.
#include "model/elf_check.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <vector>

#include "model/elf_unwind.h"

namespace untorch {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kSlot = R_X86_64_JUMP_SLOT, kData = R_X86_64_GLOB_DAT;
constexpr std::uint32_t kRelative = R_X86_64_RELATIVE, kIndirect = R_X86_64_IRELATIVE, kAbsolute = R_X86_64_64,
                        kTlsDescriptor = R_X86_64_TLSDESC, kTlsModule = R_X86_64_DTPMOD64;
constexpr std::uint32_t kRelocations[] = {R_X86_64_64,       R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT,
                                          R_X86_64_RELATIVE, R_X86_64_DTPMOD64, R_X86_64_DTPOFF64,
                                          R_X86_64_TPOFF64,  R_X86_64_TLSDESC,  R_X86_64_IRELATIVE};
constexpr std::uint32_t kThreadLocal[] = {R_X86_64_DTPMOD64, R_X86_64_DTPOFF64, R_X86_64_TPOFF64, R_X86_64_TLSDESC};
#else
constexpr std::uint32_t kThreadLocal[] = {R_AARCH64_TLS_DTPMOD, R_AARCH64_TLS_DTPREL, R_AARCH64_TLS_TPREL,
                                          R_AARCH64_TLSDESC};
constexpr std::uint32_t kSlot = R_AARCH64_JUMP_SLOT, kData = R_AARCH64_GLOB_DAT;
constexpr std::uint32_t kRelative = R_AARCH64_RELATIVE, kIndirect = R_AARCH64_IRELATIVE, kAbsolute = R_AARCH64_ABS64,
                        kTlsDescriptor = R_AARCH64_TLSDESC, kTlsModule = R_AARCH64_TLS_DTPMOD;
constexpr std::uint32_t kRelocations[] = {R_AARCH64_ABS64,     R_AARCH64_GLOB_DAT,   R_AARCH64_JUMP_SLOT,
                                          R_AARCH64_RELATIVE,  R_AARCH64_TLS_DTPMOD, R_AARCH64_TLS_DTPREL,
                                          R_AARCH64_TLS_TPREL, R_AARCH64_TLSDESC,    R_AARCH64_IRELATIVE};
#endif
constexpr std::string_view kOwnName = "libuntorch.so";
constexpr std::uint64_t kPage = 4096;            // the smallest page of the machines served
constexpr std::uint64_t kMaxImage = 1ull << 40;  // address space of one library
constexpr std::uint64_t kMaxTls = 1ull << 24;
constexpr std::uint64_t kMaxAlign = 1ull << 30;

bool power_of_two(std::uint64_t n) noexcept { return n != 0 && (n & (n - 1)) == 0; }

class Checker {
 public:
  explicit Checker(const ElfImage& elf) : elf_(elf) {}

  void run() {
    check_header();
    check_loads();
    check_other_segments();
    check_notes();
    check_dynamic();
    check_hash_tables();
    check_symbols();
    check_versions();
    open_arrays();
    check_relocations(DT_RELA, DT_RELASZ);
    check_relocations(DT_JMPREL, DT_PLTRELSZ);
    check_relative_relocations();
    check_targets();
    check_unwind_tables(elf_);
    for (const Array& array : arrays_) {
      elf_.require(std::all_of(array.filled.begin(), array.filled.end(), [](bool filled) { return filled; }),
                   "an initialiser has no address");
    }
    check_sections();
  }

  std::unordered_map<std::string_view, std::uint64_t> functions() const {
    std::unordered_map<std::string_view, std::uint64_t> found;
    for (std::uint64_t i = 1; i < elf_.num_symbols(); ++i) {
      const Elf64_Sym s = elf_.symbol(i);
      if (s.st_shndx != SHN_UNDEF && ELF64_ST_TYPE(s.st_info) == STT_FUNC && ELF64_ST_BIND(s.st_info) != STB_LOCAL) {
        found.emplace(elf_.string(s.st_name), s.st_value);
      }
    }
    return found;
  }

 private:
  void check_header() const {
    const Elf64_Ehdr& header = elf_.header();
    elf_.require(header.e_ident[EI_VERSION] == EV_CURRENT && header.e_version == EV_CURRENT,
                 "its ELF header is damaged");
  }

  void check_loads() const {
    std::uint64_t end = 0;
    for (const Elf64_Phdr& segment : elf_.segments()) {
      if (segment.p_type != PT_LOAD) continue;
      elf_.require(segment.p_memsz != 0 && segment.p_memsz <= kMaxImage && segment.p_vaddr <= kMaxImage,
                   "a segment has impossible sizes");
      elf_.require(power_of_two(segment.p_align) && segment.p_align % kPage == 0 && segment.p_align <= kMaxAlign &&
                       (segment.p_vaddr - segment.p_offset) % segment.p_align == 0,
                   "a segment is not aligned");
      // Out of order or overlapping, they would be mapped over each other, or over the memory of others.
      elf_.require(segment.p_vaddr / kPage * kPage >= end, "its segments overlap or are out of order");
      end = (segment.p_vaddr + segment.p_memsz + kPage - 1) / kPage * kPage;
      elf_.require(
          (segment.p_flags & PF_R) != 0 && (segment.p_filesz == segment.p_memsz || (segment.p_flags & PF_W) != 0),
          "a segment has impossible access rights");
    }
    elf_.require(end != 0, "it has no segments to load");
  }

  void check_other_segments() const {
    unsigned dynamics = 0, threads = 0;
    for (const Elf64_Phdr& segment : elf_.segments()) {
      switch (segment.p_type) {
        case PT_DYNAMIC: {
          const Elf64_Phdr* load = elf_.find(segment.p_vaddr, segment.p_filesz, PF_R | PF_W, true);
          elf_.require(++dynamics == 1 && load != nullptr && segment.p_vaddr % 8 == 0 &&
                           load->p_offset + (segment.p_vaddr - load->p_vaddr) == segment.p_offset,
                       "its dynamic section lies outside of its segments");
          break;
        }
        case PT_TLS:
          elf_.require(
              ++threads == 1 && segment.p_filesz <= segment.p_memsz && segment.p_memsz <= kMaxTls &&
                  segment.p_align <= kPage && (segment.p_align == 0 || power_of_two(segment.p_align)) &&
                  (segment.p_filesz == 0 || elf_.find(segment.p_vaddr, segment.p_filesz, PF_R, true) != nullptr),
              "its thread-local data are damaged");
          break;
        case PT_GNU_RELRO: {
          const Elf64_Phdr* load = elf_.find(segment.p_vaddr, 1, PF_W, false);
          elf_.require(load != nullptr && segment.p_memsz <= kMaxImage &&
                           (segment.p_vaddr + segment.p_memsz) / kPage * kPage <=
                               (load->p_vaddr + load->p_memsz + kPage - 1) / kPage * kPage,
                       "its read-only data lie outside of its segments");
          break;
        }
        case PT_PHDR:
          elf_.require(elf_.offset_of(segment.p_vaddr, elf_.segments().size() * sizeof(Elf64_Phdr),
                                      "the program header table") == elf_.header().e_phoff,
                       "its program headers are damaged");
          break;
        case PT_NOTE:
        case PT_GNU_PROPERTY:
        case PT_GNU_EH_FRAME:
          elf_.require(segment.p_memsz == segment.p_filesz &&
                           elf_.offset_of(segment.p_vaddr, segment.p_memsz, "a note") == segment.p_offset,
                       "a segment contradicts another one");
          break;
        default:
          break;
      }
    }
  }

  void check_notes() const {
    for (const Elf64_Phdr& segment : elf_.segments()) {
      if (segment.p_type != PT_NOTE && segment.p_type != PT_GNU_PROPERTY) continue;
      const std::uint64_t align = segment.p_align == 8 ? 8 : 4;
      for (std::uint64_t done = 0; done < segment.p_filesz;) {
        elf_.require(segment.p_filesz - done >= sizeof(Elf64_Nhdr), "a note is cut off");
        const auto note = elf_.at<Elf64_Nhdr>(segment.p_offset + done);
        const std::uint64_t length = sizeof note + (std::uint64_t{note.n_namesz} + align - 1) / align * align +
                                     (std::uint64_t{note.n_descsz} + align - 1) / align * align;
        elf_.require(length <= segment.p_filesz - done + align - 1, "a note is cut off");
        done += length;
      }
    }
  }

  void check_dynamic() const {
    const Elf64_Phdr& section = *elf_.segment(PT_DYNAMIC);
    for (std::uint64_t i = 0; i < section.p_filesz / sizeof(Elf64_Dyn); ++i) {
      const auto entry = elf_.at<Elf64_Dyn>(section.p_offset + i * sizeof(Elf64_Dyn));
      if (entry.d_tag == DT_NULL) break;
      switch (entry.d_tag) {
        case DT_SONAME:
        case DT_RPATH:
        case DT_RUNPATH:
        case DT_FILTER:
        case DT_AUXILIARY:
          (void)elf_.string(entry.d_un.d_val);
          break;
        default:
          break;
      }
    }
    elf_.require(!elf_.has(DT_RELAENT) || elf_.tag(DT_RELAENT) == sizeof(Elf64_Rela),
                 "its relocations have an impossible size");
    elf_.require(!elf_.has(DT_RELRENT) || elf_.tag(DT_RELRENT) == sizeof(Elf64_Relr),
                 "its relocations have an impossible size");
    elf_.require(!elf_.has(DT_JMPREL) || elf_.tag(DT_PLTREL) == DT_RELA, "its relocations are of an unknown kind");
    elf_.require(!elf_.has(DT_REL) && !elf_.has(DT_TEXTREL) && (elf_.tag(DT_FLAGS) & DF_TEXTREL) == 0,
                 "it has relocations that position-independent code does not have");
    elf_.require(elf_.has(DT_JMPREL) == elf_.has(DT_PLTRELSZ) && elf_.has(DT_RELR) == elf_.has(DT_RELRSZ) &&
                     elf_.has(DT_RELA) == elf_.has(DT_RELASZ),
                 "its relocations have no size");
    elf_.require(!elf_.has(DT_RELA) || (elf_.has(DT_RELASZ) && elf_.has(DT_RELAENT)), "its relocations have no size");
    elf_.require((elf_.tag(DT_FLAGS_1) & DF_1_GLOBAL) == 0, "it asks to be visible to other libraries");
    elf_.require(!elf_.has(DT_PLTGOT) || elf_.find(elf_.tag(DT_PLTGOT), 8, PF_W, false) != nullptr,
                 "its offset table lies outside of its segments");
    for (const std::int64_t code : {DT_INIT, DT_FINI}) {
      elf_.require(!elf_.has(code) || elf_.executable(elf_.tag(code)), "an initialiser lies outside of its code");
    }
  }

  // The tables are compared with the symbols' names, entry by entry: the dynamic linker finds every symbol in them, and
  // only those.
  void check_hash_tables() const {
    if (elf_.has(DT_GNU_HASH)) check_gnu_hash(elf_.tag(DT_GNU_HASH));
    if (elf_.has(DT_HASH)) check_hash(elf_.tag(DT_HASH));
  }

  // Layout: buckets, first symbol, words and shift of the filter; the filter; a symbol for each bucket; a hash for each
  // symbol from the first on, in which the low bit ends a bucket's chain.
  void check_gnu_hash(std::uint64_t address) const {
    const auto agrees = [&](bool condition) { elf_.require(condition, "its hash table is damaged"); };
    const std::uint64_t at = elf_.offset_of(address, 16, "the hash table");
    const auto buckets = elf_.at<std::uint32_t>(at), first = elf_.at<std::uint32_t>(at + 4),
               words = elf_.at<std::uint32_t>(at + 8), shift = elf_.at<std::uint32_t>(at + 12);
    agrees(words != 0 && (words & (words - 1)) == 0 && shift < 32 && buckets != 0);
    const std::uint64_t count = elf_.num_symbols(), hashed = first < count ? count - first : 0;
    const std::uint64_t size = 16 + 8ull * words + 4ull * buckets;
    const std::uint64_t filter = elf_.offset_of(address, size, "the hash table") + 16, heads = filter + 8ull * words;
    std::uint64_t used = 0;
    for (std::uint64_t i = 0; i < buckets; ++i) used += elf_.at<std::uint32_t>(heads + 4 * i) != 0 ? 1 : 0;
    const std::uint64_t chains = hashed != 0 ? elf_.offset_of(address + size, 4 * hashed, "the hash table") : 0;
    std::uint64_t chain_bucket = buckets, num_chains = 0;
    for (std::uint64_t i = 0; i < hashed; ++i) {
      const std::uint32_t hash = gnu_hash(elf_.string(elf_.symbol(first + i).st_name));
      const auto link = elf_.at<std::uint32_t>(chains + 4 * i);
      const auto word = elf_.at<std::uint64_t>(filter + 8ull * (hash / 64 & (words - 1)));
      agrees((link | 1u) == (hash | 1u) && (word >> hash % 64 & word >> (hash >> shift) % 64 & 1u) != 0);
      if (chain_bucket == buckets) {
        ++num_chains;
        agrees(elf_.at<std::uint32_t>(heads + 4ull * (hash % buckets)) == first + i);
      } else {
        agrees(hash % buckets == chain_bucket);
      }
      chain_bucket = (link & 1u) != 0 ? buckets : hash % buckets;
    }
    agrees(chain_bucket == buckets && num_chains == used);
  }

  static std::uint32_t gnu_hash(const char* name) noexcept {
    std::uint32_t hash = 5381;
    for (; *name != '\0'; ++name) hash = hash * 33 + static_cast<unsigned char>(*name);
    return hash;
  }

  // Layout: buckets, symbols; a symbol for each bucket; for each symbol the next one of its chain.
  void check_hash(std::uint64_t address) const {
    const auto agrees = [&](bool condition) { elf_.require(condition, "its hash table is damaged"); };
    const std::uint64_t at = elf_.offset_of(address, 8, "the hash table");
    const auto buckets = elf_.at<std::uint32_t>(at), symbols = elf_.at<std::uint32_t>(at + 4);
    agrees(buckets != 0 && symbols == elf_.num_symbols());
    (void)elf_.offset_of(address, 8 + 4ull * buckets + 4ull * symbols, "the hash table");
    std::vector<bool> seen(symbols, false);
    for (std::uint32_t bucket = 0; bucket < buckets; ++bucket) {
      auto i = elf_.at<std::uint32_t>(at + 8 + 4ull * bucket);
      while (i != 0) {
        agrees(i < symbols && !seen[i] && sysv_hash(elf_.string(elf_.symbol(i).st_name)) % buckets == bucket);
        seen[i] = true;
        i = elf_.at<std::uint32_t>(at + 8 + 4ull * buckets + 4ull * i);
      }
    }
    for (std::uint32_t i = 1; i < symbols; ++i) {
      const Elf64_Sym symbol = elf_.symbol(i);
      agrees(seen[i] || symbol.st_shndx == SHN_UNDEF || ELF64_ST_BIND(symbol.st_info) == STB_LOCAL);
    }
  }

  static std::uint32_t sysv_hash(const char* name) noexcept {
    std::uint32_t hash = 0;
    for (; *name != '\0'; ++name) {
      hash = (hash << 4) + static_cast<unsigned char>(*name);
      const std::uint32_t high = hash & 0xf0000000u;
      hash = (hash ^ high >> 24) & ~high;
    }
    return hash;
  }

  void check_symbols() const {
    const Elf64_Phdr* thread = elf_.segment(PT_TLS);
    for (std::uint64_t i = 1; i < elf_.num_symbols(); ++i) {
      const Elf64_Sym s = elf_.symbol(i);
      (void)elf_.string(s.st_name);
      // The dynamic linker would take it for one of the library's own, at address zero.
      elf_.require(s.st_shndx != SHN_UNDEF || ELF64_ST_VISIBILITY(s.st_other) == STV_DEFAULT,
                   "a symbol of another library is hidden");
      if (s.st_shndx == SHN_UNDEF || s.st_shndx == SHN_ABS) continue;
      bool inside = true;
      switch (ELF64_ST_TYPE(s.st_info)) {
        case STT_FUNC:
        case STT_GNU_IFUNC:
          inside = elf_.executable(s.st_value);
          break;
        case STT_OBJECT:
          inside = elf_.find(s.st_value, s.st_size, PF_R, false) != nullptr;
          break;
        case STT_TLS:
          inside = thread != nullptr && s.st_value <= thread->p_memsz && s.st_size <= thread->p_memsz - s.st_value;
          break;
        default:
          break;
      }
      elf_.require(inside, "a symbol lies outside of its segments");
    }
  }

  void check_versions() const {
    if (!elf_.has(DT_VERSYM)) return;
    std::uint32_t highest = 0;
    std::set<std::uint32_t> known{VER_NDX_LOCAL, VER_NDX_GLOBAL};  // of symbols that other libraries define
    for (const ElfVersionNeed& need : elf_.version_needs()) {
      // The dynamic linker asserts this.
      elf_.require(elf_.needs(need.file), "a symbol version is of a library that it does not need");
      // Nor may a library have none, to which needed ones are bound.
      const std::string_view file = need.file;
      if (file == kOwnName || file.starts_with("libtorch") || file.starts_with("libc10")) {
        elf_.damaged("a symbol version is of " + std::string(file) + ", which has none");
      }
      known.insert(need.index);
      highest = std::max<std::uint32_t>(highest, need.index);
    }
    if (elf_.has(DT_VERDEF)) {
      for (std::uint64_t at = elf_.tag(DT_VERDEF);;) {
        const auto definition = elf_.value_at<Elf64_Verdef>(at, "a symbol version");
        const auto aux = elf_.value_at<Elf64_Verdaux>(at + definition.vd_aux, "a symbol version");
        (void)elf_.string(aux.vda_name);
        highest = std::max<std::uint32_t>(highest, definition.vd_ndx & 0x7fffu);
        if (definition.vd_next == 0) break;
        at += definition.vd_next;
      }
    }
    elf_.require(highest != 0, "its symbol versions are damaged");
    const std::uint64_t table = elf_.offset_of(elf_.tag(DT_VERSYM), 2 * elf_.num_symbols(), "a symbol version");
    for (std::uint64_t i = 0; i < elf_.num_symbols(); ++i) {
      const std::uint32_t index = elf_.at<std::uint16_t>(table + 2 * i) & 0x7fffu;
      const bool defined = elf_.symbol(i).st_shndx != SHN_UNDEF;
      elf_.require(defined ? index <= (elf_.has(DT_VERDEF) ? std::max(highest, 1u) : 1u) : known.count(index) != 0,
                   "its symbol versions are damaged");
    }
  }

  // The functions that the dynamic linker calls when it opens and closes the library.
  struct Array {
    std::uint64_t address;
    std::vector<bool> filled;
  };

  void open_arrays() {
    for (const auto& [start, size] : {std::pair{DT_INIT_ARRAY, DT_INIT_ARRAYSZ}, {DT_FINI_ARRAY, DT_FINI_ARRAYSZ}}) {
      if (!elf_.has(start)) continue;
      elf_.require(elf_.has(size) && elf_.tag(size) % 8 == 0, "its initialisers are damaged");
      (void)elf_.offset_of(elf_.tag(start), elf_.tag(size), "the initialiser table");
      arrays_.push_back({elf_.tag(start), std::vector<bool>(elf_.tag(size) / 8, false)});
    }
  }

  // A pointer that will be written: if it is an initialiser, it must point to code.
  void fill(std::uint64_t address, std::uint64_t target, bool known) {
    for (Array& array : arrays_) {
      if (address < array.address || address - array.address >= 8 * array.filled.size()) continue;
      elf_.require((address - array.address) % 8 == 0 && known && elf_.executable(target),
                   "an initialiser lies outside of its code");
      array.filled[(address - array.address) / 8] = true;
    }
  }

  void check_relocations(std::int64_t start, std::int64_t length) {
    if (!elf_.has(start) || elf_.tag(length) == 0) return;
    elf_.require(elf_.tag(length) % sizeof(Elf64_Rela) == 0, "its relocations are damaged");
    const std::uint64_t table = elf_.offset_of(elf_.tag(start), elf_.tag(length), "the relocation table");
    const std::uint64_t count = elf_.tag(length) / sizeof(Elf64_Rela);
    const std::uint64_t relative = start == DT_RELA ? elf_.tag(DT_RELACOUNT) : 0;
    elf_.require(relative <= count, "its relocations are damaged");
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto r = elf_.at<Elf64_Rela>(table + i * sizeof(Elf64_Rela));
      const auto type = static_cast<std::uint32_t>(ELF64_R_TYPE(r.r_info));
      const std::uint64_t index = ELF64_R_SYM(r.r_info);
      elf_.require(i >= relative || type == kRelative, "its relocations are damaged");
      if (type == 0) {  // left over by the linker
        elf_.require(start == DT_RELA && r.r_info == 0 && r.r_offset == 0, "its relocations are damaged");
        continue;
      }
      if (std::find(std::begin(kRelocations), std::end(kRelocations), type) == std::end(kRelocations)) {
        elf_.damaged("it has relocations of the unknown type " + std::to_string(type));
      }
      elf_.require(index < elf_.num_symbols(), "a relocation names a symbol that is not there");
      elf_.require(elf_.find(r.r_offset, type == kTlsDescriptor ? 16 : 8, PF_W, false) != nullptr,
                   "a relocation lies outside of its data");
      const auto addend = static_cast<std::uint64_t>(r.r_addend);
      elf_.require(type != kIndirect || elf_.executable(addend), "a relocation lies outside of its code");
      targets_.push_back(r.r_offset);
      if (type == kTlsDescriptor) targets_.push_back(r.r_offset + 8);
      if (type == kSlot || type == kData) check_binding(type, index, addend);
      elf_.require(type != kAbsolute || index != 0, "its relocations are damaged");
      elf_.require(start == DT_RELA || type == kSlot || type == kIndirect || type == kTlsDescriptor,
                   "its relocations are damaged");
      elf_.require(type != kRelative || in_image(addend), "a relocation points outside of its segments");
      const bool thread_local_data =
          std::find(std::begin(kThreadLocal), std::end(kThreadLocal), type) != std::end(kThreadLocal);
      elf_.require(!thread_local_data || index != 0 || elf_.segment(PT_TLS) != nullptr,
                   "a relocation is of thread-local data that are not there");
      if (type == kTlsModule && index == 0) tls_pairs_.push_back(r.r_offset);
      const Elf64_Sym target = index != 0 ? elf_.symbol(index) : Elf64_Sym{};
      const bool other = target.st_shndx == SHN_UNDEF;
      elf_.require(!thread_local_data || index == 0 || ELF64_ST_TYPE(target.st_info) == STT_TLS ||
                       (other && ELF64_ST_TYPE(target.st_info) == STT_NOTYPE),
                   "a relocation is of thread-local data that are not there");
      elf_.require(type != kAbsolute || other || target.st_shndx == SHN_ABS || in_image(target.st_value + addend),
                   "a relocation points outside of its segments");
      fill(r.r_offset, type == kRelative ? addend : target.st_value + addend,
           type == kRelative || (type == kAbsolute && target.st_shndx != SHN_UNDEF));
    }
  }

  // Slots of functions and of data: one for each symbol, which is added to nothing.
  void check_binding(std::uint32_t type, std::uint64_t index, std::uint64_t addend) {
    auto& bound = type == kSlot ? functions_bound_ : data_bound_;
    if (bound.empty()) bound.resize(elf_.num_symbols(), false);
    elf_.require(index != 0 && addend == 0 && !bound[index], "its relocations are damaged");
    bound[index] = true;
    const unsigned kind = ELF64_ST_TYPE(elf_.symbol(index).st_info);
    elf_.require(kind != STT_TLS && (type != kSlot || kind != STT_OBJECT), "its relocations are damaged");
  }

  // The end of a segment counts as in it: loops compare with it.
  bool in_image(std::uint64_t address) const { return elf_.find(address, 0, PF_R, false) != nullptr; }

  // Every place is relocated once.
  void check_targets() {
    std::ranges::sort(targets_);
    for (std::size_t i = 1; i < targets_.size(); ++i) {
      elf_.require(targets_[i] - targets_[i - 1] >= 8, "two relocations are of the same place");
    }
    // The library's own thread-local data: after the module's number lies an offset, which is in the file.
    for (const std::uint64_t pair : tls_pairs_) {
      if (std::ranges::binary_search(targets_, pair + 8)) continue;
      elf_.require(elf_.value_at<std::uint64_t>(pair + 8, "an offset") <= elf_.segment(PT_TLS)->p_memsz,
                   "thread-local data lie outside of their segment");
    }
  }

  void check_relative_relocations() {
    if (!elf_.has(DT_RELR)) return;
    const std::uint64_t size = elf_.tag(DT_RELRSZ);
    elf_.require(size % sizeof(Elf64_Relr) == 0, "its relocations are damaged");
    const std::uint64_t table = elf_.offset_of(elf_.tag(DT_RELR), size, "the relocation table");
    const auto relocate = [&](std::uint64_t address) {
      elf_.require(elf_.find(address, 8, PF_W, true) != nullptr, "a relocation lies outside of its data");
      const auto target = elf_.value_at<std::uint64_t>(address, "a relocation");
      elf_.require(in_image(target), "a relocation points outside of its segments");
      targets_.push_back(address);
      fill(address, target, true);
    };
    std::uint64_t next = 0;
    for (std::uint64_t i = 0; i < size / sizeof(Elf64_Relr); ++i) {
      const auto entry = elf_.at<Elf64_Relr>(table + i * sizeof(Elf64_Relr));
      if ((entry & 1) == 0) {
        relocate(entry);
        next = entry + 8;
        continue;
      }
      for (unsigned bit = 1; bit < 64; ++bit) {
        if ((entry >> bit & 1) != 0) relocate(next + 8 * (bit - 1));
      }
      next += 8 * 63;
    }
  }

  // The dynamic linker does not look at section headers. Where a library has them they say the same a second time, and
  // a segment that a damaged header moves elsewhere is found out.
  void check_sections() const {
    const Elf64_Ehdr& header = elf_.header();
    if (header.e_shoff == 0 || header.e_shnum == 0) return;
    elf_.require(header.e_shentsize == sizeof(Elf64_Shdr) && header.e_shstrndx < header.e_shnum,
                 "its section headers are damaged");
    const auto section = [&](std::uint64_t i) { return elf_.at<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr)); };
    elf_.require(header.e_shoff < elf_.bytes().size(), "its section headers are damaged");
    const Elf64_Shdr names = section(header.e_shstrndx);
    std::uint64_t thread_data = 0;  // bytes of thread-local data that are in the file
    for (std::uint64_t i = 1; i < header.e_shnum; ++i) {
      const Elf64_Shdr s = section(i);
      if ((s.sh_flags & SHF_TLS) != 0) {
        const Elf64_Phdr* thread = elf_.segment(PT_TLS);
        agree(thread != nullptr && s.sh_addr >= thread->p_vaddr && s.sh_addr - thread->p_vaddr <= thread->p_memsz &&
              s.sh_size <= thread->p_memsz - (s.sh_addr - thread->p_vaddr));
        if (s.sh_type != SHT_NOBITS) thread_data = std::max(thread_data, s.sh_addr + s.sh_size - thread->p_vaddr);
      }
      if (s.sh_type == SHT_SYMTAB && s.sh_link < header.e_shnum) check_symbol_table(s, section(s.sh_link));
      const bool zeros = s.sh_type == SHT_NOBITS;
      if ((s.sh_flags & SHF_ALLOC) == 0 || s.sh_size == 0 || (zeros && (s.sh_flags & SHF_TLS) != 0)) continue;
      const std::uint32_t rights =
          PF_R | ((s.sh_flags & SHF_WRITE) != 0 ? PF_W : 0u) | ((s.sh_flags & SHF_EXECINSTR) != 0 ? PF_X : 0u);
      const Elf64_Phdr* load = elf_.find(s.sh_addr, s.sh_size, rights, !zeros);
      agree(load != nullptr && (zeros || s.sh_offset - load->p_offset == s.sh_addr - load->p_vaddr));
      switch (s.sh_type) {
        case SHT_DYNAMIC:
          agree(s.sh_addr == elf_.segment(PT_DYNAMIC)->p_vaddr);
          break;
        case SHT_DYNSYM:
          agree(s.sh_addr == elf_.tag(DT_SYMTAB) && s.sh_size >= elf_.num_symbols() * sizeof(Elf64_Sym));
          break;
        case SHT_HASH:
          agree(s.sh_addr == elf_.tag(DT_HASH));
          break;
        case SHT_GNU_HASH:
          agree(s.sh_addr == elf_.tag(DT_GNU_HASH));
          break;
        case SHT_GNU_versym:
          agree(s.sh_addr == elf_.tag(DT_VERSYM));
          break;
        case SHT_GNU_verneed:
          agree(s.sh_addr == elf_.tag(DT_VERNEED));
          break;
        case SHT_INIT_ARRAY:
          agree(s.sh_addr == elf_.tag(DT_INIT_ARRAY) && s.sh_size == elf_.tag(DT_INIT_ARRAYSZ));
          break;
        case SHT_FINI_ARRAY:
          agree(s.sh_addr == elf_.tag(DT_FINI_ARRAY) && s.sh_size == elf_.tag(DT_FINI_ARRAYSZ));
          break;
        default:
          break;
      }
      const std::string name = section_name(names, s.sh_name);
      if (name == ".init") agree(s.sh_addr == elf_.tag(DT_INIT));
      if (name == ".fini") agree(s.sh_addr == elf_.tag(DT_FINI));
      if (name == ".rela.dyn") {
        // Some linkers count both tables here.
        const std::uint64_t size = elf_.tag(DT_RELASZ);
        agree(s.sh_addr == elf_.tag(DT_RELA) && (size == s.sh_size || size == s.sh_size + elf_.tag(DT_PLTRELSZ)));
      }
      if (name == ".rela.plt") agree(s.sh_addr == elf_.tag(DT_JMPREL) && s.sh_size == elf_.tag(DT_PLTRELSZ));
      if (name == ".eh_frame_hdr") {
        const Elf64_Phdr* unwind = elf_.segment(PT_GNU_EH_FRAME);
        agree(unwind != nullptr && unwind->p_vaddr == s.sh_addr && unwind->p_memsz == s.sh_size);
      }
      if (name == ".data" || name == ".bss") check_stays_writable(s);
    }
    const Elf64_Phdr* thread = elf_.segment(PT_TLS);
    agree(thread == nullptr || thread->p_filesz == thread_data);
  }

  // The table for debuggers says the same of the symbols that others can see.
  void check_symbol_table(const Elf64_Shdr& symbols, const Elf64_Shdr& names) const {
    const std::span<const std::byte> bytes = elf_.bytes();
    agree(names.sh_offset <= bytes.size() && names.sh_size <= bytes.size() - names.sh_offset && names.sh_size != 0 &&
          elf_.at<char>(names.sh_offset + names.sh_size - 1) == '\0');
    std::unordered_map<std::string_view, Elf64_Sym> seen, needed;
    for (std::uint64_t i = 1; i < symbols.sh_size / sizeof(Elf64_Sym); ++i) {
      agree(symbols.sh_offset < bytes.size());
      const auto s = elf_.at<Elf64_Sym>(symbols.sh_offset + i * sizeof(Elf64_Sym));
      if (ELF64_ST_BIND(s.st_info) == STB_LOCAL) continue;
      agree(s.st_name < names.sh_size);
      const std::string_view name(reinterpret_cast<const char*>(bytes.data()) + names.sh_offset + s.st_name);
      // "name@version" where it is defined elsewhere.
      s.st_shndx == SHN_UNDEF ? needed.emplace(name.substr(0, name.find('@')), s) : seen.emplace(name, s);
    }
    for (std::uint64_t i = 1; i < elf_.num_symbols(); ++i) {
      const Elf64_Sym s = elf_.symbol(i);
      if (s.st_shndx == SHN_UNDEF) {
        const auto other = needed.find(elf_.string(s.st_name));
        agree(needed.empty() || (other != needed.end() && other->second.st_info == s.st_info));
        continue;
      }
      const auto it = seen.find(elf_.string(s.st_name));
      agree(it == seen.end() ||
            (it->second.st_value == s.st_value && it->second.st_size == s.st_size && it->second.st_info == s.st_info &&
             it->second.st_other == s.st_other && it->second.st_shndx == s.st_shndx));
    }
  }

  std::string section_name(const Elf64_Shdr& names, std::uint64_t offset) const {
    std::string name;
    while (name.size() < 64 && offset < names.sh_size) {
      const char c = elf_.at<char>(names.sh_offset + offset++);
      if (c == '\0') break;
      name += c;
    }
    return name;
  }

  // What is made read-only after relocation must not be data that the code writes.
  void check_stays_writable(const Elf64_Shdr& data) const {
    const Elf64_Phdr* fixed = elf_.segment(PT_GNU_RELRO);
    if (fixed == nullptr) return;
    const std::uint64_t start = fixed->p_vaddr / kPage * kPage, end = (fixed->p_vaddr + fixed->p_memsz) / kPage * kPage;
    agree(data.sh_addr >= end || data.sh_addr + data.sh_size <= start);
  }

  void agree(bool condition) const {
    elf_.require(condition, "its section headers and its segments contradict each other");
  }

  const ElfImage& elf_;
  std::vector<Array> arrays_;
  std::vector<std::uint64_t> targets_;  // of relocations
  std::vector<std::uint64_t> tls_pairs_;
  std::vector<bool> functions_bound_, data_bound_;
};

}  // namespace

std::unordered_map<std::string_view, std::uint64_t> check_elf_image(const ElfImage& elf) {
  Checker checker(elf);
  checker.run();
  return checker.functions();
}

}  // namespace untorch
