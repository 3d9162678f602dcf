#pragma once
// How the torch side calls the functions of launch.h.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "moesh/base/error.h"
#include "moesh/kernels/cuda/launch.h"

namespace moesh::kernels::hopper {

using namespace cuda;  // launch.h

/// Makes the device of a tensor current, and calls kernels on its stream; on meta, which has none,
/// it does nothing.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const at::Tensor& t) : guard_(t.device()), is_meta_(t.is_meta()) {
    const at::Device device = t.device();
    if (!is_meta_)
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  }
  template <class Kernel, class... Arguments>
  void operator()(const char* name, Kernel* kernel, const Arguments&... arguments) const {
    if (is_meta_) return;
    const cuda::Error error = kernel(arguments..., stream_);
    MOESH_CHECK(!error, ErrorKind::device, "kernel ", name, ": ", error);
  }

 private:
  c10::DeviceGuard guard_;
  bool is_meta_;
  Stream stream_ = nullptr;
};

inline bool has_memory(const at::Tensor& t) { return t.defined() && !t.is_meta(); }
inline const void* in(const at::Tensor& t) { return has_memory(t) ? t.const_data_ptr() : nullptr; }
inline void* out(const at::Tensor& t) { return has_memory(t) ? t.mutable_data_ptr() : nullptr; }
inline const std::int32_t* indices(const at::Tensor& t) {
  return has_memory(t) ? t.const_data_ptr<std::int32_t>() : nullptr;
}
inline float* floats(const at::Tensor& t) {
  return has_memory(t) ? t.mutable_data_ptr<float>() : nullptr;
}

inline bool in_chunks(const at::Tensor& t) {  // of 16 bytes, as the kernels read and write
  return reinterpret_cast<std::uintptr_t>(in(t)) % 16 == 0;
}
/// A view may begin anywhere.
inline at::Tensor aligned(const at::Tensor& t) {
  return !t.defined() || in_chunks(t) ? t : t.clone();
}

}  // namespace moesh::kernels::hopper
