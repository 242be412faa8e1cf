// Memory for the image of a convolution by AMX, and its work cut for the threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/convolution/amx_lines.h"

namespace untorch::kernels {

// Bytes from a pixel to the next: whole lines of cache, and no multiple of 512, of which 16 rows of a tile would share
// a few sets of L1.
inline std::int64_t amx_pixel(std::int64_t nbytes) {
  const std::int64_t lines = (nbytes + 63) / 64;
  return 64 * (lines % 8 == 0 ? lines + 1 : lines);
}

// Of the calling thread until it asks again; begins with a line of cache.
inline char* amx_memory(std::int64_t nbytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < static_cast<std::size_t>(nbytes + 64)) memory.resize(static_cast<std::size_t>(nbytes + 64));
  return memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
}

// Blocks of tiles; where these are too few for the threads, each in parts: some of the groups, or pairs of panels.
struct AmxBlocks {
  std::int64_t tiles, count, parts, groups, panels;
  bool parallel;

  AmxPart part(std::int64_t block, std::int64_t index) const noexcept {
    AmxPart to{tiles * block / count, tiles * (block + 1) / count, 0, groups, 0, panels};
    const std::int64_t size = groups > 1 ? groups : (panels + 1) / 2;
    const std::int64_t first = size * index / parts, last = size * (index + 1) / parts;
    if (groups > 1) {
      to.group0 = first, to.group1 = last;
    } else {
      to.panel0 = 2 * first, to.panel1 = std::min(2 * last, panels);
    }
    return to;
  }
};

inline AmxBlocks amx_blocks(const AmxLines& lines, std::int64_t groups, std::int64_t panels, bool parallel) {
  constexpr std::int64_t kTasksPerThread = 4;  // so that a thread that is held up costs a quarter of its share
  constexpr std::int64_t kBlockTiles = kAmxBlockPixels / kAmxTilePixels;
  const std::int64_t tiles = lines.count * lines.tiles(), blocks = (tiles + kBlockTiles - 1) / kBlockTiles;
  const std::int64_t threads = !parallel || omp_in_parallel() ? 1 : omp_get_max_threads();
  const std::int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  const std::int64_t most = groups > 1 ? groups : (panels + 1) / 2;
  const std::int64_t parts = std::clamp<std::int64_t>((wanted + blocks - 1) / blocks, 1, most);
  return {tiles, blocks, parts, groups, panels, threads > 1};
}

template <class Body>
void for_each_amx_part(const AmxBlocks& b, Body&& body) {
  for_each_item(b.count * b.parts, b.parallel, [&](std::int64_t i) { body(b.part(i / b.parts, i % b.parts)); });
}

}  // namespace untorch::kernels
