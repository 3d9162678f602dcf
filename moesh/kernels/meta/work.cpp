#include "moesh/kernels/meta/work.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace moesh::kernels::meta {
namespace {

WorkLedger& ledger() {
  static WorkLedger all;  // of the one dry run that lives
  return all;
}

// Rows of an expert come in slabs of 64: on average half of the last one is not there.
constexpr double kHalfSlab = 32;
// dh reads gate and up, and writes them and the hidden state, in its epilogue, which the tensor
// cores wait for: bytes count more there (bench/results/step_parts_h200.md).
constexpr double kEpilogueBytes = 1.3;
constexpr double kSize = 2;  // of a bfloat16

}  // namespace

void note_work(const KernelWork& work) { ledger()[work] += 1; }
WorkLedger take_work() { return std::exchange(ledger(), {}); }

void note_pass(std::initializer_list<at::Tensor> tensors) {
  double bytes = 0;
  for (const at::Tensor& t : tensors)
    if (t.defined()) bytes += static_cast<double>(t.nbytes());
  note_work({WorkKind::pass, 0, bytes});
}

ExpertsWork work_of_experts(std::int64_t num_rows, const at::Tensor& w1_eFD,
                            std::int64_t num_tokens) {
  const auto R = static_cast<double>(num_rows), e = static_cast<double>(w1_eFD.size(0)),
             F = static_cast<double>(w1_eFD.size(1)), D = static_cast<double>(w1_eFD.size(2));
  // A product of all rows with `num` of the three matrices of an expert; `numbers` is what else it
  // reads and writes.
  const auto product = [&](double num, double numbers) {
    return KernelWork{WorkKind::experts, 2 * num * R * D * F, kSize * (numbers + num * e * D * F),
                      2 * num * kHalfSlab * e * D * F};
  };
  ExpertsWork work{
      .up = product(2, R * D + 3 * R * F),  // x; gate, up, hidden
      .down = product(1, R * F + R * D),
      .dh = product(1, kEpilogueBytes * (R * D + 5 * R * F)),  // dy; gate, up twice; hidden
      .dx = product(2, 2 * R * F + R * D),
      .dw2 = product(1, R * F + R * D),
      .dw13 = product(2, 2 * R * F + R * D),
      .move = {WorkKind::rows, 0, 2 * kSize * R * D}};
  if (num_tokens == 0) return work;
  // Codes and weights are of one byte.
  const auto float8 = [&](double num, double codes, double numbers) {
    return KernelWork{WorkKind::float8_experts, 2 * num * R * D * F,
                      codes + num * e * D * F + kSize * numbers, 2 * num * kHalfSlab * e * D * F};
  };
  work.up = float8(2, R * D, 2 * R * F), work.down = float8(1, R * F, R * D);
  work.dh = float8(1, R * D, R * F), work.dx = float8(2, 2 * R * F, R * D);
  // A token is read from memory once, for all of its experts.
  const double tokens = kSize * static_cast<double>(num_tokens) * D;
  work.move.bytes = tokens + kSize * R * D;
  const auto pass = [](WorkKind kind, double bytes) { return KernelWork{kind, 0, bytes}; };
  work.codes_of_x = pass(WorkKind::rows, tokens + R * D);
  work.codes_of_dy = pass(WorkKind::rows, tokens + R * D);
  work.write_rows = pass(WorkKind::rows, kSize * R * D);
  work.codes_of_hidden = pass(WorkKind::rows, 2 * kSize * R * F + R * F);
  work.codes_of_d_hidden = pass(WorkKind::rows, 6 * kSize * R * F + 2 * R * F);  // and the hidden
  work.codes_of_weights = pass(WorkKind::large_pass, (kSize + 1) * 3 * e * D * F);
  return work;
}

double num_scores(const AttentionShape& s) {
  if (s.has_mask) return s.num_queries * s.num_keys;
  const double before = s.num_keys - s.num_queries;  // keys that the first query has behind it
  const double all = s.num_queries * before + s.num_queries * (s.num_queries + 1) / 2;
  if (s.window == 0 || s.window >= s.num_keys) return all;
  // The first queries see fewer.
  const double short_of = std::max(0.0, s.window - 1 - before);
  return s.num_queries * s.window - std::min(short_of, s.num_queries) * (short_of + 1) / 2;
}

void note_attention(const AttentionShape& s, bool is_backward) {
  const double scores = s.batch * s.num_heads * num_scores(s), both = s.width + s.value_width,
               q = s.batch * s.num_queries * s.num_heads, k = s.batch * s.num_keys * s.num_groups,
               k_of_heads = s.batch * s.num_keys * s.num_heads;
  const bool has_window = s.window > 0 && s.window <= 128;
  const WorkKind kind = s.has_mask                               ? WorkKind::masked_attention
                        : has_window                             ? WorkKind::window_attention
                        : std::max(s.width, s.value_width) <= 64 ? WorkKind::narrow_attention
                                                                 : WorkKind::attention;
  if (!is_backward) {
    note_work({kind, 2 * scores * both, kSize * (q + k) * both});
    return;
  }
  // Scores once more, d(probabilities), d(v), d(q) and d(k). d(q) is summed in float32, and d(k)
  // and d(v) of the query heads of a group afterwards.
  const double of_groups = s.num_heads == s.num_groups ? 0 : 2 * kSize * k_of_heads * both;
  note_work({kind, scores * (6 * s.width + 4 * s.value_width),
             kSize * (q * (2 * s.width + 2 * s.value_width) + 2 * k * both) + 8 * q * s.width +
                 of_groups});
}

