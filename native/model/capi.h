/* What libuntorch.so offers its Python binding beyond include/untorch. The binding includes nothing else of native/. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/small_vector.h"
#include "untorch/untorch.h"

extern "C" {

/* Another handle on the same storage; free it. */
UNTORCH_API untorch_status untorch_tensor_share(const untorch_tensor* tensor, untorch_tensor** out);

/* A warning that nobody has taken yet, such as that the system has no thread left; mostly NULL. */
UNTORCH_API const char* untorch_take_warning(void);
/* The errno of the last error, if it is of a file that the operating system does not open; else 0. */
UNTORCH_API int32_t untorch_last_system_error(void);

/* A .pt2 file as the loader reads it. Texts and memory that it gives are valid until it and the programs made from it
 * are freed. */
typedef struct untorch_archive untorch_archive;
typedef struct untorch_archive_entry {
  const char* name; /* without the top folder */
  uint64_t offset, size;
  uint32_t crc;
} untorch_archive_entry;
UNTORCH_API untorch_status untorch_archive_open(const char* path, int32_t copy, untorch_archive** out);
/* `release` is called once, when the memory is no longer used; at once if it is copied, or if this fails. */
UNTORCH_API untorch_status untorch_archive_open_memory(const void* data, size_t length, int32_t copy,
                                                       void (*release)(void* context), void* context,
                                                       untorch_archive** out);
UNTORCH_API void untorch_archive_free(untorch_archive* archive);
UNTORCH_API const char* untorch_archive_path(const untorch_archive* archive);
UNTORCH_API const char* untorch_archive_root(const untorch_archive* archive);
UNTORCH_API uint64_t untorch_archive_nbytes(const untorch_archive* archive);
/* Calls `visit` for each entry, in the order of their names. */
UNTORCH_API untorch_status untorch_archive_entries(const untorch_archive* archive,
                                                   void (*visit)(void* context, const untorch_archive_entry* entry),
                                                   void* context);
/* The bytes in place, not compared with anything; untorch_archive_check_whole afterwards says whether they were there.
 */
UNTORCH_API untorch_status untorch_archive_view(const untorch_archive* archive, const char* name, const void** data,
                                                size_t* length);
UNTORCH_API untorch_status untorch_archive_check_whole(const untorch_archive* archive);
/* A copy that was compared with the checksums. */
UNTORCH_API untorch_status untorch_archive_text(const untorch_archive* archive, const char* name, const char** text,
                                                size_t* length);
/* UNTORCH_INVALID_FILE unless the entry is JSON as the loader accepts it. */
UNTORCH_API untorch_status untorch_archive_check_json(const untorch_archive* archive, const char* name);
/* Reads the manifest, or what a stock package tells; the methods as JSON text. */
UNTORCH_API untorch_status untorch_archive_methods(untorch_archive* archive, const char** json);
/* The SHA-256 that an entry must have when it is next read, beside what the manifest says; else UNTORCH_UNTRUSTED. */
UNTORCH_API untorch_status untorch_archive_expect(untorch_archive* archive, const char* name, const char* hex);
/* Reads the manifest, if there is one, and compares all entries. threads: 0 for as many as there are cores. */
UNTORCH_API untorch_status untorch_archive_verify(untorch_archive* archive, uint32_t threads);
/* 64 hexadecimal digits for each entry, one behind the other, in the order of their names. */
UNTORCH_API untorch_status untorch_archive_digests(const untorch_archive* archive, uint32_t threads, char* out);
/* The SHA-256 of the file, and those of its entries as for untorch_archive_digests, in one pass: both are of the same
 * bytes, even if somebody writes to the file. */
UNTORCH_API untorch_status untorch_archive_file_digests(const untorch_archive* archive, char* file, char* entries);
/* Device, inode, size and time of change of the file that was opened: "8:42:…"; of memory another text. */
UNTORCH_API const char* untorch_archive_identity(const untorch_archive* archive);
/* The weights beside the file are compared with the manifest's SHA-256 when a program is made, else UNTORCH_UNTRUSTED:
 * for when a trust policy accepted the manifest. */
UNTORCH_API void untorch_archive_trust_external(untorch_archive* archive);
/* Finds the weights beside the file, as opening a program does, and compares all bytes of them. weights: as in
 * untorch_load_options. */
UNTORCH_API untorch_status untorch_archive_verify_external(untorch_archive* archive, const char* weights);
/* The copy of `options` is of the weights beside the file: the archive is open. */
UNTORCH_API untorch_status untorch_program_open_archive(untorch_archive* archive, const untorch_load_options* options,
                                                        untorch_program** out);

