#include "moesh/checkpoint/save.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/formats/checksum.h"
#include "moesh/formats/file.h"
#include "moesh/formats/safetensors.h"

namespace moesh::checkpoint {
namespace {

// Number of complete blocks that are flushed and read back together: enough for a flush to be worth
// its while, few enough for the disk to be at work from the beginning to the end.
constexpr std::size_t kBatchBlocks = 16;

class Saver {
 public:
  Saver(const Snapshot& snapshot, const SaveOptions& options, comm::Group& group)
      : snapshot_(snapshot),
        options_(options),
        group_(group),
        temporary_(options.folder / temporary_name(snapshot.manifest.step)),
        target_(options.folder / step_name(snapshot.manifest.step)),
        blocks_(temporary_) {
    for (const auto& set : snapshot.sets) {
      plans_.push_back(plan_files(set.prefix, set.tensors, options.max_shard_size));
      for (const auto& file : plans_.back()) blocks_.add_file(file.name, file.size);
    }
    if (is_first()) {
      texts_ = snapshot.texts;
      if (!is_one_file(snapshot.sets[0].prefix)) texts_[formats::kIndexFile] = index();
    }
    add_texts();
    num_threads_ = options.num_threads > 0 ? options.num_threads : num_workers(blocks_.num_bytes());
  }

  std::filesystem::path run() {
    try {
      together(group_, [&](const Heartbeat& heartbeat) {
        if (is_first()) make_files(heartbeat);
      });
      together(group_, [&](const Heartbeat& heartbeat) { write_tensors(heartbeat); });
      formats::Manifest manifest = snapshot_.manifest;
      const auto left = blocks_.left_to_read(group_);
      together(group_, [&](const Heartbeat& heartbeat) { read_back(left, heartbeat); });
      manifest.files = blocks_.hashed_files(group_);
      together(group_, [&] {
        if (is_first()) publish(manifest);
      });
    } catch (...) {
      if (is_first() && made_) clean_up();
      throw;
    }
    if (is_first()) settle();
    return target_;
  }

 private:
  bool is_first() const { return group_.rank() == 0; }

  // Every rank has all blocks of all files; of texts it knows only names and sizes.
  void add_texts() {
    std::string list;
    for (const auto& [name, text] : texts_) list += detail::concat(text.size(), " ", name, "\n");
    std::istringstream lines(text_of_first(group_, list));
    std::uint64_t size = 0;
    for (std::string name; lines >> size && std::getline(lines.ignore(1), name);)
      blocks_.add_file(name, size);
  }

  std::string index() const {
    formats::SafetensorsIndex index{.total_size = 0};
    for (const auto& file : plans_.at(0)) add_to(index, file);
    return formats::write_safetensors_index(index);
  }

  // A run knows every checkpoint of its folder: another one is that of a second run, or the folder
  // was not what it seemed to be when this one began.
  void check_others() const {
    const std::int64_t step = snapshot_.manifest.step;
    for (const auto other : saved_steps(options_.folder))
      MOESH_CHECK(
          other < step || (other == step ? options_.damaged : options_.known).contains(other),
          ErrorKind::storage, "'", (options_.folder / step_name(other)).string(),
          "' was not there, or was whole, when this run began, and the run saves step ", step,
          "; nothing was changed: see which run it belongs to, and start again");
  }

  void make_files(const Heartbeat& heartbeat) {
    make_folders(options_.folder);
    check_others();
    remove_temporary(options_.folder);
    make_new_folder(temporary_);
    made_ = true;
    // From the beginning the folder says that moesh made it; only at its end it is a checkpoint.
    write_file(temporary_ / formats::kManifestFile, "");
    for (const auto& plan : plans_)
      for (const auto& file : plan) {
        beat(heartbeat);
        const auto path = temporary_ / file.name;
        make_folders(path.parent_path());
        formats::OutputFile out(path, formats::OutputFile::Mode::create);
        out.reserve(file.size);
        out.write(0, file.header);
        out.sync();
        blocks_.add_written(file.name, out.sums());
      }
    for (const auto& [name, text] : texts_)
      blocks_.add_written(name, write_file(temporary_ / name, text));
  }

