#pragma once
// Where the distributed tests run: on the CPU, or with all ranks on one device when
// MOESH_TEST_DEVICE names it (cuda).

#include <ATen/core/Tensor.h>

#include <cstdlib>
#include <string>

#include "moesh/comm/launch.h"

namespace moesh {

inline at::Device test_device() {
  const char* name = std::getenv("MOESH_TEST_DEVICE");
  return at::Device(name ? std::string(name) + (std::string(name) == "cuda" ? ":0" : "") : "cpu");
}

inline comm::LaunchOptions test_options() {
  comm::LaunchOptions options;
  options.timeout = std::chrono::seconds(60);
  options.device = test_device();
  return options;
}

}  // namespace moesh
