#include "moesh/comm/stream.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "moesh/base/error.h"

namespace moesh::comm {
namespace {

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class DeviceStreamOrigin final : public StreamOrigin {
 public:
  explicit DeviceStreamOrigin(at::Device device)
      : stream_(current_stream(device)), event_(device.type()) {
    event_.record(stream_);
  }
  const c10::Stream& stream() const { return stream_; }
  void hold(const c10::Stream& stream) const { event_.block(stream); }

 private:
  c10::Stream stream_;
  c10::Event event_;
};

class DeviceMark final : public Mark {
 public:
  DeviceMark(const c10::Stream& stream, const std::optional<c10::Stream>& home)
      : event_(stream.device_type()), home_(home) {
    event_.record(stream);
  }
  bool done() const override { return event_.query(); }
  void hold_current() override {
    // The mark of another rank may be on another device.
    const at::Device device =
        home_ ? home_->device() : c10::impl::VirtualGuardImpl(event_.device_type()).getDevice();
    const c10::Stream current = current_stream(device);
    event_.block(current);
    // The memory of the operation belongs to the stream which was current at its start: once that
    // stream waits too, the caching allocator may hand the memory out again, and the caller need
    // not keep it.
    if (home_ && current != *home_) event_.block(*home_);
  }

 private:
  c10::Event event_;
  std::optional<c10::Stream> home_;
};

}  // namespace

DeviceStream::DeviceStream(at::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, /*priority=*/-1)) {}

std::shared_ptr<StreamOrigin> DeviceStream::here() {
  return std::make_shared<DeviceStreamOrigin>(stream_.device());
}

void DeviceStream::follow(const StreamOrigin& origin) {
  dynamic_cast<const DeviceStreamOrigin&>(origin).hold(stream_);
}

void DeviceStream::run(const std::function<void()>& f) {
  const c10::StreamGuard guard(stream_);
  f();
}

std::shared_ptr<Mark> DeviceStream::mark(const StreamOrigin& origin) {
  return std::make_shared<DeviceMark>(stream_,
                                      dynamic_cast<const DeviceStreamOrigin&>(origin).stream());
}

std::shared_ptr<Mark> DeviceStream::mark() {
  return std::make_shared<DeviceMark>(stream_, std::nullopt);
}

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
