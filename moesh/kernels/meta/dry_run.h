#pragma once
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>

namespace moesh::kernels::meta {

/// The device whose memory tensors on meta stand for: that of the DryRun, else the CPU.
c10::DeviceType modelled_device();

/// As long as it lives, a whole training step runs on the device meta, where tensors have shapes
/// and no memory, and the bytes that they would take on `device` are counted. It fills in what
/// LibTorch has for meta in Python only, and lets the host read zeros from it. One at a time in a
/// process: a second one waits.
class DryRun {
 public:
  explicit DryRun(c10::DeviceType device);
  ~DryRun();
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  /// How often the host has read from the device so far, and would have waited for it.
  std::int64_t num_reads() const;
  /// In the dry run that lives, or the last one: the bytes of tensors that live now, and the most
  /// that lived at once.
  static std::int64_t live();
  static std::int64_t peak();
  /// The peak counts from now on.
  static void reset_peak();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace moesh::kernels::meta
