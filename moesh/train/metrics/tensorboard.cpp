#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <string>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/file.h"
#include "moesh/train/metrics/sink.h"

namespace moesh::train::event_file {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie");

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    table[byte] = crc;
  }
  return table;
}
constexpr auto kTable = make_table();

template <class T>
void put_bytes(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

// The encoding of protocol buffers: a key is the number of the field and the kind of its value.
enum WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}
void put_key(std::string& out, std::uint32_t field, WireType kind) {
  put_varint(out, field << 3 | kind);
}
void put_text(std::string& out, std::uint32_t field, std::string_view text) {
  put_key(out, field, kBytes);
  put_varint(out, text.size());
  out += text;
}

// Fields of Event: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
std::string event(double time, std::int64_t step) {
  std::string out;
  put_key(out, 1, kFixed64);
  put_bytes(out, time);
  put_key(out, 2, kVarint);
  put_varint(out, static_cast<std::uint64_t>(step));
  return out;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = 0xFFFFFFFFu;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF] ^ crc >> 8;
  return ~crc;
}

std::uint32_t masked(std::uint32_t crc) { return (crc >> 15 | crc << 17) + 0xA282EAD8u; }

std::string record(std::string_view data) {
  std::string out;
  put_bytes(out, std::uint64_t{data.size()});
  put_bytes(out, masked(crc32c(out)));
  out += data;
  put_bytes(out, masked(crc32c(data)));
  return out;
}

std::string version_event(double time) {
  std::string out = event(time, 0);
  put_text(out, 3, "brain.Event:2");
  return out;
}

std::string restart_event(double time, std::int64_t step) {
  std::string out = event(time, step), log;
  put_key(log, 1, kVarint);
  put_varint(log, 1);  // SessionLog.START
  put_text(out, 7, log);
  return out;
}

std::string scalars_event(double time, std::int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, number] : scalars) {
    std::string value;  // of Summary.Value: tag 1, simple_value 2
    put_text(value, 1, tag);
    put_key(value, 2, kFixed32);
    put_bytes(value, static_cast<float>(number));
    put_text(summary, 1, value);
  }
  std::string out = event(time, step);
  put_text(out, 5, summary);
  return out;
}

}  // namespace moesh::train::event_file

namespace moesh::train {

using namespace event_file;

TensorBoardSink::TensorBoardSink(const std::filesystem::path& folder, std::int64_t first_step)
    : folder_(folder / "tensorboard") {
  checkpoint::make_folders(folder_);
  begin(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(),
        first_step);
}

// TensorBoard reads the files in the order of their names, which begin with the time.
void TensorBoardSink::begin(double time, std::int64_t first_step) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  file_ =
      AppendFile(folder_ / detail::concat("events.out.tfevents.", static_cast<std::int64_t>(time),
                                          ".", host, ".", getpid(), ".", num_files_++));
  std::string bytes = record(version_event(time));
  if (first_step > 0) bytes += record(restart_event(time, first_step + 1));
  is_broken_ = !file_.write(bytes, first_step);
}

void TensorBoardSink::write(const StepRecord& r) {
  if (is_broken_) {
    try {
      begin(r.time, r.step - 1);
    } catch (const Error&) {
      return;  // it was reported
    }
  }
  if (!is_broken_)
    is_broken_ = !file_.write(record(scalars_event(r.time, r.step, scalars_of(r))), r.step);
}

}  // namespace moesh::train
