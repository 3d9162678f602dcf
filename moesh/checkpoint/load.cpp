#include "moesh/checkpoint/load.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <span>
#include <tuple>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/file.h"
#include "moesh/comm/launch.h"
#include "moesh/formats/adapter_config.h"
#include "moesh/formats/disk.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"
#include "moesh/formats/safetensors.h"

namespace moesh::checkpoint {
namespace {

constexpr std::size_t kKeptBlocks =
    4;  // tensors are read in the order of the file: older blocks do not come back
constexpr std::int64_t kSlabBytes =
    256 << 10;               // what is copied at once: small, so that most are within one block
constexpr int kReaders = 4;  // threads of each rank, at most
constexpr std::size_t kListedNames = 8;

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kListedNames); ++i)
    text += (i ? ", " : "") + names[i];
  if (names.size() > kListedNames)
    text += detail::concat(" and ", names.size() - kListedNames, " more");
  return text;
}

struct Differences {
  std::vector<std::string> missing, unexpected, misshapen;
  std::size_t count() const { return missing.size() + unexpected.size() + misshapen.size(); }
};

Differences compare(const TensorFolder& folder, const formats::DiskTable& table) {
  Differences d;
  std::set<std::string> wanted;
  for (const auto& t : table.tensors) {
    wanted.insert(t.name);
    const auto found = folder.tensors().find(t.name);
    if (found == folder.tensors().end()) {
      if (!t.is_copy) d.missing.push_back(t.name);
    } else if (const auto& shape = found->second.info->shape; shape != t.shape)
      d.misshapen.push_back(detail::concat(t.name, " ", shape, " (it should be ", t.shape, ")"));
  }
  for (const auto& [name, found] : folder.tensors())
    if (!wanted.contains(name) && !(table.ignored && table.ignored(name)) &&
        !(table.left_out && table.left_out(name)))
      d.unexpected.push_back(name);
  return d;
}

// More experts or layers than the files have numbers: even the table of their names would not end.
void check_size(const TensorFolder& folder, const formats::ModelOnDisk& model) {
  double there = 0;
  for (const auto& [name, found] : folder.tensors())
    there += static_cast<double>(num_elements(found.info->shape));
  const double least = static_cast<double>(std::max<std::int64_t>(1, model.num_layers)) *
                       static_cast<double>(std::max<std::int64_t>(1, model.num_experts));
  MOESH_CHECK(least <= there, ErrorKind::data, "'", folder.path().string(), "': its files hold ",
              there, " numbers in all, and its config.json describes ", model.num_layers,
              " layers and ", model.num_experts,
              " experts in each; one of the two is another "
              "model's");
}

// One read: what a part and a tensor on disk have in common, and where it is.
struct ReadJob {
  const TensorPart* part;
  const formats::DiskTensor* tensor;
  const formats::Source* source;
  Overlap overlap;
  TensorFolder::FolderTensor found;
  bool must_be_finite;
};

// The sum says it in one pass, without a mask; one that is not finite may be of large numbers.
bool is_finite(const at::Tensor& x) {
  return !at::isFloatingType(x.scalar_type()) || std::isfinite(x.sum().item<double>()) ||
         at::isfinite(x).all().item<bool>();
}

[[noreturn]] void fail_not_finite(const TensorFolder::FolderTensor& found,
                                  const at::Tensor& target) {
  const bool is_of_scales = found.quantized && !found.quantized->has_finite_scales();
  throw Error(ErrorKind::data,
              detail::concat("'", found.file->file().path().string(), "': tensor '",
                             is_of_scales ? found.quantized->scales().info->name : found.info->name,
                             "' has NaN or inf, read as ", target.scalar_type(),
                             ": the file is damaged, or its training had diverged; take another"));
}

