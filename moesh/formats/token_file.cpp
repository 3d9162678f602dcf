#include "moesh/formats/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr std::size_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;

struct IdTypeRow {
  const char* name;
  std::string_view npy;  // as the header of an .npy has it
  int code;              // in Megatron's .idx; 0: an index has no such ids
};
// In the order of the enumeration.
constexpr IdTypeRow kIdTypes[] = {{"uint8", "|u1", 1},  {"int8", "|i1", 2},  {"int16", "<i2", 3},
                                  {"uint16", "<u2", 8}, {"int32", "<i4", 4}, {"uint32", "<u4", 0},
                                  {"int64", "<i8", 5},  {"uint64", "<u8", 0}};
const IdTypeRow& row_of(IdType type) { return kIdTypes[static_cast<std::size_t>(type)]; }

// The type of which this is said.
template <class T, class Value>
std::optional<IdType> find_type(T IdTypeRow::* what, const Value& value) {
  const auto* found = std::ranges::find(kIdTypes, value, what);
  return found == std::end(kIdTypes) ? std::nullopt
                                     : std::optional(static_cast<IdType>(found - kIdTypes));
}

template <class T>
T load(std::string_view bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void append(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// Calls f with a value of the type that an id has in the file.
template <class F>
auto with_type(IdType type, F f) {
  switch (type) {
    case IdType::uint8: return f(std::uint8_t{});
    case IdType::int8: return f(std::int8_t{});
    case IdType::int16: return f(std::int16_t{});
    case IdType::uint16: return f(std::uint16_t{});
    case IdType::int32: return f(std::int32_t{});
    case IdType::uint32: return f(std::uint32_t{});
    case IdType::int64: return f(std::int64_t{});
    case IdType::uint64: break;
  }
  return f(std::uint64_t{});
}

// The rest of a text behind `before`, without spaces; the text of an .npy header is Python.
std::string_view value_behind(std::string_view text, std::string_view before) {
  const std::size_t at = text.find(before);
  if (at == std::string_view::npos) return {};
  text.remove_prefix(at + before.size());
  while (text.starts_with(' ')) text.remove_prefix(1);
  return text;
}

}  // namespace

std::size_t size_of(IdType type) {
  return with_type(type, [](auto value) { return sizeof(value); });
}

const char* to_string(IdType type) { return row_of(type).name; }

MappedFile::MappedFile(const std::string& path) {
  const std::uint64_t size = InputFile(path).size();  // refuses what is not a regular file
  if (size == 0) return;
  const int file = file_system().open(path, O_RDONLY);
  if (file < 0) fail_at(path, "read", errno);
  void* const at = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  const int code = errno;
  file_system().close(file);
  if (at == MAP_FAILED) fail_at(path, "map", code);
  bytes_ = {static_cast<const char*>(at), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

std::int64_t TokenIndex::length(std::int64_t sequence) const {
  return load<std::int32_t>(lengths, static_cast<std::size_t>(sequence));
}
std::int64_t TokenIndex::offset(std::int64_t sequence) const {
  return load<std::int64_t>(offsets, static_cast<std::size_t>(sequence));
}
std::int64_t TokenIndex::first_sequence(std::int64_t document) const {
  return load<std::int64_t>(documents, static_cast<std::size_t>(document));
}

TokenIndex parse_token_index(std::string_view bytes, std::uint64_t bin_size,
                             const std::string& name) {
  MOESH_CHECK(bytes.size() >= kHeaderBytes && bytes.starts_with(kMagic), ErrorKind::data, name,
              " is not an index of Megatron: it does not begin with MMIDIDX and a header");
  const auto version = load<std::uint64_t>(bytes.substr(9), 0);
  MOESH_CHECK(version == 1, ErrorKind::data, name, " has version ", version, "; moesh reads 1");
  const int code = static_cast<unsigned char>(bytes[17]);
  const auto type = code == 0 ? std::nullopt : find_type(&IdTypeRow::code, code);
  MOESH_CHECK(type, ErrorKind::data, name, " has ids of type ", code,
              ", which is not an integer of Megatron (1 to 5, 8)");
  TokenIndex index{.type = *type};
  const auto sequences = load<std::uint64_t>(bytes.substr(18), 0);
  const auto documents = load<std::uint64_t>(bytes.substr(26), 0);
  const std::uint64_t rest = bytes.size() - kHeaderBytes;
  MOESH_CHECK(documents >= 1 && sequences <= rest / 12 && documents <= rest / 8 &&
                  rest >= sequences * 12 + documents * 8,
              ErrorKind::data, name, " has ", bytes.size(), " bytes, too few for ", sequences,
              " sequences and ", documents, " document boundaries: it is cut off, or damaged");
  // Behind it there may be one byte for each sequence (the mode, for more than text).
  MOESH_CHECK(rest == sequences * 12 + documents * 8, ErrorKind::data, name, " has ",
              rest - (sequences * 12 + documents * 8),
              " bytes more than its header says: it is damaged, or has modes, which moesh does "
              "not support");
  index.num_sequences = static_cast<std::int64_t>(sequences);
  index.num_documents = static_cast<std::int64_t>(documents - 1);
  bytes.remove_prefix(kHeaderBytes);
  index.lengths = bytes.substr(0, sequences * 4);
  index.offsets = bytes.substr(sequences * 4, sequences * 8);
  index.documents = bytes.substr(sequences * 12);

  const auto item = static_cast<std::int64_t>(size_of(index.type));
  std::int64_t reached = 0;
  for (std::int64_t i = 0; i < index.num_sequences; ++i) {
    MOESH_CHECK(index.length(i) >= 0 && index.offset(i) == reached, ErrorKind::data, name,
                ": sequence ", i, " has ", index.length(i), " tokens from byte ", index.offset(i),
                " on, and the one before it ends at ", reached, "; write the index again");
    reached += index.length(i) * item;
  }
  MOESH_CHECK(static_cast<std::uint64_t>(reached) == bin_size, ErrorKind::data, name, " is for ",
              reached, " bytes of ids, and the .bin has ", bin_size,
              ": one of them is cut off, or they do not belong together");
  std::int64_t before = 0;
  for (std::int64_t d = 0; d <= index.num_documents; ++d) {
    const std::int64_t first = index.first_sequence(d);
    MOESH_CHECK(first >= before && first <= index.num_sequences && (d > 0 || first == 0),
                ErrorKind::data, name, ": document ", d, " begins with sequence ", first,
                "; it must be from ", before, " to ", d == 0 ? 0 : index.num_sequences);
    before = first;
  }
  MOESH_CHECK(before == index.num_sequences, ErrorKind::data, name,
              ": the documents end at sequence ", before, " of ", index.num_sequences);
  return index;
}

std::string token_index_header(IdType type, std::int64_t num_sequences,
                               std::int64_t num_documents) {
  const int code = row_of(type).code;
  MOESH_CHECK(code != 0, "an index has no ids of type ", to_string(type));
  std::string bytes(kMagic);
  append(bytes, std::uint64_t{1});
  append(bytes, static_cast<std::uint8_t>(code));
  append(bytes, static_cast<std::uint64_t>(num_sequences));
  append(bytes, static_cast<std::uint64_t>(num_documents + 1));
  return bytes;
}

namespace {

constexpr std::string_view kNpyMagic = "\x93NUMPY";

// "(2, 56, 3)", "(3,)", "()": a tuple of Python; nothing if it is not one, or has more than NumPy's
// 64 dimensions.
std::optional<std::vector<std::int64_t>> parse_shape(std::string_view text) {
  std::vector<std::int64_t> sizes;
  if (!text.starts_with('(')) return std::nullopt;
  text.remove_prefix(1);
  while (!text.starts_with(')')) {
    std::int64_t size = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
    if (error != std::errc() || size < 0 || sizes.size() == 64) return std::nullopt;
    sizes.push_back(size);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (text.starts_with(','))
      text.remove_prefix(1);
    else if (!text.starts_with(')'))
      return std::nullopt;
    while (text.starts_with(' ')) text.remove_prefix(1);
  }
  return sizes;
}

// Without its mask a chat would be trained on as a whole.
void check_has_no_mask(const std::string& prefix) {
  const std::string path = prefix + ".moesh.json";
  if (!exists(path)) return;
  for (const ManifestFile& file : parse_manifest(read_file(path, ErrorKind::data), path).files)
    MOESH_CHECK(!file.name.ends_with(".mask"), ErrorKind::data, prefix,
                ".mask is missing: it says which tokens are trained on, and ", path,
                " lists it; copy it from where ", prefix,
                ".bin is from, or tokenize again. To train on every token, remove ", path,
                " as well");
}

std::string shape_text(std::span<const std::int64_t> sizes) {
  std::string text = "(";
  for (const auto n : sizes) text += detail::concat(n, sizes.size() == 1 ? "," : ", ");
  if (sizes.size() > 1) text.resize(text.size() - 2);
  return text + ")";
}

}  // namespace

NpyHeader parse_npy(std::string_view bytes, const std::string& name) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  MOESH_CHECK(bytes.size() >= 12 && bytes.starts_with(kNpyMagic) && byte(6) >= 1 && byte(6) <= 3,
              ErrorKind::data, name, " is not an .npy file of version 1 to 3");
  const bool is_long = byte(6) > 1;
  const std::size_t length =
      is_long ? load<std::uint32_t>(bytes.substr(8), 0) : load<std::uint16_t>(bytes.substr(8), 0);
  const std::size_t start = (is_long ? 12 : 10) + length;
  MOESH_CHECK(start <= bytes.size(), ErrorKind::data, name, " is cut off in its header");
  const std::string_view header = bytes.substr(start - length, length);
  const auto quoted = [](std::string_view text) {
    if (text.empty() || (text[0] != '\'' && text[0] != '"')) return std::string_view();
    return text.substr(1, text.find(text[0], 1) - 1);
  };
  const std::string_view descr = quoted(value_behind(header, "'descr':"));
  const auto type = find_type(&IdTypeRow::npy, descr);
  MOESH_CHECK(type, ErrorKind::data, name, " has values of type ", shown(descr),
              "; it takes integers, little-endian: numpy.asarray(ids, '<i4')");
  const auto sizes = parse_shape(value_behind(header, "'shape':"));
  MOESH_CHECK(sizes, ErrorKind::data, name, " has no shape in its header: it is damaged");
  MOESH_CHECK(sizes->size() < 2 || !value_behind(header, "'fortran_order':").starts_with("True"),
              ErrorKind::data, name,
              " has its first dimension innermost; save numpy.ascontiguousarray of it");
  // Sizes that fit into a file cannot overflow their product.
  const std::size_t item = size_of(*type), num_bytes = bytes.size() - start;
  std::uint64_t count = 1;
  for (const std::int64_t n : *sizes)
    count = n != 0 && count > num_bytes / static_cast<std::uint64_t>(n)
                ? num_bytes + 1
                : count * static_cast<std::uint64_t>(n);
  MOESH_CHECK(num_bytes % item == 0 && num_bytes / item == count, ErrorKind::data, name, " has ",
              num_bytes, " bytes of values, and its header says ", shape_text(*sizes), " of ", item,
              " bytes: it is cut off, or damaged");
  return {*type, *sizes, start};
}

std::string npy_header(IdType type, std::span<const std::int64_t> sizes) {
  std::string text =
      detail::concat("{'descr': '", row_of(type).npy,
                     "', 'fortran_order': False, 'shape': ", shape_text(sizes), ", }");
  // With the ten bytes before the text and the end of its line, a multiple of 64.
  constexpr std::size_t kBefore = 10, kMultiple = 64;
  text.append(kMultiple - 1 - (kBefore + text.size()) % kMultiple, ' ');
  text += '\n';
  std::string bytes(kNpyMagic);
  append(bytes, std::uint8_t{1});
  append(bytes, std::uint8_t{0});
  append(bytes, static_cast<std::uint16_t>(text.size()));
  return bytes + text;
}

void TokenFile::take(std::shared_ptr<const InputFile> file, std::uint64_t begin) {
  const std::uint64_t item = size_of(type_), size = file->size() - begin;
  MOESH_CHECK(size % item == 0, ErrorKind::data, name_, " has ", size,
              " bytes, which are not whole ids of ", item,
              " bytes: it is of another kind, or cut off");
  file_ = std::move(file);
  begin_ = begin;
  num_tokens_ = static_cast<std::int64_t>(size / item);
}

TokenFile TokenFile::open_indexed(const std::string& path) {
  std::string prefix = path;
  for (const std::string_view ending : {".bin", ".idx"})
    if (path.ends_with(ending)) prefix = path.substr(0, path.size() - ending.size());
  auto index_file = std::make_shared<const MappedFile>(prefix + ".idx");
  auto file = std::make_shared<const InputFile>(prefix + ".bin");
  const TokenIndex index = parse_token_index(index_file->bytes(), file->size(), prefix + ".idx");
  TokenFile tokens(prefix + ".bin", index.type);
  tokens.index_file_ = std::move(index_file);
  tokens.index_ = index;
  tokens.take(std::move(file), 0);
  if (const std::string mask = prefix + ".mask"; exists(mask)) {
    tokens.mask_ = std::make_shared<const InputFile>(mask);
    MOESH_CHECK(std::cmp_equal(tokens.mask_->size(), tokens.num_tokens_), ErrorKind::data, mask,
                " has ", tokens.mask_->size(), " bytes, and ", tokens.name_, " has ",
                tokens.num_tokens_, " tokens: it takes a byte for each; tokenize again");
  } else {
    check_has_no_mask(prefix);
  }
  return tokens;
}

TokenFile TokenFile::open_npy(const std::string& path) {
  const NpyHeader header = parse_npy(MappedFile(path).bytes(), path);
  MOESH_CHECK(header.sizes.size() == 1, ErrorKind::data, path,
              " does not have one dimension; save ids.reshape(-1)");
  TokenFile tokens(path, header.type);
  tokens.take(std::make_shared<const InputFile>(path), header.data_start);
  return tokens;
}

TokenFile TokenFile::open_flat(const std::string& path, IdType type) {
  TokenFile tokens(path, type);
  tokens.take(std::make_shared<const InputFile>(path), 0);
  return tokens;
}

std::int64_t TokenFile::start(std::int64_t document) const {
  if (!has_index()) return 0;
  const std::int64_t sequence = index_.first_sequence(document);
  if (sequence == index_.num_sequences)
    return num_tokens_;  // documents without a sequence, at last
  return index_.offset(sequence) / static_cast<std::int64_t>(size_of(type_));
}

void TokenFile::check_range(std::int64_t begin, std::int64_t count) const {
  MOESH_CHECK(begin >= 0 && begin <= num_tokens_ && count <= num_tokens_ - begin, "tokens ", begin,
              " to ", begin + count, " of ", name_, " with ", num_tokens_);
}

void TokenFile::copy_mask(std::int64_t begin, std::span<std::uint8_t> to) const {
  check_range(begin, std::ssize(to));
  mask_->read(static_cast<std::uint64_t>(begin), std::as_writable_bytes(to));
  const auto wrong = std::find_if(to.begin(), to.end(), [](std::uint8_t byte) { return byte > 1; });
  MOESH_CHECK(wrong == to.end(), ErrorKind::data, name_, ": byte ", begin + (wrong - to.begin()),
              " of its .mask is ", int{*wrong},
              "; it takes 1 for a token to predict and 0 for one that is only read");
}

void TokenFile::copy(std::int64_t begin, std::int64_t vocab_size,
                     std::span<std::int32_t> to) const {
  check_range(begin, std::ssize(to));
  with_type(type_, [&](auto type) {
    using T = decltype(type);
    std::vector<T> ids(to.size());
    file_->read(begin_ + static_cast<std::uint64_t>(begin) * sizeof(T),
                std::as_writable_bytes(std::span(ids)));
    for (std::size_t i = 0; i < to.size(); ++i) {
      const T id = ids[i];
      MOESH_CHECK(std::cmp_greater_equal(id, 0) && std::cmp_less(id, vocab_size), ErrorKind::data,
                  name_, ": token ", begin + static_cast<std::int64_t>(i), " has the id ", +id,
                  ", and the vocabulary of the model has ", vocab_size,
                  "; was it written with another tokenizer, or is data.kind not ", to_string(type_),
                  "?");
      to[i] = static_cast<std::int32_t>(id);
    }
  });
}

}  // namespace moesh::formats
