/* What libuntorch.so offers its Python binding beyond include/untorch. The binding includes nothing else of native/. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/small_vector.h"
#include "untorch/untorch.h"

extern "C" {

/* Another handle on the same storage; free it. */
UNTORCH_API untorch_status untorch_tensor_share(const untorch_tensor* tensor, untorch_tensor** out);

/* A shared library's dynamic symbol. version and version_file are NULL unless it is undefined and versioned. */
typedef struct untorch_elf_symbol {
  const char* name;
  const char* version;
  const char* version_file;
  int32_t is_defined, is_weak;
} untorch_elf_symbol;

/* A symbol version that a shared library needs of `file`. */
typedef struct untorch_elf_version {
  const char* file;
  const char* name;
} untorch_elf_version;

/* What a shared library needs and gives. The texts lie in the bytes that were read, which must outlive it. */
typedef struct untorch_elf {
  const char* machine; /* "x86_64", "aarch64", … or "machine 999" */
  const char* soname;  /* NULL: it has none */
  const char* const* needed;
  size_t num_needed;
  const untorch_elf_symbol* symbols;
  size_t num_symbols;
  const untorch_elf_version* versions;
  size_t num_versions;
} untorch_elf;

/* Reads a 64-bit little-endian shared library of any machine. Every offset is checked; UNTORCH_INVALID_FILE with `name`
 * in the message where one leaves the file. */
UNTORCH_API untorch_status untorch_elf_read(const void* bytes, size_t length, const char* name,
                                            const untorch_elf** out);
UNTORCH_API void untorch_elf_free(const untorch_elf* elf);

}  // extern "C"
