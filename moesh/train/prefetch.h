#pragma once
// Another thread makes the data of the next step while this one computes.

#include <cstdint>
#include <functional>
#include <future>

#include "moesh/base/error.h"

namespace moesh::train {

template <class Item>
class Prefetch {
 public:
  /// Everything that `make` refers to must outlive this object, which waits for the thread when it
  /// ends.
  explicit Prefetch(std::function<Item(std::int64_t position)> make) : make_(std::move(make)) {}

  /// Starts to make the item of a position. One at a time: call take() before the next.
  void start(std::int64_t position) {
    MOESH_CHECK(!next_.valid(), ErrorKind::internal, "prefetch of position ", position,
                ": the one before it was not taken");
    next_ = std::async(std::launch::async, [this, position] { return make_(position); });
  }

  /// Waits for the started item, and returns it, or throws what making it threw.
  Item take() {
    MOESH_CHECK(next_.valid(), ErrorKind::internal, "nothing is being prefetched: call start()");
    return next_.get();
  }

 private:
  std::function<Item(std::int64_t)> make_;
  std::future<Item> next_;  // the last member: its thread is over before `make_` goes
};

}  // namespace moesh::train
