#pragma once
// Files that are written by several ranks at once, with errors that name the file, what failed and
// why.

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>

#include "moesh/formats/checksum.h"
#include "moesh/formats/output_file.h"

namespace moesh::checkpoint {

class OutputFile : public formats::OutputFile {
 public:
  OutputFile(const std::filesystem::path& path, Mode mode);
};

/// Writes a small file, which is on the disk when this returns.
formats::BlockSums write_file(const std::filesystem::path& path, std::string_view bytes);
/// Returns when the names in a folder are on the disk.
void sync_folder(const std::filesystem::path& path);
/// With the folders above it; nothing where it is there.
void make_folders(const std::filesystem::path& path);
/// A folder that nobody has made yet.
void make_new_folder(const std::filesystem::path& path);
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to);
/// Both exist, and swap names in one step; false where the file system cannot do that.
bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b);
/// All that is in a folder but for the names in `kept`. A manifest goes last: what is left half-way
/// still says that moesh made it. Of a link the link goes, and what it points to stays.
void remove_contents(const std::filesystem::path& path, const std::set<std::string>& kept = {});
/// A folder with all that is in it, in the same way.
void remove_folder(const std::filesystem::path& path);

}  // namespace moesh::checkpoint
