// Non-maximum suppression: greedy, in the order of the scores, O(n · kept).
#include <algorithm>
#include <vector>

#include "base/dispatch.h"
#include "kernels/detection.h"

namespace untorch::kernels::cpu {
namespace {

template <class T>
std::int64_t keep(const Nms& p, std::int64_t* kept) {
  struct Box {
    T x1, y1, x2, y2, area;
  };
  const auto n = static_cast<std::size_t>(p.n);
  std::vector<Box> boxes(n);
  for (std::size_t i = 0; i < n; ++i) {
    const T* const from = static_cast<const T*>(p.boxes) + p.order[i] * 4;
    boxes[i] = {from[0], from[1], from[2], from[3], (from[2] - from[0]) * (from[3] - from[1])};
  }
  std::vector<bool> gone(n);
  std::int64_t count = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (gone[i]) continue;
    kept[count++] = p.order[i];
    const Box a = boxes[i];
    for (std::size_t j = i + 1; j < n; ++j) {
      if (gone[j]) continue;
      const Box& b = boxes[j];
      const T width = std::max(T(0), std::min(a.x2, b.x2) - std::max(a.x1, b.x1)),
              height = std::max(T(0), std::min(a.y2, b.y2) - std::max(a.y1, b.y1));
      const T common = width * height;
      // Compared in double precision, as torchvision does.
      if (static_cast<double>(common / (a.area + b.area - common)) > p.threshold) gone[j] = true;
    }
  }
  return count;
}

}  // namespace

std::int64_t nms(const Nms& p, std::int64_t* kept) {
  return p.dtype == DType::kFloat64 ? keep<double>(p, kept) : keep<float>(p, kept);
}

}  // namespace untorch::kernels::cpu
