// Element types that tensors in memory may have. Arithmetic is fp32 whatever the element type.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cutfuse {

enum class DType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr int kVectorBytes = 16;  // the widest load of one thread

constexpr int elements_per_vector(DType dtype) { return kVectorBytes / static_cast<int>(size_of(dtype)); }

constexpr char const* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

}  // namespace cutfuse
