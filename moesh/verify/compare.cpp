#include "moesh/verify/compare.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/base/this_thread.h"
#include "moesh/checkpoint/part.h"
#include "moesh/formats/file.h"
#include "moesh/formats/pattern.h"
#include "moesh/formats/safetensors.h"

namespace moesh::verify {
namespace {

using formats::Dtype;
using Verdict = ComparedTensor::Verdict;

constexpr std::int64_t kChunk = 1 << 22;  // elements that are in memory at a time

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::boolean: return at::kBool;
    case Dtype::u8: return at::kByte;
    case Dtype::i8: return at::kChar;
    case Dtype::i16: return at::kShort;
    case Dtype::u16: return at::kUInt16;
    case Dtype::i32: return at::kInt;
    case Dtype::u32: return at::kUInt32;
    case Dtype::i64: return at::kLong;
    case Dtype::u64: return at::kUInt64;
    case Dtype::f8_e4m3: return at::kFloat8_e4m3fn;
    case Dtype::f8_e5m2: return at::kFloat8_e5m2;
    case Dtype::f16: return at::kHalf;
    case Dtype::bf16: return at::kBFloat16;
    case Dtype::f32: return at::kFloat;
    case Dtype::f64: return at::kDouble;
    default: break;
  }
  throw Error(ErrorKind::data,
              detail::concat("compare cannot read numbers of type ", formats::name_of(dtype),
                             "; convert them to a type such as F32 first"));
}

double tolerance_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return 1e-10;
    case Dtype::f32: return 1e-5;
    case Dtype::f16:
    case Dtype::bf16: return 2e-2;
    case Dtype::f8_e4m3:
    case Dtype::f8_e5m2: return 1e-1;
    default: return 0;
  }
}

// The elements of a tensor from `first` on, in float64 on the host.
using Read = std::function<at::Tensor(std::int64_t first, std::int64_t count)>;

struct TensorEntry {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;
  const void* file;            // whose order it is in
  std::function<Read()> open;  // as long as the reader lives the tensor may be in memory
};

Read reader_of(const formats::SafetensorsFile& file, const formats::TensorInfo& info) {
  return [&file, &info](std::int64_t first, std::int64_t count) {
    at::Tensor raw = at::empty({count}, scalar_type(info.dtype));
    const auto width = formats::size_of(info.dtype);
    file.read(file.header().data_start + info.begin + static_cast<std::uint64_t>(first) * width,
              {static_cast<std::byte*>(raw.data_ptr()), static_cast<std::size_t>(count) * width});
    return raw.to(at::kDouble);
  };
}

Read reader_of(const at::Tensor& tensor) {
  return [flat = tensor.detach().reshape({-1})](std::int64_t first, std::int64_t count) {
    return flat.slice(0, first, first + count).to(at::kCPU, at::kDouble);
  };
}

// One side of the comparison: of all files of a folder, in the order of their names.
struct ComparedSide {
  std::vector<std::unique_ptr<formats::SafetensorsFile>> files;
  std::vector<TensorEntry> order;
  std::map<std::string, const TensorEntry*> by_name;

  explicit ComparedSide(const Compared& from) {
    if (const auto* path = std::get_if<std::string>(&from))
      add_files(*path);
    else
      for (const auto& [name, tensor] : std::get<TensorList>(from))
        order.push_back({name, checkpoint::disk_dtype(tensor.scalar_type()), tensor.sizes().vec(),
                         nullptr, [&tensor] { return reader_of(tensor); }});
    if (is_alphabetical())
      std::stable_sort(order.begin(), order.end(), [](const TensorEntry& x, const TensorEntry& y) {
        return in_natural_order(x.name, y.name);
      });
    const std::string what =
        std::holds_alternative<std::string>(from) ? std::get<std::string>(from) : "a list";
    for (const TensorEntry& e : order)
      MOESH_CHECK(by_name.emplace(e.name, &e).second, ErrorKind::data, what, " holds ", e.name,
                  " twice; keep one of them");
  }
  ComparedSide(const ComparedSide&) = delete;
  ComparedSide& operator=(const ComparedSide&) = delete;

  void add_files(const std::string& path) {
    std::vector<std::filesystem::path> paths;
    if (formats::is_folder(path)) {
      for (const auto& name : formats::names_in(path))
        if (name.ends_with(".safetensors")) paths.push_back(std::filesystem::path(path) / name);
      MOESH_CHECK(!paths.empty(), ErrorKind::data, path,
                  " holds no *.safetensors file; name a file or a folder that does");
    } else {
      paths.emplace_back(path);
    }
    for (const auto& p : paths) {
      const auto& file = *files.emplace_back(std::make_unique<formats::SafetensorsFile>(p));
      for (const auto& info : file.header().tensors)
        order.push_back({info.name, info.dtype, info.shape, &file,
                         [&file, &info] { return reader_of(file, info); }});
    }
  }