// Reads a box of a tensor in slabs: the indices of one dimension that fit, with all that is
// inside of them, holes included.
void read_box(const ReadJob& job, const at::Tensor& target, const Heartbeat& heartbeat) {
  const Sizes& view = job.tensor->view;
  const Region& box = job.overlap.view;
  const Quantized* quantized = job.found.quantized;
  const auto dtype =
      quantized ? at::kFloat
      : job.found.info->dtype == formats::Dtype::u8
          ? at::kByte
          : torch_dtype(job.found.info->dtype, "tensor '" + job.found.info->name + "'");
  MOESH_CHECK(at::isFloatingType(dtype) == at::isFloatingType(target.scalar_type()),
              ErrorKind::data, "tensor '", job.found.info->name, "' is of type ",
              formats::name_of(job.found.info->dtype), ", and ", target.scalar_type(),
              " is needed");
  const auto element = static_cast<std::int64_t>(c10::elementSize(dtype));
  Sizes strides(view.size(), 1);
  for (std::size_t d = view.size(); d-- > 1;) strides[d - 1] = strides[d] * view[d];
  std::size_t split = 0;  // the dimension that is split into slabs; loops go over those before it
  while (split + 1 < view.size() && strides[split] * element > kSlabBytes) ++split;
  const std::int64_t step = std::max<std::int64_t>(1, kSlabBytes / (strides[split] * element));

  const std::uint64_t begin = job.found.file->file().header().data_start + job.found.info->begin;
  const auto from_split = static_cast<std::ptrdiff_t>(split);
  const std::int64_t num_outer =
      num_elements(Sizes(box.length.begin(), box.length.begin() + from_split));
  const Sizes slab_strides(strides.begin() + from_split, strides.end());
  Sizes slab_size(box.length.begin() + from_split, box.length.end());
  std::vector<std::byte> buffer;
  std::vector<float> decoded;
  const auto slab_at = [&](std::int64_t index, std::int64_t length) -> void* {
    if (quantized) {
      decoded.resize(static_cast<std::size_t>(length));
      quantized->decode(index, decoded);
      return decoded.data();
    }
    return const_cast<std::byte*>(job.found.file->bytes(
        begin + static_cast<std::uint64_t>(index * element),
        static_cast<std::size_t>(length * element), static_cast<std::size_t>(element), buffer));
  };
  for (std::int64_t outer = 0; outer < num_outer; ++outer) {
    at::Tensor to = target;
    std::int64_t first = 0, rest = outer, inside = num_outer;
    for (std::size_t d = 0; d < split; ++d) {
      inside /= box.length[d];
      to = to.select(0, rest / inside);
      first += (box.start[d] + rest / inside) * strides[d];
      rest %= inside;
    }
    for (std::size_t d = split; d < view.size(); ++d) first += box.start[d] * strides[d];
    for (std::int64_t at = 0; at < box.length[split]; at += step) {
      beat(heartbeat);
      slab_size[0] = std::min(step, box.length[split] - at);
      std::int64_t length = 1;  // from the first element of the slab to its last
      for (std::size_t d = 0; d < slab_size.size(); ++d)
        length += (slab_size[d] - 1) * slab_strides[d];
      const at::Tensor slab = to.narrow(0, at, slab_size[0]);
      slab.copy_(at::from_blob(slab_at(first + at * strides[split], length), slab_size,
                               slab_strides, at::TensorOptions(at::kCPU).dtype(dtype)));
      if (job.must_be_finite && !is_finite(slab)) fail_not_finite(job.found, target);
    }
  }
}

// As the config.json of the folder has it, where it does.
kernels::Quantization block_of(const std::filesystem::path& folder) {
  if (!formats::exists(folder / "config.json")) return {};
  const std::string path = (folder / "config.json").string();
  const auto config = formats::parse_json(read_config(folder), path);
  const auto* method = config.find("quantization_config");
  const auto* size = method && !method->is_null() ? method->find("weight_block_size") : nullptr;
  if (!size || size->is_null()) return {};
  const std::string what = path + ": quantization_config.weight_block_size";
  const auto& list = size->as_list(what);
  kernels::Quantization block{.rows = 0, .columns = 0};
  if (list.size() == 2) block.rows = list[0].as_int(what), block.columns = list[1].as_int(what);
  MOESH_CHECK(block.rows >= 1 && block.columns >= 1, ErrorKind::data, what, " is ",
              formats::to_json_line(*size), "; it takes rows and columns, as in [128, 128]");
  return block;
}

