#include "moesh/spmd/rows.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/spmd/tensor.h"

namespace moesh::raw {
namespace {

// From this on, copying rows into a message and out of it takes longer than another message does.
constexpr std::int64_t kWideRow = 1024;

std::int64_t row_bytes(const at::Tensor& x) {
  std::int64_t n = x.element_size();
  for (auto size : x.sizes().slice(1)) n *= size;
  return n;
}

// The widest words of which each part has a whole number a row: copies move words, and groups know
// these dtypes.
at::ScalarType word_type(const std::vector<at::Tensor>& parts) {
  std::int64_t bytes = 8;
  for (const auto& p : parts) bytes = std::gcd(bytes, row_bytes(p));
  MOESH_CHECK(bytes >= 2, "rows of ", parts.size(), " tensors in one message: one of them has ",
              bytes, " byte in a row, and words have 2, 4 or 8");
  return bytes == 8 ? at::kLong : bytes == 4 ? at::kInt : at::kBFloat16;
}

}  // namespace

at::Tensor pack_rows(const std::vector<at::Tensor>& parts) {
  if (parts.size() == 1) return parts[0];
  const auto word = word_type(parts);
  const auto width = static_cast<std::int64_t>(c10::elementSize(word));
  std::vector<at::Tensor> columns;
  for (const auto& p : parts) {
    const std::int64_t n = row_bytes(p) / p.element_size();
    // Words want the strides of rows that lie side by side, and contiguous() leaves those of a
    // single row or column as they are.
    const at::Tensor rows = p.contiguous().as_strided({p.size(0), n}, {n, 1});
    const bool is_aligned = rows.storage_offset() * rows.element_size() % width == 0;
    columns.push_back((is_aligned ? rows : rows.clone()).view(word));
  }
  return at::cat(columns, 1);
}

std::vector<at::Tensor> unpack_rows(const at::Tensor& packed, const std::vector<at::Tensor>& like) {
  if (like.size() == 1) return {packed};
  std::vector<at::Tensor> parts;
  std::int64_t first = 0;
  for (const auto& l : like) {
    const std::int64_t width = row_bytes(l) / packed.element_size();
    auto shape = l.sizes().vec();
    shape[0] = packed.size(0);
    parts.push_back(packed.narrow(1, first, width)
                        .clone(at::MemoryFormat::Contiguous)
                        .view(l.scalar_type())
                        .view(shape));
    first += width;
  }
  return parts;
}

std::vector<at::Tensor> no_rows_of(const std::vector<at::Tensor>& parts) {
  std::vector<at::Tensor> none;
  for (const auto& p : parts) {
    auto shape = p.sizes().vec();
    shape[0] = 0;
    none.push_back(at::empty(shape, p.options()));
  }
  return none;
}

SentStep send_rows(comm::Group& group, const std::vector<at::Tensor>& parts,
                   const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv) {
  // Shared: `results` is a function that may be copied, and a message is awaited once.
  const auto wide = std::make_shared<std::vector<comm::Handle>>();
  std::vector<at::Tensor> narrow;
  std::vector<bool> is_wide;
  for (const auto& p : parts) {
    is_wide.push_back(parts.size() > 1 && row_bytes(p) >= kWideRow);
    if (is_wide.back())
      wide->push_back(group.start_all_to_all(p, send, recv));
    else
      narrow.push_back(p);
  }
  const auto join = [wide, is_wide](std::vector<at::Tensor> others) {
    std::vector<at::Tensor> all;
    auto next = wide->begin();
    auto other = others.begin();
    for (const bool alone : is_wide) all.push_back(alone ? next++->wait() : *other++);
    return all;
  };
  if (narrow.empty())
    return {comm::Handle(at::Tensor()), [join](const at::Tensor&) { return join({}); }};
  return {group.start_all_to_all(pack_rows(narrow), send, recv),
          [join, like = no_rows_of(narrow)](const at::Tensor& t) {
            return join(unpack_rows(t, like));
          }};
}

MaybeAdjointPair gather_together(Axes axes, const std::vector<std::int64_t>& rows) {
  const auto group = current_mesh().group(axes);
  if (group->size() == 1) return std::nullopt;
  const auto gather = [group, rows](const Tensors& parts) -> SentStep {
    return {group->start_all_gather(pack_rows(parts), rows),
            [like = no_rows_of(parts)](const at::Tensor& t) { return unpack_rows(t, like); }};
  };
  const auto sum = [group, rows](const Tensors& grads) -> SentStep {
    const std::int64_t mine = rows[static_cast<size_t>(group->rank())], n = group->size();
    return {group->start_all_to_all(pack_rows(grads), rows,
                                    std::vector<std::int64_t>(rows.size(), mine)),
            [like = no_rows_of(grads), mine, n](const at::Tensor& message) {
              Tensors sums;
              for (const auto& t : unpack_rows(message, like)) {
                at::Tensor sum = t.narrow(0, 0, mine)
                                     .to(wide_dtype(t.scalar_type()), false,
                                         /*copy=*/true);
                for (std::int64_t r = 1; r < n; ++r) sum += t.narrow(0, r * mine, mine);
                sums.push_back(sum.to(t.scalar_type()));
              }
              return sums;
            }};
  };
  return AdjointPair{.step = gather, .adjoint = sum, .sizes = {}};
}

at::Tensor stands_for(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty({1}, options).expand(sizes);
}

at::Tensor begin_coded(const at::Tensor& x) {
  return attach(x, stands_for(x.sizes(), x.options()), [](const at::Tensor& g) { return g; });
}

at::Tensor end_coded(const at::Tensor& place, const at::Tensor& rows) {
  return attach(place, rows, [](const at::Tensor& g) { return g; });
}

at::Tensor map_coded(const at::Tensor& place, std::int64_t num_rows,
                     std::function<at::Tensor(const at::Tensor&)> adjoint) {
  auto sizes = place.sizes().vec();
  sizes[0] = num_rows;
  return attach(place, stands_for(sizes, place.options()), std::move(adjoint));
}

at::Tensor with_coded_gradient(const at::Tensor& x, const Codec& codec) {
  if (!codec) return x;
  return attach(x, x.detach(), [codec](const at::Tensor& gradient) {
    return codec->decode(codec->encode(gradient), gradient);
  });
}

}  // namespace moesh::raw
