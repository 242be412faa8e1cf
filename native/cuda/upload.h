// Host memory to the device at bus speed.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/driver.h"

namespace untorch::cuda {

struct UploadPart {
  DevicePtr to;
  const void* from;
  std::size_t nbytes;
};

// Pinned memory that is filled by several threads (reading the source, which may be a mapped file, is what takes the
// time) while what was filled before travels, on streams of its own. It is made when it first pays and kept until the
// ring ends, because pinning takes as long as some hundred megabytes take to travel. Thread-safe.
class UploadRing {
 public:
  UploadRing();
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  // Copies the parts, in any order, and returns when all have arrived. Few bytes go straight.
  void upload(std::span<const UploadPart> parts, int device);

 private:
  class Lane;

  std::mutex mutex_;
  int device_ = -1;  // of the lanes
  std::vector<std::unique_ptr<Lane>> lanes_;
};

// The same once, without a ring that is kept.
void upload(DevicePtr to, const void* from, std::size_t nbytes, int device);

}  // namespace untorch::cuda
