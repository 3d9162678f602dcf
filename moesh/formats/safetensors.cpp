#include "moesh/formats/safetensors.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"

namespace moesh::formats {

namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // of the format
constexpr const char* kMetadata = "__metadata__";

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  std::uint64_t bits;
};
// In the order of the enumeration.
constexpr std::array kDtypes = {
    DtypeRow{Dtype::boolean, "BOOL", 8},    DtypeRow{Dtype::u8, "U8", 8},
    DtypeRow{Dtype::i8, "I8", 8},           DtypeRow{Dtype::i16, "I16", 16},
    DtypeRow{Dtype::u16, "U16", 16},        DtypeRow{Dtype::i32, "I32", 32},
    DtypeRow{Dtype::u32, "U32", 32},        DtypeRow{Dtype::i64, "I64", 64},
    DtypeRow{Dtype::u64, "U64", 64},        DtypeRow{Dtype::f8_e4m3, "F8_E4M3", 8},
    DtypeRow{Dtype::f8_e5m2, "F8_E5M2", 8}, DtypeRow{Dtype::f8_e8m0, "F8_E8M0", 8},
    DtypeRow{Dtype::f16, "F16", 16},        DtypeRow{Dtype::bf16, "BF16", 16},
    DtypeRow{Dtype::f32, "F32", 32},        DtypeRow{Dtype::f64, "F64", 64},
    DtypeRow{Dtype::c64, "C64", 64},        DtypeRow{Dtype::f4, "F4", 4},
    DtypeRow{Dtype::f6_e2m3, "F6_E2M3", 6}, DtypeRow{Dtype::f6_e3m2, "F6_E3M2", 6},
};
static_assert([] {
  for (std::size_t i = 0; i < kDtypes.size(); ++i)
    if (kDtypes[i].dtype != static_cast<Dtype>(i)) return false;
  return kDtypes.back().dtype == Dtype::f6_e3m2;
}());

const DtypeRow& row_of(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

Dtype dtype_named(std::string_view name) {
  const auto row = std::find_if(kDtypes.begin(), kDtypes.end(),
                                [&](const DtypeRow& r) { return r.name == name; });
  MOESH_CHECK(row != kDtypes.end(), ErrorKind::data, "its dtype is ", shown(name),
              ", which safetensors does not have");
  return row->dtype;
}

// Bytes of a tensor.
std::uint64_t bytes_of(const TensorInfo& tensor) {
  std::uint64_t bits = 1;
  for (const std::int64_t length : tensor.shape) {
    MOESH_CHECK(length >= 0, ErrorKind::data, "its shape is ", tensor.shape,
                "; a dimension must not be negative");
    MOESH_CHECK(!__builtin_mul_overflow(bits, static_cast<std::uint64_t>(length), &bits),
                ErrorKind::data, "its shape ", tensor.shape, " has more than 2^64 elements");
  }
  MOESH_CHECK(!__builtin_mul_overflow(bits, row_of(tensor.dtype).bits, &bits), ErrorKind::data,
              "its shape ", tensor.shape, " of ", name_of(tensor.dtype),
              " has more than 2^64 bits");
  MOESH_CHECK(bits % 8 == 0, ErrorKind::data, "its shape ", tensor.shape, " of ",
              name_of(tensor.dtype), " is ", bits, " bits, which is not a whole number of bytes");
  return bits / 8;
}

// Errors below say what is wrong with a tensor; here they learn which.
template <class F>
auto of_tensor(std::string_view name, F f) {
  try {
    return f();
  } catch (const Error& e) {
    throw Error(e.kind(), detail::concat("tensor ", shown(name), ": ", e.what()));
  }
}

// Further keys are skipped, as in the reference.
TensorInfo parse_tensor(const std::string& name, const JsonValue& json) {
  TensorInfo tensor{.name = name};
  tensor.dtype = dtype_named(json.at("dtype", "its entry").as_text("dtype"));
  for (const JsonValue& length : json.at("shape", "its entry").as_list("shape"))
    tensor.shape.push_back(length.as_int("shape"));
  const JsonList& offsets = json.at("data_offsets", "its entry").as_list("data_offsets");
  MOESH_CHECK(offsets.size() == 2, ErrorKind::data, "\"data_offsets\" has ", offsets.size(),
              " numbers; it must have two");
  tensor.begin = offsets[0].as_size("data_offsets");
  tensor.end = offsets[1].as_size("data_offsets");
  return tensor;
}

std::map<std::string, std::string> parse_metadata(const JsonValue& json) {
  std::map<std::string, std::string> metadata;
  if (json.is_null()) return metadata;
  for (const auto& [key, value] : json.as_object(kMetadata))
    metadata.emplace(key, value.as_text(key));
  return metadata;
}

// The bytes of all tensors are the data, each byte once.
void check_ranges(const std::vector<TensorInfo>& tensors, std::uint64_t data_size) {
  std::uint64_t reached = 0;
  for (const TensorInfo& tensor : tensors)
    of_tensor(tensor.name, [&] {
      MOESH_CHECK(tensor.begin <= tensor.end, ErrorKind::data, "it begins at byte ", tensor.begin,
                  " and ends before, at ", tensor.end);
      MOESH_CHECK(tensor.begin == reached, ErrorKind::data, "it begins at byte ", tensor.begin,
                  " of the data; the one before ends at ", reached,
                  tensor.begin < reached ? ", so they overlap" : ", so there is a hole");
      const std::uint64_t wanted = bytes_of(tensor);
      MOESH_CHECK(tensor.end - tensor.begin == wanted, ErrorKind::data, "it has ",
                  tensor.end - tensor.begin, " bytes; ", tensor.shape, " of ",
                  name_of(tensor.dtype), " takes ", wanted);
      reached = tensor.end;
    });
  MOESH_CHECK(reached == data_size, ErrorKind::data, "the tensors end at byte ", reached,
              " of the data, which has ", data_size,
              data_size < reached ? ": the file was cut off" : ": something follows them");
}

// Bytes of the header; `first` holds at least the eight bytes that say it.
std::uint64_t header_length(std::string_view first, std::uint64_t file_size) {
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;)
    length = length << 8 | static_cast<unsigned char>(first[i]);
  MOESH_CHECK(length <= kMaxHeader, ErrorKind::data, "its header would have ", length,
              " bytes; safetensors allows ", kMaxHeader, ", so this is another format, or damaged");
  MOESH_CHECK(length <= file_size - kLengthBytes, ErrorKind::data, "its header should have ",
              length, " bytes, and only ", file_size - kLengthBytes,
              " follow: the file was cut off");
  return length;
}

