#pragma once
// How the torch side calls the functions of launch.h.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <string>

#include "moesh/base/error.h"
#include "moesh/kernels/cuda/launch.h"

namespace moesh::kernels {
namespace on_device {

using namespace cuda;  // launch.h

/// The result of `check` for a device, by its number; each device is asked once.
template <cuda::Error (*check)(int device)>
std::string refusal(at::Device device) {
  constexpr int kMaxDevices = 64;
  struct Answer {
    std::once_flag asked;
    cuda::Error error = nullptr;
  };
  static Answer answers[kMaxDevices];
  int index = device.index();
  if (index < 0) {  // the current one; without one, the answer for the first
    const bool has_devices = c10::impl::hasDeviceGuardImpl(device.type()) &&
                             c10::impl::VirtualGuardImpl(device.type()).deviceCount() > 0;
    index = has_devices ? c10::impl::VirtualGuardImpl(device.type()).getDevice().index() : 0;
  }
  if (index >= kMaxDevices)
    return detail::concat("own kernels take devices 0 to ", kMaxDevices - 1);
  Answer& answer = answers[index];
  std::call_once(answer.asked, [&] { answer.error = check(index); });
  return answer.error ? answer.error : "";
}

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
inline const float* read_floats(const at::Tensor& t) {
  return has_memory(t) ? t.const_data_ptr<float>() : nullptr;
}
inline const std::int64_t* read_longs(const at::Tensor& t) {
  return has_memory(t) ? t.const_data_ptr<std::int64_t>() : nullptr;
}

inline bool in_chunks(const at::Tensor& t) {  // of 16 bytes, as the kernels read and write
  return reinterpret_cast<std::uintptr_t>(in(t)) % 16 == 0;
}
/// Heads whose features lie side by side, in such pieces.
inline bool takes_heads(const at::Tensor& t) {
  bool is_taken = t.scalar_type() == at::kBFloat16 && t.stride(-1) == 1 && in_chunks(t);
  for (std::int64_t d = 0; d + 1 < t.dim(); ++d) is_taken = is_taken && t.stride(d) % 8 == 0;
  return is_taken && t.size(-1) % 8 == 0;
}
/// A view may begin anywhere.
inline at::Tensor aligned(const at::Tensor& t) {
  return !t.defined() || in_chunks(t) ? t : t.clone();
}

}  // namespace on_device

namespace ampere {
using namespace on_device;
}
namespace hopper {
using namespace on_device;
}

}  // namespace moesh::kernels
