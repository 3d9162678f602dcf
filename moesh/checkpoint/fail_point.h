#pragma once
// Places at which a test build (-DMOESH_WITH_FAIL_POINTS) can be killed while it saves:
// MOESH_FAIL_POINT=name in the environment ends the process there as kill -9 does. In every other
// build MOESH_FAIL_POINT(x) is nothing.

namespace moesh::checkpoint {

/// All of them, in the order of a save.
inline constexpr const char* kFailPoints[] = {
    "before_the_folder", "folder_made",         "headers_written",      "half_of_the_tensors",
    "tensors_written",   "before_the_manifest", "half_of_the_manifest", "manifest_written",
    "renamed",           "before_the_purge",    "half_of_the_purge",
};

#ifdef MOESH_WITH_FAIL_POINTS
void fail_point(const char* name);
#define MOESH_FAIL_POINT(name) ::moesh::checkpoint::fail_point(#name)
#else
#define MOESH_FAIL_POINT(name) static_cast<void>(0)
#endif

}  // namespace moesh::checkpoint
