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

// Blocks of tiles; where these are too few for the threads, of the groups, too, or of pairs of panels.
template <class Body>
void for_each_amx_part(const AmxConvolution& c, std::int64_t groups, bool parallel, Body&& body) {
  constexpr std::int64_t kTasksPerThread = 4;  // so that a thread that is held up costs a quarter of its share
  constexpr std::int64_t kBlockTiles = kAmxBlockPixels / kAmxTilePixels;
  const std::int64_t tiles = c.lines.count * c.lines.tiles(), blocks = (tiles + kBlockTiles - 1) / kBlockTiles;
  const std::int64_t threads = !parallel || omp_in_parallel() ? 1 : omp_get_max_threads();
  const std::int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  const bool by_group = groups > 1;
  const std::int64_t size = by_group ? groups : (c.panels + 1) / 2;
  const std::int64_t parts = std::clamp<std::int64_t>((wanted + blocks - 1) / blocks, 1, size);
  for_each_item(blocks * parts, threads > 1, [&](std::int64_t i) {
    const std::int64_t block = i / parts, part = i % parts;
    const std::int64_t first = size * part / parts, last = size * (part + 1) / parts;
    AmxPart to{tiles * block / blocks, tiles * (block + 1) / blocks, 0, groups, 0, c.panels};
    if (by_group) {
      to.group0 = first, to.group1 = last;
    } else {
      to.panel0 = 2 * first, to.panel1 = std::min(2 * last, c.panels);
    }
    body(to);
  });
}

}  // namespace untorch::kernels
