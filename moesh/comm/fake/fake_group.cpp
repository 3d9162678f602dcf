#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"
#include "moesh/comm/launch.h"

namespace moesh::comm {
namespace {

// Holds its input until it is waited for, as every backend must: an estimate counts it.
class Ready final : public Work {
 public:
  Ready(at::Tensor x, at::Tensor value) : x_(std::move(x)), value_(std::move(value)) {}
  at::Tensor wait() override {
    x_.reset();
    return value_;
  }

 private:
  at::Tensor x_, value_;
};

// What arrives. On meta it has no values, and no kernel of the device writes it.
at::Tensor result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_meta() ? at::empty(sizes, options) : at::zeros(sizes, options);
}

class FakeGroup final : public Group {
 public:
  FakeGroup(std::string name, int rank, std::vector<int> members)
      : Group(std::move(name), rank, std::move(members)) {}

 private:
  std::unique_ptr<Work> do_all_reduce(const at::Tensor& x, ReduceOp) override {
    return std::make_unique<Ready>(x, result(x.sizes(), x.options()));
  }
  std::unique_ptr<Work> do_all_gather(const at::Tensor& x, const Rows& rows) override {
    if (x.is_meta()) return with_rows(x, total(rows));
    MOESH_CHECK(std::all_of(rows.begin(), rows.end(), [&](auto n) { return n == x.size(0); }),
                "a fake gather of host values with uneven rows ", rows);
    std::vector<std::int64_t> repeats(static_cast<size_t>(x.dim()), 1);
    repeats[0] = size();
    return std::make_unique<Ready>(x, x.repeat(repeats));
  }
  std::unique_ptr<Work> do_reduce_scatter(const at::Tensor& x, const Rows& rows,
                                          ReduceOp) override {
    return with_rows(x, rows[static_cast<size_t>(rank())]);
  }
  std::unique_ptr<Work> do_all_to_all(const at::Tensor& x, const Rows& /*to*/,
                                      const Rows& from) override {
    return with_rows(x, total(from));
  }
  std::unique_ptr<Work> do_broadcast(const at::Tensor& x, int /*root*/) override {
    return std::make_unique<Ready>(x, result(x.sizes(), x.options()));
  }
  std::unique_ptr<Work> do_send(const at::Tensor& x, const Message&) override {
    return std::make_unique<Ready>(x, x);
  }
  std::unique_ptr<Work> do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                const Message&) override {
    return std::make_unique<Ready>(at::Tensor(), result(sizes, options));
  }
  void do_barrier() override {}
  std::shared_ptr<Group> do_split(const std::vector<int>&, int, int, const std::string&) override {
    throw Error(ErrorKind::internal,
                "a fake group was asked to split: the other ranks cannot say where they go");
  }

  static std::unique_ptr<Work> with_rows(const at::Tensor& like, std::int64_t rows) {
    return std::make_unique<Ready>(like, result(sizes_with(like, rows), like.options()));
  }
};

}  // namespace

std::shared_ptr<Group> fake_group(const std::string& name, int rank,
                                  const std::vector<int>& members) {
  return std::make_shared<FakeGroup>(name, rank, members);
}

}  // namespace moesh::comm
