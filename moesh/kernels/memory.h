#pragma once

namespace moesh::kernels {

/// Makes the process keep the memory it frees (glibc; elsewhere it does nothing). By default large
/// tensors go back to the kernel, which zeroes their pages again at every step: a fifth of the time
/// of a layer with large weights. A program that trains on the CPU calls it once, at its start, as
/// `moesh train` does.
void keep_freed_memory();

}  // namespace moesh::kernels