  // Whether the order of the tensors says nothing: Python's safetensors writes them by name, within
  // each dtype. A dump of moesh has them in the order in which they were computed.
  bool is_alphabetical() const {
    std::map<std::pair<const void*, Dtype>, std::string> last;
    return std::all_of(order.begin(), order.end(), [&](const TensorEntry& e) {
      std::string& before = last[{e.file, e.dtype}];
      const bool is_next = before < e.name || before.empty();
      before = e.name;
      return is_next;
    });
  }
};

std::vector<std::int64_t> index_of(std::int64_t element, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> index(shape.size());
  for (size_t d = shape.size(); d-- > 0; element /= shape[d]) index[d] = element % shape[d];
  return index;
}

void compare_values(ComparedTensor& c, const TensorEntry& a, const TensorEntry& b) {
  const Read read_a = a.open(), read_b = b.open();
  std::int64_t size = 1;
  for (auto n : c.shape) size *= n;
  double aa = 0, ab = 0, bb = 0, dd = 0, worst = -1;
  for (std::int64_t first = 0; first < size; first += kChunk) {
    interruption_point();
    const std::int64_t count = std::min(kChunk, size - first);
    at::Tensor x = read_a(first, count), y = read_b(first, count);
    // Equal values that are not finite (a mask of -inf) count as equal, and have no size.
    const at::Tensor same = x.isfinite().logical_not().logical_and(
        x.eq(y).logical_or(x.isnan().logical_and(y.isnan())));
    x = x.masked_fill(same, 0), y = y.masked_fill(same, 0);
    const at::Tensor d = x - y;
    const auto sum = [](const at::Tensor& t) { return t.sum().item<double>(); };
    aa += sum(x * x), ab += sum(x * y), bb += sum(y * y), dd += sum(d * d);
    const at::Tensor off = at::nan_to_num(d.abs(), INFINITY);
    const std::int64_t i = off.argmax().item<std::int64_t>();
    if (const double v = off[i].item<double>(); v > worst) {
      worst = v, c.worst_index = index_of(first + i, c.shape);
      c.worst_a = x[i].item<double>(), c.worst_b = y[i].item<double>();
    }
  }
  c.is_finite = std::isfinite(aa) && std::isfinite(bb);
  c.norm = std::sqrt(aa), c.other_norm = std::sqrt(bb), c.error = std::sqrt(dd);
  c.factor = bb > 0 ? ab / bb : aa > 0 ? INFINITY : 1;
  if (aa > 0 && bb > 0) c.residue = std::sqrt(std::max(0.0, aa - ab * ab / bb) / aa);
}

}  // namespace

double ComparedTensor::relative() const {
  return other_norm > 0 ? error / other_norm : error > 0 ? INFINITY : 0;
}

std::string ComparedTensor::diagnosis() const {
  if (state != Verdict::differs) return "";
  if (!is_finite) return "not finite";
  if (norm == 0) return "a is zero: it was never computed, or its gradient never arrived";
  if (residue > 1e-3) return "";
  for (int n = 2; n <= 1024; ++n) {
    if (std::abs(factor / n - 1) < 1e-3)
      return detail::concat("a is ", n, " times b: a sum over ", n,
                            " ranks too many, or a mean that is missing");
    if (std::abs(factor * n - 1) < 1e-3)
      return detail::concat("a is 1/", n, " of b: a sum over ", n,
                            " ranks is missing, or a mean over them too many");
  }
  if (std::abs(factor + 1) < 1e-3) return "a is minus b";
  return detail::concat("a is ", factor, " times b in every element");
}

std::string ComparedTensor::describe() const {
  const std::string shown = printable(name);
  switch (state) {
    case Verdict::only_in_a:
      return detail::concat(
          "only in A    ", shown,
          other_name == name ? "" : " (looked for " + printable(other_name) + " in B)");
    case Verdict::only_in_b: return "only in B    " + shown;
    case Verdict::shape_differs:
      return detail::concat("shape        ", shown, ": ", shape, " in A, ", other_shape, " in B");
    case Verdict::same:
    case Verdict::differs: break;
  }
  std::string text =
      detail::concat(state == Verdict::same ? "same         " : "differs      ", shown, " ", shape,
                     formatted("  error %.3g  factor %.6g", relative(), factor));
  if (state == Verdict::differs)
    text +=
        detail::concat("  worst at ", worst_index, formatted(": %.6g, not %.6g", worst_a, worst_b));
  if (const auto cause = diagnosis(); !cause.empty()) text += "\n             " + cause;
  return text;
}