void check_long_enough(std::uint64_t size) {
  MOESH_CHECK(size >= kLengthBytes, ErrorKind::data, "it has ", size,
              " bytes; a safetensors file begins with eight of header length");
}

// Reads only the header: the tensors may be larger than the memory.
SafetensorsHeader read_header(const InputFile& file) {
  try {
    check_long_enough(file.size());
    std::string bytes(kLengthBytes, '\0');
    file.read(0, std::as_writable_bytes(std::span(bytes)));
    bytes.resize(kLengthBytes + header_length(bytes, file.size()));
    file.read(0, std::as_writable_bytes(std::span(bytes)));
    return parse_safetensors(bytes, file.size());
  } catch (const Error& e) {
    throw Error(e.kind(), detail::concat(file.path().string(), ": ", e.what()));
  }
}

}  // namespace

std::string_view name_of(Dtype dtype) { return row_of(dtype).name; }

const char* torch_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::bf16: return "bfloat16";
    case Dtype::f16: return "float16";
    case Dtype::f64: return "float64";
    default: return "float32";
  }
}

std::uint64_t size_of(Dtype dtype) {
  const DtypeRow& row = row_of(dtype);
  MOESH_CHECK(row.bits % 8 == 0, ErrorKind::data, "an element of ", row.name, " has ", row.bits,
              " bits and shares its byte with others; moesh does not compute with this type");
  return row.bits / 8;
}

const TensorInfo* SafetensorsHeader::find(std::string_view name) const {
  const auto found = std::lower_bound(
      by_name.begin(), by_name.end(), name,
      [this](std::size_t i, std::string_view wanted) { return tensors[i].name < wanted; });
  return found != by_name.end() && tensors[*found].name == name ? &tensors[*found] : nullptr;
}

SafetensorsHeader parse_safetensors(std::string_view bytes, std::uint64_t file_size) {
  check_long_enough(file_size);
  MOESH_CHECK(bytes.size() >= kLengthBytes, "parse_safetensors was given ", bytes.size(), " bytes");
  const std::uint64_t length = header_length(bytes, file_size);
  MOESH_CHECK(bytes.size() - kLengthBytes >= length, "parse_safetensors was given ", bytes.size(),
              " bytes, and the header has ", length);
  const std::string_view text = bytes.substr(kLengthBytes, length);
  MOESH_CHECK(text.starts_with('{'), ErrorKind::data,
              "its header does not begin with '{': this is not a safetensors file");

  const JsonValue json = parse_json(text, "its header");
  SafetensorsHeader header{.data_start = kLengthBytes + length};
  const JsonObject& entries = json.as_object("header");
  header.tensors.reserve(entries.size());
  for (const auto& [name, entry] : entries) {
    if (name == kMetadata)
      header.metadata = parse_metadata(entry);
    else
      header.tensors.push_back(of_tensor(name, [&] { return parse_tensor(name, entry); }));
  }
  // The keys may come in any order. An empty tensor begins where its neighbour does: the end tells
  // which is first.
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  check_ranges(header.tensors, file_size - header.data_start);
  header.by_name.resize(header.tensors.size());
  std::iota(header.by_name.begin(), header.by_name.end(), std::size_t{0});
  std::sort(header.by_name.begin(), header.by_name.end(), [&](std::size_t a, std::size_t b) {
    return header.tensors[a].name < header.tensors[b].name;
  });
  return header;
}

