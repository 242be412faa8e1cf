// SmallVector: a vector whose first N elements lie in the object itself. Header only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

namespace untorch {

// Up to N elements allocate nothing. data() is stable until the size grows past the capacity, or the vector is moved.
template <class T, std::size_t N>
class SmallVector {
 public:
  using value_type = T;
  static constexpr std::size_t kInline = N;

  SmallVector() noexcept : data_(inline_data()) {}
  explicit SmallVector(std::size_t size) : SmallVector() { resize(size); }    // value-initialised
  SmallVector(std::span<const T> values) : SmallVector() { append(values); }  // NOLINT(google-explicit-constructor)
  SmallVector(std::initializer_list<T> values) : SmallVector() { append({values.begin(), values.size()}); }
  SmallVector(const SmallVector& other) : SmallVector() { append(other); }
  SmallVector(SmallVector&& other) noexcept : SmallVector() { take(other); }
  SmallVector& operator=(const SmallVector& other) {
    if (this != &other) assign(other);
    return *this;
  }
  SmallVector& operator=(SmallVector&& other) noexcept {
    if (this != &other) {
      release();
      take(other);
    }
    return *this;
  }
  ~SmallVector() { release(); }

  // `values` must not be a part of this vector.
  void assign(std::span<const T> values) {
    clear();
    append(values);
  }
  void resize(std::size_t size) {  // new elements are value-initialised
    if (size > capacity_) grow(size);
    if (size > size_) std::uninitialized_value_construct(data_ + size_, data_ + size);
    if (size < size_) std::destroy(data_ + size, data_ + size_);
    size_ = size;
  }
  template <class... Arguments>
  T& emplace_back(Arguments&&... arguments) {
    if (size_ == capacity_) grow(2 * capacity_);
    T* const made = ::new (static_cast<void*>(data_ + size_)) T(std::forward<Arguments>(arguments)...);
    ++size_;
    return *made;
  }
  void push_back(T value) { emplace_back(std::move(value)); }
  void clear() noexcept {
    std::destroy(begin(), end());
    size_ = 0;
  }

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T* data() noexcept { return data_; }
  const T* data() const noexcept { return data_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  T& back() noexcept { return data_[size_ - 1]; }
  const T& back() const noexcept { return data_[size_ - 1]; }
  T* begin() noexcept { return data_; }
  T* end() noexcept { return data_ + size_; }
  const T* begin() const noexcept { return data_; }
  const T* end() const noexcept { return data_ + size_; }
  operator std::span<const T>() const noexcept { return {data_, size_}; }  // NOLINT(google-explicit-constructor)
  bool operator==(const SmallVector& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  T* inline_data() noexcept { return reinterpret_cast<T*>(inline_); }
  bool on_heap() const noexcept { return capacity_ != N; }  // what is on the heap is larger than N

  void append(std::span<const T> values) {
    if (size_ + values.size() > capacity_) grow(size_ + values.size());
    std::uninitialized_copy(values.begin(), values.end(), data_ + size_);
    size_ += values.size();
  }
  void grow(std::size_t capacity) {
    T* const heap = std::allocator<T>().allocate(capacity);
    // Elements that cannot move are all made at once: there are none to be moved then.
    if constexpr (std::is_move_constructible_v<T>) std::uninitialized_move(begin(), end(), heap);
    const std::size_t size = size_;
    release();
    data_ = heap;
    size_ = size;
    capacity_ = capacity;
  }
  void release() noexcept {
    clear();
    if (on_heap()) std::allocator<T>().deallocate(data_, capacity_);
    data_ = inline_data();
    capacity_ = N;
  }
  // The elements of `other`, which is empty afterwards. This vector is empty and on its inline memory.
  void take(SmallVector& other) noexcept {
    if (other.on_heap()) {
      data_ = std::exchange(other.data_, other.inline_data());
      capacity_ = std::exchange(other.capacity_, N);
      size_ = std::exchange(other.size_, 0);
      return;
    }
    std::uninitialized_move(other.begin(), other.end(), data_);
    size_ = other.size_;
    other.clear();
  }

  T* data_;
  std::size_t size_ = 0, capacity_ = N;
  alignas(T) std::byte inline_[N * sizeof(T)];
};

}  // namespace untorch
