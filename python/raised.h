#pragma once
// Exceptions of Python code that ranks call: a dataset, a callback.

#include <nanobind/nanobind.h>

#include <optional>

#include "moesh/base/error.h"

namespace moesh::python {

/// Keeps the first exception for the caller of moesh. For the ranks it is an Error (data), which
/// stops them all; a Python exception must not cross their threads.
class Raised {
 public:
  /// Calls f with the GIL.
  template <class F>
  auto guard(const char* what, const F& f) {
    const nanobind::gil_scoped_acquire gil;
    const InPython now;
    try {
      return f();
    } catch (nanobind::python_error& e) {
      const std::string text = detail::concat(what, " raised ", e.what());
      if (!first_) first_.emplace(std::move(e));
      throw Error(ErrorKind::data, text);
    }
  }

  /// Whether this thread is that of a rank, in Python code that it has called.
  static bool in_python() { return num_in_python_ > 0; }

  /// Throws what was kept, with the GIL.
  void rethrow() {
    if (first_) throw nanobind::python_error(std::move(*first_));
  }

 private:
  struct InPython {
    InPython() { ++num_in_python_; }
    ~InPython() { --num_in_python_; }
  };
  static inline thread_local int num_in_python_ = 0;

  std::optional<nanobind::python_error> first_;  // the GIL guards it
};

}  // namespace moesh::python