namespace {

// RecordFunction::inputs() asserts what a LibTorch that was built without assertions never sets, so
// the member itself is read: an explicit instantiation may name it.
c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& f);
template <auto member>
struct Inputs {
  friend c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& f) {
    return f.*member;
  }
};
template struct Inputs<&at::RecordFunction::inputs_>;

// What an operation is to the watch.
enum class Role { none, product, sum_of_product, attention, attention_backward, pass, overwrite };

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Views, and what only calls others, do nothing themselves; neither does what makes memory.
Role role_of(const c10::OperatorHandle& op) {
  const std::string& full = op.schema().name();
  if (!full.starts_with("aten::")) return Role::none;
  const std::string_view name = std::string_view(full).substr(6);
  if (is_one_of(name, {"mm", "bmm"})) return Role::product;
  if (is_one_of(name, {"addmm", "addmm_", "baddbmm", "baddbmm_"})) return Role::sum_of_product;
  if (name == "_scaled_dot_product_flash_attention_for_cpu") return Role::attention;
  if (name == "_scaled_dot_product_flash_attention_for_cpu_backward")
    return Role::attention_backward;
  const auto& returns = op.schema().returns();
  const bool is_view =
      !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  if (is_view || name.find("empty") != std::string_view::npos ||
      is_one_of(name, {"_local_scalar_dense", "item", "detach", "set_", "resize_", "_unsafe_view",
                       "_reshape_alias", "is_same_size", "_version", "size", "stride"}) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return Role::none;
  return is_one_of(name, {"copy_", "zero_", "fill_"}) ? Role::overwrite : Role::pass;
}

double bytes_of(const c10::IValue& value) {
  const auto bytes = [](const at::Tensor& t) {
    if (!t.defined() || !t.is_meta()) return 0.0;
    // A number that is expanded is read once.
    const auto most = t.has_storage() ? static_cast<double>(t.storage().nbytes()) : 0.0;
    return std::min(static_cast<double>(t.nbytes()), most);
  };
  if (value.isTensor()) return bytes(value.toTensor());
  double sum = 0;
  if (value.isTensorList())
    for (const at::Tensor& t : value.toTensorVector()) sum += bytes(t);
  return sum;
}

struct Running : at::ObserverContext {
  Role role = Role::none;
  double flops = 0, bytes = 0;
  bool has_children = false;  // that are no views
};

// LibTorch calls the callbacks with nothing of ours, in the thread of the operation.
struct Watched {
  std::vector<Running*> running;                // now, from the outermost on
  std::unordered_map<std::string, Role> known;  // by the names of operations
};
Watched& watched() {
  static thread_local Watched mine;
  return mine;
}

double extent(const at::Tensor& t, std::int64_t dim) { return static_cast<double>(t.size(dim)); }

double flops_of_product(const at::Tensor& a, const at::Tensor& b) {
  const double batch = a.dim() == 3 ? extent(a, 0) : 1;
  return 2 * batch * extent(a, -2) * extent(a, -1) * extent(b, -1);
}

void note_fused_attention(c10::ArrayRef<const c10::IValue> in, bool is_backward) {
  const std::size_t first = is_backward ? 1 : 0;
  const at::Tensor &q = in[first].toTensor(), &k = in[first + 1].toTensor(),
                   &v = in[first + 2].toTensor();
  const c10::IValue& mask = in[is_backward ? 8 : 5];
  note_attention({.batch = extent(q, 0),
                  .num_queries = extent(q, 2),
                  .num_keys = extent(k, 2),
                  .num_heads = extent(q, 1),
                  .num_groups = extent(k, 1),
                  .width = extent(q, 3),
                  .value_width = extent(v, 3),
                  .has_mask = mask.isTensor() && mask.toTensor().defined()},
                 is_backward);
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& f) {
  auto& known = watched().known;
  auto context = std::make_unique<Running>();
  const auto op = f.operator_name();
  if (op) {
    std::string key = op->name + "." + op->overload_name;
    const auto found = known.find(key);
    if (found != known.end()) {
      context->role = found->second;
    } else if (const auto handle = c10::Dispatcher::singleton().findSchema(*op)) {
      context->role = known[std::move(key)] = role_of(*handle);
    }
  }
  watched().running.push_back(context.get());
  if (context->role == Role::none) return context;
  const auto in = inputs_of(f);
  const std::size_t skipped = context->role == Role::overwrite ? 1 : 0;
  for (std::size_t i = skipped; i < in.size(); ++i) context->bytes += bytes_of(in[i]);
  if (context->role == Role::product || context->role == Role::sum_of_product) {
    const std::size_t first = context->role == Role::product ? 0 : 1;
    context->flops = flops_of_product(in[first].toTensor(), in[first + 1].toTensor());
  }
  if (context->role == Role::attention || context->role == Role::attention_backward)
    note_fused_attention(in, context->role == Role::attention_backward);
  return context;
}

void end(const at::RecordFunction& f, at::ObserverContext* context) {
  const auto& self = *static_cast<Running*>(context);
  watched().running.pop_back();
  const bool counts = self.role != Role::none;
  if (!watched().running.empty() && (counts || self.has_children))
    watched().running.back()->has_children = true;
  if (!counts || self.role == Role::attention || self.role == Role::attention_backward) return;
  double bytes = self.bytes;
  for (const auto& out : f.outputs()) bytes += bytes_of(out);
  if (self.flops > 0)
    note_work({WorkKind::dense, self.flops, bytes});
  else if (!self.has_children && bytes > 0)
    note_work({WorkKind::pass, 0, bytes});
}

}  // namespace

OperationWatch::OperationWatch()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {}
OperationWatch::~OperationWatch() { at::removeCallback(handle_); }

}  // namespace moesh::kernels::meta
