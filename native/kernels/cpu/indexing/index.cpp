// Advanced indexing: index tensors become element offsets (8 bytes a position), through which elements are gathered and
// written. Gathered runs of memory are copied whole.
#include "kernels/index.h"

#include <array>
#include <cstring>
#include <span>

#include "base/dispatch.h"
#include "kernels/cpu/common/strided_loop.h"

namespace untorch::kernels::cpu {
namespace {

// The positions of an entry in row-major order. Operands: offsets, index tensor.
StridedLoop<2> positions_of(const IndexList& list, const IndexList::Entry& entry) {
  std::array<std::int64_t, kMaxDims> sizes{}, order{}, strides{};
  std::int64_t step = 1;
  const auto ndim = static_cast<std::size_t>(list.ndim);
  for (std::size_t d = 0; d < ndim; ++d) {  // innermost first there, last here
    const std::size_t to = ndim - 1 - d;
    sizes[to] = list.sizes[d];
    strides[to] = entry.strides[d];
    order[to] = step;
    step *= list.sizes[d];
  }
  using Span = std::span<const std::int64_t>;
  return StridedLoop<2>(Span(sizes.data(), ndim), {Span(order.data(), ndim), Span(strides.data(), ndim)}, true);
}

// Gives an index that is out of range.
template <class T>
std::optional<std::int64_t> add_entry(const IndexList& list, const IndexList::Entry& entry, std::int64_t* offsets,
                                      bool add) {
  const StridedLoop<2> loop = positions_of(list, entry);
  const auto step = loop.inner();
  const T* values = static_cast<const T*>(entry.data);
  std::optional<std::int64_t> wrong;
  loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
    if (wrong) return;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t value = values[at[1] + i * step[1]];
      if (value < -entry.size || value >= entry.size) {
        wrong = value;
        return;
      }
      const std::int64_t offset = (value < 0 ? value + entry.size : value) * entry.stride;
      std::int64_t& to = offsets[at[0] + i * step[0]];
      to = add ? to + offset : offset;
    }
  });
  return wrong;
}

// body(target, value) for every element in order.
template <class T, class Body>
void put(const Strided<4>& space, void* out, const std::int64_t* offsets, const void* values, Body&& body) {
  const StridedLoop<4> loop(space);
  const auto step = loop.inner();
  T* to = static_cast<T*>(out);
  const T* from = static_cast<const T*>(values);
  loop.run_serial([&](const std::array<std::int64_t, 4>& at, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      body(to[at[1] + i * step[1] + offsets[at[2] + i * step[2]]], from[at[3] + i * step[3]]);
    }
  });
}

}  // namespace

std::optional<IndexFault> index_offsets(const IndexList& list, std::int64_t* offsets, bool add) {
  for (int e = 0; e < list.count; ++e, add = true) {
    const IndexList::Entry& entry = list.entries[e];
    const auto wrong = entry.wide ? add_entry<std::int64_t>(list, entry, offsets, add)
                                  : add_entry<std::int32_t>(list, entry, offsets, add);
    if (wrong) return IndexFault{e, *wrong};
  }
  return std::nullopt;
}

void index_gather(const Strided<3>& space, DType dtype, void* out, const void* self, const std::int64_t* offsets) {
  const StridedLoop<3> loop(space);
  const auto step = loop.inner();
  dispatch_width("index", dtype, [&]<class T>() {
    T* to = static_cast<T*>(out);
    const T* from = static_cast<const T*>(self);
    loop.run([&](const std::array<std::int64_t, 3>& at, std::int64_t n) {
      if (step[0] == 1 && step[1] == 1 && step[2] == 0) {
        std::memcpy(to + at[0], from + at[1] + offsets[at[2]], static_cast<std::size_t>(n) * sizeof(T));
        return;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        to[at[0] + i * step[0]] = from[at[1] + i * step[1] + offsets[at[2] + i * step[2]]];
      }
    });
  });
}

void index_put(const Strided<4>& space, DType dtype, void* out, const std::int64_t* offsets, const void* values) {
  dispatch_width("index_put", dtype,
                 [&]<class T>() { put<T>(space, out, offsets, values, [](T& target, T value) { target = value; }); });
}

void index_add(const Strided<4>& space, DType dtype, void* out, const std::int64_t* offsets, const void* values) {
  dispatch_number("index_put", dtype, [&]<class T>() {
    put<T>(space, out, offsets, values, [](T& target, T value) {
      if constexpr (std::is_same_v<T, bool>) {
        target = target || value;
      } else {
        target = static_cast<T>(target + value);
      }
    });
  });
}

}  // namespace untorch::kernels::cpu
