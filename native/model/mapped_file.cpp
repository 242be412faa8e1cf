// open, mmap, and reads into anonymous memory.
#include "model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace untorch {
namespace {

[[noreturn]] void fail_to_open(const std::string& path, int error) {
  if (error == ENOMEM) throw_error(ErrorKind::kOutOfMemory, "cannot open ", path, ": ", std::strerror(error));
  throw Error(ErrorKind::kInvalidFile, "cannot open " + path + ": " + std::strerror(error), error);
}

struct Descriptor {
  int fd;
  ~Descriptor() { ::close(fd); }
};

// One identity for each: nothing tells whether two buffers hold the same.
std::string memory_identity() {
  static std::atomic<unsigned long> serial{0};
  return "memory:" + std::to_string(serial.fetch_add(1));
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path, bool copy) {
  // Without O_NONBLOCK, opening a FIFO waits for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    // What a socket, or a device without a driver, gives.
    if (errno == ENXIO || errno == ENODEV) throw_error(ErrorKind::kInvalidFile, path, " is no regular file");
    fail_to_open(path, errno);
  }
  const Descriptor keep{fd};
  struct stat info {};
  if (fstat(fd, &info) != 0) fail_to_open(path, errno);
  if (S_ISDIR(info.st_mode)) fail_to_open(path, EISDIR);
  if (!S_ISREG(info.st_mode)) throw_error(ErrorKind::kInvalidFile, path, " is no regular file");
  if (info.st_size == 0) throw_error(ErrorKind::kInvalidFile, path, " is empty");
  const auto size = static_cast<std::size_t>(info.st_size);
  std::shared_ptr<MappedFile> file(new MappedFile(
      path, std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino) + ":" + std::to_string(size) + ":" +
                std::to_string(info.st_mtim.tv_sec) + "." + std::to_string(info.st_mtim.tv_nsec)));
  if (!copy) {
    void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      if (error == ENOMEM) {
        throw_error(ErrorKind::kOutOfMemory, "cannot map ", path, " (", size, " bytes): ", std::strerror(error));
      }
      throw Error(ErrorKind::kInvalidFile, "cannot map " + path + ": " + std::strerror(error), error);
    }
    file->data_ = static_cast<const std::byte*>(data);
    file->size_ = size;
    file->mapped_ = true;
    file->watch_ = std::make_unique<WatchedMapping>(data, size);
    return file;
  }
  std::byte* const to = file->allocate(size);
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = pread(fd, to + done, std::min(size - done, std::size_t{1} << 30), static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw Error(ErrorKind::kInvalidFile, "cannot read " + path + ": " + std::strerror(errno), errno);
    if (n == 0) file->fail_truncated();
    done += static_cast<std::size_t>(n);
  }
  file->protect();
  return file;
}

std::shared_ptr<const MappedFile> MappedFile::of_memory(std::span<const std::byte> bytes, bool copy,
                                                        std::function<void()> release) {
  std::shared_ptr<MappedFile> file(new MappedFile("<memory>", memory_identity()));
  file->release_ = std::move(release);
  if (bytes.empty()) throw_error(ErrorKind::kInvalidFile, file->path_, " is empty");
  if (!copy) {
    file->data_ = bytes.data();
    file->size_ = bytes.size();
    return file;
  }
  std::memcpy(file->allocate(bytes.size()), bytes.data(), bytes.size());
  file->protect();
  if (file->release_) std::exchange(file->release_, nullptr)();
  return file;
}

std::byte* MappedFile::allocate(std::size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw_error(ErrorKind::kOutOfMemory, "cannot copy ", path_, " (", size, " bytes): ", std::strerror(errno));
  }
  (void)madvise(data, size, MADV_HUGEPAGE);
  data_ = static_cast<const std::byte*>(data);
  size_ = size;
  mapped_ = true;
  return static_cast<std::byte*>(data);
}

void MappedFile::protect() const noexcept { (void)mprotect(const_cast<std::byte*>(data_), size_, PROT_READ); }

MappedFile::~MappedFile() {
  watch_.reset();
  if (mapped_) munmap(const_cast<std::byte*>(data_), size_);
  if (release_) release_();
}

void MappedFile::fail_truncated() const {
  throw_error(ErrorKind::kInvalidFile, path_,
              " was truncated while in use: replace files by renaming a new one into place, or load with copy=True");
}

}  // namespace untorch