// Jobs that share no file, each list in the order of its files: a file has one reader at a time.
std::vector<std::vector<ReadJob>> apart(std::vector<ReadJob> jobs) {
  std::sort(jobs.begin(), jobs.end(), [](const ReadJob& a, const ReadJob& b) {
    return std::tie(a.found.file->file().path(), a.found.info->begin) <
           std::tie(b.found.file->file().path(), b.found.info->begin);
  });
  std::map<const BlockFile*, const BlockFile*> joined;  // by file: one that it is read with
  const auto first_of = [&](const BlockFile* file) {
    while (joined.try_emplace(file, file).first->second != file) file = joined.at(file);
    return file;
  };
  for (const ReadJob& job : jobs)
    if (const auto* q = job.found.quantized)
      joined[first_of(q->scales().file)] = first_of(job.found.file);
  std::map<const BlockFile*, std::size_t> places;
  std::vector<std::vector<ReadJob>> lists;
  for (ReadJob& job : jobs) {
    const auto [place, is_new] = places.try_emplace(first_of(job.found.file), lists.size());
    if (is_new) lists.emplace_back();
    lists[place->second].push_back(std::move(job));
  }
  return lists;
}

int num_readers(std::size_t num_files) {
  const auto most = static_cast<std::size_t>(std::min(kReaders, comm::cores_of_rank()));
  return static_cast<int>(std::clamp<std::size_t>(num_files, 1, most));
}

// A list of jobs in the order of its files. The blocks of a file go when the next one is read.
void read_list(const std::vector<ReadJob>& jobs, const Heartbeat& heartbeat) {
  const at::NoGradGuard of_this_thread;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const ReadJob& job = jobs[i];
    read_box(job, in_view_order(*job.part, *job.source, job.overlap), heartbeat);
    if (i + 1 < jobs.size() && jobs[i + 1].found.file == job.found.file) continue;
    job.found.file->forget();
    if (job.found.quantized) job.found.quantized->scales().file->forget();
  }
}

void read_all(std::vector<ReadJob> jobs, const Heartbeat& heartbeat) {
  const auto lists = apart(std::move(jobs));
  const int num_threads = num_readers(lists.size());
  // Several threads leave the heartbeat to this one.
  const Heartbeat between = num_threads == 1 ? heartbeat : Heartbeat();
  share_work(
      lists.size(), num_threads, [&](std::size_t i, std::size_t) { read_list(lists[i], between); },
      heartbeat);
}

void check_filled(const TensorPart& part, std::int64_t filled) {
  MOESH_CHECK(filled == num_elements(part.region.length), "the table of tensors on disk fills ",
              filled, " of ", num_elements(part.region.length), " elements of '", part.name, "'");
}

// On the host, for a read becomes many small copies.
at::Tensor host_memory(const at::Tensor& value) {
  return value.is_cpu() ? value : at::empty(value.sizes(), value.options().device(at::kCPU));
}

// The part of a tensor that has this source, with all sizes counted in blocks of the parameter.
formats::DiskTensor in_blocks(const formats::DiskTensor& tensor, const formats::Source& source,
                              const Sizes& block) {
  formats::DiskTensor result = tensor;
  result.sources = {source};
  for (std::size_t d = 0; d < block.size(); ++d) {
    auto& size = result.view[source.dims[d]];
    size = (size + block[d] - 1) / block[d];
    result.sources[0].offset[d] /= block[d];
  }
  return result;
}

// Codes of e4m3 that are no number, and exponents beyond those of numbers.
void check_codes(const ReadJob& job, kernels::Quantization::Format kind, bool is_scales) {
  const at::Tensor bytes = in_view_order(*job.part, *job.source, job.overlap);
  if (kind == kernels::Quantization::Format::float8 && !is_scales &&
      bytes.bitwise_and(127).eq(127).any().item<bool>())
    fail_not_finite(job.found, bytes);
  if (kind != kernels::Quantization::Format::mxfp4 || !is_scales) return;
  const auto most = bytes.max().item<std::int64_t>();
  MOESH_CHECK(most <= kernels::kMostExponent, ErrorKind::data, "'",
              job.found.file->file().path().string(), "': tensor '", job.found.info->name,
              "' has the exponent ", most, ", NaN or a number beyond 2^121 (",
              kernels::kMostExponent,
              " is the largest that is taken): the file is damaged; take another");
}

}  // namespace

BlockFile::BlockFile(const std::filesystem::path& path, const formats::ManifestFile* expected)
    : file_(path) {
  if (!expected) return;
  MOESH_CHECK(expected->size == file_.size(), ErrorKind::data, "'", path.string(), "' has ",
              file_.size(), " bytes, and the manifest says ", expected->size);
  expected_ = *expected;
  for (std::uint64_t begin = 0; begin < file_.header().data_start; begin += formats::kBlockBytes)
    block(begin / formats::kBlockBytes);
  forget();
}

