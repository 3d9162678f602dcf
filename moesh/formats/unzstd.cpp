#include <zstd.h>

#include <utility>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/formats/byte_source.h"

namespace moesh::formats {
namespace {

class Unzstd : public ByteSource {
 public:
  Unzstd(std::unique_ptr<ByteSource> from, std::string name)
      : from_(std::move(from)), name_(std::move(name)), packed_(ZSTD_DStreamInSize()) {
    MOESH_CHECK(stream_ != nullptr, "zstd does not start");
  }
  ~Unzstd() override { ZSTD_freeDStream(stream_); }
  Unzstd(const Unzstd&) = delete;
  Unzstd& operator=(const Unzstd&) = delete;

  std::size_t read(char* to, std::size_t count) override {
    ZSTD_outBuffer out{to, count, 0};
    while (out.pos == 0) {
      if (in_.pos == in_.size && !has_more_) {
        in_ = {packed_.data(), from_->read(packed_.data(), packed_.size()), 0};
        if (in_.size == 0) {
          MOESH_CHECK(at_border_, ErrorKind::data, name_, " is cut off: its zstd data has no end");
          return 0;
        }
      }
      const std::size_t result = ZSTD_decompressStream(stream_, &out, &in_);
      MOESH_CHECK(!ZSTD_isError(result), ErrorKind::data, name_,
                  " is not zstd, or damaged near byte ", from_->position(), ": ",
                  ZSTD_getErrorName(result));
      at_border_ = result == 0;  // a file may be several frames, one behind the other
      has_more_ = out.pos == count && !at_border_;
    }
    return out.pos;
  }
  std::uint64_t position() const override { return from_->position(); }

 private:
  std::unique_ptr<ByteSource> from_;
  std::string name_;
  std::vector<char> packed_;
  ZSTD_DStream* stream_ = ZSTD_createDStream();
  ZSTD_inBuffer in_{nullptr, 0, 0};
  bool at_border_ = true;
  bool has_more_ = false;  // that did not fit into what was asked for
};

}  // namespace

std::unique_ptr<ByteSource> unzstd(std::unique_ptr<ByteSource> from, const std::string& name) {
  return std::make_unique<Unzstd>(std::move(from), name);
}

}  // namespace moesh::formats
