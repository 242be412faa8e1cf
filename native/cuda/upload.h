// H2D copies of weights at PCIe bandwidth, through a ring of pinned buffers.
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

// Several threads fill pinned buffers (reading the source, which may be a mapped file, takes the time) while the copies
// of full ones run on streams of their own: double buffering a thread. The buffers are made at the first large upload
// and kept until the ring is destroyed, because pinning takes as long as copying some hundred megabytes. Thread-safe.
class UploadRing {
 public:
  UploadRing();
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  // Copies the parts, in any order, and returns when all are on the device. Small uploads bypass the ring.
  void upload(std::span<const UploadPart> parts, int device);

 private:
  class Lane;

  std::mutex mutex_;
  int device_ = -1;  // of the lanes
  std::vector<std::unique_ptr<Lane>> lanes_;
};

// One upload through a temporary ring.
void upload(DevicePtr to, const void* from, std::size_t nbytes, int device);

}  // namespace untorch::cuda
