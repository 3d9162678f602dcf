#include "moesh/checkpoint/save.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/fail_point.h"
#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/formats/checksum.h"
#include "moesh/formats/file.h"
#include "moesh/formats/safetensors_index.h"

namespace moesh::checkpoint {
namespace {

struct Written {
  std::string name;
  std::uint64_t size;
};

class Saver {
 public:
  Saver(const Snapshot& snapshot, const SaveOptions& options, comm::Group& group)
      : snapshot_(snapshot),
        options_(options),
        group_(group),
        temporary_(options.folder / temporary_name(snapshot.manifest.step)),
        target_(options.folder / step_name(snapshot.manifest.step)) {
    for (const auto& set : snapshot.sets) {
      plans_.push_back(plan_files(set.prefix, set.tensors, options.max_shard_size));
      for (const auto& file : plans_.back()) files_.push_back({file.name, file.size});
    }
    texts_ = snapshot.texts;
    texts_[formats::kIndexFile] = index();
    for (const auto& [name, text] : texts_) files_.push_back({name, text.size()});
  }

  std::filesystem::path run() {
    try {
      together(group_, [&] {
        if (is_first()) make_files();
      });
      together(group_, [&] { write_tensors(); });
      formats::Manifest manifest = snapshot_.manifest;
      together(group_, [&] { hash_blocks(); });
      manifest.files = hashed_files();
      together(group_, [&] {
        if (is_first()) publish(manifest);
      });
    } catch (...) {
      std::error_code ignored;
      if (is_first()) std::filesystem::remove_all(temporary_, ignored);
      throw;
    }
    if (is_first() && options_.keep_latest > 0) purge_others();
    return target_;
  }

 private:
  bool is_first() const { return group_.rank() == 0; }

  std::string index() const {
    formats::SafetensorsIndex index{.total_size = 0};
    for (const auto& file : plans_.at(0))
      for (const auto& t : file.tensors) {
        index.weight_map[t.tensor->name] = file.name;
        *index.total_size +=
            static_cast<std::uint64_t>(num_elements(t.tensor->shape)) * formats::size_of(t.dtype);
      }
    return formats::write_safetensors_index(index);
  }

  void make_files() {
    MOESH_FAIL_POINT(before_the_folder);
    make_folder(options_.folder);
    remove_temporary(options_.folder);
    make_folder(temporary_);
    MOESH_FAIL_POINT(folder_made);
    for (const auto& plan : plans_)
      for (const auto& file : plan) {
        const auto path = temporary_ / file.name;
        make_folder(path.parent_path());
        OutputFile out(path, OutputFile::Mode::create);
        out.reserve(file.size);
        out.write(0, file.header);
        out.sync();
      }
    for (const auto& [name, text] : texts_) write_file(temporary_ / name, text);
    MOESH_FAIL_POINT(headers_written);
  }

  void write_tensors() {
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      const auto parts = by_name(snapshot_.sets[i].parts);
      for (const auto& file : plans_[i]) {
        OutputFile out(temporary_ / file.name, OutputFile::Mode::open);
        bool any = false;
        for (const auto& t : file.tensors) any |= write_tensor(out, t, parts);
        if (any) out.sync();
      }
      if (i == 0) MOESH_FAIL_POINT(half_of_the_tensors);
    }
    MOESH_FAIL_POINT(tensors_written);
  }

  // The blocks of all files are divided among the ranks, and read back, whoever wrote them.
  void hash_blocks() {
    hashes_.clear();
    std::vector<std::byte> buffer(formats::kBlockBytes);
    std::int64_t number = 0;
    for (const auto& written : files_) {
      const formats::InputFile file(temporary_ / written.name);
      MOESH_CHECK(file.size() == written.size, ErrorKind::data, "'", file.path().string(), "' has ",
                  file.size(), " bytes, and ", written.size,
                  " were written; does another run save into this folder?");
      for (std::uint64_t begin = 0; begin < written.size; begin += formats::kBlockBytes, ++number) {
        hashes_.push_back(0);
        if (number % group_.size() != group_.rank()) continue;
        const auto block = std::span(buffer).first(
            std::min<std::uint64_t>(formats::kBlockBytes, written.size - begin));
        file.read(begin, block);
        hashes_.back() = formats::hash_block(block);
      }
    }
  }

