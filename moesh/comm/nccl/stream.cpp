#include "moesh/comm/nccl/stream.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "moesh/base/error.h"

namespace moesh::comm {
namespace {

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class DeviceMark final : public Mark {
 public:
  explicit DeviceMark(const c10::Stream& stream)
      : event_(stream.device_type()), home_(current_stream(stream.device())) {
    event_.record(stream);
  }
  bool done() const override { return event_.query(); }
  void hold_current() override {
    const c10::Stream current = current_stream(home_.device());
    event_.block(current);
    // The memory of the operation belongs to the stream which was current at its start: once that
    // stream waits too, the caching allocator may hand the memory out again, and nobody has to keep
    // it.
    if (current != home_) event_.block(home_);
  }

 private:
  c10::Event event_;
  c10::Stream home_;
};

}  // namespace

DeviceStream::DeviceStream(at::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, /*priority=*/-1)) {}

void DeviceStream::follow_current() {
  c10::Event ready(stream_.device_type());
  ready.record(current_stream(stream_.device()));
  ready.block(stream_);
}

void DeviceStream::run(const std::function<void()>& f) {
  const c10::StreamGuard guard(stream_);
  f();
}

std::shared_ptr<Mark> DeviceStream::mark() { return std::make_shared<DeviceMark>(stream_); }

std::unique_ptr<CommStream> device_stream(at::Device device) {
  return std::make_unique<DeviceStream>(device);
}

at::Device existing_device(at::Device device) {
  if (device.is_cpu()) return device;
  MOESH_CHECK(c10::impl::hasDeviceGuardImpl(device.type()), ErrorKind::device,
              "there is no device ", device, ": this LibTorch was built without ",
              c10::DeviceTypeName(device.type()), "; use a build that has it, or device cpu");
  const c10::impl::VirtualGuardImpl guard(device.type());
  const int count = guard.deviceCount();
  MOESH_CHECK(count > 0 && device.index() < count, ErrorKind::device, "there is no device ", device,
              ": this process sees ", count, " of them");
  return device.has_index() ? device : guard.getDevice();
}

}  // namespace moesh::comm
