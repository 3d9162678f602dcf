#pragma once
// Scratch memory of the workers of one call.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "moesh/base/error.h"

namespace moesh::kernels::cpu {

/// Bytes that Arena::take<T>(count) uses: whole cache lines.
template <class T>
std::int64_t space(std::int64_t count) {
  return (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
}

/// Memory of one worker during one task, handed out from the front.
class Arena {
 public:
  Arena(char* begin, std::int64_t bytes) : begin_(begin), left_(bytes) {}
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t bytes = space<T>(count);
    MOESH_CHECK(bytes <= left_, "scratch memory of a kernel is short by ", bytes - left_, " bytes");
    char* p = begin_;
    begin_ += bytes, left_ -= bytes;
    return reinterpret_cast<T*>(p);
  }

 private:
  char* begin_;
  std::int64_t left_;
};

/// `bytes` for each of so many workers.
class Scratch {
 public:
  Scratch(std::int64_t workers, std::int64_t bytes)
      : bytes_(space<char>(bytes)), memory_(at::empty({workers * bytes_}, at::kByte)) {}
  Arena arena(std::int64_t worker) const {
    return {static_cast<char*>(memory_.data_ptr()) + worker * bytes_, bytes_};
  }

 private:
  std::int64_t bytes_;
  at::Tensor memory_;
};

}  // namespace moesh::kernels::cpu
