// Everything that the plan of a call depends on, as words: equal keys, equal plans.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "call/torch_state.h"

namespace cutfuse::call {

class CallKey {
 public:
  void add(uint64_t word) {
    if (size_ < kMaxWords) words_[size_] = word;
    ++size_;
    hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 29;
  }

  // Its memory counts only by whether it is aligned.
  void add(TensorFacts const& tensor) {
    bool const aligned = reinterpret_cast<uintptr_t>(tensor.data) % kAlignment == 0;
    add(tensor.dtype << 16 | static_cast<uint64_t>(tensor.ndim) << 8 | static_cast<uint64_t>(tensor.device_type) << 1 |
        (aligned ? 1 : 0));
    add(static_cast<uint64_t>(tensor.device_index));
    for (int d = 0; d < tensor.ndim; ++d) {
      add(static_cast<uint64_t>(tensor.sizes[d]));
      add(static_cast<uint64_t>(tensor.strides[d]));
    }
  }

  // Whether everything had room.
  bool is_complete() const { return size_ <= kMaxWords; }

  bool operator==(CallKey const& other) const {
    return size_ == other.size_ && std::equal(words_, words_ + size_, other.words_);
  }

  struct Hash {
    size_t operator()(CallKey const& key) const { return static_cast<size_t>(key.hash_); }
  };

 private:
  static constexpr size_t kMaxWords = 160;
  static constexpr uintptr_t kAlignment = 16;  // bytes

  uint64_t hash_ = 0;
  size_t size_ = 0;
  uint64_t words_[kMaxWords];
};

}  // namespace cutfuse::call
