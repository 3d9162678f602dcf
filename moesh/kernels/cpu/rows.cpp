#include <ATen/ops/empty.h>

#include <cstring>

#include "moesh/base/error.h"
#include "moesh/kernels/cpu/simd.h"
#include "moesh/kernels/cpu/tasks.h"

namespace moesh::kernels::cpu {
namespace {

constexpr std::int64_t kGrainBytes = 1 << 16;  // less is not worth starting a thread for

std::vector<std::int64_t> with_rows(const at::Tensor& x, std::int64_t num_rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = num_rows;
  return sizes;
}

// All indices are checked before one of them is used.
void check_index(const char* name, const at::Tensor& index, std::int64_t num_rows) {
  const auto* p = index.const_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < index.numel(); ++i) {
    MOESH_CHECK(p[i] >= -1 && p[i] < num_rows, ErrorKind::data, name, " holds ", p[i], " at ", i,
                "; there are ", num_rows, " rows (-1 means none)");
  }
}

template <class T>
void combine_typed(const at::Tensor& rows, const at::Tensor& inverse_TK, at::Tensor& out) {
  const std::int64_t columns = rows.dim() == 2 ? rows.size(1) : 1, k = inverse_TK.size(1);
  const auto* from = static_cast<const T*>(rows.const_data_ptr());
  const auto* inverse = inverse_TK.const_data_ptr<std::int32_t>();
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  const auto& ops = simd_ops<T>();
  const std::int64_t row_bytes =
      std::max<std::int64_t>(1, k * columns * static_cast<std::int64_t>(sizeof(T)));
  run_ranges(inverse_TK.size(0), std::max<std::int64_t>(1, kGrainBytes / row_bytes),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t t = begin; t < end; ++t)
                 ops.combine(from, columns, inverse + t * k, k, columns, to + t * columns);
             });
}

}  // namespace

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  check_index("index_R", index_R, x.size(0));
  at::Tensor out = at::empty(with_rows(x, index_R.numel()), x.options());
  const auto bytes = static_cast<std::int64_t>((x.dim() == 2 ? x.size(1) : 1) * x.itemsize());
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto* index = index_R.const_data_ptr<std::int32_t>();
  run_ranges(index_R.numel(),
             std::max<std::int64_t>(1, kGrainBytes / std::max<std::int64_t>(1, bytes)),
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t i = begin; i < end; ++i) {
                 if (index[i] >= 0)
                   std::memcpy(to + i * bytes, from + index[i] * bytes, static_cast<size_t>(bytes));
                 else
                   std::memset(to + i * bytes, 0, static_cast<size_t>(bytes));
               }
             });
  return out;
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  check_index("inverse_TK", inverse_TK, rows_RD.size(0));
  at::Tensor out = at::empty(with_rows(rows_RD, inverse_TK.size(0)), rows_RD.options());
  switch (rows_RD.scalar_type()) {
    case at::kDouble: combine_typed<double>(rows_RD, inverse_TK, out); break;
    case at::kFloat: combine_typed<float>(rows_RD, inverse_TK, out); break;
    default: combine_typed<Bf16>(rows_RD, inverse_TK, out); break;
  }
  return out;
}

}  // namespace moesh::kernels::cpu