std::string Comparison::describe(bool all) const {
  std::string text;
  std::size_t num_same = 0;
  for (const auto& t : tensors) {
    const bool is_same = t.state == Verdict::same;
    num_same += is_same;
    if (all || !is_same) text += t.describe() + "\n";
  }
  text += detail::concat(num_same, " of ", tensors.size(), " tensors are the same");
  if (const auto* first = first_difference())
    text += "; the first that differs: " + printable(first->name);
  return text;
}

bool Comparison::same() const { return first_difference() == nullptr; }

const ComparedTensor* Comparison::first_difference() const {
  for (const auto& t : tensors)
    if (t.state != Verdict::same) return &t;
  return nullptr;
}

Comparison compare(const Compared& given_a, const Compared& given_b,
                   const CompareOptions& options) {
  const ComparedSide a(given_a), b(given_b);
  std::vector<std::pair<formats::Pattern, std::string>> renames;
  for (const auto& [pattern, replacement] : options.renames) {
    try {
      renames.emplace_back(formats::Pattern(pattern), replacement);
      renames.back().first.replace("", replacement);  // checks the replacement
    } catch (const Error& e) {
      throw Error(e.kind(), detail::concat("--rename: ", e.what()));
    }
  }
  Comparison result;
  std::map<std::string, std::string> taken;  // names of B, and which of A came for it
  std::vector<double> tolerances;
  double all = 0;
  int num_compared = 0;
  for (const auto& entry : a.order) {
    ComparedTensor c{.name = entry.name, .other_name = entry.name, .shape = entry.shape};
    for (const auto& [pattern, replacement] : renames)
      c.other_name = pattern.replace(c.other_name, replacement);
    const auto [first, is_new] = taken.emplace(c.other_name, c.name);
    MOESH_CHECK(is_new, ErrorKind::config, "--rename gives ", first->second, " and ", c.name,
                " the same name, ", c.other_name, "; choose patterns that keep them apart");
    double tolerance = 0;
    if (const auto found = b.by_name.find(c.other_name); found == b.by_name.end()) {
      c.state = Verdict::only_in_a;
    } else if (c.other_shape = found->second->shape; c.other_shape != c.shape) {
      c.state = Verdict::shape_differs;
    } else {
      compare_values(c, entry, *found->second);
      tolerance = options.tolerance.value_or(
          std::max(tolerance_of(entry.dtype), tolerance_of(found->second->dtype)));
      if (std::isfinite(c.other_norm)) all += c.other_norm * c.other_norm, ++num_compared;
    }
    tolerances.push_back(tolerance);
    result.tensors.push_back(std::move(c));
  }
  // The floor is there because some tensors are exactly zero in theory and noise in practice.
  const double floor = num_compared ? 1e-3 * std::sqrt(all / num_compared) : 0;
  for (size_t i = 0; i < result.tensors.size(); ++i) {
    auto& c = result.tensors[i];
    if (c.state != Verdict::same) continue;
    c.allowed = tolerances[i] * std::max(c.other_norm, floor);
    if (!c.is_finite || !(c.error <= c.allowed)) c.state = Verdict::differs;
  }
  for (const auto& entry : b.order)
    if (!taken.contains(entry.name))
      result.tensors.push_back({.name = entry.name,
                                .other_name = entry.name,
                                .state = Verdict::only_in_b,
                                .other_shape = entry.shape});
  return result;
}

void write_tensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<formats::TensorInfo> infos;
  for (const auto& [name, value] : tensors.tensors)
    infos.push_back({.name = name,
                     .dtype = checkpoint::disk_dtype(value.scalar_type()),
                     .shape = value.sizes().vec()});
  const std::string header = formats::write_safetensors_header(infos, {});
  std::ofstream file(path, std::ios::binary);
  file << header;
  for (size_t i = 0; i < infos.size(); ++i) {
    const at::Tensor bytes = tensors.tensors[i].second.detach().cpu().contiguous();
    file.seekp(static_cast<std::streamoff>(
        header.size() + infos[i].begin));  // the header may order them by element size
    file.write(static_cast<const char*>(bytes.data_ptr()),
               static_cast<std::streamsize>(bytes.nbytes()));
  }
  file.flush();
  MOESH_CHECK(file.good(), ErrorKind::config, "cannot write ", path,
              "; choose a place that can be written and has room");
}

}  // namespace moesh::verify
