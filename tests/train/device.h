#pragma once
// Settings of runs in tests: exact numbers, and the device of the other distributed tests.

#include "moesh/config/merge.h"
#include "tests/spmd/device.h"

namespace moesh {

inline config::Settings test_settings() {
  const config::Origin origin{"test"};
  return {
      {"training.dtype", std::string("float64"), origin},
      {"training.device", at::DeviceTypeName(test_device().type(), /*lower_case=*/true), origin},
      {"debug.timeout_seconds", 60.0, origin}};
}

}  // namespace moesh
