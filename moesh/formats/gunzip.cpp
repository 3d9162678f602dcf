#define ZLIB_CONST
#include <zlib.h>

#include <utility>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/formats/byte_source.h"

namespace moesh::formats {
namespace {

class Gunzipped : public ByteSource {
 public:
  Gunzipped(std::unique_ptr<ByteSource> from, std::string name)
      : from_(std::move(from)), name_(std::move(name)), packed_(std::size_t{1} << 18) {
    constexpr int kGzipOrZlib = 15 + 32;
    MOESH_CHECK(inflateInit2(&stream_, kGzipOrZlib) == Z_OK, "zlib does not start");
  }
  ~Gunzipped() override { inflateEnd(&stream_); }
  Gunzipped(const Gunzipped&) = delete;
  Gunzipped& operator=(const Gunzipped&) = delete;

  std::size_t read(char* to, std::size_t count) override {
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(count);
    while (stream_.avail_out == count) {
      if (stream_.avail_in == 0) {
        stream_.avail_in = static_cast<uInt>(from_->read(packed_.data(), packed_.size()));
        stream_.next_in = reinterpret_cast<const Bytef*>(packed_.data());
        if (stream_.avail_in == 0) {
          MOESH_CHECK(at_border_, ErrorKind::data, name_, " is cut off: its gzip data has no end");
          return 0;
        }
      }
      // A file may be several streams, one behind the other.
      if (at_border_ && any_) inflateReset(&stream_);
      at_border_ = false, any_ = true;
      const int result = inflate(&stream_, Z_NO_FLUSH);
      MOESH_CHECK(result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR,
                  ErrorKind::data, name_, " is not gzip, or damaged at byte ",
                  from_->position() - stream_.avail_in, ": ",
                  stream_.msg ? stream_.msg : "no reason given");
      at_border_ = result == Z_STREAM_END;
    }
    return count - stream_.avail_out;
  }
  std::uint64_t position() const override { return from_->position(); }

 private:
  std::unique_ptr<ByteSource> from_;
  std::string name_;
  std::vector<char> packed_;
  z_stream stream_{};
  bool at_border_ = true, any_ = false;  // an empty file has no stream
};

}  // namespace

std::unique_ptr<ByteSource> gunzipped(std::unique_ptr<ByteSource> from, const std::string& name) {
  return std::make_unique<Gunzipped>(std::move(from), name);
}

}  // namespace moesh::formats