std::size_t BlockFile::kept_bytes() const {
  std::size_t sum = 0;
  for (const auto& b : blocks_) sum += b.bytes.capacity();
  return sum;
}

const BlockFile::ReadBlock& BlockFile::block(std::uint64_t number) {
  const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                  [&](const ReadBlock& b) { return b.number == number; });
  if (found != blocks_.end()) return *found;
  ReadBlock fresh{.number = number};
  if (blocks_.size() == kKeptBlocks) {  // its memory serves again
    fresh.bytes = std::move(blocks_.front().bytes);
    blocks_.erase(blocks_.begin());
  }
  const std::uint64_t begin = number * formats::kBlockBytes;
  fresh.bytes.resize(static_cast<std::size_t>(
      std::min<std::uint64_t>(formats::kBlockBytes, file_.size() - begin)));
  file_.read(begin, fresh.bytes);
  try {
    if (expected_) formats::check_block(*expected_, number, fresh.bytes);
  } catch (const Error& e) {
    throw Error(e.kind(), file_.path().parent_path().string() + ": " + e.what());
  }
  return blocks_.emplace_back(std::move(fresh));
}

void BlockFile::read(std::uint64_t offset, std::span<std::byte> to) {
  while (!to.empty()) {
    const ReadBlock& from = block(offset / formats::kBlockBytes);
    const std::uint64_t skipped = offset % formats::kBlockBytes;
    const auto count = std::min<std::size_t>(to.size(), from.bytes.size() - skipped);
    std::memcpy(to.data(), from.bytes.data() + skipped, count);
    to = to.subspan(count);
    offset += count;
  }
}

const std::byte* BlockFile::bytes(std::uint64_t offset, std::size_t count, std::size_t alignment,
                                  std::vector<std::byte>& buffer) {
  if (offset % formats::kBlockBytes + count <= formats::kBlockBytes && offset % alignment == 0)
    return block(offset / formats::kBlockBytes).bytes.data() + offset % formats::kBlockBytes;
  buffer.resize(count);
  read(offset, buffer);
  return buffer.data();
}

TensorFolder::TensorFolder(std::filesystem::path path, const std::vector<std::string>& files,
                           const formats::Manifest* manifest)
    : path_(std::move(path)) {
  files_.resize(files.size());
  share_work(files.size(), num_readers(files.size()), [&](std::size_t i, std::size_t) {
    const auto* expected = manifest ? manifest->find(files[i]) : nullptr;
    MOESH_CHECK(!manifest || expected, ErrorKind::data, "'", (path_ / files[i]).string(),
                "' is not in the manifest of its folder");
    files_[i] = std::make_unique<BlockFile>(path_ / files[i], expected);
  });
  for (const auto& file : files_) {
    for (const auto& info : file->file().header().tensors)
      MOESH_CHECK(tensors_.emplace(info.name, FolderTensor{{file.get(), &info}}).second,
                  ErrorKind::data, "'", path_.string(), "': tensor '", info.name,
                  "' is in two files; take one of them away");
  }
}

std::size_t TensorFolder::kept_bytes() const {
  std::size_t sum = 0;
  for (const auto& file : files_) sum += file->kept_bytes();
  return sum;
}

void TensorFolder::keep_text_model() {
  if (std::none_of(tensors_.begin(), tensors_.end(),
                   [](const auto& entry) { return formats::is_of_text_and_images(entry.first); }))
    return;
  std::map<std::string, FolderTensor> kept;
  for (const auto& [name, found] : tensors_)
    if (const std::string own = formats::name_in_text_model(name); !own.empty())
      kept.emplace(own, found);
    else
      beside_text_model_.push_back(name);
  tensors_ = std::move(kept);
}

void TensorFolder::join_quantized() {
  const bool has_float8 = std::any_of(tensors_.begin(), tensors_.end(), [](const auto& tensor) {
    return tensor.second.info->dtype == formats::Dtype::f8_e4m3;
  });
  quantized_ = find_quantized({tensors_.begin(), tensors_.end()}, path_,
                              has_float8 ? block_of(path_) : kernels::Quantization{});
  for (const auto& q : quantized_) {
    const std::string& name = q->info().name;
    for (const char* part : {"", "_scale_inv", "_blocks", "_scales"}) tensors_.erase(name + part);
    tensors_.emplace(name, FolderTensor{{q->values().file, &q->info()}, q.get()});
  }
}