  // Every hash is known to one rank, and is 0 elsewhere: their sum has its bits.
  std::vector<formats::ManifestFile> hashed_files() {
    at::Tensor all = at::zeros({static_cast<std::int64_t>(hashes_.size())}, at::kLong);
    auto* values = all.data_ptr<std::int64_t>();
    std::transform(hashes_.begin(), hashes_.end(), values,
                   [](std::uint64_t h) { return static_cast<std::int64_t>(h); });
    all = group_.all_reduce(all.to(group_.control_device())).cpu();
    const auto* hash = all.const_data_ptr<std::int64_t>();
    std::vector<formats::ManifestFile> files;
    for (const auto& written : files_) {
      auto& file = files.emplace_back();
      file.name = written.name, file.size = written.size;
      for (std::uint64_t begin = 0; begin < written.size; begin += formats::kBlockBytes)
        file.blocks.push_back(static_cast<std::uint64_t>(*hash++));
    }
    return files;
  }

  void publish(const formats::Manifest& manifest) {
    MOESH_FAIL_POINT(before_the_manifest);
    const std::string text = formats::write_manifest(manifest);
    {
      OutputFile out(temporary_ / formats::kManifestFile, OutputFile::Mode::create);
      out.write(0, text.substr(0, text.size() / 2));
      MOESH_FAIL_POINT(half_of_the_manifest);
      out.write(text.size() / 2, text.substr(text.size() / 2));
      out.sync();
    }
    for (const auto& entry : std::filesystem::directory_iterator(temporary_))
      if (entry.is_directory()) sync_folder(entry.path());
    sync_folder(temporary_);
    MOESH_FAIL_POINT(manifest_written);
    // There may be one that was found to be damaged, or that another run left. What is old ends
    // under a temporary name.
    if (!std::filesystem::exists(target_)) {
      rename_folder(temporary_, target_);
    } else if (!exchange_folders(temporary_, target_)) {
      const auto replaced = options_.folder / replaced_name(manifest.step);
      rename_folder(target_, replaced);
      try {
        rename_folder(temporary_, target_);
      } catch (...) {
        rename_folder(replaced, target_);
        throw;
      }
    }
    sync_folder(options_.folder);
    MOESH_FAIL_POINT(renamed);
    remove_temporary(options_.folder);
  }

  // The new one is intact: what goes wrong from here on is not a reason to stop.
  void purge_others() const {
    try {
      purge(options_.folder, snapshot_.manifest.step, options_.keep_latest);
    } catch (const std::exception& e) {
      log_warn("older checkpoints in '", options_.folder.string(),
               "' could not be removed: ", e.what());
    }
  }

  const Snapshot& snapshot_;
  const SaveOptions& options_;
  comm::Group& group_;
  std::filesystem::path temporary_, target_;
  std::vector<std::vector<PlannedFile>> plans_;  // by set
  std::map<std::string, std::string> texts_;
  std::vector<Written> files_;         // all but the manifest
  std::vector<std::uint64_t> hashes_;  // of all blocks of all files
};

}  // namespace

std::filesystem::path save(const Snapshot& snapshot, const SaveOptions& options,
                           comm::Group& group) {
  MOESH_CHECK(!snapshot.sets.empty(), "a checkpoint without tensors");
  return Saver(snapshot, options, group).run();
}

Snapshot copied(const Snapshot& snapshot) {
  Snapshot copy = snapshot;
  for (auto& set : copy.sets)
    for (auto& part : set.parts)
      if (part.owned) part.value = part.value.is_cpu() ? part.value.clone() : part.value.cpu();
  return copy;
}

}  // namespace moesh::checkpoint