  // The threads have streams of their own, which know nothing of the one that computed the values.
  void wait_for_devices() const {
    std::vector<c10::Device> devices;
    for (const auto& set : snapshot_.sets)
      for (const auto& part : set.parts)
        if (const auto d = part.value.device();
            part.owned && !d.is_cpu() &&
            std::find(devices.begin(), devices.end(), d) == devices.end())
          devices.push_back(d);
    for (const c10::Device& d : devices)
      c10::impl::VirtualGuardImpl(d.type()).synchronizeDevice(d.index());
  }

  struct Item {
    const PlannedFile* file;
    const PlannedTensor* tensor;
    const PartsByName* parts;
  };

  // Each thread has one file open: the items are in the order of the files, and a thread goes
  // through them in that order. When enough blocks are whole, the thread that notices it flushes
  // them and reads them back, while others write: the disk is at work all the time.
  void write_tensors(const Heartbeat& heartbeat) {
    struct TensorWriter {
      const PlannedFile* file = nullptr;
      std::optional<formats::OutputFile> out = {};
      ReadBack::Reader reader = {};
    };
    std::vector<PartsByName> parts;
    std::vector<Item> items;
    for (const auto& set : snapshot_.sets) parts.push_back(by_name(set.parts));
    for (std::size_t i = 0; i < plans_.size(); ++i)
      for (const auto& file : plans_[i])
        for (const auto& t : file.tensors)
          if (owns_some(t, parts[i])) items.push_back({&file, &t, &parts[i]});
    wait_for_devices();
    std::vector<TensorWriter> writers(static_cast<std::size_t>(num_threads_));
    share_work(
        items.size(), num_threads_,
        [&](std::size_t i, std::size_t thread) {
          TensorWriter& w = writers[thread];
          if (w.file != items[i].file) {
            w.out.reset();
            w.file = items[i].file;
            w.out.emplace(temporary_ / w.file->name, formats::OutputFile::Mode::open);
          }
          write_tensor(*w.out, *items[i].tensor, *items[i].parts);
          const auto whole = blocks_.add_written(w.file->name, w.out->take_sums());
          if (!whole.empty())
            w.out->begin_sync(blocks_.range_of(whole.front()).begin,
                              whole.size() * formats::kBlockBytes);
          read_back_now(with_waiting(whole), w.reader);
        },
        heartbeat);
    writers.clear();
    sync_written(items, heartbeat);
  }

  // Blocks to read back now: none, until there are enough of them. A single thread would only wait
  // for the disk in between: it reads back at the end.
  std::vector<std::size_t> with_waiting(const std::vector<std::size_t>& whole) {
    if (num_threads_ == 1) return {};
    const std::lock_guard lock(mutex_);
    waiting_.insert(waiting_.end(), whole.begin(), whole.end());
    return waiting_.size() < kBatchBlocks ? std::vector<std::size_t>()
                                          : std::exchange(waiting_, {});
  }

  // A flush is of a file, and takes with it what others have written to it so far.
  void read_back_now(const std::vector<std::size_t>& batch, ReadBack::Reader& reader) {
    std::set<std::string> flushed;
    for (const std::size_t block : batch)
      if (const auto& name = blocks_.file_of(block); flushed.insert(name).second)
        formats::OutputFile(temporary_ / name, formats::OutputFile::Mode::open).sync();
    for (const std::size_t block : batch) blocks_.read_back(block, reader);
  }

  void sync_written(const std::vector<Item>& items, const Heartbeat& heartbeat) const {
    std::vector<const PlannedFile*> written;
    for (const Item& item : items)
      if (written.empty() || written.back() != item.file) written.push_back(item.file);
    share_work(
        written.size(), num_threads_,
        [&](std::size_t i, std::size_t) {
          formats::OutputFile(temporary_ / written[i]->name, formats::OutputFile::Mode::open)
              .sync();
        },
        heartbeat);
  }

  // This rank's share of the remaining blocks: those that several ranks wrote, and the
  // last ones. What is hashed is what the writers had in memory, or the save fails.
  void read_back(const std::vector<std::size_t>& left, const Heartbeat& heartbeat) {
    std::vector<ReadBack::Reader> readers(static_cast<std::size_t>(num_threads_));
    share_work(
        left.size(), num_threads_,
        [&](std::size_t i, std::size_t thread) { blocks_.read_back(left[i], readers[thread]); },
        heartbeat);
    blocks_.check();
  }