std::string read_text(const std::filesystem::path& folder, const std::string& name,
                      const formats::Manifest* manifest) {
  const formats::InputFile file(folder / name);
  if (!manifest) return file.read_all(formats::JsonLimits().max_bytes);
  const auto* expected = manifest->find(name);
  MOESH_CHECK(expected, ErrorKind::data, "'", file.path().string(),
              "' is not in the manifest of its folder");
  formats::check_file(folder.string(), *expected);
  return file.read_all(expected->size);
}

std::string read_config(const std::filesystem::path& folder) {
  formats::refuse_hub_name(folder.string());
  if (!formats::exists(folder / "config.json"))
    if (const std::string instead = formats::checkpoints_instead(folder); !instead.empty())
      throw Error(ErrorKind::data,
                  detail::concat("'", folder.string(), "' has no config.json", instead));
  const auto manifest = formats::find_manifest(folder);
  const std::string text = read_text(folder, "config.json", manifest ? &*manifest : nullptr);
  const auto json = formats::parse_json(text, (folder / "config.json").string());
  const auto of_text = formats::text_model(json);
  return formats::with_layers_that_are_there(of_text == json ? text : formats::to_json(of_text),
                                             folder);
}

TensorFolder TensorFolder::weights(const std::filesystem::path& folder) {
  const auto manifest = formats::find_manifest(folder);
  const auto* known = manifest ? &*manifest : nullptr;
  const auto index_path = folder / formats::kIndexFile;
  std::optional<formats::SafetensorsIndex> index;
  if (formats::exists(index_path))
    index = formats::parse_safetensors_index(read_text(folder, formats::kIndexFile, known),
                                             index_path.string());
  MOESH_CHECK(index || formats::exists(folder / formats::kSingleFile), ErrorKind::data, "'",
              folder.string(), "' has neither ", formats::kIndexFile, " nor ", formats::kSingleFile,
              ": it is not a folder of a model in safetensors",
              formats::checkpoints_instead(folder));
  TensorFolder result(
      folder, index ? index->files() : std::vector<std::string>{formats::kSingleFile}, known);
  if (index)
    for (const auto& [name, file] : index->weight_map) {
      const auto found = result.tensors_.find(name);
      MOESH_CHECK(
          found != result.tensors_.end() && found->second.file->file().path() == folder / file,
          ErrorKind::data, "'", index_path.string(), "' says that '", file, "' holds tensor '",
          name, "', and it does not");
    }
  result.keep_text_model();
  result.join_quantized();
  return result;
}

TensorFolder TensorFolder::adapter(const std::filesystem::path& folder) {
  const auto manifest = formats::find_manifest(folder);
  return TensorFolder(folder, {formats::kAdapterFile}, manifest ? &*manifest : nullptr);
}

TensorFolder TensorFolder::of_file(const std::filesystem::path& file) {
  TensorFolder result(file.parent_path(), {file.filename().string()}, nullptr);
  result.path_ = file;  // for messages
  return result;
}

TensorFolder TensorFolder::of_checkpoint(const std::filesystem::path& folder,
                                         const formats::Manifest& manifest,
                                         const std::string& prefix) {
  std::vector<std::string> files;
  for (const auto& file : manifest.files)
    if (file.name.starts_with(prefix) && file.name.ends_with(".safetensors"))
      files.push_back(file.name);
  return TensorFolder(folder, files, &manifest);
}

void check_names(const TensorFolder& folder, const formats::DiskTable& table) {
  const Differences d = compare(folder, table);
  if (d.count() == 0) return;
  std::string text = "'" + folder.path().string() + "' does not hold the tensors of the model";
  if (!d.missing.empty())
    text += detail::concat("; ", d.missing.size(), " missing: ", listed(d.missing));
  if (!d.unexpected.empty())
    text += detail::concat("; ", d.unexpected.size(), " unexpected: ", listed(d.unexpected));
  if (!d.misshapen.empty())
    text += detail::concat("; ", d.misshapen.size(), " of another shape: ", listed(d.misshapen),
                           d.misshapen.size() > 1 ? "; is it for another model?" : "");
  const std::string cure =
      table.cure && !d.missing.empty() ? table.cure(d.missing.front()) : std::string();
  if (!cure.empty()) text += "; " + cure;
  throw Error(ErrorKind::data, text);
}

