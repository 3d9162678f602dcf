#include "moesh/checkpoint/save.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/formats/checksum.h"

namespace moesh::checkpoint {
namespace {

// The sum over the ranks, of which one knows a number, or several know a part of it.
std::vector<std::uint64_t> summed(comm::Group& group, const std::vector<std::uint64_t>& mine) {
  at::Tensor all = at::zeros({static_cast<std::int64_t>(mine.size())}, at::kLong);
  std::memcpy(all.data_ptr(), mine.data(), mine.size() * sizeof(std::uint64_t));
  all = group.all_reduce(all.to(group.control_device())).cpu();
  std::vector<std::uint64_t> sum(mine.size());
  std::memcpy(sum.data(), all.const_data_ptr(), sum.size() * sizeof(std::uint64_t));
  return sum;
}

}  // namespace

void ReadBack::add_file(const std::string& name, std::uint64_t size) {
  files_.push_back({name, size, written_.size()});
  for (auto* of_blocks : {&written_, &num_bytes_, &found_, &hashes_, &times_read_})
    of_blocks->resize(files_.back().first_block + formats::num_blocks(size), 0);
}

std::uint64_t ReadBack::num_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& f : files_) sum += f.size;
  return sum;
}

const ReadBack::File& ReadBack::file(std::size_t block) const {
  // The last that begins at this block or before it: an empty file has none.
  const auto behind =
      std::upper_bound(files_.begin(), files_.end(), block,
                       [](std::size_t b, const File& f) { return b < f.first_block; });
  return *std::prev(behind);
}

const std::string& ReadBack::file_of(std::size_t block) const { return file(block).name; }

ReadBack::Range ReadBack::range_of(std::size_t block) const {
  const File& f = file(block);
  const std::uint64_t begin = (block - f.first_block) * formats::kBlockBytes;
  return {begin, std::min(formats::kBlockBytes, f.size - begin)};
}

std::vector<std::size_t> ReadBack::add_written(const std::string& name,
                                               const formats::BlockSums& sums) {
  const auto of_name =
      std::find_if(files_.begin(), files_.end(), [&](const File& f) { return f.name == name; });
  std::vector<std::size_t> whole;
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < sums.blocks().size(); ++i) {
    const auto& added = sums.blocks()[i];
    if (added.num_bytes == 0) continue;
    const std::size_t block = of_name->first_block + i;
    written_.at(block) += added.sum;
    num_bytes_[block] += added.num_bytes;
    if (num_bytes_[block] == range_of(block).size) whole.push_back(block);
  }
  return whole;
}

void ReadBack::read_back(std::size_t block, Reader& reader) {
  const File& f = file(block);
  const auto [begin, size] = range_of(block);
  if (reader.name != f.name) {
    reader.file.reset();
    reader.name = f.name;
    reader.file.emplace(folder_ / f.name);
    MOESH_CHECK(reader.file->size() == f.size, ErrorKind::storage, "'",
                reader.file->path().string(), "' has ", reader.file->size(), " bytes, and ", f.size,
                " were written");
  }
  // A whole block also where the file ends: else the page with its end would stay in memory.
  reader.file->forget_cached(begin, formats::kBlockBytes);
  reader.buffer.resize(size);
  reader.file->read(begin, reader.buffer);
  const std::string_view bytes(reinterpret_cast<const char*>(reader.buffer.data()), size);
  formats::BlockSums found;
  found.add(begin, bytes);
  found_[block] = found.blocks().back().sum;
  hashes_[block] = formats::hash_block(bytes);
  times_read_[block] = 1;
}

std::vector<std::size_t> ReadBack::left_to_read(comm::Group& group) {
  written_ = summed(group, written_);
  const auto times_read = summed(group, times_read_);
  const auto num_ranks = static_cast<std::size_t>(group.size());
  auto next = static_cast<std::size_t>(group.rank());
  std::vector<std::size_t> mine;
  for (std::size_t block = 0, i = 0; block < times_read.size(); ++block)
    if (times_read[block] == 0 && i++ == next) {
      mine.push_back(block);
      next += num_ranks;
    }
  return mine;
}

void ReadBack::check() const {
  for (std::size_t block = 0; block < found_.size(); ++block) {
    const auto [begin, size] = range_of(block);
    MOESH_CHECK(times_read_[block] == 0 || found_[block] == written_[block], ErrorKind::storage,
                "'", (folder_ / file_of(block)).string(), "': bytes ", begin, " to ", begin + size,
                " were read back with other values than were written; the disk or the memory of "
                "this machine is at fault");
  }
}

std::vector<formats::ManifestFile> ReadBack::hashed_files(comm::Group& group) const {
  const auto all = summed(group, hashes_);
  std::vector<formats::ManifestFile> files;
  for (const auto& f : files_) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(f.first_block);
    const auto count = static_cast<std::ptrdiff_t>(formats::num_blocks(f.size));
    files.push_back({.name = f.name, .size = f.size, .blocks = {first, first + count}});
  }
  return files;
}

}  // namespace moesh::checkpoint
