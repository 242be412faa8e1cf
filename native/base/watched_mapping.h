// Mapped files that may become shorter while they are in use: their reads end in zeros and a flag instead of SIGBUS.
#pragma once

#include <cstddef>

namespace untorch {

struct MappedRegion;

// While it lives, a read of [data, data + size) that the file no longer has finds zeros: a SIGBUS handler puts zero
// pages in the place of those that are gone, from the faulting one to the end, and sets the flag. Any thread and any
// code may read, the compiled model's too, so who reads looks at truncated() afterwards. Signals that are not about
// such a mapping go to the handler that was there before. The handler is installed with the first mapping.
//
// Not seen: zeros behind the new end of the file within its last page, and bytes that are overwritten in place.
class WatchedMapping {
 public:
  // data: the start of a mapping, as mmap gave it.
  WatchedMapping(const void* data, std::size_t size);
  ~WatchedMapping();
  WatchedMapping(const WatchedMapping&) = delete;
  WatchedMapping& operator=(const WatchedMapping&) = delete;
  bool truncated() const noexcept;

 private:
  MappedRegion* region_;
};

}  // namespace untorch