namespace {

// Pages of both that lie evenly from the first to the last. What is of another type is not looked
// at: its rounding may differ.
bool have_same_sample(const TensorFolder::FolderTensor& a, const TensorFolder::FolderTensor& b) {
  constexpr std::uint64_t kPages = 64, kPage = 4096;
  const std::uint64_t size = a.info->end - a.info->begin;
  if (a.quantized || b.quantized || a.info->dtype != b.info->dtype) return true;
  if (size != b.info->end - b.info->begin) return false;
  const auto page = [&](const TensorFolder::FolderTensor& t, std::uint64_t offset) {
    std::vector<std::byte> bytes(std::min(kPage, size - offset));
    t.file->read(t.file->file().header().data_start + t.info->begin + offset, bytes);
    return bytes;
  };
  const std::uint64_t last = size > kPage ? size - kPage : 0;
  for (std::uint64_t i = 0; i < kPages; ++i)
    if (const auto at = last * i / (kPages - 1); page(a, at) != page(b, at)) return false;
  return true;
}

void tell_other_copies(const TensorFolder& folder, const formats::DiskTable& table) {
  const auto& there = folder.tensors();
  for (const auto& copy : table.tensors) {
    if (!copy.is_copy || !there.contains(copy.name)) continue;
    for (const auto& t : table.tensors)
      if (!t.is_copy && t.sources[0].param == copy.sources[0].param && there.contains(t.name) &&
          !have_same_sample(there.at(copy.name), there.at(t.name)))
        log_warn("'", folder.path().string(), "': '", copy.name, "' is not '", t.name,
                 "'; moesh has one weight for both, and takes the second");
  }
}

}  // namespace

void tell_left_out(const TensorFolder& folder, const formats::DiskTable& table) {
  tell_other_copies(folder, table);
  const auto tell = [&](const std::vector<std::string>& names, const char* what,
                        const std::string& cure = "") {
    if (!names.empty())
      log_warn("'", folder.path().string(), "' has ", names.size(), " tensors ", what,
               "; they are left out, and will not be in what is saved: ", listed(names), cure);
  };
  tell(folder.beside_text_model(),
       "beside its text model, such as those of images, and moesh computes only the text model");
  if (!table.left_out) return;
  std::vector<std::string> names;
  std::set<std::string> wanted;
  for (const auto& t : table.tensors) wanted.insert(t.name);
  for (const auto& [name, found] : folder.tensors())
    if (!wanted.contains(name) && table.left_out(name)) names.push_back(name);
  tell(names, "of layers for multi-token prediction that this model does not compute",
       table.to_read_them);
}

formats::ExpertLayout find_layout(const TensorFolder& folder, const formats::ModelOnDisk& model) {
  check_size(folder, model);
  formats::ExpertLayout nearest = formats::ExpertLayout::per_expert;
  std::optional<std::size_t> fewest;
  for (const auto layout : formats::kExpertLayouts) {
    const auto count = compare(folder, model.table(layout)).count();
    if (!fewest || count < *fewest) fewest = count, nearest = layout;
  }
  if (*fewest > 0) check_names(folder, model.table(nearest));
  return nearest;
}

Loader::Loader(const TensorFolder& folder, const formats::DiskTable& table) : folder_(folder) {
  for (const auto& in_table : table.tensors) {
    if (in_table.is_copy) continue;
    const auto found = folder.tensors().find(in_table.name);
    const bool is_quantized = found != folder.tensors().end() && found->second.quantized;
    const formats::DiskTensor& tensor =
        is_quantized ? stored_order_.emplace_back(found->second.quantized->stored_order(in_table))
                     : in_table;
    for (const auto& source : tensor.sources) entries_[source.param].push_back({&tensor, &source});
  }
}

TensorFolder::FolderTensor Loader::found(const TableEntry& entry) const {
  const auto found = folder_.tensors().find(entry.tensor->name);
  MOESH_CHECK(found != folder_.tensors().end(), ErrorKind::data, "'", folder_.path().string(),
              "' has no tensor '", entry.tensor->name, "'");
  const auto& shape = found->second.info->shape;
  MOESH_CHECK(shape == entry.tensor->shape, ErrorKind::data, "'", folder_.path().string(),
              "': tensor '", found->first, "' has shape ", shape, ", and ", entry.tensor->shape,
              " is needed");
  return found->second;
}

