// memfd_create, and seals where the kernel has them.
#include "model/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace untorch {

MemoryFile::MemoryFile(std::span<const std::byte> contents, std::string name)
    : name_(std::move(name)), size_(contents.size()) {
  if (contents.empty())
    throw_error(ErrorKind::kInvalidFile, name_, " is no usable shared library: it has no ELF header");
  fd_ = memfd_create("untorch-model", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) fail("cannot create a memory file", errno);
  try {
    if (ftruncate(fd_, static_cast<off_t>(size_)) != 0) fail("cannot size a memory file", errno);
    for (std::size_t done = 0; done < size_;) {
      const ssize_t n = write(fd_, contents.data() + done, std::min(size_ - done, std::size_t{1} << 30));
      if (n < 0 && errno == EINTR) continue;
      // The kernel reads the mapped file here: one that was truncated is no SIGBUS but this.
      if (n < 0 && errno == EFAULT) {
        throw_error(ErrorKind::kInvalidFile, name_, ": the file was truncated while in use");
      }
      if (n <= 0) fail("cannot fill a memory file", n < 0 ? errno : ENOSPC);
      done += static_cast<std::size_t>(n);
    }
    void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED) fail("cannot map a memory file", errno);
    data_ = static_cast<std::byte*>(mapped);
  } catch (...) {
    close(fd_);
    throw;
  }
}

MemoryFile::MemoryFile(MemoryFile&& other) noexcept
    : name_(std::move(other.name_)),
      fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(other.size_) {}

MemoryFile::~MemoryFile() {
  if (data_ != nullptr) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

void MemoryFile::seal() {
  // A file with a shared writable mapping cannot be sealed: a private one takes its place.
  void* mapped = mmap(data_, size_, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd_, 0);
  if (mapped == MAP_FAILED) fail("cannot map a memory file", errno);
  (void)fcntl(fd_, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

void MemoryFile::fail(const char* what, int error) const {
  const std::string text =
      std::string(what) + " (" + std::to_string(size_) + " bytes of " + name_ + "): " + std::strerror(error);
  throw Error(kind_of_errno(error, ErrorKind::kOutOfMemory), text, error);
}

}  // namespace untorch
