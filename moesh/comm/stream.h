#pragma once
// The queues of a device on which ranks exchange beside the computation, and points in them.
// Device-generic: c10 streams and events.

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

namespace moesh::comm {

/// A point in a queue of work.
class Mark {
 public:
  virtual ~Mark() = default;
  /// The work before it has ended. Any thread may ask.
  virtual bool done() const = 0;
  /// Work that the caller queues from now on (and work on the stream of the mark's origin) starts
  /// after it.
  virtual void hold_current() = 0;
};

/// Marks the work on the caller's current stream at some moment.
class StreamOrigin {
 public:
  virtual ~StreamOrigin() = default;
};

/// A queue of work. Calls come from one thread, but for `here`.
class CommStream {
 public:
  virtual ~CommStream() = default;
  /// The stream as NCCL takes it.
  virtual void* handle() = 0;
  /// This moment of the caller's current stream.
  virtual std::shared_ptr<StreamOrigin> here() = 0;
  /// Later work starts after that moment.
  virtual void follow(const StreamOrigin& origin) = 0;
  /// Runs f with this queue as the current stream.
  virtual void run(const std::function<void()>& f) = 0;
  /// The end of the work queued so far, whose memory belongs to the stream of `origin`.
  virtual std::shared_ptr<Mark> mark(const StreamOrigin& origin) = 0;
  /// The same, of which no memory is known: only the caller's stream is held.
  virtual std::shared_ptr<Mark> mark() = 0;
};

/// A high-priority stream of an accelerator.
class DeviceStream : public CommStream {
 public:
  explicit DeviceStream(at::Device device);
  void* handle() override { return stream_.native_handle(); }
  std::shared_ptr<StreamOrigin> here() override;
  void follow(const StreamOrigin& origin) override;
  void run(const std::function<void()>& f) override;
  std::shared_ptr<Mark> mark(const StreamOrigin& origin) override;
  std::shared_ptr<Mark> mark() override;
  const c10::Stream& stream() const { return stream_; }

 private:
  c10::Stream stream_;
};

std::unique_ptr<CommStream> device_stream(at::Device device);

/// The device with its index: that of the current device where none is given. Throws Error (device)
/// if there is no such device.
at::Device existing_device(at::Device device);

}  // namespace moesh::comm
