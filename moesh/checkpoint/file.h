#pragma once
// Files and folders of checkpoints, with errors that name the file, what failed and why.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <string_view>

#include "moesh/formats/checksum.h"
#include "moesh/formats/file.h"

namespace moesh::checkpoint {

/// Writes a small file, which is on the disk when this returns.
formats::BlockSums write_file(const std::filesystem::path& path, std::string_view bytes);
/// Returns when the names in a folder are on the disk.
void sync_folder(const std::filesystem::path& path);
/// Makes a folder, and the folders above it; nothing if it exists.
void make_folders(const std::filesystem::path& path);
/// Makes a folder that must not exist yet.
void make_new_folder(const std::filesystem::path& path);
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to);
/// Swaps the names of two existing folders in one step; false if the file system cannot do that.
bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b);
/// Removes everything in a folder except the names in `kept`. The manifest is removed last, so that
/// a half-removed folder still says that moesh made it. A link is removed, its target stays.
void remove_contents(const std::filesystem::path& path, const std::set<std::string>& kept = {});
/// Removes a folder with its contents, in the same way.
void remove_folder(const std::filesystem::path& path);

// Work on files that several threads of a rank share: one thread hashes, or waits for the disk,
// while another writes.

/// f(item, thread) once for each item below `num_items`, by `num_threads` threads, each of which
/// takes the next item when it has done one; `thread` counts them. Returns when all is done. The
/// first that f throws is thrown here, and no other item is begun. Meanwhile the calling thread
/// calls `meanwhile` every few milliseconds, until it throws; with one thread, it does the work
/// itself, and calls it between two items.
void share_work(std::size_t num_items, int num_threads,
                const std::function<void(std::size_t item, std::size_t thread)>& f,
                const std::function<void()>& meanwhile = {});

/// Threads of a rank for this much work: the rank's part of the machine's cores, up to eight (which
/// keep a fast disk busy), and one if the work is tiny.
int num_workers(std::uint64_t num_bytes);

}  // namespace moesh::checkpoint
