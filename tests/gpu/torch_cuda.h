#pragma once
// What tests and benchmarks want of LibTorch's CUDA side. Its headers need the CUDA toolkit and are
// in torch_cuda.cpp alone; a LibTorch without CUDA has none, and no_torch_cuda.cpp says so.

#include <functional>
#include <memory>

namespace moesh::gpu {

/// How often this thread waits for the device in f, as LibTorch sees it: copies to or from the host
/// that are waited for, streams and events that are synchronised.
int count_waits(const std::function<void()>& f);

/// What f gives to the current stream (not the default one) is recorded and not done; `replay` does
/// it, as often as it is asked, on the memory that f used. f has run a few times before.
class Graph {
 public:
  explicit Graph(const std::function<void()>& f);
  ~Graph();
  void replay();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// The milliseconds between the beginning and the end of what f gives to the current stream; waits.
float milliseconds(const std::function<void()>& f);

}  // namespace moesh::gpu