  void write_manifest(const formats::Manifest& manifest) const {
    const std::string text = formats::write_manifest(manifest);
    const auto path = temporary_ / formats::kManifestFile;
    {
      formats::OutputFile out(path, formats::OutputFile::Mode::open);
      out.write(0, text);
      out.sync();
    }
    const formats::InputFile file(path);
    file.forget_cached();
    MOESH_CHECK(file.size() == text.size() && file.read_all(text.size()) == text,
                ErrorKind::storage, "'", path.string(),
                "' was read back with other bytes than were written");
  }

  void publish(const formats::Manifest& manifest) {
    write_manifest(manifest);
    for (const auto& plan : plans_)
      for (const auto& file : plan)
        if (const auto inner = std::filesystem::path(file.name).parent_path(); !inner.empty())
          sync_folder(temporary_ / inner);
    sync_folder(temporary_);
    check_others();
    // There may be one that was found to be damaged. What is old ends under a temporary name.
    if (!formats::exists(target_)) {
      rename_folder(temporary_, target_);
    } else if (exchange_folders(temporary_, target_)) {
      replaced_ = temporary_;
    } else {
      const auto replaced = options_.folder / replaced_name(manifest.step);
      rename_folder(target_, replaced);
      try {
        rename_folder(temporary_, target_);
      } catch (...) {
        rename_folder(replaced, target_);
        throw;
      }
      replaced_ = replaced;
    }
    made_ = false;
  }

  // On rank 0. The checkpoint has its name: what goes wrong from here on does not undo that, and is
  // no reason to stop. Nothing is removed before the new name is on the disk.
  void settle() const {
    try {
      sync_folder(options_.folder);
      if (replaced_) remove_folder(*replaced_);
      if (options_.keep_latest > 0)
        purge(options_.folder, snapshot_.manifest.step, options_.keep_latest, options_.known);
    } catch (const std::exception& e) {
      log_warn("'", target_.string(),
               "' is saved, but its folder could not be put in order: ", e.what());
    }
  }

  // Removes what a failed save left, on rank 0. What cannot be removed is removed by the next save.
  void clean_up() const {
    try {
      remove_folder(temporary_);
    } catch (const std::exception& e) {
      log_warn("'", temporary_.string(), "' could not be removed: ", e.what());
    }
  }

  const Snapshot& snapshot_;
  const SaveOptions& options_;
  comm::Group& group_;
  std::filesystem::path temporary_, target_;
  std::optional<std::filesystem::path> replaced_;  // where an older one of this step is now
  std::vector<std::vector<PlannedFile>> plans_;    // by set
  std::map<std::string, std::string> texts_;       // of rank 0
  ReadBack blocks_;                                // of all files but the manifest
  std::mutex mutex_;                               // of those that wait
  std::vector<std::size_t> waiting_;               // blocks that are whole and not read back
  int num_threads_ = 1;                            // that write, and that read back
  bool made_ = false;                              // the temporary folder is there, and is ours
};

}  // namespace

std::filesystem::path save(const Snapshot& snapshot, const SaveOptions& options,
                           comm::Group& group) {
  MOESH_CHECK(!snapshot.sets.empty(), "a checkpoint without tensors");
  return Saver(snapshot, options, group).run();
}

std::uint64_t planned_bytes(const Snapshot& snapshot, const SaveOptions& options) {
  std::uint64_t bytes = 0;
  for (const auto& set : snapshot.sets)
    for (const auto& file : plan_files(set.prefix, set.tensors, options.max_shard_size))
      bytes += file.size;
  for (const auto& [name, text] : snapshot.texts) bytes += text.size();
  return bytes;
}

Snapshot copied(const Snapshot& snapshot) {
  Snapshot copy = snapshot;
  for (auto& set : copy.sets)
    for (auto& part : set.parts)
      if (part.owned) part.value = part.value.is_cpu() ? part.value.clone() : to_host(part.value);
  return copy;
}

}  // namespace moesh::checkpoint