/* A .safetensors file as the loader reads it. Texts and memory that it gives are valid until it is freed. */
typedef struct untorch_safetensors untorch_safetensors;
typedef struct untorch_safetensors_tensor {
  const char* name;
  const char* dtype; /* "F32", "BF16" */
  const int64_t* shape;
  size_t ndim;
  const void* data;
  size_t nbytes;
} untorch_safetensors_tensor;
UNTORCH_API untorch_status untorch_safetensors_open(const char* path, untorch_safetensors** out);
UNTORCH_API void untorch_safetensors_free(untorch_safetensors* file);
/* Calls `visit` for each tensor, in the order of their names. */
UNTORCH_API untorch_status untorch_safetensors_tensors(const untorch_safetensors* file,
                                                       void (*visit)(void* context,
                                                                     const untorch_safetensors_tensor* tensor),
                                                       void* context);
/* 64 hexadecimal digits: of the first and last bytes, as the manifest has it of weights in such files. */
UNTORCH_API untorch_status untorch_sample_digest(const void* data, size_t length, char* out);

/* 64 hexadecimal digits for each block of the bytes, on several threads; block_bytes 0: one for all of them. `out` has
 * room for them. portable: not by the CPU's SHA instructions, for tests. */
UNTORCH_API untorch_status untorch_sha256(const void* data, size_t length, uint64_t block_bytes, int32_t portable,
                                          char* out);
/* References on the tensor's memory: 1 if only this handle has it. 0 for memory that the library only borrows. */
UNTORCH_API int64_t untorch_tensor_use_count(const untorch_tensor* tensor);
/* Makes the tensor `out` of the values in memory of its own, on the same device (there on the call stream). `out` may
 * be `tensor`. */
UNTORCH_API untorch_status untorch_tensor_copy_of(const untorch_tensor* tensor, untorch_tensor* out);
/* The same with another dtype, and with these strides (one for each dimension) unless they are NULL. */
UNTORCH_API untorch_status untorch_tensor_convert(const untorch_tensor* tensor, int32_t dtype, const int64_t* strides,
                                                  untorch_tensor* out);
/* Copies row `source` of the tensor's first dimension over row `target`; on a GPU on the device's call stream. */
UNTORCH_API untorch_status untorch_tensor_copy_row(untorch_tensor* tensor, int64_t source, int64_t target);
/* For tests: a native operator by itself. `node` is one entry of the extern nodes' list, as JSON; integers and tensors
 * as for the proxy callback. Runs on the device of its operands, of which there must be one. */
UNTORCH_API untorch_status untorch_call_native_operator(const char* node, int32_t num_ints, const int64_t* ints,
                                                        int32_t num_tensors, untorch_tensor** tensors);
/* 1 while the stream is captured into a graph. */
UNTORCH_API int32_t untorch_stream_is_capturing(int32_t device_index, void* stream);
UNTORCH_API untorch_tensor* untorch_tensor_new(void);
/* 1 if the graph writes into this input of the caller's, whose memory must then live as long as the graph. */
UNTORCH_API int32_t untorch_graph_writes(const untorch_graph* graph, size_t input);

/* The generated C++ of the method, if the file has it; else NULL. Valid while the program is. */
UNTORCH_API untorch_status untorch_method_source(untorch_method* method, const char** text, size_t* length);

/* Called on the process's main thread while a call runs or waits, about every 50 ms between its operators; a return
 * value that is not 0 ends the call with UNTORCH_MODEL. For all calls of the process; NULL: never. */
UNTORCH_API void untorch_set_interrupt_check(int (*check)(void));

/* What a profile records (base/profile.h). device_…_ns: -1 without a GPU's time; all times are of CLOCK_MONOTONIC. */
typedef struct untorch_profile_range {
  const char* name;
  const char* function;
  int32_t kind;     /* 0 call of a method, 1 C function, 2 kernel of the library, 3 launch on a GPU, 4 graph replay */
  int32_t captured; /* in a graph: begin_ns and end_ns are those of the capture */
  uint64_t thread;
  int64_t begin_ns, end_ns;
  double device_begin_ns, device_end_ns;
} untorch_profile_range;
/* Records all calls of the process from now on. device_index: the GPU whose work is timed; -1: none. The kernels of a
 * library are recorded if it is opened after that. */
UNTORCH_API untorch_status untorch_profile_start(int32_t device_index);
/* Waits for the GPU, and gives what ended since the last time. `dropped`: ranges that were too many. */
UNTORCH_API untorch_status untorch_profile_collect(void (*visit)(void* context, const untorch_profile_range* range),
                                                   void* context, size_t* dropped);
UNTORCH_API void untorch_profile_stop(void);
/* Bytes a second that `threads` threads read together from `bytes` bytes of memory each, the best of several passes. */
UNTORCH_API untorch_status untorch_profile_read_rate(size_t bytes, uint32_t threads, double* bytes_per_second);

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