formats::Dtype Loader::dtype_of(const std::string& param) const {
  return found(entries_.at(param).front()).info->dtype;
}

void Loader::load(const std::vector<TensorPart>& parts, const Heartbeat& heartbeat,
                  bool must_be_finite) const {
  const at::NoGradGuard no_grad;
  std::vector<TensorPart> on_host = parts;
  for (auto& p : on_host) p.value = host_memory(p.value);
  std::vector<ReadJob> jobs;
  for (const auto& part : on_host) {
    std::int64_t filled = 0;
    if (const auto entries = entries_.find(part.name); entries != entries_.end())
      for (const auto& entry : entries->second)
        if (const auto overlap = overlap_with(*entry.tensor, *entry.source, part.region)) {
          jobs.push_back(
              {&part, entry.tensor, entry.source, *overlap, found(entry), must_be_finite});
          filled += num_elements(overlap->param.length);
        }
    check_filled(part, filled);
  }
  read_all(std::move(jobs), heartbeat);
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (!parts[i].value.is_cpu()) at::Tensor(parts[i].value).copy_(on_host[i].value);
}

void Loader::load(const std::vector<QuantizedPart>& parts, const Heartbeat& heartbeat) const {
  const at::NoGradGuard no_grad;
  // Owns the objects that jobs point to.
  std::deque<TensorPart> on_host;
  std::deque<formats::DiskTensor> tensors;
  std::deque<formats::TensorInfo> infos;
  for (const auto& [name, shape, box] : parts)
    for (const bool is_scales : {false, true}) {
      const auto num_dims = shape.size();
      const Sizes block =
          is_scales ? box->how.scale_block(num_dims) : box->how.code_block(num_dims);
      const kernels::BlockBox blocks = kernels::covering(box->start, box->length, block);
      const TensorPart& part = on_host.emplace_back(
          TensorPart{.name = name,
                     .shape = kernels::covering(Sizes(num_dims, 0), shape, block).length,
                     .region = {blocks.start, blocks.length},
                     .owned = false,
                     .value = host_memory(is_scales ? box->scales : box->codes)});
      std::vector<ReadJob> jobs;
      std::int64_t filled = 0;
      for (const auto& entry : entries_.at(name)) {
        const Quantized* quantized = found(entry).quantized;
        MOESH_CHECK(quantized && quantized->how() == box->how, "'", name,
                    "' is quantized in another way in '", folder_.path().string(), "'");
        const auto& stored = is_scales ? quantized->scales() : quantized->values();
        const auto& tensor = tensors.emplace_back(in_blocks(*entry.tensor, *entry.source, block));
        auto& info = infos.emplace_back(*stored.info);
        if (!is_scales) info.dtype = formats::Dtype::u8;
        const auto overlap = overlap_with(tensor, tensor.sources[0], part.region);
        if (!overlap) continue;
        filled += num_elements(overlap->param.length);
        jobs.push_back({&part,
                        &tensor,
                        &tensor.sources[0],
                        *overlap,
                        {{stored.file, &info}},
                        /*must_be_finite=*/true});
      }
      check_filled(part, filled);
      read_all(jobs, heartbeat);
      for (const ReadJob& job : jobs) check_codes(job, box->how.kind, is_scales);
      at::Tensor target = is_scales ? box->scales : box->codes;
      if (!target.is_cpu()) target.copy_(part.value);
      on_host.clear();
    }
}

std::map<std::string, kernels::Quantization> Loader::quantization() const {
  std::map<std::string, kernels::Quantization> all;
  for (const auto& [param, entries] : entries_) {
    const Quantized* first = found(entries.front()).quantized;
    const bool is_one_way = std::all_of(entries.begin(), entries.end(), [&](const auto& entry) {
      const Quantized* q = found(entry).quantized;
      const auto& offset = entry.source->offset;
      // A matrix is whole in its tensor: its blocks begin where it begins.
      return q && first && q->how() == first->how() && offset.size() >= 2 && offset.back() == 0 &&
             offset[offset.size() - 2] == 0;
    });
    if (is_one_way) all.emplace(param, first->how());
  }
  return all;
}

}  // namespace moesh::checkpoint
