#pragma once
// Ctrl-C in the middle of what moesh computes.

#include <functional>

namespace moesh::python {

/// Runs f without the GIL, on a thread of its own, and throws what f throws. Meanwhile this thread
/// runs the handlers that Python has for signals; what one of them raises (Ctrl-C:
/// KeyboardInterrupt) ends f at its next interruption point, and is thrown then. Called with the
/// GIL, on any thread: Python runs handlers only on its main thread.
void run_interruptible(const std::function<void()>& f);

}  // namespace moesh::python