std::string write_safetensors_header(std::vector<TensorInfo>& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  std::vector<TensorInfo*> in_file;
  std::vector<std::string_view> names = {kMetadata};
  for (TensorInfo& tensor : tensors) {
    in_file.push_back(&tensor);
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  MOESH_CHECK(
      twice == names.end(), ErrorKind::data, "cannot write tensor ", shown(*twice),
      *twice == kMetadata ? ": the format reserves this name" : ": there are two of this name");
  std::stable_sort(in_file.begin(), in_file.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return row_of(a->dtype).bits > row_of(b->dtype).bits;
  });

  JsonObject entries;
  if (!metadata.empty()) {
    JsonObject all;
    for (const auto& [key, value] : metadata) all.emplace_back(key, JsonValue{value});
    entries.emplace_back(kMetadata, JsonValue{std::move(all)});
  }
  std::uint64_t reached = 0;
  for (TensorInfo* tensor : in_file) {
    tensor->begin = reached;
    const std::uint64_t bytes = of_tensor(tensor->name, [&] { return bytes_of(*tensor); });
    MOESH_CHECK(!__builtin_add_overflow(reached, bytes, &reached), ErrorKind::data,
                "the tensors have more than 2^64 bytes together");
    tensor->end = reached;
    entries.emplace_back(
        tensor->name,
        JsonValue{JsonObject{
            {"dtype", {std::string(name_of(tensor->dtype))}},
            {"shape", {JsonList(tensor->shape.begin(), tensor->shape.end())}},
            {"data_offsets", {JsonList{JsonValue{tensor->begin}, JsonValue{tensor->end}}}}}});
  }
  std::string text = std::string(kLengthBytes, '\0') + to_json_line({std::move(entries)});
  text.pop_back();  // its end of a line
  text.resize((text.size() + 7) / 8 * 8,
              ' ');  // the length before it has eight bytes, so the data is aligned too
  const std::uint64_t length = text.size() - kLengthBytes;
  MOESH_CHECK(length <= kMaxHeader, ErrorKind::data, "the header of ", tensors.size(),
              " tensors has ", length, " bytes; safetensors allows ", kMaxHeader,
              ": write fewer tensors to a file");
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    text[i] = static_cast<char>(length >> (8 * i) & 0xff);
  return text;
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path)
    : file_(std::move(path)), header_(read_header(file_)) {}

namespace {

// Some writers give bytes as a float, 1.5e9: what is whole is taken.
std::optional<std::uint64_t> parse_total_size(const JsonValue& json) {
  const JsonValue* metadata = json.find("metadata");
  if (!metadata || metadata->is_null()) return std::nullopt;
  metadata->as_object("metadata");
  const JsonValue* size = metadata->find("total_size");
  if (!size || size->is_null()) return std::nullopt;
  constexpr double kExact = 9007199254740992;  // 2^53
  if (const auto* real = std::get_if<double>(&size->value); real && *real >= 0 && *real <= kExact) {
    const auto whole = static_cast<std::uint64_t>(*real);
    if (static_cast<double>(whole) == *real) return whole;
  }
  return size->as_size("metadata.total_size");
}

}  // namespace

std::vector<std::string> SafetensorsIndex::files() const {
  std::set<std::string> all;
  for (const auto& [tensor, file] : weight_map) all.insert(file);
  return {all.begin(), all.end()};
}

SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& name) {
  const JsonValue json = parse_json(text, name);
  try {
    SafetensorsIndex index{.total_size = parse_total_size(json)};
    for (const auto& [tensor, file] : json.at("weight_map", "index").as_object("weight_map")) {
      check_file_name(file.as_text(tensor));
      index.weight_map.emplace(tensor, file.as_text(tensor));
    }
    return index;
  } catch (const Error& e) {
    throw Error(e.kind(), detail::concat(name, ": ", e.what()));
  }
}

SafetensorsIndex read_safetensors_index(const std::string& path) {
  return parse_safetensors_index(InputFile(path).read_all(JsonLimits().max_bytes), path);
}

std::string write_safetensors_index(const SafetensorsIndex& index) {
  JsonObject metadata, weight_map;
  if (index.total_size) metadata.emplace_back("total_size", JsonValue{*index.total_size});
  for (const auto& [tensor, file] : index.weight_map) {
    check_file_name(file);
    weight_map.emplace_back(tensor, JsonValue{file});
  }
  return to_json(
      {JsonObject{{"metadata", {std::move(metadata)}}, {"weight_map", {std::move(weight_map)}}}});
}

}  // namespace moesh::formats
